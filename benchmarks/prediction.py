"""Predicted against measured speedup on held-out documents: the simulator's promise, checked for many policies.

For every workload and context, with the model loaded once: `record` decodes train and test documents plainly and drafts
every position; `calibrate`, once a context, times rounds at these lengths and batches; `replay` predicts a grid of
policies from the train documents; `validate` measures them on the test documents by its own protocol. Two records a
batch: held-out, and in-sample, where the prediction is made from the measured documents' own dense trace, for the same
measurements. Train and test documents share no text. Batch 1 is measured over the first --singles test documents.
--fp8: also drafts with float8 weights (GPU only), predicted from a recording of their longest fixed k, since dense
recording cannot draft so. --small: SmolLM2 on a CPU. --traces: leaves small traces for the tests. --dry: for testing
this script, never written. --work: keeps every cell's files, and goes on with what is there; --until record stops after
the records, which time nothing that a prediction uses, so that other work may run beside them.

What separates held-out from in-sample errors is chance: tokens a round scatter, also between documents. So --small
measures many short documents once rather than few of them often, six documents a validation (--part), the policies'
order moving on from one to the next. --out holds what is known after each; after --minutes none is begun: how much is
measured should be the clock's choice, not the result's.

    python3 benchmarks/prediction.py --model FILE.gguf --prompts prompts.npz --workloads code --out RESULTS.json
    python3 benchmarks/prediction.py --small --out benchmarks/results/prediction.json

Where texts must be carried, workloads side by side on cores of their own, each with an --out of its own:

    python3 benchmarks/engine/prompts.py --model smollm2-135m.gguf --contexts 512 --count 80 --new-tokens 24 \
        --out small.npz
    OMP_NUM_THREADS=2 taskset -c 0,1 python3 benchmarks/prediction.py --small --workloads novel --minutes 11 \
        --model smollm2-135m.gguf --prompts small.npz --out novel.json
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "kernels"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "engine"))
from _engine_bench import complete, script
from prediction_cell import Clock, cells, in_work, keep, load, measure
from prediction_documents import KINDS
from prediction_records import show
from prediction_traces import part_of

from specdial.policies.errors import UserError

FULL = {"id": "S3", "contexts": [8000], "batches": [1, 16], "train": 16, "test": 16, "singles": 2, "new_tokens": 64}
FULL |= {"budgets": [256, 512], "page": 16, "repeats": 3, "calibrations": 5, "part": 0, "own": 0, "minutes": 0.0}
SMALL = FULL | {"id": "S2", "contexts": [512], "batches": [1], "train": 44, "test": 36, "singles": 36, "new_tokens": 24}
SMALL |= {"budgets": [128, 256], "page": 1, "repeats": 1, "calibrations": 27, "part": 6, "own": 6}
DRY = SMALL | {"id": "dry", "contexts": [300], "batches": [1, 2], "train": 2, "test": 2, "new_tokens": 12}
DRY |= {"calibrations": 3, "own": 0}
LEFT_DOCUMENTS, LEFT_BYTES = 3, 140_000  # of a trace left for the tests, meta.json not counted


def arguments(argv):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="smollm2-135m", help="what model.source takes; default smollm2-135m")
    p.add_argument("--prompts", type=Path, help="what engine/prompts.py wrote; default: texts that are here")
    p.add_argument("--out", type=Path)
    p.add_argument("--traces", type=Path, help="leave the first documents of every trace under this folder")
    p.add_argument("--workloads", nargs="+", choices=sorted(KINDS), default=sorted(KINDS))
    for name in ("contexts", "batches", "budgets"):
        p.add_argument(f"--{name}", nargs="+", type=int, help=f"default {FULL[name]}, --small {SMALL[name]}")
    meant = {
        "train": "documents to predict from",
        "test": "documents to measure",
        "singles": "of them at batch 1",
        "new-tokens": "of a document",
        "page": "keys that are chosen together",
        "repeats": "of every measurement",
        "calibrations": "repeats of every cost",
        "part": "test documents a validation, 0 for all",
        "own": "test documents of the in-sample record, 0 for all, fewer than a part for none",
    }
    for name, what in meant.items():
        key = name.replace("-", "_")
        p.add_argument(f"--{name}", type=int, help=f"{what}; default {FULL[key]}, --small {SMALL[key]}")
    p.add_argument("--minutes", type=float, help="begin no part of a batch's documents so long after the start")
    p.add_argument("--work", type=Path, help="keep every cell's files under this folder; default: a temporary one")
    p.add_argument("--until", choices=["record"], help="record only, for a later run with the same --work")
    p.add_argument("--fp8", action="store_true", help="float8 drafts too")
    size = p.add_mutually_exclusive_group()
    size.add_argument("--small", action="store_true", help="short contexts, on the CPU")
    size.add_argument("--dry", action="store_true", help="tiny, on the CPU, unrecorded")
    a = p.parse_args(argv)
    complete(p, a, DRY if a.dry else SMALL if a.small else FULL, toy="dry" if a.dry else None)
    return a


def leave_trace(cell, traces):
    """Leave the first train documents of a cell's trace for the tests: three, or as many as fit in LEFT_BYTES."""
    left, room = [], LEFT_BYTES
    for document in cell.of("train")[:LEFT_DOCUMENTS]:
        room -= sum(part.stat().st_size for part in cell.trace.glob(f"*-{document.index:05d}.parquet"))
        if room > 0:
            left.append(document.index)
    size = part_of(cell.trace, traces, left)
    print(f"{traces}: {len(left)} documents, {size} bytes", flush=True)


def main(argv=None):
    return in_work(arguments(argv), measured)


def measured(a, work):
    """Every record, printed and saved as it comes. work: where the files of every cell lie."""
    clock, rows = Clock(), {}
    model = load(a, clock)
    for cell in cells(a, model, work):
        left = a.traces / f"{cell.job.name}-{cell.name}" if a.traces else None
        if left and left.exists():
            raise UserError(f"{left} exists", "delete it or choose another --traces")
        keep(measure(cell, clock), rows, show, a.out)
        if left:
            leave_trace(cell, left)
    shown = ("median_pct", "worst_pct", "regret_pct")
    print(json.dumps({id: [row[key] for key in shown] for id, row in rows.items()}))
    return [*rows.values()]


if __name__ == "__main__":
    script(main)
