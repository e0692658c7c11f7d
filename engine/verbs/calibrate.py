"""specdial calibrate: what draft, verification, selection and plain decode cost here, by context, batch, k and budget.

Costs are taken from real rounds on real keys, not from isolated calls: every configuration is decoded for one round
from the same committed state, configurations interleaved so that drift of the machine falls on all alike.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from specdial.engine.job import Job, ModelSettings, describe, hardware, load_job
from specdial.engine.loop import Decoding, Round
from specdial.engine.progress import progress
from specdial.engine.sampling import Sampling
from specdial.engine.sequences import Sequences
from specdial.engine.trace.reader import read_costs
from specdial.engine.trace.writer import write_costs
from specdial.policies.artifact import claim_directory, provenance
from specdial.policies.console import table_console
from specdial.policies.errors import UserError
from specdial.policies.fields import parse, setting, to_plain
from specdial.policies.schema import DraftKV, Policy, plain_policy, policy_from_mapping

WARMUP_ROUNDS = 1
PLAIN = plain_policy()


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of `calibrate`. contexts: committed lengths; ks: draft lengths, 0 is a verification without drafts."""

    model: ModelSettings
    workload: dict[str, Any]
    out: str
    contexts: tuple[int, ...] = setting((2048, 4096), low=64)
    batches: tuple[int, ...] = setting((1,), low=1)
    ks: tuple[int, ...] = setting((0, 1, 2, 4, 8), low=0, high=64)
    budgets: tuple[int, ...] = setting((256, 512), low=1)
    draft_kv: DraftKV = field(default_factory=DraftKV)
    repeats: int = setting(5, low=3, high=1000)


