"""Decode cost of model shapes on one GPU: plain steps, and rounds of self-speculation at a fixed k.

Weights, keys and histories are random, so these are costs, not speedups on text; acceptance is whatever random weights
give and is not reported. Gate: the captured path must agree with the plain decoder under naive attention first.

    python3 benchmarks/engine/decode_shapes.py --out benchmarks/results/engine.json [--cases E1 E2 E3 R]
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))
from _bench import finish, record
from _engine_bench import BANDWIDTH, PARTS, check, plain_bytes, random_sequences

from specdial.engine.history import HistorySpec
from specdial.engine.loop import Decoding
from specdial.engine.sampling import Sampling
from specdial.engine.weights import load_model
from specdial.policies.schema import plain_policy, policy_from_mapping

CASES = {  # id: (shape, contexts and batches, bar in ms a step or None, what vLLM 0.23 measured in ms a step)
    "E1-32k": ("llama-3.1-8b", 32768, 1, 5.5, 5.96),
    "E1-130k": ("llama-3.1-8b", 130000, 1, 8.4, 8.95),
    "E2": ("llama-3.1-8b", 32768, 16, 16 / 790 * 1e3, 20.86),
    "E3-B1": ("qwen2.5-coder-1.5b", 31000, 1, 1.6, 2.37),
    "E3-B16": ("qwen2.5-coder-1.5b", 31000, 16, 4.8, 5.16),
    "E3-B64": ("qwen2.5-coder-1.5b", 31000, 64, 15.2, 15.47),
}
ROUNDS = {"R-B1": ("qwen2.5-coder-1.5b", 31000, 1), "R-B16": ("qwen2.5-coder-1.5b", 31000, 16)}


def timed(s, policy, rounds, warmup=6):
    """Wall milliseconds of each round, and the rounds."""
    decoding = Decoding(s, policy, Sampling(), list(range(s.batch)))
    times, done = [], []
    for i in range(rounds + warmup):
        torch.cuda.synchronize()
        started = time.perf_counter()
        done.append(decoding.decode_round())
        torch.cuda.synchronize()
        if i >= warmup:
            times.append((time.perf_counter() - started) * 1e3)
    return sorted(times), done[warmup:]


def plain(model, id, steps):
    shape, context, batch, bar, vllm = CASES[id]
    s = random_sequences(model, context, batch)
    times, rounds = timed(s, plain_policy(), steps)
    total = plain_bytes(s)
    median = statistics.median(times)
    return record(
        id, f"plain, {shape} shape, random weights, B {batch}, context {context}", median, "ms",
        spread=[round(times[len(times) // 10], 4), round(times[-len(times) // 10 - 1], 4)], bytes=total,
        floor=round(total / BANDWIDTH * 1e3, 3), bar=round(bar, 3), peers={"vllm-0.23 (measured elsewhere)": vllm},
        tokens_per_s=round(batch / median * 1e3, 1),
        host_ms=round(statistics.median(r.host_us for r in rounds) / 1e3, 4),
    )  # fmt: skip


def rounds(model, id, steps):
    shape, context, batch = ROUNDS[id]
    found = []
    for page in (1, 16, 64):
        s = random_sequences(model, context, batch, HistorySpec(16, page))
        for k in (1, 4, 8):
            kv = {"budget": 512, "sink": 4, "recent": 64, "page": page}
            policy = policy_from_mapping({"controller": {"kind": "fixed", "k": k}, "draft_kv": kv})
            s.hold([1] * context, limit=600)
            times, done = timed(s, policy, steps)
            parts = {name: round(statistics.median(getattr(r, f"{name}_us") for r in done) / 1e3, 4) for name in PARTS}
            found.append(
                record(
                    f"{id}-page{page}-k{k}", f"self-speculation round, {shape} shape, random weights, B {batch}, "
                    f"context {context}, budget 512", statistics.median(times), "ms",
                    spread=[round(times[len(times) // 10], 4), round(times[-len(times) // 10 - 1], 4)], peers=parts,
                )
            )  # fmt: skip
        del s
        torch.cuda.empty_cache()
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cases", nargs="+", default=["E1", "E2", "E3", "R"])
    parser.add_argument("--steps", type=int, default=256)
    arguments = parser.parse_args()
    chosen = [id for id in (*CASES, *ROUNDS) if any(id.startswith(c) for c in arguments.cases)]
    records, model = [], None
    for id in chosen:
        shape = (CASES.get(id) or ROUNDS[id])[0]
        if model is None or model.config.name != shape:
            model = None
            torch.cuda.empty_cache()
            model = load_model(f"shape:{shape}", device="cuda", dtype="bfloat16")
            check(model.config)
        records += [plain(model, id, arguments.steps)] if id in CASES else rounds(model, id, min(arguments.steps, 40))
        print(records[-1]["id"], records[-1]["value"], flush=True)
        torch.cuda.empty_cache()
    finish(records, arguments.out)


if __name__ == "__main__":
    main()
