"""Page summaries of the committed keys of a batch: what Quest's bound is computed from, kept up to date round by round.

Leaves out scores and selections (quest, verification).
"""

import torch

from specdial.engine.sequences import Sequences
from specdial.kernels.page_summary import HEAD_DIMS, update_pages
from specdial.policies.errors import UserError

MOST_COMMITTED = 65  # tokens of one round: 64 drafts, which no controller exceeds, and one more


class Summaries:
    """The smallest and largest keys of every page of the committed keys, [L, B, Hk, S / page, D] each."""

    @classmethod
    def of(cls, sequences: Sequences, page: int) -> "Summaries":
        """Those that the sequences keep, made once. Raises UserError on a head dimension that cannot be summarised."""
        head_dim = sequences.decoder.config.head_dim
        if head_dim not in HEAD_DIMS:
            raise UserError(
                f"choosing pages by their keys takes head dimensions {list(HEAD_DIMS)}, this model has {head_dim}",
                "use another source of scores",
            )
        kept: Summaries = sequences.lasting(("summaries", page), lambda: cls(sequences, page))
        return kept

    def __init__(self, sequences: Sequences, page: int) -> None:
        cache = sequences.cache
        self.s, self.page = sequences, page
        L, B, Hk, S, D = cache.k.shape
        self.low = torch.zeros(L, B, Hk, S // page, D, device=cache.k.device, dtype=cache.k.dtype)
        self.high = torch.zeros_like(self.low)
        self.covered = torch.zeros(B, dtype=torch.int64, device=cache.k.device)  # [B] keys they were made from
        self._turn = -1  # the last round they took part in
        self._again = 0  # keys to take in again, the last ones

    def follow(self) -> None:
        """Before a round: make up for whatever happened since the last one."""
        if self._turn == self.s.turn:  # someone else has asked
            return
        if self._turn < self.s.started:  # keys may have been replaced
            self.covered.zero_()
        if self._again:
            self.covered.sub_(self._again).clamp_(min=0)
        if self._again or self._turn != self.s.turn - 1:
            self.update(self.s.cache.capacity_tokens)
        self._turn, self._again = self.s.turn, 0

    def update(self, most_tokens: int) -> None:
        """Take in what was committed since the last update, at most so many tokens of a sequence: a pass."""
        cache = self.s.cache
        L = cache.k.shape[0]
        update_pages(
            cache.k.flatten(0, 1),
            self.low.flatten(0, 1),
            self.high.flatten(0, 1),
            self.covered.repeat(L),
            (cache.lengths - self.covered).repeat(L),
            page=self.page,
            max_tokens=most_tokens,
            backend=self.s.backend,
        )
        self.covered.copy_(cache.lengths)

    def again(self, rows: int) -> None:
        """Before a round that writes the last `rows` committed keys anew: the next one takes them in again."""
        self._again += rows
