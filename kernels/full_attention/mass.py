"""Triton helpers that turn raw attention statistics into normalised mass."""

import triton
import triton.language as tl

from specdial.kernels.full_attention.plan import await_previous


@triton.jit
def row_mass(
    mass, tile_max, lse, length, head, t, entries, T, width,
    G: tl.constexpr, KIND: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Mass of `entries` (keys or pages) from row t of kv head `head` (b * Hk + h), summed over its G query heads.

    KIND 0: `mass` is normalised already, [., T, width]; 1: page log-masses [., width, T*G]; 2: token scores
    [., T*G, width] relative to tile_max. t and entries broadcast; zero where t < 0, past the width, and for entries
    that begin past the row's last key, length + t.
    """
    M = T * G
    some = (entries < width) & (tl.zeros_like(entries) + t >= 0)
    inside = some & (entries * UNIT <= length + t)
    row = tl.maximum(t, 0)
    if KIND == 0:
        place = mass + (head * T + row) * width + entries
        result = tl.load(place, mask=some, other=0.0).to(tl.float32)
    else:
        result = tl.where(inside, 0.0, 0.0)
        for g in tl.static_range(G):
            m = row * G + g
            if KIND == 1:
                raw = tl.load(mass + (head * width + entries) * M + m, mask=inside, other=float("-inf"))
            else:
                tiles = (width + TILE - 1) // TILE
                raw = tl.load(mass + (head * M + m) * width + entries, mask=inside, other=float("-inf"))
                top = tl.load(tile_max + (head * tiles + entries // TILE) * M + m, mask=inside, other=0.0)
                raw = raw.to(tl.float32) + top
            result += tl.exp2(raw - tl.load(lse + head * M + m))
    return result


@triton.jit
def normalise_kernel(
    out, log_mass, tile_max, lse, lengths, Hk, T, width,
    G: tl.constexpr, KIND: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Normalised mass of one row and one block of entries."""
    if PDL:
        await_previous()
    entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    t = tl.program_id(1)
    head = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + head // Hk).to(tl.int32)
    mass = row_mass(log_mass, tile_max, lse, length, head, t, entries, T, width, G, KIND, UNIT, TILE)
    tl.store(out + (head * T + t) * width + entries, mass, mask=entries < width)
