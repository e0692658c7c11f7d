"""What a program works out before it reads keys: when it may start, and which keys of which sequence are its own."""

import triton
import triton.language as tl


@triton.jit
def await_previous():
    """Programmatic dependent launch: this kernel was launched early, wait for the one before it, let the next come.

    The wait is over when everything before this kernel is finished and visible, and only then may the next one start.
    So whatever was finished before the previous kernel started can be read ahead of the wait, and nothing else.
    """
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch_lines(addresses, wanted):
    """Ask the L2 cache for the 128-byte lines at `addresses`, pointers, where `wanted`. It waits for nothing."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r", [addresses.to(tl.int64), wanted.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def split_plan(lengths, B, more, most_tiles, slots, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr):
    """Share the tiles of all sequences over `slots` programs: (tiles [BLOCK_B], chunks [BLOCK_B], chunk).

    A sequence has (length + more) // BLOCK_N tiles. chunk is the least of 8 candidates, in tiles, for which every
    sequence cut into chunks fits the slots. The largest always does: sum ceil(n/c) < sum n/c + B <= slots + 1 for
    c >= sum n / (slots - B + 1).
    """
    b = tl.arange(0, BLOCK_B)
    length = tl.load(lengths + b, mask=b < B, other=0).to(tl.int32)
    tiles = tl.where(b < B, tl.minimum((length + more) // BLOCK_N, most_tiles), 0)  # [BLOCK_B]
    total = tl.sum(tiles)
    least = tl.maximum((total + slots - 1) // slots, 1)
    if BLOCK_B == 1:
        chunk = least
    else:
        most = tl.maximum((total + slots - B) // (slots - B + 1), 1)
        candidates = least + ((most - least) * tl.arange(0, 8) + 6) // 7  # [8]
        needed = tl.sum((tiles[None, :] + candidates[:, None] - 1) // candidates[:, None], axis=1)  # [8]
        chunk = tl.min(tl.where(needed <= slots, candidates, most))
    return tiles, (tiles + chunk - 1) // chunk, chunk
