"""Host side of the full-attention kernels: tile sizes, number of splits, buffers, launches.

Everything here follows from shapes and the device, never from lengths, so a call can be captured in a CUDA graph.
"""

import functools
import math
from dataclasses import dataclass

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from specdial.kernels.full_attention.mass import normalise_kernel
from specdial.kernels.full_attention.statistics import TILE_TOKENS, Granularity, Statistics
from specdial.kernels.full_attention.triton import merge_kernel, split_kernel

INTERPRETER_SLOTS = 6  # programs per kv head where there are no multiprocessors to fill


@dataclass(frozen=True, slots=True)
class Tiling:
    """Row tile, warps and pipeline stages for one shape; `per_sm` programs of it fit a multiprocessor of an H200."""

    block_m: int
    warps: int
    stages: int
    per_sm: int
    precision: str
    tma: bool = False


def choose_tiling(rows: int, head_dim: int, dtype: torch.dtype) -> Tiling:
    """Tile sizes measured on an H200. float32 keeps full precision, at a speed that only tests need."""
    if dtype == torch.float32:
        return Tiling(block_m=16, warps=8, stages=1, per_sm=1, precision="ieee")
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    if head_dim > 128:
        return Tiling(block_m=min(block_m, 32), warps=4, stages=2, per_sm=1, precision="ieee")
    return Tiling(block_m=block_m, warps=4, stages=3, per_sm=2, precision="ieee")


def choose_slots(batch: int, programs_per_slot: int, resident: int) -> int:
    """Programs per kv head that share the full tiles: one full wave if it fills well, else about four waves."""
    one_wave = resident // programs_per_slot
    used = one_wave // batch * batch  # equal lengths cut every sequence into the same number of chunks
    if used and used >= 0.8 * one_wave:
        return one_wave
    return max(2 * batch, 4 * resident // programs_per_slot)


@functools.cache
def multiprocessors(device_index: int) -> int:
    """Multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def launch_options(device: torch.device) -> dict[str, bool]:
    """Programmatic dependent launch where the device has it (sm_90): launch option and compile-time flag."""
    early = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if early else {"PDL": False}


def row_descriptor(cache: torch.Tensor) -> TensorDescriptor | None:
    """[B, Hk, S, D] as rows [., D] for the copy engine, or None where the strides do not allow it."""
    sb, sh, ss, _ = cache.stride()
    size = cache.element_size()
    if ss == 0 or sb % ss or sh % ss or ss * size % 16 or cache.data_ptr() % 16:
        return None
    B, Hk, S, D = cache.shape
    rows = ((B - 1) * sb + (Hk - 1) * sh) // ss + S
    return TensorDescriptor(cache, [rows, D], [ss, 1], [TILE_TOKENS, D])


def full_attention_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    *,
    granularity: Granularity | None,
    page_tokens: int,
    splits: int | None,
    tiling: Tiling | None = None,
) -> tuple[torch.Tensor, Statistics | None]:
    """See `full_attention`; arguments are validated by the caller."""
    B, T, H, D = q.shape
    Hk, S = k_cache.shape[1], k_cache.shape[2]
    G = H // Hk
    M = T * G
    tiling = tiling or choose_tiling(M, D, q.dtype)
    m_tiles = triton.cdiv(M, tiling.block_m)
    slots = choose_slots(B, Hk * m_tiles, resident(q.device, tiling)) if splits is None else max(splits, B)
    slots = min(slots, B * triton.cdiv(S, TILE_TOKENS) + B)
    block_b = triton.next_power_of_2(B)
    out = torch.empty(B, T, H, D, dtype=q.dtype, device=q.device)
    part_out = torch.empty(Hk, B + slots, M, D, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(Hk, B + slots, M, dtype=torch.float32, device=q.device)
    raw = None
    if granularity is not None:
        raw = _empty_statistics(q, B, Hk, S, M, G, granularity=granularity, page_tokens=page_tokens)
    k_rows, v_rows = (row_descriptor(k_cache), row_descriptor(v_cache)) if tiling.tma else (None, None)
    tma = k_rows is not None and v_rows is not None
    early = launch_options(q.device)
    mass_code = {None: 0, "page": 1, "token": 2}[granularity]
    split_kernel[(Hk * m_tiles, B + slots)](
        q, k_cache, v_cache, k_rows if tma else k_cache, v_rows if tma else v_cache, lengths, part_out, part_lse,
        part_lse if raw is None else raw.log_mass,
        part_lse if raw is None or raw.tile_max is None else raw.tile_max,
        *q.stride()[:3], *k_cache.stride()[:3], *v_cache.stride()[:3],
        B, S, T, M, slots, m_tiles, D**-0.5 / math.log(2.0),
        G=G, D=D, BLOCK_M=tiling.block_m, BLOCK_N=TILE_TOKENS, BLOCK_B=block_b,
        MASS=mass_code, PAGE=page_tokens, PRECISION=tiling.precision, TMA=tma,
        num_warps=tiling.warps, num_stages=tiling.stages, **early,
    )  # fmt: skip
    parts = min(64, triton.next_power_of_2(triton.cdiv(slots, B) + 1))
    merge_kernel[(M, B * Hk)](
        part_out, part_lse, lengths, out, part_lse if raw is None else raw.lse, *out.stride()[:3],
        B, S, M, slots,
        G=G, D=D, BLOCK_N=TILE_TOKENS, BLOCK_B=block_b, BLOCK_PARTS=parts, WITH_LSE=raw is not None,
        num_warps=4 if parts > 8 else 1, **early,
    )  # fmt: skip
    return out, raw


def normalise_triton(raw: Statistics, lengths: torch.Tensor) -> torch.Tensor:
    """Mass of every row, pooled over the group, zero past a row's last key: [B, Hk, T, width] float32."""
    B, Hk, _ = raw.lse.shape
    T, width = raw.rows, raw.width
    mass = torch.empty(B, Hk, T, width, dtype=torch.float32, device=raw.lse.device)
    block = 64 if raw.granularity == "page" else 512
    normalise_kernel[(triton.cdiv(width, block), T, B * Hk)](
        mass, raw.log_mass, raw.lse if raw.tile_max is None else raw.tile_max, raw.lse, lengths, Hk, T, width,
        G=raw.group, KIND=1 if raw.granularity == "page" else 2, UNIT=raw.unit_tokens, TILE=TILE_TOKENS, BLOCK=block,
        **launch_options(raw.lse.device),
    )  # fmt: skip
    return mass


def resident(device: torch.device, tiling: Tiling) -> int:
    """Programs of this tiling that run at once."""
    if device.type != "cuda":
        return INTERPRETER_SLOTS
    index = device.index if device.index is not None else torch.cuda.current_device()
    return tiling.per_sm * multiprocessors(index)


def _empty_statistics(
    q: torch.Tensor, B: int, Hk: int, S: int, M: int, G: int, *, granularity: Granularity, page_tokens: int
) -> Statistics:
    lse = torch.empty(B, Hk, M, dtype=torch.float32, device=q.device)
    if granularity == "page":
        log_mass = torch.empty(B, Hk, triton.cdiv(S, page_tokens), M, dtype=torch.float32, device=q.device)
        return Statistics("page", page_tokens, G, log_mass, None, lse)
    exact = torch.float32 if q.dtype == torch.float32 else torch.float16
    log_mass = torch.empty(B, Hk, M, S, dtype=exact, device=q.device)
    tile_max = torch.empty(B, Hk, triton.cdiv(S, TILE_TOKENS), M, dtype=torch.float32, device=q.device)
    return Statistics("token", page_tokens, G, log_mass, tile_max, lse)
