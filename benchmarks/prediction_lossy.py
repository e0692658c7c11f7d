"""Predicted against measured speed and fidelity of lossy policies on held-out documents, as prediction.py for lossless.

For every workload and context and each drafter: `record` leaves drafts (of sparse_self, unless --sparse, and of lookup
at every position; else of a lossless decoding) and probes of partial verification of some documents; `calibrate` times
rounds; replay predicts a grid of policies from the train documents; `validate` measures speed, top-1 agreement and KL
on the test documents by its own protocol. A record a batch, growing from drafter to drafter, holds both predictions:
held-out, and in-sample, made from the measured documents' own traces. --work keeps every cell's files, and goes on with
what is there. Scoring heads are those of --policy, else heads of the middle layer: any will do to test a prediction,
not a policy.
--small: SmolLM2 on a CPU. --dry: for testing this script, never written.

    python3 benchmarks/prediction_lossy.py --model FILE.gguf --prompts prompts.npz --workloads code --out RESULTS.json
    python3 benchmarks/prediction_lossy.py --small --out benchmarks/results/prediction.json
"""

import argparse
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "kernels"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "engine"))
from _engine_bench import complete, script
from prediction_cell import EXPECTED, Clock, cells, in_work, keep, load, timed, validated
from prediction_documents import KINDS
from prediction_lossy_lookup import with_lookup
from prediction_lossy_policies import DRAFT, Heads, drafter_of, grid, verification
from prediction_lossy_records import row_of, show
from prediction_traces import part_of

from specdial.engine.trace.reader import read_trace
from specdial.engine.verbs import calibrate, record
from specdial.policies.errors import UserError
from specdial.policies.fields import to_plain
from specdial.policies.file import policy_digest
from specdial.policies.schema import plain_policy
from specdial.simulator.fidelity import Model
from specdial.simulator.lanes import read_record
from specdial.simulator.load import load_costs
from specdial.simulator.replay import replay

FULL = {"id": "L", "contexts": [8000], "batches": [1, 16], "train": 16, "test": 16, "singles": 2, "new_tokens": 64}
FULL |= {"budgets": [512, 1024, 2048], "periods": [2, 4, 8, 16, 0], "k": [2, 4, 8], "policies": 24, "repeats": 3}
FULL |= {"refresh": [8, 32, 96], "calibrations": 3, "probed": 4, "rounds": 6, "drafters": ["sparse_self", "lookup"]}
SMALL = FULL | {"id": "L-small", "contexts": [512], "batches": [1], "train": 6, "test": 3, "singles": 3}
SMALL |= {"new_tokens": 32, "budgets": [64, 128, 256], "policies": 12, "probed": 4, "rounds": 3, "refresh": [8, 32]}
SMALL |= {"drafters": ["sparse_self"], "k": [2, 4]}  # short texts give lookup few drafts
DRY = SMALL | {"id": "dry", "contexts": [300], "train": 2, "test": 2, "singles": 2, "new_tokens": 12, "policies": 3}
DRY |= {"repeats": 1, "calibrations": 3, "budgets": [192], "k": [2], "probed": 2, "rounds": 2, "refresh": [3, 9]}


def arguments(argv):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="smollm2-135m", help="what model.source takes; default smollm2-135m")
    p.add_argument("--draft", help="a draft model: drafts verified by history, lookahead and hybrid, as in Dustin")
    p.add_argument("--head", help="an EAGLE-3 head: drafts verified over kept pages, as in SpecPV")
    p.add_argument("--policy", type=Path, help="a policy file whose scoring heads and lookahead_tokens are used")
    p.add_argument("--prompts", type=Path, help="what engine/prompts.py wrote; default: texts that are here")
    p.add_argument("--out", type=Path)
    p.add_argument("--workloads", nargs="+", choices=sorted(KINDS), default=["code"])
    p.add_argument("--drafters", nargs="*", choices=["sparse_self", "lookup"], help="beside --draft and --head")
    for name in ("contexts", "batches", "budgets", "periods", "k", "refresh"):
        p.add_argument(f"--{name}", nargs="+", type=int, help=f"default {FULL[name]}, --small {SMALL[name]}")
    for name in ("train", "test", "singles", "new-tokens", "policies", "repeats", "calibrations", "probed", "rounds"):
        key = name.replace("-", "_")
        p.add_argument(f"--{name}", type=int, help=f"default {FULL[key]}, --small {SMALL[key]}")
    p.add_argument("--work", type=Path, help="keep every cell's files under this folder; default: a temporary one")
    p.add_argument("--sparse", action="store_true", help="record no more of sparse_self than the rounds it plays")
    size = p.add_mutually_exclusive_group()
    size.add_argument("--small", action="store_true", help="short contexts, on the CPU")
    size.add_argument("--dry", action="store_true", help="tiny, on the CPU, unrecorded")
    a = p.parse_args(argv)
    complete(p, a, DRY if a.dry else SMALL if a.small else FULL, toy="dry" if a.dry else None)
    a.drafters = [*a.drafters, *(["model"] if a.draft else []), *(["eagle"] if a.head else [])]
    return a


