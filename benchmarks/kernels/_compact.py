"""The rejected alternative to a gather, kept to be measured: copy the selected rows of K and V into a compact cache."""

import torch
import triton
import triton.language as tl


@triton.jit
def _copy_rows(
    k, v, indices, to_k, to_v, stride_kb, stride_kh, stride_tb, stride_th, Hk, C,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    b = (pair // Hk).to(tl.int64)
    h = (pair % Hk).to(tl.int64)
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    used = (slot < C)[:, None]
    row = tl.load(indices + pair.to(tl.int64) * C + slot, mask=slot < C, other=0)
    d = tl.arange(0, D)
    source = b * stride_kb + h * stride_kh + (row * D)[:, None] + d[None, :]
    target = b * stride_tb + h * stride_th + (slot * D)[:, None] + d[None, :]
    keys = tl.load(k + source, mask=used)
    values = tl.load(v + source, mask=used)
    tl.store(to_k + target, keys, mask=used)
    tl.store(to_v + target, values, mask=used)


def copy_rows(k: torch.Tensor, v: torch.Tensor, indices: torch.Tensor, to_k: torch.Tensor, to_v: torch.Tensor) -> None:
    """k, v [B, Hk, S, D] rows at indices [B, Hk, C] -> to_k, to_v [B, Hk, >= C, D], contiguous all of them."""
    B, Hk, C = indices.shape
    _copy_rows[(triton.cdiv(C, 64), B * Hk)](
        k, v, indices, to_k, to_v, *k.stride()[:2], *to_k.stride()[:2], Hk, C, D=k.shape[3], BLOCK=64, num_warps=8
    )
