"""Decoding real text with real weights: plain, and speculative policies over the same prefilled prompts.

For each workload and context the largest batch is prefilled once and smaller ones are copied from it; batch 1 is
measured over several single sequences, one after another. Per batch: plain decoding's own output is scored for margins
and the noise of block passes is measured; then plain and every policy run in turn, in an order that rotates from repeat
to repeat, after one untimed run each (which captures its graphs). Each sequence emits the same number of tokens; end
marks are ignored. Gate: see _engine_bench.check. Prompts come from prompts.py. What is written: _real_records.py.
--dry: a tiny CPU run for testing this script; its numbers mean nothing and cannot be written.

    python3 benchmarks/engine/real_text.py --model FILE.gguf --prompts prompts.npz --out benchmarks/results/engine.json
"""

import argparse
import gc
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))
from _bench import gate
from _engine_bench import check, close, complete, decode, part_of, plain_bytes, save, script, with_history
from _lossless import differences, noise, plain_margins
from _real_records import Cell, Entry, is_1_5b, plain_record, policy_record, show
from prompts import given

from specdial.engine.job import backend_for, history_spec
from specdial.engine.sequences import Sequences
from specdial.engine.weights import load_model
from specdial.policies.file import load_policy
from specdial.policies.schema import plain_policy, policy_from_mapping

NOISE = {torch.float32: 1e-2, torch.bfloat16: 0.5}  # of margins between two logits: more is no rounding
FULL = {"contexts": [31000, 8000], "batches": [1, 16, 64], "new_tokens": 256, "repeats": 3, "k": [2, 4, 8]}
FULL |= {"budgets": [256, 512], "pages": [1, 16], "recent": 64}
DRY = {"contexts": [224], "batches": [1, 2], "new_tokens": 12, "repeats": 2, "k": [3], "budgets": [64]}
DRY |= {"pages": [1, 16], "recent": 16}


def entries(a):
    """Policies of the grid k x budget x page, StreamingLLM's budgets, and the files given."""
    found = []
    for k in a.k:
        for page in a.pages:
            for budget in a.budgets:
                kv = {"budget": budget, "sink": 4, "recent": a.recent, "page": page}
                found.append(Entry(f"k{k}-c{budget}-p{page}", fixed(k, kv)))
        for budget in a.streaming:
            kv = {"budget": budget, "sink": 4, "recent": budget - 4}
            found.append(Entry(f"stream-k{k}-c{budget}", fixed(k, kv), "E7"))
    given = [(path.stem, load_policy(path)) for path in a.policy]
    return found + [Entry(name, p, "E7") if static(p.draft_kv) else Entry(name, p) for name, p in given]


def static(kv):
    """MagicDec's selections: chosen once, or nothing chosen between sink and recent."""
    return kv.refresh_rounds == 0 or kv.budget == kv.sink + kv.recent


def fixed(k, draft_kv):
    return policy_from_mapping({"controller": {"kind": "fixed", "k": k}, "draft_kv": draft_kv})


def prefilled(model, prompts, chosen, new_tokens):
    """The prompts as one batch. Without history: policies that score in the same way get one of their own later."""
    longest = max(map(len, prompts)) + new_tokens
    model.config.check_context(longest)
    room = longest + max((e.policy.k_max for e in chosen), default=0) + 1
    s = Sequences(model.decoder, room, len(prompts), history=None, backend=backend_for(model.decoder.device))
    s.prefill(prompts, [new_tokens] * len(prompts))
    return s


