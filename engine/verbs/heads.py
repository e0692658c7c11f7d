"""specdial heads: rank heads by how they look facts up, and record attention rows that scoring heads are searched on.

Ranking runs on needle documents of the workload's length, for the model and its draft model. Rows are recorded on the
workload's documents, teacher-forced on the model's own greedy output: of the last `rows` positions, every layer's mean
over heads, which is what a selection is to recall, and each of the best heads of every layer, which may score keys.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from specdial.engine.attention_rows import attention_rows, largest, read_queries
from specdial.engine.batches import Batches
from specdial.engine.head_ranking import needle_scores, rank_heads
from specdial.engine.job import Job, ModelSettings, describe, empty_sequences, hardware, load_job
from specdial.engine.loop import Decoding
from specdial.engine.progress import Bar, progress
from specdial.engine.sampling import Sampling
from specdial.engine.sequences import Sequences
from specdial.engine.trace.attention import (
    ALL_HEADS,
    DRAFT,
    TARGET,
    AttentionMeta,
    HeadScore,
    KeptRows,
    RowRun,
)
from specdial.engine.trace.attention_file import write_attention, write_rows
from specdial.engine.weights import LoadedModel
from specdial.engine.workloads import Document, WorkloadSpec, build
from specdial.policies.artifact import claim_directory, provenance
from specdial.policies.console import table_console
from specdial.policies.fields import parse, setting, to_plain
from specdial.policies.schema import plain_policy, policy_from_mapping

SHOWN_HEADS = 8  # of each model, in the printed table
Named = dict[tuple[str, int, int], KeptRows]


@dataclass(frozen=True, slots=True)
class Ranking:
    """The needle documents that heads are ranked on; their length is the workload's.

    The seed differs from the workloads' own default, so that heads are not ranked on the documents they are shown on.
    """

    documents: int = setting(4, low=1, high=10_000)
    seed: int = setting(1, low=0)
    filler: str = "book"


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of `heads`.

    draft: a draft model, as in a policy's drafter.model, or None. rows: last positions of each document to record, its
    output first of all. heads_per_layer: candidates of each layer. candidate_keys, recalled_keys: most entries kept of
    a candidate's row, and of a layer's mean.
    """

    model: ModelSettings
    workload: dict[str, Any]
    out: str
    draft: str | None = None
    split: str = "all"
    rows: int = setting(48, low=20, high=4096)
    heads_per_layer: int = setting(4, low=1, high=1024)
    candidate_keys: int = setting(1024, low=1, high=1 << 24)
    recalled_keys: int = setting(4096, low=1, high=1 << 24)
    ranking: Ranking = field(default_factory=Ranking)


def run(settings: Mapping[str, Any], job: Job | None = None) -> dict[str, Any]:
    """Rank and record into `out`. Returns where that is, how many documents and rows, and the best head of each model.

    job: a loaded model and its documents, instead of those that the settings name. An unfinished run starts over.
    """
    s = parse(Settings, settings)
    job = job or load_job(s.model, s.workload, s.split)
    models = {TARGET: job.model, **({DRAFT: _draft_model(job, s.draft)} if s.draft else {})}
    with progress("heads", 0) as bar:
        needles = _needles(job, s.ranking)
        out = Path(s.out)
        claim_directory(out, "heads", to_plain(s))
        (out / "meta.json").unlink(missing_ok=True)  # incomplete from here on
        bar.expect(len(models) * (len(needles) + len(job.documents)))
        heads: list[HeadScore] = []
        for source, model in models.items():
            bar.say(f"ranking heads of the {source}", now=True)
            heads += rank_heads(source, needle_scores(model, needles, bar.advance))
        bar.say("recording rows", now=True)
        runs = _record(job, models, _candidates(heads, s.heads_per_layer), s, bar)
    described = describe(job, Sampling())
    draft: dict[str, Any] | None = None
    if drafted := models.get(DRAFT):
        draft = {"name": s.draft, "digest": drafted.digest, "layers": drafted.config.layers, "random": drafted.random}
    meta = AttentionMeta(
        model=described["model"],
        draft=draft,
        documents=tuple(runs),
        heads_per_layer=s.heads_per_layer,
        candidate_keys=s.candidate_keys,
        recalled_keys=s.recalled_keys,
        workload=described["workload"],
        ranking=to_plain(s.ranking),
        hardware=hardware(job.model.decoder.device),
        provenance=provenance(),
    )
    write_attention(out, meta, heads)
    _print(out, heads, random=any(model.random for model in models.values()))
    best = {h.source: {"layer": h.layer, "head": h.head, "needle_mass": h.needle_mass} for h in heads if h.rank == 1}
    return {"out": str(out), "documents": len(runs), "rows": sum(run.rows for run in runs), "best": best}


