"""Self-drafting over a selection (SparseSpec-L): the target's own weights, reading a compact copy of chosen keys.

At the start of a round every layer's selection is copied into a small dense cache; each draft step appends its own key
there, so tokens drafted this round are always visible, and the main cache is never written while drafting.
"""

import torch
from torch import Tensor

from specdial.engine.cache import WIDTH_MULTIPLE, KVCache, round_up
from specdial.engine.models.decoder import Decoder
from specdial.kernels import Backend
from specdial.kernels.full_attention import full_attention
from specdial.kernels.selection import select
from specdial.policies.schema import DraftKV


class CompactDraft:
    """The draft state of N lanes for one round. Lanes are the sequences of a batch, or positions of one sequence."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, indices: Tensor, counts: Tensor, *, steps: int, backend: Backend
    ) -> None:
        """indices: [L, N, Hk, C] keys to read; counts: [N] how many of them count; steps: drafts to make room for."""
        self.decoder = decoder
        self.backend = backend
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
        """Logits [N, V] of the next draft after tokens [N], the first of which stood at positions [N] at depth 0."""
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
