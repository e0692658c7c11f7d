"""From tallied rounds and price tables to a policy's numbers."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from specdial.simulator.lanes import Documents
from specdial.simulator.outcome import Outcome
from specdial.simulator.pricing import TERMS, PriceTable
from specdial.simulator.tally import Tally, Units

Floats = npt.NDArray[np.float64]
Tables = dict[tuple[int, int], PriceTable]  # by (variant, batch size)


@dataclass(frozen=True, slots=True)
class Frame:
    """What all policies of one replay share. base_us: [units] plain decoding, None when plain steps have no cost.

    kv_bytes_per_token: bytes of keys and values that one cached token holds, all layers.
    """

    documents: Documents
    units: Units
    base_us: Floats | None
    kv_bytes_per_token: float


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
    counts = found.counts_of(place)  # [units, variants, k, knots]
    terms, extrapolated, kv_tokens = np.zeros((n_units, len(TERMS))), 0.0, 0.0
    for v, variant in enumerate(outcome.policy.variants()):
        for size in np.unique(frame.units.sizes).tolist():
            table, mine = tables[v, size], frame.units.sizes == size
            ks = table.cost_us.shape[1]
            binned = counts[mine, v, :ks]
            if own_us is None and (binned.sum(axis=0) * table.refused).any():
                return replace(outcome, level="refused", reason=table.reason)
            terms[mine] += np.einsum("ukc,tkc->ut", binned, table.cost_us)
            extrapolated += float(np.einsum("ukc,tkc->", binned, table.extrapolated_us))
            keys = np.arange(ks)[:, None] * np.minimum(variant.draft_kv.budget, found.bins.knots) + found.bins.knots
            kv_tokens += size * float((binned.sum(axis=0) * keys).sum())
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
    )
    return _with_time(filled, terms if own_us is None else own_us, counts, frame)


def _with_time(outcome: Outcome, terms_us: Floats, counts: Floats, frame: Frame) -> Outcome:
    """Set everything that follows from the time of each unit by term, [units, terms]."""
    unit_us = terms_us.sum(axis=1)
    total = terms_us.sum(axis=0)
    by_k = counts.sum(axis=(0, 1, 3))
    round_drafts, batches = float((by_k * np.arange(len(by_k))).sum()), float(by_k.sum())
    drafting = round_drafts > 0.0 and total[1] > 0.0
    base = frame.base_us
    return replace(
        outcome,
        gamma=float(total[0] / round_drafts / (total[1] / batches)) if drafting else None,
        us_per_token=float(unit_us.sum() / outcome.tokens),
        breakdown={term: float(value / outcome.tokens) for term, value in zip(TERMS, total, strict=True)},
        baseline_us_per_token=None if base is None else float(base.sum() / outcome.tokens),
        speedup=None if base is None or not unit_us.sum() > 0.0 else float(base.sum() / unit_us.sum()),
        unit_us=unit_us,
    )
