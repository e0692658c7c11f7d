"""Attention of unrolled drafts: each row over the keys of every row up to it, and over a few keys of its own.

The first part is the library's causal flash attention, the second a handful of products a row; both share a softmax.
No matrix of rows by keys exists, forward or backward. Backward gives the library's kernel the outputs and the log-sums
of the whole softmax, with which its gradients are the whole's (as in ring attention, Liu et al. 2023). On a CPU the
library has the same kernel; keys before the first row then take an explicit mask. Leaves out float32 on a GPU, for
which the library has no flash attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def unrolled_attention(q: Tensor, keys: Tensor, values: Tensor, own: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention [B, R, H, D] of q [B, R, H, D], which are the last R of S positions; can be differentiated.

    keys, values: [B, S, Hk, D], of which row r sees the first S - R + r + 1. own: further keys and values
    [B, R, Hk, D], of which each row sees its own. Raises RuntimeError where the library has no flash attention for the
    dtype.
    """
    group = q.shape[2] // keys.shape[2]
    q, keys, values = (x.transpose(1, 2) for x in (q, _repeated(keys, group), _repeated(values, group)))
    more = [_repeated(x, group).transpose(1, 2) for pair in own for x in pair]  # k, v, k, v, ... [B, H, R, D] each
    mixed: Tensor = _Unrolled.apply(q, keys, values, *more)
    return mixed.transpose(1, 2)


def _repeated(x: Tensor, group: int) -> Tensor:
    return x if group == 1 else x.repeat_interleave(group, 2)


class _Unrolled(torch.autograd.Function):
    """`unrolled_attention` of as many key heads as query heads, heads first."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, keys: Tensor, values: Tensor, *own: Tensor) -> Tensor:
        scale = q.shape[-1] ** -0.5
        mask = None if q.is_cuda else _mask(q.shape[2], keys.shape[2], q.dtype)
        if q.is_cuda:
            out, lse, *ctx.more = aten._scaled_dot_product_flash_attention(q, keys, values, 0.0, True, scale=scale)
        else:
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
                q, keys, values, 0.0, mask is None, attn_mask=mask, scale=scale
            )
        scores = [_dot(q, k) * scale for k in own[::2]]  # [B, H, R] float32 each
        if own:
            whole = torch.logsumexp(torch.stack([lse, *scores]), 0)  # [B, H, R]
            mixed = out * (lse - whole).exp()[..., None]  # [B, H, R, D] float32
            for score, v in zip(scores, own[1::2]):
                mixed += (score - whole).exp()[..., None] * v
            out, lse = mixed.to(q.dtype), whole
        ctx.save_for_backward(q, keys, values, out, lse, *scores, *own)
        ctx.scale, ctx.mask = scale, mask
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        q, keys, values, out, lse, *rest = ctx.saved_tensors
        count = len(rest) // 3
        scores, own = rest[:count], rest[count:]
        if q.is_cuda:
            cum_q, cum_k, max_q, max_k, seed, offset = ctx.more[:6]
            d_q, d_keys, d_values = aten._scaled_dot_product_flash_attention_backward(
                grad, q, keys, values, out, lse, cum_q, cum_k, max_q, max_k, 0.0, True, seed, offset, scale=ctx.scale
            )
        else:
            d_q, d_keys, d_values = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, q, keys, values, out, lse, 0.0, ctx.mask is None, attn_mask=ctx.mask, scale=ctx.scale
            )
        d_q, found = d_q.float(), []
        delta = _dot(grad, out)  # [B, H, R]
        for score, k, v in zip(scores, own[::2], own[1::2]):
            weight = (score - lse).exp()  # [B, H, R]
            d_score = (weight * (_dot(grad, v) - delta) * ctx.scale)[..., None]  # [B, H, R, 1]
            d_q += d_score * k
            found += [(d_score * q).to(q.dtype), (weight[..., None] * grad).to(q.dtype)]
        return d_q.to(q.dtype), d_keys, d_values, *found


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Products over the last dim, in float32."""
    return (a.float() * b.float()).sum(-1)


def _mask(rows: int, keys: int, dtype: torch.dtype) -> Tensor | None:
    """What the CPU's kernel adds to scores [R, S] where rows do not start at key 0: it aligns causal rows otherwise."""
    if rows == keys:
        return None
    unseen = torch.ones(rows, keys, dtype=torch.bool).triu(keys - rows + 1)  # [R, S]
    return torch.zeros(rows, keys, dtype=dtype).masked_fill(unseen, -torch.inf)
