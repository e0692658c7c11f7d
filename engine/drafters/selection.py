"""The cached keys that sparse drafts read: chosen by score, or taken as they stand."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdial.engine.history import History
from specdial.kernels.selection import select
from specdial.policies.schema import DraftKV


@dataclass(frozen=True, slots=True)
class Selection:
    """Chosen keys, apart from the tail that is always visible: every key since the choice, and drafted ones.

    indices: [L, N, Hk, C] int32, keys (page 1) or page numbers, ascending, of which counts [N] are used.
    tail_start: [N], first key of the tail, past every selected one.
    """

    indices: Tensor
    counts: Tensor
    tail_start: Tensor
    page: int

    def as_tokens(self, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Keys one by one, the tail up to lengths [N] included: indices [L, N, Hk, C * page + tail] and counts [N]."""
        L, N, Hk, C = self.indices.shape
        page, device = self.page, self.indices.device
        longest = int((lengths - self.tail_start).max())
        if page == 1 and longest == 0:
            return self.indices, self.counts.to(torch.int64)
        chosen = (self.indices[..., None].long() * page + torch.arange(page, device=device)).flatten(-2)
        selected = self.counts.to(torch.int64) * page  # [N]
        slot = torch.arange(C * page + longest, device=device)
        tail = self.tail_start[:, None] + slot - selected[:, None]  # [N, C * page + longest]
        tail = tail.clamp(min=0).minimum((lengths - 1).clamp(min=0)[:, None])
        padded = torch.cat([chosen, chosen[..., -1:].expand(L, N, Hk, longest)], dim=-1)
        indices = torch.where((slot < selected[:, None])[None, :, None], padded, tail[None, :, None])
        return indices, selected + lengths - self.tail_start


def choose_keys(history: History, lengths: Tensor, draft_kv: DraftKV) -> Selection:
    """Selection of every layer for sequences with `lengths` [B] cached keys."""
    page = draft_kv.page
    whole = lengths // page  # only whole pages are chosen; the rest of the last one is tail
    scores = history.scores()  # [L, B, Hk, S / page]
    protected = draft_kv.sink_pages + draft_kv.recent_pages
    indices, counts = select(
        scores,
        whole,
        budget=max(min(draft_kv.budget // page, scores.shape[-1]), protected),  # no more than there can be
        sink=draft_kv.sink_pages,
        recent=draft_kv.recent_pages,
        backend=history.backend,
        scope=draft_kv.scope,
    )
    return Selection(indices, counts, whole * page, page)


def joined(selections: list[Selection]) -> Selection:
    """Selections of single lanes side by side."""
    return Selection(
        indices=torch.cat([c.indices for c in selections], dim=1),
        counts=torch.cat([c.counts for c in selections]),
        tail_start=torch.cat([c.tail_start for c in selections]),
        page=selections[0].page,
    )
