"""The replay verb: numbers out, files whole, mistakes named."""

import json
from pathlib import Path

import pytest

from specdial.policies.errors import UserError
from specdial.policies.file import save_policy
from specdial.policies.schema import policy_from_mapping
from specdial.simulator.synthetic import Shape, draft_kv, write_synthetic_costs
from specdial.simulator.verbs.replay import run

KV = {"budget": 256, "sink": 4, "recent": 16}
FIXED = {"name": "four", "controller": {"kind": "fixed", "k": 4}, "draft_kv": KV}


@pytest.fixture
def settings(trace, tmp_path):
    write_synthetic_costs(tmp_path / "costs", (256, 512), (1, 2), Shape())
    return {"trace": str(trace.path), "costs": str(tmp_path / "costs"), "policies": [FIXED]}


def test_it_returns_and_writes_the_same_numbers(settings, tmp_path, capsys):
    path = tmp_path / "policy.yaml"
    save_policy(policy_from_mapping({**FIXED, "name": "filed"}), path)
    settings["policies"].append(str(path))
    result = run({**settings, "out": str(tmp_path / "out"), "inversion": True})
    written = json.loads((tmp_path / "out" / "replay.json").read_text())
    assert result["speedup"] == written["outcomes"][0]["speedup"] > 1.0
    assert written["outcomes"][0]["speedup"] == written["outcomes"][1]["speedup"]
    assert len(result["inversion"]) == 2 * 8
    for budget in (draft_kv(128).budget, draft_kv(256).budget):
        rows = [row for row in result["inversion"] if row["budget"] == budget]
        assert sum(row["best"] for row in rows) == 1
        tails = [row["tail"] for row in rows]
        assert tails == sorted(tails, reverse=True)
    for row in (*result["inversion"], *(c for c in result["surface"] if c["k"])):
        assert row["low"] < row["speedup"] < row["high"]
    assert {(row["level"], row["documents"]) for row in result["inversion"]} == {("exact", 6)}
    assert {c["level"] for c in result["surface"] if c["batch"] > 1 or c["context_tokens"] == 256} == {"modelled"}
    printed = capsys.readouterr().out
    assert "four" in printed
    assert "lossless" in printed
    assert "log-loss" not in printed
    assert written["acceptance_check"] is None


def test_what_is_modelled_says_how_well_the_model_does_on_held_out_documents(settings, tmp_path, capsys):
    between = {**FIXED, "name": "between", "draft_kv": {**KV, "budget": 192}}
    run({**settings, "policies": [FIXED, between], "out": str(tmp_path / "out")})
    written = json.loads((tmp_path / "out" / "replay.json").read_text())
    assert [o["level"] for o in written["outcomes"]] == ["exact", "modelled"]
    check = written["acceptance_check"]
    assert (check["fitted_on"], check["scored_on"]) == ("train", "validation")
    hazard = check["hazard"]
    assert hazard["log_loss"] < hazard["base_log_loss"]
    assert sum(count for *_, count in hazard["reliability"]) == hazard["n"]
    printed = " ".join(capsys.readouterr().out.split())
    assert f"log-loss {hazard['log_loss']:.3f}" in printed
    assert f"calibration error {hazard['expected_calibration_error']:.3f}" in printed


def test_what_was_not_real_is_said_with_every_result(settings, tmp_path, capsys):
    """The synthetic trace has random weights; acceptance that was set is said too, by trace and by cost table."""
    for place, key, value in (("trace", "synthetic_acceptance", [0.9]), ("costs", "acceptance", {"mean": 3.0})):
        meta = Path(settings[place]) / "meta.json"
        meta.write_text(json.dumps({**json.loads(meta.read_text()), key: value}))
    run({**settings, "out": str(tmp_path / "out")})
    words = ["random weights", "synthetic acceptance", "costs under synthetic acceptance"]
    assert json.loads((tmp_path / "out" / "replay.json").read_text())["caveats"] == words
    assert ", ".join(words) in " ".join(capsys.readouterr().out.split())


def test_another_machine_is_said_with_every_result_and_no_policy_is_written_for_it(settings, tmp_path, capsys):
    run({**settings, "bandwidth_ratio": 2.0, "compute_ratio": 0.5, "out": str(tmp_path / "out")})
    words = "as if with 2x bandwidth and 0.5x compute"
    assert words in json.loads((tmp_path / "out" / "replay.json").read_text())["caveats"]
    assert words in " ".join(capsys.readouterr().out.split())
    assert not (tmp_path / "out" / "policies").exists()


def test_a_second_run_elsewhere_configured_does_not_overwrite(settings, tmp_path):
    run({**settings, "out": str(tmp_path / "out")})
    before = (tmp_path / "out" / "replay.json").read_text()
    with pytest.raises(UserError, match="holds another run"):
        run({**settings, "seed": 1, "out": str(tmp_path / "out")})
    assert (tmp_path / "out" / "replay.json").read_text() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policies": []}, "no policy to replay"),
        ({"policies": [3]}, r"policies\[0\] must be a mapping or a path"),
        ({"policies": [{**FIXED, "speed": 1}]}, "unknown field speed"),
        ({"batch": 0}, "batch is 0"),
        ({"split": "dev"}, "no finished document in split 'dev'"),
        ({"trace": "nowhere"}, "nowhere is not a trace"),
        ({"unknown": 1}, "unknown field unknown"),
    ],
)
def test_mistakes_are_named_and_leave_nothing_behind(settings, tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        run({**settings, "out": str(tmp_path / "out"), **change})
    assert not (tmp_path / "out").exists()
