"""Selection in plain torch: the specification of `select`."""

import torch


def select_reference(
    scores: torch.Tensor, lengths: torch.Tensor, *, budget: int, sink: int, recent: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `select`. A stable descending sort gives exact ties; protected keys get +inf, keys past the length -inf."""
    S = scores.shape[-1]
    position = torch.arange(S, device=scores.device)
    length = lengths[:, None, None].to(torch.int64)  # [B, 1, 1]
    protected = (position < sink) | (position >= length - recent)
    ranked = scores.masked_fill(protected, float("inf")).masked_fill(position >= length, float("-inf"))
    width = min(budget, S)
    chosen = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[..., :width]
    counts = torch.clamp(lengths, max=budget).to(torch.int32)  # [B]
    slot = torch.arange(width, device=scores.device)
    count = counts[:, None, None].to(torch.int64)
    chosen = chosen.masked_fill(slot >= count, S).sort(dim=-1).values
    last = torch.gather(chosen, -1, (count - 1).clamp(min=0).expand(*chosen.shape[:-1], 1)).clamp(max=S - 1)
    chosen = torch.where(slot < count, chosen, torch.where(count > 0, last, torch.zeros_like(last)))
    if width < budget:
        chosen = torch.cat([chosen, chosen[..., -1:].expand(*chosen.shape[:-1], budget - width)], dim=-1)
    return chosen.to(torch.int32), counts
