"""`drift`: has a live trace left what its policy was tuned on? With `stamp`, writes what that was into the policy file.

A policy file says it in `expected.tuned_on`; where it does not, `reference` names the trace that the policy was tuned
on. The chance that acceptance or costs are ever called drifted while they have not is at most `alpha`, both together.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from specdial.engine.trace.reader import Trace, read_trace
from specdial.policies.artifact import provenance, write_json_atomic
from specdial.policies.console import table_console
from specdial.policies.errors import UserError
from specdial.policies.fields import parse, setting, to_plain
from specdial.policies.file import load_policy, policy_digest, save_policy, short_digest
from specdial.policies.schema import Policy
from specdial.simulator.drift import Verdict, acceptance_scores, cost_scores, judge, stratum
from specdial.simulator.lanes import read_record
from specdial.simulator.load import load_costs, marked, trace_caveats, trace_digest
from specdial.simulator.tuned_on import DocumentCounts, TunedOn, count_documents, read_tuned_on, thinned, tuned_on

SCHEMA = "specdial/drift/1"


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of `drift`.

    trace: the live rounds, or the folder in which `run` keeps them; None only to stamp. policy: its file. reference,
    costs, split: the trace and cost table it was tuned on, instead of what the file says. alpha: the chance of a false
    alarm. tolerance_frac: by how much times may differ from what was expected. stamp: a file to write the policy to.
    """

    policy: str
    trace: str | None = None
    reference: str | None = None
    costs: str | None = None
    split: str | None = None
    alpha: float = setting(0.01, low=1e-6, high=0.5)
    tolerance_frac: float = setting(0.1, low=0.0, high=10.0)
    seed: int = setting(0, low=0)
    stamp: str | None = None
    out: str | None = None


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Compare, print, write `out` (JSON). Returns {alarm, acceptance, costs, strata ...}."""
    s = parse(Settings, settings)
    _check(s)
    policy = load_policy(s.policy)
    tuned = _tuned_on(s, policy)
    found: dict[str, Any] = {"alarm": False, "tuned_documents": len(tuned.documents)}
    if s.stamp is not None:
        expected = {**(policy.expected or {}), "tuned_on": to_plain(thinned(tuned))}
        save_policy(replace(policy, expected=expected), s.stamp)
        print(f"wrote {s.stamp}: {len(thinned(tuned).documents)} documents it was tuned on")
    if s.trace is None:
        return found
    trace = _live(s.trace, policy)
    live = count_documents(trace, policy.k_max, tuned)
    acceptance = judge(tuned.documents, live, acceptance_scores, s.alpha / 2, s.seed)
    batch = int(trace.rounds["batch"].to_numpy().max())
    costs = judge(tuned.documents, live, cost_scores(s.tolerance_frac), s.alpha / 2, s.seed + 1)
    why_no_costs = _no_costs(tuned, live, batch)
    set_by_hand = trace.meta.get("synthetic_acceptance")
    content: dict[str, Any] = {
        **found,
        "schema": SCHEMA,
        "policy": policy.name,
        "policy_digest": policy_digest(policy),
        "caveats": trace_caveats(trace),
        "trace_digest": trace_digest(trace),
        "alpha": s.alpha,
        "live_documents": len(live),
        "acceptance": _plain(acceptance, trace) if policy.k_max and not set_by_hand else None,
        "costs": None if why_no_costs else _plain(costs, trace),
        "strata": _strata(tuned.documents, live),
    }
    content["alarm"] = any(part and part["alarm"] for part in (content["acceptance"], content["costs"]))
    _print(content, why_no_costs)
    if s.out is not None:
        write_json_atomic(Path(s.out), {**content, "settings": to_plain(s), "provenance": provenance()})
    return content


def _check(s: Settings) -> None:
    """Raises UserError where a setting would change nothing, or there is nothing to do."""
    if s.reference is None:
        given = next((name for name in ("stamp", "costs", "split") if getattr(s, name) is not None), None)
        if given is not None:
            raise UserError(f"{given} is given without a reference", "add reference=TRACE, what it was tuned on")
    if s.trace is None and (s.out is not None or s.stamp is None):
        what = "out is given, and there is no trace to judge" if s.out is not None else "trace is missing"
        raise UserError(what, "add trace=LIVE, or stamp=FILE with a reference=TRACE")


def _tuned_on(s: Settings, policy: Policy) -> TunedOn:
    if s.reference is None:
        found = read_tuned_on(policy)
        if found is None:
            raise UserError(
                f"policy {policy.name} does not say what it was tuned on", "add reference=TRACE, the trace it was"
            )
        return found
    record = read_record(read_trace(s.reference))
    batch = (policy.expected or {}).get("batch", 1)
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
        raise UserError(f"policy {policy.name}: expected.batch is {batch!r}", "give a whole number from 1 on, or none")
    return tuned_on(record, load_costs(s.costs, record.trace), policy, s.split, batch)


def _live(where: str, policy: Policy) -> Trace:
    """The trace of this policy's rounds. Raises UserError when it is of another policy or model."""
    digest = policy_digest(policy)
    folder = Path(where)
    if not (folder / "meta.json").exists() and (folder / short_digest(policy)).is_dir():
        folder = folder / short_digest(policy)
    trace = read_trace(folder)
    if trace.meta.get("policy_digest") != digest and "imported" not in trace.meta:
        raise UserError(f"trace {folder} is of another policy than {policy.name}", "give the policy that was running")
    model = (policy.provenance or {}).get("model_digest")
    if model is not None and model != trace.meta["model"]["digest"]:
        raise UserError(
            f"policy {policy.name} was tuned on another model than {trace.meta['model']['name']}", "tune it"
        )
    return trace


