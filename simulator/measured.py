"""Measurements of one operation over a grid, and what they say in between, outside, and about their own accuracy.

Inside: linear interpolation, axis by axis; the grid may be ragged. Outside: the nearest measured value times the ratio
of the fitted physical terms, marked as extrapolated. Along an axis measured at one value: constant within a tolerance.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specdial.simulator.physics import AXES, Physics, fit_physics

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
BATCH, BUDGET, K, CONTEXT = range(4)
# How far from the only measured value of an axis a cost is taken as constant.
ONE_VALUE_TOLERANCE_FRAC = {BATCH: 0.0, BUDGET: 0.1, K: 0.0, CONTEXT: 0.1}


class CostRefusedError(Exception):
    """The measurements say nothing about this point; the message says which axis."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of one operation: points [n, 4] along AXES, medians [n], and the fitted physical terms.

    assumed: the values were computed for another machine, so every answer counts as extrapolated.
    """

    op: str
    points: Floats
    values_us: Floats
    physics: Physics
    context_range: tuple[float, float]
    assumed: bool = False

    @classmethod
    def of(cls, op: str, points: Floats, values_us: Floats) -> "Measured":
        bounds = (float(points[:, CONTEXT].min()), float(points[:, CONTEXT].max()))
        return cls(op, points, values_us, fit_physics(op, points, values_us), bounds)

    def at(self, query: Floats) -> tuple[float, bool]:
        """(microseconds, extrapolated) at one point [4]. Raises CostRefusedError."""
        value, extrapolated = self._at(query, np.arange(len(self.points)), 0)
        return value, extrapolated or self.assumed

    def _at(self, query: Floats, rows: Ints, axis: int) -> tuple[float, bool]:
        if axis == len(AXES):
            return float(self.values_us[rows].mean()), False
        levels = np.unique(self.points[rows, axis])
        if len(levels) == 1:
            if self._has_meaning(axis):
                self._check_one_value(axis, float(levels[0]), float(query[axis]))
            return self._at(query, rows, axis + 1)
        wanted = float(query[axis])
        inside = float(np.clip(wanted, levels[0], levels[-1]))
        if inside != wanted:
            clamped = query.copy()
            clamped[axis] = inside
            value, _ = self._at(clamped, rows[self.points[rows, axis] == inside], axis + 1)
            before, after = self.physics.predict_us(np.stack([clamped, query]))
            return value * float(after / before) if before > 0.0 else value, True
        upper = int(np.searchsorted(levels, inside))
        high, high_extra = self._at(query, rows[self.points[rows, axis] == levels[upper]], axis + 1)
        if levels[upper] == inside:
            return high, high_extra
        low, low_extra = self._at(query, rows[self.points[rows, axis] == levels[upper - 1]], axis + 1)
        share = (inside - levels[upper - 1]) / (levels[upper] - levels[upper - 1])
        return low + (high - low) * float(share), low_extra or high_extra

    def _has_meaning(self, axis: int) -> bool:
        """k and budget are 0 throughout where the operation does not depend on them."""
        if self.op in ("verify", "verify_partial", "refresh") and axis == K:
            return True
        return axis in (BATCH, CONTEXT) or bool((self.points[:, axis] != 0).any())

    def _check_one_value(self, axis: int, measured: float, wanted: float) -> None:
        low, high = self.context_range if axis == CONTEXT else (measured, measured)
        slack = ONE_VALUE_TOLERANCE_FRAC[axis]
        if not low * (1.0 - slack) <= wanted <= high * (1.0 + slack):
            raise CostRefusedError(f"{self.op} was measured at {AXES[axis]} {measured:g} only, not {wanted:g}")


def leave_one_out(measured: Measured) -> dict[str, float]:
    """Relative errors of one operation's measurements, each predicted from the others by the model's own rules."""
    errors, refused = [], 0
    for i, point in enumerate(measured.points):
        keep = np.arange(len(measured.points)) != i
        rest = Measured.of(measured.op, measured.points[keep], measured.values_us[keep])
        try:
            predicted, _ = rest.at(point)
        except CostRefusedError:
            refused += 1
            continue
        errors.append(abs(predicted / measured.values_us[i] - 1.0) if measured.values_us[i] > 0.0 else 0.0)
    if not errors:
        return {"n": 0.0, "refused": float(refused)}
    return {
        "n": float(len(errors)),
        "refused": float(refused),
        "median_frac": float(np.median(errors)),
        "worst_frac": float(np.max(errors)),
    }
