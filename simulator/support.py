"""What a record can say about a policy: exactly, by a model, or nothing, and why.

exact: greedy decoding, a lossless policy, its drafter and selection recorded, no draft longer than recorded; or the
very policy that was recorded. modelled: sampled decoding (acceptance drawn from recorded probabilities), a budget
between recorded ones, or another policy on a sparse trace.
refused: everything else; the reason names the setting.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from specdial.policies.fields import to_plain
from specdial.policies.file import policy_digest
from specdial.policies.schema import Policy
from specdial.simulator.imputation import can_impute
from specdial.simulator.lanes import Record

Level = Literal["exact", "modelled", "refused"]


@dataclass(frozen=True, slots=True)
class Support:
    """level, why it is not exact, and the recorded arm of each variant (0 where a variant never drafts).

    between: for each variant (lower arm, upper arm, budget) to interpolate, or None where the arm was recorded.
    """

    level: Level
    reason: str | None
    arms: tuple[int, ...]
    between: tuple[tuple[int, int, int] | None, ...]


def support(record: Record, policy: Policy) -> Support:
    """Judge one policy against a record."""
    if not policy.lossless:
        return _refused("it is lossy, and replay knows lossless policies only")
    meta = record.trace.meta
    if not meta["dense"] and record.policy_digest == policy_digest(policy):
        variants = len(policy.variants())  # a sparse record files all of its own drafts under arm 0
        return Support("exact", None, (0,) * variants, (None,) * variants)
    level: Level = "exact"
    reasons: list[str] = []
    if not meta["dense"] and policy.k_max > 0:
        if not can_impute(record):
            return _refused("the trace is sparse and holds too few drafts to model others: record with dense=true")
        level = "modelled"
        reasons.append("the trace is sparse: chains that were not recorded are drawn from those that were")
    arms: list[int] = []
    between: list[tuple[int, int, int] | None] = []
    for variant in policy.variants():
        if variant.k_max == 0:
            arms.append(0)
            between.append(None)
            continue
        if variant.k_max > record.k_max:
            return _refused(f"it drafts up to {variant.k_max} tokens, {record.k_max} were recorded")
        place, why = _arm(record, variant)
        if place is not None:
            arms.append(place)
            between.append(None)
            continue
        neighbours = _between(_wanted(variant), record)
        if neighbours is None:
            return _refused(why)
        level = "modelled"
        reasons.append(f"budget {variant.draft_kv.budget} lies between recorded ones")
        arms.append(neighbours[0])
        between.append((*neighbours, variant.draft_kv.budget))
    if record.sampled and policy.k_max > 0 and meta["dense"]:
        level = "modelled"
        reasons.append("sampled decoding: acceptance drawn from recorded probabilities")
    return Support(level, "; ".join(dict.fromkeys(reasons)) or None, tuple(arms), tuple(between))


def mixable_budgets(record: Record, arms: Sequence[int]) -> tuple[int, int] | None:
    """(lowest, highest) budget of arms that differ in nothing else, None when they do or there is only one."""
    rest = [{**record.arms[i]["draft_kv"], "budget": 0, "drafter": record.arms[i]["drafter"]} for i in arms]
    budgets = {int(record.arms[i]["draft_kv"]["budget"]) for i in arms}
    if len(budgets) < 2 or any(other != rest[0] for other in rest):
        return None
    return min(budgets), max(budgets)


def neighbours_of(record: Record, arm: int) -> tuple[int, int] | None:
    """Indices of the arms with the budgets just below and above a recorded arm's, all else equal; None at the ends."""
    named = record.arms[arm]
    return _between({"drafter": named["drafter"], "draft_kv": named["draft_kv"]}, record)


def _refused(reason: str) -> Support:
    return Support("refused", reason, (), ())


def _wanted(policy: Policy) -> dict[str, Any]:
    return {"drafter": to_plain(policy.drafter), "draft_kv": to_plain(policy.draft_kv)}


def _arm(record: Record, policy: Policy) -> tuple[int | None, str]:
    """Index of the arm recorded with this drafter and selection, or what the closest arm differs in."""
    wanted = _wanted(policy)
    closest: list[str] | None = None
    for i, arm in enumerate(record.arms):
        differs = _differences(wanted, {"drafter": arm["drafter"], "draft_kv": arm["draft_kv"]})
        if not differs:
            return i, ""
        if closest is None or len(differs) < len(closest):
            closest = differs
    if closest is None:
        return None, "no drafts were recorded"
    recorded = ", ".join(str(arm["draft_kv"]["budget"]) for arm in record.arms)
    return None, f"no recorded arm has {', '.join(closest)} (budgets recorded: {recorded})"


def _between(wanted: dict[str, Any], record: Record) -> tuple[int, int] | None:
    budget = int(wanted["draft_kv"]["budget"])
    budgets: list[tuple[int, int]] = []
    for i, arm in enumerate(record.arms):
        differs = _differences(wanted, {"drafter": arm["drafter"], "draft_kv": arm["draft_kv"]})
        if len(differs) == 1 and differs[0].startswith("draft_kv.budget"):
            budgets.append((int(arm["draft_kv"]["budget"]), i))
    below = [pair for pair in budgets if pair[0] < budget]
    above = [pair for pair in budgets if pair[0] > budget]
    return (max(below)[1], min(above)[1]) if below and above else None


def _differences(wanted: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Dotted settings of `wanted` that `found` does not share, with the wanted value."""
    return [
        f"{group}.{name} {value}"
        for group, settings in wanted.items()
        for name, value in settings.items()
        if found[group].get(name) != value
    ]
