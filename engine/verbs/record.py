"""specdial record: decode a workload under one policy and leave a trace.

With `dense`, every position of the output is drafted under several arms too, so that any controller can be replayed.
With `fidelity`, every token of the output is judged by full verification too, and plain decoding runs beside.
With `probes`, partial verifications of several sources, budgets and ages are judged at places of the output (probing).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from specdial.engine.acceptance import JUDGED, SAID, Acceptance, said_of
from specdial.engine.batches import Batches
from specdial.engine.dense import dense_table, record_dense
from specdial.engine.fidelity import Fidelity, check_greedy, measure_fidelity, plain_output, probes_table, summary
from specdial.engine.job import Job, ModelSettings, describe, hardware, history_spec, load_job
from specdial.engine.loop import Decoding
from specdial.engine.probing import Probing, arms_meta, probe_arms, record_probes
from specdial.engine.progress import Pace, progress, watched
from specdial.engine.recorder import Recorder
from specdial.engine.sampling import Sampling
from specdial.engine.trace.writer import TraceWriter
from specdial.engine.workloads import Document
from specdial.policies.artifact import claim_directory, provenance
from specdial.policies.console import table_console
from specdial.policies.errors import UserError
from specdial.policies.fields import parse, setting, to_plain
from specdial.policies.file import policy_digest
from specdial.policies.schema import MOST_KEYS, DraftKV, Policy, policy_from_mapping


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of `record`. budgets: the arms' budgets beside the policy's own; k_max: drafts per position and arm."""

    model: ModelSettings
    workload: dict[str, Any]
    policy: dict[str, Any]
    out: str
    split: str = "all"
    batch: int = setting(1, low=1, high=1024)
    dense: bool = False
    budgets: tuple[int, ...] = setting((), low=1, high=MOST_KEYS)
    k_max: int = setting(8, low=1, high=64)
    sampling: Sampling = field(default_factory=Sampling)
    acceptance: Acceptance = field(default=JUDGED, metadata={"later": True})
    fidelity: bool = setting(False, later=True)
    probes: bool = setting(False, later=True)
    probe: Probing = field(default=Probing(), metadata={"later": True})


def run(settings: Mapping[str, Any], job: Job | None = None) -> dict[str, Any]:
    """Record a trace into `out`, or resume one. Returns the number of documents, rounds and tokens in it.

    job: a loaded model and its documents, instead of those that the settings name.
    """
    s = parse(Settings, settings)
    policy = policy_from_mapping(s.policy, "policy")
    arms, synthetic = _arms(s, policy), s.acceptance.of_one(policy)
    _check_fidelity(s, policy)
    widest = policy_from_mapping({"controller": {"kind": "fixed", "k": s.k_max}, "draft_kv": to_plain(arms[0])})
    probed = _probed(s, policy)
    decoded = [policy, *([widest] if s.dense else []), *probed]
    drafter = policy.drafter if policy.k_max else widest.drafter
    history_spec(decoded)
    job = job or load_job(s.model, s.workload, s.split)
    described = describe(job, s.sampling, decoded)
    out = Path(s.out)
    claim_directory(out, "record", to_plain(s))
    writer = TraceWriter(
        out,
        {
            **described,
            "hardware": hardware(job.model.decoder.device),
            "policy": policy.decisions(),
            "policy_digest": policy_digest(policy),
            "arms": [{"arm": i, "drafter": to_plain(drafter), "draft_kv": to_plain(a)} for i, a in enumerate(arms)],
            "k_max": s.k_max if s.dense else policy.k_max,
            "dense": s.dense,
            "batch": s.batch,
            **({"probe_arms": arms_meta(probed)} if probed else {}),
            **said_of(synthetic),
            "config": to_plain(s),
            "provenance": provenance(),
        },
    )
    finished = writer.finished()
    groups = [job.documents[i : i + s.batch] for i in range(0, len(job.documents), s.batch)]
    totals = {"documents": 0, "rounds": 0, "tokens": 0}
    batches = Batches(job, decoded)
    strayed: list[Fidelity] = []

    def record_group(group: list[Document]) -> None:
        sequences = batches.prefilled(group)
        recorder = Recorder(group)
        numbers = [d.index for d in group]
        decoding = Decoding(sequences, policy, s.sampling, numbers, synthetic=synthetic)
        for round_ in watched(decoding.rounds(), bar, pace):
            recorder.add(round_)
        written = [list(t) for t in sequences.tokens]
        judged: list[Fidelity] = []
        if s.fidelity:
            judged = measure_fidelity(sequences, policy, numbers, plain_output(sequences, numbers))
            strayed.extend(judged)
        for b, document in enumerate(group):
            tables: dict[str, Any] = recorder.tables(b, written[b])
            if s.fidelity:
                tables["probes"] = probes_table(document.index, len(document.prompt_ids), judged[b])
            if s.dense:
                tables["drafts"] = dense_table(document.index, record_dense(sequences, b, arms, s.k_max))
            if probed:
                found = record_probes(sequences, written[b], probed, s.probe)
                found |= {
                    "doc": [document.index] * len(found["position"]),
                    "hidden_cosine": [None] * len(found["position"]),
                }
                own = tables.get("probes", {})
                tables["probes"] = {name: [*own.get(name, ()), *column] for name, column in found.items()}
            writer.write(document.index, tables)
            totals["documents"] += 1
            totals["rounds"] += len(tables["rounds"]["doc"])
            totals["tokens"] += len(tables["outputs"]["position"])
            bar.advance(1)

    pace = Pace()
    with progress("record", len(job.documents)) as bar:
        for group in groups:
            if all(d.index in finished for d in group):
                bar.advance(len(group))
            else:
                record_group(group)
    resumed = len(job.documents) - totals["documents"]
    _print(out, job, policy, totals, resumed=resumed, synthetic=bool(synthetic))
    found = {"fidelity": summary(strayed)} if strayed else {}
    for name, value in found.get("fidelity", {}).items():
        table_console().print(f"{name} {value}")
    return {"out": str(out), "resumed_documents": resumed, **said_of(synthetic), **found, **totals}


