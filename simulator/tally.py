"""Runs a chunk of policies over a set of documents and keeps sums: memory does not grow with rounds or policies.

Units are batches: consecutive groups of documents that decode together. Leaves out prices; `Bins` holds what they need.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specdial.policies.schema import Policy
from specdial.simulator.lanes import Documents, Record
from specdial.simulator.loop import Step, rounds
from specdial.simulator.outcome import Rounds
from specdial.simulator.pricing import Bins

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
FLUSH_ROUNDS = 1 << 18  # rounds held before they are binned


@dataclass(frozen=True, slots=True)
class Units:
    """Documents in consecutive groups of `batch`: first document and size of each, [units]."""

    first: Ints
    sizes: Ints

    @classmethod
    def of(cls, documents: int, batch: int) -> "Units":
        first = np.arange(0, documents, batch)
        return cls(first, np.minimum(batch, documents - first))

    def largest(self, values: Ints) -> Ints:
        """[policies, documents] -> [policies, units]."""
        return np.maximum.reduceat(values, self.first, axis=1)

    def mean(self, values: Ints) -> Floats:
        """[policies, documents] -> [policies, units]."""
        return np.add.reduceat(values, self.first, axis=1) / self.sizes


@dataclass(frozen=True, slots=True)
class Tally:
    """Sums of a chunk: per policy [policies], the binned rounds of each (policy, unit), and round logs where asked."""

    rounds: Ints
    drafted: Ints
    accepted: Ints
    emitted: Ints
    missing: Bools
    bins: Bins  # counts [policies * units, variants, k, knots]
    logs: dict[int, Rounds]

    def counts_of(self, place: int) -> Floats:
        """[units, variants, k, knots] binned rounds of one policy."""
        units = len(self.bins.counts) // len(self.rounds)
        return self.bins.counts[place * units : (place + 1) * units]


def tally(
    record: Record,
    documents: Documents,
    policies: Sequence[Policy],
    arms: Sequence[Sequence[int]],
    *,
    units: Units,
    knots: Floats,
    logged: Sequence[int] = (),
) -> Tally:
    """Simulate every policy to the end of every document. logged: places in `policies` whose rounds are kept."""
    shape = (len(policies), len(documents))
    batch = int(units.sizes[0])
    variants = max(len(policy.cells) + 1 for policy in policies)
    k_max = max(policy.k_max for policy in policies)
    bins = Bins.empty(len(policies) * len(units.first), variants, k_max, knots)
    sums = {name: np.zeros(shape[0] * shape[1], np.int64) for name in ("rounds", "k", "accepted", "emitted")}
    missing = np.zeros(shape[0] * shape[1], np.bool_)
    dense = bool(record.complete.all())
    held: list[tuple[Bools, Ints, Ints, Floats]] = []
    kept: dict[int, list[tuple[Ints, ...]]] = {place: [] for place in logged}
    flush_after = max(FLUSH_ROUNDS // (shape[0] * len(units.first)), 1)
    for number, step in enumerate(rounds(record, documents, policies, arms, batch)):
        sums["rounds"] += step.active
        sums["k"] += step.k
        sums["accepted"] += step.accepted
        sums["emitted"] += step.emitted
        if not dense:
            missing |= step.missing
        held.append(_by_unit(step, shape, units, batch))
        if len(held) >= flush_after:
            _flush(held, bins)
        for place, log in kept.items():
            log.append(_logged(step, number, slice(place * shape[1], (place + 1) * shape[1])))
    _flush(held, bins)
    total = {name: value.reshape(shape).sum(axis=1) for name, value in sums.items()}
    return Tally(
        rounds=total["rounds"],
        drafted=total["k"],
        accepted=total["accepted"],
        emitted=total["emitted"],
        missing=np.asarray(missing.reshape(shape).any(axis=1)),
        bins=bins,
        logs={place: _sorted_log(log, documents) for place, log in kept.items()},
    )


def _by_unit(step: Step, shape: tuple[int, int], units: Units, batch: int) -> tuple[Bools, Ints, Ints, Floats]:
    """(active, variant, k, context) of each batch's round, [policies * units]."""
    if batch == 1:
        return step.active, step.variant, step.k, step.context_tokens.astype(np.float64)
    active = np.logical_or.reduceat(step.active.reshape(shape), units.first, axis=1)
    variant = step.variant.reshape(shape)[:, units.first]
    k = units.largest(step.k.reshape(shape))
    context = units.mean(step.context_tokens.reshape(shape))
    return active.reshape(-1), variant.reshape(-1), k.reshape(-1), context.reshape(-1)


def _flush(held: list[tuple[Bools, Ints, Ints, Floats]], bins: Bins) -> None:
    if not held:
        return
    active = np.concatenate([h[0] for h in held])
    unit = np.tile(np.arange(len(held[0][0])), len(held))
    variant, k, context = (np.concatenate([h[i] for h in held])[active] for i in (1, 2, 3))
    bins.add(unit[active], variant, k, context)
    held.clear()


def _logged(step: Step, number: int, part: slice) -> tuple[Ints, ...]:
    document = np.flatnonzero(step.active[part])
    columns = (step.context_tokens, step.k, step.accepted, step.emitted)
    return (document, np.full(len(document), number), *(column[part][document] for column in columns))


def _sorted_log(log: list[tuple[Ints, ...]], documents: Documents) -> Rounds:
    columns = [np.concatenate(column) for column in zip(*log, strict=True)]
    order = np.lexsort((columns[1], columns[0]))
    document, *rest = (column[order] for column in columns)
    return Rounds(documents.doc[document], *rest)
