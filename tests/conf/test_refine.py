"""Refine with an engine made of another cost table: corrected costs rank as that engine does, and it stops there."""

import dataclasses
import json
from pathlib import Path

import pytest

from specdial.conf import refine
from specdial.engine.job import Job
from specdial.engine.trace.reader import read_costs, read_trace
from specdial.policies.artifact import write_json_atomic
from specdial.policies.errors import UserError
from specdial.policies.file import load_policy, save_policy
from specdial.policies.schema import policy_from_mapping
from specdial.simulator.corrections import corrected
from specdial.simulator.costs import CostModel
from specdial.simulator.replay import replay
from specdial.simulator.synthetic import Shape, write_synthetic_costs, write_trace

LOSSY = {32: 0.5, 48: 3.0}  # speedup of what replay refuses, by draft_kv.recent


@pytest.fixture
def engine(request, tmp_path, monkeypatch):
    """A validation whose drafts take four times (or request.param) what the cost table says; counts its calls."""
    write_trace(tmp_path / "trace", Shape(documents=9, difficulty_nats=0.5))
    write_synthetic_costs(tmp_path / "costs", (256, 512), (1,), Shape())
    factors = {("sparse_self", "draft"): getattr(request, "param", 4.0)}
    true = corrected(CostModel.from_table(read_costs(tmp_path / "costs")), factors)
    calls = []

    def validate(settings, job):
        calls.append({**settings, "documents": len(job.documents)})
        policies = [policy_from_mapping(dict(p)) for p in settings["policies"]]
        outcomes = replay(read_trace(tmp_path / "trace"), true, policies, settings["split"], bootstrap=0)
        rows, out = [], Path(settings["out"])
        for i, (policy, o) in enumerate(zip(policies, outcomes, strict=True)):
            o = dataclasses.replace(o, speedup=LOSSY[policy.draft_kv.recent]) if o.speedup is None else o
            known = {name: getattr(o, name) for name in ("speedup", "us_per_token", "tokens_per_round", "k")}
            measured = {**known, "repeat_spread_frac": 0.0}
            save_policy(dataclasses.replace(policy, measured=measured), out / "policies" / f"{i}.yaml")
            rows.append({"name": policy.name, "predicted": policy.expected or {}, "measured": measured})
        found = {"policies": rows, "engine_s": 2.0}
        about = {"schema": refine.validate.SCHEMA, "plain_us_per_token": outcomes[0].baseline_us_per_token}
        write_json_atomic(out / "validation.json", {**about, **found})
        return found

    monkeypatch.setattr(refine.validate, "run", validate)
    monkeypatch.setattr(refine, "load_job", lambda model, workload, split: Job(None, "", None, [0, 1, 2]))
    return calls


def settings(tmp_path, **changed):
    given = {name: str(tmp_path / name) for name in ("trace", "costs", "out")}
    search = {"controllers": ["fixed"], "budgets": [128]}
    return {
        "model": {"source": "made up"},
        "workload": {},
        "search": search,
        "tune": {"bootstrap": 20},
        **given,
        **changed,
    }


def test_the_order_agrees_once_costs_are_corrected(engine, tmp_path):
    found = refine.run(settings(tmp_path, finalists=8))
    first, last = found["rounds"][0], found["rounds"][-1]
    assert first["swapped"]
    assert not last["swapped"]
    assert found["ended"] == "agreement"
    assert len(engine) == len(found["rounds"]) == 2
    for row in last["policies"]:
        assert row["predicted"]["speedup"] == pytest.approx(row["measured"]["speedup"], rel=0.07)
    everything = [row["measured"]["speedup"] for round_ in found["rounds"] for row in round_["policies"]]
    assert max(everything) < 1.0
    assert load_policy(tmp_path / "out" / "policy.yaml").k_max == 0  # no policy is faster than plain decoding
    corrected_with = json.loads((tmp_path / "out" / "round-2" / "tune" / "study.json").read_text())["settings"]
    assert corrected_with["corrections"] == [str(tmp_path / "out" / "round-1" / "validation")]
    assert found["engine_s"] == 4.0


