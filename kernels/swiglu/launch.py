"""Host side of `swiglu`: block size and launch. It follows from shapes, so a graph can hold it."""

import torch
import triton

from specdial.kernels.full_attention.launch import launch_options
from specdial.kernels.swiglu.triton import swiglu_kernel

BLOCK = 1024  # columns of a program: one 16-byte load a thread and operand at four warps
WARPS = 4


def swiglu_triton(gate_up: torch.Tensor) -> torch.Tensor:
    """See `swiglu`; the argument is validated by the caller."""
    width = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype, device=gate_up.device)
    swiglu_kernel[(out.numel() // width, triton.cdiv(width, BLOCK))](
        gate_up, out, width, BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False, **launch_options(gate_up.device)
    )
    return out
