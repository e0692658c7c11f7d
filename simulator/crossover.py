"""Where k = 0 wins: the best fixed k over a grid of contexts and batches, from recorded acceptance and measured costs.

Acceptance is taken as the record shows it, whatever the context: the grid says where costs turn, not where text does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specdial.policies.schema import Policy, policy_from_mapping
from specdial.simulator.costs import CostModel, CostRefusedError
from specdial.simulator.lanes import Record
from specdial.simulator.pricing import Setting, tabulate
from specdial.simulator.replay import replay_rounds


@dataclass(frozen=True, slots=True)
class Corner:
    """The best fixed k at one (context, batch); 0 is plain decoding. drafter: its label in cost tables.

    extrapolated: some cost lies outside the table.
    """

    context_tokens: int
    batch: int
    k: int
    drafter: str
    budget: int
    speedup: float
    extrapolated: bool


def crossover_surface(
    record: Record, costs: CostModel, contexts: Sequence[int], batches: Sequence[int], split: str | None = None
) -> list[Corner]:
    """One Corner per (context, batch) whose costs are known."""
    accepted = mean_accepted(record, split)
    corners = []
    for context in contexts:
        for batch in batches:
            corner = _corner(record, accepted, costs, context, batch)
            if corner is not None:
                corners.append(corner)
    return corners


def mean_accepted(record: Record, split: str | None = None) -> dict[tuple[int, int], float]:
    """(arm, k) -> mean accepted drafts of a fixed k on that arm."""
    found: dict[tuple[int, int], float] = {}
    for arm in range(len(record.arms)):
        policies = [_fixed(record, arm, k) for k in range(1, record.k_max + 1)]
        for k, log in enumerate(replay_rounds(record, policies, split), start=1):
            found[arm, k] = float(log.emitted.mean()) - 1.0
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
    record: Record, accepted: dict[tuple[int, int], float], costs: CostModel, context: int, batch: int
) -> Corner | None:
    try:
        plain_us, extrapolated = costs.at("plain", float(context), batch)
    except CostRefusedError:
        return None
    best = Corner(context, batch, 0, "none", 0, 1.0, extrapolated)
    priced = 0
    for arm in range(len(record.arms)):
        policy = _fixed(record, arm, record.k_max)
        setting = Setting.of(policy, policy, context)  # as at the start of decoding
        table = tabulate(costs, setting, batch, np.array([float(context)]))
        for k in range(1, record.k_max + 1):
            if table.refused[k, 0]:
                continue
            priced += 1
            speedup = (accepted[arm, k] + 1.0) * plain_us / float(table.cost_us[:, k, 0].sum())
            if speedup > best.speedup:
                extra = extrapolated or bool(table.extrapolated_us[:, k, 0].any())
                best = Corner(context, batch, k, setting.drafter, setting.budget, speedup, extra)
    return best if priced else None
