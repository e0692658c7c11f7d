"""Selection in plain torch: the specification of `select`."""

import torch


def select_reference(
    scores: torch.Tensor, lengths: torch.Tensor, *, budget: int, sink: int, recent: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `select`. Protected keys rank as +inf, keys past the length as -inf.

    Taken are all keys above the width-th largest value and, of those equal to it, the lowest indices.
    """
    S = scores.shape[-1]
    position = torch.arange(S, device=scores.device)
    length = lengths[:, None, None].to(torch.int64)  # [B, 1, 1]
    protected = (position < sink) | (position >= length - recent)
    ranked = scores.masked_fill(protected, float("inf")).masked_fill(position >= length, float("-inf"))
    width = min(budget, S)
    threshold = torch.topk(ranked, width, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)
    above, equal = ranked > threshold, ranked == threshold
    wanted = width - above.sum(dim=-1, keepdim=True)
    taken = above | (equal & (equal.cumsum(dim=-1) <= wanted))  # [..., S], exactly `width` per row
    chosen = taken.nonzero()[:, -1].view(*taken.shape[:-1], width)  # ascending
    counts = torch.clamp(lengths, max=budget).to(torch.int32)  # [B]
    slot = torch.arange(width, device=scores.device)
    count = counts[:, None, None].to(torch.int64)
    last = torch.gather(chosen, -1, (count - 1).clamp(min=0).expand(*chosen.shape[:-1], 1)).clamp(max=S - 1)
    chosen = torch.where(slot < count, chosen, torch.where(count > 0, last, torch.zeros_like(last)))
    if width < budget:
        chosen = torch.cat([chosen, chosen[..., -1:].expand(*chosen.shape[:-1], budget - width)], dim=-1)
    return chosen.to(torch.int32), counts
