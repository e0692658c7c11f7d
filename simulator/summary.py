"""From tallied rounds and price tables to a policy's numbers."""

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from specdial.policies.schema import Policy
from specdial.simulator.costs import CostModel
from specdial.simulator.fidelity import Fidelity, Model, predict
from specdial.simulator.lanes import Documents
from specdial.simulator.outcome import Outcome
from specdial.simulator.pricing import (
    DRAFT,
    REFRESH,
    TERMS,
    VERIFY,
    VERIFY_PARTIAL,
    PriceTable,
    RefreshTable,
    Setting,
    depends_on_document,
    tabulate,
    tabulate_refresh,
)
from specdial.simulator.tally import Tally, Units

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Priced:
    """Units that share a setting and a size, in full or in partial rounds of one variant. mine: [units].

    refresh: what full rounds recompute, None for a lossless policy and for partial rounds.
    """

    mine: Bools
    size: int
    variant: int
    setting: Setting
    table: PriceTable
    refresh: RefreshTable | None


Tables = list[Priced]  # every unit is in one entry of every variant, and in one of its partial rounds if it has any


@dataclass(frozen=True, slots=True)
class Frame:
    """What all policies of one replay share. base_us: [units] plain decoding, None when plain steps have no cost.

    base_tokens: what plain decoding emits in that time.
    kv_bytes_per_token: bytes of keys and values that one cached token holds, all layers.
    prompt_tokens, output_tokens: [units] the longest prompt, of which a batch's budget is a fraction; the mean output.
    rows: numbers of recomputed rows that corrections are binned by. fidelity: what probes say of partial verification.
    """

    documents: Documents
    units: Units
    base_us: Floats | None
    base_tokens: int
    kv_bytes_per_token: float
    prompt_tokens: Ints
    output_tokens: Ints
    rows: Floats
    fidelity: Model | None = None


@dataclass(frozen=True, slots=True)
class Known:
    """Price tables made so far, by setting and batch size."""

    rounds: dict[tuple[Setting, int], PriceTable] = field(default_factory=dict)
    refreshes: dict[tuple[Setting, int], RefreshTable] = field(default_factory=dict)


def price_tables(policy: Policy, costs: CostModel, frame: Frame, knots: Floats, known: Known) -> Tables:
    """Price tables of every variant. known: is added to."""
    kinds = np.zeros((len(frame.units.first), 3), np.int64)  # [units]: size, prompt, output
    kinds[:, 0] = frame.units.sizes
    if depends_on_document(policy):
        kinds[:, 1], kinds[:, 2] = frame.prompt_tokens, frame.output_tokens
    found: Tables = []
    for v, variant in enumerate(policy.variants()):
        for partial in (False,) if variant.verify_kv.lossless else (False, True):
            entries: dict[tuple[Setting, int], Priced] = {}
            for size, prompt_tokens, output_tokens in sorted(set(map(tuple, kinds.tolist()))):
                mine = (kinds == (size, prompt_tokens, output_tokens)).all(axis=1)
                key = Setting.of(policy, variant, prompt_tokens, output_tokens, partial=partial), size
                if key not in known.rounds:
                    known.rounds[key] = tabulate(costs, key[0], size, knots)
                corrects = bool(key[0].source) and not partial
                if corrects and key not in known.refreshes:
                    known.refreshes[key] = tabulate_refresh(costs, key[0], size, knots, frame.rows)
                mine = mine | entries[key].mine if key in entries else mine
                refresh = known.refreshes[key] if corrects else None
                entries[key] = Priced(mine, size, v, key[0], known.rounds[key], refresh)
            found += entries.values()
    return found


