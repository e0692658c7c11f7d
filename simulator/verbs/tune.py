"""`tune`: search policies by replay, choose on validation documents, write the study and the policy files."""

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from specdial.engine.trace.reader import read_trace
from specdial.policies.artifact import claim_directory, provenance, write_json_atomic
from specdial.policies.errors import UserError
from specdial.policies.fields import parse, setting, to_plain
from specdial.policies.file import policy_digest, save_policy
from specdial.policies.schema import Policy
from specdial.simulator.check import AcceptanceCheck, check_acceptance
from specdial.simulator.choice import Choice, choose
from specdial.simulator.costs import CostModel
from specdial.simulator.lanes import Record, read_record
from specdial.simulator.load import caveats, load_costs, marked, trace_digest
from specdial.simulator.outcome import Outcome
from specdial.simulator.replay import replay
from specdial.simulator.search import Evaluate, Found, Sampler, fixed_points, search
from specdial.simulator.space import Search, Space
from specdial.simulator.tables import print_acceptance, print_choice, print_costs, trial_bar

SCHEMA = "specdial/study/1"


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of `tune`. costs: a cost table, None for the trace's own rounds. bootstrap: resamples of intervals."""

    trace: str
    out: str
    costs: str | None = None
    trials: int = setting(500, low=1, high=1_000_000)
    seed: int = setting(0, low=0, high=2**32 - 1)
    sampler: Sampler = "auto"
    batch: int = setting(1, low=1)
    bootstrap: int = setting(1000, low=1, high=100_000)
    search: Search = field(default_factory=Search)


@dataclass(frozen=True, slots=True)
class _Run:
    """What one tuning run works on. select_split: validation, or train where the trace has no validation documents."""

    settings: Settings
    record: Record
    costs: CostModel
    space: Space
    select_split: str


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Tune, print, write `out`; returns the best policy's numbers on the selection split, and where the files are."""
    s = parse(Settings, settings)
    job = _prepare(s)
    claim_directory(Path(s.out), "tune", to_plain(s))
    with trial_bar(s.trials) as advance:
        found = search(job.space, _evaluate(job, "train", 0), s.trials, s.seed, s.sampler, on_trials=advance)
    choice = choose(job.space, found, _evaluate(job, job.select_split, s.bootstrap))
    check = check_acceptance(job.record, "train", job.select_split, s.seed)
    expected = _write(job, found, choice, check)
    title = f"tuned on train, selected on {job.select_split}: {found.trials} trials, {found.sampler}"
    print_choice(choice, marked(title, caveats(job.record.trace, job.costs)))
    print_acceptance(check)
    print_costs(job.costs)
    return {
        **choice.best.plain(),
        "pays": choice.pays,
        "trials": found.trials,
        "distinct": len(found.tried),
        "policies": str(Path(s.out) / "policies"),
        "best_fixed": choice.best_fixed.plain(),
        "crossover": to_plain(choice.crossover),
        "expected": expected,
    }


def _prepare(s: Settings) -> _Run:
    record = read_record(read_trace(s.trace))
    costs = load_costs(s.costs, record.trace)
    splits = set(record.documents.split.tolist())
    select = "validation" if "validation" in splits else "train"
    probe = Space.of(s.search, record, gamma=0.3)
    fixed = [probe.policy(point) for point in fixed_points(probe)]
    outcomes = replay(record, costs, fixed, "train", s.batch, bootstrap=0)
    priced = [outcome for outcome in outcomes if outcome.speedup is not None]
    if not priced:
        raise UserError(
            f"no speedup can be predicted: {outcomes[0].reason or 'plain decoding has no measured cost'}",
            "calibrate for this trace and give costs=",
        )
    gamma = max(priced, key=lambda outcome: outcome.speedup or 0.0).gamma or 0.3
    return _Run(s, record, costs, Space.of(s.search, record, gamma), select)


def _evaluate(job: _Run, split: str, bootstrap: int) -> Evaluate:
    return partial(
        replay,
        job.record,
        job.costs,
        split=split,
        batch=job.settings.batch,
        bootstrap=bootstrap,
        seed=job.settings.seed,
    )


