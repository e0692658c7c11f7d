"""The space `tune` searches: controller kind and settings, k, and the selection a draft reads.

A point is a flat mapping of parameters; every point is one policy. Settings that a kind ignores are not in its points,
so that equal policies are recognised as equal. Leaves out the search (simulator.search).
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from specdial.policies.controllers import CONTROLLERS
from specdial.policies.errors import UserError
from specdial.policies.fields import parse, setting
from specdial.policies.naming import short_name
from specdial.policies.schema import Drafter, Policy, policy_from_mapping
from specdial.simulator.acceptance import RateFit, fit_rate
from specdial.simulator.lanes import Record
from specdial.simulator.support import mixable_budgets

Point = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Search:
    """Settings of the space.

    controllers: kinds to try; plain decoding is always among the candidates. k_max: the longest draft, None for the
    longest recorded. budgets: recorded ones to try, () for all. between: try budgets between recorded ones (modelled).
    lag: what every controller that looks at signals has; it is not searched.
    """

    controllers: tuple[str, ...] = ("fixed", "entropy", "confidence", "rate")
    k_max: int | None = setting(None, low=1, high=64)
    budgets: tuple[int, ...] = setting((), low=1)
    between: bool = False
    lag: Literal[0, 1] = 0


@dataclass(frozen=True, slots=True)
class Range:
    """A number from low to high; whole, or a multiple of step from low, or on a log scale with 12 grid points."""

    low: float
    high: float
    scale: Literal["int", "linear", "log", "int_log"] = "linear"
    step: float = 0.05

    def grid(self) -> list[float]:
        """The values brute force tries."""
        if self.scale == "int":
            return list(range(int(self.low), int(self.high) + 1))
        if self.scale == "linear":
            return [self.low + i * self.step for i in range(round((self.high - self.low) / self.step) + 1)]
        values = [self.low * (self.high / self.low) ** (i / 11) for i in range(12)]
        return sorted({round(v) for v in values}) if self.scale == "int_log" else values


@dataclass(frozen=True, slots=True)
class Space:
    """A Search made concrete by what a record holds. arms: places of the arms to try. fits: rate fits by arm."""

    search: Search
    record: Record
    k_max: int
    arms: tuple[int, ...]
    fits: dict[int, RateFit | None]
    gamma: float

    @classmethod
    def of(cls, search: Search, record: Record, gamma: float) -> "Space":
        """gamma: measured draft cost over verification cost, the middle of what `rate` is told.

        Raises UserError when the search asks for what was not recorded.
        """
        unknown = [kind for kind in search.controllers if kind not in CONTROLLERS]
        if unknown:
            raise UserError(f"search.controllers names {unknown[0]!r}", f"use some of {', '.join(CONTROLLERS)}")
        if not record.arms or record.k_max < 1:
            raise UserError("the trace has no recorded drafts to tune on", "record with dense=true")
        if search.k_max is not None and search.k_max > record.k_max:
            raise UserError(f"search.k_max is {search.k_max}", f"the trace recorded up to {record.k_max}")
        recorded = [record.budget(arm) for arm in range(len(record.arms))]
        missing = sorted(set(search.budgets) - set(recorded))
        if missing:
            raise UserError(f"budget {missing[0]} was not recorded", f"use some of {sorted(set(recorded))}")
        arms = tuple(i for i, budget in enumerate(recorded) if not search.budgets or budget in search.budgets)
        fits = {arm: fit_rate(record, arm, "train") for arm in arms}
        return cls(search, record, search.k_max or record.k_max, arms, fits, max(gamma, 1e-3))

    def kinds(self) -> tuple[str, ...]:
        """Controller kinds that draft, on some arm."""
        return tuple(kind for kind in self.search.controllers if kind != "none" and self.arms_for(kind))

    def arms_for(self, kind: str) -> tuple[int, ...]:
        """The arms that a kind can draft with: where it looks at signals, those whose drafter has them."""
        if not CONTROLLERS[kind][1].adaptive:
            return self.arms
        return tuple(arm for arm in self.arms if parse(Drafter, self.record.arms[arm]["drafter"]).has_signals)

    def _arm_name(self, kind: str) -> str:
        """A sampler wants one name for one set of choices."""
        return "arm" if self.arms_for(kind) == self.arms else "arm_with_signals"

    def parameters(self, kind: str, form: str = "calibrated") -> dict[str, Range | tuple[Any, ...]]:
        """What a point of this kind holds besides the kind: ranges and choices by name."""
        budgets = mixable_budgets(self.record, self.arms)
        found: dict[str, Range | tuple[Any, ...]] = {"k": Range(1, self.k_max, "int")}
        if self.search.between and budgets is not None:
            found["budget"] = Range(*budgets, "int_log")
        else:
            found[self._arm_name(kind)] = self.arms_for(kind)
        if kind == "entropy":
            found["entropy.threshold"] = Range(-0.2, 0.95)
        if kind == "confidence":
            found["confidence.threshold"] = Range(0.05, 0.95)
        if kind == "rate":
            found["rate.form"] = ("calibrated", "paper")
            found["rate.gamma"] = Range(self.gamma / 4.0, self.gamma * 4.0, "log")
            found["rate.beta"] = (0.8, 0.9, 0.95, 0.99)
            if form == "calibrated":
                found["rate.learning_rate"] = (0.0, 0.02, 0.1)
                found["rate.shift"] = Range(-2.0, 2.0, step=0.5)  # added to the fitted bias
        return found

    def suggestions(self) -> list[Point]:
        """Points worth a first try: what the fits and the papers recommend, for every arm."""
        points: list[Point] = []
        for arm in self.arms:
            extras: dict[str, Point] = {
                "fixed": {"k": min(4, self.k_max)},
                "entropy": {"entropy.threshold": 0.4},
                "confidence": {"confidence.threshold": 0.4},
                "rate": {
                    "rate.form": "calibrated",
                    "rate.gamma": self.gamma,
                    "rate.beta": 0.9,
                    "rate.learning_rate": 0.02,
                    "rate.shift": 0.0,
                },
            }
            for kind in self.kinds():
                if arm in self.arms_for(kind):
                    between = "budget" in self.parameters(kind)
                    place = {"budget": self.record.budget(arm)} if between else {self._arm_name(kind): arm}
                    points.append({"controller": kind, "k": self.k_max, **place, **extras[kind]})
        return points

    def grid(self, limit: int) -> list[Point] | None:
        """Every point of the space on its grid, or None when there are more than `limit`."""
        points = list(itertools.islice(self.grid_points(), limit + 1))
        return points if len(points) <= limit else None

    def grid_points(self) -> Iterator[Point]:
        """Every point of the space on its grid, kind by kind."""
        for kind in self.kinds():
            for form in ("calibrated", "paper") if kind == "rate" else ("",):
                axes = self.parameters(kind, form)
                if kind == "rate":
                    axes["rate.form"] = (form,)
                values = [axis.grid() if isinstance(axis, Range) else list(axis) for axis in axes.values()]
                for combination in itertools.product(*values):
                    yield {"controller": kind, **dict(zip(axes, combination, strict=True))}

    def policy(self, point: Point) -> Policy:
        """The policy at a point."""
        kind, k = point["controller"], int(point["k"])
        place = point.get("arm", point.get("arm_with_signals"))
        arm = self._nearest(int(point["budget"])) if place is None else int(place)
        draft_kv = dict(self.record.arms[arm]["draft_kv"])
        if "budget" in point:
            page = int(draft_kv.get("page", 1))
            draft_kv["budget"] = round(int(point["budget"]) / page) * page
        controller: dict[str, Any] = {"kind": kind, ("k" if kind == "fixed" else "k_max"): k}
        controller |= {
            name.split(".")[1]: value
            for name, value in point.items()
            if name.startswith(f"{kind}.") and not name.endswith(".shift")
        }
        if kind == "rate":
            controller |= self._rate_start(arm, point)
        controller = {name: round(v, 6) if isinstance(v, float) else v for name, v in controller.items()}
        if hasattr(CONTROLLERS[kind][0], "lag"):
            controller["lag"] = self.search.lag
        drafter = dict(self.record.arms[arm]["drafter"])
        name = short_name(drafter, controller, draft_kv)
        return policy_from_mapping({"name": name, "drafter": drafter, "controller": controller, "draft_kv": draft_kv})

    def _nearest(self, budget: int) -> int:
        return min(self.arms, key=lambda arm: abs(self.record.budget(arm) - budget))

    def _rate_start(self, arm: int, point: Point) -> dict[str, float]:
        fit = self.fits[arm]
        if fit is None:
            return {}
        start = {"acceptance": fit.acceptance}
        if point["rate.form"] == "paper":
            return {**start, "accepted_nats": fit.accepted_nats, "rejected_nats": fit.rejected_nats}
        return {**start, "bias": fit.bias + float(point["rate.shift"]), "slope": fit.slope}
