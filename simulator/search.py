"""Search over policies by replay: Optuna asks, replay answers whole generations at once, equal policies are run once.

All that is found lies in the study, so that workers share it and a killed search goes on. Policies that the record or
the costs do not support are failed trials with their reason. Leaves out selection (simulator.choice).
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from specdial.policies.errors import UserError
from specdial.policies.file import policy_digest
from specdial.policies.schema import Policy
from specdial.simulator.axes import Axis, Range
from specdial.simulator.objectives import METRICS, Goal, Metrics, front, hypervolume, measured_metrics
from specdial.simulator.outcome import Outcome
from specdial.simulator.samplers import BATCH, GENERATION, Draws
from specdial.simulator.space import Point, Space
from specdial.simulator.study import REPLAY, SURPLUS, Shared, admitted, is_done, lost, root_of

Evaluate = Callable[[Sequence[Policy], int], list[Outcome]]  # policies, batch
STALL_FRAC = 1e-3  # less growth of the hypervolume than this is none
WAIT_S = 0.1  # between looks at what other workers still have under way


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to search and by what. stall: generations without growth after which to stop, 0 for none.

    given: points to try first; of brute force, all of them.
    """

    sampler: str
    trials: int
    seed: int
    goal: Goal
    given: tuple[Point, ...] = ()
    stall: int = 0
    batch: int = 1


@dataclass(frozen=True, slots=True)
class Tried:
    """One distinct (policy, batch): the first point that led to it, how many did, its replay on the tuning split."""

    point: Point
    digest: str
    batch: int
    points: int
    level: str
    reason: str | None
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class Found:
    """All of a search, in the order of trials. refused: how many trials by kind of reason. stopped: at a stall."""

    sampler: str
    trials: int
    tried: tuple[Tried, ...]
    refused: dict[str, int] = field(default_factory=dict)
    stopped: bool = False


def search(
    shared: Shared,
    space: Space,
    evaluate: Evaluate,
    plan: Plan,
    on_trials: Callable[[int, str], None] = lambda done, best: None,
) -> Found:
    """Work on the study until its trials are done, by this worker or others. on_trials: told how many more are,
    and the best of the first objective so far, in words.
    """
    worker, known = _Worker(shared, space, evaluate, plan), 0
    while True:
        shared.recover()
        trials = shared.trials()
        done = {root_of(trial) for trial in trials if is_done(trial)}
        on_trials(len(done) - known, best_so_far(trials, plan.goal))
        known = len(done)
        limit = _limit(trials, plan)
        if len(done) >= limit:
            return found(trials, plan)
        if not worker.generation(trials, limit):
            time.sleep(WAIT_S)


def best_so_far(trials: Sequence[FrozenTrial], goal: Goal) -> str:
    """The first objective of the best trial whose bounds hold, as in "best speedup 1.08"; empty before there is one."""
    name = goal.objectives[0]
    metrics = [trial.user_attrs[REPLAY]["metrics"] for trial in trials if is_done(trial)]
    values = [value for found in metrics if goal.feasible(found) and (value := found[name]) is not None]
    if not values:
        return ""
    return f"best {name} {min(values, key=lambda value: METRICS[name].sign * value):.4g}"


def found(trials: Sequence[FrozenTrial], plan: Plan) -> Found:
    """What a study holds."""
    tried: dict[tuple[str, int], Tried] = {}
    refused: Counter[str] = Counter()
    roots: set[str] = set()
    for trial in trials:
        if not is_done(trial) or root_of(trial) in roots:
            continue
        roots.add(root_of(trial))
        replay = trial.user_attrs[REPLAY]
        key = replay["policy_digest"], replay["batch"]
        known = tried.get(key)
        if replay["level"] == "refused":
            refused[_kind_of(replay["reason"])] += 1
        facts = (replay["level"], replay["reason"], replay["metrics"])
        tried[key] = Tried(known.point if known else trial.params, *key, known.points + 1 if known else 1, *facts)
    return Found(plan.sampler, len(roots), tuple(tried.values()), dict(refused.most_common()), len(roots) < plan.trials)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A trial of this worker's own: in the shared study, and in that of its draws where it was drawn."""

    trial_id: int
    number: int
    point: Point
    drawn: optuna.Trial | None


