"""Completes a sparse record: chains where no round started, and depths at which rounds had stopped, by a model.

A sparse trace holds the drafts that its own policy made, at the positions where its rounds began. A position without a
chain borrows one recorded nearby in its document. Past the depth at which a borrowed or own chain stopped, its next
signals are drawn from judged drafts of that depth and its acceptance from the hazard model. What was recorded stays as
it was, so the recorded policy still replays exactly; every other policy is modelled.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from specdial.policies.fields import parse
from specdial.policies.schema import Drafter
from specdial.simulator.acceptance import Hazard, fit_hazard, judged_drafts
from specdial.simulator.lanes import SIGNALS, Record

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
NEAREST = 4  # recorded chains on either side that a position may borrow from
ENOUGH = 50  # judged drafts below which nothing is modelled


def can_impute(record: Record) -> bool:
    """Is there enough to model from?"""
    judged = int(np.minimum(record.run + 1, record.depths).sum())
    return len(record.arms) > 0 and record.k_max > 0 and judged >= ENOUGH


def imputed(record: Record, seed: int) -> Record:
    """The record with k_max drafts at every position and arm; a dense record, or one too small, as it is.

    So is one of a drafter that may have none: where it drafted nothing, nothing is what was recorded.
    """
    short = any(parse(Drafter, arm["drafter"]).may_have_none for arm in record.arms)
    if record.trace.meta["dense"] or short or not can_impute(record):
        return record
    width = len(record.arms)
    signals = {name: record.signals[name].copy() for name in SIGNALS}
    run, hazard = record.run.copy(), fit_hazard(judged_drafts(record))
    for arm in range(width):
        cells = np.arange(arm, len(record.run), width)
        generator = np.random.default_rng((seed, 2, arm))
        filled, run[cells] = _complete_arm(record, cells, hazard, generator)
        for name in SIGNALS:
            signals[name][:, cells] = filled[name]
    depth = np.arange(record.k_max)[:, None]
    return replace(
        record,
        signals=signals,
        match=depth < run,
        run=run,
        depths=np.full_like(record.depths, record.k_max),
        complete=np.ones(width, np.bool_),
    )


def _complete_arm(
    record: Record, cells: Ints, hazard: Hazard, generator: np.random.Generator
) -> tuple[dict[str, npt.NDArray[np.float32]], Ints]:
    """Signals [K, rows] and run [rows] of one arm, whose cells are `cells`."""
    source = cells[_donors(record, record.depths[cells] > 0, generator)]
    signals = {name: record.signals[name][:, source].copy() for name in SIGNALS}
    depths, run = record.depths[source], np.minimum(record.run[source], record.depths[source])
    log_age = np.log1p(record.age_of(source))
    log_budget = np.log(float(record.budget(int(cells[0]) % len(record.arms))))
    uniform = generator.random((record.k_max, len(cells)))
    pool, pool_depth = np.zeros(0, np.int64), 0  # the deepest judged drafts so far
    for d in range(record.k_max):
        judged = cells[(record.run[cells] >= d) & (record.depths[cells] > d)]
        if len(judged):
            pool, pool_depth = judged, d
        lacking = np.flatnonzero(depths <= d)
        if not len(lacking) or not len(pool):
            continue
        drawn = pool[generator.integers(0, len(pool), len(lacking))]
        for name in SIGNALS:
            signals[name][d, lacking] = record.signals[name][pool_depth, drawn]
        features = np.stack(
            [
                np.full(len(lacking), np.log(d + 1.0)),
                *(signals[name][d, lacking].astype(np.float64) for name in SIGNALS),
                np.full(len(lacking), log_budget),
                log_age[lacking],
            ],
            axis=1,
        )
        goes_on = (run[lacking] == d) & (uniform[d, lacking] < hazard.probability(features))
        run[lacking] += goes_on
    return signals, run


def _donors(record: Record, has_chain: npt.NDArray[np.bool_], generator: np.random.Generator) -> Ints:
    """[rows] the row whose chain each row uses: its own, one nearby in its document, or any where that has none."""
    rows = np.arange(len(has_chain))
    donors = rows.copy()
    everywhere = np.flatnonzero(has_chain)
    offset = generator.integers(-NEAREST, NEAREST, len(rows))
    ends = record.documents.offset + record.documents.end - record.documents.start
    for first, last in zip(record.documents.offset, ends, strict=True):
        mine = rows[first:last]
        wanting = mine[~has_chain[first:last]]
        near = mine[has_chain[first:last]]
        if len(near):
            place = np.clip(np.searchsorted(near, wanting) + offset[wanting], 0, len(near) - 1)
            donors[wanting] = near[place]
        elif len(everywhere):
            donors[wanting] = everywhere[generator.integers(0, len(everywhere), len(wanting))]
    return donors
