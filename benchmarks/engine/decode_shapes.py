"""Decode cost of model shapes on one GPU: plain steps, rounds of self-speculation at a fixed k, and idle time between.

Weights, keys and histories are random, so these are costs, not speedups on text; acceptance is whatever random weights
give and is not reported. Gate: the captured path must agree with the plain decoder under naive attention first.

    python3 benchmarks/engine/decode_shapes.py --out benchmarks/results/engine.json [--cases E1 E2 E3 E8 R]
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))
from _bench import finish, record
from _engine_bench import BANDWIDTH, check, plain_bytes, random_sequences

from specdial.engine.garbage import uncollected
from specdial.engine.history import HistorySpec
from specdial.engine.loop import Decoding
from specdial.engine.round import PARTS
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
ROUNDS = {f"R-B{batch}": ("qwen2.5-coder-1.5b", 31000, batch) for batch in (1, 16)}


def timed(s, policy, rounds, warmup=6):
    """Milliseconds from one round's end to the next on the device, sorted; the rounds; mean wall milliseconds."""
    running = Decoding(s, policy, Sampling(), list(range(s.batch))).rounds()
    with uncollected():
        for _ in range(warmup):
            next(running)
        started = time.perf_counter()
        done = [next(running) for _ in range(rounds)]
    wall_ms = (time.perf_counter() - started) * 1e3 / rounds
    running.close()
    return sorted(r.spent_us / 1e3 for r in done), done, wall_ms


def idle_frac(s, policy, rounds=8, warmup=4):
    """Share of the time from the first kernel of some rounds to the last in which no kernel or copy runs."""
    running = Decoding(s, policy, Sampling(), list(range(s.batch))).rounds()
    for _ in range(warmup):
        next(running)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(rounds):
            next(running)
        torch.cuda.synchronize()
    running.close()
    spans = sorted((e.time_range.start, e.time_range.end) for e in found.events() if e.device_type == DeviceType.CUDA)
    busy_us, reached = 0.0, spans[0][0]
    for start, end in spans:  # kernels may overlap
        busy_us += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return 1.0 - busy_us / (reached - spans[0][0])


def plain(model, id, steps):
    shape, context, batch, bar, vllm = CASES[id]
    s = random_sequences(model, context, batch)
    times, rounds, wall_ms = timed(s, plain_policy(), steps)
    total = plain_bytes(s)
    median = statistics.median(times)
    return record(
        id, f"plain, {shape} shape, random weights, B {batch}, context {context}", median, "ms",
        spread=[round(times[len(times) // 10], 4), round(times[-len(times) // 10 - 1], 4)], bytes=total,
        floor=round(total / BANDWIDTH * 1e3, 3), bar=round(bar, 3), peers={"vllm-0.23 (measured elsewhere)": vllm},
        tokens_per_s=round(batch / median * 1e3, 1),
        wall_ms=round(wall_ms, 4), host_ms=round(statistics.median(r.host_us for r in rounds) / 1e3, 4),
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
            times, done, _ = timed(s, policy, steps)
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


def gaps(model, id):
    """E8: what the device idles in plain steps and in rounds."""
    shape, context, batch = ROUNDS[id.replace("E8", "R")]
    s = random_sequences(model, context, batch, HistorySpec(16, 16))
    kv = {"budget": 512, "sink": 4, "recent": 64, "page": 16}
    policies = {"plain": plain_policy()}
    policies |= {
        f"k{k}": policy_from_mapping({"controller": {"kind": "fixed", "k": k}, "draft_kv": kv}) for k in (4, 8)
    }
    controller = {"kind": "rate", "k_max": 8, "lag": 1}
    policies["rate-lag1"] = policy_from_mapping({"controller": controller, "draft_kv": kv})
    found = []
    for name, policy in policies.items():
        s.hold([1] * context, limit=600)
        case = f"device idle, {shape} shape, random weights, B {batch}, context {context}, {name}"
        found.append(record(f"{id}-{name}", case, idle_frac(s, policy), "frac", bar=0.05))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cases", nargs="+", default=["E1", "E2", "E3", "E8", "R"])
    parser.add_argument("--steps", type=int, default=256)
    arguments = parser.parse_args()
    idle = [id.replace("R", "E8") for id in ROUNDS]
    chosen = [id for id in (*CASES, *idle, *ROUNDS) if any(id.startswith(c) for c in arguments.cases)]
    records, model = [], None
    for id in chosen:
        shape = (CASES.get(id) or ROUNDS[id.replace("E8", "R")])[0]
        if model is None or model.config.name != shape:
            model = None
            torch.cuda.empty_cache()
            model = load_model(f"shape:{shape}", device="cuda", dtype="bfloat16")
            check(model.config)
        if id in CASES:
            records.append(plain(model, id, arguments.steps))
        else:
            records += gaps(model, id) if id in idle else rounds(model, id, min(arguments.steps, 40))
        print(records[-1]["id"], records[-1]["value"], flush=True)
        torch.cuda.empty_cache()
    finish(records, arguments.out)


if __name__ == "__main__":
    main()
