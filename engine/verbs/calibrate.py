"""specdial calibrate: what draft, verification, selection and plain decode cost here, by context, batch, k and budget.

Costs are taken from real rounds on real keys, not from isolated calls: every configuration is decoded for a few rounds
from the same committed state, configurations interleaved so that drift of the machine falls on all alike. Drafters are
timed one after another, each on sequences that hold what it needs and nothing else: attention rows cost a verification
time that a drafter without history does not spend.
"""

import gc
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from specdial.engine.acceptance import JUDGED, SAID, Acceptance
from specdial.engine.job import Job, ModelSettings, describe, hardware, load_job
from specdial.engine.loop import Decoding, Round
from specdial.engine.progress import Bar, progress
from specdial.engine.sampling import Sampling
from specdial.engine.sequences import Sequences
from specdial.engine.trace.reader import read_costs
from specdial.engine.trace.writer import write_costs
from specdial.policies.artifact import claim_directory, provenance
from specdial.policies.console import table_console
from specdial.policies.errors import UserError
from specdial.policies.fields import parse, setting, to_plain
from specdial.policies.schema import Drafter, DraftKV, Policy, plain_policy, policy_from_mapping

WARMUP_REPEATS = 1
GPU_ROUNDS, CPU_ROUNDS = 4, 2  # in a row, of which the first is left out
ORDER = ("batch", "context_tokens", "drafter", "op", "k", "budget")  # of the rows of the printed table
PLAIN = plain_policy()


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of `calibrate`. contexts: committed lengths; ks: draft lengths, 0 is a verification without drafts.

    drafters: what drafts; plain steps are timed beside the first. draft_kv: the selection apart from its budget.
    """

    model: ModelSettings
    workload: dict[str, Any]
    out: str
    contexts: tuple[int, ...] = setting((2048, 4096), low=64)
    batches: tuple[int, ...] = setting((1,), low=1)
    ks: tuple[int, ...] = setting((0, 1, 2, 4, 8), low=0, high=64)
    budgets: tuple[int, ...] = setting((256, 512), low=1)
    draft_kv: DraftKV = field(default_factory=DraftKV)
    drafters: tuple[Drafter, ...] = setting((Drafter(),), later=True)
    repeats: int = setting(5, low=3, high=1000)
    acceptance: Acceptance = field(default=JUDGED, metadata={"later": True})

    @property
    def new_tokens(self) -> int:
        """Room that no measured round comes to the end of."""
        return (GPU_ROUNDS + 2) * (max(self.ks) + 1)


def run(settings: Mapping[str, Any], job: Job | None = None) -> dict[str, Any]:
    """Measure and write the cost table into `out`, or show the one it holds. Returns the number of rows.

    job: a loaded model and its documents, instead of those that the settings name; the first one is timed.
    """
    s = parse(Settings, settings)
    if not (s.contexts and s.batches and s.ks and s.budgets):
        raise UserError("contexts, batches, ks and budgets must not be empty", "name at least one value of each")
    plans = _plans(s)
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
    with progress("calibrate", len(plans) * len(s.contexts) * len(s.batches)) as bar:
        for number, plan in enumerate(plans):
            rows += _measure(job, s, plan, plain=number == 0, bar=bar)
    meta = describe(job, Sampling())
    write_costs(
        out,
        {
            "model": meta["model"],
            "graph_mode": meta["graph_mode"],
            "hardware": here,
            **({"acceptance": to_plain(s.acceptance)} if s.acceptance else {}),
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


@dataclass(frozen=True, slots=True)
class _Plan:
    """What to time of one drafter: a policy for every (k, budget); the only budget is 0 where it reads no selection."""

    drafter: Drafter
    budgets: tuple[int, ...]
    policies: dict[tuple[int, int], Policy]


def _measure(job: Job, s: Settings, plan: _Plan, *, plain: bool, bar: Bar) -> list[dict[str, Any]]:
    """Cost rows of one drafter. plain: of plain decoding too."""
    rows: list[dict[str, Any]] = []
    prefilled = job.sequences(job.documents[:1], list(plan.policies.values()), copies=max(s.batches))
    for batch in s.batches:
        bench = _Bench(job, s, plan, prefilled.repeated(batch))
        for context in s.contexts:
            rows += bench.measure(context, plain=plain)
            bar.advance(1, f"{plan.drafter.label}, context {context}, batch {batch}")
        del bench
        gc.collect()  # sequences and their graphs refer to each other
    return rows


class _Bench:
    """One batch of identical prompts, held at a chosen committed length."""

    def __init__(self, job: Job, settings: Settings, plan: _Plan, sequences: Sequences) -> None:
        self.settings = settings
        self.kv_bytes = describe(job, Sampling())["model"]["kv_bytes_per_token"]
        self.weight_bytes = job.model.decoder.weight_bytes
        self.plan = plan
        self.prompt = job.documents[0].prompt_ids
        self.sequences = sequences

    def measure(self, context: int, *, plain: bool) -> list[dict[str, Any]]:
        """Cost rows at one committed length. plain: of plain decoding too."""
        samples: dict[tuple[str, int, int], list[float]] = {}
        for _ in range(WARMUP_REPEATS):
            for k, budget in self._configurations(0):
                self._rounds(context, k, budget)
            if plain:
                self._rounds(context, None, 0)
        for repeat in range(self.settings.repeats):
            for k, budget in self._configurations(repeat):
                for r in self._rounds(context, k, budget):
                    if int(r.k.min()) < k:  # a lookup that found nothing
                        continue
                    samples.setdefault(("verify", k, 0), []).append(r.verify_us)
                    samples.setdefault(("host", k, 0), []).append(r.host_us)
                    if k:
                        samples.setdefault(("draft", 0, budget), []).append(r.draft_us / k)
                        samples.setdefault(("select", 0, budget), []).append(r.select_us)
            if plain:
                for r in self._rounds(context, None, 0):
                    samples.setdefault(("plain", 0, 0), []).append(r.verify_us + r.host_us)
        missing = [k for k in self.settings.ks if ("verify", k, 0) not in samples]
        if missing:
            raise UserError(
                f"drafter {self.plan.drafter.label} found no {missing[0]} drafts at context {context} of this text",
                "calibrate at another context or with another workload",
            )
        return [self._row(key, context, np.array(values)) for key, values in samples.items()]

    def _configurations(self, repeat: int) -> Iterator[tuple[int, int]]:
        """Every k once, budgets and order rotating with the repeat."""
        ks, budgets = self.settings.ks, self.plan.budgets
        for i in range(len(ks)):
            at = (i + repeat) % len(ks)
            yield ks[at], budgets[(at + repeat) % len(budgets)]

    def _rounds(self, context: int, k: int | None, budget: int) -> list[Round]:
        """Rounds in a row from a committed length of `context`, the first left out; k None is plain decoding.

        The first has no last one, so its host_us says nothing of what lies between two. On a CPU its drafts were also
        seen to take 15 % longer than those of later rounds.
        """
        self.sequences.hold(self.prompt[:context], limit=self.settings.new_tokens)
        policy = self.plan.policies[k, budget] if k is not None else PLAIN
        synthetic = self.settings.acceptance.of(policy) if k else ()
        numbers = list(range(self.sequences.batch))
        decoding = Decoding(self.sequences, policy, Sampling(), numbers, synthetic=synthetic)
        with closing(decoding.rounds()) as rounds:
            return list(islice(rounds, GPU_ROUNDS if self.sequences.graphs.enabled else CPU_ROUNDS))[1:]

    def _row(self, key: tuple[str, int, int], context: int, values: np.ndarray) -> dict[str, Any]:
        op, k, budget = key
        return {
            "op": op,
            "drafter": "none" if op == "plain" else self.plan.drafter.label,
            "context_tokens": context,
            "batch": self.sequences.batch,
            "k": k,
            "budget": budget,
            "median_us": float(np.median(values)),
            "p10_us": float(np.percentile(values, 10)),
            "p90_us": float(np.percentile(values, 90)),
            "n": len(values),
            "bytes": self._bytes(op, context, k, budget),
        }

    def _bytes(self, op: str, context: int, k: int, budget: int) -> int:
        """Weights, keys and values that an operation must read; 0 for drafts with weights other than the model's."""
        drafter, page = self.plan.drafter, self.settings.draft_kv.page
        if op in ("draft", "select") and (not drafter.reads_selection or drafter.weights != "model"):
            return 0
        summaries = context // page if drafter.kind == "quest" else 0  # a smallest and a largest key a page
        keys = {"plain": context, "verify": context + k, "draft": budget + summaries, "select": 2 * budget, "host": 0}
        weights = self.weight_bytes if op in ("plain", "verify", "draft") else 0
        return weights + self.sequences.batch * keys[op] * self.kv_bytes


