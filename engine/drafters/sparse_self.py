"""Self-drafting over a selection (SparseSpec-L): the target's own weights, reading chosen keys only.

Tokens drafted this round are always visible. On a GPU the chosen keys are gathered where they lie and drafted keys go
behind the committed ones, where verification overwrites them (`GatherDraft`). On a CPU, and where many positions of one
sequence are drafted side by side, they are first copied into a small dense cache (`CompactDraft`). Measured: on an H200
the copy pays back only after 26 to 140 steps; on a CPU dense rows are what the matrix product wants.
"""

from typing import Protocol

import torch
from torch import Tensor

from specdial.engine.cache import WIDTH_MULTIPLE, round_up
from specdial.engine.sequences import Sequences
from specdial.kernels import Backend
from specdial.kernels.full_attention import full_attention
from specdial.kernels.selection import select
from specdial.kernels.sparse_attention import SparseWorkspace, sparse_attention, workspace_for
from specdial.policies.schema import DraftKV


class SparseDraft(Protocol):
    """The draft state of N lanes for one round."""

    def step(self, tokens: Tensor) -> Tensor:
        """Logits [N, V] of the next draft after tokens [N], each lane's last one."""
        ...


class CompactDraft:
    """Lanes are the sequences of a batch, or positions of one sequence; their keys are copied once a round."""

    def __init__(self, sequences: Sequences, indices: Tensor, counts: Tensor, positions: Tensor, *, steps: int) -> None:
        """indices: [L, N, Hk, C] keys to read, of which counts [N] count; positions: [N] of the first input token.

        steps: drafts to make room for. N is the batch, or any number of positions of a batch of one.
        """
        self.decoder, self.backend, cache = sequences.decoder, sequences.backend, sequences.cache
        self.positions = positions  # [N]
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

    def step(self, tokens: Tensor) -> Tensor:
        """See SparseDraft."""
        lengths = self.counts + self.depth  # [N]
        lanes = torch.arange(tokens.shape[0], device=tokens.device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.k[layer], self.v[layer]
            keys[lanes, :, lengths] = k[:, 0]
            values[lanes, :, lengths] = v[:, 0]
            return full_attention(q, keys, values, lengths, backend=self.backend)[0]

        hidden = self.decoder.forward(tokens[:, None], (self.positions + self.depth)[:, None], attend)
        self.depth += 1
        return self.decoder.logits(hidden[:, -1])


class GatherDraft:
    """Lanes are the sequences of a batch; keys are read in place through their indices, one graph replay a step."""

    def __init__(self, sequences: Sequences, indices: Tensor, counts: Tensor, *, steps: int) -> None:
        """indices: [L, B, Hk, C], counts: [B], in buffers that stay; the cache must have room for `steps` keys."""
        sequences.cache.width(steps)
        self.s = sequences
        self.indices, self.counts = indices, counts
        self.depth = 0

    def step(self, tokens: Tensor) -> Tensor:
        """See SparseDraft."""
        depth = torch.full((1,), self.depth, dtype=torch.int64, device=tokens.device)
        self.depth += 1
        logits: Tensor = self.s.graphs.run(("draft", self.indices.shape[-1]), self._pass, tokens, depth)
        return logits

    def _pass(self, tokens: Tensor, depth: Tensor) -> Tensor:
        cache, start = self.s.cache, self.s.cache.lengths
        lengths = start + depth  # [B]
        workspace: SparseWorkspace | None = None

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            nonlocal workspace
            cache.write_at(layer, k, v, lengths[:, None])
            keys, values = cache.view(layer, cache.capacity_tokens)
            if workspace is None and self.s.backend == "triton":
                workspace = workspace_for(q, keys, self.indices[layer])
            return sparse_attention(
                q,
                keys,
                values,
                self.indices[layer],
                self.counts,
                tail_start=start,
                lengths=lengths,
                backend=self.s.backend,
                workspace=workspace,
            )

        hidden = self.s.decoder.forward(tokens[:, None], lengths[:, None], attend)
        return self.s.decoder.logits(hidden[:, -1])


def begin_draft(sequences: Sequences, draft_kv: DraftKV, *, steps: int) -> SparseDraft:
    """Select keys from the sequences' attention rows and get ready to draft up to `steps` tokens for each."""
    s = sequences
    if s.ring is None:
        raise ValueError("self-drafting needs sequences with history")
    ring = s.ring
    indices, counts = s.graphs.run(
        ("select", draft_kv), lambda: choose_keys(ring, s.cache.lengths, draft_kv, backend=s.backend)
    )
    if s.backend == "triton":
        return GatherDraft(s, indices, counts, steps=steps)
    return CompactDraft(s, indices, counts, s.cache.lengths, steps=steps)


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
