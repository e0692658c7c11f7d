"""Settling a round in plain torch: the specification of `settle`."""

import torch


def settle_reference(
    drafts: torch.Tensor,
    choices: torch.Tensor,
    k: torch.Tensor,
    room: torch.Tensor,
    *,
    stop_ids: torch.Tensor,
    emitted: torch.Tensor,
    accepted: torch.Tensor,
    counts: torch.Tensor,
    pending: torch.Tensor,
    before: torch.Tensor,
    judged: bool,
) -> None:
    """See `settle`."""
    K = drafts.shape[1]
    place = torch.arange(K + 1, device=drafts.device)  # [K+1]
    k.copy_(torch.minimum(k, (room - 1).clamp(min=0)))
    if judged:
        accepted.copy_(torch.minimum(accepted, k))
    else:
        match = (drafts == choices[:, :K]) & (place[:K] < k[:, None])  # [B, K]
        accepted.copy_(match.to(torch.int64).cumprod(dim=1).sum(dim=1))
    following = choices.gather(1, accepted[:, None])  # [B, 1]
    tokens = torch.where(place < accepted[:, None], torch.nn.functional.pad(drafts, (0, 1)), following)  # [B, K+1]
    stops = torch.isin(tokens, stop_ids) & (place <= accepted[:, None])
    stop_at = torch.where(stops, place, K + 1).amin(dim=1)  # [B]
    counts.copy_(torch.minimum(torch.minimum(accepted + 1, stop_at + 1), room))
    accepted.copy_(torch.minimum(accepted, counts))
    emitted.copy_(torch.where(place < counts[:, None], tokens, -1))
    ahead = torch.cat([pending[:, None], emitted], dim=1).gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0]
    before.copy_(torch.where(counts > 0, ahead, before))
    last = emitted.gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0]
    pending.copy_(torch.where(counts > 0, last, pending))
    room.copy_(torch.where(stop_at < counts, 0, room - counts))
