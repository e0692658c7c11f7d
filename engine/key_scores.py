"""What cached keys are worth to a partial verification, and which of them it therefore reads (Dustin's selection).

history: the target's attention of the last committed row in its scoring heads, on the full context, or the policy's
windowed history. lookahead: the draft model's attention while it drafted, in its scoring heads. hybrid: sink and
recent, then the first by lookahead, then the rest by history among what is left. Ties go to the lowest index.

Leaves out bounds on pages, which need the queries of the round itself (verification).
"""

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from specdial.engine.drafters.selection import Selection, choose_keys
from specdial.engine.graphs import UNCAPTURED
from specdial.engine.prefill import ROW_MULTIPLE
from specdial.engine.sequences import Sequences
from specdial.kernels.full_attention import full_attention
from specdial.kernels.head_scores import head_scores
from specdial.kernels.selection import pool, select
from specdial.policies.schema import ScoringHeads, VerifyKV

TAKEN = 3e38  # the score of a key that is in already: above any sum of attention


class LastQueries:
    """Queries of the last committed row of every sequence at the target's scoring layers, [B, 1, H, D] each."""

    def __init__(self, sequences: Sequences, heads: ScoringHeads) -> None:
        c, decoder = sequences.decoder.config, sequences.decoder
        self.s, self.heads = sequences, heads.by_layer("target")
        self.key: Hashable = UNCAPTURED if sequences.cache.in_host else heads.target
        shape = (sequences.batch, 1, c.heads, c.head_dim)
        self.queries: dict[int, Tensor] = sequences.lasting(
            ("last queries", heads.target),
            lambda: {layer: torch.zeros(shape, device=decoder.device, dtype=decoder.dtype) for layer in self.heads},
        )
        self._seen: dict[int, Tensor] = {}  # of the pass under way, [B, T, H, D]

    def watch(self) -> Callable[[int, Tensor], None]:
        """To be told of every layer's queries in a pass."""
        self._seen = {}
        return self._look

    def _look(self, layer: int, q: Tensor) -> None:
        if layer in self.heads:
            self._seen[layer] = q

    def keep(self, first_row: Tensor | None, counts: Tensor) -> None:
        """Take the last committed row of the pass: row first_row[b] + counts[b] - 1. [B] each; none first: row 0."""
        last = (counts - 1).clamp(min=0) if first_row is None else first_row + (counts - 1).clamp(min=0)
        for layer, q in self._seen.items():
            found = q.gather(1, last[:, None, None, None].expand(-1, 1, *q.shape[2:]))  # [B, 1, H, D]
            kept = self.queries[layer]
            kept.copy_(torch.where((counts > 0)[:, None, None, None], found, kept))

    def start(self) -> None:
        """Make the queries of the last cached token anew, when decoding starts: a pass. Its keys are rewritten alike.

        A prompt of one token has none cached; what this makes for it is read by no selection.
        """
        s = self.s
        lengths = (s.cache.lengths - 1).clamp(min=0)  # [B]
        rows = 1 if s.cache.on_gpu else ROW_MULTIPLE
        tokens = torch.nn.functional.pad(s.before[:, None], (0, rows - 1))  # [B, rows]
        width = s.cache.width(rows)
        watch = self.watch()

        def attend(layer: int, q: Tensor) -> Tensor:
            watch(layer, q)
            return full_attention(q, *s.cache.view(layer, width), lengths, backend=s.backend)[0]

        s.forward_rows(tokens, lengths, attend)
        self.keep(None, torch.ones_like(lengths))

    def scores(self) -> Tensor:
        """Softmax attention of the last committed rows in all scoring heads, added up: [B, S] float32."""
        s = self.s
        found = torch.zeros(s.batch, s.cache.capacity_tokens, device=s.decoder.device)  # [B, S]
        before = (s.cache.lengths - 1).clamp(min=0)  # [B] keys ahead of the row
        for layer, heads in self.heads.items():
            head_scores(self.queries[layer], s.cache.k[layer], before, heads, backend=s.backend, out=found)
        return found


