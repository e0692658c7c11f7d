"""Quest (Tang et al. 2024) as a drafter: at every step and layer the query itself chooses the pages it reads.

A page is worth Quest's bound on its scores, sum over d of max(q_d min_d, q_d max_d), with the elementwise smallest and
largest keys of the page. The paper chooses per query head; here the heads of a group share a choice, by their mean.
Chosen are whole committed pages, sink and recent among them; the unfinished last page and what is drafted are always
visible. Drafted keys go behind the committed ones, where verification overwrites them.
"""

from collections.abc import Hashable

import numpy as np
import torch
from torch import Tensor

from specdial.engine.drafters.base import Draft, Proposal, propose
from specdial.engine.sequences import Sequences
from specdial.kernels.page_summary import HEAD_DIMS, score_pages, update_pages
from specdial.kernels.selection import select
from specdial.kernels.sparse_attention import SparseWorkspace, sparse_attention, workspace_for
from specdial.policies.errors import UserError
from specdial.policies.schema import DraftKV

MOST_COMMITTED = 65  # tokens of one round: 64 drafts, which no controller exceeds, and one more


class Quest:
    """Drafts of the sequences by their own target over pages chosen by query."""

    def __init__(self, sequences: Sequences, draft_kv: DraftKV) -> None:
        """draft_kv: its budget in keys. Raises UserError on what cannot be chosen so."""
        head_dim = sequences.decoder.config.head_dim
        if head_dim not in HEAD_DIMS:
            raise UserError(
                f"drafter quest takes head dimensions {list(HEAD_DIMS)}, this model has {head_dim}", "use another"
            )
        if draft_kv.scope == "model":
            raise UserError("drafter quest chooses layer by layer, draft_kv.scope is model", "use kv_head or layer")
        self.s, self.draft_kv = sequences, draft_kv
        self.key: Hashable = ("quest", draft_kv)
        page = draft_kv.page
        self.summaries: Summaries = sequences.lasting(("summaries", page), lambda: Summaries(sequences, page))

    def prepare(self, limit: np.ndarray) -> None:
        """See Drafter: take in what was committed by rounds in between that did not draft so."""
        if limit.any():
            self.summaries.follow()

    def begin(self, steps: int) -> Draft:
        """See Drafter."""
        self.summaries.update(MOST_COMMITTED)
        return QuestDraft(self.s, self.summaries, self.draft_kv)


class Summaries:
    """The smallest and largest keys of every page of the committed keys, [L, B, Hk, S / page, D] each."""

    def __init__(self, sequences: Sequences, page: int) -> None:
        cache = sequences.cache
        self.s, self.page = sequences, page
        L, B, Hk, S, D = cache.k.shape
        self.low = torch.zeros(L, B, Hk, S // page, D, device=cache.k.device, dtype=cache.k.dtype)
        self.high = torch.zeros_like(self.low)
        self.covered = torch.zeros(B, dtype=torch.int64, device=cache.k.device)  # [B] keys they were made from
        self._turn = -1  # the last round they took part in

    def follow(self) -> None:
        """Before a round: make up for whatever happened since the last one."""
        if self._turn < self.s.started:  # keys may have been replaced
            self.covered.zero_()
        if self._turn != self.s.turn - 1:
            self.update(self.s.cache.capacity_tokens)
        self._turn = self.s.turn

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


class QuestDraft:
    """Lanes are the sequences of a batch; keys are read in place, page by page."""

    def __init__(self, sequences: Sequences, summaries: Summaries, draft_kv: DraftKV) -> None:
        self.s, self.summaries, self.draft_kv = sequences, summaries, draft_kv

    def step(self, depth: int, tokens: Tensor) -> Proposal:
        """See Draft."""
        s, kv, pages = self.s, self.draft_kv, self.summaries
        lengths = s.cache.lengths + depth  # [B]
        whole = s.cache.lengths // kv.page  # [B] pages to choose from
        protected = kv.sink_pages + kv.recent_pages
        budget = max(min(kv.budget // kv.page, pages.low.shape[3]), protected, 1)
        workspace: SparseWorkspace | None = None

        def attend(layer: int, q: Tensor) -> Tensor:
            nonlocal workspace
            low, high = pages.low[layer], pages.high[layer]
            scores = score_pages(
                q, low, high, whole * kv.page, page=kv.page, rule="quest", backend=s.backend
            )  # [B, Hk, S / page]
            indices, counts = select(
                scores, whole, budget=budget, sink=kv.sink_pages, recent=kv.recent_pages, backend=s.backend,
                scope=kv.scope,
            )  # fmt: skip
            keys, values = s.cache.layer(layer)
            if workspace is None and s.backend == "triton":
                workspace = workspace_for(q, keys, indices, page=kv.page)
            return sparse_attention(
                q, keys, values, indices, counts, tail_start=whole * kv.page, lengths=lengths, backend=s.backend,
                page=kv.page, workspace=workspace, fresh=True,
            )  # fmt: skip

        return propose(s.forward_rows(tokens[:, None], lengths, attend)[:, -1], s.backend)
