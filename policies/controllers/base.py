"""What every controller is: the state and rule of N lanes that decide, token by token, whether to draft on.

A lane is one sequence: a member of the engine's batch, or one (document, policy) pair of a replay. The same objects run
in both places, so a decision can depend only on what is passed here. Arrays are float64 over lanes.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


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

    @abstractmethod
    def draft_more(self, depth: int, signals: Signals) -> Bools:
        """After `depth` drafted tokens, should each lane draft another? [N]; the caller also applies its own limits."""

    def observe(self, k: Ints, accepted: Ints, signals: Signals, active: Bools) -> None:
        """Learn from a finished round: k and accepted are [N]; lanes outside `active` took no part."""
        return


def draft_limit(controller: Controller, remaining_tokens: Ints) -> Ints:
    """The most tokens a round may draft, [N]: one is always emitted by verification itself."""
    return np.minimum(controller.k_max, np.maximum(remaining_tokens - 1, 0))
