"""Who else sees a pass's hidden states, and one who keeps those of a round's rows: how far partial rounds drift.

The states kept are those that enter the target's last layer: fused passes norm the ones behind it as they read them.
Leaves out heads (head_reader), and what states are compared with (fidelity).
"""

from typing import Protocol

import torch
from torch import Tensor

from specdial.engine.models.decoder import Decoder


class Tapper(Protocol):
    """Someone whom passes over rows leave hidden states."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers whose inputs it wants."""
        ...

    def see(self, taps: Tensor) -> None:
        """Take those of the pass just made, [len(layers), B, T, hidden]."""
        ...

    def follow(self, rows: Tensor) -> None:
        """Of the pass just made take these rows [B, R], one after the other, instead of all."""
        ...


class LastStates:
    """The states that entered the last layer at the first K+1 new rows of every sequence: `kept`, [B, K+1, hidden]."""

    def __init__(self, decoder: Decoder, batch: int, most_drafts: int) -> None:
        self.layers = (decoder.config.layers - 1,)
        shape = batch, most_drafts + 1, decoder.config.hidden
        self.kept = torch.zeros(shape, device=decoder.device, dtype=decoder.dtype)
        self._seen = self.kept  # [B, T, hidden]

    def see(self, taps: Tensor) -> None:
        """See Tapper."""
        self._seen = taps[0]

    def follow(self, rows: Tensor) -> None:
        """See Tapper."""
        self._seen = self._seen.gather(1, rows[..., None].expand(-1, -1, self._seen.shape[2]))

    def keep(self, first_row: Tensor | None, count: int) -> None:
        """Keep `count` rows of each sequence from row first_row [B] of the pass on: of row 0 if there is none."""
        rows = torch.arange(count, device=self.kept.device).expand(len(self.kept), -1)  # [B, count]
        self.follow(rows if first_row is None else rows + first_row[:, None])
        self.kept[:, :count] = self._seen
