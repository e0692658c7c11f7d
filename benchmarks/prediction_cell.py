"""One cell of the prediction benchmark: record, calibrate, predict, validate, compare, for a workload and a context.

Every step is the verb's own `run` on one loaded model. Leaves out where documents come from and where records go.
"""

import contextlib
import gc
import io
import json
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from prediction_policies import K_MAX, KS, adaptive, fixed, fp8
from prediction_records import compared, policy_rows, row_of
from prediction_traces import part_of

from specdial.engine.job import Job
from specdial.engine.trace.reader import read_trace
from specdial.engine.verbs import calibrate, record, validate
from specdial.engine.workloads import Document
from specdial.policies.errors import UserError
from specdial.policies.fields import to_plain
from specdial.policies.file import policy_digest
from specdial.policies.schema import DraftKV, plain_policy
from specdial.simulator.lanes import read_record
from specdial.simulator.verbs import replay

EXPECTED = ("speedup", "low", "high", "level", "tokens_per_round", "alpha", "gamma", "k", "budget", "batch")


@dataclass
class Clock:
    """Says what is going on and how long each stage took."""

    started_s: float = field(default_factory=time.monotonic)

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
        """The test documents of a batch: whole batches, or the first few for batch 1. Raises UserError for none."""
        test = self.of("test")
        found = test[: self.a.singles] if batch == 1 else test[: len(test) // batch * batch]
        if not found or len(self.of("train")) < batch:
            raise UserError(f"batch {batch} of {len(test)} test documents", "ask for more documents or smaller batches")
        return found


def measure(cell, clock):
    """Every record of one cell; none with `--until record`."""
    a, kv = cell.a, to_plain(DraftKV(budget=cell.a.budgets[0], page=cell.a.page))
    for batch in a.batches:
        cell.measured(batch)
    with clock.stage(f"{cell.name} record"):
        dense = {"split": "train+test", "dense": True, "budgets": a.budgets, "k_max": K_MAX, "out": str(cell.trace)}
        plain = {**to_plain(plain_policy()), "draft_kv": kv}
        record.run({**cell.settings, "policy": plain, **dense}, cell.job)
    float8 = [fp8({**kv, "budget": budget}) for budget in a.budgets] if a.fp8 else []
    for i, policies in enumerate(float8):
        with clock.stage(f"{cell.name} record fp8"):
            sparse = {"policy": to_plain(policies[-1]), "split": "train+test", "out": str(cell.folder / f"fp8-{i}")}
            record.run({**cell.settings, **sparse}, cell.job)
    if a.until == "record":
        return []
    if not (cell.costs / "meta.json").exists():
        with clock.stage(f"{cell.name} calibrate"):
            calibrate.run({**cell.settings, **calibration(cell), "draft_kv": kv}, timed(cell))
    return [row for batch in a.batches for row in measure_batch(cell, batch, float8, clock)]


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
    """The held-out and the in-sample record of one batch. float8: policies by budget, each recorded on its own."""
    measured, own = cell.measured(batch), cell.folder / f"measured-B{batch}"
    names = ["trace", *(f"fp8-{i}" for i in range(len(float8)))]
    with clock.stage(f"{cell.name} predict B{batch}"):
        dense = grid(cell, batch)
        held_out, in_sample = {}, {}
        for name, policies in zip(names, [dense, *float8]):
            part_of(cell.folder / name, own / name, [d.index for d in measured])
            held_out |= predicted(cell, cell.folder / name, policies, batch, "train")
            in_sample |= predicted(cell, own / name, policies, batch, "test")
    policies = [*dense, *(p for same in float8 for p in same)]
    with clock.stage(f"{cell.name} validate B{batch}"):
        expected = [{name: held_out[policy_digest(p)][name] for name in EXPECTED} for p in policies]
        settings = {
            "policies": [to_plain(replace(p, expected=e)) for p, e in zip(policies, expected)],
            "split": "test",
            "batch": batch,
            "repeats": cell.a.repeats,
            "out": str(own / "validation"),
        }
        validate.run({**cell.settings, **settings}, replace(cell.job, documents=measured))
    content = json.loads((own / "validation" / "validation.json").read_text(encoding="utf-8"))
    return records(cell, batch, content, held_out, in_sample)


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


def records(cell, batch, content, held_out, in_sample):
    """Two records from validation.json and the predictions."""
    rows, measured = content["policies"], cell.measured(batch)
    base = held_out[rows[0]["policy_digest"]]["baseline_us_per_token"]
    spread = [100 * r["measured"]["repeat_spread_frac"] for r in rows]  # of each policy's worst document
    about = {
        "cell": f"{cell.name}, batch {batch}, {len(rows)} policies",
        "model": cell.job.name,
        "hardware": _hardware(content["hardware"]),
        "documents": {"train": len(cell.of("train")), "test": len(measured)},
        "tokens": {"train": len(cell.of("train")) * cell.a.new_tokens, "test": rows[0]["measured"]["tokens"]},
        "repeats": content["repeats"],
        "plain_us_per_token": {"predicted": round(base, 2), "measured": round(content["plain_us_per_token"], 2)},
        "repeat_spread_pct": round(max(spread), 2),
        "median_repeat_spread_pct": round(float(np.median(spread)), 2),
        "outputs_differing_from_plain": max(r["measured"]["documents_differing_from_plain"] for r in rows),
        "texts": cell.about,
    }
    id = f"{cell.a.id}-{cell.name}-B{batch}"
    detail = {**about, "policies": policy_rows(rows, held_out, in_sample)}
    return [
        row_of(id, "held-out", compared(rows, held_out), detail),
        row_of(f"{id}-in-sample", "in-sample", compared(rows, in_sample), about),
    ]


def _hardware(found):
    return found["name"] if found["device"] == "cuda" else f"{found['name']}, {found['threads']} threads"
