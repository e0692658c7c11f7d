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
from specdial.simulator.schedule import batches

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
        return cls(*batches(documents, batch))

    def largest(self, values: Ints) -> Ints:
        """[policies, documents] -> [policies, units]."""
        return np.maximum.reduceat(values, self.first, axis=1)

    def mean(self, values: Ints) -> Floats:
        """[policies, documents] -> [policies, units]."""
        return np.add.reduceat(values, self.first, axis=1) / self.sizes


@dataclass(frozen=True, slots=True)
class Tally:
    """Sums of a chunk: per policy [policies], the binned rounds of each (policy, unit), and round logs where asked.

    Settings of bins: of a chunk with a lossy policy 2 * variant, and one more for its partial rounds; else the variant.
    """

    rounds: Ints
    drafted: Ints
    accepted: Ints
    emitted: Ints
    missing: Bools
    bins: Bins  # counts [policies * units, settings, k, knots]
    logs: dict[int, Rounds]
    lossy: "Lossy | None" = None

    def counts_of(self, place: int) -> Floats:
        """[units, settings, k, knots] binned rounds of one policy."""
        return self._of(place, self.bins)

    def refreshes_of(self, place: int) -> Floats | None:
        """[units, variants, rows, knots] binned corrections of one policy, None if none of the chunk is lossy."""
        return None if self.lossy is None else self._of(place, self.lossy.refreshes)

    def setting_of(self, variant: int, *, partial: bool) -> int:
        """Which setting of the bins holds a variant's rounds."""
        return variant if self.lossy is None else 2 * variant + partial

    def _of(self, place: int, bins: Bins) -> Floats:
        units = len(bins.counts) // len(self.rounds)
        return bins.counts[place * units : (place + 1) * units]


@dataclass(frozen=True, slots=True)
class Lossy:
    """What lossy policies leave beside: corrections by recomputed rows, of which `rows` are the bins, in place of k.

    emitted: [policies, variants, ages] tokens by rounds since full verification, 0 in full rounds.
    """

    refreshes: Bins
    rows: Floats
    multiple: int
    emitted: Floats

    def add(self, step: Step, shape: tuple[int, int], units: Units, batch: int, *, shared: bool) -> None:
        """Count one round of every sequence. shared: see `_by_unit`."""
        found = step.verified
        if found is None:
            return
        policies, documents = shape
        policy = np.repeat(np.arange(policies), documents)
        _, variants, ages = self.emitted.shape
        place = (policy * variants + step.variant) * ages + found.since_full
        counts = np.bincount(place, weights=step.emitted, minlength=self.emitted.size)
        self.emitted[...] += counts.reshape(self.emitted.shape)
        rows = units.largest(found.recomputed.reshape(shape)).reshape(-1)  # sequences that are done count too
        rows = -(-rows // self.multiple) * self.multiple
        weight, setting, _, context = _by_unit(step, shape, units, batch, shared=shared)
        unit = np.flatnonzero((weight > 0.0) & (rows > 0))
        wide = rows[unit].astype(np.float64)
        self.refreshes.add_rows(unit, setting[unit] // 2, wide, context[unit], self.rows, weight[unit])


def tally(
    record: Record,
    documents: Documents,
    policies: Sequence[Policy],
    arms: Sequence[Sequence[int]],
    *,
    units: Units,
    knots: Floats,
    logged: Sequence[int] = (),
    rows: Floats | None = None,
    multiple: int = 1,
    full: bool = False,
) -> Tally:
    """Simulate every policy to the end of every document. logged: places in `policies` whose rounds are kept.

    rows, multiple: bins of recomputed rows, and whole multiples of what are recomputed, where a policy is lossy.
    full: as if batches were kept full: count rounds while half of a batch decodes, each by the share of it that does.
    """
    shape = (len(policies), len(documents))
    batch = int(units.sizes[0])
    variants = max(len(policy.cells) + 1 for policy in policies)
    k_max = max(policy.k_max for policy in policies)
    lossy: Lossy | None = None
    if any(not policy.lossless for policy in policies):
        grid = np.array([0.0, 1.0]) if rows is None else rows
        longest = int((documents.end - documents.start).max())
        refreshes = Bins.empty(len(policies) * len(units.first), variants, len(grid) - 1, knots)
        lossy = Lossy(refreshes, grid, multiple, np.zeros((len(policies), variants, longest + 1)))
    bins = Bins.empty(len(policies) * len(units.first), variants * (1 if lossy is None else 2), k_max, knots)
    sums = {name: np.zeros(shape[0] * shape[1], np.int64) for name in ("rounds", "k", "accepted", "emitted")}
    missing = np.zeros(shape[0] * shape[1], np.bool_)
    dense = bool(record.complete.all())
    held: list[tuple[Floats, Ints, Ints, Floats]] = []
    kept: dict[int, list[tuple[Ints, ...]]] = {place: [] for place in logged}
    flush_after = max(FLUSH_ROUNDS // (shape[0] * len(units.first)), 1)
    for number, step in enumerate(rounds(record, documents, policies, arms, batch, full=full)):
        sums["rounds"] += step.active
        sums["k"] += step.k
        sums["accepted"] += step.accepted
        sums["emitted"] += step.emitted
        if not dense:
            missing |= step.missing
        held.append(_by_unit(step, shape, units, batch, shared=full))
        if lossy is not None:
            lossy.add(step, shape, units, batch, shared=full)
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
        lossy=lossy,
    )


def _by_unit(
    step: Step, shape: tuple[int, int], units: Units, batch: int, *, shared: bool
) -> tuple[Floats, Ints, Ints, Floats]:
    """(weight, setting of bins, k, context) of each batch's round, [policies * units].

    weight: 0 where all of a batch is done, else 1, or if shared the share of it that decodes.
    """
    setting = step.variant if step.verified is None else 2 * step.variant + step.verified.partial
    if batch == 1:
        return step.active.astype(np.float64), setting, step.k, step.context_tokens.astype(np.float64)
    weight = units.mean(step.active.reshape(shape).astype(np.int64))
    if not shared:
        weight = np.ceil(weight)
    variant = setting.reshape(shape)[:, units.first]
    k = units.largest(step.k.reshape(shape))
    context = units.mean(step.context_tokens.reshape(shape))
    return weight.reshape(-1), variant.reshape(-1), k.reshape(-1), context.reshape(-1)


def _flush(held: list[tuple[Floats, Ints, Ints, Floats]], bins: Bins) -> None:
    if not held:
        return
    weight = np.concatenate([h[0] for h in held])
    active = weight > 0.0
    unit = np.tile(np.arange(len(held[0][0])), len(held))
    variant, k, context = (np.concatenate([h[i] for h in held])[active] for i in (1, 2, 3))
    bins.add(unit[active], variant, k, context, weight[active])
    held.clear()


def _logged(step: Step, number: int, part: slice) -> tuple[Ints, ...]:
    document = np.flatnonzero(step.active[part])
    columns = (step.context_tokens, step.k, step.accepted, step.emitted)
    return (document, np.full(len(document), number), *(column[part][document] for column in columns))


def _sorted_log(log: list[tuple[Ints, ...]], documents: Documents) -> Rounds:
    columns = [np.concatenate(column) for column in zip(*log)]
    order = np.lexsort((columns[1], columns[0]))
    document, *rest = (column[order] for column in columns)
    return Rounds(documents.doc[document], *rest)