def run(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Measure and write the cost table into `out`, or show the one it holds. Returns the number of rows."""
    s = parse(Settings, settings)
    if not (s.contexts and s.batches and s.ks and s.budgets):
        raise UserError("contexts, batches, ks and budgets must not be empty", "name at least one value of each")
    workload = {**s.workload, "context_tokens": max(s.contexts), "documents": 3, "new_tokens": max(s.ks) + 2}
    workload["keep_short"] = False  # a shorter prompt would be timed as a longer one
    policies = {(k, budget): _policy(s, k, budget) for k in s.ks for budget in s.budgets}
    job = load_job(s.model, workload, "train")
    job.model.config.check_context(max(s.contexts) + max(s.ks) + 2)
    out = Path(s.out)
    here = hardware(job.model.decoder.device)
    if claim_directory(out, "calibrate", to_plain(s)) and (out / "meta.json").exists():
        held = read_costs(out)
        if held.meta["model"]["digest"] != job.model.digest:
            raise UserError(f"{out} holds costs of another model", "choose another out= or delete that directory")
        if held.meta.get("hardware") == here:
            print(f"{out} was measured before; delete it to measure again")
            _print(out, job, held.rows.to_pylist())
            return {"out": str(out), "rows": held.rows.num_rows}
    rows: list[dict[str, Any]] = []
    with progress("calibrate", len(s.contexts) * len(s.batches)) as bar:
        prefilled = job.sequences(job.documents[:1], list(policies.values()))
        for batch in s.batches:
            bench = _Bench(job, s, policies, prefilled.repeated(batch))
            for context in s.contexts:
                rows += bench.measure(context)
                bar.advance(1, f"context {context}, batch {batch}")
    meta = describe(job, Sampling())
    write_costs(
        out,
        {
            "model": meta["model"],
            "graph_mode": meta["graph_mode"],
            "hardware": here,
            "config": to_plain(s),
            "provenance": provenance(),
        },
        rows,
    )
    _print(out, job, rows)
    return {"out": str(out), "rows": len(rows)}


class _Bench:
    """One batch of identical prompts, held at a chosen committed length."""

    def __init__(
        self, job: Job, settings: Settings, policies: dict[tuple[int, int], Policy], sequences: Sequences
    ) -> None:
        self.settings = settings
        self.kv_bytes = describe(job, Sampling())["model"]["kv_bytes_per_token"]
        self.weight_bytes = job.model.decoder.weight_bytes
        self.policies = policies
        self.prompt = job.documents[0].prompt_ids
        self.sequences = sequences

    def measure(self, context: int) -> list[dict[str, Any]]:
        """Cost rows at one committed length."""
        samples: dict[tuple[str, int, int], list[float]] = {}
        for _ in range(WARMUP_ROUNDS):
            for k, budget in self._configurations(0):
                self._round(context, k, budget)
            self._round(context, None, 0)
        for repeat in range(self.settings.repeats):
            for k, budget in self._configurations(repeat):
                r = self._round(context, k, budget)
                samples.setdefault(("verify", k, 0), []).append(r.verify_us)
                samples.setdefault(("host", k, 0), []).append(r.host_us)
                if k:
                    samples.setdefault(("draft", 0, budget), []).append(r.draft_us / k)
                    samples.setdefault(("select", 0, budget), []).append(r.select_us)
            r = self._round(context, None, 0)
            samples.setdefault(("plain", 0, 0), []).append(r.verify_us + r.host_us)
        return [self._row(key, context, np.array(values)) for key, values in samples.items()]

    def _configurations(self, repeat: int) -> Iterator[tuple[int, int]]:
        """Every k once, budgets and order rotating with the repeat."""
        ks, budgets = self.settings.ks, self.settings.budgets
        for i in range(len(ks)):
            at = (i + repeat) % len(ks)
            yield ks[at], budgets[(at + repeat) % len(budgets)]

    def _round(self, context: int, k: int | None, budget: int) -> Round:
        """One round from a committed length of `context`; k None is plain decoding."""
        self.sequences.hold(self.prompt[:context], limit=1 if k == 0 else 2 + max(self.settings.ks))
        policy = self.policies[(k, budget)] if k is not None else PLAIN
        return Decoding(self.sequences, policy, Sampling(), list(range(self.sequences.batch))).decode_round()

    def _row(self, key: tuple[str, int, int], context: int, values: np.ndarray) -> dict[str, Any]:
        op, k, budget = key
        batch = self.sequences.batch
        keys = {"plain": context, "verify": context + k, "draft": budget, "select": 2 * budget, "host": 0}[op]
        weights = self.weight_bytes if op in ("plain", "verify", "draft") else 0
        return {
            "op": op,
            "context_tokens": context,
            "batch": batch,
            "k": k,
            "budget": budget,
            "median_us": float(np.median(values)),
            "p10_us": float(np.percentile(values, 10)),
            "p90_us": float(np.percentile(values, 90)),
            "n": len(values),
            "bytes": weights + batch * keys * self.kv_bytes,
        }


def _policy(s: Settings, k: int, budget: int) -> Policy:
    draft_kv = {**to_plain(s.draft_kv), "budget": budget}
    return policy_from_mapping({"controller": {"kind": "fixed", "k": max(k, 1)}, "draft_kv": draft_kv})


def _print(out: Path, job: Job, rows: list[dict[str, Any]]) -> None:
    title = f"costs {out}: {job.name}{' (random weights)' if job.model.random else ''}, median [p10, p90] in ms"
    table = Table(title=title, title_justify="left")
    for column in ("op", "context", "batch", "k", "budget", "ms", "p10", "p90", "GB/s"):
        table.add_column(column, justify="left" if column == "op" else "right")
    for row in sorted(rows, key=lambda r: (r["batch"], r["context_tokens"], r["op"], r["k"], r["budget"])):
        rate = f"{row['bytes'] / row['median_us'] / 1e3:.1f}" if row["bytes"] else "-"
        table.add_row(
            row["op"],
            str(row["context_tokens"]),
            str(row["batch"]),
            str(row["k"]) if row["op"] in ("verify", "host") else "",
            str(row["budget"]) if row["budget"] else "",
            *(f"{row[name] / 1e3:.2f}" for name in ("median_us", "p10_us", "p90_us")),
            rate,
        )
    table_console().print(table)
