"""Full attention in plain torch: the specification of `full_attention`."""

import torch


def full_attention_reference(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, lengths: torch.Tensor, *, mass: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `full_attention`. Rows are packed [T*G] per kv head, so that K and V are read once per group."""
    B, T, H, D = q.shape
    Hk, S = k_cache.shape[1], k_cache.shape[2]
    G = H // Hk
    packed = q.view(B, T, Hk, G, D).permute(0, 2, 1, 3, 4).reshape(B, Hk, T * G, D)
    scores = torch.matmul(packed, k_cache.transpose(-1, -2)).float() * D**-0.5  # [B, Hk, T*G, S]
    last_visible = lengths[:, None] + torch.arange(T, device=q.device)  # [B, T]
    hidden = torch.arange(S, device=q.device) > last_visible[..., None]  # [B, T, S]
    scores = scores.view(B, Hk, T, G, S).masked_fill_(hidden[:, None, :, None, :], float("-inf"))
    weights = torch.softmax(scores, dim=-1)  # [B, Hk, T, G, S]
    out = torch.matmul(weights.view(B, Hk, T * G, S).to(v_cache.dtype), v_cache)  # [B, Hk, T*G, D]
    out = out.view(B, Hk, T, G, D).permute(0, 2, 1, 3, 4).reshape(B, T, H, D)
    return out, weights.sum(dim=3) if mass else None
