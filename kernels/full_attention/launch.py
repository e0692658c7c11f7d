"""Host side of the full-attention kernels: tile sizes, number of splits, buffers, launches.

Everything here follows from shapes and the device, never from lengths, so a call can be captured in a CUDA graph.
"""

import functools
import math
from dataclasses import dataclass, replace

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from specdial.kernels.full_attention.mass import normalise_kernel
from specdial.kernels.full_attention.statistics import TILE_TOKENS, Granularity, Statistics
from specdial.kernels.full_attention.triton import merge_kernel, split_kernel

INTERPRETER_PROCESSORS = 4  # where there are none to fill


@dataclass(frozen=True, slots=True)
class Tiling:
    """Row tile, warps, pipeline stages, and how many programs to give a multiprocessor.

    per_sm: programs of one full wave, when the masked ends are few beside it; crowded_per_sm: when they are many, so
    that no multiprocessor starts late with a long chunk. tma: load through the copy engine where strides allow it.
    """

    block_m: int
    warps: int
    stages: int
    per_sm: int
    crowded_per_sm: int
    precision: str = "ieee"
    tma: bool = True


# Measured on an H200 with head dim 128: rows up to the key. 64 and 128 rows run on warpgroup instructions, one deep
# pipeline per multiprocessor; 16 and 32 rows on warp instructions, two or three shallower ones.
TILINGS = {
    16: Tiling(block_m=16, warps=4, stages=3, per_sm=2, crowded_per_sm=6),
    32: Tiling(block_m=32, warps=4, stages=3, per_sm=2, crowded_per_sm=4),
    64: Tiling(block_m=64, warps=4, stages=4, per_sm=1, crowded_per_sm=1),
    128: Tiling(block_m=128, warps=8, stages=4, per_sm=1, crowded_per_sm=1),
}
FLOAT32 = Tiling(block_m=16, warps=8, stages=1, per_sm=1, crowded_per_sm=1, tma=False)  # full precision, for tests


def choose_tiling(rows: int, head_dim: int, dtype: torch.dtype) -> Tiling:
    """The tiling for M = T*G packed rows."""
    if dtype == torch.float32:
        return FLOAT32
    tiling = TILINGS[next((size for size in TILINGS if rows <= size), 64)]  # more rows than 128 come in tiles of 64
    if head_dim > 128:
        return replace(TILINGS[16], stages=2)  # more rows would spill
    if head_dim <= 64:  # half the shared memory
        return replace(tiling, per_sm=2 * tiling.per_sm, crowded_per_sm=2 * tiling.crowded_per_sm)
    return tiling


def choose_slots(batch: int, programs_per_slot: int, processors: int, tiling: Tiling) -> int:
    """Programs per kv head and row tile that share the full tiles: one full wave if it fills well, else several."""
    ends = batch * programs_per_slot
    wave = tiling.per_sm * processors
    per_slot = (wave if 4 * ends <= wave else tiling.crowded_per_sm * processors) // programs_per_slot
    used = per_slot // batch * batch  # equal lengths cut every sequence into the same number of chunks
    if used and used >= 0.8 * per_slot:
        return per_slot
    return max(2 * batch, 4 * wave // programs_per_slot)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device."""
    if device.type != "cuda":
        return INTERPRETER_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


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
    into: Statistics | None = None,
    ancestors: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Statistics | None]:
    """See `full_attention`; arguments are validated by the caller."""
    B, T, H, D = q.shape
    Hk, S = k_cache.shape[1], k_cache.shape[2]
    G = H // Hk
    M = T * G
    tiling = tiling or choose_tiling(M, D, q.dtype)
    m_tiles = triton.cdiv(M, tiling.block_m)
    slots = choose_slots(B, Hk * m_tiles, multiprocessors(q.device), tiling) if splits is None else max(splits, B)
    slots = min(slots, B * triton.cdiv(S, TILE_TOKENS) + B)
    block_b = triton.next_power_of_2(B)
    out = torch.empty(B, T, H, D, dtype=q.dtype, device=q.device)
    part_out = torch.empty(Hk, B + slots, M, D, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(Hk, B + slots, M, dtype=torch.float32, device=q.device)
    raw = into
    if granularity is not None and raw is None:
        raw = Statistics.empty(
            granularity, batch=B, kv_heads=Hk, keys=S, rows=T, group=G, page_tokens=page_tokens,
            exact=q.dtype == torch.float32, device=q.device,
        )  # fmt: skip
    k_rows, v_rows = (row_descriptor(k_cache), row_descriptor(v_cache)) if tiling.tma else (None, None)
    tma = k_rows is not None and v_rows is not None
    early = launch_options(q.device)
    mass_code = {None: 0, "page": 1, "token": 2}[granularity]
    split_kernel[(Hk * m_tiles, B + slots)](
        q, k_cache, v_cache, k_rows if tma else k_cache, v_rows if tma else v_cache, lengths, part_out, part_lse,
        part_lse if raw is None else raw.log_mass,
        part_lse if raw is None or raw.tile_max is None else raw.tile_max,
        lengths if ancestors is None else ancestors.view(torch.uint8),
        *q.stride()[:3], *k_cache.stride()[:3], *v_cache.stride()[:3],
        B, S, T, M, T if ancestors is None else ancestors.shape[2], slots, m_tiles, D**-0.5 / math.log(2.0),
        G=G, D=D, BLOCK_M=tiling.block_m, BLOCK_N=TILE_TOKENS, BLOCK_B=block_b,
        MASS=mass_code, PAGE=page_tokens, PRECISION=tiling.precision, TMA=tma,
        TREE=ancestors is not None,
        num_warps=tiling.warps, num_stages=tiling.stages, **early,
    )  # fmt: skip
    parts = min(64, triton.next_power_of_2(triton.cdiv(slots, B) + 1))
    block_rows = 4 if parts <= 4 else 1  # rows per program: many short merges, or few long ones
    merge_kernel[(triton.cdiv(M, block_rows), B * Hk)](
        part_out, part_lse, lengths, out, part_lse if raw is None else raw.lse, *out.stride()[:3],
        B, S, M, slots,
        G=G, D=D, BLOCK_N=TILE_TOKENS, BLOCK_B=block_b, BLOCK_PARTS=parts, BLOCK_ROWS=block_rows,
        WITH_LSE=raw is not None, num_warps=4 if parts > 8 else 1, **early,
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
