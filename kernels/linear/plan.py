"""Launch shapes of the skinny product: how much of the weights a program takes, and how much it keeps in flight.

The constants are the best of sweeps on one H200, over the products of a 1.5B decoder at 1, 16 and 64 rows. Of float8
the head, and down at one row, have not been swept.
"""

import functools
import math
from dataclasses import dataclass, replace

MAX_ROWS = 64
TILE_ROWS = 64  # left rows of one warpgroup instruction: weight rows times fold
SHARED_BYTES = 112 << 10  # of a program, two of them on a multiprocessor
LONE_BYTES = 150 << 10  # of a program that has one to itself; the next kernel's small ones fit beside it
LEAST_COLUMNS = 8  # of a program
X_BYTES = 2  # of an element of x, one piece or two
MOST_ACCUMULATORS = 256  # columns of tensor-core results of four warps, TILE_ROWS each: half of their registers
SMALL_FRAC = 1 / 8  # of the weights' traffic, for x
ENOUGH_FRAC = 0.7  # of the multiprocessors saturate memory: fewer programs are worth a smaller tile or a split
UNEVEN = 1.5  # tiles of the busiest multiprocessor, over the mean, that are worth a smaller tile
LONG_ROW_BYTES = 4 << 10  # of weights: a split's meeting costs more than the traffic that taller tiles save below it
MOST_SPLITS = 16
LARGE_BYTES = 8 << 20  # of weights of one product: of larger ones, streamed anyway, a prefetch cost 2 to 4 us
PREFETCH_BYTES = 32 << 10  # of a program
MOST_STAGES = 6


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What suits weights of one width: of a step and of a multiprocessor, and the least of stages."""

    short_step_bytes: int  # of weights, for tiles with a fold
    tall_step_bytes: int  # without one
    least_part: int  # elements of a weight row in a step
    in_flight_bytes: int  # of weights on their way to a multiprocessor
    least_stages: int


PIPELINES = {  # by bytes of a weight; float8's steps end with a wait, so are longer
    1: Pipeline(16 << 10, 16 << 10, least_part=64, in_flight_bytes=40 << 10, least_stages=4),
    2: Pipeline(8 << 10, 16 << 10, least_part=32, in_flight_bytes=40 << 10, least_stages=4),
}


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """Launch shape of one product.

    block_n: output columns of a program; block_m: padded rows; block_k: elements of a weight row in a step; fold: parts
    that a step of a weight row is cut into; splits: programs that share a tile's K; prefetch_bytes: weights that a
    program asks the L2 cache for ahead of its turn; apart: x's pieces one after the other, which takes half of the
    registers and reads the weights twice from shared memory.
    """

    block_n: int
    block_m: int
    block_k: int
    fold: int
    splits: int
    warps: int
    stages: int
    prefetch_bytes: int
    apart: bool = False

    def step_bytes(self, item_bytes: int, *, gated: bool) -> int:
        """Bytes of weights in a step."""
        return self.block_n * self.block_k * item_bytes * (2 if gated else 1)

    def shared_bytes(self, item_bytes: int, *, gated: bool) -> int:
        """Shared memory of the pipeline's buffers, at most."""
        return self.stages * (self.step_bytes(item_bytes, gated=gated) + self.block_m * self.block_k * X_BYTES)


def _pieces(item_bytes: int) -> int:
    """Of x, for weights of so many bytes each."""
    return 2 if item_bytes == 1 else 1