def summarise(
    outcome: Outcome, found: Tally, place: int, tables: Tables, frame: Frame, *, own_us: Floats | None = None
) -> Outcome:
    """Fill in the numbers of the policy at `place` of the tally; own_us: [units, terms] its recorded time, if any.

    A policy that had rounds without a price is refused, unless its time was recorded.
    """
    if found.missing[place]:
        reason = "it drafts where the trace recorded nothing: record with dense=true"
        return replace(outcome, level="refused", reason=reason)
    n_units = len(frame.units.first)
    counts, refreshes = found.counts_of(place), found.refreshes_of(place)  # [units, settings, k, knots] each
    terms, extrapolated, kv_tokens = np.zeros((n_units, len(TERMS))), 0.0, 0.0
    for priced in tables:
        table, setting = priced.table, priced.setting
        ks = table.cost_us.shape[1]
        binned = counts[priced.mine, found.setting_of(priced.variant, partial=setting.partial), :ks]
        if own_us is None and (binned.sum(axis=0) * table.refused).any():
            return replace(outcome, level="refused", reason=table.reason)
        terms[priced.mine] += np.einsum("ukc,tkc->ut", binned, table.cost_us)
        extrapolated += float(np.einsum("ukc,tkc->", binned, table.extrapolated_us))
        if priced.refresh is not None and refreshes is not None and refreshes[priced.mine, priced.variant].any():
            if own_us is None and priced.refresh.reason is not None:
                return replace(outcome, level="refused", reason=priced.refresh.reason)
            corrected = refreshes[priced.mine, priced.variant] * priced.refresh.cost_us  # [units, rows, knots]
            terms[priced.mine, REFRESH] += corrected.sum(axis=(1, 2))
            extrapolated += float((corrected * priced.refresh.extrapolated).sum())
        drafting = np.arange(ks)[:, None] * setting.draft_kv_tokens(found.bins.knots)
        read = drafting + setting.verify_kv_tokens(found.bins.knots)
        kv_tokens += priced.size * float((binned.sum(axis=0) * read).sum())
    filled = replace(
        outcome,
        documents=tuple(frame.documents.doc.tolist()),
        tokens=int(found.emitted[place]),
        rounds=int(found.rounds[place]),
        tokens_per_round=float(found.emitted[place] / found.rounds[place]),
        alpha=float(found.accepted[place] / found.drafted[place]) if found.drafted[place] else None,
        k=float(found.drafted[place] / found.rounds[place]),
        kv_bytes_per_token=kv_tokens * frame.kv_bytes_per_token / int(found.emitted[place]),
        extrapolated_frac=extrapolated / float(terms.sum()) if own_us is None and terms.sum() > 0.0 else 0.0,
        fidelity=_fidelity(outcome.policy, found, place, frame),
    )
    return _with_time(filled, terms if own_us is None else own_us, counts, frame)


def _fidelity(policy: Policy, found: Tally, place: int, frame: Frame) -> Fidelity | None:
    if policy.lossless or frame.fidelity is None or found.lossy is None:
        return None
    return predict(frame.fidelity, policy, found.lossy.emitted[place])


def _with_time(outcome: Outcome, terms_us: Floats, counts: Floats, frame: Frame) -> Outcome:
    """Set everything that follows from the time of each unit by term, [units, terms]."""
    unit_us = terms_us.sum(axis=1)
    total = terms_us.sum(axis=0)
    by_k = counts.sum(axis=(0, 1, 3))
    round_drafts, batches = float((by_k * np.arange(len(by_k))).sum()), float(by_k.sum())
    verifying = float(total[VERIFY] + total[VERIFY_PARTIAL])
    drafting = round_drafts > 0.0 and verifying > 0.0
    base = frame.base_us
    us_per_token = float(unit_us.sum() / outcome.tokens)
    base_us_per_token = None if base is None else float(base.sum() / frame.base_tokens)
    return replace(
        outcome,
        gamma=float(total[DRAFT] / round_drafts / (verifying / batches)) if drafting else None,
        us_per_token=us_per_token,
        breakdown={term: float(value / outcome.tokens) for term, value in zip(TERMS, total, strict=True)},
        baseline_us_per_token=base_us_per_token,
        speedup=None if base_us_per_token is None or not us_per_token > 0.0 else base_us_per_token / us_per_token,
        unit_us=unit_us,
    )
