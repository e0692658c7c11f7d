"""Physical terms of an operation's time, fitted to measurements: what carries a prediction outside the measured range.

time = fixed + s_kv * (keys and values read) + s_row * rows + s_score * rows * keys, every coefficient >= 0. `fixed`
holds weight traffic and launches, which one model and one machine cannot tell apart. Leaves out interpolation.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

Floats = npt.NDArray[np.float64]
AXES = ("batch", "budget", "k", "context_tokens")  # columns of every `points` array [n, 4]
TERMS = ("fixed", "kv", "rows", "scores")


@dataclass(frozen=True, slots=True)
class Physics:
    """Fitted coefficients of one operation, in microseconds per unit of each term."""

    op: str
    coefficients: Floats  # [4]

    def predict_us(self, points: Floats) -> Floats:
        """Time of each point, [n]."""
        return physical_terms(self.op, points) @ self.coefficients


def physical_terms(op: str, points: Floats) -> Floats:
    """[n, 4] terms: 1, keys read by the batch, query rows, rows x keys.

    Draft and partial verification read `budget` keys, or the whole context where there is no budget; other operations
    read the context.

    Draft and select count one token and one choice; a verification has k + 1 rows a sequence, a correction k.
    """
    batch, budget, k, context = points.T
    rows = {"verify": batch * (k + 1.0), "verify_partial": batch * (k + 1.0), "refresh": batch * k}.get(op, batch)
    if op.startswith("draft") or op == "verify_partial":
        keys = np.where(budget > 0.0, np.minimum(budget, context), context)
    elif op.startswith("host"):
        keys = np.zeros_like(context)
    else:
        keys = context
    extra = batch * k if op.startswith("host") else rows
    return np.stack([np.ones_like(batch), batch * keys, extra, rows * keys], axis=1)


def fit_physics(op: str, points: Floats, values_us: Floats) -> Physics:
    """Non-negative least squares on relative errors, so that short and long operations count alike."""
    terms = physical_terms(op, points)
    scale = terms.max(axis=0)
    scale[scale == 0.0] = 1.0
    weight = 1.0 / np.maximum(values_us, 1e-3)
    solution, _ = nnls(terms / scale * weight[:, None], values_us * weight)
    return Physics(op, solution / scale)