class _Worker:
    """Takes a generation of trials and answers them. known: replays by (policy digest, batch), of all workers."""

    def __init__(self, shared: Shared, space: Space, evaluate: Evaluate, plan: Plan) -> None:
        self.shared, self.space, self.evaluate, self.plan = shared, space, evaluate, plan
        self.known: dict[tuple[str, int], dict[str, Any]] = {}
        in_turn = {"batch": space.search.batches} if len(space.search.batches) > 1 else {}
        self.draws = Draws(plan.sampler, plan.seed, plan.goal, in_turn)

    def generation(self, trials: Sequence[FrozenTrial], limit: int) -> bool:
        """Run what is free to be run; False where there is nothing. Lost trials first, then given points."""
        self.draws.learn(trials)
        roots = {root_of(trial) for trial in trials if not trial.user_attrs.get(SURPLUS)}
        free = max(limit - len(roots), 0)
        again = [(root_of(trial), trial.params) for trial in lost(trials)]
        given = [(f"given-{i}", point) for i, point in enumerate(self.plan.given) if f"given-{i}" not in roots]
        known = (again + given[:free])[: BATCH[self.plan.sampler]]
        draw = min(BATCH[self.plan.sampler], len(again) + free) - len(known)
        if not known and draw <= 0:
            return False
        asked = [self._take_given(root, point) for root, point in known]
        expected = len(trials) + len(asked)
        asked += [self._draw(expected + i) for i in range(draw)]
        trials = self.shared.trials()
        mine = admitted(trials, limit)
        for one in asked:
            if one.number not in mine:
                self._finish(one, None, {SURPLUS: True})
        run = [one for one in asked if one.number in mine]
        for one, replay in zip(run, self._replays(trials, [one.point for one in run]), strict=True):
            self._finish(one, None if replay["level"] == "refused" else replay["metrics"], {REPLAY: replay})
        return True

    def _take_given(self, root: str, point: Point) -> _Asked:
        made: Point = {}
        axes = {}
        while (wanted := self.space.next_axis(made)) is not None:
            name, axis = wanted
            made, axes[name] = {**made, name: point[name]}, distribution(axis)
        template = optuna.trial.create_trial(state=TrialState.RUNNING, params=made, distributions=axes)
        return _Asked(*self.shared.take(template, root), made, None)

    def _draw(self, expected: int) -> _Asked:
        trial = self.draws.ask(expected)
        point = _suggest(self.space, trial)
        trial_id, number = self.shared.take(self.draws.made(trial), None)
        self.draws.met(number, expected)
        return _Asked(trial_id, number, point, trial)

    def _finish(self, one: _Asked, metrics: Metrics | None, attributes: dict[str, Any]) -> None:
        values = None if metrics is None else self.plan.goal.values(metrics)
        if one.drawn is not None:
            self.draws.tell(one.drawn, one.number, values, metrics or {})
        self.shared.finish(one.trial_id, values, attributes)

    def _replays(self, trials: Sequence[FrozenTrial], points: list[Point]) -> list[dict[str, Any]]:
        """One answer per point; policies that nobody replayed before are replayed together."""
        for trial in trials:
            replay = trial.user_attrs.get(REPLAY)
            if replay is not None:
                self.known.setdefault((replay["policy_digest"], replay["batch"]), replay)
        keys, wanted = [], dict[int, dict[str, Policy]]()
        for point in points:
            batch = int(point.get("batch", self.plan.batch))
            try:
                policy = self.space.policy(point)
            except UserError as error:
                key = f"contradiction: {error.cause}", batch
                self.known[key] = _answer(*key, "refused", error.cause, {})
            else:
                key = policy_digest(policy), batch
                if key not in self.known:
                    wanted.setdefault(batch, {})[key[0]] = policy
            keys.append(key)
        for batch, policies in wanted.items():
            outcomes = self.evaluate(list(policies.values()), batch)
            for digest, outcome in zip(policies, outcomes, strict=True):
                self.known[digest, batch] = self._judged(digest, outcome, batch)
        return [self.known[key] for key in keys]

    def _judged(self, digest: str, outcome: Outcome, batch: int) -> dict[str, Any]:
        metrics = measured_metrics(outcome, self.space.record)
        lacking = [name for name in self.plan.goal.metrics if metrics[name] is None]
        if outcome.level == "refused" or lacking:
            reason = outcome.reason if outcome.level == "refused" else f"replay does not know its {lacking[0]}"
            return _answer(digest, batch, "refused", reason, {})
        return _answer(digest, batch, outcome.level, outcome.reason, metrics)


