"""Scoring heads in plain torch: the specification of `head_scores`."""

import torch


def head_scores_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    lengths: torch.Tensor,
    heads: tuple[int, ...],
    *,
    row_weights: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """See `head_scores`. One head after another, rows in order."""
    B, R, H, D = q.shape
    Hk, S = k_cache.shape[1], k_cache.shape[2]
    scores = torch.zeros(B, S, dtype=torch.float32, device=q.device) if out is None else out
    last_visible = lengths[:, None] + torch.arange(R, device=q.device)  # [B, R]
    hidden = torch.arange(S, device=q.device) > last_visible[..., None]  # [B, R, S]
    for head in heads:
        keys = k_cache[:, head // (H // Hk)]  # [B, S, D]
        logits = torch.matmul(q[:, :, head], keys.transpose(-1, -2)).float() * D**-0.5  # [B, R, S]
        weights = torch.softmax(logits.masked_fill(hidden, float("-inf")), dim=-1)
        if row_weights is not None:
            weights = torch.where(row_weights[..., None] != 0, weights * row_weights[..., None], 0.0)
        scores += weights.sum(dim=1)
    return scores
