"""Self-drafting over a selection (SparseSpec-L): the target's own weights, reading chosen keys only.

Tokens drafted this round are always visible. On a GPU the chosen keys are gathered where they lie and drafted keys go
behind the committed ones, where verification overwrites them (`GatherDraft`). On a CPU, and where many positions of one
sequence are drafted side by side, they are first copied into a small dense cache (`CompactDraft`). Measured: on an H200
the copy pays back only after 26 to 140 steps; on a CPU dense rows are what the matrix product wants. Where keys live in
host memory, a GPU gathers the chosen ones beside the drafted ones first (`HostedDraft`).
"""

from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdial.engine.cache import WIDTH_MULTIPLE, round_up
from specdial.engine.drafters.base import Draft, Proposal, propose
from specdial.engine.drafters.selection import Selection, choose_keys
from specdial.engine.drafters.summaries import MOST_COMMITTED
from specdial.engine.offload import HostCache
from specdial.engine.partial_cache import PartialCache
from specdial.engine.sequences import Sequences
from specdial.kernels.full_attention import full_attention
from specdial.kernels.sparse_attention import rotate_and_attend, sparse_attention, workspace_for
from specdial.policies.schema import DraftKV


class SparseSelf:
    """Drafts of the sequences by their own target."""

    def __init__(self, sequences: Sequences, draft_kv: DraftKV, *, float8: bool) -> None:
        """float8: draft with float8 copies of the weights."""
        if sequences.history is None:
            raise ValueError("self-drafting needs sequences with history")
        self.s, self.history, self.draft_kv = sequences, sequences.history, draft_kv
        self.float8 = float8
        self.key: Hashable = ("sparse_self", draft_kv, float8)
        self._rounds = 0
        self._kept: Selection | None = None  # of a selection that lasts longer than a round

    @property
    def every_round(self) -> bool:
        """Is the selection chosen in every round, by what is on the device alone?"""
        return self.draft_kv.refresh_rounds == 1

    def prepare(self, limit: np.ndarray) -> None:
        """See Drafter: choose anew when the selection has served its rounds."""
        every = self.draft_kv.refresh_rounds
        if every != 1:
            if self._rounds == 0 or (every and self._rounds % every == 0):
                self._kept = self.s.graphs.run(("select", self.key), self._choose)
            self._rounds += 1

    def begin(self, steps: int) -> Draft:
        """See Drafter."""
        selection = self._choose() if self._kept is None else self._kept
        if self.s.backend == "triton" and isinstance(self.s.cache, HostCache):
            return HostedDraft(self.s, self.s.cache, selection, float8=self.float8)
        if self.s.backend == "triton":
            return GatherDraft(self.s, selection, float8=self.float8)
        return CompactDraft(self.s, selection, self.s.cache.lengths.clone(), steps=steps, float8=self.float8)

    def _choose(self) -> Selection:
        return choose_keys(self.history, self.s.cache.lengths, self.draft_kv)


class CompactDraft:
    """Lanes are the sequences of a batch, or positions of one sequence; their keys are copied once a round."""

    def __init__(
        self,
        sequences: Sequences,
        selection: Selection,
        lengths: Tensor,
        *,
        steps: int,
        float8: bool = False,
        lasting: bool = False,
    ) -> None:
        """lengths: [N] keys cached for each lane; lanes are the batch, or any number of positions of a batch of one.

        lasting: copy into buffers that stay with the sequences, which the next draft of this shape overwrites.
        """
        self.backend, cache = sequences.backend, sequences.cache
        self.decoder = sequences.decoder.in_float8() if float8 else sequences.decoder
        indices, self.counts = selection.as_tokens(lengths)
        self.positions = lengths  # [N] of the first input token
        L, N, Hk, C = indices.shape
        shape = (L, N, Hk, round_up(C + steps, WIDTH_MULTIPLE), cache.k.shape[-1])

        def room() -> Tensor:
            return torch.empty((2, *shape), device=cache.k.device, dtype=cache.k.dtype)

        # [L, N, Hk, >= C + steps, D] each
        self.k, self.v = sequences.lasting(("compact", shape), room) if lasting else room()
        for layer in range(L):
            self.k[layer, :, :, :C], self.v[layer, :, :, :C] = cache.gather(layer, indices[layer])
        self.k[:, :, :, C:] = 0.0
        self.v[:, :, :, C:] = 0.0

    def step(self, depth: int, tokens: Tensor) -> Proposal:
        """See Draft."""
        lengths = self.counts + depth  # [N]
        lanes = torch.arange(tokens.shape[0], device=tokens.device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.k[layer], self.v[layer]
            keys[lanes, :, lengths] = k[:, 0]
            values[lanes, :, lengths] = v[:, 0]
            return full_attention(q, keys, values, lengths, backend=self.backend)[0]

        hidden = self.decoder.forward(tokens[:, None], (self.positions + depth)[:, None], attend)
        return propose(self.decoder.logits(hidden[:, -1]), self.backend)


class GatherDraft:
    """Lanes are the sequences of a batch; keys are read in place through their indices."""

    def __init__(self, sequences: Sequences, selection: Selection, *, float8: bool = False) -> None:
        """On a GPU the selection must lie in buffers that stay."""
        self.s = sequences
        self.float8 = float8
        self.selection = selection

    def step(self, depth: int, tokens: Tensor) -> Proposal:
        """See Draft."""
        cache, chosen = self.s.cache, self.selection
        lengths = cache.lengths + depth  # [B]
        where: dict[str, Any] = {"tail_start": chosen.tail_start, "lengths": lengths, "page": chosen.page}
        where["backend"] = self.s.backend
        if self.s.backend == "triton":
            c = self.s.decoder.config
            shape = (len(tokens), 1, c.heads, c.head_dim)
            where["workspace"] = workspace_for(shape, cache.layer(0)[0], chosen.indices[0], page=chosen.page)

        def attend(layer: int, q: Tensor) -> Tensor:
            return sparse_attention(q, *cache.layer(layer), chosen.indices[layer], chosen.counts, **where)

        def attend_unrotated(layer: int, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            keys = (*cache.layer(layer), chosen.indices[layer], chosen.counts)
            return rotate_and_attend(qkv, *keys, cos=cos, sin=sin, **where)

        logits = self.s.forward_rows(
            tokens[:, None], lengths, attend, attend_unrotated=attend_unrotated, float8=self.float8
        )
        return propose(logits[:, -1], self.s.backend)


class HostedDraft:
    """Lanes are the sequences of a batch; their keys are gathered from host memory once a round."""

    def __init__(self, sequences: Sequences, cache: HostCache, selection: Selection, *, float8: bool = False) -> None:
        """Gathers the selection, into buffers that stay."""
        self.s, self.float8 = sequences, float8
        L, _, _, C = selection.indices.shape
        self.keys: PartialCache = sequences.lasting(
            ("draft keys", C, selection.page),
            lambda: PartialCache(cache, C, page=selection.page, tail_tokens=MOST_COMMITTED, backend=sequences.backend),
        )
        self.keys.take(selection.counts, selection.tail_start)
        for layer in range(L):
            self.keys.fill(layer, selection.indices[layer])

    def step(self, depth: int, tokens: Tensor) -> Proposal:
        """See Draft."""
        lengths = self.s.cache.lengths + depth  # [B]
        self.keys.begin(lengths, 1)
        logits = self.s.forward_rows(tokens[:, None], lengths, self.keys.attend, float8=self.float8, into=self.keys)
        return propose(logits[:, -1], self.s.backend)
