"""How a round's drafts are verified: over every cached key, or over a selection and the tokens of the round.

Keys and values of tokens committed by a partial verification stem from partial attention, and later tokens see them. A
full round puts those tokens in front of its own rows; what they leave in the cache and in history is then as if every
round had been full, and what was decided is kept. Rows of partial rounds never enter history, which is therefore a
function of the committed tokens and of which rounds were full.

The recomputed part is as wide for every sequence of a batch, R rows, the most that any of them has to correct. Those
that have less to correct recompute rows that were full already, which changes nothing; those with fewer than R cached
keys begin at key 0, and rows past their own are padding.

A selection is chosen in every partial round, or kept from the first one after a full round to the next full round. A
kept one is read where its keys lie, or gathered on the device where they lie in host memory (partial_cache).

Leaves out when a round is partial (`Schedule` counts, policies say), and what is accepted (loop).
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specdial.engine.branches import Branches
from specdial.engine.cache import round_up
from specdial.engine.drafters.model import ModelDrafter
from specdial.engine.drafters.quest import Quest
from specdial.engine.drafters.selection import Selection
from specdial.engine.drafters.summaries import MOST_COMMITTED, Summaries
from specdial.engine.graphs import UNCAPTURED
from specdial.engine.key_scores import Chooser, LastQueries
from specdial.engine.models.decoder import Decoder
from specdial.engine.offload import HostCache
from specdial.engine.partial_cache import KeptInPlace, KeptKeys, PartialCache
from specdial.engine.prefill import ROW_MULTIPLE
from specdial.engine.round_state import to_device
from specdial.engine.sequences import Block, Sequences
from specdial.kernels.page_summary import score_pages
from specdial.kernels.selection import select
from specdial.kernels.sparse_attention import HEAD_DIMS, SparseWorkspace, sparse_attention, workspace_for
from specdial.policies.errors import UserError
from specdial.policies.schema import Policy, VerifyKV

CUDA_RECOMPUTED_MULTIPLE = 16  # rows; every number of rows is a graph of its own


@dataclass(frozen=True, slots=True)
class Plan:
    """How one round is verified. recomputed: rows in front of its own, in a full round; since_full: partial rounds
    since the last full one, this one included, 0 in a full one. chooses: whether a partial one chooses its keys, or
    reads those chosen before."""

    partial: bool = False
    recomputed: int = 0
    since_full: int = 0
    chooses: bool = True


class Schedule:
    """Which rounds of a decoding are partial, and what they left to correct. All of it on the host."""

    def __init__(self, sequences: Sequences, policy: Policy) -> None:
        self.s = sequences
        self._corrects = any(v.verify_kv.mode == "partial" and v.verify_kv.full_period for v in policy.variants())
        self._most_tokens = policy.k_max + 1  # that a round commits
        self._since_full = 0
        self._kept: set[VerifyKV] = set()  # by which a selection was chosen since the last full round, and kept
        self._uncorrected = np.zeros(sequences.batch, dtype=np.int64)  # [B] tokens committed since the last full round

    def must_know(self, verify_kv: VerifyKV) -> bool:
        """Does the next round depend on how much the one in flight commits?"""
        if self._corrects and self._since_full > 0 and not self._is_partial(verify_kv):
            return True
        return self._filled(verify_kv, 0) != self._filled(verify_kv, self._most_tokens)

    def next(self, verify_kv: VerifyKV) -> Plan:
        """The plan of the round to be launched now."""
        if self._is_partial(verify_kv):
            self._since_full += 1
            chooses = verify_kv not in self._kept
            if verify_kv.refresh == "full":
                self._kept.add(verify_kv)
            return Plan(partial=True, since_full=self._since_full, chooses=chooses)
        rows, longest = int(self._uncorrected.max()), int(self.s.cache.host_lengths.max())
        if self.s.cache.on_gpu:
            rows = min(round_up(rows, CUDA_RECOMPUTED_MULTIPLE), longest)
        self._since_full = 0
        self._kept.clear()
        self._uncorrected[:] = 0
        return Plan(recomputed=rows)

    def note(self, plan: Plan, counts: np.ndarray) -> None:
        """A round committed counts [B] tokens."""
        if plan.partial and self._corrects:
            self._uncorrected += counts

    def _is_partial(self, verify_kv: VerifyKV) -> bool:
        period = verify_kv.full_period
        if verify_kv.mode == "full" or 0 < period <= self._since_full + 1:
            return False
        return not any(self._filled(verify_kv, 0))

    def _filled(self, verify_kv: VerifyKV, unread: int) -> tuple[bool, bool]:
        """Is the buffer full, does the budget hold everything, if rounds in flight committed `unread` tokens?"""
        if not verify_kv.buffer:
            return False, False
        uncorrected, committed = int(self._uncorrected.max()) + unread, int(self.s.committed.max()) + unread
        return verify_kv.overflows(uncorrected, self._most_tokens), verify_kv.holds(committed)


class Verification:
    """The device's part for one variant of a policy. Its methods are passes, except `prepare`."""

    def __init__(
        self,
        sequences: Sequences,
        variant: Policy,
        *,
        lookahead: Tensor | None,
        queries: LastQueries | None,
        summaries: Sequence[Summaries],
        most_drafts: int,
    ) -> None:
        """lookahead: [K, B, S] of the variant's draft model. queries: kept for history by scoring heads.

        summaries: page summaries that are in use, which must learn of keys written anew. most_drafts: of any round.
        """
        self.s, self.kv, self.queries = sequences, variant.verify_kv, queries
        self.summaries = list(summaries)
        partial = not self.kv.lossless
        self._name = (self.kv if partial else "full", None if queries is None else variant.scoring_heads.target)
        self._plan = Plan()
        self._kept: KeptKeys | None = None
        if partial and self.kv.refresh == "full":
            self._kept = sequences.lasting(
                ("kept", self.kv, most_drafts), lambda: kept_keys(sequences, self.kv, most_drafts)
            )
        by_page = partial and self.kv.source == "page_bound"
        self._pages = next(p for p in self.summaries if p.page == self.kv.page) if by_page else None
        self._choose: Chooser | None = None
        if partial and self._pages is None:
            self._choose = Chooser(sequences, self.kv, lookahead=lookahead, queries=queries)

    @property
    def key(self) -> Hashable:
        """What tells this round's pass from others. A pass that moves keys in from host memory is not captured."""
        if self.s.cache.in_host and not (self._plan.partial and not self._plan.chooses):
            return UNCAPTURED
        return (*self._name, self._plan.chooses)

    def prepare(self, plan: Plan) -> None:
        """Host work before a round: page summaries follow, tokens to recompute are sent."""
        self._plan = plan
        if self._pages is not None and plan.chooses:
            self._pages.follow()
        self.s.rewritten = plan.recomputed
        if plan.recomputed:
            for pages in self.summaries:
                pages.again(plan.recomputed)
            known = np.zeros((self.s.batch, plan.recomputed), dtype=np.int64)  # [B, R]
            for b, cached in enumerate(self.s.cache.host_lengths):
                given = self.s.tokens[b][max(int(cached) - plan.recomputed, 0) : int(cached)]
                known[b, : len(given)] = given
            to_device(known, self._known(plan.recomputed))

    def block(
        self,
        tokens: Tensor,
        plan: Plan,
        *,
        k: Tensor,
        padded: bool,
        rows: bool,
        branches: Branches | None = None,
    ) -> Block:
        """Verify tokens [B, T], of which 1 + k[b] count. padded, rows: as in `Sequences.forward_block`.

        branches: how the tokens descend from each other; those count that are at most k[b] deep, which come first.
        """
        watch = None if self.queries is None else self.queries.watch()
        if plan.partial:
            if branches is not None:
                k = (branches.depths <= k[:, None]).sum(dim=1) - 1  # [B] rows behind the first one
            return self._partial(tokens, k, watch, chooses=plan.chooses, branches=branches)
        if plan.recomputed:
            return self._corrected(tokens, plan.recomputed, watch, branches)
        return self.s.forward_block(tokens, padded=padded, rows=rows, watch=watch, branches=branches)

    def settled(self, block: Block, counts: Tensor) -> None:
        """Take in what a block leaves beyond keys and history, of which counts [B] new rows are committed now."""
        if self.queries is not None:
            self.queries.keep(block.first_row, counts)

    def _known(self, rows: int) -> Tensor:
        s = self.s
        return s.lasting(
            ("recomputed", rows), lambda: torch.zeros(s.batch, rows, dtype=torch.int64, device=s.decoder.device)
        )

    def _corrected(
        self,
        tokens: Tensor,
        recomputed: int,
        watch: Callable[[int, Tensor], None] | None,
        branches: Branches | None,
    ) -> Block:
        """A full verification whose block begins with the tokens to recompute, already cached."""
        s, T = self.s, tokens.shape[1]
        first = s.cache.lengths.clamp(max=recomputed)  # [B] row of the pending token
        own = first[:, None] + torch.arange(T, device=tokens.device)  # [B, T] rows of the round
        whole = F.pad(self._known(recomputed), (0, T)).scatter(1, own, tokens)  # [B, R + T]
        if branches is not None:
            branches = branches.behind(first, whole.shape[1])
        block = s.forward_block(
            whole, padded=True, rows=True, start=s.cache.lengths - first, cached_rows=recomputed, watch=watch,
            branches=branches,
        )  # fmt: skip
        logits = block.logits.gather(1, own[..., None].expand(-1, -1, block.logits.shape[-1]))  # [B, T, V]
        return replace(block, logits=logits, first_row=first)

    def _partial(
        self,
        tokens: Tensor,
        k: Tensor,
        watch: Callable[[int, Tensor], None] | None,
        *,
        chooses: bool,
        branches: Branches | None,
    ) -> Block:
        """A verification over a selection of the cached keys and the block itself. It leaves no attention rows."""
        s, T, kept = self.s, tokens.shape[1], self._kept
        lengths = s.cache.lengths
        if self._pages is not None and chooses:
            self._pages.update(MOST_COMMITTED)
        chosen = self._choose(k) if self._choose is not None and chooses else None
        counted = k + 1  # [B] rows
        if not s.cache.on_gpu:
            tokens = F.pad(tokens, (0, round_up(T, ROW_MULTIPLE) - T))
        if branches is not None:
            branches = branches.padded(tokens.shape[1])
        depths, ancestors = (None, None) if branches is None else (branches.depths, branches.ancestors)
        s.cache.width(tokens.shape[1])  # raises where the block does not fit
        if kept is not None and chooses:
            kept.take(*self._extent() if chosen is None else (chosen.counts, chosen.tail_start))
        if kept is not None:
            kept.begin(lengths, tokens.shape[1], ancestors)
        workspace: SparseWorkspace | None = None

        def attend(layer: int, q: Tensor) -> Tensor:
            nonlocal workspace
            if watch is not None:
                watch(layer, q)
            if kept is not None and not chooses:
                return kept.attend(layer, q)
            selection = self._by_pages(layer, q, counted) if chosen is None else chosen
            indices = selection.indices[layer if chosen is not None else 0]
            if kept is not None:
                kept.fill(layer, indices)
                return kept.attend(layer, q)
            keys, values = s.cache.layer(layer)
            if workspace is None and s.backend == "triton":
                workspace = workspace_for(q.shape, keys, indices, page=selection.page)
            return sparse_attention(
                q, keys, values, indices, selection.counts, tail_start=selection.tail_start, lengths=lengths,
                backend=s.backend, page=selection.page, workspace=workspace, fresh=chosen is None,
                ancestors=ancestors,
            )  # fmt: skip

        into = kept if isinstance(kept, PartialCache) else None
        return Block(s.forward_rows(tokens, lengths, attend, into=into, depths=depths)[:, :T], None)

    def _extent(self) -> tuple[Tensor, Tensor]:
        """Of a selection of pages: how many it has, and the position behind the last whole one, [B] each."""
        whole = self.s.cache.lengths // self.kv.page  # [B]
        return whole.clamp(max=chosen_pages(self.kv, self.s.cache.capacity_tokens)), whole * self.kv.page

    def _by_pages(self, layer: int, q: Tensor, rows: Tensor) -> Selection:
        """Pages of one layer that promise the round's queries q [B, T, H, D] most, of which rows [B] count."""
        s, keys, pages = self.s, self.kv.keys, self._pages
        if pages is None:
            raise ValueError("this verification does not choose by page")
        whole = s.cache.lengths // keys.page  # [B]
        scores = score_pages(
            q, pages.low[layer], pages.high[layer], whole * keys.page, page=keys.page, rule=self.kv.bound,
            backend=s.backend, pool=self.kv.rows, rows=rows,
        )  # fmt: skip
        indices, counts = select(
            scores, whole, budget=chosen_pages(self.kv, s.cache.capacity_tokens),
            sink=keys.sink_pages, recent=keys.recent_pages, backend=s.backend, scope=keys.scope,
        )  # fmt: skip
        return Selection(indices[None], counts, whole * keys.page, keys.page)