def _draft_model(job: Job, name: str) -> LoadedModel:
    """Load it as a policy that drafts with it would. Raises UserError when its tokens mean something else."""
    drafter = {"kind": "model", "model": name}
    policy = policy_from_mapping({"drafter": drafter, "controller": {"kind": "fixed", "k": 1}})
    return job.drafting([policy])[name]


def _needles(job: Job, ranking: Ranking) -> list[Document]:
    spec = WorkloadSpec(
        kind="needle",
        context_tokens=job.spec.context_tokens,
        documents=ranking.documents,
        seed=ranking.seed,
        filler=ranking.filler,
    )
    return build(spec, job.model.tokenizer)


def _candidates(heads: list[HeadScore], per_layer: int) -> dict[tuple[str, int], list[int]]:
    """The best heads of every (source, layer), in ascending order."""
    found: dict[tuple[str, int], list[int]] = {}
    for head in heads:
        if head.rank_in_layer <= per_layer:
            found.setdefault((head.source, head.layer), []).append(head.head)
    return found


def _record(
    job: Job,
    models: dict[str, LoadedModel],
    candidates: dict[tuple[str, int], list[int]],
    s: Settings,
    bar: Bar,
) -> list[RowRun]:
    """Write each document's part; returns where their rows lie."""
    plain = plain_policy()
    batches = Batches(job, [plain])
    drafting = None
    if DRAFT in models:
        longest = max(len(d.prompt_ids) + d.new_tokens for d in job.documents)
        drafting = empty_sequences(models[DRAFT], longest, 1, [plain])
    runs = []
    for document in job.documents:
        sequences = batches.prefilled([document])
        for _ in Decoding(sequences, plain, Sampling(), [document.index]).rounds():
            pass
        tokens = list(sequences.tokens[0])
        start = max(1, len(tokens) - s.rows)
        kept = _kept(sequences, tokens, start, TARGET, candidates, s)
        bar.advance()
        if drafting is not None:
            drafting.prefill([tokens[: start + 1]], [0])
            kept |= _kept(drafting, tokens, start, DRAFT, candidates, s)
            bar.advance()
        write_rows(Path(s.out), document.index, kept, start)
        runs.append(RowRun(document.index, document.split, len(document.prompt_ids), start, len(tokens) - start))
    return runs


def _kept(
    sequences: Sequences,
    tokens: list[int],
    start: int,
    source: str,
    candidates: dict[tuple[str, int], list[int]],
    s: Settings,
) -> Named:
    """The rows of one model, layer by layer: its candidates, and for the target the means over heads."""
    queries = read_queries(sequences, tokens, start)  # [L, R, H, D]
    kept: Named = {}
    for layer in range(len(queries)):
        keys = sequences.cache.view(layer, len(tokens))[0][0]  # [Hk, S, D]
        rows = attention_rows(queries[layer], keys, start)  # [R, H, S]
        if source == TARGET:
            kept[source, layer, ALL_HEADS] = largest(rows.mean(1, keepdim=True), start, s.recalled_keys)[0]
        heads = candidates[source, layer]
        parts = largest(rows[:, heads], start, s.candidate_keys)
        kept |= {(source, layer, head): part for head, part in zip(heads, parts)}
    return kept


def _print(out: Path, heads: list[HeadScore], *, random: bool) -> None:
    title = f"heads by attention on the needle, {out}" + (" (random weights)" if random else "")
    table = Table(title=title, title_justify="left")
    for column in ("model", "rank", "layer", "head", "rank in layer", "needle mass", "copies"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for h in sorted(heads, key=lambda h: (h.source != TARGET, h.rank)):
        if h.rank <= SHOWN_HEADS:
            numbers = (h.rank, h.layer, h.head, h.rank_in_layer)
            shown = (*map(str, numbers), f"{h.needle_mass:.3f}", f"{h.copy_frac:.0%}")
            table.add_row(h.source, *shown, end_section=h.rank == SHOWN_HEADS)
    table_console().print(table)
