"""Acceptance as a hazard: the chance that a draft is accepted, given that every draft before it was.

Logistic in depth, entropy, top-1 probability, margin, log budget and the age of the scores that chose the keys a draft
read (where rounds kept them; 0 elsewhere), fitted on the drafts that verification judged.
A chain says nothing past its first rejection, nor past the k at which its round stopped: those drafts are left out,
which is all that right-censoring needs in a hazard model. Leaves out replay itself; simulator.mixing interpolates arms.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize

from specdial.simulator.lanes import Record

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
FEATURES = ("log_depth", "entropy_nats", "top1_prob", "margin", "log_budget", "log_age")
RIDGE = 1e-4
BINS = 10


@dataclass(frozen=True, slots=True)
class Judged:
    """Drafts that verification judged: features [n, FEATURES], and label [n], accepted (a probability when sampled)."""

    features: Floats
    label: Floats


@dataclass(frozen=True, slots=True)
class Hazard:
    """p = sigmoid(bias + weights . (x - mean) / scale), x along FEATURES."""

    bias: float
    weights: Floats
    mean: Floats
    scale: Floats

    def probability(self, features: Floats) -> Floats:
        """[n] chance of acceptance."""
        return _sigmoid(self.bias + (features - self.mean) / self.scale @ self.weights)


@dataclass(frozen=True, slots=True)
class Calibration:
    """How well probabilities match outcomes. base_log_loss: of always predicting the mean.

    expected_calibration_error: mean |predicted - seen| over bins, weighted by count. reliability: one
    (predicted, seen, count) a bin.
    """

    n: int
    log_loss: float
    base_log_loss: float
    expected_calibration_error: float
    reliability: tuple[tuple[float, float, int], ...]


@dataclass(frozen=True, slots=True)
class RateFit:
    """Starting values for the rate controller: p = sigmoid(bias - slope H), entropy centres, mean acceptance."""

    bias: float
    slope: float
    accepted_nats: float
    rejected_nats: float
    acceptance: float


def judged_drafts(record: Record, split: str | None = None, arms: Sequence[int] | None = None) -> Judged:
    """The judged drafts of some arms (all when None) and of one split (all when None): none past an output's end."""
    width = max(len(record.arms), 1)
    rows = record.documents.rows(split)
    left = record.documents.left(rows)
    features, labels = [], []
    for arm in range(len(record.arms)) if arms is None else arms:
        cells = rows * width + arm
        depth = np.arange(record.k_max)[:, None]
        reached = (depth <= record.run[cells]) & (depth < np.minimum(record.depths[cells], left))  # [K, rows]
        budget = float(record.budget(arm))
        age = np.broadcast_to(np.log1p(record.age_of(cells)), reached.shape)[reached]
        columns = [
            np.broadcast_to(np.log(depth + 1.0), reached.shape)[reached],
            *(record.signals[name][:, cells][reached] for name in ("entropy_nats", "top1_prob", "margin")),
            np.full(int(reached.sum()), np.log(budget)),
            age,
        ]
        features.append(np.stack(columns, axis=1).astype(np.float64))
        source = record.match if record.accept_prob is None else record.accept_prob
        labels.append(source[:, cells][reached].astype(np.float64))
    return Judged(np.concatenate(features), np.concatenate(labels))


def fit_hazard(drafts: Judged) -> Hazard:
    """Maximum likelihood with a small ridge. Raises ValueError without drafts."""
    if not len(drafts.label):
        raise ValueError("no judged drafts to fit")
    mean, scale = drafts.features.mean(axis=0), drafts.features.std(axis=0)
    scale[scale < 1e-9] = 1.0  # a constant column carries nothing
    x = (drafts.features - mean) / scale
    solution = _logistic(x, drafts.label)
    return Hazard(float(solution[0]), solution[1:], mean, scale)


def calibration(probability: Floats, label: Floats) -> Calibration:
    """Score predicted probabilities against outcomes, on documents the fit has not seen."""
    p = np.clip(probability, 1e-9, 1.0 - 1e-9)
    rate = float(np.clip(label.mean(), 1e-9, 1.0 - 1e-9))
    place = np.minimum((p * BINS).astype(np.int64), BINS - 1)
    count = np.bincount(place, minlength=BINS)
    predicted = np.bincount(place, weights=p, minlength=BINS) / np.maximum(count, 1)
    seen = np.bincount(place, weights=label, minlength=BINS) / np.maximum(count, 1)
    table = [(float(a), float(b), int(c)) for a, b, c in zip(predicted, seen, count) if c]
    return Calibration(
        n=len(label),
        log_loss=float(-(label * np.log(p) + (1.0 - label) * np.log(1.0 - p)).mean()),
        base_log_loss=float(-(rate * np.log(rate) + (1.0 - rate) * np.log(1.0 - rate))),
        expected_calibration_error=float((np.abs(predicted - seen) * count).sum() / len(label)),
        reliability=tuple(table),
    )


def fit_rate(record: Record, arm: int, split: str | None = None) -> RateFit | None:
    """Starting values from one arm's judged drafts; None when it has none."""
    drafts = judged_drafts(record, split, [arm])
    if not len(drafts.label):
        return None
    entropy, label = drafts.features[:, FEATURES.index("entropy_nats")], drafts.label
    solution = _logistic(entropy[:, None], label)
    accepted, rejected = label.sum(), (1.0 - label).sum()
    return RateFit(
        bias=float(np.clip(solution[0], -50.0, 50.0)),
        slope=float(np.clip(-solution[1], 0.0, 50.0)),
        accepted_nats=float((entropy * label).sum() / accepted) if accepted else 0.0,
        rejected_nats=float((entropy * (1.0 - label)).sum() / rejected) if rejected else float(entropy.max()),
        acceptance=float(label.mean()),
    )


def _logistic(x: Floats, label: Floats) -> Floats:
    """[1 + features] bias and weights of a ridge logistic regression."""
    design = np.concatenate([np.ones((len(x), 1)), x], axis=1)

    def loss(w: Floats) -> tuple[float, Floats]:
        logit = design @ w
        value = float((np.logaddexp(0.0, logit) - label * logit).mean()) + 0.5 * RIDGE * float(w[1:] @ w[1:])
        gradient = design.T @ (_sigmoid(logit) - label) / len(label)
        gradient[1:] += RIDGE * w[1:]
        return value, gradient

    found = minimize(loss, np.zeros(design.shape[1]), jac=True, method="L-BFGS-B")
    return np.asarray(found.x, np.float64)


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(1.0 / (1.0 + np.exp(-np.clip(x, -60.0, 60.0))))