def _no_costs(tuned: TunedOn, live: list[DocumentCounts], batch: int) -> str | None:
    """Why times are not compared, or None where they are."""
    if batch != tuned.batch:
        return f"costs are not compared: batch {batch} ran, {tuned.batch} was tuned"
    if not tuned.costs or all(d.excess_log == 0.0 for d in live):
        return "costs are not compared: no round that ran has both a measured and an expected time"
    return None


def _plain(verdict: Verdict, trace: Trace) -> dict[str, Any]:
    docs = np.unique(trace.rounds["doc"].to_numpy())
    at = verdict.alarm_at
    return {
        "alarm": at is not None,
        "at_document": None if at is None else int(docs[at]),
        "after_documents": None if at is None else at + 1,
        "evidence": verdict.highest,
        "needed": 1.0 / verdict.alpha,
        "capital": list(verdict.capital),
    }


def _strata(tuned: tuple[DocumentCounts, ...], live: list[DocumentCounts]) -> list[dict[str, Any]]:
    """By range of contexts: documents, accepted share of judged drafts, by depth and in all, and time over expected."""
    found = []
    for i in sorted({stratum(d) for d in (*tuned, *live)}):
        row: dict[str, Any] = {"from_context_tokens": 2**i, "to_context_tokens": 2 ** (i + 1)}
        for name, documents in (("tuned", tuned), ("live", live)):
            mine = [d for d in documents if stratum(d) == i]
            judged, accepted = (_by_depth(mine, part) for part in ("judged", "accepted"))
            row[name] = {
                "documents": len(mine),
                "accepted_frac": float(accepted.sum() / judged.sum()) if judged.sum() else None,
                "by_depth": [float(a / j) if j else None for a, j in zip(accepted, judged, strict=True)],
                "time_over_expected": float(np.exp(np.mean([d.excess_log for d in mine]))) if mine else None,
            }
        found.append(row)
    return found


def _by_depth(documents: list[DocumentCounts], part: str) -> np.ndarray:
    width = max((len(d.judged) for d in documents), default=0)
    total = np.zeros(width)
    for document in documents:
        values = getattr(document, part)
        total[: len(values)] += values
    return total


def _print(content: dict[str, Any], why_no_costs: str | None) -> None:
    title = marked(f"{content['policy']}: tuned against live", content["caveats"])
    table = Table(title=title, title_justify="left")
    for column in ("context", "documents", "accepted", "time / expected"):
        table.add_column(column, justify="left" if column == "context" else "right")
    for row in content["strata"]:
        tuned, live = row["tuned"], row["live"]
        table.add_row(
            f"{row['from_context_tokens']}..{row['to_context_tokens'] - 1}",
            f"{tuned['documents']} / {live['documents']}",
            " / ".join("-" if v["accepted_frac"] is None else f"{v['accepted_frac']:.3f}" for v in (tuned, live)),
            " / ".join(
                "-" if v["time_over_expected"] is None else f"{v['time_over_expected']:.2f}" for v in (tuned, live)
            ),
        )
    console = table_console()
    console.print(table)
    for name in ("acceptance", "costs"):
        part = content[name]
        if part is not None:
            state = f"DRIFTED at document {part['at_document']}" if part["alarm"] else "as tuned"
            evidence = f"evidence {part['evidence']:.3g} of {part['needed']:.3g} needed"
            console.print(f"{name} {state}: {evidence}, false alarms at most {1 / part['needed']:.2g}", highlight=False)
    unknown = sum(row["live"]["documents"] for row in content["strata"] if not row["tuned"]["documents"])
    if unknown:
        console.print(f"{unknown} of {content['live_documents']} live documents have contexts it was not tuned on")
    if why_no_costs is not None:
        console.print(why_no_costs)
