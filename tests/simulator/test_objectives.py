"""Objectives and bounds: volumes against counting, the tail against its definition, bounds that hold."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdial.policies.errors import UserError
from specdial.simulator.axes import Search
from specdial.simulator.fidelity import Bounded, Fidelity
from specdial.simulator.lanes import read_record
from specdial.simulator.objectives import Goal, front, hypervolume, measured_metrics, tail_us_per_token
from specdial.simulator.outcome import Outcome
from specdial.simulator.replay import replay
from specdial.simulator.search import Plan, search
from specdial.simulator.space import Space
from specdial.simulator.study import Shared, open_storage
from specdial.simulator.synthetic import Shape, write_synthetic_costs, write_trace
from specdial.simulator.verbs.tune import run


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), max_size=6), st.integers(1, 3))
def test_the_hypervolume_counts_unit_cubes(points, width):
    costs = np.array(points, float).reshape(-1, 3)[:, :width]
    corners = np.indices((5,) * width).reshape(width, -1).T
    dominated = (costs[None] <= corners[:, None]).all(axis=2).any(axis=1).sum()
    assert hypervolume(costs, np.full(width, 5.0)) == pytest.approx(float(dominated))
    assert hypervolume(costs[front(costs.tolist())], np.full(width, 5.0)) == pytest.approx(float(dominated))


def test_the_tail_is_that_of_the_slowest_documents(trace, costs, policy):
    record = read_record(trace)
    (outcome,) = replay(record, costs, [policy("fixed")], batch=4, bootstrap=0)
    tokens = record.documents.end - record.documents.start
    per_token = outcome.unit_us / [tokens[:4].mean(), tokens[4:].mean()]
    assert tail_us_per_token(outcome, record) == pytest.approx(np.percentile(per_token, 95))
    assert tail_us_per_token(Outcome(policy("none"), "refused", "", True, (), 1, 0), record) is None


def test_a_full_batch_speedup_is_that_of_full_batches_and_of_one_sequence_its_own(trace, costs, policy):
    record, name = read_record(trace), "full_batch_speedup"
    (single,) = replay(record, costs, [policy("fixed")], batch=1, bootstrap=0)
    assert measured_metrics(single, record)[name] == single.speedup
    (batched,) = replay(record, costs, [policy("fixed")], batch=4, bootstrap=0, full_batch=True)
    assert measured_metrics(batched, record)[name] == batched.full_batch.speedup != batched.speedup
    (unknown,) = replay(record, costs, [policy("fixed")], batch=4, bootstrap=0)
    assert measured_metrics(unknown, record)[name] is None


def test_fidelity_is_known_of_lossless_policies_and_of_what_was_probed(trace, policy):
    record = read_record(trace)
    lossless = Outcome(policy("fixed"), "exact", None, True, (), 1, 0)
    probed = Outcome(
        policy("fixed"),
        "modelled",
        None,
        False,
        (),
        1,
        0,
        fidelity=Fidelity(Bounded(0.02, 0.01, 0.03), None, None, 0.5, 0.0),
    )
    names = ("kl_nats", "top1_agreement", "arr")
    assert [measured_metrics(lossless, record)[name] for name in names] == [0.0, 1.0, 1.0]
    assert [measured_metrics(probed, record)[name] for name in names] == [0.02, None, None]


@pytest.mark.parametrize(
    ("objectives", "constraints", "message"),
    [
        (["speed"], {}, "objectives names 'speed'; use some of speedup"),
        (["speedup", "speedup"], {}, "name each objective once"),
        ([], {}, "at least one"),
        (["speedup"], {"memory": 1}, "constraints names 'memory'"),
        (["speedup"], {"speedup": "fast"}, "constraints.speedup is 'fast'; give a number"),
    ],
)
def test_goals_that_cannot_be_are_refused(objectives, constraints, message):
    with pytest.raises(UserError, match=message):
        Goal.of(objectives, constraints)


def test_the_best_policy_keeps_within_its_bounds(tmp_path):
    """Unbounded, this search reads more per token than the bound."""
    write_trace(tmp_path / "trace", Shape(documents=6, difficulty_nats=0.4))
    write_synthetic_costs(tmp_path / "costs", (256, 512), (1,), Shape())
    common = {
        **{name: str(tmp_path / name) for name in ("trace", "costs")},
        "objectives": ["speedup", "kv_bytes_per_token", "tail_us_per_token"],
        "search": {"controllers": ["confidence"]},
        "trials": 25,
        "bootstrap": 20,
        "sampler": "nsga3",
    }
    free = run({**common, "out": str(tmp_path / "free")})
    bound = 0.5 * (free["kv_bytes_per_token"] + min(least(tmp_path / "free")))
    held = run({**common, "out": str(tmp_path / "held"), "constraints": {"kv_bytes_per_token": bound}})
    assert held["feasible"]
    assert held["kv_bytes_per_token"] <= bound < free["kv_bytes_per_token"]
    assert held["speedup"] <= free["speedup"]


def least(out):
    study = json.loads((out / "study.json").read_text())
    return [row["values"]["train"]["kv_bytes_per_token"] for row in study["tried"] if row["level"] != "refused"]


@pytest.mark.parametrize(("sampler", "trials"), [("gp", 12), ("tpe", 60)])
def test_samplers_of_one_objective_come_near_its_best(trace, tmp_path, sampler, trials):
    """The best of a made-up speedup that peaks at a threshold of 0.5, past the points tried at random."""
    space = Space.of(Search(controllers=("confidence",), k_max=1, budgets=(256,)), read_record(trace), gamma=0.2)

    def evaluate(policies, batch):
        speeds = [1.0 - (policy.controller.threshold - 0.5) ** 2 for policy in policies]
        return [
            Outcome(p, "exact", None, True, (), 1, 0, speedup=s, kv_bytes_per_token=1.0)
            for p, s in zip(policies, speeds)
        ]

    goal = Goal(("speedup",))
    shared = Shared(open_storage(str(tmp_path / "journal")), goal, {})
    found = search(shared, space, evaluate, Plan(sampler, trials, 0, goal))
    assert found.trials == trials
    assert max(tried.metrics["speedup"] for tried in found.tried) > 0.999


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize(("bytes_read", "bound", "trials"), [(1.0, 2.0, 100), (4e8, 5e8, 100), (4e8, 3e8, 150)])
def test_a_search_stops_where_its_front_no_longer_grows(trace, tmp_path, bytes_read, bound, trials):
    """Every policy is worth the same, so the second generation gains nothing; without a front there is none to stop."""
    space = Space.of(Search(controllers=("entropy",)), read_record(trace), gamma=0.2)

    def evaluate(policies, batch):
        worth = {"speedup": 1.0, "kv_bytes_per_token": bytes_read}
        return [Outcome(p, "exact", None, True, (), 1, 0, **worth) for p in policies]

    goal = Goal(bounds=(("kv_bytes_per_token", bound),))
    shared = Shared(open_storage(str(tmp_path / "journal")), goal, {})
    found = search(shared, space, evaluate, Plan("random", 150, 0, goal, stall=1))
    assert found.trials == trials
    assert found.stopped == (trials < 150)
