"""Decoding real text with real weights: plain, and speculative policies over the same prefilled prompts.

For each workload and context the largest batch is prefilled once and smaller ones are copied from it. Per batch: plain
decoding's own output is scored for margins and the noise of block passes is measured; then plain and every policy run
in turn, in an order that rotates from repeat to repeat, after one untimed run each (which captures its graphs). Each
sequence emits the same number of tokens; end marks are ignored. Gate: see _engine_bench.check.

Speed is reported twice: over the whole run (`value`, `speedup`) and while every sequence still decodes (`full_*`),
since in the tail of a fixed batch most of it waits for its slowest member. Prompts come from prompts.py. --dry: a tiny
CPU run for testing this script; its numbers mean nothing and cannot be written.

    python3 benchmarks/engine/real_text.py --model FILE.gguf --prompts prompts.npz --out benchmarks/results/engine.json
"""

import argparse
import gc
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))
from _bench import record
from _engine_bench import BANDWIDTH, accounts, check, close, decode, first_of, plain_bytes, save, with_history
from _lossless import differences, noise, plain_margins
from prompts import Sources, prompts_of, read

from specdial.engine.job import backend_for, history_spec
from specdial.engine.models.shapes import SHAPES
from specdial.engine.sequences import Sequences
from specdial.engine.weights import load_model
from specdial.policies.errors import UserError
from specdial.policies.file import load_policy
from specdial.policies.schema import Policy, plain_policy, policy_from_mapping

# vLLM 0.23's plain decode of the 1.5B shape at 31k tokens on one H200, measured elsewhere: {batch: tokens/s}.
VLLM = {1: 1e3 / 2.37, 16: 3103.0, 64: 4139.0}
VLLM_NAME = "vllm-0.23 plain, 1.5B 31k (measured elsewhere)"
BATCH_IDS = {1: "E6", 16: "E4", 64: "E5"}  # of speculative records; plain ones are E3, StreamingLLM's E7
FULL = {"contexts": [31000, 8000], "batches": [1, 16, 64], "new_tokens": 256, "repeats": 3, "k": [2, 4, 8]}
FULL |= {"budgets": [256, 512], "pages": [1, 16], "recent": 64}
DRY = {"contexts": [224], "batches": [1, 2], "new_tokens": 12, "repeats": 2, "k": [3], "budgets": [64]}
DRY |= {"pages": [1, 16], "recent": 16}


@dataclass(frozen=True, slots=True)
class Entry:
    """A policy to measure: a short name for ids, and the work item it belongs to where the batch does not say."""

    name: str
    policy: Policy
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """What one batch is: workload, context tokens, batch."""

    workload: str
    context: int
    batch: int

    @property
    def suffix(self):
        return f"{self.workload}-{self.context // 1000}k-B{self.batch}"


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
    return found + [Entry(path.stem, load_policy(path)) for path in a.policy]


def fixed(k, draft_kv):
    return policy_from_mapping({"controller": {"kind": "fixed", "k": k}, "draft_kv": draft_kv})


def measure(base, cell, chosen, a, facts):
    """All records of one batch. base: its prefilled sequences, without history."""
    specs = {e.name: history_spec([e.policy]) for e in chosen}
    groups = {spec: with_history(base, spec) if spec else base for spec in set(specs.values())}
    runs = {"plain": (base, plain_policy()), **{e.name: (groups[specs[e.name]], e.policy) for e in chosen}}
    first = decode(*runs["plain"])
    margins = plain_margins(base, first.outputs)
    noises = {}
    for e in chosen:
        key = (specs[e.name], e.policy.k_max + 1)
        if key not in noises:
            noises[key] = noise(runs[e.name][0], first.outputs, margins, e.policy.k_max + 1)
        decode(*runs[e.name])  # warm-up
    timed = {name: [] for name in runs}
    names = list(runs)
    for repeat in range(a.repeats):
        turn = repeat * len(names) // a.repeats
        for name in names[turn:] + names[:turn]:
            timed[name].append(decode(*runs[name]))
    plain = timed["plain"]
    records = [plain_record(base, cell, plain, margins, first, facts)]
    for e in chosen:
        found = noises[specs[e.name], e.policy.k_max + 1]
        exact = differences(timed[e.name][-1].outputs, plain[-1].outputs, margins, found["margin"]["max"])
        records.append(policy_record(cell, e, timed, {**exact, "noise": found}, facts))
    return records


def speeds(runs):
    """Medians of both speeds over repeats, and the spread of the first."""
    whole, full = [r.tokens_per_s for r in runs], [r.full_tokens_per_s for r in runs]
    spread = [round(min(whole), 1), round(max(whole), 1)]
    return statistics.median(whole), statistics.median(full), spread


def plain_record(base, cell, runs, margins, first, facts):
    whole, full, spread = speeds(runs)
    total = plain_bytes(base)
    return record(
        f"{facts['prefix']}E3-{cell.suffix}", f"plain, {facts['model']}, {cell.workload}, B {cell.batch}, "
        f"context {cell.context}", whole, "tok/s", spread=spread, full_tokens_per_s=round(full, 1), bytes=total,
        floor_ms=round(total / BANDWIDTH * 1e3, 3), ms_per_step=round(cell.batch / full * 1e3, 4), **accounts(
            [r for run in runs for r in run.rounds]), peers=peers(cell, facts),
        one_row_mismatches=margins.mismatches,
        repeats_differing=sum(run.outputs != first.outputs for run in runs), about=facts["about"],
    )  # fmt: skip


