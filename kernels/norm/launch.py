"""Host side of the norm kernel: block size, warps, launch. Everything follows from shapes, so a graph can hold it."""

import torch
import triton

from specdial.kernels.full_attention.launch import launch_options
from specdial.kernels.norm.triton import add_rms_norm_kernel


def add_rms_norm_triton(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `add_rms_norm`; arguments are validated by the caller."""
    hidden = x.shape[-1]
    h = x if residual is None else residual
    normed = torch.empty_like(x)
    block, warps = row_block(hidden)
    add_rms_norm_kernel[(x.numel() // hidden,)](
        x, h, weight, normed, hidden, float(eps), BLOCK=block, ADD=residual is not None, num_warps=warps,
        enable_fp_fusion=False, **launch_options(x.device),
    )  # fmt: skip
    return normed, h


def row_block(hidden: int) -> tuple[int, int]:
    """(elements of a row's block, warps): eight elements a thread and operand, one 16-byte load, while warps last."""
    block = max(256, triton.next_power_of_2(hidden))
    return block, min(32, block // 256)