class Chooser:
    """The selection of one partial verification for all layers, from what is known before it runs: a pass."""

    def __init__(
        self, sequences: Sequences, verify_kv: VerifyKV, *, lookahead: Tensor | None, queries: LastQueries | None
    ) -> None:
        """lookahead: [K, B, S], scores by draft step; queries: of the target's scoring heads, if history is theirs.

        Raises ValueError where the source has nothing to score by.
        """
        self.s, self.kv, self.lookahead, self.queries = sequences, verify_kv, lookahead, queries
        if verify_kv.source in ("lookahead", "hybrid") and lookahead is None:
            raise ValueError(f"source {verify_kv.source} needs a draft model with scoring heads")
        if verify_kv.source in ("history", "hybrid") and queries is None and sequences.history is None:
            raise ValueError(f"source {verify_kv.source} needs sequences with history, or scoring heads")

    def __call__(self, k: Tensor) -> Selection:
        """k: [B], drafts of the round that count."""
        s, kv = self.s, self.kv
        lengths = s.cache.lengths
        if kv.source == "recent":
            return self._for_all(*recent_keys(lengths, kv.sink, kv.recent, s.cache.capacity_tokens))
        if kv.source == "history" and self.queries is None and s.history is not None:
            return choose_keys(s.history, lengths, kv.keys)
        if kv.source == "history":
            return self._for_all(*self._best(self._history(), kv.budget))
        if kv.source == "lookahead":
            return self._for_all(*self._best(self._lookahead(k), kv.budget))
        history = self._history()
        if kv.lookahead_tokens:
            first, _ = self._best(self._lookahead(k), kv.sink + kv.recent + kv.lookahead_tokens)
            history = history.scatter(1, first[:, 0].to(torch.int64), TAKEN)
        return self._for_all(*self._best(history, kv.budget))

    def _history(self) -> Tensor:
        """[B, S]; windowed history is added up over layers and kv heads."""
        if self.queries is not None:
            return self.queries.scores()
        if self.s.history is None:
            raise ValueError("no history is kept")
        return pool(self.s.history.scores(), "model")[0, :, 0]

    def _lookahead(self, k: Tensor) -> Tensor:
        """[B, S]: added up over the drafts that count."""
        if self.lookahead is None:
            raise ValueError("no draft model keeps scores")
        counts = torch.arange(self.lookahead.shape[0], device=k.device)[:, None] < k  # [K, B]
        return (self.lookahead * counts[..., None]).sum(dim=0)

    def _best(self, scores: Tensor, budget: int) -> tuple[Tensor, Tensor]:
        """Sink, recent and the highest of scores [B, S]: indices [B, 1, C] and counts [B]."""
        kv, S = self.kv, scores.shape[1]
        return select(
            scores[:, None], self.s.cache.lengths, budget=max(min(budget, S), kv.sink + kv.recent), sink=kv.sink,
            recent=kv.recent, backend=self.s.backend,
        )  # fmt: skip

    def _for_all(self, indices: Tensor, counts: Tensor) -> Selection:
        """One selection [B, 1, C] for every layer and kv head."""
        c = self.s.decoder.config
        shared = indices[None].expand(c.layers, -1, c.kv_heads, -1)  # [L, B, Hk, C]
        return Selection(shared, counts, self.s.cache.lengths.clone(), 1)


def recent_keys(lengths: Tensor, sink: int, recent: int, capacity: int) -> tuple[Tensor, Tensor]:
    """The first and the last of lengths [B] keys: indices [B, 1, C] int32, ascending, and counts [B] int32."""
    width = min(sink + recent, capacity)
    slot = torch.arange(width, device=lengths.device)  # [C]
    last = (lengths[:, None] - width).clamp(min=0)  # [B, 1]
    indices = torch.where(slot < sink, slot, slot + last)  # [B, C]
    return indices[:, None].to(torch.int32), lengths.clamp(max=width).to(torch.int32)
