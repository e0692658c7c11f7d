"""Turns rounds into time: costs tabulated over (k, context) once, rounds binned into that table, time = bins . table.

Costs are piecewise linear in context between the measured contexts, so splitting each round between its two
neighbouring knots loses nothing, and pricing a million rounds is one bincount. A budget that is a fraction of the
prompt gives every unit of documents a setting of its own. The bins are by unit, so each is priced at its own prompt, or
at the longest where documents decode as a batch, as the engine takes it. Rounds that verify partially have settings of
their own; what full rounds recompute after them is binned and priced by rows. A round that is one captured pass drafts
its k to the end, also where the output ends before. Leaves out where rounds come from.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specdial.engine.trace.sources import policy_source
from specdial.policies.schema import Policy, VerifyKV
from specdial.simulator.costs import CostModel, CostRefusedError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
TERMS = ("draft", "verify", "select", "host", "plain", "verify_partial", "refresh", "transfer")
DRAFT, VERIFY, SELECT, HOST, PLAIN, VERIFY_PARTIAL, REFRESH, TRANSFER = range(len(TERMS))


@dataclass(frozen=True, slots=True)
class Setting:
    """What a round's cost depends on besides k and context. plain: the policy never drafts, a round is a plain step.

    drafter: its label in cost tables. budget: keys of the selection, 0 for a drafter that reads none. refresh_rounds:
    rounds that one selection serves, 0 for one chosen at prefill, which no round pays for. tail_tokens: keys read
    beside it because they were committed since: half the output where it was chosen at prefill, their mean over the
    rounds, else taken as none. page: keys that share a summary (quest), else 0. controller, lag: of one that looks
    at signals, "" and None of one that does not. whole_k: drafts of a round that is one pass where passes are
    captured, None where each draft is a pass of its own, or known before.
    source: the label of a lossy policy's partial verification, "" for a lossless policy. verified_keys: keys that this
    variant's partial rounds verify over, those committed since a kept selection was chosen taken as none. partial: of
    those rounds, not of its full ones. choosing_frac: of them, those that choose keys. hosted: keys are in host memory.
    """

    plain: bool
    k_max: int
    drafter: str = "none"
    budget: int = 0
    refresh_rounds: int = 1
    tail_tokens: int = 0
    page: int = 0
    controller: str = ""
    lag: int | None = None
    whole_k: int | None = None
    source: str = ""
    verified_keys: int = 0
    partial: bool = False
    choosing_frac: float = 1.0
    hosted: bool = False

    @classmethod
    def of(
        cls, policy: Policy, variant: Policy, prompt_tokens: int, output_tokens: int = 0, *, partial: bool = False
    ) -> "Setting":
        """The setting of one variant (cell) of a policy, or of its partial rounds, for documents of so many tokens."""
        if policy.k_max == 0:
            return cls(plain=True, k_max=0)
        drafter, kv = variant.drafter, variant.draft_kv.resolved(prompt_tokens)
        if drafter.kind == "none":  # a cell that does not draft verifies as the rest of its policy does
            drafter = next(v.drafter for v in policy.variants() if v.k_max > 0)
        reads = drafter.reads_selection
        lag = getattr(variant.controller, "lag", None)
        return cls(
            plain=False,
            k_max=policy.k_max,
            drafter=drafter.label,
            budget=kv.budget if reads else 0,
            refresh_rounds=kv.refresh_rounds if reads else 1,
            tail_tokens=output_tokens // 2 if reads and kv.refresh_rounds == 0 else 0,
            page=kv.page if drafter.kind == "quest" else 0,
            controller=variant.controller.kind if lag is not None else "",
            lag=lag,
            whole_k=variant.k_max if variant.drafts_whole else None,
            source=policy_source(policy),
            verified_keys=variant.verify_kv.keys.budget if partial else 0,
            partial=partial,
            choosing_frac=_choosing_frac(variant.verify_kv) if partial else 1.0,
            hosted=policy.kv.where == "host",
        )

    def draft_keys(self, context_tokens: Floats) -> Floats:
        """Keys that a draft token reads at each context."""
        return np.minimum(self.budget + self.tail_tokens, context_tokens)

    def draft_kv_tokens(self, context_tokens: Floats) -> Floats:
        """The same as cached tokens of keys and values; a page's summary is a smallest and a largest key, one token."""
        return self.draft_keys(context_tokens) + (context_tokens / self.page if self.page else 0.0)

    def verify_kv_tokens(self, context_tokens: Floats) -> Floats:
        """Cached tokens of keys and values that a verification reads at each context."""
        return np.minimum(self.verified_keys, context_tokens) if self.partial else context_tokens


