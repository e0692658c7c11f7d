"""How drafts are verified: over every key, or over a selection that some rounds correct, and the heads that score keys.

Leaves out what a selection scores when it runs (engine), and whether a model has the heads (also there).
"""

from dataclasses import dataclass, fields
from typing import Literal

from specdial.policies.drafting import MOST_KEYS, Drafter, DraftKV
from specdial.policies.errors import UserError
from specdial.policies.fields import setting

# Settings that only some sources use; mode full uses none of them.
SOURCE_USES = {
    "budget": ("history", "lookahead", "hybrid", "page_bound"),
    "scope": ("history", "lookahead", "hybrid", "page_bound"),
    "page": ("history", "page_bound"),
    "bound": ("page_bound",),
    "rows": ("page_bound",),
    "lookahead_tokens": ("hybrid",),
}
LOOKAHEAD = ("lookahead", "hybrid")


@dataclass(frozen=True, slots=True)
class VerifyKV:
    """Which cached keys a verification reads: all of them, or sink ∪ chosen ∪ recent and the tokens of the round.

    mode: full reads every key, which is lossless. full_period: in mode partial, every so many rounds one is verified in
    full, and what was committed since the last full one is recomputed over the whole context; its decisions are kept. 1
    verifies every round in full, 0 none.
    source: what a key is worth. history: the target's own attention, of the last committed row in the policy's target
    scoring heads, or without such heads summed over the rows that are kept anyway (draft_kv.window). lookahead: the
    attention of the draft model's steps in its scoring heads. hybrid: lookahead_tokens keys by lookahead, the rest by
    history. page_bound: what the round's own queries can score in a page, of which only the elementwise smallest and
    largest key are known. recent: nothing but sink and recent.
    bound: of page_bound; quest adds up max(q_d smallest_d, q_d largest_d) over dimensions, which no key exceeds; specpv
    is the larger of q's products with the two. rows: what becomes of the bounds of a round's rows, their mean, their
    largest, or the last one's.
    budget: keys per kv head, sink and recent included. scope: who shares a selection; scoring heads make one for all.
    page: keys chosen together; sink and recent are rounded up to whole pages.
    refresh: when keys are chosen anew. round: in every partial round. full: in the first one after a full round, to be
    kept until the next full round beside every key committed since (SpecPV's partial cache).
    buffer: most tokens that partial rounds may commit before one is verified in full, full period or not; a round that
    could exceed it is full. A sequence that the budget holds whole is then verified in full too, at no more cost. 0:
    the full period alone decides.
    """

    mode: Literal["full", "partial"] = "full"
    full_period: int = setting(1, low=0, high=1 << 16)
    source: Literal["history", "lookahead", "hybrid", "page_bound", "recent"] = setting("history", later=True)
    budget: int = setting(512, low=1, high=MOST_KEYS, later=True)
    sink: int = setting(4, low=0, high=MOST_KEYS, later=True)
    recent: int = setting(16, low=0, high=MOST_KEYS, later=True)
    scope: Literal["kv_head", "layer", "model"] = setting("kv_head", later=True)
    lookahead_tokens: int = setting(0, low=0, high=MOST_KEYS, later=True)
    page: Literal[1, 16, 32, 64] = setting(1, later=True)
    refresh: Literal["round", "full"] = setting("round", later=True)
    bound: Literal["quest", "specpv"] = setting("quest", later=True)
    rows: Literal["mean", "max", "last"] = setting("mean", later=True)
    buffer: int = setting(0, low=0, high=MOST_KEYS, later=True)

    @property
    def lossless(self) -> bool:
        """Is every round verified in full?"""
        return self.mode == "full" or self.full_period == 1

    @property
    def keys(self) -> DraftKV:
        """The same selection as what chooses keys takes it."""
        budget = self.sink + self.recent if self.source == "recent" else self.budget
        return DraftKV(budget=budget, sink=self.sink, recent=self.recent, scope=self.scope, page=self.page)

    def overflows(self, uncorrected_tokens: int, most_tokens: int) -> bool:
        """Could a partial round, which commits at most `most_tokens`, exceed the buffer?"""
        return self.buffer > 0 and uncorrected_tokens + most_tokens > self.buffer

    def holds(self, committed_tokens: int) -> bool:
        """Is a sequence verified in full because the budget holds it whole?"""
        return self.buffer > 0 and committed_tokens <= self.keys.budget

    def most_uncorrected(self, k: int) -> int:
        """Most tokens that partial rounds of k drafts commit between two full ones; there must be full ones."""
        by_period = max(self.full_period - 1, 0) * (k + 1)
        return min(by_period, self.buffer) if self.buffer else by_period

    def check(self, where: str = "verify_kv") -> None:
        """Raises UserError where settings contradict each other or are not used."""
        for f in fields(self):
            value, used = getattr(self, f.name), SOURCE_USES.get(f.name, (self.source,))
            if f.name == "mode" or value == f.default or (self.mode == "partial" and self.source in used):
                continue
            unused_by = "mode full" if self.mode == "full" else f"source {self.source}"
            raise UserError(
                f"{where}.{f.name} is {value!r}, which {unused_by} does not use",
                f"leave it at {f.default!r}",
                field=f"{where}.{f.name}",
            )
        if self.mode == "partial":
            self._check_numbers(where)

    def _check_numbers(self, where: str) -> None:
        keys = self.keys
        if keys.budget < 1:
            raise UserError(f"{where}.recent is 0, and so is sink", "let it read some key", field=f"{where}.recent")
        keys.check(where)
        room = keys.budget - self.sink - self.recent
        if self.lookahead_tokens > room:
            raise UserError(
                f"{where}.lookahead_tokens is {self.lookahead_tokens}, sink and recent leave {room} of the budget",
                f"use at most {room}",
                field=f"{where}.lookahead_tokens",
            )
        if self.source in LOOKAHEAD and self.scope != "model":
            raise UserError(
                f"{where}.scope is {self.scope!r}, source {self.source} makes one selection for all layers and heads",
                "use model",
                field=f"{where}.scope",
            )
        if self.buffer and self.full_period == 0:
            raise UserError(
                f"{where}.buffer is {self.buffer}, and full_period 0 never corrects what partial rounds leave",
                "give a full period, the longest that is wanted",
                field=f"{where}.buffer",
            )
        if self.source == "page_bound" and (self.page == 1 or self.scope == "model"):
            name, value = ("page", self.page) if self.page == 1 else ("scope", self.scope)
            remedy = "use 16, 32 or 64" if name == "page" else "use kv_head or layer"
            cause = f"{where}.{name} is {value!r}, source page_bound chooses whole pages layer by layer"
            raise UserError(cause, remedy, field=f"{where}.{name}")


