"""The sequences being decoded together: their tokens, their cache, the target's recent attention rows, who is done.

Invariant between rounds: a sequence of n committed tokens has keys 0..n-2 cached; its last token is pending and enters
with the next forward pass. The ring of attention rows is a function of the committed tokens alone: it holds the rows
at positions n-1-W .. n-2.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specdial.engine.cache import KVCache, round_up
from specdial.engine.graphs import Graphs
from specdial.engine.history import History, HistorySpec, Rows
from specdial.engine.models.decoder import AttendCached, Decoder
from specdial.engine.prefill import ROW_MULTIPLE, prefill_one
from specdial.kernels import Backend
from specdial.kernels.full_attention import full_attention
from specdial.policies.errors import UserError


@dataclass(frozen=True, slots=True)
class Block:
    """Result of one pass over new tokens. logits: [B, T, V]; rows: its attention rows, or None."""

    logits: Tensor
    rows: Rows | None


class Sequences:
    """B sequences of one model. Build it, then `prefill`, then let the loop decode."""

    def __init__(
        self, decoder: Decoder, capacity_tokens: int, batch: int, *, history: HistorySpec | None, backend: Backend
    ) -> None:
        """capacity_tokens: the longest sequence, drafts included. history: what to keep of attention rows."""
        self.decoder = decoder
        self.backend: Backend = backend
        self.cache = KVCache(
            decoder.config, batch, capacity_tokens + ROW_MULTIPLE, device=decoder.device, dtype=decoder.dtype
        )
        self.history: History | None = None
        if history is not None:
            keys = self.cache.capacity_tokens
            self.history = History(decoder.config, batch, keys, history, device=decoder.device, backend=backend)
        self.graphs = Graphs(decoder.device)
        self.tokens: list[list[int]] = [[] for _ in range(batch)]
        self.prompt_tokens = np.zeros(batch, dtype=np.int64)
        self.limits = np.zeros(batch, dtype=np.int64)  # new tokens allowed
        self.done = np.ones(batch, dtype=np.bool_)
        self.stop_ids: frozenset[int] = frozenset()

    @property
    def batch(self) -> int:
        return len(self.tokens)

    @property
    def committed(self) -> np.ndarray:
        """Committed length of each sequence, [B]."""
        return np.array([len(t) for t in self.tokens], dtype=np.int64)

    @property
    def remaining(self) -> np.ndarray:
        """New tokens each sequence may still emit; 0 when it is done. [B]"""
        left = self.limits - (self.committed - self.prompt_tokens)
        return np.where(self.done, 0, left)

    def pending(self) -> Tensor:
        """The last committed token of each sequence, [B] on the device."""
        return torch.tensor([t[-1] for t in self.tokens], device=self.decoder.device)

    def prefill(self, prompts: list[list[int]], limits: list[int], stop_ids: frozenset[int] = frozenset()) -> None:
        """Read the prompts (all but each last token, which stays pending). Raises UserError on an empty prompt."""
        if any(not prompt for prompt in prompts):
            raise UserError("the prompt is empty", "give at least one token of text")
        self.tokens = [list(prompt) for prompt in prompts]
        self.prompt_tokens = self.committed
        self.limits = np.array(limits, dtype=np.int64)
        self.stop_ids = stop_ids
        self.done = self.limits <= 0
        if self.history is not None:
            self.history.clear()
        for b, prompt in enumerate(prompts):
            prefill_one(self, b, prompt[:-1])
        self.cache.set_lengths(self.prompt_tokens - 1)
        if self.history is not None:
            self.history.save()

    def rewind(self) -> None:
        """Back to the state right after `prefill`, so that another policy decodes the same prompts."""
        self.tokens = [t[:p] for t, p in zip(self.tokens, self.prompt_tokens)]
        self.done = self.limits <= 0
        self.cache.set_lengths(self.prompt_tokens - 1)
        if self.history is not None:
            self.history.restore()

    def repeated(self, batch: int) -> "Sequences":
        """`batch` copies of a batch of one, each with keys of its own in memory: for measuring cost."""
        copy = Sequences(
            self.decoder,
            self.cache.capacity_tokens - ROW_MULTIPLE,
            batch,
            history=None if self.history is None else self.history.spec,
            backend=self.backend,
        )
        copy.tokens = [list(self.tokens[0]) for _ in range(batch)]
        copy.prompt_tokens = np.repeat(self.prompt_tokens, batch)
        copy.cache.copy_from(self.cache)
        if self.history is not None and copy.history is not None:
            copy.history.copy_from(self.history)
        return copy

    def hold(self, tokens: list[int], *, limit: int) -> None:
        """Put every sequence at these tokens, a beginning of what is cached, with `limit` new tokens allowed."""
        self.tokens = [list(tokens) for _ in range(self.batch)]
        self.prompt_tokens = self.committed
        self.limits = np.full(self.batch, limit, dtype=np.int64)
        self.done = np.zeros(self.batch, dtype=np.bool_)
        self.cache.set_lengths(self.prompt_tokens - 1)

    def forward_block(self, tokens: Tensor, *, padded: bool, rows: bool) -> Block:
        """Full attention over everything cached for a block of tokens [B, T], written behind the committed keys.

        padded: on a CPU, round T up to ROW_MULTIPLE inside. rows: also collect the attention rows. Commits nothing.
        On a GPU the result lives in a graph's buffers, until the next block of this length.
        """
        T = tokens.shape[1]
        if padded and not self.cache.on_gpu:
            tokens = F.pad(tokens, (0, round_up(T, ROW_MULTIPLE) - T))
        width = self.cache.width(tokens.shape[1])
        block: Block = self.graphs.run(
            ("block", tokens.shape[1], rows), lambda static: self._block(static, width, rows), tokens
        )
        return Block(block.logits[:, :T], block.rows)

    def _block(self, tokens: Tensor, width: int, rows: bool) -> Block:
        lengths = self.cache.lengths
        collected = self.history.rows(tokens.shape[1], self.batch) if rows and self.history is not None else None

        def attend(layer: int, q: Tensor) -> Tensor:
            kv = self.cache.view(layer, width)
            if collected is not None and self.history is not None:
                return self.history.attend(collected, layer, q, kv, lengths)
            return full_attention(q, *kv, lengths, backend=self.backend)[0]

        return Block(self.decoder.logits(self.forward_rows(tokens, lengths, attend)), collected)

    def forward_rows(self, tokens: Tensor, lengths: Tensor, attend: AttendCached) -> Tensor:
        """Hidden states [B, T, hidden] of tokens [B, T] at positions lengths[b] + t, their keys written to the cache.

        On a GPU through the fused kernels, on a CPU through the plain ones.
        """
        if self.cache.on_gpu:
            return self.decoder.forward_cached(tokens, lengths, self.cache.layer, attend, backend=self.backend)
        positions = lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)  # [B, T]

        def keep(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if lengths is self.cache.lengths:
                self.cache.write(layer, k, v)
            else:
                self.cache.write_at(layer, k, v, positions)
            return attend(layer, q)

        return self.decoder.forward(tokens, positions, keep)

    def push_history(self, block: Block, committed: np.ndarray) -> None:
        """Take the first committed[b] attention rows of the block behind the present lengths into history."""
        if self.history is None or block.rows is None:
            return
        history, rows = self.history, block.rows
        counts = torch.from_numpy(committed).to(self.cache.lengths.device)
        self.graphs.run(
            ("push", block.logits.shape[1]), lambda static: history.push(rows, self.cache.lengths, static), counts
        )

    def commit(self, emitted: list[list[int]]) -> None:
        """Append emitted tokens to each sequence and count the keys that belong to them. Sets `done`."""
        rows = np.array([len(e) for e in emitted], dtype=np.int64)
        for b, new in enumerate(emitted):
            self.tokens[b].extend(new)
            if new and (new[-1] in self.stop_ids or self.remaining[b] <= 0):
                self.done[b] = True
        self.cache.commit(rows)
