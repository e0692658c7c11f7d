"""What the CPU engine rests on, measured: bits and cost of a matrix product by rows, and selection against sorting.

    python3 benchmarks/cpu_numerics.py [--out benchmarks/results/cpu.json]

Gate: the selection equals a stable sort. Bits depend on the BLAS and the processor; the records name both.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent / "kernels"))
from _bench import finish, record

from specdial.kernels.selection.reference import select_reference

ROWS = (1, 2, 3, 4, 5, 7, 8, 12, 16, 32)
SHAPES = ((960, 576), (3072, 576), (576, 1536))  # SmolLM2-135M: qkv, gate and up, down
KEYS, BUDGET, HEADS, LAYERS = 4224, 512, 3, 30


def spread_us(call, repeats):
    """Median, 10th and 90th percentile of single calls, in microseconds."""
    call()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append((time.perf_counter() - started) * 1e6)
    times.sort()
    return times[len(times) // 2], [round(times[len(times) // 10], 1), round(times[-len(times) // 10 - 1], 1)]


def products():
    """Weights of all layers in turn, so that they come from memory as in a forward pass."""
    weights = [[torch.randn(shape) * 0.02 for shape in SHAPES] for _ in range(LAYERS)]
    inputs = {width: torch.randn(max(ROWS), width) for width in {shape[1] for shape in SHAPES}}
    reference = [F.linear(inputs[w.shape[1]], w) for w in weights[0]]

    def run(rows):
        for layer in weights:
            for w in layer:
                F.linear(inputs[w.shape[1]][:rows], w)

    for rows in ROWS:
        same = all(torch.equal(F.linear(inputs[w.shape[1]][:rows], w), r[:rows]) for w, r in zip(weights[0], reference))
        median, spread = spread_us(lambda rows=rows: run(rows), 15)
        total = 4 * LAYERS * sum(a * b for a, b in SHAPES)
        yield record(
            f"C1-rows{rows}", "matrix products of 30 layers, SmolLM2-135M shapes, fp32", median, "us", spread=spread,
            bytes=total, peers={f"bits of a row equal those among {max(ROWS)} rows": same},
            processor=torch.backends.cpu.get_cpu_capability(), threads=torch.get_num_threads(),
        )  # fmt: skip


def selection():
    scores, lengths = torch.rand(LAYERS, 1, HEADS, KEYS), torch.tensor([KEYS - 100])

    def by_sort():
        position = torch.arange(KEYS)
        protected = (position < 4) | (position >= KEYS - 100 - 64)
        ranked = scores.masked_fill(protected, torch.inf).masked_fill(position >= KEYS - 100, -torch.inf)
        return ranked.sort(dim=-1, descending=True, stable=True).indices[..., :BUDGET].sort(dim=-1).values

    def by_threshold():
        return select_reference(scores, lengths, budget=BUDGET, sink=4, recent=64)[0]

    if not torch.equal(by_sort(), by_threshold().long()):
        sys.exit("selection differs from a stable sort")
    ours, spread = spread_us(by_threshold, 30)
    return record(
        "C2", f"selection of {BUDGET} of {KEYS} keys, {LAYERS * HEADS} rows", ours, "us", spread=spread,
        peers={"stable sort": round(spread_us(by_sort, 15)[0], 1)}, threads=torch.get_num_threads(),
    )  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    torch.manual_seed(0)
    finish([*products(), selection()], parser.parse_args().out)


if __name__ == "__main__":
    main()
