"""What a record can say about a policy: exactly, by a model, or nothing, and why.

exact: greedy decoding, a lossless policy, its drafter and selection recorded, no draft longer than recorded; or the
very policy that was recorded. modelled: every lossy policy (its text is its own, so what it accepts there is taken from
the recorded text: changed as probes say where full verification was recorded, as it stands where the same
selection was); sampled decoding (acceptance drawn from recorded probabilities), a budget
between recorded ones, a selection kept for several rounds (what it holds then depends on how rounds fall, which no
dense record can show: acceptance is taken from the arm that chooses anew every round), or another policy on a sparse
trace. refused: everything else; the reason names the setting.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pyarrow.compute as pc

from specdial.engine.trace.schema import PARTIAL
from specdial.policies.controllers import CONTROLLERS
from specdial.policies.fields import parse, to_plain
from specdial.policies.file import policy_digest
from specdial.policies.schema import Drafter, Policy, policy_from_mapping
from specdial.simulator.imputation import can_impute
from specdial.simulator.lanes import Record, has_signals

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


def support(record: Record, policy: Policy, batch: int = 1) -> Support:
    """Judge one policy against a record, documents decoding `batch` at a time."""
    looks = any(CONTROLLERS[v.controller.kind][1].adaptive for v in policy.variants() if v.k_max)
    if looks and not has_signals(record.trace):
        return _refused("the logs that were imported do not say how sure each draft was: use controller fixed")
    partial = PARTIAL in pc.unique(record.trace.rounds["mode"]).to_pylist()
    if not policy.lossless:
        return _lossy(record, policy, batch, recorded=partial)
    if partial:
        return _refused("the trace holds partially verified rounds, which accept what other policies would not")
    return _drafted(record, policy, batch)


def _lossy(record: Record, policy: Policy, batch: int, *, recorded: bool) -> Support:
    """recorded: the record's own rounds verify partially."""
    lossy = [variant for variant in policy.variants() if not variant.verify_kv.lossless]
    if any(variant.verify_kv.buffer and variant.verify_kv.refresh == "full" for variant in lossy):
        return _refused("its verify_kv.buffer decides how often keys are chosen (refresh full): validate measures it")
    if recorded:
        own = policy_from_mapping(dict(record.trace.meta["policy"]), "meta.json policy")
        known = {_verified(variant) for variant in own.variants() if not variant.verify_kv.lossless}
        if any(_verified(variant) not in known for variant in lossy):
            return _refused("the trace's partially verified rounds read another selection: record with probes=true")
        said = "it is lossy: it accepts what the recorded rounds of the same selection accepted, on their text"
    else:
        if record.fidelity is None:
            return _refused(
                "it is lossy: what a partial verification accepts was not recorded; record with probes=true, or "
                "validate measures it"
            )
        lacking = next((why for variant in lossy if (why := record.fidelity.lacks(variant))), None)
        if lacking is not None:
            return _refused(f"it is lossy: {lacking}")
        said = "it is lossy: it accepts what full verification accepted on the recorded text, changed as probes say"
    drafted = _drafted(record, policy, batch)
    if drafted.level == "refused":
        return drafted
    return replace(drafted, level="modelled", reason="; ".join(filter(None, (said, drafted.reason))))


def _verified(variant: Policy) -> str:
    """What two partial verifications share that accept alike: all but the full period and the buffer."""
    kv = to_plain(replace(variant.verify_kv, full_period=0, buffer=0), complete=True)
    return json.dumps([kv, to_plain(variant.scoring_heads)], sort_keys=True)