def measure(batches, cell, chosen, a, facts):
    """All records of one cell. batches: prefilled sequences, without history."""
    specs = {e.name: history_spec([e.policy]) for e in chosen}
    groups = {spec: [with_history(s, spec) if spec else s for s in batches] for spec in set(specs.values())}
    runs = {"plain": (batches, plain_policy()), **{e.name: (groups[specs[e.name]], e.policy) for e in chosen}}
    first = decode(*runs["plain"])
    margins = plain_margins(batches, first.outputs)
    noises = {}
    for e in chosen:
        key = (specs[e.name], e.policy.k_max + 1)
        if key not in noises:
            noises[key] = found = noise(runs[e.name][0], first.outputs, margins, e.policy.k_max + 1)
            gate(f"{e.name}, noise of margins", found["margin"]["p99"], NOISE[batches[0].decoder.dtype])
        decode(*runs[e.name])  # warm-up
    timed = {name: [] for name in runs}
    names = list(runs)
    for repeat in range(a.repeats):
        turn = repeat * len(names) // a.repeats
        for name in names[turn:] + names[:turn]:
            timed[name].append(decode(*runs[name]))
    plain = timed["plain"]
    checks = {
        "one_row_mismatches": margins.mismatches,
        "repeats_differing": sum(run.outputs != first.outputs for run in plain),
    }
    records = [plain_record(cell, plain, plain_bytes(batches[0]), checks, facts)]
    for e in chosen:
        found = noises[specs[e.name], e.policy.k_max + 1]
        exact = differences(timed[e.name][-1].outputs, plain[-1].outputs, margins, found["margin"]["max"])
        records.append(policy_record(cell, e, timed, {**exact, "noise": found}, facts))
    return records


def free():
    """Give memory back before the next batch: sequences and their graphs refer to each other."""
    gc.collect()
    torch.cuda.empty_cache()


def arguments(argv):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True, help="a .gguf file or a Hugging Face folder")
    p.add_argument("--prompts", type=Path, help="what prompts.py wrote")
    p.add_argument("--out", type=Path)
    p.add_argument("--workloads", nargs="+", default=["code", "novel", "summary"])
    for name in ("contexts", "batches", "k", "budgets", "pages"):
        p.add_argument(f"--{name}", nargs="*", type=int, help=f"default {FULL[name]}")
    p.add_argument("--singles", type=int, default=4, help="sequences that batch 1 is measured over")
    for name in ("new-tokens", "repeats", "recent"):
        p.add_argument(f"--{name}", type=int, help=f"default {FULL[name.replace('-', '_')]}")
    p.add_argument("--streaming", nargs="*", type=int, default=[], help="budgets of StreamingLLM policies, for every k")
    p.add_argument("--policy", nargs="*", type=Path, default=[], help="policy files")
    p.add_argument("--dry", action="store_true", help="tiny, on the CPU, unrecorded")
    a = p.parse_args(argv)
    complete(p, a, DRY if a.dry else FULL, toy="dry" if a.dry else None)
    if not a.dry and not a.prompts:
        p.error("--prompts is missing: write them with benchmarks/engine/prompts.py")
    return a


def main(argv=None):
    a = arguments(argv)
    model = load_model(a.model, device="cpu" if a.dry else "cuda")
    check(model.config, model.decoder.device, model.decoder.dtype)
    chosen = entries(a)
    records = []
    for workload in a.workloads:
        for context in a.contexts:
            count = max(a.batches)
            ids, about = given(a.prompts, model.tokenizer, workload, context, count=count, new_tokens=a.new_tokens)
            facts = {
                "model": model.config.name,
                "prefix": "dry-" if a.dry else "",
                "is_1_5b": is_1_5b(model.config) and not a.dry,
                "about": {**about, "new_tokens": a.new_tokens, "dtype": str(model.decoder.dtype).split(".")[1]},
            }
            base = prefilled(model, ids[: max(a.batches)].tolist(), chosen, a.new_tokens)
            for batch in sorted(a.batches, reverse=True):
                cell = Cell(workload, context, batch)
                count = min(a.singles, base.batch) if batch == 1 else 1
                batches = [part_of(base, batch, first) for first in range(count)]
                records += (fresh := measure(batches, cell, chosen, a, facts))
                show(fresh)
                if a.out:
                    save(records, a.out)
                del batches
                free()
            del base
            free()
    close(records)
    return records


if __name__ == "__main__":
    script(main)