def _probed(s: Settings, policy: Policy) -> list[Policy]:
    """The arms to probe. Raises UserError where they cannot be."""
    if not s.probes:
        return []
    if s.acceptance:
        raise UserError("probes=true judges a text, acceptance is synthetic", "leave one of them out")
    if s.batch != 1:
        raise UserError(f"probes=true takes one document at a time, batch is {s.batch}", "set batch=1")
    return probe_arms(policy, s.probe)


def _check_fidelity(s: Settings, policy: Policy) -> None:
    """Raises UserError where there is nothing to judge."""
    if not s.fidelity:
        return
    check_greedy(s.sampling)
    if s.acceptance:
        raise UserError("fidelity=true judges a text, acceptance is synthetic", "leave one of them out")
    if policy.lossless:
        raise UserError("fidelity=true judges lossy policies, this one is lossless", "set fidelity=false")


def _arms(s: Settings, policy: Policy) -> list[DraftKV]:
    """The policy's own selection first, if it drafts, then one arm per other budget."""
    if not s.dense:
        return [policy.draft_kv]
    if s.acceptance:
        raise UserError("dense=true records what drafts are worth, acceptance is synthetic", "leave acceptance out")
    if not s.sampling.greedy:
        raise UserError("dense=true needs greedy decoding", "set sampling.temperature=0 or dense=false")
    if s.batch != 1:
        raise UserError(f"dense=true records one document at a time, batch is {s.batch}", "set batch=1")
    if not policy.lossless:
        raise UserError("dense=true needs a lossless policy", "verify every round in full")
    if policy.k_max > s.k_max:
        raise UserError(f"the policy drafts up to {policy.k_max} tokens, k_max is {s.k_max}", "raise k_max")
    for drafter in [v.drafter for v in policy.variants()] if policy.k_max else []:
        if drafter.kind != "sparse_self" or drafter.weights != "model":
            cause = f"dense=true drafts with the target and its own weights, the policy's drafter is {drafter.label}"
            raise UserError(cause, "set dense=false, or record under drafter sparse_self", field="drafter")
    budgets = ([policy.draft_kv.budget] if policy.k_max else []) + list(s.budgets)
    arms = [replace(policy.draft_kv, budget=b) for b in dict.fromkeys(budgets)]
    if not arms:
        raise UserError("dense=true with no arm", "name at least one of budgets")
    for arm in arms:
        arm.check("budgets")
    return arms


def _print(out: Path, job: Job, policy: Policy, totals: dict[str, int], *, resumed: int, synthetic: bool) -> None:
    table = Table(title=f"recorded {out}", title_justify="left")
    for column in ("model", "workload", "lossless", "documents", "rounds", "tokens", "tokens/round"):
        table.add_column(column, justify="left" if column in ("model", "workload") else "right")
    table.add_row(
        job.name + (" (random weights)" if job.model.random else "") + (SAID if synthetic else ""),
        job.spec.kind,
        "yes" if policy.lossless else "no",
        f"{totals['documents']} (+{resumed} resumed)" if resumed else str(totals["documents"]),
        str(totals["rounds"]),
        str(totals["tokens"]),
        f"{totals['tokens'] / totals['rounds']:.2f}" if totals["rounds"] else "-",
    )
    table_console().print(table)