def _drafted(record: Record, policy: Policy, batch: int) -> Support:
    """Judge what a policy drafts, as if every round were verified in full."""
    meta = record.trace.meta
    if not meta["dense"] and record.policy_digest == policy_digest(policy):
        variants = len(policy.variants())  # a sparse record files all of its own drafts under arm 0
        return Support("exact", None, (0,) * variants, (None,) * variants)
    level: Level = "exact"
    reasons: list[str] = []
    if not meta["dense"] and policy.k_max > 0:
        if not can_impute(record):
            return _refused("the trace is sparse and holds too few drafts to model others: record with dense=true")
        if any(variant.drafter.may_have_none for variant in policy.variants()):
            return _refused("the trace is sparse, and does not show where its drafter had no draft: record that policy")
        if any(variant.drafter.tree for variant in policy.variants()):
            return _refused("it drafts trees, and the trace shows no other tree than its own: record that policy")
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
        wanted = _wanted(variant)
        place, why = _arm(record, wanted)
        if batch > 1 and variant.draft_kv.budget_frac > 0.0 and len(np.unique(record.documents.start)) > 1:
            level = "modelled"
            reasons.append("a batch's budget is a fraction of its longest prompt, and each was recorded with its own")
        if wanted.get("draft_kv", {}).get("refresh_rounds", 1) > 1 and (place is None or meta["dense"]):
            level = "modelled"
            reasons.append(
                f"a selection serves {variant.draft_kv.refresh_rounds} rounds: acceptance is that of one chosen anew "
                "every round, which is no lower"
            )
            wanted["draft_kv"]["refresh_rounds"] = 1
            place, why = _arm(record, wanted)
        if place is not None:
            arms.append(place)
            between.append(None)
            continue
        neighbours = _between(wanted, record)
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
    budgets = {record.budget(i) for i in arms}
    if len(budgets) < 2 or any(other != rest[0] for other in rest):
        return None
    return min(budgets), max(budgets)


def neighbours_of(record: Record, arm: int) -> tuple[int, int] | None:
    """Indices of the arms with the budgets just below and above a recorded arm's, all else equal; None at the ends."""
    named = record.arms[arm]
    if not parse(Drafter, named["drafter"]).reads_selection:
        return None
    return _between({"drafter": named["drafter"], "draft_kv": named["draft_kv"]}, record)


def _refused(reason: str) -> Support:
    return Support("refused", reason, (), ())


def _wanted(policy: Policy) -> dict[str, Any]:
    """The settings that an arm must share: the drafter, and the selection where the drafter reads one."""
    wanted = {"drafter": to_plain(policy.drafter, complete=True)}
    if policy.drafter.reads_selection:
        wanted["draft_kv"] = to_plain(policy.draft_kv, complete=True)
    return wanted


def _arm(record: Record, wanted: dict[str, Any]) -> tuple[int | None, str]:
    """Index of the arm recorded with this drafter and selection, or what the closest arm differs in."""
    closest: list[str] | None = None
    for i, arm in enumerate(record.arms):
        differs = _differences(wanted, arm)
        if not differs:
            return i, ""
        if closest is None or len(differs) < len(closest):
            closest = differs
    if closest is None:
        return None, "no drafts were recorded"
    if any(setting.startswith("drafter.") for setting in closest):
        labels = ", ".join(dict.fromkeys(parse(Drafter, arm["drafter"]).label for arm in record.arms))
        return None, f"no recorded arm has {', '.join(closest)} (drafters recorded: {labels})"
    recorded = ", ".join(str(record.budget(i)) for i in range(len(record.arms)))
    return None, f"no recorded arm has {', '.join(closest)} (budgets recorded: {recorded})"


def _between(wanted: dict[str, Any], record: Record) -> tuple[int, int] | None:
    """Arms with the budgets just below and above the wanted one, all else equal; None where there are none."""
    if "draft_kv" not in wanted or wanted["draft_kv"]["budget_frac"] > 0.0:
        return None
    budget = int(wanted["draft_kv"]["budget"])
    budgets: list[tuple[int, int]] = []
    for i, arm in enumerate(record.arms):
        differs = _differences(wanted, arm)
        if len(differs) == 1 and differs[0].startswith("draft_kv.budget "):
            budgets.append((record.budget(i), i))
    below = [pair for pair in budgets if pair[0] < budget]
    above = [pair for pair in budgets if pair[0] > budget]
    return (max(below)[1], min(above)[1]) if below and above else None


def _differences(wanted: dict[str, Any], arm: dict[str, Any]) -> list[str]:
    """Dotted settings of `wanted` that an arm does not share, with the wanted value."""
    return [
        f"{group}.{name} {value}"
        for group, settings in wanted.items()
        for name, value in settings.items()
        if arm[group].get(name) != value
    ]