def policy_record(cell, entry, timed, exact, facts):
    runs, plain = timed[entry.name], timed["plain"]
    (whole, full, spread), (plain_whole, plain_full, _) = speeds(runs), speeds(plain)
    best = max(plain_full, *peers(cell, facts).values()) if peers(cell, facts) else None
    return record(
        f"{facts['prefix']}{entry.id or BATCH_IDS.get(cell.batch, 'E4')}-{cell.suffix}-{entry.name}",
        f"{entry.name}, {facts['model']}, {cell.workload}, B {cell.batch}, context {cell.context}", whole, "tok/s",
        spread=spread, full_tokens_per_s=round(full, 1), speedup=round(whole / plain_whole, 3),
        full_speedup=round(full / plain_full, 3), full_speedup_over_best=best and round(full / best, 3),
        lossless=entry.policy.lossless, **accounts([r for run in runs for r in run.rounds]), **exact,
        peers={"plain (ours)": round(plain_whole, 1), **peers(cell, facts)}, about=facts["about"],
    )  # fmt: skip


def peers(cell, facts):
    """vLLM's tokens/s where it was measured on this shape, context and batch; else nothing."""
    known = facts["is_1_5b"] and cell.context == 31000 and cell.batch in VLLM
    return {VLLM_NAME: round(VLLM[cell.batch], 1)} if known else {}


def show(records):
    """One short line a record."""
    for r in records:
        spec = r.get("noise")
        more = (
            f"x{r['speedup']:.2f} full x{r['full_speedup']:.2f} best x{r['full_speedup_over_best'] or 0:.2f} "
            f"acc {r['mean_accepted']:.2f}/{r['mean_k']:.1f} diff {r['differing']}>{r['differing_beyond_noise']} "
            f"noise {spec['margin']['p99']:.3f}/{spec['margin']['max']:.3f}"
            if spec
            else f"{r['ms_per_step']} ms, floor {r['floor_ms']}"
        )
        parts = "/".join(f"{v:.0f}" for v in r["parts_us"].values())
        print(f"{r['id']:<36}{r['value']:>9.1f} {more} us {parts}", flush=True)


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
    for name in ("new-tokens", "repeats", "recent"):
        p.add_argument(f"--{name}", type=int, help=f"default {FULL[name.replace('-', '_')]}")
    p.add_argument("--streaming", nargs="*", type=int, default=[], help="budgets of StreamingLLM policies, for every k")
    p.add_argument("--policy", nargs="*", type=Path, default=[], help="policy files")
    p.add_argument("--dry", action="store_true", help="tiny, on the CPU, unrecorded")
    a = p.parse_args(argv)
    for name, value in (DRY if a.dry else FULL).items():
        if getattr(a, name) is None:
            setattr(a, name, value)
    if a.dry and a.out:
        p.error("a dry run's numbers cannot be written: leave out --out")
    if not a.dry and not a.prompts:
        p.error("--prompts is missing: write them with benchmarks/engine/prompts.py")
    return a


def main(argv=None):
    a = arguments(argv)
    model = load_model(a.model, device="cpu" if a.dry else "cuda")
    check(model.config, model.decoder.device, model.decoder.dtype)
    chosen = entries(a)
    shape = SHAPES["qwen2.5-coder-1.5b"]
    sizes = [getattr(model.config, n) == getattr(shape, n) for n in ("layers", "hidden", "kv_heads", "intermediate")]
    records = []
    for workload in a.workloads:
        for context in a.contexts:
            if a.prompts:
                ids, about = read(a.prompts, model.tokenizer, workload, context)
            else:
                count = max(a.batches)
                ids, about = prompts_of(workload, model.tokenizer, Sources(), context, count, a.new_tokens), {}
            facts = {
                "model": model.config.name,
                "prefix": "dry-" if a.dry else "",
                "is_1_5b": all(sizes) and not a.dry,
                "about": {**about, "new_tokens": a.new_tokens, "dtype": str(model.decoder.dtype).split(".")[1]},
            }
            largest = max(a.batches)
            longest = context + a.new_tokens
            model.config.check_context(longest)
            room = longest + max((e.policy.k_max for e in chosen), default=0) + 1
            # No history here: policies that score in the same way get one of their own, over the same keys.
            base = Sequences(model.decoder, room, largest, history=None, backend=backend_for(model.decoder.device))
            base.prefill(ids[:largest].tolist(), [a.new_tokens] * largest)
            for batch in sorted(a.batches, reverse=True):
                cell = Cell(workload, context, batch)
                records += (fresh := measure(first_of(base, batch), cell, chosen, a, facts))
                show(fresh)
                if a.out:
                    save(records, a.out)
                free()
            del base
            free()
    close(records)
    return records


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