def verifications(
    s: Sequences, policy: Policy, drafters: Sequence[object]
) -> tuple[LastQueries | None, list[Verification]]:
    """How each variant of a policy verifies, and the queries that are kept meanwhile. drafters: of each variant.

    Raises UserError on scoring heads or head dimensions that the models do not have.
    """
    check_scoring_heads(s.decoder, {name: own.decoder for name, own in s.companions.items()}, policy)
    variants = policy.variants()
    by_heads = policy.scoring_heads.target and not policy.lossless
    queries = LastQueries(s, policy.scoring_heads) if by_heads else None
    partial = [v.verify_kv for v in variants if not v.verify_kv.lossless]
    if partial and s.decoder.config.head_dim not in HEAD_DIMS:
        raise UserError(
            f"partial verification takes head dimensions {list(HEAD_DIMS)}, this model has {s.decoder.config.head_dim}",
            "use verify_kv.mode full",
            field="verify_kv.mode",
        )
    pages: set[int] = {kv.page for kv in partial if kv.source == "page_bound"}
    if partial:  # a drafter's summaries must learn of keys written anew
        pages |= {d.summaries.page for d in drafters if isinstance(d, Quest)}
    summaries = [Summaries.of(s, page) for page in sorted(pages)]
    made = []
    for variant, drafter in zip(variants, drafters, strict=True):
        kept = drafter.lookahead if isinstance(drafter, ModelDrafter) else None
        made.append(
            Verification(
                s,
                variant,
                lookahead=None if kept is None else kept.scores,
                queries=queries,
                summaries=summaries,
                most_drafts=policy.k_max,
            )
        )
    return queries, made


