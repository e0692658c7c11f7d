"""Samplers by the size and shape of a space, and a private study in which a worker draws from them.

A draw depends on the seed, the number that the trial will have, and what the study holds, so a lone worker walks the
same way every time, killed in between or not. Workers that meet mix their own luck in, or they would draw the same.
Parameters in turn take their values round-robin.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.search_space import IntersectionSearchSpace
from optuna.trial import FrozenTrial, TrialState

from specdial.simulator.objectives import Goal, Metrics
from specdial.simulator.space import Space
from specdial.simulator.study import REPLAY, quiet

Sampler = Literal["auto", "brute", "gp", "nsga2", "nsga3", "tpe", "random"]
GENERATION = 50  # one population of NSGA
GP_TRIALS = range(20, 101)  # before, it has nothing to learn from; beyond, it takes seconds a trial
# Trials asked for before any is answered: they are replayed together.
BATCH = {"brute": 200, "gp": 1, "nsga2": GENERATION, "nsga3": GENERATION, "tpe": 10, "random": GENERATION}


def sampler_for(space: Space, trials: int, objectives: int, grid_fits: bool) -> str:
    """What `auto` takes: the whole grid where it fits, a Gaussian process for few trials in a space without conditions,
    NSGA-II for two objectives, NSGA-III for more, TPE for one."""
    if grid_fits:
        return "brute"
    if trials in GP_TRIALS and not space.conditional:
        return "gp"
    return {1: "tpe", 2: "nsga2"}.get(objectives, "nsga3")


class Draws:
    """Asks a sampler for points. The private study mirrors what the shared one has finished; it costs no writes."""

    def __init__(self, name: str, seed: int, goal: Goal, in_turn: Mapping[str, Sequence[Any]]) -> None:
        self._goal, self._mirrored = goal, set[int]()
        self._sampler = _make_sampler(name, seed, in_turn, bool(goal.bounds))
        with quiet():
            self._study = optuna.create_study(directions=goal.directions, sampler=self._sampler)

    def learn(self, trials: Sequence[FrozenTrial]) -> None:
        """Take over what others, or this worker in an earlier life, found out."""
        for trial in trials:
            if trial.state == TrialState.COMPLETE and trial.number not in self._mirrored:
                self._mirrored.add(trial.number)
                over = list(self._goal.violations(trial.user_attrs[REPLAY]["metrics"]).values())
                self._study.add_trial(
                    optuna.trial.create_trial(
                        values=trial.values,
                        params=trial.params,
                        distributions=trial.distributions,
                        user_attrs={"violations": over},
                        system_attrs={**trial.system_attrs, **({"constraints": over} if over else {})},
                    )
                )

    def ask(self, number: int) -> optuna.Trial:
        """A trial to suggest parameters from. number: what it is expected to have in the shared study."""
        self._sampler.number = number
        return self._study.ask()

    def made(self, trial: optuna.Trial) -> FrozenTrial:
        """A trial of `ask` with all that was suggested."""
        return self._study.get_trials(deepcopy=False)[trial.number]

    def met(self, number: int, expected: int) -> None:
        """Say which number a trial got: another than expected means that other workers draw, too."""
        if number != expected and not self._sampler.luck:
            self._sampler.luck = secrets.randbits(32)

    def tell(self, trial: optuna.Trial, number: int, values: list[float] | None, metrics: Metrics) -> None:
        """Finish a trial of `ask`, which is number in the shared study."""
        self._mirrored.add(number)
        if values is None:
            self._study.tell(trial, state=TrialState.FAIL)
            return
        _set_violations(trial, self._goal.violations(metrics))
        self._study.tell(trial, values)


def _make_sampler(name: str, seed: int, in_turn: Mapping[str, Sequence[Any]], bounded: bool) -> "_ByNumber":
    asks = bounded and not hasattr(optuna.Trial, "set_constraint")  # Optuna 4.9
    bounds: dict[str, Any] = {"constraints_func": _violations} if asks else {}
    kinds: dict[str, Callable[[int], BaseSampler]] = {
        "random": lambda s: optuna.samplers.RandomSampler(seed=s),
        "gp": lambda s: optuna.samplers.GPSampler(seed=s, deterministic_objective=True, **bounds),
        "nsga2": lambda s: optuna.samplers.NSGAIISampler(seed=s, population_size=GENERATION, **bounds),
        "nsga3": lambda s: optuna.samplers.NSGAIIISampler(seed=s, population_size=GENERATION, **bounds),
        "tpe": lambda s: optuna.samplers.TPESampler(seed=s, n_startup_trials=GENERATION, constant_liar=True, **bounds),
    }
    return _ByNumber(kinds.get(name, kinds["random"]), seed, in_turn, intersects=name in ("nsga2", "nsga3"))


def _set_violations(trial: optuna.Trial, violations: Mapping[str, float]) -> None:
    """Tell the sampler how far each bound is overstepped, the way this Optuna takes it."""
    if not violations:
        return
    if not hasattr(trial, "set_constraint"):
        trial.set_user_attr("violations", list(violations.values()))
        return
    for name, over in violations.items():
        trial.set_constraint(name, over)


def _violations(trial: FrozenTrial) -> list[float]:
    return list(trial.user_attrs["violations"])


class _ByNumber(BaseSampler):
    """A fresh sampler for every trial, seeded by its number and this worker's luck, 0 while it is alone.

    intersects: its relative search space is what all trials have in common, which is kept from trial to trial here, as
    a fresh sampler would go through all of them again.
    """

    def __init__(
        self, make: Callable[[int], BaseSampler], seed: int, in_turn: Mapping[str, Sequence[Any]], intersects: bool
    ) -> None:
        self._make, self._seed, self._in_turn = make, seed, in_turn
        self.number = self.luck = 0
        self._common = IntersectionSearchSpace() if intersects else None
        with quiet():
            self._inner = make(seed)

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        seeds = np.random.SeedSequence((self._seed, self.number, self.luck)).generate_state(1)
        with quiet():
            self._inner = self._make(int(seeds[0]))
        self._inner.before_trial(study, trial)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        if self._common is None:
            found = self._inner.infer_relative_search_space(study, trial)
        else:
            found = {name: axis for name, axis in self._common.calculate(study).items() if not axis.single()}
        return {name: axis for name, axis in found.items() if name not in self._in_turn}

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return self._inner.sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        if param_name in self._in_turn:
            values = self._in_turn[param_name]
            return values[self.number % len(values)]
        return self._inner.sample_independent(study, trial, param_name, param_distribution)

    def after_trial(
        self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        self._inner.after_trial(study, trial, state, values)
