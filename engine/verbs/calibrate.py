"""specdial calibrate: what draft, verification, selection and plain decode cost here, by context, batch, k and budget.

Costs are taken from real rounds on real keys, not from isolated calls: every configuration is decoded for a few rounds
from the same committed state (calibrate_bench). Drafters are timed one after another, each on sequences that hold what
it needs and nothing else: attention rows cost a verification time that a drafter without history does not spend. A
drafter's partial verifications are timed among its full ones wherever they need nothing more.
"""

import gc
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from specdial.engine.acceptance import SAID
from specdial.engine.job import Job, describe, hardware, load_job
from specdial.engine.progress import Bar, progress
from specdial.engine.sampling import Sampling
from specdial.engine.trace.reader import read_costs
from specdial.engine.trace.schema import WATCHED_OPS
from specdial.engine.trace.writer import write_costs
from specdial.engine.verbs.calibrate_bench import Bench
from specdial.engine.verbs.calibrate_plan import Plan, Settings, plans_of
from specdial.engine.verification import CUDA_RECOMPUTED_MULTIPLE
from specdial.policies.artifact import claim_directory, provenance
from specdial.policies.console import table_console
from specdial.policies.errors import UserError
from specdial.policies.fields import parse, to_plain

# Operations that k or rows tell apart.
WITH_K = ("verify", "host", *WATCHED_OPS, "verify_partial", "host_partial", "refresh")
ORDER = ("batch", "context_tokens", "drafter", "source", "op", "k", "budget")  # of the rows of the printed table


def run(settings: Mapping[str, Any], job: Job | None = None) -> dict[str, Any]:
    """Measure and write the cost table into `out`, or show the one it holds. Returns the number of rows.

    job: a loaded model and its documents, instead of those that the settings name; the first one is timed.
    """
    s = parse(Settings, settings)
    groups = plans_of(s)
    workload = {**s.workload, "context_tokens": max(s.contexts), "documents": 3, "new_tokens": s.new_tokens}
    workload["keep_short"] = False  # a shorter prompt would be timed as a longer one
    job = load_job(s.model, workload, "train") if job is None else _timed_document(job, s)
    job.model.config.check_context(max(s.contexts) + s.new_tokens)
    out = Path(s.out)
    here = hardware(job.model.decoder.device)
    if claim_directory(out, "calibrate", to_plain(s)) and (out / "meta.json").exists():
        held = read_costs(out)
        if held.meta["model"]["digest"] != job.model.digest:
            raise UserError(f"{out} holds costs of another model", "choose another out= or delete that directory")
        if held.meta.get("hardware") == here:
            print(f"{out} was measured before; delete it to measure again")
            _print(out, job, held.rows.to_pylist(), s)
            return {"out": str(out), "rows": held.rows.num_rows}
    rows: list[dict[str, Any]] = []
    with progress("calibrate", len(groups) * len(s.contexts) * len(s.batches)) as bar:
        for number, plans in enumerate(groups):
            rows += _measure(job, s, plans, plain=number == 0, bar=bar)
    meta = describe(job, Sampling())
    write_costs(
        out,
        {
            "model": meta["model"],
            "graph_mode": meta["graph_mode"],
            "hardware": here,
            **({"acceptance": to_plain(s.acceptance)} if s.acceptance else {}),
            **({"recomputed_multiple": _recomputed_multiple(job)} if s.verify_kv.mode == "partial" else {}),
            **({"kv": to_plain(s.kv)} if s.kv.where == "host" else {}),
            "config": to_plain(s),
            "provenance": provenance(),
        },
        rows,
    )
    _print(out, job, rows, s)
    return {"out": str(out), "rows": len(rows)}


def _timed_document(job: Job, s: Settings) -> Job:
    """The same job with its first document alone, cut at the longest context, and room behind it."""
    first, longest = job.documents[0], max(s.contexts)
    if len(first.prompt_ids) < longest:  # a shorter prompt would be timed as a longer one
        raise UserError(f"{first.name} has {len(first.prompt_ids)} tokens, contexts go up to {longest}", "lower them")
    cut = replace(first, prompt_ids=first.prompt_ids[:longest], new_tokens=s.new_tokens)
    return replace(job, documents=[cut])


def _measure(job: Job, s: Settings, plans: list[Plan], *, plain: bool, bar: Bar) -> list[dict[str, Any]]:
    """Cost rows of one drafter. plain: of plain decoding too."""
    rows: list[dict[str, Any]] = []
    policies = [policy for plan in plans for policy in plan.all_policies]
    prefilled = job.sequences(job.documents[:1], policies, copies=max(s.batches))
    for batch in s.batches:
        bench = Bench(job, s, plans, prefilled.repeated(batch))
        for context in s.contexts:
            rows += bench.measure(context, plain=plain)
            bar.advance(1, f"{plans[0].drafter.label}, context {context}, batch {batch}")
        del bench
        gc.collect()  # sequences and their graphs refer to each other
    return rows


def _recomputed_multiple(job: Job) -> int:
    """Corrections recompute whole multiples of so many rows."""
    return CUDA_RECOMPUTED_MULTIPLE if job.model.decoder.device.type == "cuda" else 1


def _print(out: Path, job: Job, rows: list[dict[str, Any]], s: Settings) -> None:
    said = (" (random weights)" if job.model.random else "") + (SAID if s.acceptance else "")
    title = f"costs {out}: {job.name}{said}, median [p10, p90] in ms"
    table = Table(title=escape(title), title_justify="left")
    partial = ("source",) if any(row["source"] for row in rows) else ()
    for column in ("op", "drafter", *partial, "context", "batch", "k", "budget", "ms", "p10", "p90", "GB/s"):
        table.add_column(column, justify="left" if column in ("op", "drafter", "source") else "right")
    for row in sorted(rows, key=lambda r: tuple(r[name] for name in ORDER)):
        rate = f"{row['bytes'] / row['median_us'] / 1e3:.1f}" if row["bytes"] and row["median_us"] else "-"
        table.add_row(
            row["op"],
            row["drafter"] if row["op"] != "plain" else "",
            *(row[name] for name in partial),
            str(row["context_tokens"]),
            str(row["batch"]),
            str(row["k"]) if row["op"] in WITH_K else "",
            str(row["budget"]) if row["budget"] else "",
            *(f"{row[name] / 1e3:.2f}" for name in ("median_us", "p10_us", "p90_us")),
            rate,
        )
    table_console().print(table)
