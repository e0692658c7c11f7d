"""One cell of the prediction benchmark: record, calibrate, predict, validate, compare, for a workload and a context.

Every step is the verb's own `run` on one loaded model. Leaves out where documents come from and where records go.
"""

import contextlib
import gc
import io
import itertools
import json
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from _bench import commit
from _engine_bench import check, save
from prediction_documents import check_batch, documents, spec_of
from prediction_policies import K_MAX, KS, adaptive, fixed, fp8
from prediction_records import compared, compared_kept_full, merged, policy_rows, row_of
from prediction_traces import part_of

from specdial.engine.job import Job
from specdial.engine.trace.reader import read_trace
from specdial.engine.verbs import calibrate, record, validate
from specdial.engine.weights import load_model
from specdial.engine.workloads import Document
from specdial.policies.errors import UserError
from specdial.policies.fields import to_plain
from specdial.policies.file import policy_digest
from specdial.policies.schema import DraftKV, plain_policy
from specdial.simulator.lanes import read_record
from specdial.simulator.verbs import replay

COMMIT = "commit"  # beside a validation: what was run
EXPECTED = (
    *("speedup", "low", "high", "level", "full_batch", "tokens_per_round", "baseline_us_per_token"),
    *("alpha", "gamma", "k", "budget", "batch"),
)


@dataclass
class Clock:
    """Says what is going on and how long each stage took."""

    started_s: float = field(default_factory=time.monotonic)

    @property
    def minutes(self):
        """Since the start."""
        return (time.monotonic() - self.started_s) / 60.0

    @contextlib.contextmanager
    def stage(self, name):
        """One stage, without the tables that the verbs print."""
        begin_s = time.monotonic()
        with contextlib.redirect_stdout(io.StringIO()):
            yield
        gc.collect()  # sequences and their graphs refer to each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        now_s = time.monotonic()
        print(f"[{now_s - self.started_s:5.0f} s] {name}: {now_s - begin_s:.1f} s", flush=True)