@dataclass(frozen=True, slots=True)
class ScoringHeads:
    """Query heads whose attention scores keys, as (layer, head): of the target for history, of the draft model for
    lookahead."""

    target: tuple[tuple[int, ...], ...] = ()
    draft: tuple[tuple[int, ...], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.target or self.draft)

    def by_layer(self, whose: Literal["target", "draft"]) -> dict[int, tuple[int, ...]]:
        """Heads of each layer that has some, both ascending."""
        layers: dict[int, list[int]] = {}
        for layer, head in sorted(getattr(self, whose)):
            layers.setdefault(layer, []).append(head)
        return {layer: tuple(heads) for layer, heads in layers.items()}

    def check(self, where: str = "scoring_heads") -> None:
        """Raises UserError on what is not a pair of numbers, or is given twice."""
        for whose in ("target", "draft"):
            pairs = getattr(self, whose)
            for i, pair in enumerate(pairs):
                field = f"{where}.{whose}[{i}]"
                if len(pair) != 2 or min(pair) < 0:
                    raise UserError(f"{field} is {list(pair)}", "write it as [layer, head], from 0", field=field)
                if pair in pairs[:i]:
                    raise UserError(f"{field} is {list(pair)}, given before", "give each head once", field=field)

    def check_model(self, whose: Literal["target", "draft"], model: str, *, layers: int, heads: int) -> None:
        """Raises UserError on a head that a model of this many layers and query heads does not have."""
        for i, (layer, head) in enumerate(getattr(self, whose)):
            if layer >= layers or head >= heads:
                raise UserError(
                    f"scoring_heads.{whose}[{i}] is [{layer}, {head}], {model} has {layers} layers of {heads} heads",
                    "name heads of this model",
                    field=f"scoring_heads.{whose}[{i}]",
                )


