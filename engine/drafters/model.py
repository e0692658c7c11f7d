"""A draft model: a second decoder with keys of its own for everything committed, read along as the target goes.

The first step of a round feeds the last two committed tokens, the later ones the last draft. So a round that drafted
leaves all keys the next one needs, however much was accepted: the last accepted draft may be missing, and is one of
the two. After rounds without drafts `prepare` feeds what is missing. With scoring heads every step also leaves their
attention to every key, for whoever verifies over a selection (Dustin's lookahead). That is so, too, where drafts read
the first keys and the last ones alone (StreamingLLM), or pages that each step's queries choose (Quest).
"""

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specdial.engine.drafters.base import Draft, Proposal, propose
from specdial.engine.drafters.quest import choosing
from specdial.engine.drafters.summaries import MOST_COMMITTED, Summaries
from specdial.engine.sequences import Sequences
from specdial.kernels import Backend
from specdial.kernels.full_attention import full_attention
from specdial.kernels.head_scores import head_scores
from specdial.kernels.sparse_attention import (
    HEAD_DIMS,
    SparseWorkspace,
    rotate_and_attend,
    sparse_attention,
    workspace_for,
)
from specdial.policies.drafting import WINDOW_SINK, DraftKV
from specdial.policies.errors import UserError

CATCH_UP_ROWS = 16  # most missing tokens fed at once; no more than a cache holds


@dataclass(frozen=True, slots=True)
class Lookahead:
    """What the scoring heads of a draft model say. heads: query heads by layer; scores: [K, B, S], by draft step."""

    heads: dict[int, tuple[int, ...]]
    scores: Tensor


class ModelDrafter:
    """Drafts of the sequences by one of their companions."""

    def __init__(
        self,
        sequences: Sequences,
        name: str,
        *,
        window: int = 0,
        own_kv: DraftKV | None = None,
        heads: dict[int, tuple[int, ...]] | None = None,
        most_drafts: int = 0,
    ) -> None:
        """window: last keys to read, 0 for all. own_kv: instead, what to read of its own keys, chosen by pages.
        heads: scoring heads by layer, whose attention is kept for up to `most_drafts` steps a round.

        Raises ValueError without such a companion, UserError on prompts of one token or heads that no window or page
        takes.
        """
        if name not in sequences.companions:
            raise ValueError(f"these sequences have no companion {name!r}")
        if int(sequences.prompt_tokens.min()) < 2:
            raise UserError("a draft model starts from two tokens, a prompt has one", "give a longer prompt")
        self.s, self.own, self.window = sequences, sequences.companions[name], window
        head_dim = self.own.decoder.config.head_dim
        if window and head_dim not in HEAD_DIMS:
            cause = f"a window takes head dimensions {list(HEAD_DIMS)}, draft model {name} has {head_dim}"
            raise UserError(cause, "set window to 0", field="drafter.window")
        self.paged = None if own_kv is None else (Summaries.of(self.own, own_kv.page), own_kv)
        self.lookahead: Lookahead | None = None
        if heads:
            shape = (most_drafts, sequences.batch, self.own.cache.capacity_tokens)  # the target's capacity too
            device = sequences.decoder.device
            scores = sequences.lasting(("lookahead", shape), lambda: torch.zeros(shape, device=device))  # [K, B, S]
            self.lookahead = Lookahead(heads, scores)
        scored = (tuple(sorted((heads or {}).items())), most_drafts if heads else 0)
        self.key: Hashable = ("model", name, window, own_kv, *scored)

    def prepare(self, limit: np.ndarray) -> None:
        """See Drafter: feed the tokens of rounds in between that did not draft.

        Where rounds follow each other the host may be a round behind; then nothing is missing, and what it knows of the
        companion's keys is less than there are.
        """
        if not limit.any():
            return
        committed = self.s.committed - 2  # [B] the two last ones are fed by the first step
        apart = self.own.turn != self.s.turn - 1
        if apart and (missing := int((committed - self.own.cache.host_lengths).max())) > 0:
            self._catch_up(committed, missing)
        self.own.cache.host_lengths = np.maximum(self.own.cache.host_lengths, committed)
        self.own.turn = self.s.turn
        if self.paged is not None:
            if apart:
                self._set_final()
            self.paged[0].follow()

    def begin(self, steps: int) -> Draft:
        """See Drafter."""
        width = self.own.cache.width(steps + 2)
        if self.paged is not None:
            self._set_final()
            self.paged[0].update(MOST_COMMITTED)
        return ModelDraft(self.s, self.own, width=width, window=self.window, paged=self.paged, lookahead=self.lookahead)

    def _set_final(self) -> None:
        """Tell the device how many of the companion's keys are final: the first step feeds two tokens again."""
        self.own.cache.lengths.copy_(self.s.cache.lengths - 1)

    def _catch_up(self, ends: np.ndarray, missing: int) -> None:
        """Feed the `missing` committed tokens ahead of ends [B], of every sequence alike: again where it has them.

        A number of rows is a power of two, each being a kernel of its own. Rows past an end are overwritten unread.
        """
        own = self.own
        while missing > 0:
            rows = min(1 << (missing - 1).bit_length(), CATCH_UP_ROWS)
            starts = np.maximum(ends - max(missing, rows), 0)
            tokens = np.zeros((own.batch, rows), dtype=np.int64)
            for b, start in enumerate(starts):
                new = self.s.tokens[b][start : start + rows]
                tokens[b, : len(new)] = new
            own.cache.set_lengths(starts)
            own.forward_block(known(torch.from_numpy(tokens).to(own.decoder.device), own), padded=False, rows=False)
            missing -= rows
        own.cache.set_lengths(ends)