@pytest.mark.parametrize("stopped_in", [1, 2, None])
def test_a_stopped_run_goes_on_with_its_round(engine, stopped_in, tmp_path, monkeypatch):
    """And measures nothing when it was finished. None: stopped in no round."""
    wanted = refine.run(settings(tmp_path / "other", **{n: str(tmp_path / n) for n in ("trace", "costs")}))
    whole, validate = len(engine), refine.validate.run

    def stopping(settings, job):
        if f"round-{stopped_in}/" in settings["out"]:
            raise KeyboardInterrupt
        return validate(settings, job)

    if stopped_in:
        monkeypatch.setattr(refine.validate, "run", stopping)
        with pytest.raises(KeyboardInterrupt):
            refine.run(settings(tmp_path))
        monkeypatch.setattr(refine.validate, "run", validate)
    else:
        refine.run(settings(tmp_path))
    found = refine.run(settings(tmp_path))
    assert len(engine) == 2 * whole
    timeless = {name for name in wanted if name not in ("settings", "provenance")}
    assert {n: found[n] for n in timeless} == {n: wanted[n] for n in timeless}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": "specdial/validation/9"}', "[" * 100_000])
def test_a_damaged_validation_is_one_clear_error(engine, text, tmp_path):
    refine.run(settings(tmp_path))
    (tmp_path / "out" / "round-1" / "validation" / "validation.json").write_text(text)
    with pytest.raises(UserError, match=r"validation\.json is not a whole validation"):
        refine.run(settings(tmp_path))


@pytest.mark.parametrize(("engine", "drafts"), [(0.25, True), (4.0, False)], indirect=["engine"])
def test_the_best_is_the_fastest_as_measured_when_engine_time_is_used_up(engine, drafts, tmp_path):
    """With cheap drafts longer ones win than was predicted; with dear ones nothing is faster than plain decoding."""
    found = refine.run(settings(tmp_path, engine_s=0.0))
    assert found["ended"] == "engine time"
    assert len(engine) == 1
    best = load_policy(tmp_path / "out" / "policy.yaml")
    rows = found["rounds"][0]["policies"]
    fastest = max(row["measured"]["speedup"] for row in rows)
    assert (fastest > 1.0, best.k_max > 0) == (drafts, drafts)
    assert found["speedup"] == (best.measured or {"speedup": 1.0})["speedup"] == max(fastest, 1.0)
    assert found["best"] == best.name != max(rows, key=lambda row: row["predicted"]["speedup"])["name"]


def test_the_engine_tries_what_replay_refuses_and_prunes_the_slow(engine, tmp_path):
    """On one document, once; only what keeps up with the best finalist is measured on all of them, and may win."""
    search = {"controllers": ["fixed"], "draft_kv": {"recent": [16, 32, 48]}, "k_max": 1, "budgets": [128]}
    found = refine.run(settings(tmp_path, search=search, engine_trials=2, rounds=1))
    trials, measured = engine
    recents = [[p["draft_kv"]["recent"] for p in call["policies"] if p["expected"] is None] for call in engine]
    assert recents == [[32, 48], [48]]
    assert (trials["documents"], trials["repeats"], trials["fidelity"]) == (1, 1, False)
    assert (measured["documents"], measured["repeats"]) == (3, 2)
    assert [speedup for _, speedup in found["rounds"][0]["pruned"]] == [0.5]
    assert load_policy(tmp_path / "out" / "policy.yaml").draft_kv.recent == 48


def test_what_refine_sets_itself_is_not_set_twice(engine, tmp_path):
    with pytest.raises(UserError, match=r"tune\.batch is given; set batch itself"):
        refine.run(settings(tmp_path, tune={"batch": 2}))