def _plans(s: Settings) -> list[_Plan]:
    """Raises UserError on drafters that cannot be timed, or that the table could not tell apart."""
    labels = [drafter.label for drafter in s.drafters]
    repeated = next((label for label in labels if labels.count(label) > 1), None)
    if not labels or repeated:
        raise UserError(f"drafters holds {repeated} twice" if repeated else "drafters is empty", "name each once")
    for name, only in (("budget_frac", 0.0), ("refresh_rounds", 1)):
        if getattr(s.draft_kv, name) != only:
            raise UserError(f"draft_kv.{name} is {getattr(s.draft_kv, name)}", f"leave it at {only}: replay prices it")
    plans = []
    for i, drafter in enumerate(s.drafters):
        if drafter.kind == "none":
            raise UserError(f"drafters[{i}].kind is none", "leave it out: plain steps are always timed")
        budgets = s.budgets if drafter.reads_selection else (0,)
        plans.append(_Plan(drafter, budgets, {(k, b): _policy(s, drafter, k, b) for k in s.ks for b in budgets}))
        for (k, _), policy in plans[-1].policies.items():
            if k:
                s.acceptance.of(policy)
    return plans


def _policy(s: Settings, drafter: Drafter, k: int, budget: int) -> Policy:
    """k 0: a policy that could draft and never does, so that its rounds keep attention rows as others do."""
    parts = {"drafter": to_plain(drafter), "controller": {"kind": "fixed", "k": max(k, 1)}}
    if k == 0:
        parts["cells"] = [{"overrides": {"controller": {"kind": "none"}}}]
    selection = {"draft_kv": {**to_plain(s.draft_kv), "budget": budget}} if drafter.reads_selection else {}
    return policy_from_mapping({**parts, **selection})


def _print(out: Path, job: Job, rows: list[dict[str, Any]], s: Settings) -> None:
    said = (" (random weights)" if job.model.random else "") + (SAID if s.acceptance else "")
    title = f"costs {out}: {job.name}{said}, median [p10, p90] in ms"
    table = Table(title=escape(title), title_justify="left")
    for column in ("op", "drafter", "context", "batch", "k", "budget", "ms", "p10", "p90", "GB/s"):
        table.add_column(column, justify="left" if column in ("op", "drafter") else "right")
    for row in sorted(rows, key=lambda r: tuple(r[name] for name in ORDER)):
        rate = f"{row['bytes'] / row['median_us'] / 1e3:.1f}" if row["bytes"] else "-"
        table.add_row(
            row["op"],
            row["drafter"] if row["op"] != "plain" else "",
            str(row["context_tokens"]),
            str(row["batch"]),
            str(row["k"]) if row["op"] in ("verify", "host") else "",
            str(row["budget"]) if row["budget"] else "",
            *(f"{row[name] / 1e3:.2f}" for name in ("median_us", "p10_us", "p90_us")),
            rate,
        )
    table_console().print(table)