@functools.cache
def plan(N: int, K: int, rows: int, *, item_bytes: int, gated: bool = False, processors: int = 132) -> LinearConfig:
    """Launch shape for `rows` rows of x against N output columns (gated: 2 * N weight rows) of K weights each.

    item_bytes: of a weight in memory; 1 goes with an x in pieces.
    """
    padded = max(4, 1 << (rows - 1).bit_length())
    if item_bytes == 4:  # for checking, not for speed
        return LinearConfig(32, max(16, padded), 32, 1, 1, 4, 2, 0)
    block_n = _tile(N, K, rows, padded, item_bytes=item_bytes, gated=gated, processors=processors)
    fold, tiles = TILE_ROWS // block_n, -(-N // block_n)
    block_m = max(padded, 16 // (fold * _pieces(item_bytes)))  # 16 columns of the right operand are the least

    pipeline, row_bytes = PIPELINES[item_bytes], item_bytes * (2 if gated else 1)
    step_bytes = pipeline.short_step_bytes if fold > 1 else pipeline.tall_step_bytes
    if fold > 1 and gated and item_bytes == 1:  # 8.5 against 10.1 us with one row
        step_bytes //= 2
    in_flight_bytes = pipeline.in_flight_bytes
    if fold > 1 and 8 * rows <= block_n and block_n * K * row_bytes > 32 * step_bytes:  # a long way with little of x
        step_bytes, in_flight_bytes = 2 * step_bytes, 2 * in_flight_bytes
    part = max(pipeline.least_part, step_bytes // (TILE_ROWS * row_bytes))
    matrices = 2 if gated else 1
    # Of float8, a step's results wait beside the sums, and gate_up's scales.
    apart = item_bytes == 1 and 2 * fold * block_m * (matrices + 1) > MOST_ACCUMULATORS
    config = LinearConfig(block_n, block_m, part * fold, fold, 1, 4, stages=3, prefetch_bytes=0, apart=apart)
    while config.block_k > 32 * fold and (
        config.shared_bytes(item_bytes, gated=gated) > SHARED_BYTES
        or -(-K // config.block_k) * config.block_k > 1.1 * K  # much of the last step would be masked
    ):
        config = replace(config, block_k=config.block_k // 2)

    steps = -(-K // config.block_k)
    splits = 1
    if tiles < ENOUGH_FRAC * processors:
        splits = max(1, min(processors // tiles, steps // 2, MOST_SPLITS))
    steps_each = -(-steps // splits)
    splits = -(-steps // steps_each)  # no empty split
    programs_each = min(2.0, max(1.0, tiles * splits / processors))  # of a multiprocessor, at a time
    most_bytes = SHARED_BYTES if programs_each > 1 else LONE_BYTES
    wanted = 1 + math.ceil(in_flight_bytes / (programs_each * config.step_bytes(item_bytes, gated=gated)))
    room = most_bytes // replace(config, stages=1).shared_bytes(item_bytes, gated=gated)
    least_stages = pipeline.least_stages
    if gated and fold == 1 and (item_bytes == 1 or rows > 32):  # 10.7 against 11.4 us, 22.2 against 25.7
        wanted = least_stages = 3
    stages = max(2, min(max(wanted, least_stages), MOST_STAGES, room, steps_each + 1))
    slab_bytes = block_n * min(K, steps_each * config.block_k) * row_bytes
    prefetch_bytes = min(slab_bytes, PREFETCH_BYTES) if N * K * row_bytes <= LARGE_BYTES else 0
    return replace(config, splits=splits, stages=stages, prefetch_bytes=prefetch_bytes)


def _tile(N: int, K: int, rows: int, padded: int, *, item_bytes: int, gated: bool, processors: int) -> int:
    """Output columns of a program: as many as leave ENOUGH_FRAC of the multiprocessors with a tile.

    But not so few that x's traffic from the L2 cache exceeds that of the weights (for short rows twice that): K is
    split instead. Half as many where the tiles come out uneven and x is small beside them. With float8 a split of K
    comes with the tallest tile: it may as well save traffic and results that nobody needs.
    """
    matrices = 2 if gated else 1

    def fits(block_n: int, most_traffic: float) -> bool:
        columns = TILE_ROWS // block_n * padded * matrices * _pieces(item_bytes)
        traffic = rows * X_BYTES / (block_n * matrices * item_bytes)
        return block_n >= LEAST_COLUMNS and columns <= MOST_ACCUMULATORS and traffic <= most_traffic

    most_traffic = 2 if K * item_bytes <= LONG_ROW_BYTES else 1
    block_n = TILE_ROWS
    while -(-N // block_n) < ENOUGH_FRAC * processors and fits(block_n // 2, most_traffic):
        block_n //= 2
    if item_bytes == 1 and 2 * -(-N // block_n) <= processors:
        return TILE_ROWS
    each = -(-N // block_n) / processors
    uneven = each >= ENOUGH_FRAC and math.ceil(each) / each > UNEVEN
    if uneven and fits(block_n // 2, SMALL_FRAC):
        block_n //= 2
    return block_n
