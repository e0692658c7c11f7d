"""Host side of the scoring heads: heads grouped by kv head, number of splits, buffers, launches."""

import functools
import math

import torch
import triton

from specdial.kernels.full_attention.launch import Tiling, choose_slots, launch_options, multiprocessors
from specdial.kernels.full_attention.statistics import TILE_TOKENS
from specdial.kernels.head_scores.triton import live_rows_kernel, scores_kernel, sum_kernel

SUM_BLOCK = 1024  # keys per program of the sum


@functools.lru_cache(maxsize=256)
def head_table(heads: tuple[int, ...], group: int, device: torch.device) -> torch.Tensor:
    """Query heads by kv head, [groups, width] int32, padded with -1. Copied to the device once and kept."""
    by_kv: dict[int, list[int]] = {}
    for head in sorted(heads):
        by_kv.setdefault(head // group, []).append(head)
    width = max(map(len, by_kv.values()))
    table = [row + [-1] * (width - len(row)) for row in by_kv.values()]
    return torch.tensor(table, dtype=torch.int32, device=device)


@functools.lru_cache(maxsize=256)
def _ones(batch: int, rows: int, device: torch.device) -> torch.Tensor:
    return torch.ones(batch, rows, dtype=torch.float32, device=device)


def head_scores_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    lengths: torch.Tensor,
    heads: tuple[int, ...],
    *,
    row_weights: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """See `head_scores`; arguments are validated by the caller."""
    B, R, H, D = q.shape
    Hk, S = k_cache.shape[1], k_cache.shape[2]
    table = head_table(tuple(heads), H // Hk, q.device)
    weights = _ones(B, R, q.device) if row_weights is None else row_weights
    groups, width = table.shape
    M = R * width
    exact = q.dtype == torch.float32
    block_m = 16 if M <= 16 or exact else 32 if M <= 32 else 64
    tiling = Tiling(block_m=block_m, warps=4, stages=1 if exact else 4, per_sm=4, crowded_per_sm=8)
    m_tiles = triton.cdiv(M, block_m)
    slots = choose_slots(B, groups * m_tiles, multiprocessors(q.device), tiling)
    block_b = triton.next_power_of_2(B)
    scores = torch.empty(B, groups, M, S, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(groups, slots, M, dtype=torch.float32, device=q.device)
    result = torch.empty(B, S, dtype=torch.float32, device=q.device) if out is None else out
    early = launch_options(q.device)
    scores_kernel[(groups * m_tiles, slots)](
        q, k_cache, lengths, table, weights, scores, part_lse,
        *q.stride()[:3], *k_cache.stride()[:3],
        B, S, R, M, slots, m_tiles, D**-0.5 / math.log(2.0),
        G=H // Hk, D=D, WIDTH=width, BLOCK_M=block_m, BLOCK_N=TILE_TOKENS, BLOCK_B=block_b,
        PRECISION=tiling.precision, num_warps=tiling.warps, num_stages=tiling.stages, **early,
    )  # fmt: skip
    rows = groups * M
    live, live_count = (torch.empty(n, dtype=torch.int32, device=q.device) for n in (B * rows, B))
    live_norm, live_weight = (torch.empty(B * rows, dtype=torch.float32, device=q.device) for _ in range(2))
    live_rows_kernel[(B,)](
        part_lse, lengths, table, weights, live, live_norm, live_weight, live_count, B, S, R, M, slots, groups,
        WIDTH=width, BLOCK_N=TILE_TOKENS, BLOCK_B=block_b,
        BLOCK_PARTS=min(32, triton.next_power_of_2(triton.cdiv(slots, B))), BLOCK_ROWS=triton.next_power_of_2(rows),
        **early,
    )  # fmt: skip
    sum_kernel[(triton.cdiv(S, SUM_BLOCK), B)](
        scores, lengths, live, live_norm, live_weight, live_count, result, S, M, rows,
        WIDTH=width, BLOCK=SUM_BLOCK, ADD=out is not None, **early,
    )  # fmt: skip
    return result
