"""The engine's round, for thousands of sequences at once: what each policy would have drafted and what was accepted.

A sequence is one (policy, document) pair. Each cell of a policy keeps its own controller state, as in the engine, so a
controller lane is one (policy, cell, document). Leaves out time (simulator.pricing) and judgement (simulator.support).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specdial.policies.controllers import Controller, Signals, draft_limit, make_controller
from specdial.policies.schema import Policy
from specdial.simulator.lanes import SIGNALS, Documents, Record
from specdial.simulator.schedule import Schedule, Verified, batches

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Lanes = Ints | slice

# Signals a kind reads; a kind not named here is given all of them.
READS: dict[str, tuple[str, ...]] = {
    "none": (),
    "fixed": (),
    "entropy": ("entropy_nats",),
    "confidence": ("top1_prob",),
    "rate": ("entropy_nats",),
}


@dataclass(frozen=True, slots=True)
class Step:
    """One round of every sequence, arrays [sequences]; k, accepted and emitted are 0 where not active.

    missing: the policy drafted further than the record knows. verified: over which keys, None if no policy is lossy.
    """

    context_tokens: Ints
    variant: Ints
    k: Ints
    accepted: Ints
    emitted: Ints
    active: Bools
    missing: Bools
    verified: Verified | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """The controller lanes of one kind: which sequence, which variant of its policy, which arm each belongs to.

    sequence is a slice when the lanes are the sequences, one for one. short: lanes whose drafter may have fewer drafts
    than it is asked for, None where no lane's may.
    """

    controller: Controller
    sequence: Lanes
    variant: Ints
    arm: Ints
    signals: Signals
    reads: tuple[str, ...]
    short: Bools | None

    def draft(self, record: Record, cell: Ints, limit: Ints, live: Bools) -> Ints:
        """k of each lane, [lanes]: ask the controller, reveal one more draft, ask again."""
        k = np.zeros(len(limit), np.int64)
        drafting, depth = live, 0
        while True:
            drafting = drafting & self.controller.draft_more(depth, self.signals) & (depth < limit)
            if not drafting.any():
                return k
            for name in self.reads:
                getattr(self.signals, name)[:, depth] = record.signals[name][depth].take(cell)
            k += drafting
            depth += 1


def rounds(
    record: Record,
    documents: Documents,
    policies: Sequence[Policy],
    arms: Sequence[Sequence[int]],
    batch: int,
    *,
    full: bool = False,
) -> Iterator[Step]:
    """Yield one Step after another until every sequence has its recorded output; sequences are policy-major.

    arms[p][v]: index of the recorded arm that variant v of policy p drafts with (any, where it never drafts).
    documents are taken in consecutive groups of `batch`, which only the cells and the buffer of a policy can feel here.
    full: a group ends when less than half of its sequences decode.
    Partial verification accepts what full verification would, changed by the fidelity model where the record has draws.
    """
    count = len(documents)
    start, end, requested, offset = (
        np.tile(column, len(policies))
        for column in (documents.start, documents.end, documents.requested_end, documents.offset)
    )
    blocks = _blocks(policies, arms, count)
    cells = _Cells.of(policies, count, batch)
    model = None if record.log_luck is None else record.fidelity
    lossy = any(not policy.lossless for policy in policies)
    schedule = Schedule(policies, count, batch, model) if lossy else None
    verified: Verified | None = None
    first, sizes = batches(count, batch)
    position = start.copy()
    width = max(len(record.arms), 1)
    while True:
        active = position < end
        if not active.any():
            return
        first_cell = (offset + np.minimum(position, end - 1) - start) * width
        variant = cells.choose(position, active) if cells else np.zeros(len(position), np.int64)
        k = np.zeros(len(position), np.int64)
        arm_cell = first_cell.copy()
        lives = []
        for block in blocks:
            live = active[block.sequence]
            if not isinstance(block.sequence, slice):
                live = live & (variant[block.sequence] == block.variant)
            lives.append(live)
            if not live.any():
                continue
            cell = first_cell[block.sequence] + block.arm
            limit = draft_limit(block.controller, (requested - position)[block.sequence])
            if block.short is not None:
                limit = np.where(block.short, np.minimum(limit, record.depths.take(cell)), limit)
            drafted = block.draft(record, cell, limit, live)
            if isinstance(block.sequence, slice):
                k, arm_cell = drafted, cell
            else:
                k[block.sequence[live]] = drafted[live]
                arm_cell[block.sequence[live]] = cell[live]
        accepted = np.minimum(record.run.take(arm_cell), k)
        if schedule is not None:
            verified = schedule.next(variant, position)
            if model is not None and record.log_luck is not None:
                luck = record.log_luck[first_cell // width]
                accepted = np.minimum(schedule.accepted(verified, variant, record.run.take(arm_cell), luck), k)
        emitted = np.where(active, np.minimum(accepted + 1, end - position), 0)
        for block, live in zip(blocks, lives, strict=True):
            if live.any():
                block.controller.observe(k[block.sequence], accepted[block.sequence], block.signals, live)
        yield Step(position, variant, k, accepted, emitted, active, record.depths.take(arm_cell) < k, verified)
        if schedule is not None and verified is not None:
            schedule.note(verified, emitted)
        position = position + emitted
        if full:
            over = 2 * np.add.reduceat((position < end).reshape(len(policies), count), first, axis=1, dtype=int) < sizes
            position = np.where(np.repeat(over, sizes, axis=1).reshape(-1), end, position)


def _blocks(policies: Sequence[Policy], arms: Sequence[Sequence[int]], count: int) -> list[Block]:
    """Group every (policy, variant) by controller kind; one kind without cells needs no index arrays."""
    members: dict[str, list[tuple[int, int]]] = {}
    variants = [policy.variants() for policy in policies]
    for p, own in enumerate(variants):
        for v, variant in enumerate(own):
            members.setdefault(variant.controller.kind, []).append((p, v))
    plain_lanes = len(members) == 1 and all(len(own) == 1 for own in variants)
    blocks = []
    for kind, pairs in members.items():
        controller = make_controller([variants[p][v].controller for p, v in pairs for _ in range(count)])
        depth = max(int(controller.k_max.max()), 1)
        shape = (len(pairs) * count, depth)
        short = np.repeat([variants[p][v].drafter.may_have_none for p, v in pairs], count)
        blocks.append(
            Block(
                controller=controller,
                sequence=slice(None)
                if plain_lanes
                else np.concatenate([p * count + np.arange(count) for p, _ in pairs]),
                variant=np.repeat([v for _, v in pairs], count),
                arm=np.repeat([arms[p][v] for p, v in pairs], count),
                signals=Signals(*(np.zeros(shape, order="F") for _ in SIGNALS)),
                reads=READS.get(kind, SIGNALS),
                short=short if short.any() else None,
            )
        )
    return blocks


@dataclass(frozen=True, slots=True)
class _Cells:
    """The cells of every policy as arrays [policies, cells]: which one covers a round's context and batch."""

    low: Ints
    high: Ints
    fits_batch: Bools  # [policies, cells, documents]
    default: Ints  # [policies]
    starts: Ints
    sizes: Ints

    @classmethod
    def of(cls, policies: Sequence[Policy], count: int, batch: int) -> "_Cells | None":
        most = max((len(policy.cells) for policy in policies), default=0)
        if not most:
            return None
        starts, sizes = batches(count, batch)
        size_of = np.repeat(sizes, sizes)
        low, high = np.zeros((len(policies), most), np.int64), np.zeros((len(policies), most), np.int64)
        fits = np.zeros((len(policies), most, count), np.bool_)
        for p, policy in enumerate(policies):
            for i, cell in enumerate(policy.cells):
                low[p, i] = cell.from_context_tokens
                high[p, i] = np.iinfo(np.int64).max if cell.to_context_tokens is None else cell.to_context_tokens
                fits[p, i] = (size_of >= cell.from_batch) & (True if cell.to_batch is None else size_of < cell.to_batch)
        default = np.array([len(policy.cells) for policy in policies])
        return cls(low, high, fits, default, starts, sizes)

    def choose(self, position: Ints, active: Bools) -> Ints:
        """[sequences] index of the variant in force, by the longest context still decoding in each batch."""
        by_document = np.where(active, position, 0).reshape(len(self.default), -1)
        context = np.repeat(np.maximum.reduceat(by_document, self.starts, axis=1), self.sizes, axis=1)[:, None, :]
        covers = self.fits_batch & (self.low[:, :, None] <= context) & (context < self.high[:, :, None])
        chosen = np.where(covers.any(axis=1), covers.argmax(axis=1), self.default[:, None])
        return np.asarray(chosen.reshape(-1))
