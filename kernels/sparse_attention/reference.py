"""Sparse attention in plain torch: the specification of `sparse_attention`."""

import torch


def sparse_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    indices: torch.Tensor,
    counts: torch.Tensor,
    *,
    tail_start: torch.Tensor,
    lengths: torch.Tensor,
    page: int = 1,
    ancestors: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `sparse_attention`. Gathers the chosen rows and the tail for one masked softmax; the host reads the sizes."""
    B, T, H, D = q.shape
    Hk, C = indices.shape[1], indices.shape[2]
    G = H // Hk
    start = tail_start.to(torch.int64).view(B, 1, 1)
    last_visible = lengths.to(torch.int64)[:, None] + torch.arange(T, device=q.device)  # [B, T]

    slot_used = torch.arange(C, device=q.device) < counts.view(B, -1, 1)  # [B, 1 | Hk, C]
    inside = torch.arange(page, device=q.device)
    chosen = (indices.to(torch.int64)[..., None] * page + inside).flatten(2)  # [B, Hk, C*P]
    chosen_seen = slot_used.expand(B, Hk, C).repeat_interleave(page, dim=-1)  # [B, Hk, C*P]

    tail_width = int((lengths - tail_start).max()) + T
    tail = start + torch.arange(tail_width, device=q.device)  # [B, 1, W]
    tail_seen = tail <= last_visible[..., None]  # [B, T, W]
    if ancestors is not None:
        own = (tail - lengths.to(torch.int64).view(B, 1, 1)).expand(B, T, tail_width)  # place in the block
        seen = ancestors.gather(2, own.clamp(0, T - 1))  # [B, T, W]
        tail_seen = torch.where(own < 0, True, seen & (own < T))

    seen = torch.cat(
        [chosen_seen[:, :, None].expand(B, Hk, T, C * page), tail_seen[:, None].expand(B, Hk, T, tail_width)], dim=-1
    )  # [B, Hk, T, C*P+W]
    positions = torch.cat([chosen, tail.expand(B, Hk, tail_width)], dim=-1)  # [B, Hk, C*P+W]
    own = lengths.to(torch.int64).view(B, 1, 1)
    positions = torch.where(seen.any(dim=2), positions, own)  # unseen slots read a written key: 0 * NaN is NaN
    rows = positions[..., None].expand(*positions.shape, D)
    k, v = k_cache.gather(2, rows), v_cache.gather(2, rows)  # [B, Hk, C*P+W, D]

    packed = q.view(B, T, Hk, G, D).permute(0, 2, 1, 3, 4).reshape(B, Hk, T * G, D)
    scores = torch.matmul(packed, k.transpose(-1, -2)).float() * D**-0.5  # [B, Hk, T*G, C*P+W]
    scores = scores.view(B, Hk, T, G, -1).masked_fill(~seen[:, :, :, None], float("-inf"))
    weights = torch.softmax(scores, dim=-1).view(B, Hk, T * G, -1)
    out = torch.matmul(weights.to(v.dtype), v)  # [B, Hk, T*G, D]
    return out.view(B, Hk, T, G, D).permute(0, 2, 1, 3, 4).reshape(B, T, H, D)
