"""Measured step times of another engine: CSV with op, context_tokens, batch, k, us, and maybe budget.

One row a measurement; repeated places become a median with its 10th and 90th percentile. op is one of the cost table's
(plain, draft, verify, select, host), or `round`: a whole speculative step of k drafts, which is what can be timed from
outside (a plain step at k = 0). Rounds become verifications that contain their drafts, and drafts, selection and the
host's part then cost nothing more; so a file has rounds or parts of rounds, not both.

This format is our own: no other tool writes it. The tables are those of engine.trace.schema.COSTS.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specdial.policies.errors import UserError
from specdial.simulator.importers.lines import MOST_TOKENS, csv_lines

NEEDED = ("op", "context_tokens", "batch", "k", "us")
LEAST_US = 1e-3  # of a step: speedups are divided by it
PARTS = ("draft", "verify", "select", "host")
ROUND, PLAIN = "round", "plain"
STEPS = (PLAIN, ROUND, "verify")  # none of which comes for nothing


@dataclass(frozen=True, slots=True)
class StepTime:
    """One measurement, in microseconds; of the whole batch."""

    op: str
    context_tokens: int
    batch: int
    k: int
    budget: int
    us: float


def read(path: Path) -> list[StepTime]:
    """Every measurement of a file. Raises UserError naming the first bad line."""
    found = []
    for line in csv_lines(path, NEEDED):
        op = line.text("op").strip()
        if op not in (PLAIN, ROUND, *PARTS):
            raise line.error(f"op is {op!r}, not one of {', '.join((PLAIN, ROUND, *PARTS))}")
        budget = line.whole("budget", high=MOST_TOKENS) if line.get("budget") else 0
        context, batch = line.whole("context_tokens", low=1, high=MOST_TOKENS), line.whole("batch", low=1, high=1 << 20)
        k, us = line.whole("k", high=64), line.number_at("us", low=LEAST_US if op in STEPS else 0.0, high=1e12)
        found.append(StepTime(op, context, batch, k, budget, us))
    if not any(t.op == PLAIN or (t.op == ROUND and t.k == 0) for t in found):
        raise UserError(f"{path} times no plain step", "add rows of op plain: speedups are against it")
    if len({t.op == ROUND for t in found if t.op != PLAIN}) > 1:
        raise UserError(f"{path} times whole rounds and parts of rounds", "keep one of them")
    return found


def cost_rows(times: Sequence[StepTime], drafter: str) -> list[dict[str, Any]]:
    """Rows of a cost table, those of rounds under this drafter's label (policies.drafting)."""
    places: dict[tuple[str, int, int, int, int], list[float]] = {}
    for t in times:
        place = (t.context_tokens, t.batch)
        if t.op == ROUND:
            places.setdefault(("verify", *place, t.k, 0), []).append(t.us)
            for op in ("draft", "select", "host"):
                places.setdefault((op, *place, 0, 0), [0.0])
        if t.op == PLAIN or (t.op == ROUND and t.k == 0):
            places.setdefault((PLAIN, *place, 0, 0), []).append(t.us)
        if t.op in PARTS:
            places.setdefault((t.op, *place, t.k, t.budget), []).append(t.us)
    rows = []
    for (op, context, batch, k, budget), values in sorted(places.items()):
        p10, median, p90 = np.percentile(values, [10, 50, 90])
        row = {"op": op, "drafter": "none" if op == PLAIN else drafter, "context_tokens": context, "batch": batch}
        row |= {"k": k, "budget": budget, "median_us": float(median), "p10_us": float(p10), "p90_us": float(p90)}
        rows.append({**row, "n": len(values), "bytes": 0})
    return rows
