"""Triton helpers that turn raw attention statistics into normalised mass, one query row at a time."""

import triton
import triton.language as tl


@triton.jit
def row_mass(
    mass, tile_max, lse, length, head, t, entries, T, width,
    G: tl.constexpr, KIND: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Mass of `entries` (keys or pages) from row t of kv head `head` (b * Hk + h), summed over its G query heads.

    KIND 0: `mass` is normalised already, [., T, width]; 1: page log-masses [., width, T*G]; 2: token scores
    [., T*G, width] relative to tile_max. Entries that begin past the row's last key, length + t, are zero.
    """
    M = T * G
    inside = (entries < width) & (entries * UNIT <= length + t)
    if KIND == 0:
        result = tl.load(mass + (head * T + t) * width + entries, mask=entries < width, other=0.0).to(tl.float32)
    else:
        result = tl.zeros(entries.shape, dtype=tl.float32)
        for g in tl.static_range(G):
            row = t * G + g
            if KIND == 1:
                raw = tl.load(mass + (head * width + entries) * M + row, mask=inside, other=float("-inf"))
            else:
                tiles = (width + TILE - 1) // TILE
                raw = tl.load(mass + (head * M + row) * width + entries, mask=inside, other=float("-inf"))
                top = tl.load(tile_max + (head * tiles + entries // TILE) * M + row, mask=inside, other=0.0)
                raw = raw.to(tl.float32) + top
            result += tl.exp2(raw - tl.load(lse + head * M + row))
    return result


@triton.jit
def normalise_kernel(
    out, log_mass, tile_max, lse, lengths, Hk, T, width,
    G: tl.constexpr, KIND: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalised mass of one row and one block of entries."""
    entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    t = tl.program_id(1)
    head = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + head // Hk).to(tl.int32)
    mass = row_mass(log_mass, tile_max, lse, length, head, t, entries, T, width, G, KIND, UNIT, TILE)
    tl.store(out + (head * T + t) * width + entries, mass, mask=entries < width)
