"""Search over policies by replay: Optuna asks, replay answers whole generations at once, equal policies are run once.

Objectives: speedup (up) and key and value bytes read per token (down), on one split. The sampler is always named and
seeded, so Optuna 4 and 5 walk the same way by their own defaults. Leaves out selection (simulator.choice).
"""

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState

from specdial.policies.file import policy_digest
from specdial.policies.schema import Policy
from specdial.simulator.outcome import Outcome
from specdial.simulator.space import Point, Range, Space

Sampler = Literal["auto", "nsga2", "tpe", "random", "brute"]
Evaluate = Callable[[Sequence[Policy]], list[Outcome]]
GENERATION = 50  # trials asked before any is told: one population of NSGA-II


@dataclass(frozen=True, slots=True)
class Tried:
    """One distinct policy: the first point that led to it, how many points did, its replay on the tuning split."""

    point: Point
    digest: str
    points: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Found:
    """All of a search: distinct policies in the order they were first asked for, and how many trials that took."""

    sampler: str
    trials: int
    tried: tuple[Tried, ...]


def search(
    space: Space,
    evaluate: Evaluate,
    trials: int,
    seed: int,
    sampler: Sampler = "auto",
    *,
    on_trials: Callable[[int], None] = lambda count: None,
) -> Found:
    """Run `trials` trials, or the whole grid by brute force where `auto` finds it no larger than that.

    on_trials: told how many trials each generation finished.
    """
    grid = space.grid(trials) if sampler in ("auto", "brute") else None
    if sampler == "brute" and grid is None:
        grid = list(itertools.islice(space.grid_points(), trials))
    cache = _Cache(space, evaluate)
    if grid is not None:
        cache.outcomes(grid)
        on_trials(len(grid))
        return Found("brute", len(grid), cache.tried())
    name = "nsga2" if sampler == "auto" else sampler
    study = _study(name, seed)
    for point in space.suggestions():
        study.enqueue_trial(point)
    for first in range(0, trials, GENERATION):
        asked = [study.ask() for _ in range(min(GENERATION, trials - first))]
        points = [_suggest(space, trial) for trial in asked]
        for trial, outcome in zip(asked, cache.outcomes(points), strict=True):
            values = objectives(outcome)
            if values is None:
                study.tell(trial, state=TrialState.FAIL)
            else:
                study.tell(trial, list(values))
        on_trials(len(asked))
    return Found(name, trials, cache.tried())


def objectives(outcome: Outcome) -> tuple[float, float] | None:
    """(speedup, key and value bytes per token), or None where refused."""
    if outcome.speedup is None or outcome.kv_bytes_per_token is None:
        return None
    return outcome.speedup, outcome.kv_bytes_per_token


def pareto(outcomes: Sequence[Outcome]) -> list[int]:
    """Places of the outcomes that none other beats in both objectives, fastest first."""
    scored = [(values, i) for i, outcome in enumerate(outcomes) if (values := objectives(outcome)) is not None]
    scored.sort(key=lambda item: (-item[0][0], item[0][1], item[1]))
    front, least = [], float("inf")
    for (_, kv_bytes), i in scored:
        if kv_bytes < least:
            front.append(i)
            least = kv_bytes
    return front


class _Cache:
    """Outcomes by policy digest: a policy met again costs nothing."""

    def __init__(self, space: Space, evaluate: Evaluate) -> None:
        self.space, self.evaluate = space, evaluate
        self._found: dict[str, Tried] = {}

    def outcomes(self, points: Sequence[Point]) -> list[Outcome]:
        """One outcome per point; new policies are replayed together."""
        policies = [self.space.policy(point) for point in points]
        digests = [policy_digest(policy) for policy in policies]
        new = {d: i for i, d in reversed(list(enumerate(digests))) if d not in self._found}
        order = sorted(new.values())
        for i, outcome in zip(order, self.evaluate([policies[i] for i in order]) if order else [], strict=True):
            self._found[digests[i]] = Tried(points[i], digests[i], 0, outcome)
        for digest in digests:
            known = self._found[digest]
            self._found[digest] = Tried(known.point, digest, known.points + 1, known.outcome)
        return [self._found[digest].outcome for digest in digests]

    def tried(self) -> tuple[Tried, ...]:
        return tuple(self._found.values())


def _study(name: str, seed: int) -> optuna.Study:
    samplers: dict[str, Callable[[], optuna.samplers.BaseSampler]] = {
        "nsga2": lambda: optuna.samplers.NSGAIISampler(seed=seed, population_size=GENERATION),
        "tpe": lambda: optuna.samplers.TPESampler(seed=seed, n_startup_trials=GENERATION),
        "random": lambda: optuna.samplers.RandomSampler(seed=seed),
    }
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.create_study(directions=["maximize", "minimize"], sampler=samplers[name]())


def _suggest(space: Space, trial: optuna.Trial) -> Point:
    """Ask the sampler for one point: the kind first, then what that kind has."""
    point: Point = {"controller": trial.suggest_categorical("controller", space.kinds())}
    form = ""
    if point["controller"] == "rate":
        form = point["rate.form"] = str(trial.suggest_categorical("rate.form", ["calibrated", "paper"]))
    for name, axis in space.parameters(point["controller"], form).items():
        if name not in point:
            point[name] = _suggest_one(trial, name, distribution(axis))
    return point


def _suggest_one(trial: optuna.Trial, name: str, wanted: BaseDistribution) -> Any:
    if isinstance(wanted, IntDistribution):
        return trial.suggest_int(name, wanted.low, wanted.high, log=wanted.log)
    if isinstance(wanted, FloatDistribution):
        return trial.suggest_float(name, wanted.low, wanted.high, log=wanted.log)
    assert isinstance(wanted, CategoricalDistribution)
    return trial.suggest_categorical(name, wanted.choices)


def distribution(axis: Range | tuple[Any, ...]) -> BaseDistribution:
    """The Optuna distribution of an axis."""
    if not isinstance(axis, Range):
        return CategoricalDistribution(axis)
    if axis.scale in ("int", "int_log"):
        return IntDistribution(int(axis.low), int(axis.high), log=axis.scale == "int_log")
    return FloatDistribution(axis.low, axis.high, log=axis.scale == "log")


def fixed_points(space: Space) -> Iterator[Point]:
    """Every fixed k on every recorded arm of the space: what any tuned policy has to beat."""
    for arm in space.arms:
        for k in range(1, space.k_max + 1):
            yield {"controller": "fixed", "k": k, "arm": arm}
