"""A study shared by workers that are killed: every trial done once, none lost, whoever dies when."""

import os
import random
import signal
import time

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from specdial.policies.errors import UserError
from specdial.simulator.axes import Search
from specdial.simulator.lanes import read_record
from specdial.simulator.objectives import Goal
from specdial.simulator.outcome import Outcome
from specdial.simulator.search import Plan, search
from specdial.simulator.space import Space
from specdial.simulator.study import NAME, Shared, admitted, is_done, open_storage, root_of

TRIALS = 100


def evaluate(policies, batch):
    time.sleep(0.01)
    return [Outcome(p, "exact", None, True, (), 1, 0, speedup=float(p.k_max), kv_bytes_per_token=1.0) for p in policies]


def shared_at(path):
    return Shared(open_storage(str(path)), Goal(), {"seed": 0})


@pytest.fixture(scope="module")
def space(trace):
    return Space.of(Search(), read_record(trace), gamma=0.2)


@pytest.fixture(scope="module")
def plan(space):
    return Plan("nsga2", TRIALS, 0, Goal(), tuple(space.suggestions()))


def check_whole(trials, plan):
    done = [trial for trial in trials if is_done(trial)]
    assert len(done) == len({root_of(trial) for trial in done}) == plan.trials
    assert not [trial for trial in trials if trial.state in (TrialState.RUNNING, TrialState.WAITING)]
    given = {root_of(trial): trial.params for trial in done if root_of(trial).startswith("given-")}
    assert given == {f"given-{i}": point for i, point in enumerate(plan.given)}
    assert sorted(trial.number for trial in trials) == list(range(len(trials)))


def test_killed_workers_lose_nothing_and_nothing_counts_twice(space, plan, tmp_path):
    """Two workers at a time; each of the first four dies at a random moment, one by one replaced."""

    def start():
        child = os.fork()
        if not child:
            try:
                search(shared_at(tmp_path / "journal"), space, evaluate, plan)
            finally:
                os._exit(0)
        return child

    chance = random.Random(0)
    workers = [start(), start()]
    for _ in range(4):
        time.sleep(chance.uniform(0.02, 0.25))
        victim = workers.pop(0)
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)
        workers.append(start())
    shared = shared_at(tmp_path / "journal")
    found = search(shared, space, evaluate, plan)
    for worker in workers:
        os.waitpid(worker, 0)
    assert found.trials == TRIALS
    assert sum(tried.points for tried in found.tried) == TRIALS
    check_whole(shared.trials(), plan)
    # What any other program that knows Optuna's journal sees.
    seen = optuna.load_study(study_name=NAME, storage=JournalStorage(JournalFileBackend(str(tmp_path / "journal"))))
    assert len(seen.trials) == len(shared.trials())


def test_a_search_goes_on_where_it_was_and_draws_what_it_would_have(space, plan, tmp_path):
    whole = search(shared_at(tmp_path / "whole"), space, evaluate, plan)
    first = Plan("nsga2", 50, 0, Goal(), plan.given)
    search(shared_at(tmp_path / "parts"), space, evaluate, first)
    parts = search(shared_at(tmp_path / "parts"), space, evaluate, plan)
    assert [t.point for t in parts.tried] == [t.point for t in whole.tried]


def test_in_a_database_a_worker_is_gone_when_its_pulse_stands_still(tmp_path, monkeypatch):
    monkeypatch.setattr("specdial.simulator.study.PULSE_S", 0.05)
    where = f"sqlite:///{tmp_path}/study.db"
    one, other = (Shared(open_storage(where), Goal(), {"seed": 0}, grace_s=0.5) for _ in range(2))
    one.take(optuna.trial.create_trial(state=TrialState.RUNNING, params={}, distributions={}), "given-0")

    def state():
        for pause in (0.0, 0.2, 0.7):
            time.sleep(pause)
            other.recover()
        return other.trials()[0].state

    assert state() == TrialState.RUNNING
    one.close()
    time.sleep(0.1)
    assert state() == TrialState.FAIL
    other.close()


def test_a_line_that_a_writer_left_unfinished_is_cut_off(space, plan, tmp_path):
    small = Plan("random", 20, 0, Goal())
    search(shared_at(tmp_path / "journal"), space, evaluate, small)
    with (tmp_path / "journal").open("ab") as file:
        file.write(b'{"op_code":4,"worker')
    found = search(shared_at(tmp_path / "journal"), space, evaluate, Plan("random", 30, 0, Goal()))
    assert found.trials == 30


def test_a_trial_lined_up_twice_runs_once():
    """Two workers queue the same points at the same moment; a lost trial's place is taken by its successor."""

    def trial(number, root, state, replayed=True):
        attributes = {"root": root, **({"replay": {"level": "exact"}} if replayed else {})}
        made = optuna.trial.create_trial(state=state, values=[1.0] if state == TrialState.COMPLETE else None)
        made.number, made.user_attrs = number, attributes
        return made

    trials = [
        trial(0, "given-0", TrialState.COMPLETE),
        trial(1, "given-1", TrialState.FAIL, replayed=False),
        trial(2, "given-0", TrialState.RUNNING),
        trial(3, "given-1", TrialState.RUNNING),
        trial(4, "4", TrialState.RUNNING),
        trial(5, "5", TrialState.RUNNING),
    ]
    assert admitted(trials, 3) == {0, 3, 4}


def test_a_study_of_another_search_is_not_gone_on_with(space, plan, tmp_path):
    shared_at(tmp_path / "journal")
    with pytest.raises(UserError, match="the study was searched with another seed; choose another storage= or out="):
        Shared(open_storage(str(tmp_path / "journal")), Goal(), {"seed": 1})


def test_storages_that_cannot_be_are_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot use"):
        open_storage(str(tmp_path / "file" / "journal"))
