"""Q1: does a policy by context and batch beat the best single policy on a mixed workload, and by how much?

With the model loaded once: `record` drafts every position of train documents of every context, `calibrate` times rounds
at every context and batch, `tune` searches the policies and composes the surface, and the engine decodes test documents
at every context and batch under plain decoding, the surface and the best single policy in rotating repeats. The mixed
workload spends equal plain time in every cell. The margin is time saved against the single policy; 0 where `tune` says
that a surface gains nothing. Train and test documents share no text. --dry: for testing this script, never written.

    python3 benchmarks/search_surface.py --model FILE.gguf --prompts prompts.npz --out benchmarks/results/search.json
"""

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent / "kernels"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "engine"))
from _bench import record as result
from _engine_bench import complete, save, script
from prediction_cell import Clock
from prediction_documents import KINDS
from search_cell import Cell, record_dense, time_rounds
from search_grid import measured

from specdial.policies.file import load_policy
from specdial.policies.schema import plain_policy
from specdial.simulator.verbs import tune

FULL = {"contexts": [8000, 31000], "batches": [1, 8], "train": 8, "test": 8, "singles": 2, "new_tokens": 64}
FULL |= {
    "budgets": [256, 1024],
    "page": 16,
    "trials": 1000,
    "repeats": 3,
    "calibrations": 3,
    "ks": [0, 1, 2, 3, 4, 6, 8],
}
DRY = FULL | {"contexts": [200, 400], "batches": [1, 2], "train": 2, "test": 2, "singles": 1, "new_tokens": 8}
DRY |= {"budgets": [128], "page": 1, "trials": 30, "repeats": 2, "ks": [0, 1, 8]}


def arguments(argv):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="smollm2-135m", help="what model.source takes; default smollm2-135m")
    p.add_argument("--prompts", type=Path, help="what engine/prompts.py wrote; default: texts that are here")
    p.add_argument("--workload", choices=sorted(KINDS), default="code")
    p.add_argument("--out", type=Path)
    for name in ("contexts", "batches", "budgets"):
        p.add_argument(f"--{name}", nargs="+", type=int, help=f"default {FULL[name]}")
    for name in ("train", "test", "singles", "new-tokens", "trials", "repeats", "calibrations"):
        p.add_argument(f"--{name}", type=int, help=f"default {FULL[name.replace('-', '_')]}")
    p.add_argument("--dry", action="store_true", help="tiny, on the CPU, unrecorded")
    a = p.parse_args(argv)
    complete(p, a, DRY if a.dry else FULL, toy="dry" if a.dry else None)
    a.contexts, a.batches = sorted(a.contexts), sorted(a.batches)
    return a


def tuned(cell, clock):
    """The policies to measure, plain first, and what `tune` says of the surface. cell: documents of all contexts."""
    a = cell.a
    record_dense(cell, ("train",), clock)
    time_rounds(cell, a.contexts, a.batches, clock)
    with clock.stage("tune"):
        out = cell.folder / "tuned"
        given = {"trace": str(cell.trace), "costs": str(cell.costs), "out": str(out), "trials": a.trials}
        cells = {"search": {"batches": a.batches}, "surface": {"contexts": a.contexts}}
        said = tune.run({**given, **cells, "bootstrap": 200})["surface"]
    names = ("surface", "single") if said["pays"] else ()
    return [plain_policy(), *(load_policy(out / "policies" / f"{name}.yaml") for name in names)], said


def margins(cell, policies, clock):
    """Measured time over plain's in every cell, [contexts, batches, repeats, policies], and outputs unlike plain's."""
    a, relative, unlike = cell.a, [], 0
    for context in a.contexts:
        for batch in a.batches:
            groups = cell.groups(batch, context)[: a.singles if batch == 1 else None]
            some = [d for group in groups for d in group]
            with clock.stage(f"measure {context}, batch {batch}"):
                us, differing = measured(replace(cell.job, documents=some), groups, policies, 1 + a.repeats)
            total_us = us[:, 1:].sum(axis=0)  # [repeats, policies]
            relative.append(total_us / np.median(total_us[:, 0]))
            unlike = max(unlike, int(differing.max()))
    return np.array(relative).reshape(len(a.contexts), len(a.batches), a.repeats, len(policies)), unlike


def row_of(cell, said, relative, unlike):
    """The record. relative: of `margins`, of plain, surface and single policy, or of plain alone."""
    a = cell.a
    shared = {"documents": {"train": a.train, "test": a.test, "singles": a.singles}, "texts": cell.about}
    predicted = {name: said[name] for name in ("speedup", "single_speedup", "gain_frac", "pays", "single")}
    margin_pct, facts = 0.0, {}
    if said["pays"]:
        mixed = relative.mean(axis=(0, 1))  # [repeats, policies]
        each = 100.0 * (1.0 - mixed[:, 1] / mixed[:, 2])
        middle = np.median(relative, axis=2)  # [contexts, batches, policies]
        mean = middle.mean(axis=(0, 1))
        margin_pct = float(100.0 * (1.0 - mean[1] / mean[2]))
        cells = [
            [c, b, *(round(float(1.0 / v), 4) for v in middle[i, j, 1:])]
            for i, c in enumerate(a.contexts)
            for j, b in enumerate(a.batches)
        ]
        facts = {
            "spread": [round(float(each.min()), 3), round(float(each.max()), 3)],
            "speedup": {"surface": round(float(1 / mean[1]), 4), "single": round(float(1 / mean[2]), 4)},
            "cells": cells,  # [context, batch, surface's speedup, single policy's]
            "outputs_differing_from_plain": unlike,
        }
    chosen = [[c["context_tokens"], c["batch"], c["policy"]] for c in said["cells"]]
    case = f"time that a policy by context {a.contexts} and batch {a.batches} saves against the best single policy"
    case += f", {a.workload}, {cell.job.name}" + ("" if said["pays"] else ": tune says that a surface gains nothing")
    facts |= {"predicted": predicted, "chosen": chosen, "repeats": a.repeats, **shared}
    return result(f"Q1-surface-{a.workload}", case, margin_pct, "%", **facts, bar={"above": 0.0, "met": margin_pct > 0})


def main(argv=None):
    a, clock = arguments(argv), Clock()
    with tempfile.TemporaryDirectory() as folder:
        with clock.stage("load"):
            cell = Cell.load(a, a.contexts, Path(folder))
        policies, said = tuned(cell, clock)
        relative, unlike = margins(cell, policies, clock) if said["pays"] else (None, 0)
        row = row_of(cell, said, relative, unlike)
    print(f"{row['id']}: {row['value']} % {row.get('spread')}, predicted {row['predicted']}, chosen {row['chosen']}")
    if a.out:
        save([row], a.out)
    print(json.dumps({row["id"]: [row["value"], row["bar"]["met"]]}))
    return [row]


if __name__ == "__main__":
    script(main)
