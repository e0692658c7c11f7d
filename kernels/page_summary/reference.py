"""Page summaries in plain torch: the specification of `update_pages` and `score_pages`."""

import torch


def update_pages_reference(
    k_cache: torch.Tensor,
    page_min: torch.Tensor,
    page_max: torch.Tensor,
    lengths: torch.Tensor,
    committed: torch.Tensor,
    *,
    page: int,
) -> None:
    """See `update_pages`. One page at a time; the host reads the lengths."""
    for b, (length, added) in enumerate(zip(lengths.tolist(), committed.tolist())):
        end = length + added
        for number in range(length // page, -(-end // page) if added > 0 else 0):
            keys = k_cache[b, :, number * page : min(end, (number + 1) * page)]  # [Hk, <= page, D]
            page_min[b, :, number] = keys.amin(dim=1)
            page_max[b, :, number] = keys.amax(dim=1)


def score_pages_reference(
    q: torch.Tensor,
    page_min: torch.Tensor,
    page_max: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor,
    *,
    page: int,
    rule: str,
    pool: str,
) -> torch.Tensor:
    """See `score_pages`. Products and sums in float32."""
    B, T, H, D = q.shape
    Hk, pages = page_min.shape[1], page_min.shape[2]
    G = H // Hk
    beyond = torch.arange(pages, device=q.device) * page >= lengths[:, None]  # [B, pages]
    low = page_min.float().masked_fill(beyond[:, None, :, None], 0.0)  # unwritten pages may hold anything
    high = page_max.float().masked_fill(beyond[:, None, :, None], 0.0)
    packed = q.float().view(B, T, Hk, G, D).permute(0, 2, 1, 3, 4).reshape(B, Hk, T * G, D)
    if rule == "specpv":
        score = torch.maximum(packed @ high.transpose(-1, -2), packed @ low.transpose(-1, -2))
    else:
        score = packed.clamp(min=0) @ high.transpose(-1, -2) + packed.clamp(max=0) @ low.transpose(-1, -2)
    score = score.view(B, Hk, T, G, pages).mean(dim=3)  # [B, Hk, T, pages]
    position = torch.arange(T, device=q.device)
    counted = (position < rows[:, None])[:, None, :, None]  # [B, 1, T, 1]
    if pool == "mean":
        pooled = score.masked_fill(~counted, 0.0).sum(dim=2) / rows[:, None, None]
    elif pool == "max":
        pooled = score.masked_fill(~counted, float("-inf")).amax(dim=2)
    else:
        last = (rows.to(torch.int64) - 1).view(B, 1, 1, 1).expand(B, Hk, 1, pages)
        pooled = score.gather(2, last).squeeze(2)
    return pooled.masked_fill(beyond[:, None], float("-inf"))  # [B, Hk, pages]
