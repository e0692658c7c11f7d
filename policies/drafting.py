"""What proposes tokens, and which cached keys it reads to do so."""

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from specdial.policies.errors import UserError
from specdial.policies.fields import setting

MOST_KEYS = 1 << 24  # beyond any context
DEFAULT_BUDGET, DEFAULT_WINDOW = 512, 16

# Settings that only some kinds of drafter use; `none` uses and refuses none of draft_kv.
DRAFTER_USES = {
    "weights": ("sparse_self",), "model": ("model", "eagle"), "ngram": ("lookup",), "tree": ("eagle",),
    "window": ("model",), "budget": ("model",),
}  # fmt: skip
WINDOW_SINK = 4  # first keys that a draft model with a window reads besides
OWN_PAGE: Literal[16] = 16  # keys of a page that a draft model with a budget reads; sink and recent are whole ones
OWN_SINK, OWN_RECENT = 16, 64
DRAFT_KV_USES = {
    "budget_frac": ("none", "sparse_self", "quest"),
    "decay": ("none", "sparse_self"),
    "refresh_rounds": ("none", "sparse_self"),
}


@dataclass(frozen=True, slots=True)
class Tree:
    """A tree of drafts instead of a chain, as deep as the controller's k.

    width: drafts kept at each depth to be drafted on, those with the largest products of draft probabilities, and
    drafts that each of them proposes. nodes: of all that were proposed, how many are verified, the best ones.
    """

    width: int = setting(10, low=1, high=64)
    nodes: int = setting(60, low=1, high=512)

    def size(self, depth: int) -> int:
        """Drafts that are verified in a tree of this depth: fewer than `nodes` where fewer are proposed."""
        return min(self.nodes, self.width + (depth - 1) * self.width**2)

    def slots(self, depth: int) -> int:
        """Keys that a round writes behind the committed ones and the pending token's: verified, or drafted on."""
        return max(self.size(depth), (depth - 1) * self.width)

    def check(self, k: int, where: str) -> None:
        """Raises UserError where it has too few drafts to reach depth k."""
        if self.nodes < k:
            raise UserError(
                f"{where}.nodes is {self.nodes}, a tree {k} deep (controller k) needs as many",
                f"use at least {k}, or a smaller k",
                field=f"{where}.nodes",
            )


@dataclass(frozen=True, slots=True)
class Drafter:
    """What proposes tokens.

    sparse_self: the target itself over a selection (SparseSpec-L). quest: the target itself over the pages whose key
    summaries promise each query most (Quest). model: another model. lookup: what followed the last tokens earlier in
    the text (prompt lookup). eagle: an EAGLE-3 head over the target's hidden states.

    weights: sparse_self; fp8 drafts with float8 copies of the weights, verification keeps the model's own, so that it
    stays lossless. model: model; where the drafting model comes from, as `load_model` takes it; eagle: the folder of
    the head. ngram: lookup; the most last tokens that are looked up, tokens. tree: eagle; None drafts a chain.
    window: model; the last keys of its own that it reads, besides the first WINDOW_SINK (StreamingLLM), 0 for all.
    budget: model; instead, so many keys of its own, sink and recent among them, in pages that each step's queries
    choose in every layer (Quest), 0 for all. Scoring heads look at all keys nonetheless.
    """

    kind: Literal["none", "sparse_self", "model", "lookup", "quest", "eagle"] = "sparse_self"
    weights: Literal["model", "fp8"] = setting("model", later=True)
    model: str = setting("", later=True)
    ngram: int = setting(3, low=1, high=16, later=True)
    tree: Tree | None = field(default=None, metadata={"later": True})
    window: int = setting(0, low=0, high=MOST_KEYS, later=True)
    budget: int = setting(0, low=0, high=MOST_KEYS, later=True)

    @property
    def label(self) -> str:
        """Under which cost tables file it: the kind, whose or which weights it drafts with, its own keys or tree."""
        weights = self.model or ("" if self.weights == "model" else self.weights)
        shape = [f"w{self.tree.width}-n{self.tree.nodes}"] if self.tree else []
        shape += [f"{name}{size}" for name, size in (("window", self.window), ("budget", self.budget)) if size]
        return "/".join([part for part in (self.kind, weights) if part] + shape)

    @property
    def own_kv(self) -> "DraftKV | None":
        """What a draft model with a budget reads of its own keys."""
        return DraftKV(budget=self.budget, sink=OWN_SINK, recent=OWN_RECENT, page=OWN_PAGE) if self.budget else None

    @property
    def reads_selection(self) -> bool:
        """Does it read the policy's draft_kv? The others draft without the target's keys."""
        return self.kind in ("sparse_self", "quest")

    @property
    def has_signals(self) -> bool:
        """Does it say how sure each draft is? A controller that looks at signals needs one that does."""
        return self.kind != "lookup"

    @property
    def may_have_none(self) -> bool:
        """May it have fewer drafts than a controller asks for? A round then verifies those it has."""
        return self.kind == "lookup"

    def check(self, where: str = "drafter") -> None:
        """Raises UserError where a setting is given that the kind does not use, or one is missing that it needs."""
        refuse_unused(self, self.kind, DRAFTER_USES, where)
        if self.kind in DRAFTER_USES["model"] and not self.model:
            remedy = "name the drafting model" if self.kind == "model" else "name the folder of an EAGLE-3 head"
            raise UserError(f"{where}.model is missing", remedy, field=f"{where}.model")
        if self.budget and self.window:
            cause = f"{where}.budget is {self.budget} and {where}.window {self.window}"
            raise UserError(cause, "leave one of them 0", field=f"{where}.budget")
        if self.own_kv is not None:
            self.own_kv.check(where)


