"""Controllers without memory: none, fixed, entropy (AdaEDL), confidence."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from specdial.policies.controllers.base import Bools, Controller, Ints, Signals, newest
from specdial.policies.fields import setting


@dataclass(frozen=True, slots=True)
class NoneConfig:
    """Never draft: plain decoding."""

    kind: Literal["none"] = "none"


@dataclass(frozen=True, slots=True)
class FixedConfig:
    """Draft k tokens every round."""

    kind: Literal["fixed"] = "fixed"
    k: int = setting(4, low=1, high=64)


@dataclass(frozen=True, slots=True)
class EntropyConfig:
    """Draft while 1 - sqrt(coefficient * H) >= threshold, H the entropy of the last draft in nats (AdaEDL, eq. 6).

    lag: see controllers.base.
    """

    kind: Literal["entropy"] = "entropy"
    k_max: int = setting(8, low=1, high=64)
    coefficient: float = setting(0.2, low=0.0)
    threshold: float = setting(0.4, low=-10.0, high=1.0)
    lag: Literal[0, 1] = setting(0, later=True)


@dataclass(frozen=True, slots=True)
class ConfidenceConfig:
    """Draft while the last draft's top-1 probability is at least threshold. lag: see controllers.base."""

    kind: Literal["confidence"] = "confidence"
    k_max: int = setting(8, low=1, high=64)
    threshold: float = setting(0.4, low=0.0, high=1.0)
    lag: Literal[0, 1] = setting(0, later=True)


class NoDraft(Controller):
    """Lanes that never draft."""

    kind = "none"
    adaptive = False

    def __init__(self, configs: Sequence[NoneConfig]) -> None:
        self.k_max = np.zeros(len(configs), dtype=np.int64)
        self.lag = np.zeros(len(configs), dtype=np.int64)

    def _go_on(self, seen: Ints, signals: Signals) -> Bools:
        return np.zeros(len(seen), dtype=np.bool_)


class Fixed(Controller):
    """Lanes with a constant draft length."""

    kind = "fixed"
    adaptive = False

    def __init__(self, configs: Sequence[FixedConfig]) -> None:
        self.k_max = np.array([c.k for c in configs], dtype=np.int64)
        self.lag = np.zeros(len(configs), dtype=np.int64)

    def _go_on(self, seen: Ints, signals: Signals) -> Bools:
        return np.ones(len(seen), dtype=np.bool_)


class Entropy(Controller):
    """Lanes that stop once the entropy bound on acceptance falls below a threshold."""

    kind = "entropy"

    def __init__(self, configs: Sequence[EntropyConfig]) -> None:
        self.k_max = np.array([c.k_max for c in configs], dtype=np.int64)
        self.lag = np.array([c.lag for c in configs], dtype=np.int64)
        self.coefficient = np.array([c.coefficient for c in configs])
        self.threshold = np.array([c.threshold for c in configs])

    def _go_on(self, seen: Ints, signals: Signals) -> Bools:
        bound = 1.0 - np.sqrt(self.coefficient * newest(signals.entropy_nats, seen))
        return np.asarray((seen == 0) | (bound >= self.threshold))


class Confidence(Controller):
    """Lanes that stop once the drafter's top-1 probability falls below a threshold."""

    kind = "confidence"

    def __init__(self, configs: Sequence[ConfidenceConfig]) -> None:
        self.k_max = np.array([c.k_max for c in configs], dtype=np.int64)
        self.lag = np.array([c.lag for c in configs], dtype=np.int64)
        self.threshold = np.array([c.threshold for c in configs])

    def _go_on(self, seen: Ints, signals: Signals) -> Bools:
        return np.asarray((seen == 0) | (newest(signals.top1_prob, seen) >= self.threshold))
