"""The cost-aware controller of SparseSpec-L: draft on while the expected tokens per unit of time improve.

With p_i the estimated acceptance of draft i, the rate of stopping at k is
    R(k) = (1 + sum_{m<=k} prod_{i<=m} p_i) / (k * gamma + 1),
time in units of one verification (gamma = C_d / C_v). After m drafts the lane goes on iff R at the next allowed k,
the missing p filled by a running acceptance rate, exceeds R(m). The first token is always drafted, or the lane would
never learn again; "don't speculate here" is the policy's to say (controller none).

Two forms of p. `paper`: p = e^{-|H-Ha|} / (e^{-|H-Ha|} + e^{-|H-Hr|}), Ha and Hr running centres of the entropies of
accepted and first-rejected drafts; as printed it never exceeds sigmoid(Hr - Ha). `calibrated`: p = sigmoid(bias -
slope * H), fitted on traces and, with learning_rate > 0, updated after every round by one gradient step on log-loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from specdial.policies.controllers.base import Bools, Controller, Floats, Ints, Signals, at, newest
from specdial.policies.fields import setting


@dataclass(frozen=True, slots=True)
class RateConfig:
    """Settings of the rate controller.

    gamma: draft cost per token over verification cost. k_set: the draft lengths allowed, () for 1..k_max.
    beta: memory of the running centres and of the acceptance rate; accepted_nats, rejected_nats and acceptance are
    their cold start. lag: see controllers.base; a lagging lane may stop one past a length of k_set.
    """

    kind: Literal["rate"] = "rate"
    form: Literal["calibrated", "paper"] = "calibrated"
    k_max: int = setting(8, low=1, high=64)
    k_set: tuple[int, ...] = setting((), low=1, high=64)
    gamma: float = setting(0.3, low=0.0, high=100.0)
    beta: float = setting(0.9, low=0.0, high=1.0)
    bias: float = setting(3.0, low=-50.0, high=50.0)
    slope: float = setting(1.5, low=0.0, high=50.0)
    learning_rate: float = setting(0.02, low=0.0, high=1.0)
    accepted_nats: float = setting(0.3, low=0.0)
    rejected_nats: float = setting(2.0, low=0.0)
    acceptance: float = setting(0.8, low=0.0, high=1.0)
    lag: Literal[0, 1] = setting(0, later=True)


class Rate(Controller):
    """Lanes that maximise the expected rate of emitted tokens."""

    kind = "rate"

    def __init__(self, configs: Sequence[RateConfig]) -> None:
        allowed = [_allowed(c) for c in configs]
        self.k_max = np.array([ks[-1] for ks in allowed], dtype=np.int64)
        self.lag = np.array([c.lag for c in configs], dtype=np.int64)
        self.next_k = np.array([_next_table(ks, int(self.k_max.max())) for ks in allowed], dtype=np.int64)  # [N, K+1]
        self.may_stop = np.array(
            [[m in ks for m in range(self.next_k.shape[1])] for ks in map(set, allowed)], dtype=np.bool_
        )
        self.paper = np.array([c.form == "paper" for c in configs])
        self.gamma, self.beta = _column(configs, "gamma"), _column(configs, "beta")
        self.bias, self.slope = _column(configs, "bias"), _column(configs, "slope")
        self.learning_rate = _column(configs, "learning_rate")
        self.accepted_nats, self.rejected_nats = _column(configs, "accepted_nats"), _column(configs, "rejected_nats")
        self.acceptance = _column(configs, "acceptance")
        self._expected = np.ones(len(configs))  # 1 + sum of products so far
        self._survival = np.ones(len(configs))  # product of p so far

    def probability(self, entropy_nats: Floats) -> Floats:
        """Estimated acceptance of a draft of the given entropy, per lane: [N] in, [N] out."""
        logit = self.bias - self.slope * entropy_nats
        if self.paper.any():
            centres = np.abs(entropy_nats - self.rejected_nats) - np.abs(entropy_nats - self.accepted_nats)
            logit = np.where(self.paper, centres, logit)
        return _sigmoid(logit)

    def _go_on(self, seen: Ints, signals: Signals) -> Bools:
        fresh = seen == 0
        self._survival *= self.probability(newest(signals.entropy_nats, seen))
        self._survival[fresh] = 1.0
        self._expected += self._survival
        self._expected[fresh] = 1.0
        column = np.minimum(seen, self.next_k.shape[1] - 1)
        target = at(self.next_k, column)
        future = self._survival * _geometric(self.acceptance, np.maximum(target - seen, 0))
        rate_now = self._expected / (seen * self.gamma + 1.0)
        rate_then = (self._expected + future) / (target * self.gamma + 1.0)
        return np.asarray((rate_then > rate_now) | ~at(self.may_stop, column))

    def observe(self, k: Ints, accepted: Ints, signals: Signals, active: Bools) -> None:
        for depth in range(int(k[active].max(initial=0))):
            entropy = signals.entropy_nats[:, depth]
            self._learn(active & (depth < accepted), entropy, label=1.0)
            self._learn(active & (depth == accepted) & (depth < k), entropy, label=0.0)

    def _learn(self, lanes: Bools, entropy_nats: Floats, label: float) -> None:
        if not lanes.any():
            return
        entropy_nats = np.where(lanes, entropy_nats, 0.0)  # other lanes hold garbage, perhaps NaN
        keep = np.where(lanes, self.beta, 1.0)
        if label:
            self.accepted_nats = keep * self.accepted_nats + (1.0 - keep) * entropy_nats
        else:
            self.rejected_nats = keep * self.rejected_nats + (1.0 - keep) * entropy_nats
        self.acceptance = keep * self.acceptance + (1.0 - keep) * label
        step = np.where(lanes, self.learning_rate, 0.0) * (label - _sigmoid(self.bias - self.slope * entropy_nats))
        self.bias = self.bias + step
        self.slope = np.maximum(self.slope - step * entropy_nats, 0.0)


def _allowed(config: RateConfig) -> list[int]:
    return sorted(set(config.k_set)) or list(range(1, config.k_max + 1))


def _next_table(allowed: list[int], width: int) -> list[int]:
    return [next((k for k in allowed if k > m), allowed[-1]) for m in range(width + 1)]


def _column(configs: Sequence[RateConfig], name: str) -> Floats:
    return np.array([getattr(c, name) for c in configs], dtype=np.float64)


def _geometric(p: Floats, terms: Ints) -> Floats:
    """p + p^2 + ... + p^terms, exact at p = 1."""
    safe = np.where(p < 1.0, p, 0.0)
    return np.where(p < 1.0, safe * (1.0 - safe**terms) / (1.0 - safe), terms.astype(np.float64))


def _sigmoid(x: Floats) -> Floats:
    return 1.0 / (1.0 + np.exp(-np.clip(x, -60.0, 60.0)))
