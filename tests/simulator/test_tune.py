"""Tune: the search finds what is there, admits when nothing is, and leaves files that load."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from specdial.policies.errors import UserError
from specdial.policies.file import load_policy, policy_digest
from specdial.simulator.axes import Range, Search
from specdial.simulator.choice import BEST
from specdial.simulator.lanes import read_record
from specdial.simulator.objectives import Goal, front
from specdial.simulator.outcome import Outcome
from specdial.simulator.search import Plan, distribution, search
from specdial.simulator.space import Space
from specdial.simulator.study import Shared, open_storage
from specdial.simulator.synthetic import Shape, write_synthetic_costs, write_trace
from specdial.simulator.verbs import tune as module
from specdial.simulator.verbs.tune import run


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """An easy and a hard trace, and costs for both."""
    out = tmp_path_factory.mktemp("tune")
    write_trace(out / "easy", Shape(documents=9, difficulty_nats=0.4))
    write_trace(out / "hard", Shape(documents=9, difficulty_nats=8.0))
    write_synthetic_costs(out / "costs", (256, 512), (1,), Shape())
    return out


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """An easy trace of three short documents, and its costs."""
    out = tmp_path_factory.mktemp("few")
    write_trace(out / "easy", Shape(documents=3, new_tokens=20))
    write_synthetic_costs(out / "costs", (256, 512), (1,), Shape())
    return out


def tune(files, tmp_path, trace="easy", **settings):
    given = {
        "trace": str(files / trace),
        "costs": str(files / "costs"),
        "out": str(tmp_path / "out"),
        "trials": 120,
        "bootstrap": 100,
    }
    return run({**given, **settings}), tmp_path / "out"


def test_an_easy_trace_pays_and_its_files_load(files, tmp_path):
    result, out = tune(files, tmp_path)
    study = json.loads((out / "study.json").read_text())
    assert result["pays"]
    assert result["speedup"] > 1.5
    assert study["acceptance_check"]["hazard"]["n"] > 0
    assert study["leave_one_out"]["verify"]["n"] > 0
    names = {path.stem for path in (out / "policies").iterdir()}
    assert {"best", "best_fixed", "plain"} <= names
    assert names == set(study["policies"])
    for path in (out / "policies").iterdir():
        policy = load_policy(path)
        assert policy.expected["split"] == "validation"
        assert policy.expected["low"] <= policy.expected["speedup"] <= policy.expected["high"] + 1e-9
        assert policy.provenance["policy_digest"] == policy_digest(policy)
    best, fixed, plain = (load_policy(out / "policies" / f"{n}.yaml") for n in ("best", "best_fixed", "plain"))
    assert best.expected["speedup"] >= fixed.expected["speedup"] >= 1.0
    assert fixed.controller.kind == "fixed"
    assert plain.k_max == 0


def test_full_batches_decide_where_they_are_asked_for(files, tmp_path):
    """The winner is the best of the finalists by that speedup, and every trial was judged by it."""
    write_synthetic_costs(tmp_path / "costs", (256, 512), (1, 3), Shape())
    goal = {"objectives": ["full_batch_speedup"], "batch": 3, "costs": str(tmp_path / "costs"), "trials": 60}
    result, out = tune(files, tmp_path, **goal)
    study = json.loads((out / "study.json").read_text())
    judged = [row for row in study["tried"] if row["level"] != "refused"]
    assert judged
    assert None not in {row["values"]["train"]["full_batch_speedup"] for row in judged}
    assert result["pays"]
    finalists = [load_policy(path).expected["full_batch"]["speedup"] for path in (out / "policies").glob("*.yaml")]
    assert result["full_batch"]["speedup"] == pytest.approx(max(finalists))
    hard, _ = tune(files, tmp_path / "hard", trace="hard", **goal)
    assert not hard["pays"]
    assert hard["k"] == 0.0


def test_a_hard_trace_ends_in_plain_decoding_with_the_crossover(files, tmp_path):
    result, out = tune(files, tmp_path, trace="hard")
    assert not result["pays"]
    assert result["speedup"] == pytest.approx(1.0)
    assert load_policy(out / "policies" / "best.yaml").k_max == 0
    crossover = result["crossover"]
    assert crossover["alpha"] < crossover["alpha_needed"]
    assert crossover["gamma"] > crossover["gamma_needed"]


def test_the_same_seed_gives_the_same_study(files, tmp_path):
    tried = []
    for i, seed in enumerate((3, 3, 4)):
        _, out = tune(files, tmp_path / str(i), seed=seed, trials=60)
        tried.append([row["policy_digest"] for row in json.loads((out / "study.json").read_text())["tried"]])
    assert tried[0] == tried[1] != tried[2]


@pytest.mark.parametrize("sampler", ["nsga2", "tpe", "random"])
def test_every_sampler_gives_as_many_trials_as_asked_for(files, tmp_path, sampler):
    result, out = tune(files, tmp_path, sampler=sampler, trials=60)
    study = json.loads((out / "study.json").read_text())
    assert study["sampler"] == sampler
    assert sum(row["points"] for row in study["tried"]) == result["trials"] == 60


def test_a_small_space_is_searched_whole(files, tmp_path):
    result, out = tune(files, tmp_path, search={"controllers": ["fixed"]})
    study = json.loads((out / "study.json").read_text())
    assert study["sampler"] == "brute"
    assert result["distinct"] == result["trials"] == 16
    speeds = {row["policy_digest"]: row["values"]["validation"]["speedup"] for row in study["tried"]}
    assert result["speedup"] == max(speeds.values())


@pytest.mark.parametrize(("kind", "trials"), [("entropy", (10, 30)), ("fixed", (10, 40))])
def test_more_trials_go_on_with_the_sampler_that_began(few, tmp_path, kind, trials):
    """What `auto` would take turns with the number of trials; a grid that fits by now is tried whole."""
    tried = []
    for most in trials:
        result, out = tune(few, tmp_path, search={"controllers": [kind]}, trials=most, bootstrap=1)
        study = json.loads((out / "study.json").read_text())
        assert (study["sampler"], study["trials"]) == ("nsga2", most)
        assert [row["policy_digest"] for row in study["tried"]][: len(tried)] == tried
        tried = [row["policy_digest"] for row in study["tried"]]
    assert kind == "entropy" or result["distinct"] == 16


def test_more_trials_than_the_grid_has_points_add_nothing(few, tmp_path):
    for most in (16, 500):
        result, _ = tune(few, tmp_path, search={"controllers": ["fixed"]}, trials=most, bootstrap=1)
        assert (result["trials"], result["distinct"], result["stopped"]) == (16, 16, False)


def test_a_surface_is_offered_the_best_of_every_batch(files, tmp_path, monkeypatch):
    offered = []
    monkeypatch.setattr(module, "find_surface", lambda record, costs, policies, *_: offered.extend(policies))
    write_synthetic_costs(tmp_path / "costs", (256, 512), (1, 2, 3, 4), Shape())
    search = {"controllers": ["entropy"], "batches": [1, 4]}
    _, out = tune(
        files, tmp_path, search=search, trials=80, sampler="random", costs=str(tmp_path / "costs"), bootstrap=1
    )
    tried = json.loads((out / "study.json").read_text())["tried"]
    known = {policy_digest(policy) for policy in offered}
    for batch in (1, 4):
        mine = sorted((t for t in tried if t["batch"] == batch), key=lambda t: -t["values"]["train"]["speedup"])
        assert {t["policy_digest"] for t in mine[:BEST]} <= known


def test_documents_to_select_on_without_a_price_are_named_before_the_search(tmp_path):
    """Two train documents fill the one batch that was timed, the only validation document does not."""
    write_trace(tmp_path / "easy", Shape(documents=4))
    write_synthetic_costs(tmp_path / "costs", (256, 512), (2,), Shape())
    said = "no speedup can be predicted on validation documents: .* was measured at batch 2 only, not 1; calibrate"
    with pytest.raises(UserError, match=said):
        tune(tmp_path, tmp_path, batch=2)
    assert not (tmp_path / "out").exists()


def test_budgets_in_between_are_tried_when_asked_for(files, tmp_path):
    _, out = tune(files, tmp_path, search={"between": True})
    tried = json.loads((out / "study.json").read_text())["tried"]
    assert {row["level"] for row in tried} == {"exact", "modelled"}


def test_lag_is_what_it_is_told_to_be(files, tmp_path):
    _, out = tune(files, tmp_path, search={"lag": 1, "controllers": ["entropy", "rate"]})
    tried = [load_policy(path).controller for path in (out / "policies").iterdir()]
    adaptive = [controller for controller in tried if controller.kind in ("entropy", "rate")]
    assert adaptive
    assert all(controller.lag == 1 for controller in adaptive)


@pytest.mark.parametrize("sampler", ["brute", "nsga2"])
def test_rules_that_need_signals_are_not_tried_on_a_drafter_without(tmp_path, sampler):
    """Tuned over a selection and prompt lookup at once; the cost table times both."""
    write_trace(tmp_path / "trace", Shape(documents=6, new_tokens=40))
    meta = json.loads((tmp_path / "trace" / "meta.json").read_text())
    meta["arms"][1] = {"arm": 1, "drafter": {"kind": "lookup"}, "draft_kv": meta["arms"][1]["draft_kv"]}
    (tmp_path / "trace" / "meta.json").write_text(json.dumps(meta))
    write_synthetic_costs(tmp_path / "costs", (256, 512), (1,), Shape())
    table = pq.read_table(tmp_path / "costs" / "costs.parquet")
    timed = table.filter(pc.not_equal(table["op"], "plain"))
    place = {name: i for i, name in enumerate(table.column_names)}
    lookup = timed.set_column(place["drafter"], table.schema.field("drafter"), pa.array(["lookup"] * timed.num_rows))
    once = lookup.filter(pc.is_in(lookup["budget"], pa.array([0, 128], pa.int32())))
    free = once.set_column(place["budget"], table.schema.field("budget"), pa.array([0] * once.num_rows, pa.int32()))
    pq.write_table(pa.concat_tables([table, free]), tmp_path / "costs" / "costs.parquet")
    _, out = tune(tmp_path, tmp_path, trace="trace", sampler=sampler, search={"k_max": 3})
    tried = json.loads((out / "study.json").read_text())["tried"]
    lookups = {row["params"]["controller"] for row in tried if row["params"].get("arm") == 1}
    assert lookups == {"fixed"}
    assert all(row["params"]["arm_with_signals"] == 0 for row in tried if row["params"]["controller"] != "fixed")
    assert all(row["level"] == "exact" for row in tried)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"search": {"controllers": ["magic"]}}, "search.controllers names 'magic'"),
        ({"search": {"k_max": 12}}, "search.k_max is 12"),
        ({"search": {"budgets": [999]}}, "budget 999 was not recorded"),
        ({"search": {"depth": 3}}, "unknown field search.depth"),
        ({"trials": 0}, "trials is 0"),
        ({"sampler": "magic"}, "sampler is 'magic'"),
        ({"costs": None}, "no speedup can be predicted"),
        ({"storage": "sqlite:////no/such/folder/study.db"}, "cannot open storage sqlite"),
    ],
)
def test_mistakes_are_named_and_leave_nothing_behind(files, tmp_path, settings, message):
    with pytest.raises(UserError, match=message):
        tune(files, tmp_path, **settings)
    assert not (tmp_path / "out").exists()


def test_equal_policies_are_replayed_once(trace, tmp_path):
    space = Space.of(Search(controllers=("fixed",), k_max=3), read_record(trace), gamma=0.2)
    replayed = []

    def evaluate(policies, batch):
        replayed.extend(policy_digest(p) for p in policies)
        return [
            Outcome(p, "exact", None, True, (), 1, 0, speedup=float(p.k_max), kv_bytes_per_token=1.0) for p in policies
        ]

    shared = Shared(open_storage(str(tmp_path / "journal")), Goal(), {})
    found = search(shared, space, evaluate, Plan("random", 200, 0, Goal()))
    assert len(replayed) == len(set(replayed)) == len(found.tried) == 6
    assert sum(tried.points for tried in found.tried) == 200


def test_the_front_holds_what_nothing_beats():
    costs = np.random.default_rng(0).random((60, 2)).tolist()
    ahead = front(costs)
    for i, (first, second) in enumerate(costs):
        beaten = any(a < first and b < second for a, b in costs)
        assert (i in ahead) == (not beaten)


@pytest.mark.parametrize("axis", [Range(1, 8, "int"), Range(0.1, 10.0, "log"), Range(64, 512, "int_log"), Range(-1, 1)])
def test_grid_points_lie_in_the_distribution(axis):
    wanted = distribution(axis)
    assert all(wanted.low <= value <= wanted.high for value in axis.grid()[:-1])
    assert axis.grid()[0] == pytest.approx(axis.low)
    assert axis.grid()[-1] == pytest.approx(axis.high)


def test_what_the_trace_cannot_support_is_refused_counted_and_shown(files, tmp_path, capsys):
    search = {"draft_kv": {"recent": [16, 32]}, "verify_kv": {"mode": ["full", "partial"]}, "batches": [1, 2]}
    result, out = tune(files, tmp_path, search={**search, "controllers": ["fixed", "entropy"]}, trials=60)
    study = json.loads((out / "study.json").read_text())
    shown = capsys.readouterr().out
    refused = [row for row in study["tried"] if row["level"] == "refused"]
    assert refused
    assert sum(row["points"] for row in refused) == sum(result["refused"].values())
    assert "no recorded arm has draft_kv.recent" in result["refused"]
    assert all(row["reason"] for row in refused)
    assert f"{sum(result['refused'].values())} of 60 trials refused" in shown
    assert {row["params"]["batch"] for row in study["tried"]} == {1, 2}
