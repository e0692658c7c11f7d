"""Curves over budget and age, fitted to means of errors: the arithmetic behind simulator.fidelity.

    link(error) = bias + by_budget * log(keys) + by_age * log(rounds since full verification)

Leaves out what the errors are of.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Link = Literal["log", "logit"]
RIDGE = 1e-3


@dataclass(frozen=True, slots=True)
class Cells:
    """Means of one quantity's error over probes of the same document, budget and age, arrays [n]."""

    doc: Ints
    budget: Floats
    age: Floats
    count: Floats
    error: Floats


@dataclass(frozen=True, slots=True)
class Curve:
    """One quantity of one selection. coefficients: [1 + resamples, 3] bias, by_budget, by_age; the first is the fit.

    flat: slopes that the data did not bear out. held_out: mean absolute error of the means of documents that the fit
    had not seen, by budget; mean_alone: the same of predicting the other documents' mean.
    """

    link: Link
    coefficients: Floats
    flat: tuple[str, ...]
    held_out: float | None
    mean_alone: float | None

    def error(self, budget: float, ages: Floats) -> Floats:
        """The modelled error at a budget and ages [n]: [1 + resamples, n]."""
        terms = np.stack([np.ones_like(ages), np.full_like(ages, np.log(budget)), np.log(ages)])
        return _mean(self.link, self.coefficients @ terms)


def cells_of(doc: Ints, budget: Floats, age: Floats, error: Floats) -> Cells:
    """Means of probes [n] each."""
    keys, place = np.unique(np.stack([doc, budget, age], axis=1), axis=0, return_inverse=True)
    count = np.bincount(place.reshape(-1)).astype(np.float64)
    mean = np.bincount(place.reshape(-1), weights=error) / count
    return Cells(keys[:, 0].astype(np.int64), keys[:, 1], keys[:, 2], count, mean)


def fit_curve(link: Link, cells: Cells, documents: Ints, draws: Ints) -> Curve:
    """The fit, one a resample, and how far fits without a document are off on it.

    draws: [resamples, documents] how often each resample holds a document.
    """
    place = np.searchsorted(documents, cells.doc)
    fit = _fit(link, cells, cells.count)
    resampled = (
        [_fit(link, cells, cells.count * draw[place], start=fit) for draw in draws] if len(documents) > 1 else []
    )
    off, alone, weights = [], [], []
    for left in documents if len(documents) > 1 else ():
        mine = cells.doc == left
        if not mine.any() or mine.all():
            continue
        without = _fit(link, cells, np.where(mine, 0.0, cells.count), start=fit)
        expected = _mean(link, _terms(cells) @ without)
        base = np.average(cells.error[~mine], weights=cells.count[~mine])
        for budget in np.unique(cells.budget[mine]):
            here = mine & (cells.budget == budget)
            seen = np.average(cells.error[here], weights=cells.count[here])
            off.append(abs(np.average(expected[here], weights=cells.count[here]) - seen))
            alone.append(abs(base - seen))
            weights.append(cells.count[here].sum())
    flat = tuple(n for n, i, axis in (("budget", 1, cells.budget), ("age", 2, cells.age)) if _is_flat(fit[i], axis))
    return Curve(
        link,
        np.stack([fit, *resampled]),
        flat,
        float(np.average(off, weights=weights)) if off else None,
        float(np.average(alone, weights=weights)) if off else None,
    )


def _is_flat(slope: float, axis: Floats) -> bool:
    """Did more than one value not bear a slope out?"""
    return len(np.unique(axis)) > 1 and abs(float(slope)) < 1e-6


def _fit(link: Link, cells: Cells, weight: Floats, start: Floats | None = None) -> Floats:
    """[3] coefficients: quasi-Poisson likelihood for KL, quasi-binomial for shares; slopes of one sign."""
    terms = _terms(cells)
    centre = np.average(terms, axis=0, weights=weight) if weight.sum() > 0.0 else terms.mean(axis=0)
    centre[0] = 0.0
    x, total = terms - centre, max(float(weight.sum()), 1e-9)
    ridge = RIDGE * max(float((weight * cells.error).sum()) / total, 1e-9)  # as small beside small errors

    def loss(w: Floats) -> tuple[float, Floats]:
        linear = np.clip(x @ w, -30.0, 30.0)
        normaliser = np.exp(linear) if link == "log" else np.logaddexp(0.0, linear)
        value = float((weight * (normaliser - cells.error * linear)).sum()) / total
        gradient = x.T @ (weight * (_mean(link, linear) - cells.error)) / total
        return value + 0.5 * ridge * float(w[1:] @ w[1:]), gradient + ridge * np.array([0.0, w[1], w[2]])

    begin = np.array([-1.0, 0.0, 0.0]) if start is None else start + np.array([start @ centre, 0.0, 0.0])
    found = minimize(loss, begin, jac=True, method="L-BFGS-B", bounds=[(-30.0, 30.0), (-20.0, 0.0), (0.0, 20.0)]).x
    return np.asarray(found - np.array([found @ centre, 0.0, 0.0]), np.float64)


def _terms(cells: Cells) -> Floats:
    return np.stack([np.ones_like(cells.age), np.log(cells.budget), np.log(cells.age)], axis=1)


def _mean(link: Link, linear: Floats) -> Floats:
    clipped = np.clip(linear, -30.0, 30.0)
    return np.asarray(np.exp(clipped) if link == "log" else 1.0 / (1.0 + np.exp(-clipped)))
