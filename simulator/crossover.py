"""Where k = 0 wins: the best fixed k over a grid of contexts and batches, from recorded acceptance and measured costs.

Acceptance is taken as the record shows it, whatever the context: the grid says where costs turn, not where text does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from specdial.policies.schema import policy_from_mapping
from specdial.simulator.costs import CostModel, CostRefusedError
from specdial.simulator.lanes import Record
from specdial.simulator.replay import replay_rounds


@dataclass(frozen=True, slots=True)
class Corner:
    """The best fixed k at one (context, batch); 0 is plain decoding. extrapolated: some cost lies outside the table."""

    context_tokens: int
    batch: int
    k: int
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
            corner = _corner(accepted, costs, context, batch)
            if corner is not None:
                corners.append(corner)
    return corners


def mean_accepted(record: Record, split: str | None = None) -> dict[tuple[int, int], float]:
    """(budget, k) -> mean accepted drafts of a fixed k on that arm; arms that share a budget keep the better."""
    found: dict[tuple[int, int], float] = {}
    for arm in record.arms:
        policies = [
            policy_from_mapping(
                {
                    "controller": {"kind": "fixed", "k": k},
                    "drafter": dict(arm["drafter"]),
                    "draft_kv": dict(arm["draft_kv"]),
                }
            )
            for k in range(1, record.k_max + 1)
        ]
        for k, log in enumerate(replay_rounds(record, policies, split), start=1):
            place = (int(arm["draft_kv"]["budget"]), k)
            found[place] = max(found.get(place, 0.0), float(log.emitted.mean()) - 1.0)
    return found


def _corner(accepted: dict[tuple[int, int], float], costs: CostModel, context: int, batch: int) -> Corner | None:
    try:
        plain_us, extrapolated = costs.at("plain", float(context), batch)
    except CostRefusedError:
        return None
    best = Corner(context, batch, 0, 0, 1.0, extrapolated)
    priced = 0
    for (budget, k), tokens in accepted.items():
        try:
            parts = [
                costs.at("draft", float(context), batch, k, budget),
                costs.at("verify", float(context), batch, k),
                costs.at("select", float(context), batch, k, budget),
                costs.at("host", float(context), batch, k),
            ]
        except CostRefusedError:
            continue
        priced += 1
        round_us = k * parts[0][0] + sum(value for value, _ in parts[1:])
        speedup = (tokens + 1.0) * plain_us / round_us
        if speedup > best.speedup:
            best = Corner(context, batch, k, budget, speedup, extrapolated or any(extra for _, extra in parts))
    return best if priced else None
