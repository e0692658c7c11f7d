"""Per-head norm, rotation and cache write in plain torch: the specification of `rope_and_cache`."""

import torch

from specdial.kernels.norm.reference import rms_norm_reference


def rope_and_cache_reference(
    qkv: torch.Tensor,
    lengths: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cos: torch.Tensor,
    sin: torch.Tensor,
    ahead: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    depths: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `rope_and_cache`. Which rows are written depends on values, so this one waits for the device."""
    T = qkv.shape[1]
    Hk, S, D = k_cache.shape[1:]
    q, k, v = qkv.unflatten(-1, (-1, D)).tensor_split((-2 * Hk, -Hk), dim=2)  # [B, T, H | Hk | Hk, D]
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm_reference(q, q_norm, eps), rms_norm_reference(k, k_norm, eps)
    positions = lengths[:, None].long() + ahead + torch.arange(T, device=qkv.device)  # [B, T]
    turned = positions if depths is None else lengths[:, None].long() + ahead + depths  # [B, T]
    rows = turned.clamp(0, cos.shape[0] - 1)
    turn = cos[rows][:, :, None].repeat(1, 1, 1, 2), sin[rows][:, :, None].repeat(1, 1, 1, 2)  # [B, T, 1, D] each
    q, k = _rotate(q, *turn), _rotate(k, *turn)
    b, t = ((positions >= 0) & (positions < S)).nonzero(as_tuple=True)
    slots = positions[b, t]
    k_cache[b, :, slots] = k[b, t]
    v_cache[b, :, slots] = v[b, t]
    return q.contiguous()


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Channel i turns with i + D/2, in float32, back in x's dtype: [B, T, heads, D]."""
    half = x.shape[-1] // 2
    swapped = torch.cat((-x[..., half:], x[..., :half]), dim=-1)  # [B, T, heads, D]
    return (x * cos + swapped * sin).to(x.dtype)
