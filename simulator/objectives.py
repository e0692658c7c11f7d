"""What a search may look at: objectives, bounds on them, the points nothing beats, and the volume they cover.

A metric is a number of one replayed policy; up or down is better, once for all. Leaves out searching.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from specdial.policies.errors import UserError
from specdial.simulator.fidelity import Bounded
from specdial.simulator.lanes import Record
from specdial.simulator.outcome import Outcome

Floats = npt.NDArray[np.float64]
Metrics = dict[str, float | None]
Direction = Literal["maximize", "minimize"]
TAIL_PERCENT = 95.0
FULL_BATCH_SPEEDUP = "full_batch_speedup"
SPEEDS = ("speedup", FULL_BATCH_SPEEDUP)  # metrics by which drafting pays above 1


@dataclass(frozen=True, slots=True)
class Metric:
    """of: its value for a replayed policy, None where replay does not know it."""

    direction: Direction
    of: Callable[[Outcome, Record], float | None]

    @property
    def sign(self) -> float:
        """Turns values into costs, less being better."""
        return -1.0 if self.direction == "maximize" else 1.0


def tail_us_per_token(outcome: Outcome, record: Record) -> float | None:
    """95th percentile, over documents or batches of them, of the time that a sequence waits for a token."""
    if outcome.unit_us is None:
        return None
    place = {int(doc): i for i, doc in enumerate(record.documents.doc)}
    index = np.array([place[doc] for doc in outcome.documents])
    tokens = (record.documents.end - record.documents.start)[index]
    first = np.arange(0, len(index), outcome.batch)
    per_unit = np.add.reduceat(tokens, first) / np.minimum(outcome.batch, len(index) - first)
    return float(np.percentile(outcome.unit_us / per_unit, TAIL_PERCENT))


def full_batch_speedup(outcome: Outcome, record: Record) -> float | None:
    """While every sequence of a batch decodes; of a batch of one that is its speedup."""
    if outcome.batch == 1:
        return outcome.speedup
    return None if outcome.full_batch is None else outcome.full_batch.speedup


def _fidelity(name: str, of_lossless: float) -> Callable[[Outcome, Record], float | None]:
    """A prediction of simulator.fidelity; lossless policies are as good as can be."""

    def of(outcome: Outcome, record: Record) -> float | None:
        if outcome.lossless:
            return of_lossless
        found: Bounded | None = getattr(outcome.fidelity, name, None)
        return None if found is None else found.value

    return of


METRICS: dict[str, Metric] = {
    "speedup": Metric("maximize", lambda outcome, record: outcome.speedup),
    FULL_BATCH_SPEEDUP: Metric("maximize", full_batch_speedup),
    "kv_bytes_per_token": Metric("minimize", lambda outcome, record: outcome.kv_bytes_per_token),  # read, not held
    "tail_us_per_token": Metric("minimize", tail_us_per_token),
    "kl_nats": Metric("minimize", _fidelity("kl_nats", 0.0)),  # of full from partial verification, per token
    "top1_agreement": Metric("maximize", _fidelity("top1_agreement", 1.0)),
    "arr": Metric("maximize", _fidelity("arr", 1.0)),  # share of the target's attention that was read
}


@dataclass(frozen=True, slots=True)
class Goal:
    """What is optimised, the first objective above all; bounds: the most, or the least, that a metric may be."""

    objectives: tuple[str, ...] = ("speedup", "kv_bytes_per_token")
    bounds: tuple[tuple[str, float], ...] = ()

    @classmethod
    def of(cls, objectives: Sequence[str], constraints: Mapping[str, object]) -> "Goal":
        """constraints: bounds by metric, None for none.

        Raises UserError on a metric that is not known, given twice, or bounded by what is not a number.
        """
        for where, names in (("objectives", objectives), ("constraints", list(constraints))):
            unknown = [name for name in names if name not in METRICS]
            if unknown:
                raise UserError(f"{where} names {unknown[0]!r}", f"use some of {', '.join(METRICS)}")
        if not objectives or len(set(objectives)) < len(objectives):
            raise UserError(f"objectives is {list(objectives)}", "name each objective once, at least one")
        bounds = []
        for name, bound in constraints.items():
            if bound is None:
                continue
            if isinstance(bound, bool) or not isinstance(bound, (int, float)):
                raise UserError(f"constraints.{name} is {bound!r}", "give a number")
            bounds.append((name, float(bound)))
        return cls(tuple(objectives), tuple(bounds))

    @property
    def metrics(self) -> tuple[str, ...]:
        """What it looks at."""
        return (*self.objectives, *(name for name, _ in self.bounds))

    @property
    def speed(self) -> str:
        """The metric by which drafting pays: the first objective if that is one of SPEEDS, else speedup."""
        return self.objectives[0] if self.objectives[0] in SPEEDS else "speedup"

    @property
    def directions(self) -> list[Direction]:
        return [METRICS[name].direction for name in self.objectives]

    def values(self, metrics: Metrics) -> list[float] | None:
        """Values of the objectives, None where one is not known."""
        found = [metrics.get(name) for name in self.objectives]
        return None if any(value is None for value in found) else [float(v) for v in found if v is not None]

    def violations(self, metrics: Metrics) -> dict[str, float]:
        """How far each bound is overstepped, 0 or less where it holds; one on what is not known counts as overstepped.

        Every bound has its number: Optuna's Gaussian process refuses trials with fewer than others.
        """
        return {
            name: 1.0 if (value := metrics.get(name)) is None else METRICS[name].sign * (value - bound)
            for name, bound in self.bounds
        }

    def feasible(self, metrics: Metrics) -> bool:
        """Is every objective known, and does every bound hold?"""
        return self.values(metrics) is not None and all(over <= 0.0 for over in self.violations(metrics).values())

    def costs(self, metrics: Metrics) -> list[float]:
        """Objectives with less being better. Raises ValueError where one is not known."""
        values = self.values(metrics)
        if values is None:
            raise ValueError(f"metrics lack some of {', '.join(self.objectives)}")
        return [METRICS[name].sign * value for name, value in zip(self.objectives, values, strict=True)]


def measured_metrics(outcome: Outcome, record: Record) -> Metrics:
    """Every metric of a replayed policy."""
    return {name: metric.of(outcome, record) for name, metric in METRICS.items()}


def front(costs: Sequence[Sequence[float]]) -> list[int]:
    """Places of the points that no other is as good as in everything, the best in the first objective first."""
    order = sorted(range(len(costs)), key=lambda i: (*costs[i], i))
    kept: list[int] = []
    for i in order:
        if not any(all(a <= b for a, b in zip(costs[j], costs[i], strict=True)) for j in kept):
            kept.append(i)
    return kept


def hypervolume(costs: Floats, reference: Floats) -> float:
    """Volume that points [n, m] dominate below a reference point [m], less being better; by slicing, exact."""
    inside = np.unique(costs[(costs < reference).all(axis=1)], axis=0)
    if not len(inside):
        return 0.0
    if inside.shape[1] == 1:
        return float(reference[0] - inside.min())
    upper = np.append(inside[1:, 0], reference[0])  # unique sorts by the first coordinate
    slices = zip(inside[:, 0], upper, range(1, len(inside) + 1), strict=True)
    return sum(float(high - low) * hypervolume(inside[:n, 1:], reference[1:]) for low, high, n in slices if high > low)