@dataclass(frozen=True, slots=True)
class DraftKV:
    """The selection a draft reads, per layer: sink ∪ top by score ∪ recent, and every key committed since.

    budget: keys per kv head, sink and recent included. budget_frac: instead of budget, that fraction of the prompt's
    tokens, 0 for budget itself; see `resolved`. window: committed query rows summed into a key's score.
    decay: below 1, instead of the window, a decayed sum over all committed rows: score <- decay * score + row at each.
    refresh_rounds: a selection is chosen anew every so many rounds; 0 once, at prefill, and never again (MagicDec's
    static selections). Keys committed since it was chosen belong to the tail that is always visible.
    scope: kv_head gives every kv head its own selection; layer shares one within a layer; model shares one in all.
    page: keys scored and chosen together, 1 for single keys; sink and recent are rounded up to whole pages.
    """

    budget: int = setting(DEFAULT_BUDGET, low=1, high=MOST_KEYS)
    sink: int = setting(4, low=0, high=MOST_KEYS)
    recent: int = setting(64, low=0, high=MOST_KEYS)
    window: int = setting(DEFAULT_WINDOW, low=1, high=256)
    scope: Literal["kv_head", "layer", "model"] = "kv_head"
    page: Literal[1, 16, 32, 64] = 1
    budget_frac: float = setting(0.0, low=0.0, high=1.0, later=True)
    decay: float = setting(1.0, low=0.0, high=1.0, later=True)
    refresh_rounds: int = setting(1, low=0, high=1 << 16, later=True)

    @property
    def sink_pages(self) -> int:
        return -(-self.sink // self.page)

    @property
    def recent_pages(self) -> int:
        return -(-self.recent // self.page)

    @property
    def protected_tokens(self) -> int:
        """Sink and recent in whole pages: the least a budget can be, keys."""
        return (self.sink_pages + self.recent_pages) * self.page

    def resolved(self, prompt_tokens: int) -> "DraftKV":
        """The same selection with a budget in keys, as it stands when decoding of such a prompt starts.

        budget_frac of the prompt's tokens, rounded up to whole pages, at least sink and recent.
        """
        if self.budget_frac == 0.0:
            return self
        keys = math.ceil(round(self.budget_frac * prompt_tokens, 6))  # 0.1 * 30 is 3.0000000000000004
        budget = max(-(-keys // self.page) * self.page, self.protected_tokens, 1)
        return replace(self, budget=budget, budget_frac=0.0)

    def check(self, where: str = "draft_kv") -> None:
        """Raises UserError where settings contradict each other."""
        self._check_budget(where)
        if self.decay == 0.0:
            raise UserError(f"{where}.decay is 0", "use more than 0", field=f"{where}.decay")
        if self.decay < 1.0 and self.window != DEFAULT_WINDOW:
            raise UserError(
                f"{where}.window is {self.window}, which decay {self.decay:g} does not use",
                f"leave it at {DEFAULT_WINDOW} or set decay to 1",
                field=f"{where}.window",
            )

    def _check_budget(self, where: str) -> None:
        field = f"{where}.budget"
        if self.budget_frac > 0.0:
            if self.budget != DEFAULT_BUDGET:
                raise UserError(
                    f"{field} is {self.budget}, which budget_frac {self.budget_frac:g} does not use",
                    f"leave it at {DEFAULT_BUDGET} or set budget_frac to 0",
                    field=field,
                )
            return
        if self.budget % self.page:
            cause = f"{field} is {self.budget}, not whole pages of {self.page}"
            raise UserError(cause, f"use a multiple of {self.page}", field=field)
        if self.protected_tokens > self.budget:
            raise UserError(
                f"{field} is {self.budget}, smaller than sink + recent = {self.protected_tokens}",
                "raise the budget or lower sink or recent",
                field=field,
            )


def refuse_unused(settings: Drafter | DraftKV, kind: str, uses: Mapping[str, Container[str]], where: str) -> None:
    """Raises UserError where a setting of `uses` is not at its default though the kind of drafter does not use it."""
    for f in fields(settings):
        value = getattr(settings, f.name)
        if value != f.default and kind not in uses.get(f.name, (kind,)):
            raise UserError(
                f"{where}.{f.name} is {value!r}, which drafter {kind} does not use",
                f"leave it at {f.default!r}",
                field=f"{where}.{f.name}",
            )
