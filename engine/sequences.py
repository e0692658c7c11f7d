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
from specdial.engine.models.decoder import Attend, Decoder
from specdial.kernels import Backend
from specdial.kernels.full_attention import full_attention
from specdial.kernels.history import push_rows
from specdial.policies.errors import UserError

PREFILL_TOKENS = 512
# Rows of a verified block are padded to this multiple. Measured: CPU matrix products then give each row the same bits
# whatever the block's length, so scores, and the drafts that follow from them, do not depend on how rounds fell.
ROW_MULTIPLE = 4


@dataclass(frozen=True, slots=True)
class Block:
    """Result of one pass over new tokens. logits: [B, T, V]; masses: per layer [B, Hk, T, S] or None."""

    logits: Tensor
    masses: list[Tensor] | None


class Sequences:
    """B sequences of one model. Build it, then `prefill`, then let the loop decode."""

    def __init__(self, decoder: Decoder, capacity_tokens: int, batch: int, *, window: int, backend: Backend) -> None:
        """capacity_tokens: the longest sequence, drafts included. window: attention rows to keep, 0 for none."""
        self.decoder = decoder
        self.backend: Backend = backend
        self.window = window
        self.cache = KVCache(
            decoder.config, batch, capacity_tokens + ROW_MULTIPLE, device=decoder.device, dtype=decoder.dtype
        )
        c = decoder.config
        self.ring: Tensor | None = None
        if window:
            shape = (c.layers, batch, c.kv_heads, window, self.cache.capacity_tokens)
            self.ring = torch.zeros(shape, device=decoder.device)  # [L, B, Hk, W, S]
        self.graphs = Graphs(decoder.device)
        self.tokens: list[list[int]] = [[] for _ in range(batch)]
        self.prompt_tokens = np.zeros(batch, dtype=np.int64)
        self.limits = np.zeros(batch, dtype=np.int64)  # new tokens allowed
        self.done = np.ones(batch, dtype=np.bool_)
        self.stop_ids: frozenset[int] = frozenset()
        self._prompt_ring: Tensor | None = None

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
        if self.ring is not None:
            self.ring.zero_()
        for b, prompt in enumerate(prompts):
            self._prefill_one(b, prompt[:-1])
        self.cache.set_lengths(self.prompt_tokens - 1)
        self._prompt_ring = None if self.ring is None else self.ring.clone()

    def rewind(self, limits: list[int] | None = None) -> None:
        """Back to the state right after `prefill`, so that another policy decodes the same prompts."""
        self.tokens = [t[:p] for t, p in zip(self.tokens, self.prompt_tokens)]
        if limits is not None:
            self.limits = np.array(limits, dtype=np.int64)
        self.done = self.limits <= 0
        self.cache.set_lengths(self.prompt_tokens - 1)
        if self.ring is not None and self._prompt_ring is not None:
            self.ring.copy_(self._prompt_ring)

    def repeated(self, batch: int) -> "Sequences":
        """`batch` copies of a batch of one, each with keys of its own in memory: for measuring cost."""
        copy = Sequences(
            self.decoder,
            self.cache.capacity_tokens - ROW_MULTIPLE,
            batch,
            window=self.window,
            backend=self.backend,
        )
        copy.tokens = [list(self.tokens[0]) for _ in range(batch)]
        copy.prompt_tokens = np.repeat(self.prompt_tokens, batch)
        copy.cache.copy_from(self.cache)
        if self.ring is not None and copy.ring is not None:
            copy.ring.copy_(self.ring)
        return copy

    def hold(self, tokens: list[int], *, limit: int) -> None:
        """Put every sequence at these tokens, a beginning of what is cached, with `limit` new tokens allowed."""
        self.tokens = [list(tokens) for _ in range(self.batch)]
        self.prompt_tokens = self.committed
        self.limits = np.full(self.batch, limit, dtype=np.int64)
        self.done = np.zeros(self.batch, dtype=np.bool_)
        self.cache.set_lengths(self.prompt_tokens - 1)

    def forward_block(self, tokens: Tensor, *, padded: bool, mass: bool) -> Block:
        """Full attention over everything cached for a block of tokens [B, T], written behind the committed keys.

        padded: on a CPU, round T up to ROW_MULTIPLE inside. mass: also return the attention rows. Commits nothing.
        On a GPU the result lives in a graph's buffers, until the next block of this length.
        """
        T = tokens.shape[1]
        if padded and not self.cache.on_gpu:
            tokens = F.pad(tokens, (0, round_up(T, ROW_MULTIPLE) - T))
        width = self.cache.width(tokens.shape[1])
        block: Block = self.graphs.run(
            ("block", tokens.shape[1], mass), lambda static: self._block(static, width, mass), tokens
        )
        return Block(block.logits[:, :T], block.masses)

    def _block(self, tokens: Tensor, width: int, mass: bool) -> Block:
        lengths = self.cache.lengths
        positions = lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)  # [B, T]
        masses: list[Tensor] | None = [] if mass else None

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.cache.write(layer, k, v)
            keys, values = self.cache.view(layer, width)
            out, rows = full_attention(q, keys, values, lengths, backend=self.backend, mass=mass)
            if masses is not None and rows is not None:
                masses.append(rows)
            return out

        hidden = self.decoder.forward(tokens, positions, attend)
        return Block(self.decoder.logits(hidden), masses)

    def push_history(self, masses: list[Tensor], rows: np.ndarray) -> None:
        """Add the first rows[b] attention rows of a block, written at the cache's present lengths, to the ring."""
        if self.ring is None:
            return
        counts = torch.from_numpy(rows).to(self.cache.lengths.device)
        for layer, mass in enumerate(masses):
            push_rows(self.ring[layer], mass, self.cache.lengths, counts, backend=self.backend)

    def commit(self, emitted: list[list[int]]) -> None:
        """Append emitted tokens to each sequence and count the keys that belong to them. Sets `done`."""
        rows = np.array([len(e) for e in emitted], dtype=np.int64)
        for b, new in enumerate(emitted):
            self.tokens[b].extend(new)
            if new and (new[-1] in self.stop_ids or self.remaining[b] <= 0):
                self.done[b] = True
        self.cache.commit(rows)

    def _prefill_one(self, b: int, tokens: list[int]) -> None:
        """Chunked prefill of one sequence; its last `window` rows go through the verification path for their rows."""
        tail = min(self.window, len(tokens))
        for start in range(0, len(tokens) - tail, PREFILL_TOKENS):
            self._prefill_chunk(b, tokens[start : min(start + PREFILL_TOKENS, len(tokens) - tail)], start)
        if tail:
            self._prefill_tail(b, tokens[-tail:], len(tokens) - tail)

    def _prefill_chunk(self, b: int, tokens: list[int], start: int) -> None:
        width = start + len(tokens)
        causal = torch.ones(len(tokens), width, dtype=torch.bool, device=self.decoder.device).tril(start)  # [T, S]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.cache.write_one(layer, b, start, k, v)
            keys, values = self.cache.view_one(layer, b, width)
            mixed = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=causal, enable_gqa=True)
            return mixed.transpose(1, 2)

        self._forward_one(tokens, start, attend)

    def _prefill_tail(self, b: int, tokens: list[int], start: int) -> None:
        padded = tokens + [0] * (round_up(len(tokens), ROW_MULTIPLE) - len(tokens))
        width = self.cache.rounded(start + len(padded))
        lengths = torch.tensor([start], device=self.decoder.device)
        rows = torch.tensor([len(tokens)], device=self.decoder.device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.cache.write_one(layer, b, start, k, v)
            keys, values = self.cache.view_one(layer, b, width)
            out, mass = full_attention(q, keys, values, lengths, backend=self.backend, mass=True)
            if self.ring is not None and mass is not None:
                push_rows(self.ring[layer, b : b + 1], mass, lengths, rows, backend=self.backend)
            return out

        self._forward_one(padded, start, attend)

    def _forward_one(self, tokens: list[int], start: int, attend: Attend) -> None:
        block = torch.tensor([tokens], device=self.decoder.device)
        positions = torch.arange(start, start + len(tokens), device=self.decoder.device)[None]
        self.decoder.forward(block, positions, attend)
