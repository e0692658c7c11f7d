"""Records extended by a model: acceptance draws for sampled decoding, and arms between recorded budgets.

Sampled decoding: draft i of a chain is accepted when a seeded uniform lies below its recorded min(1, p/q).
Between budgets: at each position the chain of the lower or of the upper arm, the upper with the probability that makes
mean acceptance linear in log(budget); signals and labels stay those of one real chain, so controllers see consistent
evidence. The same uniforms serve every budget and policy, so comparisons are paired.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from specdial.simulator.lanes import SIGNALS, Record

Ints = npt.NDArray[np.int64]


def drawn(record: Record, seed: int) -> Record:
    """The record with `run` drawn from accept_prob where decoding was sampled and every position recorded.

    Other records are returned as they are: greedy ones are exact, and sparse ones hold only what really happened.
    """
    if record.accept_prob is None or not record.trace.meta["dense"]:
        return record
    arms = max(len(record.arms), 1)
    depth, cells = record.accept_prob.shape
    uniform = np.random.default_rng(seed).random((depth, cells // arms), dtype=np.float32)  # [K, rows]
    match = np.repeat(uniform, arms, axis=1) < record.accept_prob
    known = np.arange(depth)[:, None] < record.depths
    run = np.cumprod(match & known, axis=0, dtype=np.int64).sum(axis=0)
    return replace(record, match=match, run=run)


def with_luck(record: Record, seed: int) -> Record:
    """The record with a draw at every place, by which partial verification changes what is accepted."""
    rows = len(record.run) // max(len(record.arms), 1)  # of all documents, also where a record is left with some
    return replace(record, log_luck=np.log(1.0 - np.random.default_rng((seed, 3)).random(rows)))


def with_budgets(record: Record, wanted: Sequence[tuple[int, int, int]], seed: int) -> Record:
    """Append one arm for each (lower arm, upper arm, budget between theirs). Raises ValueError outside them."""
    if not wanted:
        return record
    arms = len(record.arms)
    rows = len(record.run) // arms
    uniform = np.random.default_rng((seed, 1)).random(rows)
    choice = np.tile(np.arange(arms), (rows, 1))  # [rows, arms] source arm of each
    names = list(record.arms)
    complete = list(record.complete)
    for low, high, budget in wanted:
        share = upper_share(record.budget(low), record.budget(high), budget)
        choice = np.concatenate([choice, np.where(uniform < share, high, low)[:, None]], axis=1)
        template = record.arms[low]
        names.append({**template, "arm": len(names), "draft_kv": {**template["draft_kv"], "budget": budget}})
        complete.append(bool(record.complete[low] and record.complete[high]))
    source = (np.arange(rows)[:, None] * arms + choice).reshape(-1)
    return replace(
        record,
        arms=tuple(names),
        signals={name: record.signals[name][:, source] for name in SIGNALS},
        match=record.match[:, source],
        run=record.run[source],
        depths=record.depths[source],
        complete=np.array(complete),
        accept_prob=None if record.accept_prob is None else record.accept_prob[:, source],
    )


def upper_share(low: int, high: int, budget: int) -> float:
    """Where log(budget) lies between log(low) and log(high), 0..1. Raises ValueError outside."""
    if not low <= budget <= high or low == high:
        raise ValueError(f"budget {budget} does not lie between {low} and {high}")
    return math.log(budget / low) / math.log(high / low)