def _write(job: _Run, found: Found, choice: Choice, check: AcceptanceCheck) -> dict[str, Any]:
    """Policy files, then study.json, which names the run complete. Returns the best policy's expected block."""
    out, digest = Path(job.settings.out), trace_digest(job.record.trace)
    named = {"best": choice.best, "best_fixed": choice.best_fixed, "plain": choice.plain}
    seen = {policy_digest(outcome.policy) for outcome in named.values()}
    for outcome in choice.front:
        if policy_digest(outcome.policy) not in seen and outcome.speedup is not None:
            seen.add(policy_digest(outcome.policy))
            named[f"pareto-{len(named) - 2:02d}"] = outcome
    for name, outcome in named.items():
        expected = expected_block(job, outcome, digest)
        stamp = {
            **provenance(),
            "model_digest": job.record.trace.meta["model"]["digest"],
            "trace_digest": digest,
            "policy_digest": policy_digest(outcome.policy),
        }
        policy = replace(outcome.policy, name=_file_name(name, outcome.policy), expected=expected, provenance=stamp)
        save_policy(policy, out / "policies" / f"{name}.yaml")
    write_json_atomic(
        out / "study.json", {**_study(job, found, choice, sorted(named)), "acceptance_check": to_plain(check)}
    )
    return expected_block(job, choice.best, digest)


def expected_block(job: _Run, outcome: Outcome, digest: str) -> dict[str, Any]:
    """What the policy file predicts, and from what."""
    names = (
        *("speedup", "low", "high", "level", "tokens_per_round", "alpha", "gamma", "k", "budget", "batch"),
        *("us_per_token", "baseline_us_per_token", "breakdown", "kv_bytes_per_token", "extrapolated_frac"),
    )
    return {
        **{name: to_plain(getattr(outcome, name)) for name in names},
        "split": job.select_split,
        "documents": list(outcome.documents),
        "trace_digest": digest,
        "hardware": job.costs.meta.get("hardware"),
        "costs": "cost table" if job.settings.costs else "the trace's own rounds",
        "caveats": caveats(job.record.trace, job.costs),
    }


def _file_name(name: str, policy: Policy) -> str:
    return name if name in (policy.name, "plain") else f"{name}-{policy.name}"


def _study(job: _Run, found: Found, choice: Choice, files: list[str]) -> dict[str, Any]:
    selected = {policy_digest(outcome.policy): outcome for outcome in choice.finalists}
    trials = []
    for tried in found.tried:
        other = selected.get(tried.digest)
        trials.append(
            {
                "params": tried.point,
                "policy_digest": tried.digest,
                "points": tried.points,
                "level": tried.outcome.level,
                "reason": tried.outcome.reason,
                "values": {
                    "train": _values(tried.outcome),
                    **({job.select_split: _values(other)} if other is not None and job.select_split != "train" else {}),
                },
            }
        )
    return {
        "schema": SCHEMA,
        "trace_digest": trace_digest(job.record.trace),
        "model": job.record.trace.meta["model"],
        "caveats": caveats(job.record.trace, job.costs),
        "hardware": job.costs.meta.get("hardware"),
        "settings": to_plain(job.settings),
        "plain_gbps": job.costs.plain_gbps,
        "leave_one_out": job.costs.leave_one_out(),
        "objectives": {"speedup": "maximize", "kv_bytes_per_token": "minimize"},
        "sampler": found.sampler,
        "trials": found.trials,
        "selected_on": job.select_split,
        "pays": choice.pays,
        "crossover": to_plain(choice.crossover),
        "best": choice.best.plain(),
        "best_fixed": choice.best_fixed.plain(),
        "policies": files,
        "tried": trials,
        "provenance": provenance(),
    }


def _values(outcome: Outcome) -> dict[str, float | None]:
    return {"speedup": outcome.speedup, "kv_bytes_per_token": outcome.kv_bytes_per_token}
