"""What `tune` leaves on disk: policy files with their predictions, and study.json, which names the run complete."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specdial.policies.artifact import provenance, write_json_atomic
from specdial.policies.fields import to_plain
from specdial.policies.file import policy_digest, save_policy
from specdial.policies.schema import Policy
from specdial.simulator.check import AcceptanceCheck
from specdial.simulator.choice import Choice
from specdial.simulator.costs import CostModel
from specdial.simulator.expected import expected_block
from specdial.simulator.lanes import Record
from specdial.simulator.load import caveats, trace_digest
from specdial.simulator.objectives import METRICS, Goal, measured_metrics
from specdial.simulator.outcome import Outcome
from specdial.simulator.search import Found
from specdial.simulator.surface import Surface

SCHEMA = "specdial/study/1"


@dataclass(frozen=True, slots=True)
class Tuned:
    """All of a finished run. beside: a surface that pays and the single policy that it beats, on the selection split.

    test: by name. refused: policies without a prediction, for the engine to measure.
    """

    settings: dict[str, Any]
    record: Record
    costs: CostModel
    goal: Goal
    found: Found
    choice: Choice
    surface: Surface | None
    beside: dict[str, Outcome]
    test: dict[str, Outcome]
    refused: list[Policy]
    select_split: str
    check: AcceptanceCheck

    def surface_plain(self) -> dict[str, Any] | None:
        """The surface as plain data, policies by name."""
        if self.surface is None:
            return None
        single = self.surface.single
        plain = to_plain(replace(self.surface, policy=None, single=None))  # type: ignore[arg-type]
        return {**plain, "single": single.name, "single_k_max": single.k_max}

    def test_plain(self) -> dict[str, Any] | None:
        """Results on test documents by name, None where the trace has none."""
        return {name: outcome.plain() for name, outcome in self.test.items()} or None


def write_tuned(out: Path, tuned: Tuned) -> dict[str, Any]:
    """Write policies, then study.json. Returns the best policy's expected block."""
    digest, choice = trace_digest(tuned.record.trace), tuned.choice
    named = {"best": choice.best, "best_fixed": choice.best_fixed, "plain": choice.plain}
    if policy_digest(choice.best.policy) != policy_digest(choice.best_lossless.policy):
        named["best_lossless"] = choice.best_lossless
    named |= tuned.beside
    seen = {policy_digest(outcome.policy) for outcome in named.values()}
    ahead = 0
    for outcome in choice.front:
        if policy_digest(outcome.policy) not in seen and outcome.speedup is not None:
            seen.add(policy_digest(outcome.policy))
            ahead += 1
            named[f"pareto-{ahead:02d}"] = outcome
    for name, outcome in named.items():
        stamp = {
            **provenance(),
            "model_digest": tuned.record.trace.meta["model"]["digest"],
            "trace_digest": digest,
            "policy_digest": policy_digest(outcome.policy),
        }
        expected = _expected(tuned, outcome, digest)
        policy = replace(outcome.policy, name=_file_name(name, outcome.policy), expected=expected, provenance=stamp)
        save_policy(policy, out / "policies" / f"{name}.yaml")
    for i, policy in enumerate(tuned.refused, start=1):
        save_policy(policy, out / "refused" / f"refused-{i:02d}.yaml")
    write_json_atomic(out / "study.json", _study(tuned, sorted(named), digest))
    return _expected(tuned, choice.best, digest)


def _expected(tuned: Tuned, outcome: Outcome, digest: str) -> dict[str, Any]:
    return expected_block(outcome, tuned.record, tuned.costs, split=tuned.select_split, digest=digest)


def _file_name(name: str, policy: Policy) -> str:
    return name if name in (policy.name, "plain") else f"{name}-{policy.name}"


def _study(tuned: Tuned, files: list[str], digest: str) -> dict[str, Any]:
    found, choice = tuned.found, tuned.choice
    selected = {(policy_digest(outcome.policy), outcome.batch): outcome for outcome in choice.finalists}
    trials = []
    for tried in found.tried:
        values = {"train": {name: tried.metrics.get(name) for name in METRICS}}
        other = selected.get((tried.digest, tried.batch))
        if other is not None and tuned.select_split != "train":
            values[tuned.select_split] = measured_metrics(other, tuned.record)
        trials.append(
            {
                "params": tried.point,
                "policy_digest": tried.digest,
                "batch": tried.batch,
                "points": tried.points,
                "level": tried.level,
                "reason": tried.reason,
                "values": values,
            }
        )
    return {
        "schema": SCHEMA,
        "trace_digest": digest,
        "model": tuned.record.trace.meta["model"],
        "caveats": caveats(tuned.record.trace, tuned.costs),
        "hardware": tuned.costs.meta.get("hardware"),
        "settings": tuned.settings,
        "plain_gbps": tuned.costs.plain_gbps,
        "leave_one_out": tuned.costs.leave_one_out(),
        "objectives": {name: METRICS[name].direction for name in tuned.goal.objectives},
        "constraints": dict(tuned.goal.bounds),
        "sampler": found.sampler,
        "trials": found.trials,
        "stopped": found.stopped,
        "refused": found.refused,
        "selected_on": tuned.select_split,
        "pays": choice.pays,
        "feasible": choice.feasible,
        "crossover": to_plain(choice.crossover),
        "best": choice.best.plain(),
        "best_fixed": choice.best_fixed.plain(),
        "surface": tuned.surface_plain(),
        "test": tuned.test_plain(),
        "policies": files,
        "tried": trials,
        "acceptance_check": to_plain(tuned.check),
        "provenance": provenance(),
    }
