"""Where k = 0 wins: the best fixed k over a grid of contexts and batches, from recorded acceptance and measured costs.

Acceptance is taken as the record shows it, whatever the context: the grid says where costs turn, not where text does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from specdial.policies.schema import Policy, policy_from_mapping
from specdial.simulator.costs import CostModel, CostRefusedError
from specdial.simulator.lanes import Record
from specdial.simulator.outcome import bootstrap_interval
from specdial.simulator.pricing import Setting, tabulate
from specdial.simulator.replay import replay_rounds
from specdial.simulator.support import Level, support

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Corner:
    """The best fixed k at one (context, batch); 0 is plain decoding. drafter: its label in cost tables.

    extrapolated: some cost lies outside the table. level: exact for a single sequence at a recorded context; elsewhere
    acceptance is the record's, and members of a batch are taken to end together. low, high: 95 % interval of speedup
    over documents, None for plain decoding and for a single document.
    """

    context_tokens: int
    batch: int
    k: int
    drafter: str
    budget: int
    speedup: float
    extrapolated: bool
    level: Level
    low: float | None = None
    high: float | None = None
    arm: int = 0  # recorded arm, 0 for plain decoding


@dataclass(frozen=True, slots=True)
class Kept:
    """What a fixed k on one arm kept: tokens and rounds of each document, [D]."""

    emitted: Floats
    rounds: Floats
    level: Level

    @property
    def tokens_per_round(self) -> float:
        return float(self.emitted.sum() / self.rounds.sum())


def crossover_surface(
    record: Record,
    costs: CostModel,
    contexts: Sequence[int],
    batches: Sequence[int],
    split: str | None = None,
    *,
    bootstrap: int = 0,
    seed: int = 0,
) -> list[Corner]:
    """One Corner per (context, batch) where a fixed k is supported and its costs are known."""
    found = kept(record, split)
    corners = []
    for context in contexts:
        for batch in batches:
            corner = _corner(record, found, costs, context, batch)
            if corner is not None and corner.k and bootstrap:
                corner = _with_interval(corner, found, bootstrap, seed)
            if corner is not None:
                corners.append(corner)
    return corners


def kept(record: Record, split: str | None = None) -> dict[tuple[int, int], Kept]:
    """(arm, k) -> what a fixed k on that arm keeps, of those that the record supports."""
    found: dict[tuple[int, int], Kept] = {}
    for arm in range(len(record.arms)):
        policies = {k: _fixed(record, arm, k) for k in range(1, record.k_max + 1)}
        levels = {k: support(record, policy).level for k, policy in policies.items()}
        ks = [k for k, level in levels.items() if level != "refused"]
        for k, log in zip(ks, replay_rounds(record, [policies[k] for k in ks], split), strict=True):
            _, place = np.unique(log.doc, return_inverse=True)
            emitted = np.bincount(place, weights=log.emitted).astype(np.float64)
            rounds = np.bincount(place).astype(np.float64)
            found[arm, k] = Kept(emitted, rounds, levels[k])
    return found


def _fixed(record: Record, arm: int, k: int) -> Policy:
    named = record.arms[arm]
    return policy_from_mapping(
        {
            "controller": {"kind": "fixed", "k": k},
            "drafter": dict(named["drafter"]),
            "draft_kv": dict(named["draft_kv"]),
        }
    )


def _corner(
    record: Record, found: dict[tuple[int, int], Kept], costs: CostModel, context: int, batch: int
) -> Corner | None:
    try:
        plain_us, extrapolated = costs.at("plain", float(context), batch)
    except CostRefusedError:
        return None
    recorded = batch == 1 and record.documents.start.min() <= context <= record.documents.end.max()
    best = Corner(context, batch, 0, "none", 0, 1.0, extrapolated, "exact" if recorded else "modelled")
    priced = 0
    for arm in range(len(record.arms)):
        policy = _fixed(record, arm, record.k_max)
        setting = replace(Setting.of(policy, policy, context), whole_k=None)  # a price for each k, all of it drafted
        table = tabulate(costs, setting, batch, np.array([float(context)]))
        for k in range(1, record.k_max + 1):
            if (arm, k) not in found or table.refused[k, 0]:
                continue
            priced += 1
            speedup = found[arm, k].tokens_per_round * plain_us / float(table.cost_us[:, k, 0].sum())
            if speedup > best.speedup:
                extra = extrapolated or bool(table.extrapolated_us[:, k, 0].any())
                level = found[arm, k].level if recorded else "modelled"
                best = Corner(context, batch, k, setting.drafter, setting.budget, speedup, extra, level, arm=arm)
    return best if priced else None


def _with_interval(corner: Corner, found: dict[tuple[int, int], Kept], resamples: int, seed: int) -> Corner:
    """Costs are taken as known: what is resampled is documents."""
    mine = found[corner.arm, corner.k]
    if len(mine.rounds) < 2:
        return corner
    low, high = bootstrap_interval(mine.emitted, mine.rounds[None, :], resamples, seed)
    scale = corner.speedup / mine.tokens_per_round
    return replace(corner, low=float(low[0]) * scale, high=float(high[0]) * scale)
