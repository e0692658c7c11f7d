"""Host side of `rope_and_cache`: heads per program and the launch. It follows from shapes, so a graph can hold it."""

import torch
import triton

from specdial.kernels.full_attention.launch import launch_options
from specdial.kernels.rope_cache.triton import rope_and_cache_kernel

HEADS = 8  # per program: at head dim 128 and two warps, a 16-byte load for each half of a thread's heads
WARPS = 2


def rope_and_cache_triton(
    qkv: torch.Tensor,
    lengths: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cos: torch.Tensor,
    sin: torch.Tensor,
    ahead: int,
    depths: torch.Tensor | None,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """See `rope_and_cache`; arguments are validated by the caller."""
    B, T, width = qkv.shape
    Hk, S, D = k_cache.shape[1:]
    H = width // D - 2 * Hk
    q = torch.empty(B, T, H, D, dtype=qkv.dtype, device=qkv.device)
    blocks = triton.cdiv(H, HEADS) + 2 * triton.cdiv(Hk, HEADS)
    rope_and_cache_kernel[(B * T, blocks)](
        qkv, lengths, lengths if depths is None else depths, k_cache, v_cache, cos, sin,
        qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm,
        q, *qkv.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3], cos.stride(0), sin.stride(0),
        T, H, Hk, S, cos.shape[0], ahead, float(eps),
        D=D, BLOCK_D=triton.next_power_of_2(D // 2), HEADS=HEADS, NORM=q_norm is not None,
        TREE=depths is not None, num_warps=WARPS,
        enable_fp_fusion=False, **launch_options(qkv.device),
    )  # fmt: skip
    return q
