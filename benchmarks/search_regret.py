"""Q1: how much slower is the policy that search by replay finds than the best of hundreds measured in the engine?

With the model loaded once: `record` drafts every position of train and test documents, `calibrate` times rounds, `tune`
searches the same space that the grid spans, twice: on the train documents (held-out) and on the trace of the documents
that are measured (in-sample, as an exhaustive search sees them too). Then every grid point decodes the test documents,
each prefilled once. The fastest, what was found and plain decoding are measured again in rotating repeats, so that the
regret is not that against the luckiest of hundreds. Points come in an order of chance; past --seconds the grid ends at
the last document that all points were measured on. All policies are lossless and draft with the model itself.
--dry: for testing this script, never written.

    python3 benchmarks/search_regret.py --model FILE.gguf --prompts prompts.npz --out benchmarks/results/search.json
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent / "kernels"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "engine"))
from _bench import record as result
from _engine_bench import complete, save, script
from prediction_cell import Clock, predicted
from prediction_documents import KINDS
from prediction_records import size
from prediction_traces import part_of
from scipy.stats import spearmanr
from search_cell import Cell, record_dense, time_rounds
from search_grid import fixed, grid, measured

from specdial.engine.trace.reader import read_trace
from specdial.policies.artifact import write_json_atomic
from specdial.policies.fields import to_plain
from specdial.policies.file import load_policy, policy_digest
from specdial.policies.schema import plain_policy
from specdial.simulator.lanes import read_record
from specdial.simulator.verbs import tune

FULL = {"context": 31000, "batch": 1, "train": 6, "test": 4, "new_tokens": 64, "budgets": [256, 512, 1024], "page": 16}
FULL |= {
    "points": 520,
    "trials": 1000,
    "top": 10,
    "repeats": 5,
    "calibrations": 5,
    "ks": [0, 1, 2, 3, 4, 6, 8],
    "seconds": 150.0,
}
DRY = FULL | {"context": 300, "train": 2, "test": 2, "new_tokens": 8, "budgets": [128, 256], "page": 1}
DRY |= {"points": 12, "trials": 30, "top": 2, "repeats": 2, "calibrations": 3, "ks": [0, 1, 8]}
LEAST_POINTS, BAR_PCT = 500, 2.0


def arguments(argv):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="smollm2-135m", help="what model.source takes; default smollm2-135m")
    p.add_argument("--prompts", type=Path, help="what engine/prompts.py wrote; default: texts that are here")
    p.add_argument("--workload", choices=sorted(KINDS), default="code")
    p.add_argument("--out", type=Path)
    p.add_argument("--keep", type=Path, help="leave the trace, the costs and every measured time in this folder")
    p.add_argument("--budgets", nargs="+", type=int, help=f"default {FULL['budgets']}")
    p.add_argument("--seconds", type=float, help=f"for the grid, default {FULL['seconds']:g}")
    p.add_argument("--seed", type=int, default=0)
    for name in ("context", "batch", "train", "test", "new-tokens", "page", "points", "trials", "top", "repeats"):
        p.add_argument(f"--{name}", type=int, help=f"default {FULL[name.replace('-', '_')]}")
    p.add_argument("--dry", action="store_true", help="tiny, on the CPU, unrecorded")
    a = p.parse_args(argv)
    complete(p, a, DRY if a.dry else FULL, toy="dry" if a.dry else None)
    return a


def measured_alone(cell, groups):
    """The trace of the measured documents alone, as documents to tune on."""
    own = cell.folder / "own"
    part_of(cell.trace, own, [d.index for group in groups for d in group])
    meta = json.loads((own / "meta.json").read_text(encoding="utf-8"))
    kept = [{**d, "split": "train"} for d in meta["documents"]]
    write_json_atomic(own / "meta.json", {**meta, "documents": kept})
    return own


def found_by(cell, trace):
    """What `tune` takes for best, at its default settings."""
    out = cell.folder / f"tune-{trace.name}"
    given = {"trace": str(trace), "costs": str(cell.costs), "out": str(out), "batch": cell.a.batch}
    tune.run({**given, "trials": cell.a.trials, "seed": cell.a.seed, "bootstrap": 200})
    best = load_policy(out / "policies" / "best.yaml")
    return best if best.k_max else plain_policy()


def regret(cell, clock):
    """One record of the search on other documents, one of that on the measured ones, and all times."""
    a, phases, batches = cell.a, {}, cell.groups(cell.a.batch)
    record_dense(cell, ("train", "test"), clock)
    time_rounds(cell, [a.context], [a.batch], clock)
    if a.keep:
        part_of(cell.trace, a.keep / "trace", [d.index for d in cell.job.documents])
        shutil.copytree(cell.costs, a.keep / "costs")
    whole = read_record(read_trace(cell.trace))
    with clock.stage("tune"):
        started_s = time.monotonic()
        found = {"held-out": found_by(cell, cell.trace), "in-sample": found_by(cell, measured_alone(cell, batches))}
        phases["tune"] = round(time.monotonic() - started_s, 1)
        steady = predicted(cell, cell.trace, fixed(whole), a.batch, "train")
        points = grid(whole, max(steady.values(), key=lambda o: o["speedup"])["gamma"])
        random.Random(a.seed).shuffle(points)
        policies = [plain_policy(), *points[: a.points]]
        guessed = predicted(cell, cell.folder / "own", policies, a.batch, "train")
    with clock.stage(f"grid of {len(policies)} points"):
        started_s = time.monotonic()
        times, unlike = measured(cell.job, batches, policies, 1, started_s + a.seconds)
        phases["grid"] = round(time.monotonic() - started_s, 1)
    done = np.isfinite(times).all(axis=1)  # [groups, policies]
    groups = max(int(done.all(axis=1).sum()), 1)
    first_us = times[:groups].sum(axis=(0, 1))  # [policies], NaN where time was out
    fastest = [int(i) for i in np.argsort(first_us)[: a.top] if np.isfinite(first_us[i]) and i]
    finalists = {policy_digest(p): p for p in [policies[0], *(policies[i] for i in fastest), *found.values()]}
    with clock.stage(f"{len(finalists)} finalists"):
        again, _ = measured(cell.job, batches, list(finalists.values()), 1 + a.repeats)
    again = dict(zip(finalists, np.moveaxis(again[:, 1:], 2, 0)))  # digest: [groups, repeats]
    known = np.isfinite(first_us)
    digests = {policy_digest(p) for p, timed in zip(policies, known) if timed}
    in_grid = [digest for digest in finalists if digest in digests]
    speedups = np.array([guessed[policy_digest(p)]["speedup"] for p in policies])[known]
    errors = speedups * first_us[known] / first_us[0] - 1.0
    kinds = np.array([p.controller.kind for p in policies])[known]
    about = {
        "points": int(known.sum()),
        "documents": {"train": a.train, "grid": groups * a.batch, "finalists": len(batches) * a.batch},
        "first_pass": {"fastest_speedup": round(float(first_us[0] / np.nanmin(first_us)), 4)},
        "rank_correlation": round(float(spearmanr(speedups, -first_us[known]).statistic), 4),
        "in_sample_error": {
            kind: {"points": int((kinds == kind).sum()), **size(errors[kinds == kind])}
            for kind in np.unique(kinds)
            if kind != "none"
        },
        "outputs_differing_from_plain": int(unlike.max()),
        "repeats": a.repeats,
        "phases_s": phases,
        "texts": cell.about,
    }
    rows = [row_of(cell, name, policy, finalists, again, in_grid, about) for name, policy in found.items()]
    left = [[p.name, policy_digest(p), to_plain(p.controller), p.draft_kv.budget, *times[:groups, 0, i].tolist()]
            for i, p in enumerate(policies) if known[i]]  # fmt: skip
    return rows, {"grid": left, "finalists": {digest: us.tolist() for digest, us in again.items()}}


def row_of(cell, kind, policy, finalists, again, in_grid, about):
    """A record. again: microseconds [batches of documents, repeats] by digest; in_grid: digests, plain's the first."""
    us = {digest: float(np.median(times, axis=1).sum()) for digest, times in again.items()}
    own, best = policy_digest(policy), min(in_grid, key=us.__getitem__)
    each = 1.0 - again[best].sum(axis=0) / again[own].sum(axis=0)  # [repeats]
    spread = [float(np.ptp(times.sum(axis=0)) / np.median(times.sum(axis=0))) for times in again.values()]
    pct = 100.0 * (1.0 - us[best] / us[own])
    name = f"{cell.a.workload}-{cell.a.context}"
    searched = "the train documents" if kind == "held-out" else "the documents that are measured"
    facts = {
        "found": {**_shown(policy), "speedup": round(us[in_grid[0]] / us[own], 4), "in_grid": own in in_grid},
        "best_of_grid": {**_shown(finalists[best]), "speedup": round(us[in_grid[0]] / us[best], 4)},
        "spread": [round(100.0 * float(v), 3) for v in (each.min(), each.max())],
        "repeat_spread_pct": round(100.0 * max(spread), 3),
        "bar": {"at_most": BAR_PCT, "met": pct <= BAR_PCT and about["points"] > LEAST_POINTS},
    }
    case = f"regret of {cell.a.trials} trials by replay on {searched} against {about['points']} points in the engine"
    case += f", {name}, batch {cell.a.batch}, {cell.job.name}"
    case += "" if about["points"] > LEAST_POINTS else f": fewer than {LEAST_POINTS}, which prove nothing"
    tail = "" if kind == "held-out" else "-in-sample"
    return result(f"Q1-regret-{name}-B{cell.a.batch}{tail}", case, pct, "%", **facts, **about)


def _shown(policy):
    return {"controller": to_plain(policy.controller), "budget": policy.draft_kv.budget if policy.k_max else None}


def main(argv=None):
    a, clock = arguments(argv), Clock()
    with tempfile.TemporaryDirectory() as folder:
        with clock.stage("load"):
            cell = Cell.load(a, [a.context], Path(folder))
        rows, times = regret(cell, clock)
    for row in rows:
        print(f"{row['id']}: {row['value']} % {row['spread']}, found {row['found']}, best {row['best_of_grid']}")
    if a.out:
        save(rows, a.out)
    if a.keep:
        write_json_atomic(a.keep / "times.json", {"records": rows, **times})
    print(json.dumps({row["id"]: [row["value"], row["bar"]["met"]] for row in rows}))
    return rows


if __name__ == "__main__":
    script(main)
