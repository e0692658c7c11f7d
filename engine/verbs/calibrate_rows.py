"""From timed samples to rows of a cost table: what several sets of sequences say together, and how far they differ.

One set does not show whether it is like others. On two H200s every pass of a batch of 64 was timed 0.8 ms longer than
the same process needed for it a minute later, in other sequences (docs/LOG.md). So each batch is timed in several sets,
each with memory and graphs of its own and with the other batches between them; a cost is the median over sets of each
one's median.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from specdial.engine.job import Job, describe
from specdial.engine.sampling import Sampling
from specdial.engine.trace.schema import WATCHED_OPS
from specdial.engine.verbs.calibrate_plan import Plan, Settings

Key = tuple[str, int, int]  # operation, k, budget
Samples = dict[Key, list[float]]
Taken = dict[str, Samples]  # by source of partial verification, "" for none: times in us

SETS = 2  # of sequences; one more where they differ
STEADY_FRAC = 0.05
COMPARED = ("plain", "draft", "verify", "verify_partial")


@dataclass(frozen=True, slots=True)
class TimedSet:
    """What one set of sequences took, by context.

    long_run_frac: how much longer a plain step takes late in a long run; None where that was not asked.
    """

    taken: dict[int, Taken]
    long_run_frac: float | None = None


def apart_frac(sets: Sequence[TimedSet]) -> float:
    """How much longer the slowest set took than the fastest: at a context, the median over all that both timed."""
    pairs = [(a.taken[context], b.taken[context]) for a, b in combinations(sets, 2) for context in a.taken]
    return max((_apart(_medians(a), _medians(b)) for a, b in pairs), default=0.0)


def _medians(taken: Taken) -> dict[tuple[str, Key], float]:
    """Of what takes long enough to compare."""
    found = {(source, key): float(np.median(v)) for source, samples in taken.items() for key, v in samples.items()}
    return {place: value for place, value in found.items() if place[1][0] in COMPARED and value > 0.0}


def _apart(a: dict[tuple[str, Key], float], b: dict[tuple[str, Key], float]) -> float:
    return float(np.expm1(abs(np.median([np.log(a[place] / b[place]) for place in a.keys() & b.keys()]))))


def steadiness(label: str, batch: int, sets: Sequence[TimedSet]) -> dict[str, Any]:
    """What meta.json says of the sets of one drafter and batch."""
    runs = [s.long_run_frac for s in sets if s.long_run_frac is not None]
    return {
        "drafter": label,
        "batch": batch,
        "sets": len(sets),
        "apart_frac": apart_frac(sets),
        "long_run_frac": float(np.median(runs)) if runs else None,
    }


def doubts(found: Sequence[dict[str, Any]]) -> list[str]:
    """What of `steadiness` a user should know, a line each."""
    said = []
    for one in found:
        place, run = f"{one['drafter']}, batch {one['batch']}", one["long_run_frac"]
        if one["apart_frac"] > STEADY_FRAC:
            apart = f"{one['sets']} sets of sequences took times up to {one['apart_frac']:.0%} apart"
            said.append(f"{place}: {apart}, the middle ones count; this machine is not steady")
        if run is not None and abs(run) > STEADY_FRAC:
            said.append(
                f"{place}: plain steps took {run:+.0%} in a long run; costs, timed in short ones, may be so far off"
            )
    return said


class Rows:
    """Rows of one drafter's table."""

    def __init__(self, job: Job, settings: Settings, plans: list[Plan]) -> None:
        self.plans = plans
        self.page = settings.draft_kv.page
        self.kv_bytes = describe(job, Sampling())["model"]["kv_bytes_per_token"]
        self.weight_bytes = job.model.decoder.weight_bytes

    def of(self, sets: Sequence[TimedSet], batch: int) -> list[dict[str, Any]]:
        """A row for all that any set timed at one batch, context by context."""
        rows = []
        for context in sets[0].taken:
            taken = [one.taken[context] for one in sets]
            places = dict.fromkeys((source, key) for one in taken for source in one for key in one[source])
            for source, key in places:
                samples = [one[source][key] for one in taken if key in one.get(source, {})]
                rows.append(self._row(source, key, context, batch, samples))
        return rows

    def _row(self, source: str, key: Key, context: int, batch: int, samples: list[list[float]]) -> dict[str, Any]:
        op, k, budget = key
        medians = [float(np.median(values)) for values in samples]
        values = np.concatenate(samples)
        return {
            "op": op,
            "drafter": "none" if op == "plain" else self.plans[0].drafter.label,
            "source": source,
            "context_tokens": context,
            "batch": batch,
            "k": k,
            "budget": budget,
            "median_us": float(np.median(medians)),
            "p10_us": float(np.percentile(values, 10)),
            "p90_us": float(np.percentile(values, 90)),
            "n": len(values),
            "bytes": self._bytes(op, context, batch, k, budget),
        }

    def _bytes(self, op: str, context: int, batch: int, k: int, budget: int) -> int:
        """Weights, keys and values that an operation must read; 0 where it is not known: for drafts with weights other
        than the model's, for choices of a partial verification and for what recomputed rows add."""
        drafter = self.plans[0].drafter
        op = op.partition("_")[0] if op in WATCHED_OPS else op
        if op in ("draft", "select") and (not drafter.reads_selection or drafter.weights != "model"):
            return 0
        summaries = context // self.page if drafter.kind == "quest" else 0  # a smallest and a largest key a page
        keys = {
            "plain": context, "verify": context + k, "draft": budget + summaries, "select": 2 * budget,
            "verify_partial": min(budget, context) + k, "transfer": context,
        }  # fmt: skip
        weights = self.weight_bytes if op in ("plain", "verify", "draft", "verify_partial") else 0
        return weights + batch * keys.get(op, 0) * self.kv_bytes
