"""Which rounds verify partially, and what they leave to correct: the engine's schedule for many sequences at once.

A round is partial where its variant verifies partially, the full period is not up, the buffer cannot overflow and the
budget does not hold everything; a full one recomputes what partial rounds committed since the last. What partial rounds
accept is what full ones would, changed by the chances of the fidelity model, one draw a place of the text, the same for
every policy. Leaves out what any of it costs (pricing).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specdial.policies.schema import Policy
from specdial.simulator.fidelity import Model

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
OLDEST = 64  # rounds since full from which on acceptance is taken as constant


@dataclass(frozen=True, slots=True)
class Verified:
    """How one round of every sequence verifies, arrays [sequences]; rounds_since_full counts this one, 0 when full."""

    partial: Bools
    since_full: Ints
    recomputed: Ints


def batches(count: int, batch: int) -> tuple[Ints, Ints]:
    """(first, size) of each group of up to `batch` of `count` documents."""
    first = np.arange(0, count, batch)
    return first, np.minimum(batch, count - first)


class Schedule:
    """Counts of `count` documents under each policy, sequences policy-major."""

    def __init__(self, policies: Sequence[Policy], count: int, batch: int, model: Model | None) -> None:
        """batch: so many documents in a row decode together, and verify alike.

        model: changes what full verification accepts; None leaves acceptance as recorded.
        """
        most = max(len(policy.variants()) for policy in policies)
        shape = len(policies), most
        self._policy = np.repeat(np.arange(len(policies)), count)  # [sequences]
        self._starts, self._sizes = batches(count, batch)
        self._partial, self._period = np.zeros(shape, np.bool_), np.ones(shape, np.int64)
        self._buffer, self._held, self._most = np.zeros((3, *shape), np.int64)  # tokens
        self._corrects = np.zeros(len(policies), np.bool_)
        self._log_kept, self._lifted = np.zeros((2, *shape, OLDEST + 1))
        self._log_accepted = np.zeros((*shape, OLDEST + 1))
        for p, policy in enumerate(policies):
            for v, variant in enumerate(policy.variants()):
                kv = variant.verify_kv
                self._partial[p, v], self._period[p, v] = kv.mode == "partial", kv.full_period
                if kv.buffer:
                    self._buffer[p, v], self._held[p, v] = kv.buffer, kv.keys.budget
                self._most[p, v] = policy.k_max + 1
                self._corrects[p] |= kv.mode == "partial" and kv.full_period > 0
                selection = None if model is None else model.of_variant(variant)
                if selection is not None:
                    changes = selection.changes(kv.keys.budget, OLDEST)
                    self._log_kept[p, v] = np.log(np.maximum(changes.kept, 1e-9))
                    self._lifted[p, v] = changes.lifted
                    self._log_accepted[p, v] = np.log(np.clip(changes.accepted, 1e-9, 1.0 - 1e-9))
        self._since = np.zeros(len(self._policy), np.int64)
        self._uncorrected = np.zeros(len(self._policy), np.int64)

    def next(self, variant: Ints, committed: Ints) -> Verified:
        """The round to come, arrays [sequences]. variant: index of the policy's variant in force."""
        p = self._policy
        period = self._period[p, variant]
        partial = self._partial[p, variant] & ((period == 0) | (self._since + 1 < period))
        if self._buffer.any():
            buffer, most = self._buffer[p, variant], self._most[p, variant]
            overflows = self._longest(self._uncorrected) + most > buffer
            partial &= (buffer == 0) | ~(overflows | (self._longest(committed) <= self._held[p, variant]))
        self._since = np.where(partial, self._since + 1, 0)
        recomputed = np.where(partial, 0, self._uncorrected)
        self._uncorrected = np.where(partial, self._uncorrected, 0)
        return Verified(partial, self._since, recomputed)

    def _longest(self, tokens: Ints) -> Ints:
        """[sequences] the most of what each batch holds."""
        by_document = tokens.reshape(len(self._partial), -1)
        return np.repeat(np.maximum.reduceat(by_document, self._starts, axis=1), self._sizes, axis=1).reshape(-1)

    def accepted(self, verified: Verified, variant: Ints, run: Ints, log_luck: Floats) -> Ints:
        """[sequences] leading drafts accepted, of which full verification accepts `run`; it may be more than drafted.

        log_luck: log of a uniform draw for each sequence's place. Each draft is kept with one chance, so the number of
        leading ones is geometric; a lifted one is followed by as many as are accepted in a row.
        """
        place = self._policy, variant, np.minimum(verified.since_full, OLDEST)
        log_kept, lifted = self._log_kept[place], self._lifted[place]
        with np.errstate(divide="ignore", invalid="ignore"):
            kept = np.where(log_kept < 0.0, log_luck / log_kept, np.inf)
            log_left = log_luck - np.log(lifted)  # below 0: lifted, and then uniform again
            extra = np.where(log_left < 0.0, 1.0 + np.floor(log_left / self._log_accepted[place]), 0.0)
        return np.minimum(np.floor(kept), run + np.minimum(extra, 1 << 20)).astype(np.int64)

    def note(self, verified: Verified, emitted: Ints) -> None:
        """The round committed so many tokens of each sequence."""
        self._uncorrected += np.where(verified.partial & self._corrects[self._policy], emitted, 0)
