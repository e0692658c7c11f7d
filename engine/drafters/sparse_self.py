"""Self-drafting over a selection (SparseSpec-L): the target's own weights, reading chosen keys only.

Tokens drafted this round are always visible. On a GPU the chosen keys are gathered where they lie and drafted keys go
behind the committed ones, where verification overwrites them (`GatherDraft`). On a CPU, and where many positions of one
sequence are drafted side by side, they are first copied into a small dense cache (`CompactDraft`). Measured: on an H200
the copy pays back only after 26 to 140 steps; on a CPU dense rows are what the matrix product wants.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specdial.engine.cache import WIDTH_MULTIPLE, round_up
from specdial.engine.history import History
from specdial.engine.sequences import Sequences
from specdial.kernels import Backend
from specdial.kernels.full_attention import full_attention
from specdial.kernels.selection import select
from specdial.kernels.sparse_attention import SparseWorkspace, sparse_attention, workspace_for
from specdial.kernels.token_statistics import logit_statistics
from specdial.policies.schema import DraftKV


@dataclass(frozen=True, slots=True)
class Proposal:
    """What one draft step says of N lanes. On a GPU it lies in a graph's buffers until the next step.

    logits: [N, V]. token: [N], the likeliest. signals: [3, N] float32, its entropy in nats, top-1 probability, margin.
    """

    logits: Tensor
    token: Tensor
    signals: Tensor


class SparseDraft(Protocol):
    """The draft state of N lanes for one round."""

    def step(self, tokens: Tensor) -> Proposal:
        """The next draft after tokens [N], each lane's last one."""
        ...


def propose(logits: Tensor, backend: Backend) -> Proposal:
    """The proposal that logits [N, V] make."""
    token, *signals = logit_statistics(logits, backend=backend)
    return Proposal(logits, token, torch.stack(signals))


@dataclass(frozen=True, slots=True)
class Selection:
    """The cached keys a round's drafts read, apart from the tail that is always visible.

    indices: [L, N, Hk, C] int32, keys (page 1) or page numbers, ascending, of which counts [N] are used.
    tail_start: [N], first key of the tail, past every selected one. lengths: [N], keys cached when the round starts.
    """

    indices: Tensor
    counts: Tensor
    tail_start: Tensor
    lengths: Tensor
    page: int

    def as_tokens(self) -> tuple[Tensor, Tensor]:
        """Keys one by one, the tail included: indices [L, N, Hk, C * page + page - 1] and counts [N]."""
        if self.page == 1:
            return self.indices, self.counts.to(torch.int64)
        L, N, Hk, C = self.indices.shape
        page, device = self.page, self.indices.device
        chosen = (self.indices[..., None].long() * page + torch.arange(page, device=device)).flatten(-2)
        selected = self.counts.to(torch.int64) * page  # [N]
        slot = torch.arange(C * page + page - 1, device=device)
        tail = self.tail_start[:, None] + slot - selected[:, None]  # [N, C * page + page - 1]
        tail = tail.clamp(min=0).minimum((self.lengths - 1).clamp(min=0)[:, None])
        padded = torch.cat([chosen, chosen[..., -1:].expand(L, N, Hk, page - 1)], dim=-1)
        indices = torch.where((slot < selected[:, None])[None, :, None], padded, tail[None, :, None])
        return indices, selected + self.lengths - self.tail_start


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
    return Selection(indices, counts, whole * page, lengths.clone(), page)


class CompactDraft:
    """Lanes are the sequences of a batch, or positions of one sequence; their keys are copied once a round."""

    def __init__(self, sequences: Sequences, selection: Selection, *, steps: int) -> None:
        """steps: drafts to make room for. Lanes N are the batch, or any number of positions of a batch of one."""
        self.decoder, self.backend, cache = sequences.decoder, sequences.backend, sequences.cache
        indices, self.counts = selection.as_tokens()
        self.positions = selection.lengths  # [N] of the first input token
        L, N, Hk, C = indices.shape
        shape = (L, N, Hk, round_up(C + steps, WIDTH_MULTIPLE), cache.k.shape[-1])
        self.k = torch.empty(shape, device=cache.k.device, dtype=cache.k.dtype)  # [L, N, Hk, >= C + steps, D]
        self.v = torch.empty_like(self.k)
        for layer in range(L):
            self.k[layer, :, :, :C], self.v[layer, :, :, :C] = cache.gather(layer, indices[layer])
        self.k[:, :, :, C:] = 0.0
        self.v[:, :, :, C:] = 0.0
        self.depth = 0

    def step(self, tokens: Tensor) -> Proposal:
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
        return propose(self.decoder.logits(hidden[:, -1]), self.backend)


class GatherDraft:
    """Lanes are the sequences of a batch; keys are read in place through their indices, one graph replay a step."""

    def __init__(self, sequences: Sequences, selection: Selection, *, steps: int) -> None:
        """The selection must lie in buffers that stay; the cache must have room for `steps` keys."""
        sequences.cache.width(steps)
        self.s = sequences
        self.selection = selection
        self.depth = 0

    def step(self, tokens: Tensor) -> Proposal:
        """See SparseDraft."""
        depth = torch.full((1,), self.depth, dtype=torch.int64, device=tokens.device)
        self.depth += 1
        key = ("draft", self.selection.page, self.selection.indices.shape[-1])
        proposal: Proposal = self.s.graphs.run(key, self._pass, tokens, depth)
        return proposal

    def _pass(self, tokens: Tensor, depth: Tensor) -> Proposal:
        cache, chosen = self.s.cache, self.selection
        lengths = cache.lengths + depth  # [B]
        workspace: SparseWorkspace | None = None

        def attend(layer: int, q: Tensor) -> Tensor:
            nonlocal workspace
            keys, values = cache.layer(layer)
            if workspace is None and self.s.backend == "triton":
                workspace = workspace_for(q, keys, chosen.indices[layer], page=chosen.page)
            return sparse_attention(
                q,
                keys,
                values,
                chosen.indices[layer],
                chosen.counts,
                tail_start=chosen.tail_start,
                lengths=lengths,
                backend=self.s.backend,
                page=chosen.page,
                workspace=workspace,
            )

        hidden = self.s.forward_rows(tokens[:, None], lengths, attend)
        return propose(self.s.decoder.logits(hidden[:, -1]), self.s.backend)


def begin_draft(sequences: Sequences, draft_kv: DraftKV, *, steps: int) -> SparseDraft:
    """Select keys from the sequences' history and get ready to draft up to `steps` tokens for each."""
    s, history = sequences, sequences.history
    if history is None:
        raise ValueError("self-drafting needs sequences with history")
    selection: Selection = s.graphs.run(("select", draft_kv), lambda: choose_keys(history, s.cache.lengths, draft_kv))
    return GatherDraft(s, selection, steps=steps) if s.backend == "triton" else CompactDraft(s, selection, steps=steps)