NO_HEADS = ScoringHeads()


def check_variant(verify_kv: VerifyKV, heads: ScoringHeads, drafter: Drafter, draft_kv: DraftKV, prefix: str) -> None:
    """Raises UserError where one variant's verification does not go with the rest of its policy."""
    if verify_kv.mode == "full":
        return
    where = f"{prefix}verify_kv"
    if verify_kv.source in LOOKAHEAD and (drafter.kind != "model" or not heads.draft):
        what = f"drafter {drafter.kind} has none" if drafter.kind != "model" else "scoring_heads.draft is empty"
        raise UserError(
            f"{where}.source is {verify_kv.source!r}, which reads a draft model's scoring heads: {what}",
            "use drafter model and name heads of it",
            field=f"{where}.source",
        )
    if verify_kv.source == "history" and heads.target:
        for name, needed in (("scope", "model"), ("page", 1)):
            value = getattr(verify_kv, name)
            if value != needed:
                raise UserError(
                    f"{where}.{name} is {value!r}, history by scoring heads makes one selection of single keys",
                    f"use {needed}",
                    field=f"{where}.{name}",
                )
    if draft_kv.decay < 1.0 and verify_kv.full_period != 1:
        raise UserError(
            f"{prefix}draft_kv.decay is {draft_kv.decay:g}, partial verification needs history by window",
            "set decay to 1",
            field=f"{prefix}draft_kv.decay",
        )


def check_variants(variants: tuple[tuple[VerifyKV, int], ...], heads: ScoringHeads, prefix: str) -> None:
    """What holds for all cells together. variants: each one's verification, and most drafts of a round.

    Raises UserError on heads that no cell uses, on partial verification of a policy that never drafts, or that is
    corrected in some cells only, on lookahead in a cell that drafts nothing, and on a buffer that not even one round
    fits.
    """
    partial = [v for v, _ in variants if v.mode == "partial"]
    most = max(k for _, k in variants) + 1
    for kv in partial:
        if kv.overflows(0, most):
            raise UserError(
                f"{prefix}verify_kv.buffer is {kv.buffer}, a round commits up to {most} tokens",
                f"use at least {most}, or mode full",
                field=f"{prefix}verify_kv.buffer",
            )
    for whose, sources in (("target", ("history", "hybrid")), ("draft", LOOKAHEAD)):
        if getattr(heads, whose) and not any(v.source in sources for v in partial):
            field = f"{prefix}scoring_heads.{whose}"
            raise UserError(
                f"{field} is given, and no verification scores keys by it",
                f"use mode partial with source {' or '.join(sources)}, or name no heads",
                field=field,
            )
    if partial and not any(k for _, k in variants):
        raise UserError(
            f"{prefix}verify_kv.mode is 'partial', and the policy drafts nothing",
            "use a controller that drafts, or mode full",
            field=f"{prefix}verify_kv.mode",
        )
    if any(v.mode == "partial" and v.source in LOOKAHEAD and k == 0 for v, k in variants):
        raise UserError(
            f"{prefix}cells has one that drafts nothing, and its verify_kv.source chooses keys by what is drafted",
            "set verify_kv.mode full in its overrides",
            field=f"{prefix}cells",
        )
    if {v.full_period == 0 for v in partial} == {True, False}:
        raise UserError(
            f"{prefix}verify_kv.full_period is 0 in some cells and not in others",
            "correct what is committed in all of them or in none",
            field=f"{prefix}verify_kv.full_period",
        )
