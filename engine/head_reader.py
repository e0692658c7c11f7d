"""An EAGLE head beside a batch of sequences: its keys for everything committed, and the rows it has yet to read.

Row i of the head needs the target's hidden states of token i and the token after it, so a sequence of n committed
tokens has rows 0 .. n-2. A prompt's rows are read chunk by chunk while the target prefills. A verification leaves the
hidden states of what it committed in `waiting` buffers; the next round's first draft reads them, all rows at once, and
its output at the last row gives the first draft. Rounds that do not draft read them too, so that nothing piles up.

Everything after prefill is a pass over device buffers that stay where they are. Where no token is committed, as while
passes are practised, the buffers keep what they hold. Leaves out who asks when (loop, probing, drafters/eagle).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdial.engine.cache import KVCache
from specdial.engine.models.decoder import Decoder, Taps
from specdial.engine.models.eagle import EagleHead
from specdial.engine.states import Tapper
from specdial.kernels.full_attention import full_attention

if TYPE_CHECKING:
    from specdial.engine.sequences import Block, Sequences


@dataclass(frozen=True, slots=True)
class Waiting:
    """Rows to be read, up to W of each sequence, and the outputs of a round's steps. Of one number of drafts K.

    taps: [len(taps), B, W, target_hidden]; tokens: [B, W], each row's next token; counts, start: [B], rows that count
    and the position of the first; outputs: [K, B, hidden].
    """

    taps: Tensor
    tokens: Tensor
    counts: Tensor
    start: Tensor
    outputs: Tensor


class HeadReader:
    """One head reading along with one batch."""

    def __init__(self, sequences: Sequences, head: EagleHead) -> None:
        self.s, self.head = sequences, head
        cache, device = sequences.cache, sequences.decoder.device
        self.cache = KVCache(
            head.config.layer, cache.batch, cache.capacity_tokens, device=device, dtype=sequences.decoder.dtype
        )
        self._made: dict[int, Waiting] = {}
        self._waiting: Waiting | None = None
        self._seen: Tensor | None = None  # taps of the pass just made, [len(taps), B, T, target_hidden]

    @property
    def layers(self) -> tuple[int, ...]:
        """See Tapper."""
        return self.head.config.taps

    @property
    def waiting(self) -> Waiting:
        """The buffers in use. Raises ValueError before `start`."""
        if self._waiting is None:
            raise ValueError("the head has not been started")
        return self._waiting

    def see(self, taps: Tensor) -> None:
        """The target's hidden states [len(taps), B, T, target_hidden] of a pass, for `take`."""
        self._seen = taps

    def prefill(self, b: int, start: int, taps: Tensor) -> None:
        """Read rows of sequence b's prompt from `start` on; taps [len(taps), 1, T, target_hidden] of its chunk.

        Rows past the last token but one are padding.
        """
        rows = min(taps.shape[2], len(self.s.tokens[b]) - 1 - start)
        if rows <= 0:
            return
        device = taps.device
        tokens = torch.tensor([self.s.tokens[b][start + 1 : start + 1 + rows]], device=device)  # [1, rows]
        positions = torch.arange(start, start + rows, device=device)[None]  # [1, rows]
        _, k, v = self.head.qkv(tokens, self.head.project(taps[:, :, :rows]), positions)
        self.cache.write_one(0, b, start, k, v)

    @torch.inference_mode()
    def start(self, most_drafts: int) -> None:
        """Begin a decoding with rounds of up to so many drafts: the last row of every sequence waits to be read.

        Its hidden states are made anew from the target's cached keys, of which none change.
        """
        s, head = self.s, self.head
        if most_drafts not in self._made:
            device, B, W = s.decoder.device, s.batch, most_drafts + 1
            shape = (len(head.config.taps), B, W, head.config.target_hidden)
            self._made[most_drafts] = Waiting(
                taps=torch.zeros(shape, device=device, dtype=s.decoder.dtype),
                tokens=torch.zeros(B, W, dtype=torch.int64, device=device),
                counts=torch.zeros(B, dtype=torch.int64, device=device),
                start=torch.zeros(B, dtype=torch.int64, device=device),
                outputs=torch.zeros(most_drafts, B, head.config.layer.hidden, device=device, dtype=s.decoder.dtype),
            )
        w = self._waiting = self._made[most_drafts]
        last = (s.cache.lengths - 1).clamp(min=0)  # [B]
        width = s.cache.width(0)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return full_attention(q, *s.cache.view(layer, width), last, backend=s.backend)[0]

        _, taps = s.decoder.forward_with_taps(s.before[:, None], last[:, None], attend, head.config.taps)
        w.taps[:, :, :1] = taps
        w.tokens[:, 0] = s.pending
        w.start.copy_(last)
        w.counts.fill_(1)

    def take(self, block: Block, emitted: Tensor, counts: Tensor) -> None:
        """Let the rows wait that a verified block commits: a pass, before the cache's lengths move on.

        emitted: [B, K+1] tokens, of which counts [B] are committed.
        """
        w, seen, lengths = self.waiting, self._seen, self.s.cache.lengths
        if seen is None:
            raise ValueError("this verification left no hidden states")
        B, W = w.tokens.shape
        first = torch.zeros_like(counts) if block.first_row is None else block.first_row  # [B]
        rows = (first[:, None] + torch.arange(W, device=counts.device)).clamp(max=seen.shape[2] - 1)  # [B, W]
        new = seen[:, torch.arange(B, device=counts.device)[:, None], rows]  # [len(taps), B, W, target_hidden]
        some = counts > 0
        w.taps.copy_(torch.where(some[:, None, None], new, w.taps))
        w.tokens[:, : emitted.shape[1]] = torch.where(some[:, None], emitted, w.tokens[:, : emitted.shape[1]])
        w.start.copy_(torch.where(some, lengths, w.start))
        w.counts.copy_(torch.where(some, counts, w.counts))
        self._seen = None

    @torch.inference_mode()
    def read(self) -> None:
        """Read the waiting rows, and leave the last one's output for step 0: a pass; again changes nothing."""
        w, head = self.waiting, self.head
        B, W = w.tokens.shape
        positions = w.start[:, None] + torch.arange(W, device=w.start.device)  # [B, W]
        hidden = head.project(w.taps)  # [B, W, hidden]
        q, k, v = head.qkv(w.tokens, hidden, positions)
        self.cache.write_at(0, k, v, positions)
        last = (w.counts - 1).clamp(min=0)  # [B]
        ahead = w.start + last  # [B]
        lanes = torch.arange(B, device=last.device)
        # Gathered after the keys are written: attention may look at older keys before the kernel ahead of it ends.
        q, hidden = q[lanes, last][:, None], hidden[lanes, last][:, None]  # [B, 1, H, D], [B, 1, hidden]
        if len(w.outputs):
            w.outputs[0] = head.output(hidden, self._attend(q, ahead, W))[:, 0]

    @torch.inference_mode()
    def go_on(self, depth: int, tokens: Tensor) -> None:
        """Step `depth` > 0 of a draft, after its last token [B]: a pass."""
        w, head = self.waiting, self.head
        ahead = self.s.cache.lengths + (depth - 1)  # [B]
        hidden = w.outputs[depth - 1][:, None]  # [B, 1, hidden]
        q, k, v = head.qkv(tokens[:, None], hidden, ahead[:, None])
        self.cache.write_at(0, k, v, ahead[:, None])
        w.outputs[depth] = head.output(hidden, self._attend(q, ahead, len(w.outputs)))[:, 0]

    @torch.inference_mode()
    def go_wide(self, depth: int, tokens: Tensor, hidden: Tensor, above: Tensor) -> Tensor:
        """Step `depth` > 0 of a tree of drafts, after its W tokens [B, W] of that depth: a pass.

        hidden: [B, W, hidden], the outputs that proposed them. above: [B, W, depth * W] bool, the tokens of the steps
        so far that each descends from, itself included. Returns the outputs, [B, W, hidden].
        """
        lengths, W = self.s.cache.lengths[:, None], tokens.shape[1]
        q, k, v = self.head.qkv(tokens, hidden, (lengths + (depth - 1)).expand_as(tokens))
        places = lengths + (depth - 1) * W + torch.arange(W, device=tokens.device)  # [B, W]
        self.cache.write_at(0, k, v, places)
        keys = self.cache.view(0, self.s.cache.width(depth * W))
        mixed, _ = full_attention(q, *keys, lengths[:, 0], backend=self.s.backend, ancestors=above)
        return self.head.output(hidden, mixed)

    def follow(self, rows: Tensor) -> None:
        """Of the pass just made take these rows [B, R], one after the other, instead of all."""
        if self._seen is None:
            raise ValueError("this verification left no hidden states")
        lanes = torch.arange(rows.shape[0], device=rows.device)[:, None]  # [B, 1]
        self._seen = self._seen[:, lanes, rows]  # [len(taps), B, R, target_hidden]

    def _attend(self, q: Tensor, lengths: Tensor, block_tokens: int) -> Tensor:
        """[B, 1, H, D] of q over the head's keys 0 .. lengths[b]."""
        keys = self.cache.view(0, self.s.cache.width(block_tokens))
        return full_attention(q, *keys, lengths, backend=self.s.backend)[0]

    def copy_from(self, one: HeadReader) -> None:
        """Take over the keys of a batch of one, a copy for each of our sequences."""
        self.cache.copy_from(one.cache)


def tap_buffers(decoder: Decoder, rows: torch.Size, readers: Collection[Tapper]) -> Taps:
    """Room for what these readers want of a pass over tokens of shape `rows`, [B, T], layer by layer.

    Made by the pass that fills it, so that a captured one finds it where it was.
    """
    return decoder.tap_buffers(rows, {layer for reader in readers for layer in reader.layers})


def taps_of(reader: Tapper, taps: Taps) -> Tensor:
    """A reader's taps, [len(layers), B, T, target_hidden], of those that a pass left."""
    return torch.stack([taps[layer] for layer in reader.layers])
