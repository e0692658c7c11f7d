"""`replay`: what policies would have done on a trace, as tables, replay.json, policy files and the first one's numbers.

Lossy policies have a table of their own: they are never ranked together with lossless ones.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specdial.engine.trace.reader import read_trace
from specdial.policies.artifact import claim_directory, provenance, write_json_atomic
from specdial.policies.errors import UserError
from specdial.policies.fields import parse, setting, to_plain
from specdial.policies.file import load_policy, policy_digest, save_policy
from specdial.policies.schema import Policy, policy_from_mapping
from specdial.simulator.check import AcceptanceCheck, check_acceptance
from specdial.simulator.costs import CostModel
from specdial.simulator.crossover import Corner, crossover_surface
from specdial.simulator.expected import expected_block
from specdial.simulator.fidelity import describe
from specdial.simulator.inversion import Inversion, inversion_table
from specdial.simulator.lanes import Record, read_record
from specdial.simulator.load import caveats, load_costs, marked, trace_digest
from specdial.simulator.lossy_tables import print_fidelity, print_lossy
from specdial.simulator.outcome import Outcome
from specdial.simulator.replay import replay
from specdial.simulator.tables import print_acceptance, print_costs, print_inversion, print_outcomes, print_surface
from specdial.simulator.whatif import on_other_hardware

SCHEMA = "specdial/replay/1"


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of `replay`.

    policies: policy mappings, or paths of policy files. costs: a cost table, None for the trace's own rounds.
    split: documents to replay, None for all. bootstrap: resamples. inversion: also sweep fixed k for every arm, and
    the best fixed k over the measured contexts and batches. bandwidth_ratio, compute_ratio: what if the machine had
    these multiples of its memory bandwidth and compute rate.
    """

    trace: str
    costs: str | None = None
    policies: tuple[Any, ...] = ()
    split: str | None = None
    batch: int = setting(1, low=1)
    bootstrap: int = setting(1000, low=0, high=100_000)
    seed: int = setting(0, low=0)
    inversion: bool = False
    bandwidth_ratio: float = setting(1.0, low=0.01, high=100.0)
    compute_ratio: float = setting(1.0, low=0.01, high=100.0)
    out: str | None = None


@dataclass(frozen=True, slots=True)
class _Result:
    """What one replay found. check: of the acceptance models, where an outcome is modelled."""

    record: Record
    costs: CostModel
    outcomes: list[Outcome]
    inversions: list[Inversion] = field(default_factory=list)
    surface: list[Corner] = field(default_factory=list)
    check: AcceptanceCheck | None = None


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Replay, print, write `out`: replay.json and policies/, each with its prediction, for validate to hold it to.

    Returns the first policy's numbers (see Outcome.plain).
    """
    s = parse(Settings, settings)
    policies = [resolve_policy(value, i) for i, value in enumerate(s.policies)]
    if not policies and not s.inversion:
        raise UserError("no policy to replay", "give policy=NAME or policy=FILE")
    record = read_record(read_trace(s.trace))
    costs = on_other_hardware(load_costs(s.costs, record.trace), s.bandwidth_ratio, s.compute_ratio)
    outcomes = replay(record, costs, policies, s.split, s.batch, bootstrap=s.bootstrap, seed=s.seed, full_batch=True)
    inversions: list[Inversion] = []
    surface: list[Corner] = []
    if s.inversion:
        resampled = {"bootstrap": s.bootstrap, "seed": s.seed}
        inversions = inversion_table(record, costs, s.split, s.batch, **resampled)
        contexts = [round(context) for context in costs.contexts()]
        surface = crossover_surface(record, costs, contexts, costs.batches(), s.split, **resampled)
    modelled = any(o.level == "modelled" for o in outcomes)
    check = check_acceptance(record, "train", _unseen(record), s.seed) if modelled else None
    result = _Result(record, costs, outcomes, inversions, surface, check)
    title = f"replay of {record.trace.path.name}, split {s.split or 'all'}, batch {s.batch}"
    title = marked(title, caveats(record.trace, costs))
    lossless, lossy = ([o for o in outcomes if o.lossless is kind] for kind in (True, False))
    if lossless:
        print_outcomes(lossless, title)
    if lossy:
        print_lossy(lossy, f"lossy: {title}")
        if record.fidelity is not None:
            print_fidelity(record.fidelity)
    if inversions:
        print_inversion(inversions)
        print_surface(surface)
    print_costs(costs)
    if check is not None:
        print_acceptance(check)
    document = _document(s, result)
    if s.out is not None:
        claim_directory(Path(s.out), "replay", to_plain(s))
        _write_policies(Path(s.out), result, document["trace_digest"], s.split or "all")
        write_json_atomic(Path(s.out) / "replay.json", document)
    first: dict[str, Any] = document["outcomes"][0] if outcomes else {}
    return {
        **first,
        "outcomes": document["outcomes"],
        "inversion": document["inversion"],
        "surface": document["surface"],
    }


def _unseen(record: Record) -> str:
    """The split on which a fit to the train documents is scored."""
    return "validation" if (record.documents.split == "validation").any() else "test"


def resolve_policy(value: object, number: int = 0) -> Policy:
    """A policy from a mapping or a policy file's path."""
    if isinstance(value, str):
        return load_policy(value)
    if isinstance(value, dict):
        plain = {k: v for k, v in value.items() if k not in ("schema", "lossless")}
        return policy_from_mapping(plain)
    raise UserError(f"policies[{number}] must be a mapping or a path, got {value!r}", "give a policy or its file")


def _write_policies(out: Path, result: _Result, digest: str, split: str) -> None:
    """A file for every policy that has a predicted speed here, numbered where several share a name."""
    if result.costs.assumed:  # nothing here could be held to it
        return
    priced = [outcome for outcome in result.outcomes if outcome.speedup is not None]
    names = [outcome.policy.name for outcome in priced]
    for i, outcome in enumerate(priced):
        name = names[i] if names.count(names[i]) == 1 else f"{names[i]}-{names[: i + 1].count(names[i])}"
        stamp = {
            **provenance(),
            "model_digest": result.record.trace.meta["model"]["digest"],
            "trace_digest": digest,
            "policy_digest": policy_digest(outcome.policy),
        }
        expected = expected_block(outcome, result.record, result.costs, split=split, digest=digest)
        save_policy(replace(outcome.policy, expected=expected, provenance=stamp), out / "policies" / f"{name}.yaml")


def _document(s: Settings, result: _Result) -> dict[str, Any]:
    meta = result.record.trace.meta
    return {
        "schema": SCHEMA,
        "trace_digest": trace_digest(result.record.trace),
        "model": meta["model"],
        "caveats": caveats(result.record.trace, result.costs),
        "hardware": result.costs.meta.get("hardware"),
        "costs": result.costs.source,
        "plain_gbps": result.costs.plain_gbps,
        "leave_one_out": result.costs.leave_one_out(),
        "settings": to_plain(s),
        "outcomes": [
            {**outcome.plain(), "policy_digest": policy_digest(outcome.policy), "decisions": outcome.policy.decisions()}
            for outcome in result.outcomes
        ],
        "fidelity_model": describe(result.record.fidelity) if result.record.fidelity is not None else [],
        "inversion": [to_plain(inversion) for inversion in result.inversions],
        "surface": [to_plain(corner) for corner in result.surface],
        "acceptance_check": to_plain(result.check),
        "provenance": provenance(),
    }
