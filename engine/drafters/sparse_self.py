"""Self-drafting over a selection (SparseSpec-L): the target's own weights, reading chosen keys only.

Tokens drafted this round are always visible. On a GPU the chosen keys are gathered where they lie and drafted keys go
behind the committed ones, where verification overwrites them (`GatherDraft`). On a CPU, and where many positions of one
sequence are drafted side by side, they are first copied into a small dense cache (`CompactDraft`). Measured: on an H200
the copy pays back only after 26 to 140 steps; on a CPU dense rows are what the matrix product wants.
"""

from typing import Protocol

import torch
from torch import Tensor

from specdial.engine.cache import WIDTH_MULTIPLE, KVCache, round_up
from specdial.engine.models.decoder import Decoder
from specdial.kernels import Backend
from specdial.kernels.full_attention import full_attention
from specdial.kernels.selection import select
from specdial.kernels.sparse_attention import SparseWorkspace, sparse_attention, workspace_for
from specdial.policies.schema import DraftKV


class SparseDraft(Protocol):
    """The draft state of N lanes for one round."""

    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits [N, V] of the next draft after tokens [N], the first of which stood at positions [N] at depth 0."""
        ...


class CompactDraft:
    """Lanes are the sequences of a batch, or positions of one sequence; their keys are copied once a round."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, indices: Tensor, counts: Tensor, *, steps: int, backend: Backend
    ) -> None:
        """indices: [L, N, Hk, C] keys to read; counts: [N] how many of them count; steps: drafts to make room for."""
        self.decoder = decoder
        self.backend: Backend = backend
        self.counts = counts.to(torch.int64)  # [N]
        L, N, Hk, C = indices.shape
        shape = (L, N, Hk, round_up(C + steps, WIDTH_MULTIPLE), cache.k.shape[-1])
        self.k = torch.empty(shape, device=cache.k.device, dtype=cache.k.dtype)  # [L, N, Hk, >= C + steps, D]
        self.v = torch.empty_like(self.k)
        for layer in range(L):
            self.k[layer, :, :, :C], self.v[layer, :, :, :C] = cache.gather(layer, indices[layer])
        self.k[:, :, :, C:] = 0.0
        self.v[:, :, :, C:] = 0.0
        self.depth = 0

    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """See SparseDraft."""
        lengths = self.counts + self.depth  # [N]
        lanes = torch.arange(tokens.shape[0], device=tokens.device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.k[layer], self.v[layer]
            keys[lanes, :, lengths] = k[:, 0]
            values[lanes, :, lengths] = v[:, 0]
            return full_attention(q, keys, values, lengths, backend=self.backend)[0]

        hidden = self.decoder.forward(tokens[:, None], (positions + self.depth)[:, None], attend)
        self.depth += 1
        return self.decoder.logits(hidden[:, -1])


class GatherDraft:
    """Lanes are the sequences of a batch; keys are read in place through their indices."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, indices: Tensor, counts: Tensor, *, steps: int, backend: Backend
    ) -> None:
        """As for CompactDraft, with N = B; the cache must have room for `steps` keys behind the committed ones."""
        cache.width(steps)
        self.decoder = decoder
        self.cache = cache
        self.indices, self.counts = indices, counts
        self.backend: Backend = backend
        self.depth = 0
        self._workspace: SparseWorkspace | None = None

    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """See SparseDraft."""
        start = self.cache.lengths  # [B]
        lengths = start + self.depth  # [B]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.cache.write(layer, k, v, ahead=self.depth)
            keys, values = self.cache.view(layer, self.cache.capacity_tokens)
            if self._workspace is None and self.backend == "triton":
                self._workspace = workspace_for(q, keys, self.indices[layer])
            return sparse_attention(
                q,
                keys,
                values,
                self.indices[layer],
                self.counts,
                tail_start=start,
                lengths=lengths,
                backend=self.backend,
                workspace=self._workspace,
            )

        hidden = self.decoder.forward(tokens[:, None], (positions + self.depth)[:, None], attend)
        self.depth += 1
        return self.decoder.logits(hidden[:, -1])


DRAFTS: dict[Backend, type[CompactDraft] | type[GatherDraft]] = {"reference": CompactDraft, "triton": GatherDraft}


def begin_draft(
    decoder: Decoder, cache: KVCache, ring: Tensor, draft_kv: DraftKV, *, steps: int, backend: Backend
) -> SparseDraft:
    """Select keys from the ring of attention rows and get ready to draft up to `steps` tokens for every sequence."""
    indices, counts = choose_keys(ring, cache.lengths, draft_kv, backend=backend)
    return DRAFTS[backend](decoder, cache, indices, counts, steps=steps, backend=backend)


def choose_keys(ring: Tensor, lengths: Tensor, draft_kv: DraftKV, *, backend: Backend) -> tuple[Tensor, Tensor]:
    """Selections of every layer from the ring of attention rows [L, B, Hk, W, S]; lengths [B] keys cached.

    Returns indices [L, B, Hk, C] and counts [B]. Scores are summed over the ring in slot order, a function of the
    committed sequence alone.
    """
    scores = ring.sum(dim=3)  # [L, B, Hk, S]
    if draft_kv.scope == "layer":
        scores = scores.sum(dim=2, keepdim=True)
    indices, counts = select(
        scores, lengths, budget=draft_kv.budget, sink=draft_kv.sink, recent=draft_kv.recent, backend=backend
    )
    return indices.expand(-1, -1, ring.shape[2], -1), counts
