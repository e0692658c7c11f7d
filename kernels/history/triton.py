"""Triton kernels of the history score: committed rows into the ring, the ring's sum, the decayed score."""

import triton
import triton.language as tl

from specdial.kernels.full_attention.mass import row_mass
from specdial.kernels.full_attention.plan import await_previous


@triton.jit
def push_rows_kernel(
    ring, mass, tile_max, lse, lengths, committed, score, sequences, Hk, T, W, S, width,
    G: tl.constexpr, KIND: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK: tl.constexpr, SCORE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All slots of one block of entries at once: write the slots a committed row lands in, and sum the ring."""
    if PDL:
        await_previous()
    head = tl.program_id(1).to(tl.int64)
    sequence = (head // Hk) % sequences  # the batch may stack layers
    length = tl.load(lengths + sequence).to(tl.int32)
    rows = tl.minimum(tl.load(committed + sequence).to(tl.int32), T)
    slot = tl.arange(0, BLOCK_W)[:, None]  # [BLOCK_W, 1]
    entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    oldest = tl.maximum(rows - W, 0)  # older rows would land in slots of newer ones
    behind = (length + rows - 1 - slot) % W  # positions from the last committed row back to the slot's
    behind = tl.where(behind < 0, behind + W, behind)
    lands = behind < rows - oldest  # [BLOCK_W, 1]
    place = ring + (head * W + slot) * S + entries[None, :]
    inside = (slot < W) & (entries < S)[None, :]
    tile = tl.zeros([BLOCK_W, BLOCK], dtype=tl.float32)
    if SCORE:
        tile = tl.load(place, mask=inside & (lands == 0), other=0.0)
    for t in range(oldest, rows):
        values = row_mass(mass, tile_max, lse, length, head, t, entries, T, width, G, KIND, UNIT, TILE)
        tile = tl.where(behind == rows - 1 - t, values[None, :], tile)
    if SCORE:
        tl.store(score + head * S + entries, tl.sum(tl.where(inside, tile, 0.0), axis=0), mask=entries < S)
    tl.store(place, tile, mask=inside & lands)


@triton.jit
def decay_rows_kernel(
    score, mass, tile_max, lse, lengths, committed, decay, sequences, Hk, T, S, width,
    G: tl.constexpr, KIND: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One block of entries: score = decay * score + row, committed rows in order."""
    if PDL:
        await_previous()
    head = tl.program_id(1).to(tl.int64)
    sequence = (head // Hk) % sequences  # the batch may stack layers
    length = tl.load(lengths + sequence).to(tl.int32)
    rows = tl.minimum(tl.load(committed + sequence).to(tl.int32), T)
    entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(score + head * S + entries, mask=entries < S, other=0.0)
    for t in range(rows):
        values = row_mass(mass, tile_max, lse, length, head, t, entries, T, width, G, KIND, UNIT, TILE)
        total = total * decay + values
    if rows > 0:
        tl.store(score + head * S + entries, total, mask=entries < S)
