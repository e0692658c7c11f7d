"""Closed forms of speculative decoding: what k drafts buy when acceptance and cost are two numbers.

Units: time is counted in verifications. alpha = accepted / k, gamma = draft cost per token / verification cost,
verify_ratio = verification cost / plain step cost (1 when a verification costs no more than a plain step).
Leaves out everything that depends on context or text; simulator.replay measures that.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog

Floats = npt.NDArray[np.float64]
Number = float | Floats


def speedup(alpha: Number, k: Number, gamma: Number, verify_ratio: Number = 1.0) -> Any:
    """S = (alpha k + 1) / ((k gamma + 1) verify_ratio): tokens a round over its cost in plain steps."""
    return (np.multiply(alpha, k) + 1.0) / ((np.multiply(k, gamma) + 1.0) * verify_ratio)


def speedup_slope(alpha: Number, k: Number, gamma: Number) -> Any:
    """dS/dk = (alpha - gamma) / (k gamma + 1)^2 at constant alpha: drafting on pays iff alpha > gamma."""
    return np.subtract(alpha, gamma) / (np.multiply(k, gamma) + 1.0) ** 2


def geometric_accepted(p: Number, k: Number) -> Any:
    """Expected accepted drafts of k, each accepted with probability p given the ones before: p (1 - p^k) / (1 - p)."""
    p_array, k_array = np.broadcast_arrays(np.asarray(p, np.float64), np.asarray(k, np.float64))
    safe = np.where(p_array < 1.0, p_array, 0.0)
    with np.errstate(under="ignore"):
        value = np.where(p_array < 1.0, safe * (1.0 - safe**k_array) / (1.0 - safe), k_array)
    return value if value.ndim else float(value)


def geometric_p(accepted: float, k: int) -> float:
    """The p whose `geometric_accepted(p, k)` is `accepted`, by bisection. Raises ValueError outside [0, k]."""
    if not 0.0 <= accepted <= k:
        raise ValueError(f"accepted must lie in [0, {k}], got {accepted}")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if geometric_accepted(middle, k) < accepted else (low, middle)
    return (low + high) / 2


def optimal_k(accepted_by_k: Floats, gamma: float, verify_ratio: Number = 1.0) -> int:
    """The k with the best speedup, 0 (plain, speedup 1) included; the shortest on a tie.

    accepted_by_k: [K], mean accepted drafts of fixed k = 1..K.
    """
    ks = np.arange(1, len(accepted_by_k) + 1)
    values = np.concatenate([[1.0], (accepted_by_k + 1.0) / ((ks * gamma + 1.0) * verify_ratio)])
    return int(np.argmax(values))


def inversion_k(accepted_by_k: Floats, gamma: float) -> int | None:
    """The first k whose tail acceptance A(k) - A(k-1) is below gamma: from there on a draft costs more than it saves.

    accepted_by_k: [K], mean accepted drafts of k = 1..K. None when every recorded draft still pays.
    """
    tail = np.diff(np.concatenate([[0.0], accepted_by_k]))
    below = np.flatnonzero(tail < gamma)
    return int(below[0]) + 1 if len(below) else None


def crossover_alpha(k: float, gamma: float, verify_ratio: float = 1.0) -> float:
    """The alpha at which drafting k tokens breaks even with plain decoding; above 1 means it cannot pay."""
    return (verify_ratio * (k * gamma + 1.0) - 1.0) / k


def crossover_gamma(k: float, alpha: float, verify_ratio: float = 1.0) -> float:
    """The gamma at which drafting k tokens breaks even with plain decoding; negative means it cannot pay."""
    return ((alpha * k + 1.0) / verify_ratio - 1.0) / k


def fit_two_costs(k: Floats, round_time: Floats) -> tuple[float, float]:
    """(C_d, C_v) of round time = k C_d + C_v, the non-negative line with the smallest worst relative error.

    k, round_time: [n]. Raises ValueError when no such line is found.
    """
    relative = np.stack([k / round_time, 1.0 / round_time], axis=1)  # [n, 2]
    slack = np.full((len(k), 1), -1.0)
    rows = np.concatenate([np.hstack([relative, slack]), np.hstack([-relative, slack])])
    found = linprog([0.0, 0.0, 1.0], A_ub=rows, b_ub=np.concatenate([np.ones(len(k)), -np.ones(len(k))]))
    if not found.success:
        raise ValueError(f"no two costs fit: {found.message}")
    return float(found.x[0]), float(found.x[1])
