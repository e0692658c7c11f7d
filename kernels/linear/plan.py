"""Launch shapes of the skinny product: how much of the weights a program takes, and how much it keeps in flight."""

import functools
import math
from dataclasses import dataclass, replace

MAX_ROWS = 64
TILE_ROWS = 64  # left rows of one warpgroup instruction: weight rows times fold
SHARED_BYTES = 112 << 10  # of a program: two of them, or one and the next kernel's, share a multiprocessor
IN_FLIGHT_BYTES = 64 << 10  # of weights on their way to a multiprocessor: memory's latency times its share of the rate
STEP_BYTES = 16 << 10  # of weights in one step
PREFETCH_BYTES = 16 << 20  # of one product's weights: what memory delivers in the 4 us between two kernels' loops
ENOUGH_FRAC = 0.7  # of the multiprocessors saturate memory: fewer programs are worth a smaller tile or a split
MOST_SPLITS = 16
STAGES = range(2, 8)


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """Launch shape of one product.

    block_n: output columns of a program; block_m: padded rows; block_k: elements of a weight row in a step; fold: parts
    that a step of a weight row is cut into; splits: programs that share a tile's K; prefetch_bytes: weights that a
    program asks the L2 cache for ahead of its turn; keep: they outlive streamed lines there; late: the next kernel
    starts after the loop, not before it.
    """

    block_n: int
    block_m: int
    block_k: int
    fold: int
    splits: int
    warps: int
    stages: int
    prefetch_bytes: int
    keep: bool = True
    late: bool = False

    def shared_bytes(self, item_bytes: int, *, gated: bool, normed: bool, x_bytes: int = 2) -> int:
        """Shared memory of the pipeline's buffers, at most. With a fold the norm's weights take as much as x."""
        weights = self.block_n * self.block_k * item_bytes * (2 if gated else 1)
        columns = self.block_m * (2 if normed and self.fold > 1 else 1) + (1 if normed and self.fold == 1 else 0)
        return self.stages * (weights + columns * self.block_k * x_bytes)


@functools.cache
def plan(
    N: int, K: int, rows: int, *, item_bytes: int, gated: bool = False, normed: bool = False, processors: int = 132
) -> LinearConfig:
    """Launch shape for `rows` rows of x against N output columns (gated: 2 * N weight rows) of K weights each.

    Tiles are as tall as still leave ENOUGH_FRAC of the multiprocessors with one; K is split where not even the
    shortest tile does. A tile is no shorter than what keeps x's traffic from the L2 cache below that of the weights.
    """
    matrices = 2 if gated else 1
    block_m = max(4, 1 << (rows - 1).bit_length())
    if item_bytes == 4:  # for checking, not for speed
        return LinearConfig(32, max(16, block_m), 32, 1, 1, 4, 2, 0)
    shortest = min(TILE_ROWS, max(8, 2 * block_m // (item_bytes * (1 if normed else matrices))))
    block_n = TILE_ROWS
    while block_n > shortest and -(-N // block_n) < ENOUGH_FRAC * processors:
        block_n //= 2
    fold = TILE_ROWS // block_n
    block_m = max(block_m, 16 // fold)  # 16 columns of the right operand are the compiler's least
    tiles = -(-N // block_n)
    block_k = STEP_BYTES // (block_n * item_bytes * matrices)
    config = LinearConfig(block_n, block_m, block_k, fold, splits=1, warps=4, stages=4, prefetch_bytes=0)
    while config.block_k > 64 * fold and (
        config.shared_bytes(item_bytes, gated=gated, normed=normed) > SHARED_BYTES
        or -(-K // config.block_k) * config.block_k > 1.1 * K  # much of the last step would be masked
    ):
        config = replace(config, block_k=config.block_k // 2)

    steps = -(-K // config.block_k)
    splits = 1 if tiles >= ENOUGH_FRAC * processors else max(1, min(processors // tiles, steps // 2, MOST_SPLITS))
    steps_each = -(-steps // splits)
    splits = -(-steps // steps_each)  # no empty split
    programs_each = min(2.0, max(1.0, tiles * splits / processors))  # of a multiprocessor, at a time
    wanted = 1 + math.ceil(IN_FLIGHT_BYTES / (programs_each * block_n * config.block_k * item_bytes * matrices))
    room = SHARED_BYTES // replace(config, stages=1).shared_bytes(item_bytes, gated=gated, normed=normed)
    stages = max(STAGES.start, min(wanted, room, steps_each + 1, STAGES.stop - 1))
    slab_bytes = block_n * matrices * min(K, steps_each * config.block_k) * item_bytes
    prefetch_bytes = min(slab_bytes, PREFETCH_BYTES // min(tiles * splits, 2 * processors))
    return replace(config, splits=splits, stages=stages, prefetch_bytes=prefetch_bytes)
