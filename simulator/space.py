"""The space `tune` searches, conditional where it must be: a point holds what its own choices give a meaning to.

A point is a flat mapping of parameters; every point is one policy at one batch. Settings that a kind ignores are not in
its points, so that equal policies are recognised as equal. Points may name what was not recorded: replay says so, trial
by trial. Leaves out the search (simulator.search).
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from specdial.policies.controllers import CONTROLLERS
from specdial.policies.drafting import DEFAULT_BUDGET, DEFAULT_WINDOW
from specdial.policies.errors import UserError
from specdial.policies.fields import parse
from specdial.policies.naming import short_name
from specdial.policies.schema import Drafter, DraftKV, Policy, policy_from_mapping
from specdial.policies.verification import LOOKAHEAD, SOURCE_USES
from specdial.simulator.acceptance import RateFit, fit_rate
from specdial.simulator.axes import Axis, Range, Search
from specdial.simulator.head_sets import HeadSets, read_head_sets
from specdial.simulator.lanes import Record
from specdial.simulator.support import mixable_budgets

Point = dict[str, Any]
KV_AXES = ("sink", "recent", "decay", "window", "scope", "page", "refresh_rounds")
VERIFY_AXES = ("budget", "sink", "recent", "scope", "page", "lookahead_tokens", "refresh", "bound", "rows")
PERIOD_AXES = ("full_period", "buffer")  # of every source
# Where a first try of each kind starts: what the fits and the papers recommend.
FIRST: dict[str, Any] = {
    "entropy.threshold": 0.4,
    "confidence.threshold": 0.4,
    "rate.form": "calibrated",
    "rate.beta": 0.9,
    "rate.learning_rate": 0.02,
    "rate.shift": 0.0,
    "rate.steepness": 1.0,
}


@dataclass(frozen=True, slots=True)
class Space:
    """A Search made concrete by what a record holds.

    arms: places of the arms to try. with_signals: those whose drafter says how sure each draft is. labels: of their
    drafters. fits: rate fits by arm. kv: values of each draft_kv axis, filled where `search` names some. mixable:
    lowest and highest budget where those in between are tried too.
    """

    search: Search
    record: Record
    k_max: int
    arms: tuple[int, ...]
    with_signals: tuple[int, ...]
    labels: dict[int, str]
    fits: dict[int, RateFit | None]
    gamma: float
    kv: dict[str, tuple[Any, ...]]
    mixable: tuple[int, int] | None
    heads: HeadSets

    @classmethod
    def of(cls, search: Search, record: Record, gamma: float) -> "Space":
        """gamma: measured draft cost over verification cost, the middle of what `rate` is told.

        Raises UserError when the search names what cannot be: unknown kinds, drafters or budgets that were not
        recorded, an empty list of values.
        """
        unknown = [kind for kind in search.controllers if kind not in CONTROLLERS]
        if unknown:
            raise UserError(f"search.controllers names {unknown[0]!r}", f"use some of {', '.join(CONTROLLERS)}")
        if not record.arms or record.k_max < 1:
            raise UserError("the trace has no recorded drafts to tune on", "record with dense=true")
        if search.k_max is not None and search.k_max > record.k_max:
            raise UserError(f"search.k_max is {search.k_max}", f"the trace recorded up to {record.k_max}")
        drafters = {i: parse(Drafter, arm["drafter"]) for i, arm in enumerate(record.arms)}
        known = sorted({drafter.label for drafter in drafters.values()})
        strange = [label for label in search.drafters if label not in known]
        if strange:
            raise UserError(f"drafter {strange[0]} was not recorded", f"use some of {', '.join(known)}")
        recorded = [record.budget(arm) for arm in drafters]
        missing = sorted(set(search.budgets) - set(recorded))
        if missing and not search.draft_kv:
            raise UserError(f"budget {missing[0]} was not recorded", f"use some of {sorted(set(recorded))}")
        by_budget = bool(search.budgets) and not search.draft_kv
        arms = tuple(
            i
            for i, drafter in drafters.items()
            if (not search.drafters or drafter.label in search.drafters)
            and (not by_budget or not drafter.reads_selection or recorded[i] in search.budgets)
        )
        if not arms:
            cause = "search.drafters and search.budgets leave no recorded drafts"
            raise UserError(cause, "name a drafter together with a budget that it was recorded with")
        empty = [name for name in ("mode", *VERIFY_AXES, "source", *PERIOD_AXES) if not getattr(search.verify_kv, name)]
        if empty:
            raise UserError(f"search.verify_kv.{empty[0]} is empty", "name at least one value")
        with_signals = tuple(i for i in arms if drafters[i].has_signals)
        return cls(
            search,
            record,
            search.k_max or record.k_max,
            arms,
            with_signals,
            {i: drafters[i].label for i in arms},
            {arm: fit_rate(record, arm, "train") for arm in arms},
            max(gamma, 1e-3),
            _kv_values(search, record, arms) if search.draft_kv else {},
            mixable_budgets(record, arms) if search.between and not search.draft_kv else None,
            read_head_sets(search.verify_kv.heads, search.verify_kv.head_counts),
        )

    def kinds(self) -> tuple[str, ...]:
        """Controller kinds that draft, on some arm."""
        return tuple(kind for kind in self.search.controllers if kind != "none" and self.arms_for(kind))

    @property
    def conditional(self) -> bool:
        """Does what a point holds depend on its choices?"""
        kinds = self.kinds()
        return len(kinds) > 1 or "rate" in kinds or bool(self.kv) or len(self.search.verify_kv.mode) > 1

    def arms_for(self, kind: str) -> tuple[int, ...]:
        """The arms that a kind can draft with: where it looks at signals, those whose drafter has them."""
        return self.with_signals if CONTROLLERS[kind][1].adaptive else self.arms

    def axes(self, point: Point) -> dict[str, Axis]:
        """Every parameter that the choices made so far give a meaning to, in the order they are to be chosen in."""
        found: dict[str, Axis] = {"controller": self.kinds()}
        if "controller" not in point:
            return found
        kind = point["controller"]
        if len(self.search.batches) > 1:
            found["batch"] = self.search.batches
        found |= self._selection(point, kind)
        found |= self._verification(point)
        found["k"] = Range(1, self.k_max, "int")
        if kind == "entropy":
            found["entropy.threshold"] = Range(-0.2, 0.95)
        if kind == "confidence":
            found["confidence.threshold"] = Range(0.05, 0.95)
        if kind == "rate":
            found["rate.form"] = ("calibrated", "paper")
            found["rate.gamma"] = Range(self.gamma / 4.0, self.gamma * 4.0, "log")
            found["rate.beta"] = (0.8, 0.9, 0.95, 0.99)
            if point.get("rate.form") == "calibrated":
                found["rate.learning_rate"] = (0.0, 0.02, 0.1)
                found["rate.shift"] = Range(-2.0, 2.0, step=0.5)  # added to the fitted bias
                found["rate.steepness"] = (1.0, 0.5, 2.0)  # times the fitted slope
        return found

    def next_axis(self, point: Point) -> tuple[str, Axis] | None:
        """The first parameter that a point still lacks."""
        return next(((name, axis) for name, axis in self.axes(point).items() if name not in point), None)

    def policy(self, point: Point) -> Policy:
        """The policy at a point. Raises UserError where its settings contradict each other."""
        kind, k = point["controller"], int(point["k"])
        arm = self._arm(point)
        drafter, draft_kv = dict(self.record.arms[arm]["drafter"]), self._draft_kv(point, arm)
        controller: dict[str, Any] = {"kind": kind, ("k" if kind == "fixed" else "k_max"): k}
        controller |= {
            name.split(".")[1]: value
            for name, value in point.items()
            if name.startswith(f"{kind}.") and not name.endswith((".shift", ".steepness"))
        }
        if kind == "rate":
            controller |= self._rate_start(arm, point)
        controller = {name: round(v, 6) if isinstance(v, float) else v for name, v in controller.items()}
        if hasattr(CONTROLLERS[kind][0], "lag"):
            controller["lag"] = self.search.lag
        verify_kv = self._verify_kv(point)
        parts = {"drafter": drafter, "controller": controller, "draft_kv": draft_kv, "verify_kv": verify_kv}
        heads = self.heads.of(point.get("heads"), verify_kv) if verify_kv["mode"] == "partial" else {}
        return policy_from_mapping({"name": short_name(**parts), **parts, **heads})

    def suggestions(self) -> list[Point]:
        """Points worth a first try, for every kind on every arm, or on every drafter where selections are combined."""
        points = []
        for kind in self.kinds():
            axis = self.axes({"controller": kind})
            name = next(n for n in axis if n.startswith(("arm", "drafter", "budget")))
            places = [self.record.budget(arm) for arm in self.arms] if name == "budget" else axis[name]
            for place in dict.fromkeys(places):  # type: ignore[arg-type]
                points.append(self._completed({"controller": kind, name: place}))
        return points

    def grid(self, limit: int) -> list[Point] | None:
        """Every point of the space on its grid, or None when there are more than `limit`."""
        points = list(itertools.islice(self.grid_points(), limit + 1))
        return points if len(points) <= limit else None

    def grid_points(self, point: Point | None = None) -> Iterator[Point]:
        """Every point of the space on its grid that begins as `point` does, kind by kind."""
        point = point or {}
        wanted = self.next_axis(point)
        if wanted is None:
            yield point
            return
        name, axis = wanted
        for value in axis.grid() if isinstance(axis, Range) else axis:
            yield from self.grid_points({**point, name: value})

    def _completed(self, point: Point) -> Point:
        while (wanted := self.next_axis(point)) is not None:
            name, axis = wanted
            first: Any = FIRST.get(name, self.gamma if name == "rate.gamma" else None)
            if name == "k":
                first = min(4, self.k_max) if point["controller"] == "fixed" else self.k_max
            point = {**point, name: first if isinstance(axis, Range) or first in axis else axis[0]}
        return point

    def _selection(self, point: Point, kind: str) -> dict[str, Axis]:
        """A sampler wants one name for one set of choices: where signals are needed, some drafters are left out."""
        suffix = "" if self.arms_for(kind) == self.arms else "_with_signals"
        if self.mixable is not None:
            return {"budget": Range(*self.mixable, "int_log")}
        if not self.search.draft_kv:
            return {f"arm{suffix}": self.arms_for(kind)}
        found: dict[str, Axis] = {}
        found[f"drafter{suffix}"] = tuple(dict.fromkeys(self.labels[arm] for arm in self.arms_for(kind)))
        label = point.get(f"drafter{suffix}")
        if label is not None and self._drafter(label).reads_selection:
            found |= {f"draft_kv.{name}": values for name, values in self.kv.items() if len(values) > 1}
            if point.get("draft_kv.decay", self.kv["decay"][0]) < 1.0:
                found.pop("draft_kv.window", None)
        return found

    def _verification(self, point: Point) -> dict[str, Axis]:
        verify = self.search.verify_kv
        found: dict[str, Axis] = {}
        if len(verify.mode) > 1:
            found["verify_kv.mode"] = verify.mode
        if point.get("verify_kv.mode", verify.mode[0]) == "full":
            return found
        if len(verify.source) > 1:
            found["verify_kv.source"] = verify.source
        source = point.get("verify_kv.source", verify.source[0])
        values = {name: getattr(verify, name) for name in _verify_axes(source)}
        found |= {f"verify_kv.{name}": tried for name, tried in values.items() if len(tried) > 1}
        if len(self.heads.counts) > 1 and source in ("history", *LOOKAHEAD):
            found["heads"] = self.heads.counts
        return found

    def _arm(self, point: Point) -> int:
        """The recorded arm of a point, or the one nearest in budget with its drafter."""
        place = point.get("arm", point.get("arm_with_signals"))
        if place is not None:
            return int(place)
        label = point.get("drafter", point.get("drafter_with_signals"))
        budget: float = point.get("budget", point.get("draft_kv.budget")) or 0
        arms = [arm for arm in self.arms if label in (None, self.labels[arm])]
        return min(arms, key=lambda arm: abs(self.record.budget(arm) - budget))

    def _drafter(self, label: str) -> Drafter:
        return parse(Drafter, self.record.arms[next(a for a in self.arms if self.labels[a] == label)]["drafter"])

    def _draft_kv(self, point: Point, arm: int) -> dict[str, Any]:
        draft_kv = dict(self.record.arms[arm]["draft_kv"])
        if "budget" in point:
            page = int(draft_kv.get("page", 1))
            draft_kv["budget"] = round(int(point["budget"]) / page) * page
        if (
            "arm" in point
            or "arm_with_signals" in point
            or not self.kv
            or not self._drafter(self.labels[arm]).reads_selection
        ):
            return draft_kv
        draft_kv |= {name: point.get(f"draft_kv.{name}", values[0]) for name, values in self.kv.items()}
        if isinstance(draft_kv["budget"], float):
            draft_kv |= {"budget_frac": draft_kv["budget"], "budget": DEFAULT_BUDGET}
        else:
            draft_kv["budget_frac"] = 0.0
        if draft_kv["decay"] < 1.0:
            draft_kv["window"] = DEFAULT_WINDOW
        return draft_kv

    def _verify_kv(self, point: Point) -> dict[str, Any]:
        verify = self.search.verify_kv
        if point.get("verify_kv.mode", verify.mode[0]) == "full":
            return {"mode": "full"}
        source = point.get("verify_kv.source", verify.source[0])
        chosen = {name: point.get(f"verify_kv.{name}", getattr(verify, name)[0]) for name in _verify_axes(source)}
        return {"mode": "partial", "source": source, **chosen}

    def _rate_start(self, arm: int, point: Point) -> dict[str, float]:
        fit = self.fits[arm]
        if fit is None:
            return {}
        start = {"acceptance": fit.acceptance}
        if point["rate.form"] == "paper":
            return {**start, "accepted_nats": fit.accepted_nats, "rejected_nats": fit.rejected_nats}
        return {
            **start,
            "bias": fit.bias + float(point["rate.shift"]),
            "slope": fit.slope * point.get("rate.steepness", 1.0),
        }


def _verify_axes(source: str) -> tuple[str, ...]:
    """Settings of a partial verification by this source."""
    return (*(name for name in VERIFY_AXES if source in SOURCE_USES.get(name, (source,))), *PERIOD_AXES)


def _kv_values(search: Search, record: Record, arms: tuple[int, ...]) -> dict[str, tuple[Any, ...]]:
    """Values of every draft_kv axis: those declared, else those recorded. Fractions are floats, keys whole numbers."""
    kept = [
        parse(DraftKV, record.arms[i]["draft_kv"])
        for i in arms
        if parse(Drafter, record.arms[i]["drafter"]).reads_selection
    ]
    if not kept:
        raise UserError("search.draft_kv is given, and no recorded drafter reads a selection", "leave it empty")
    sizes: list[Any] = [*search.budgets, *search.draft_kv.budget_frac]
    sizes = sizes or [kv.budget_frac or kv.budget for kv in kept]
    mixable = mixable_budgets(record, arms) if search.between else None
    if mixable is not None:
        sizes += [round(size / kept[0].page) * kept[0].page for size in Range(*mixable, "int_log").grid()]
    found = {name: getattr(search.draft_kv, name) or tuple(getattr(kv, name) for kv in kept) for name in KV_AXES}
    return {name: tuple(sorted(set(values))) for name, values in {"budget": sizes, **found}.items()}