def chosen_pages(verify_kv: VerifyKV, capacity_tokens: int) -> int:
    """Keys, or pages of them, that a selection has per kv head, in a cache of this capacity."""
    keys = verify_kv.keys
    return max(min(keys.budget // keys.page, capacity_tokens // keys.page), keys.sink_pages + keys.recent_pages)


def kept_tokens(verify_kv: VerifyKV, most_drafts: int) -> int:
    """Most keys behind a selection that lasts from one full round to the next, and of the last partial one's block."""
    return verify_kv.most_uncorrected(most_drafts) + most_drafts + 1 + ROW_MULTIPLE


def kept_keys(s: Sequences, verify_kv: VerifyKV, most_drafts: int) -> KeptKeys:
    """Room for the keys that partial rounds read until the next full one."""
    chosen = chosen_pages(verify_kv, s.cache.capacity_tokens)
    if isinstance(s.cache, HostCache):
        tail = kept_tokens(verify_kv, most_drafts)
        return PartialCache(s.cache, chosen, page=verify_kv.page, tail_tokens=tail, backend=s.backend)
    return KeptInPlace(s.cache, chosen, page=verify_kv.page, backend=s.backend)


def check_scoring_heads(target: Decoder, drafts: Mapping[str, Decoder], policy: Policy) -> None:
    """Raises UserError on a scoring head that the target or the policy's draft models do not have."""
    heads = policy.scoring_heads
    heads.check_model("target", target.config.name, layers=target.config.layers, heads=target.config.heads)
    for name in {v.drafter.model for v in policy.variants() if v.drafter.kind == "model"} & drafts.keys():
        c = drafts[name].config
        heads.check_model("draft", c.name, layers=c.layers, heads=c.heads)
