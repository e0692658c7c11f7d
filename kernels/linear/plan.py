"""Launch shapes of the skinny product: how much of the weights a program takes, and how much it keeps in flight."""

from dataclasses import dataclass

MAX_ROWS = 64
TILE_ROWS = 64  # left rows of one warpgroup instruction: weight rows times fold
SHARED_BYTES = 112 * 1024  # of a program: two of them, or one and the next kernel's, share a multiprocessor
STEP_BYTES = 16 * 1024  # of weights in one step
PREFETCH_BYTES = 16 << 20  # of one product's weights: what memory delivers in the 4 us between two kernels' loops
ENOUGH_FRAC = 0.7  # of the multiprocessors saturate memory: fewer programs are worth a smaller tile or a split


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """Launch shape of one product.

    block_n: output columns of a program; block_m: padded rows; block_k: elements of a weight row in a step; fold: parts
    that a step of a weight row is cut into; splits: programs that share a tile's K; prefetch_bytes: weights that a
    program asks the L2 cache for ahead of its turn.
    """

    block_n: int
    block_m: int
    block_k: int
    fold: int
    splits: int
    warps: int
    stages: int
    prefetch_bytes: int

    def shared_bytes(self, item_bytes: int, *, gated: bool, normed: bool, x_bytes: int = 2) -> int:
        """Shared memory of the pipeline's buffers, about."""
        weights = self.block_n * self.block_k * item_bytes * (2 if gated else 1)
        inputs = self.block_m * self.block_k * x_bytes * (2 if normed else 1)  # norm weights take x's shape
        return self.stages * (weights + inputs)


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
    shortest = min(TILE_ROWS, max(8, 2 * block_m // (matrices * item_bytes)))
    block_n = TILE_ROWS
    while block_n > shortest and -(-N // block_n) < ENOUGH_FRAC * processors:
        block_n //= 2
    fold = TILE_ROWS // block_n
    if fold * block_m < 16:  # few rows need no fold, tensor cores need 8 columns, the compiler 16
        block_m = 16 // fold
    tiles = -(-N // block_n)
    block_k = fold * STEP_BYTES // (TILE_ROWS * item_bytes * matrices)
    config = LinearConfig(block_n, block_m, block_k, fold, 1, 4, 4, 0)
    while config.block_k > 64 * fold and config.shared_bytes(item_bytes, gated=gated, normed=normed) > SHARED_BYTES:
        config = LinearConfig(block_n, block_m, config.block_k // 2, fold, 1, 4, 4, 0)
    steps = -(-K // config.block_k)
    splits = 1 if tiles >= ENOUGH_FRAC * processors else max(1, min(processors // tiles, steps // 2, 16))
    splits = -(-steps // -(-steps // splits))  # no empty split
    stages = max(2, min(4, 1 + -(-steps // splits)))
    prefetch_bytes = min(PREFETCH_BYTES // (tiles * splits), K * item_bytes * matrices * block_n // splits)
    return LinearConfig(block_n, block_m, config.block_k, fold, splits, 4, stages, prefetch_bytes)