class ModelDraft:
    """Lanes are the sequences of a batch."""

    def __init__(
        self,
        sequences: Sequences,
        own: Sequences,
        *,
        width: int,
        window: int,
        paged: tuple[Summaries, DraftKV] | None,
        lookahead: Lookahead | None,
    ) -> None:
        """width: keys to read of the companion's, with neither window nor pages to choose. lookahead: to leave each
        step's scores in."""
        self.s, self.own, self.width, self.window = sequences, own, width, window
        self.paged, self.lookahead = paged, lookahead

    def step(self, depth: int, tokens: Tensor) -> Proposal:
        """See Draft."""
        s, own = self.s, self.own
        fed = torch.stack([s.before, tokens], dim=1) if depth == 0 else tokens[:, None]  # [B, 2] or [B, 1]
        lengths = s.cache.lengths + (depth if depth else -1)  # [B], of the first one
        ahead = s.cache.lengths + depth  # [B], of the last one
        kept = self.lookahead
        if kept is not None:
            kept.scores[depth].zero_()
        recent = Recent.of(own, fed, lengths, self.window) if self.window else None
        chosen = choosing(own, *self.paged, s.cache.lengths - 1, lengths) if self.paged else None

        def attend(layer: int, q: Tensor) -> Tensor:
            if kept is not None and layer in kept.heads:
                head_scores(
                    q[:, fed.shape[1] - 1 : fed.shape[1]], own.cache.layer(layer)[0], ahead, kept.heads[layer],
                    backend=own.backend, out=kept.scores[depth],
                )  # fmt: skip
            if recent is not None:
                return recent.attend(q, *own.cache.layer(layer))
            if chosen is not None:
                return chosen(layer, q)
            return full_attention(q, *own.cache.view(layer, self.width), lengths, backend=own.backend)[0]

        def attend_unrotated(layer: int, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor | None:
            if recent is None or depth == 0 or (kept is not None and layer in kept.heads):  # scoring heads read q
                return None
            return recent.rotate_and_attend(qkv, *own.cache.layer(layer), cos=cos, sin=sin)

        logits = own.forward_rows(known(fed, own), lengths, attend, attend_unrotated=attend_unrotated)[:, -1]  # [B, V]
        return propose(of_width(logits, s.decoder.config.vocab), s.backend)


@dataclass(frozen=True, slots=True)
class Recent:
    """The first WINDOW_SINK and the last `window` keys of every sequence, and attention over them."""

    indices: Tensor  # [B, Hk, C] int32
    counts: Tensor  # [B]
    lengths: Tensor  # [B]
    backend: Backend
    workspace: SparseWorkspace | None

    @classmethod
    def of(cls, own: Sequences, fed: Tensor, lengths: Tensor, window: int) -> "Recent":
        """fed: tokens [B, T] that come behind lengths [B] keys."""
        slots = torch.arange(WINDOW_SINK + window, device=lengths.device)  # [C]
        skipped = (lengths - window - WINDOW_SINK).clamp(min=0)[:, None]  # [B, 1], between the first and the last
        chosen = torch.where(slots < WINDOW_SINK, slots, slots + skipped).to(torch.int32)  # [B, C]
        c = own.decoder.config
        indices = chosen[:, None].expand(-1, c.kv_heads, -1)
        workspace = None
        if own.backend == "triton":
            workspace = workspace_for((*fed.shape, c.heads, c.head_dim), own.cache.layer(0)[0], indices)
        return cls(indices, lengths.clamp(max=WINDOW_SINK + window), lengths, own.backend, workspace)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of q [B, T, H, D], whose own keys are in the cache already."""
        return sparse_attention(
            q, keys, values, self.indices, self.counts, tail_start=self.lengths, lengths=self.lengths,
            backend=self.backend, workspace=self.workspace,
        )  # fmt: skip

    def rotate_and_attend(self, qkv: Tensor, keys: Tensor, values: Tensor, *, cos: Tensor, sin: Tensor) -> Tensor:
        """The same for one token a sequence, of qkv [B, 1, (H + 2 Hk) D], which is rotated and cached first."""
        return rotate_and_attend(
            qkv, keys, values, self.indices, self.counts, cos=cos, sin=sin, tail_start=self.lengths,
            lengths=self.lengths, backend=self.backend, workspace=self.workspace,
        )  # fmt: skip


def known(tokens: Tensor, own: Sequences) -> Tensor:
    """Tokens as the companion knows them: one past its vocabulary, which only padding can be, becomes its last."""
    return tokens.clamp(max=own.decoder.config.vocab - 1)


def of_width(logits: Tensor, vocab: int) -> Tensor:
    """Logits [B, V] over the target's vocabulary: padding past it is dropped, what is not known is never drafted."""
    common = logits[:, :vocab]
    return common if common.shape[1] == vocab else F.pad(common, (0, vocab - common.shape[1]), value=-torch.inf)
