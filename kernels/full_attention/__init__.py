"""Attention of T new query positions per sequence over the whole cache, for decode (T = 1) and verification (T = k+1)."""

import torch

from specdial.kernels import Backend
from specdial.kernels.full_attention.reference import full_attention_reference


def full_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    *,
    backend: Backend,
    mass: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Softmax attention over cached keys and the new block itself, causal inside the block.

    q: [B, T, H, D]; k_cache, v_cache: [B, Hk, S, D], the block's own keys already written at lengths[b] .. lengths[b]+T-1;
    lengths: [B] integer, keys cached before the block. Row t of sequence b sees keys 0 .. lengths[b]+t.
    Returns out [B, T, H, D] and, with `mass`, the softmax weight every key received from each row, summed over the
    query heads of its kv head: [B, Hk, T, S] float32 (each row sums to G), else None.
    """
    return full_attention_reference(q, k_cache, v_cache, lengths, mass=mass)