@dataclass(frozen=True, slots=True)
class Cell:
    """One workload at one context: its documents in `job`, its files under `folder`.

    settings: model and workload, as the verbs take them. a: the script's arguments. about: plain facts on the texts.
    """

    name: str
    job: Job
    folder: Path
    settings: dict
    a: object
    about: dict

    @property
    def trace(self):
        return self.folder / "trace"

    @property
    def costs(self):
        """One table a context: what a round takes does not depend on the text."""
        return self.folder.parent / f"costs-{self.job.spec.context_tokens}"

    def of(self, split):
        return [d for d in self.job.documents if d.split == split]

    def measured(self, batch):
        """The test documents of a batch: whole batches, or the first few for batch 1. Raises UserError as `check_batch`
        does."""
        test = self.of("test")[: self.a.singles if batch == 1 else None]
        check_batch(batch, self.of("train"), test)
        return test[: len(test) // batch * batch]


def in_work(a, measured):
    """measured(a, folder) with a script's --work, or with a temporary folder."""
    if a.work:
        return measured(a, a.work)
    with tempfile.TemporaryDirectory() as folder:
        return measured(a, Path(folder))


def keep(records, rows, show, out):
    """Show every record as it comes, and save it beside those in `rows`, by id; a later one of an id replaces it."""
    for row in records:
        rows[row["id"]] = row
        show(row)
        if out:
            save([*rows.values()], out)


def load(a, clock):
    """The model of a script's arguments."""
    with clock.stage("load"):
        model = load_model(a.model, device=_device(a))
    check(model.config, model.decoder.device, model.decoder.dtype)
    return model


def cells(a, model, work):
    """Every workload at every context of a script's arguments, one after the other, its files below `work`."""
    name = Path(a.model).stem
    for workload, context in itertools.product(a.workloads, a.contexts):
        spec = spec_of(workload, context, a.train, a.test, a.new_tokens)
        model.config.check_context(context + a.new_tokens)
        found, about = documents(a, model, workload, context, spec)
        settings = {"model": {"source": a.model, "name": name, "device": _device(a)}, "workload": to_plain(spec)}
        folder = work / f"{workload}-{context}"
        yield Cell(folder.name, Job(model, name, spec, found), folder, settings, a, about)


def _device(a):
    return "cpu" if a.small or a.dry else "cuda"


def measure(cell, clock):
    """Yields the records of one cell: a batch's held-out one again after every part of its documents, growing.

    With `--until record`, none.
    """
    a, kv = cell.a, to_plain(DraftKV(budget=cell.a.budgets[0], page=cell.a.page))
    for batch in a.batches:
        cell.measured(batch)
    recorded = replace(cell.job, documents=[*cell.of("train"), *cell.of("test")[: a.own or a.test]])
    with clock.stage(f"{cell.name} record"):
        dense = {"split": "train+test", "dense": True, "budgets": a.budgets, "k_max": K_MAX, "out": str(cell.trace)}
        plain = {**to_plain(plain_policy()), "draft_kv": kv}
        record.run({**cell.settings, "policy": plain, **dense}, recorded)
    float8 = [fp8({**kv, "budget": budget}) for budget in a.budgets] if a.fp8 else []
    for i, policies in enumerate(float8):
        with clock.stage(f"{cell.name} record fp8"):
            sparse = {"policy": to_plain(policies[-1]), "split": "train+test", "out": str(cell.folder / f"fp8-{i}")}
            record.run({**cell.settings, **sparse}, recorded)
    if a.until == "record":
        return
    if not (cell.costs / "meta.json").exists():
        with clock.stage(f"{cell.name} calibrate"):
            calibrate.run({**cell.settings, **calibration(cell), "draft_kv": kv}, timed(cell))
    for batch in a.batches:
        yield from measure_batch(cell, batch, float8, clock)


def calibration(cell):
    """What to time: from the first round's context to the last one's, the grid's draft lengths and budgets."""
    a, context = cell.a, len(cell.job.documents[0].prompt_ids)
    drafters = [{"kind": "sparse_self"}, *([{"kind": "sparse_self", "weights": "fp8"}] if a.fp8 else [])]
    return {
        "contexts": [context, context + a.new_tokens],
        "batches": a.batches,
        "ks": [0, *KS],
        "budgets": a.budgets,
        "drafters": drafters,
        "repeats": a.calibrations,
        "out": str(cell.costs),
    }


def timed(cell):
    """The job with the first train document, its recorded output behind its prompt: real keys at every context."""
    document = cell.of("train")[0]
    outputs = read_trace(cell.trace).outputs.to_pylist()
    output = sorted((row["position"], row["token_id"]) for row in outputs if row["doc"] == document.index)
    longer: Document = replace(document, prompt_ids=[*document.prompt_ids, *(token for _, token in output)])
    return replace(cell.job, documents=[longer])


def measure_batch(cell, batch, float8, clock):
    """Yields the held-out record of one batch after every part, then the in-sample one of the parts that a.own covers.

    float8: policies by budget, each recorded on its own. Parts are of a.part documents, a batch at the least, and the
    policies' order moves on from part to part; after a.minutes no further part is begun.
    """
    a, measured = cell.a, cell.measured(batch)
    size = -(-(a.part or len(measured)) // batch) * batch
    names = ["trace", *(f"fp8-{i}" for i in range(len(float8)))]
    with clock.stage(f"{cell.name} predict B{batch}"):
        by_trace = [grid(cell, batch), *float8]
        held_out = {}
        for name, policies in zip(names, by_trace):
            held_out |= predicted(cell, cell.folder / name, policies, batch, "train")
    policies = [policy for same in by_trace for policy in same]
    parts = []
    for first in range(0, len(measured), size):
        if parts and a.minutes and clock.minutes > a.minutes:
            break
        turn = len(parts) % len(policies)
        with clock.stage(f"{cell.name} validate B{batch} from document {first}"):
            out = cell.folder / f"measured-B{batch}" / f"validation-{first}"
            chosen = [*policies[turn:], *policies[:turn]]
            parts.append(validated(cell, batch, chosen, held_out, measured[first : first + size], out))
        yield row(cell, batch, "held-out", parts, held_out, min(first + size, len(measured)))
    if a.own:
        parts = parts[: a.own // size]
    if not parts:
        return
    own = measured[: len(parts) * size]
    with clock.stage(f"{cell.name} predict B{batch} in sample"):
        in_sample = {}
        for name, same in zip(names, by_trace):
            trace = cell.folder / f"measured-B{batch}" / name
            shutil.rmtree(trace, ignore_errors=True)
            part_of(cell.folder / name, trace, [d.index for d in own])
            in_sample |= predicted(cell, trace, same, batch, "test")
    yield row(cell, batch, "in-sample", parts, in_sample, len(own))


def validated(cell, batch, policies, held_out, documents, out, said=EXPECTED):
    """validation.json of these documents, measured unless `out` holds it, and the commit that measured. said: what
    policies expect of `held_out`."""
    if not (out / "validation.json").exists():
        expected = [{name: held_out[policy_digest(p)][name] for name in said} for p in policies]
        settings = {
            "policies": [to_plain(replace(p, expected=e)) for p, e in zip(policies, expected)],
            "split": "test",
            "batch": batch,
            "repeats": cell.a.repeats,
            "out": str(out),
        }
        validate.run({**cell.settings, **settings}, replace(cell.job, documents=documents))
        (out / COMMIT).write_text(commit(), encoding="utf-8")
    measured_by = (out / COMMIT).read_text(encoding="utf-8") if (out / COMMIT).exists() else "unknown"
    return {**json.loads((out / "validation.json").read_text(encoding="utf-8")), "commit": measured_by}


def grid(cell, batch):
    """Plain decoding and the dense record's policies; `rate` is told the measured gamma of k = 4."""
    whole = read_record(read_trace(cell.trace))
    steady = fixed(whole)
    found = predicted(cell, cell.trace, steady, batch, "train")
    gammas = [found[policy_digest(steady[arm * len(KS) + KS.index(4)])]["gamma"] for arm in range(len(whole.arms))]
    return [plain_policy(), *steady, *adaptive(whole, gammas)]


def predicted(cell, trace, policies, batch, split):
    """Replay's outcomes by policy digest. Raises UserError for a policy that it refuses."""
    settings = {"trace": str(trace), "costs": str(cell.costs), "batch": batch, "split": split}
    outcomes = replay.run({**settings, "policies": [to_plain(p) for p in policies]})["outcomes"]
    for outcome in outcomes:
        if outcome["speedup"] is None:
            raise UserError(f"{outcome['name']} cannot be predicted: {outcome['reason']}", "change the grid")
    return {outcome["policy_digest"]: outcome for outcome in outcomes}


def row(cell, batch, state, parts, predictions, documents):
    """A record. predictions: by policy digest; documents: how many the parts measured."""
    rows = merged(parts)
    base = next(p for name, p in predictions.items() if p["k"] == 0.0)["baseline_us_per_token"]
    spread = [100 * r["measured"]["repeat_spread_frac"] for r in rows]  # of each policy's worst document
    plain = next(r for r in rows if r["k_max"] == 0)["measured"]
    differing = max(r["measured"]["documents_differing_from_plain"] for r in rows)
    if differing and parts[0]["hardware"]["device"] == "cpu":  # float32 there, and rows that keep their bits
        sys.exit(f"{cell.name}: {differing} outputs of a lossless policy differ from plain decoding's")
    about = {
        "cell": f"{cell.name}, batch {batch}, {len(rows)} policies",
        "model": cell.job.name,
        "hardware": hardware_of(parts[0]["hardware"]),
        "documents": {"train": len(cell.of("train")), "test": documents},
        "tokens": {"train": len(cell.of("train")) * cell.a.new_tokens, "test": plain["tokens"]},
        "repeats": parts[0]["repeats"],
        "plain_us_per_token": {"predicted": round(base, 2), "measured": round(plain["us_per_token"], 2)},
        "repeat_spread_pct": round(max(spread), 2),
        "median_repeat_spread_pct": round(float(np.median(spread)), 2),
        "outputs_differing_from_plain": differing,
        "texts": cell.about,
        "policies": policy_rows(rows, predictions),
    }
    measured_by = sorted({part["commit"] for part in parts})
    if measured_by != [commit()]:
        about["measured_by_commits"] = measured_by
    id = f"{cell.a.id}-{cell.name}-B{batch}" + ("" if state == "held-out" else f"-{state}")
    found = {**compared(rows, predictions), **compared_kept_full(rows, predictions)}
    return row_of(id, state, found, about)


def hardware_of(found):
    """What a record says of validate's hardware."""
    return found["name"] if found["device"] == "cuda" else f"{found['name']}, {found['threads']} threads"
