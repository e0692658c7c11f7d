"""Tile sizes, warps, stages and splits of the full-attention kernel, to choose `launch.choose_tiling` from.

python3 benchmarks/kernels/sweep_full_attention.py [--only K1,K2] [--mass page|token]
"""

import argparse
import json

import torch
from _bench import time_graph
from full_attention import CASES, make_inputs

from specdial.kernels.full_attention.launch import Tiling, choose_tiling, full_attention_triton
from specdial.kernels.full_attention.triton import split_kernel

SETTINGS = {16: ((4, 3), (4, 4)), 32: ((4, 3), (4, 4)), 64: ((4, 3), (4, 4), (4, 5))}  # row tile: (warps, stages)
PER_SM = (1, 2, 4, 6)


def resources() -> str:
    """Registers, spills and shared memory of the kernel compiled last."""
    kernel = list(split_kernel.device_caches[torch.cuda.current_device()][0].values())[-1]
    return f"{kernel.n_regs} regs, {kernel.n_spills} spilled, {kernel.metadata.shared} B shared"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="K")
    parser.add_argument("--mass", choices=("page", "token"), default=None)
    options = parser.parse_args()
    rows = []
    for case in CASES:
        if not case.id.startswith(tuple(options.only.split(","))):
            continue
        sets = make_inputs(case)
        M = case.T * case.H // case.Hk
        for block_m, settings in SETTINGS.items():
            if block_m != choose_tiling(M, 128, torch.bfloat16).block_m:
                continue
            for warps, stages in settings:
                for per_sm in PER_SM:
                    tiling = Tiling(block_m, warps, stages, per_sm=per_sm, crowded_per_sm=per_sm)

                    def call(inputs, tiling=tiling):
                        return full_attention_triton(
                            *inputs, granularity=options.mass, page_tokens=64, splits=None, tiling=tiling
                        )

                    timing = time_graph([lambda x=x, f=call: f(x) for x in sets], replays=10, calls_per_replay=4)
                    rows.append((case.id, block_m, warps, stages, per_sm, round(timing.median_us, 2)))
                print(*rows[-1][:4], [row[-1] for row in rows[-len(PER_SM) :]], resources(), flush=True)
        del sets
        torch.cuda.empty_cache()
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