def _choosing_frac(verify_kv: VerifyKV) -> float:
    """Of a variant's partial rounds, those that choose keys: the first of every period where they are kept."""
    if verify_kv.refresh == "round":
        return 1.0
    return 1.0 / (verify_kv.full_period - 1) if verify_kv.full_period > 1 else 0.0


def depends_on_document(policy: Policy) -> bool:
    """Does the cost of a round depend on how long the prompt was, or how long the output is?"""
    return any(v.draft_kv.budget_frac > 0.0 or v.draft_kv.refresh_rounds == 0 for v in policy.variants())


@dataclass(frozen=True, slots=True)
class PriceTable:
    """Microseconds of a round, and the part of it that was extrapolated: [terms, k, knots].

    refused: [k, knots] rounds that the measurements say nothing about, and why the first of them.
    """

    cost_us: Floats
    extrapolated_us: Floats
    refused: npt.NDArray[np.bool_]
    reason: str | None


@dataclass(frozen=True, slots=True)
class RefreshTable:
    """Microseconds that a full round recomputing rows takes beyond one that recomputes none: [rows, knots].

    extrapolated: [rows, knots] outside the measurements; reason: why some are refused, None where all are known.
    """

    cost_us: Floats
    extrapolated: npt.NDArray[np.bool_]
    reason: str | None


def knots_for(costs: CostModel, low_tokens: float, high_tokens: float) -> Floats:
    """Contexts at which to tabulate: the measured ones in between and the ends of the wanted range."""
    inner = [c for c in costs.contexts() if low_tokens < c < high_tokens]
    return np.array(sorted({float(low_tokens), *inner, float(high_tokens)}))


def tabulate(costs: CostModel, setting: Setting, batch: int, knots: Floats) -> PriceTable:
    """Price every (k, knot) of a setting; what the measurements do not reach is marked, not raised."""
    shape = (len(TERMS), setting.k_max + 1, len(knots))
    cost_us, extrapolated_us = np.zeros(shape), np.zeros(shape)
    refused, reason = np.zeros(shape[1:], np.bool_), None
    for k in range(setting.k_max + 1):
        drafted = setting.whole_k if setting.whole_k is not None and costs.captured else k
        for i, context in enumerate(knots.tolist()):
            for term, op, times, op_k, budget in _round(setting, drafted):
                if not times:
                    continue
                if drafted and setting.lag is not None:
                    op = costs.watched(op, setting.controller, setting.lag, setting.drafter, setting.source)
                try:
                    value, extra = costs.at(op, context, batch, op_k, budget, setting.drafter, source=setting.source)
                except CostRefusedError as error:
                    refused[k, i], reason = True, reason or str(error)
                    continue
                cost_us[term, k, i] += times * value
                extrapolated_us[term, k, i] += times * value * extra
    return PriceTable(cost_us, extrapolated_us, refused, reason)


def rows_for(costs: CostModel, most: int) -> Floats:
    """Numbers of recomputed rows at which to tabulate: none, the measured ones and the most there can be."""
    return np.array(sorted({0.0, *(rows for rows in costs.refresh_rows() if rows < most), float(most)}))


def tabulate_refresh(costs: CostModel, setting: Setting, batch: int, knots: Floats, rows: Floats) -> RefreshTable:
    """Price every (rows, knot) of what a lossy policy's full rounds recompute; nothing is recomputed for nothing.

    In front of the rows of as many drafts as the setting has: in these measurements the place of a budget.
    """
    drafts = setting.k_max if setting.whole_k is None else setting.whole_k
    shape = len(rows), len(knots)
    cost_us, extrapolated, reason = np.zeros(shape), np.zeros(shape, np.bool_), None
    for r, wanted in enumerate(rows.tolist()):
        for i, context in enumerate(knots.tolist() if wanted else ()):
            try:
                cost_us[r, i], extrapolated[r, i] = costs.at(
                    "refresh", context, batch, round(wanted), drafts, setting.drafter, source=setting.source
                )
            except CostRefusedError as error:
                reason = reason or str(error)
    return RefreshTable(cost_us, extrapolated, reason)


