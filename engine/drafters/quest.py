"""Quest (Tang et al. 2024) as a drafter: at every step and layer the query itself chooses the pages it reads.

A page is worth Quest's bound on its scores, sum over d of max(q_d min_d, q_d max_d), with the elementwise smallest and
largest keys of the page. The paper chooses per query head; here the heads of a group share a choice, by their mean.
Chosen are whole committed pages, sink and recent among them; the unfinished last page and what is drafted are always
visible. Drafted keys go behind the committed ones, where verification overwrites them.
"""

from collections.abc import Callable, Hashable

import numpy as np
from torch import Tensor

from specdial.engine.drafters.base import Draft, Proposal, propose
from specdial.engine.drafters.summaries import MOST_COMMITTED, Summaries
from specdial.engine.sequences import Sequences
from specdial.kernels.page_summary import HEAD_DIMS, score_pages
from specdial.kernels.selection import select
from specdial.kernels.sparse_attention import SparseWorkspace, sparse_attention, workspace_for
from specdial.policies.errors import UserError
from specdial.policies.schema import DraftKV


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
        self.summaries = Summaries.of(sequences, draft_kv.page)

    def prepare(self, limit: np.ndarray) -> None:
        """See Drafter: take in what was committed by rounds in between that did not draft so."""
        if limit.any():
            self.summaries.follow()

    def begin(self, steps: int) -> Draft:
        """See Drafter."""
        self.summaries.update(MOST_COMMITTED)
        return QuestDraft(self.s, self.summaries, self.draft_kv)


class QuestDraft:
    """Lanes are the sequences of a batch; keys are read in place, page by page."""

    def __init__(self, sequences: Sequences, summaries: Summaries, draft_kv: DraftKV) -> None:
        self.s, self.summaries, self.draft_kv = sequences, summaries, draft_kv

    def step(self, depth: int, tokens: Tensor) -> Proposal:
        """See Draft."""
        s = self.s
        lengths = s.cache.lengths + depth  # [B]
        attend = choosing(s, self.summaries, self.draft_kv, s.cache.lengths, lengths)
        return propose(s.forward_rows(tokens[:, None], lengths, attend)[:, -1], s.backend)


def choosing(
    s: Sequences, pages: Summaries, kv: DraftKV, committed: Tensor, lengths: Tensor
) -> Callable[[int, Tensor], Tensor]:
    """Attention of a layer's queries [B, T, H, D], behind lengths [B] keys, over pages that their last rows choose.

    committed: [B] keys whose whole pages there are to choose from; those behind them are read as they are.
    """
    whole = committed // kv.page  # [B]
    budget = max(min(kv.budget // kv.page, pages.low.shape[3]), kv.sink_pages + kv.recent_pages, 1)
    workspace: SparseWorkspace | None = None

    def attend(layer: int, q: Tensor) -> Tensor:
        nonlocal workspace
        scores = score_pages(
            q[:, -1:], pages.low[layer], pages.high[layer], whole * kv.page, page=kv.page, rule="quest",
            backend=s.backend,
        )  # [B, Hk, S / page]  # fmt: skip
        indices, counts = select(
            scores, whole, budget=budget, sink=kv.sink_pages, recent=kv.recent_pages, backend=s.backend, scope=kv.scope
        )
        keys, values = s.cache.layer(layer)
        if workspace is None and s.backend == "triton":
            workspace = workspace_for(q.shape, keys, indices, page=kv.page)
        return sparse_attention(
            q, keys, values, indices, counts, tail_start=whole * kv.page, lengths=lengths, backend=s.backend,
            page=kv.page, workspace=workspace, fresh=True,
        )  # fmt: skip

    return attend
