"""The benchmark of predicted lossy policies: a dry run on tiny weights, its grid, its lookups, and its arithmetic."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from specdial.engine.trace.reader import read_trace
from specdial.policies.file import policy_digest
from specdial.simulator.synthetic import Shape, write_trace


def test_dry_run(script, tiny_checkpoint, capsys, monkeypatch):
    module = script("prediction_lossy")
    monkeypatch.setattr(script("prediction_lossy_policies"), "USUAL", ("history",))
    shape = {"head_dim": 64, "num_hidden_layers": 2, "max_position_embeddings": 1024}
    command = ["--dry", "--model", str(tiny_checkpoint("llama", **shape)), "--drafters", "sparse_self"]
    command += ["--workloads", "novel", "--contexts", "160", "--budgets", "100", "--refresh", "3", "6"]
    (row,) = module.main([*command, "--policies", "2", "--periods", "2", "0"])
    assert row["id"] == "dry-novel-160-B1"
    assert [line[0] for line in row["policies"]] == ["sparse_self-history-c100-p2-k2", "sparse_self-history-c100-p0-k2"]
    assert row["documents"] == {"train": 2, "test": 2, "probed": 2}
    assert row["value"] == pytest.approx(row["median_pct"], abs=1e-4)
    lines = [dict(zip(row["columns"], line, strict=True)) for line in row["policies"]]
    for said in lines:
        for when in ("predicted", "in-sample", "measured"):
            assert said[f"speedup {when}"] > 0
            assert 1 <= said[f"tokens/round {when}"] <= 3
            assert 0 <= said[f"top-1 {when}"] <= 1
            assert said[f"KL {when}"] > 0
    for name, bar in row["bar"].items():
        assert bar["met"] == (row[name] <= bar["at_most"])
    for when, found in (("predicted", row), ("in-sample", row["in_sample"])):
        for name, column, unit in (("agreement_points", "top-1", 100.0), ("kl_nats", "KL", 1.0)):
            off = [unit * (said[f"{column} {when}"] - said[f"{column} measured"]) for said in lines]
            rounding = 1e-4 + 1e-5 * unit
            assert found[name]["worst"] == pytest.approx(max(map(abs, off)), abs=rounding)
            assert found[name]["bias"] == pytest.approx(np.median(off), abs=rounding)
            assert set(found[name]) == {"median", "worst", "bias", "rank_correlation", "inside_frac"}
            assert found is row or found[name] != row[name]
        off = [100.0 * abs(said[f"speedup {when}"] / said["speedup measured"] - 1.0) for said in lines]
        assert found["worst_pct"] == pytest.approx(max(off), rel=0.01, abs=0.1)
    assert "/" not in row["command"].removeprefix("python3 benchmarks/prediction_lossy.py")
    assert set(json.loads(capsys.readouterr().out.splitlines()[-1])) == {row["id"]}


def test_a_dry_run_cannot_be_written(script, tmp_path):
    with pytest.raises(SystemExit):
        script("prediction_lossy").main(["--dry", "--out", str(tmp_path / "x.json")])


def test_the_grid_goes_round_all_settings(script):
    a = script("prediction_lossy").arguments(["--model", "m", "--draft", "d", "--head", "h", "--policies", "40"])
    module = script("prediction_lossy_policies")
    found = module.grid(a, module.Heads.of(a, SimpleNamespace(layers=28, heads=12)))
    assert set(found) == {"sparse_self", "lookup", "model", "eagle"}
    every = [policy for policies in found.values() for policy in policies]
    assert len({policy_digest(p) for p in every}) == len({p.name for p in every}) == 40
    assert not any(p.lossless for p in every)
    for kind in ("sparse_self", "lookup"):
        mine = found[kind]
        assert {p.verify_kv.full_period for p in mine} == set(a.periods)
        assert {p.k_max for p in mine} == set(a.k)
        assert {p.verify_kv.source for p in mine} == {"history", "page_bound", "recent"}
    assert {p.verify_kv.source for p in found["model"]} == {"history", "lookahead", "hybrid"}
    assert {p.verify_kv.refresh for p in found["eagle"] if p.verify_kv.source == "page_bound"} == {"full"}


def test_lookups_of_every_position(script, tmp_path):
    """An output of a repeated run is foreseen to its end; what was drafted there is marked right and no more."""
    write_trace(tmp_path / "trace", Shape(documents=1))
    made = read_trace(tmp_path / "trace")
    (doc,) = made.meta["documents"]
    outputs = sorted((row["position"], row["token_id"]) for row in made.outputs.to_pylist())
    text = [token for _, token in outputs]
    prompt = (text * (doc["prompt_tokens"] // len(text) + 2))[: doc["prompt_tokens"] - len(text)] + text
    document = SimpleNamespace(index=doc["doc"], prompt_ids=prompt)
    script("prediction_lossy_lookup").with_lookup(tmp_path / "trace", tmp_path / "dense", [document], ngram=3, k_max=4)
    found = read_trace(tmp_path / "dense")
    assert (found.meta["dense"], found.meta["k_max"]) == (True, 4)
    rows = found.drafts.to_pylist()
    end = outputs[-1][0] + 1
    assert {row["position"] for row in rows} == set(range(outputs[0][0], end))
    for row in rows:
        assert not (row["match"] and (not row["reached"] or row["position"] + row["depth"] > end))
    assert sum(row["match"] for row in rows) > len(rows) / 2


def test_errors_of_made_up_predictions(script):
    module = script("prediction_lossy_records")
    rows, guesses = [], {}
    for name, speedup, agreement, off in (("a", 2.0, 0.9, 0.02), ("b", 2.5, 0.95, -0.01), ("c", 3.0, 0.99, 0.0)):
        fidelity = {"top1_agreement": agreement, "kl_nats": 1 - agreement}
        fidelity |= {"top1_agreement_interval": [agreement - 0.015, agreement + 0.015], "kl_nats_interval": [0, 1]}
        measured = {"speedup": speedup, "low": 1.0, "high": 4.0, "tokens_per_round": 3.0, "fidelity": fidelity}
        rows.append({"name": name, "policy_digest": name, "controller": "fixed", "k_max": 4, "measured": measured})
        guess = {"top1_agreement": {"value": agreement + off}, "kl_nats": {"value": 1 - agreement}}
        guesses[name] = {
            "speedup": 1.1 * speedup,
            "tokens_per_round": 3.0,
            "low": None,
            "high": None,
            "fidelity": guess,
        }
    guesses["a"]["speedup"] = 2.0
    found = module.errors(rows, guesses)
    assert found["worst_pct"] == pytest.approx(10.0)
    assert found["agreement_points"]["worst"] == pytest.approx(2.0)
    assert found["agreement_points"]["median"] == pytest.approx(1.0)
    assert found["agreement_points"]["bias"] == pytest.approx(0.0)
    assert found["agreement_points"]["inside_frac"] == pytest.approx(2 / 3, abs=1e-3)
    assert found["kl_nats"]["worst"] == pytest.approx(0.0, abs=1e-9)
    assert found["kl_nats"]["rank_correlation"] == 1.0
