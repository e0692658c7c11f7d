"""What every controller is: the state and rule of N lanes that decide, token by token, whether to draft on.

A lane is one sequence: a member of the engine's batch, or one (document, policy) pair of a replay. The same objects run
in both places, so a decision can depend only on what is passed here. Arrays are float64 over lanes.

Lag. An engine that reads signals back one step late need never wait for the device. With lag 1, after d >= 1 drafts a
lane goes on iff its rule would have gone on after d - 1 drafts, that is by the signals of the first d - 1 only; k_max
still bounds it. So the first depth at which the rule says stop still drafts one more token.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Signals:
    """What the drafter knew about each drafted token of a round, arrays [N, K]; columns past the depth hold garbage.

    entropy_nats: entropy of the draft distribution. top1_prob: probability of its likeliest token.
    margin: difference of its two largest logits.
    """

    entropy_nats: Floats
    top1_prob: Floats
    margin: Floats

    @classmethod
    def empty(cls, lanes: int, depth: int) -> "Signals":
        return cls(*(np.zeros((lanes, depth)) for _ in range(3)))


class Controller(ABC):
    """One kind of stopping rule over N lanes, each with its own settings and its own state."""

    kind: ClassVar[str]
    adaptive: ClassVar[bool] = True  # looks at signals; others spare the engine reading them back at every step
    k_max: Ints  # [N], the longest draft a lane ever asks for
    lag: Ints  # [N], 0 or 1: how many of the newest drafts' signals a lane does without

    def draft_more(self, depth: int, signals: Signals) -> Bools:
        """After `depth` drafted tokens, should each lane draft another? [N]; the caller also applies its own limits.

        Call it at depth 0, 1, 2 ... of every round, with at least the signals of the first depth - lag drafts.
        """
        return self._go_on(np.maximum(depth - self.lag, 0), signals) & (depth < self.k_max)

    @abstractmethod
    def _go_on(self, seen: Ints, signals: Signals) -> Bools:
        """The rule after the first seen[n] drafts of each lane, [N]; seen is 0 at first and rises by 0 or 1 a call."""

    def observe(self, k: Ints, accepted: Ints, signals: Signals, active: Bools) -> None:
        """Learn from a finished round: k and accepted are [N]; lanes outside `active` took no part."""
        return


def newest(values: Floats, seen: Ints) -> Floats:
    """[N] the last of each lane's first seen[n] values [N, K]; anything where it has seen none."""
    return at(values, np.maximum(seen - 1, 0)) if seen.any() else np.zeros(len(seen))


def at(table: npt.NDArray[Scalar], column: Ints) -> npt.NDArray[Scalar]:
    """[N] table[n, column[n]]; lanes that agree on the column, as all do without lag, need no gather."""
    if (column == column[0]).all():
        return np.asarray(table[:, column[0]])
    return np.asarray(table[np.arange(len(column)), column])


def draft_limit(controller: Controller, remaining_tokens: Ints) -> Ints:
    """The most tokens a round may draft, [N]: one is always emitted by verification itself."""
    return np.minimum(controller.k_max, np.maximum(remaining_tokens - 1, 0))