def measure(cell, heads, clock):
    """Yields a batch's record after every drafter: each is recorded, timed, predicted and measured on its own."""
    found = {batch: [] for batch in cell.a.batches if cell.measured(batch)}
    for kind, policies in grid(cell.a, heads).items():
        own = replace(cell, name=f"{cell.name} {kind}", folder=cell.folder / kind)
        with clock.stage(f"{own.name} record"):
            leave_traces(own, kind, heads)
        if not (own.folder / "costs" / "meta.json").exists():
            with clock.stage(f"{own.name} calibrate"):
                calibrate.run({**own.settings, **calibration(own, kind, heads)}, timed(own))
        for batch in cell.a.batches:
            with clock.stage(f"{own.name} B{batch}"):
                found[batch].append(compared(own, policies, batch))
            yield row_of(cell, batch, found[batch])


def leave_traces(cell, kind, heads):
    """The traces `trace` of drafts, of all documents, and `probes`, of the first train and test documents."""
    a = cell.a
    common = {**cell.settings, "split": "train+test"}
    drafting = {"controller": {"kind": "fixed", "k": max(a.k)}, **DRAFT.get(kind, {})}
    drafting["drafter"] = to_plain(drafter_of(kind, a))
    out = cell.folder / ("rounds" if kind == "lookup" else "trace")
    dense = {"batch": max(a.batches)}
    if kind == "sparse_self" and not a.sparse:
        dense = {"dense": True, "k_max": max(a.k), "budgets": []}
    record.run({**common, "policy": drafting, "out": str(out), **dense}, cell.job)
    if kind == "lookup":
        with_lookup(out, cell.trace, cell.job.documents, ngram=drafter_of(kind, a).ngram, k_max=max(a.k))
    kv, named = verification(kind, heads)
    policy = {**drafting, "verify_kv": kv, "scoring_heads": named}
    probe = {"sources": heads.sources(kind), "budgets": ends(a), "rounds": a.rounds, "k": 4}
    while a.rounds * (probe["k"] + 1) > a.new_tokens:
        probe["k"] -= 1
    probe["places"] = a.new_tokens // (a.rounds * (probe["k"] + 1))  # all over the output: its first words differ
    some = [d for split in ("train", "test") for d in cell.of(split)[: a.probed]]
    settings = {**common, "policy": policy, "probes": True, "probe": probe, "out": str(cell.folder / "probes")}
    record.run(settings, replace(cell.job, documents=some))


def ends(a):
    """The budgets that are probed and timed: between them costs and fidelity are interpolated."""
    return sorted({min(a.budgets), max(a.budgets)})


def calibration(cell, kind, heads):
    """What to time: full and partial rounds of the grid halfway through the outputs."""
    a, context = cell.a, len(cell.job.documents[0].prompt_ids)
    kv, named = verification(kind, heads)
    return {
        "contexts": [context + a.new_tokens // 2],
        "batches": a.batches,
        "ks": [0, *a.k],
        "drafters": [to_plain(drafter_of(kind, a))],
        "repeats": a.calibrations,
        "verify_kv": kv,
        "sources": heads.sources(kind),
        "verify_budgets": ends(a),
        "refresh_rows": a.refresh,
        "scoring_heads": named,
        "out": str(cell.folder / "costs"),
        **({"budgets": [DRAFT[kind]["draft_kv"]["budget"]], **DRAFT[kind]} if kind in DRAFT else {}),
    }


def compared(cell, policies, batch):
    """(validation.json, held-out and in-sample predictions by digest) of a drafter's policies, plain among them."""
    measured = cell.measured(batch)
    policies, own = [plain_policy(), *policies], cell.folder / f"measured-B{batch}"
    for name in ("trace", "probes"):
        shutil.rmtree(own / name, ignore_errors=True)
        held = {d["doc"] for d in read_trace(cell.folder / name).meta["documents"]}
        part_of(cell.folder / name, own / name, [d.index for d in measured if d.index in held])
    held_out = predicted(cell, cell.folder, policies, batch, "train")
    in_sample = predicted(cell, own, policies, batch, "test")
    out, said = own / "validation", (*EXPECTED, "fidelity")
    content = validated(cell, batch, policies, held_out, measured, out, said)
    return content, held_out, in_sample


def predicted(cell, folder, policies, batch, split):
    """Replay's outcomes by policy digest, plain data. Raises UserError for a policy that it refuses."""
    drafts = read_record(read_trace(folder / "trace"))
    known = replace(drafts, fidelity=Model.of(read_trace(folder / "probes")))
    found = {}
    for outcome in replay(known, load_costs(str(cell.folder / "costs"), drafts.trace), policies, split, batch):
        if outcome.speedup is None or (not outcome.lossless and outcome.fidelity is None):
            raise UserError(f"{outcome.policy.name} cannot be predicted: {outcome.reason}", "change the grid")
        found[policy_digest(outcome.policy)] = outcome.plain()
    return found


def main(argv=None):
    return in_work(arguments(argv), measured)


def measured(a, work):
    """Every record, printed and saved as it comes. work: where the files of every cell lie."""
    clock, rows = Clock(), {}
    model = load(a, clock)
    heads = Heads.of(a, model.config)
    for cell in cells(a, model, work):
        keep(measure(cell, heads, clock), rows, show, a.out)
    print(json.dumps({id: [row["median_pct"], row["worst_pct"]] for id, row in rows.items()}))
    return [*rows.values()]


if __name__ == "__main__":
    script(main)
