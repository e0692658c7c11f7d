"""Triton kernels of the history score: committed rows into the ring, the ring's sum, the decayed score."""

import triton
import triton.language as tl

from specdial.kernels.full_attention.mass import row_mass


@triton.jit
def _row_of_slot(slot, length, committed, W):
    """The committed row that lands in `slot`, the last one if several would; negative if none does."""
    last = committed - 1
    behind = (length + last - slot) % W  # positions between the last committed row and the slot's
    return tl.where(committed > 0, last - tl.where(behind < 0, behind + W, behind), -1)


@triton.jit
def push_rows_kernel(
    ring, mass, tile_max, lse, lengths, committed, score, Hk, T, W, S, width,
    G: tl.constexpr, KIND: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One slot of the ring (program axis 1), one block of entries: written if a committed row lands there."""
    head = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + head // Hk).to(tl.int32)
    rows = tl.minimum(tl.load(committed + head // Hk).to(tl.int32), T)
    slot = tl.program_id(1)
    t = _row_of_slot(slot, length, rows, W)
    if t >= 0:
        entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        values = row_mass(mass, tile_max, lse, length, head, t, entries, T, width, G, KIND, UNIT, TILE)
        tl.store(ring + (head * W + slot) * S + entries, values, mask=entries < S)


@triton.jit
def push_rows_score_kernel(
    ring, mass, tile_max, lse, lengths, committed, score, Hk, T, W, S, width,
    G: tl.constexpr, KIND: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All slots of one block of entries: write the committed rows and sum the ring in slot order."""
    head = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + head // Hk).to(tl.int32)
    rows = tl.minimum(tl.load(committed + head // Hk).to(tl.int32), T)
    entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in range(W):
        t = _row_of_slot(slot, length, rows, W)
        place = ring + (head * W + slot) * S + entries
        if t >= 0:
            values = row_mass(mass, tile_max, lse, length, head, t, entries, T, width, G, KIND, UNIT, TILE)
            tl.store(place, values, mask=entries < S)
        else:
            values = tl.load(place, mask=entries < S, other=0.0)
        total += values
    tl.store(score + head * S + entries, total, mask=entries < S)


@triton.jit
def decay_rows_kernel(
    score, mass, tile_max, lse, lengths, committed, decay, Hk, T, S, width,
    G: tl.constexpr, KIND: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of entries: score = decay * score + row, committed rows in order."""
    head = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + head // Hk).to(tl.int32)
    rows = tl.minimum(tl.load(committed + head // Hk).to(tl.int32), T)
    entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(score + head * S + entries, mask=entries < S, other=0.0)
    for t in range(rows):
        values = row_mass(mass, tile_max, lse, length, head, t, entries, T, width, G, KIND, UNIT, TILE)
        total = total * decay + values
    if rows > 0:
        tl.store(score + head * S + entries, total, mask=entries < S)
