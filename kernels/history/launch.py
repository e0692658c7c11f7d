"""Host side of the history kernels: which rows they read (normalised or raw), block sizes, launches."""

import torch
import triton

from specdial.kernels.full_attention.launch import launch_options
from specdial.kernels.full_attention.statistics import TILE_TOKENS, Statistics
from specdial.kernels.history.triton import decay_rows_kernel, push_rows_kernel


def push_rows_triton(
    ring: torch.Tensor,
    mass: torch.Tensor | Statistics,
    lengths: torch.Tensor,
    committed: torch.Tensor,
    *,
    score: torch.Tensor | None,
) -> None:
    """See `push_rows`; arguments are validated by the caller."""
    B, Hk, W, S = ring.shape
    sources, rows, width, kind = _sources(mass)
    block_w = triton.next_power_of_2(W)
    block = max(16, min(2048 // block_w, 32 if S * B * Hk <= 1 << 16 else 128))  # small, to spread short rings
    push_rows_kernel[(triton.cdiv(S, block), B * Hk)](
        ring, *sources, lengths, committed, ring if score is None else score, lengths.shape[0], Hk, rows, W, S, width,
        **kind, TILE=TILE_TOKENS, BLOCK_W=block_w, BLOCK=block, SCORE=score is not None,
        **launch_options(ring.device),
    )  # fmt: skip


def decay_rows_triton(
    score: torch.Tensor,
    mass: torch.Tensor | Statistics,
    lengths: torch.Tensor,
    committed: torch.Tensor,
    *,
    decay: float,
) -> None:
    """See `decay_rows`; arguments are validated by the caller."""
    B, Hk, S = score.shape
    sources, rows, width, kind = _sources(mass)
    block = 512 if S >= 4096 else 64
    decay_rows_kernel[(triton.cdiv(S, block), B * Hk)](
        score, *sources, lengths, committed, float(decay), lengths.shape[0], Hk, rows, S, width,
        **kind, TILE=TILE_TOKENS, BLOCK=block, **launch_options(score.device),
    )  # fmt: skip


def _sources(mass: torch.Tensor | Statistics) -> tuple[tuple[torch.Tensor, ...], int, int, dict[str, int]]:
    """(mass, tile_max, lse) as the kernels read them, rows T, width, and the compile-time kind of row."""
    if isinstance(mass, torch.Tensor):
        mass = mass.contiguous()
        return (mass, mass, mass), mass.shape[2], mass.shape[3], {"G": 1, "KIND": 0, "UNIT": 1}
    tile_max = mass.lse if mass.tile_max is None else mass.tile_max
    kind = {"G": mass.group, "KIND": 1 if mass.granularity == "page" else 2, "UNIT": mass.unit_tokens}
    return (mass.log_mass, tile_max, mass.lse), mass.rows, mass.width, kind