def _kind_of(reason: str) -> str:
    """A reason without the values and lists that tell one trial's from another's."""
    found = re.sub(r" \(.*\)$", "", reason.split(";")[0])
    return re.sub(r"\b((?:drafter|draft_kv|verify_kv)\.\w+) [^ ,]+", r"\1", found)


def _answer(digest: str, batch: int, level: str, reason: str | None, metrics: Metrics) -> dict[str, Any]:
    return {"policy_digest": digest, "batch": batch, "level": level, "reason": reason, "metrics": metrics}


def _limit(trials: Sequence[FrozenTrial], plan: Plan) -> int:
    """How many trials there are to be: those of the plan, or those up to where the front stopped growing.

    The volume is looked at after every full generation by number, so all workers stop at the same trial. A search that
    has found nothing within its bounds goes on.
    """
    if not plan.stall or len(trials) < (plan.stall + 1) * GENERATION:
        return plan.trials
    volumes: list[float] = []
    best: list[list[float]] = []
    low = reference = np.zeros(0)
    for first in range(0, len(trials) - GENERATION + 1, GENERATION):
        generation = trials[first : first + GENERATION]
        if not all(trial.state.is_finished() for trial in generation):
            break
        metrics = [t.user_attrs[REPLAY]["metrics"] for t in generation if t.state == TrialState.COMPLETE]
        costs = best + [plan.goal.costs(m) for m in metrics if plan.goal.feasible(m)]
        if not costs:
            continue  # there is no front yet
        best = [costs[i] for i in front(costs)]
        if not len(reference):
            low, reference = np.min(costs, axis=0), np.max(costs, axis=0)
            least = 1e-9 * np.maximum(np.abs(reference), 1e-3)  # or one point alone would span nothing
            reference = reference + 0.1 * np.maximum(reference - low, least)
        volumes.append(hypervolume((np.array(best) - low) / (reference - low), np.ones(len(low))))
        if len(volumes) > plan.stall and volumes[-1] <= volumes[-1 - plan.stall] * (1.0 + STALL_FRAC):
            return min(plan.trials, len({root_of(t) for t in trials[: first + GENERATION] if is_done(t)}))
    return plan.trials


def _suggest(space: Space, trial: optuna.Trial) -> Point:
    """Ask the sampler for one point: each parameter once the choices before it give it a meaning."""
    point: Point = {}
    while (wanted := space.next_axis(point)) is not None:
        name, axis = wanted
        point[name] = _suggest_one(trial, name, distribution(axis))
    return point


def _suggest_one(trial: optuna.Trial, name: str, wanted: BaseDistribution) -> Any:
    if isinstance(wanted, IntDistribution):
        return trial.suggest_int(name, wanted.low, wanted.high, log=wanted.log)
    if isinstance(wanted, FloatDistribution):
        return trial.suggest_float(name, wanted.low, wanted.high, log=wanted.log)
    assert isinstance(wanted, CategoricalDistribution)
    return trial.suggest_categorical(name, wanted.choices)


def distribution(axis: Axis) -> BaseDistribution:
    """The Optuna distribution of an axis."""
    if not isinstance(axis, Range):
        return CategoricalDistribution(axis)
    if axis.scale in ("int", "int_log"):
        return IntDistribution(int(axis.low), int(axis.high), log=axis.scale == "int_log")
    return FloatDistribution(axis.low, axis.high, log=axis.scale == "log")


def fixed_points(space: Space) -> Iterator[Point]:
    """Every fixed k on every recorded arm of the space, verified in full: what any tuned policy has to beat."""
    for arm in space.arms:
        for k in range(1, space.k_max + 1):
            yield {"controller": "fixed", "k": k, "arm": arm, "verify_kv.mode": "full"}