def plain_time_us(costs: CostModel, start: Ints, end: Ints, *, full: bool = False) -> tuple[float, int]:
    """(us, tokens) of plain decoding of one batch, start and end [members], until its last member ends.

    A step lasts as one at the mean context; members that have ended keep their place. full: as if it was kept full, see
    `tally`. Raises CostRefusedError when plain steps were not measured there.
    """
    steps = np.arange(int((end - start).max()))
    decoding = (steps < (end - start)[:, None]).mean(axis=0)  # [steps]
    context = np.minimum(start[:, None] + steps, end[:, None]).mean(axis=0)  # [steps]
    knots = knots_for(costs, float(context[0]), float(context[-1]))
    values = [costs.at("plain", float(c), len(start))[0] for c in knots]
    weight = np.where(decoding >= 0.5, decoding, 0.0) if full else np.ones(len(steps))
    tokens = round(float(decoding[weight > 0.0].sum()) * len(start))
    return float((weight * np.interp(context, knots, values)).sum()), tokens


@dataclass(frozen=True, slots=True)
class Bins:
    """Rounds counted by (unit, setting, k, knot), a round between two knots split in proportion."""

    counts: Floats  # [units, settings, k, knots]
    knots: Floats

    @classmethod
    def empty(cls, units: int, settings: int, k_max: int, knots: Floats) -> "Bins":
        return cls(np.zeros((units, settings, k_max + 1, len(knots))), knots)

    def add(self, unit: Ints, setting: Ints, k: Ints, context_tokens: Floats, weight: Floats) -> None:
        """Count rounds, all arguments [n]. weight: how often each counts."""
        _, settings, ks, width = self.counts.shape
        base = ((unit * settings + setting) * ks + k) * width
        flat = self.counts.reshape(-1)
        if width == 1:
            flat += np.bincount(base, weights=weight, minlength=flat.size)
            return
        upper = np.clip(np.searchsorted(self.knots, context_tokens), 1, width - 1)
        share = weight * (context_tokens - self.knots[upper - 1]) / (self.knots[upper] - self.knots[upper - 1])
        flat += np.bincount(base + upper, weights=share, minlength=flat.size)
        flat += np.bincount(base + upper - 1, weights=weight - share, minlength=flat.size)

    def add_rows(
        self, unit: Ints, setting: Ints, rows: Floats, context_tokens: Floats, grid: Floats, weight: Floats
    ) -> None:
        """Count rounds by recomputed rows, of which `grid` are the bins in place of k; split between neighbours."""
        upper = np.clip(np.searchsorted(grid, rows), 1, len(grid) - 1)
        share = weight * (rows - grid[upper - 1]) / (grid[upper] - grid[upper - 1])
        self.add(unit, setting, upper, context_tokens, share)
        self.add(unit, setting, upper - 1, context_tokens, weight - share)


def _round(setting: Setting, k: int) -> tuple[tuple[int, str, float, int, int], ...]:
    """(place in TERMS, operation, how often, its k, its budget) of what a round is made of."""
    if setting.plain:
        return ((PLAIN, "plain", 1, 0, 0),)
    selects = 1.0 / setting.refresh_rounds if setting.refresh_rounds and k else 0.0
    drafting = (
        (DRAFT, "draft", k, k, setting.budget + setting.tail_tokens),
        (SELECT, "select", selects, k, setting.budget),
    )
    if not setting.partial:
        moved = (TRANSFER, "transfer", float(setting.hosted), 0, 0)
        return (*drafting, (VERIFY, "verify", 1, k, 0), (HOST, "host", 1, k, 0), moved)
    keys = setting.verified_keys
    return (
        *drafting,
        (SELECT, "select_partial", setting.choosing_frac, 0, keys),
        (VERIFY_PARTIAL, "verify_partial", 1, k, keys),
        (HOST, "host_partial", 1, k, 0),
    )
