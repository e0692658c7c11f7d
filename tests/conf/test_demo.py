"""The demo from the command line on a tiny random model: every verb, every file, one table."""

import json

import pytest

from specdial.engine.trace.reader import read_costs, read_trace
from specdial.policies.file import load_policy, policy_digest

SMALL = (
    *("hardware=cpu", "context=120", "budgets=[80,96]", "k_max=3", "repeats=1", "trials=12", "out=d"),
    *("workload=file", "workload.path=text.txt", "workload.documents=5", "workload.new_tokens=12"),
)


@pytest.fixture
def model(tiny_checkpoint, tmp_path):
    (tmp_path / "text.txt").write_text("\n\n".join(f"Paragraph {i}, on {i * i} things." for i in range(300)))
    return tiny_checkpoint("llama")


def test_the_whole_loop(cli, model, tmp_path):
    result = cli("demo", f"model={model}", *SMALL)
    assert result.code == 0, result.err
    title = "predicted on the trace, measured on held-out documents"
    table = result.out[result.out.index(title) :]
    for row in ("plain", "best fixed", "tuned"):
        assert row in table
    for column in ("predicted", "measured", "tokens/round", "alpha", "gamma", "k", "budget", "lossless"):
        assert column in table
    out = tmp_path / "d"
    trace = read_trace(out / "trace")
    assert {d["split"] for d in trace.meta["documents"]} == {"train", "validation"}
    assert read_costs(out / "costs").meta["model"] == trace.meta["model"]
    best = load_policy(out / "policy.yaml")
    assert policy_digest(best) == policy_digest(load_policy(out / "study" / "policies" / "best.yaml"))
    assert best.provenance["model_digest"] == trace.meta["model"]["digest"]
    validation = json.loads((out / "validation" / "validation.json").read_text())
    assert validation["split"] == "test"
    assert {row["policy_digest"] for row in validation["policies"]} >= {policy_digest(best)}
    assert all(row["measured"]["documents_differing_from_plain"] == 0 for row in validation["policies"])
    assert all(row["lossless"] for row in validation["policies"])
    study = json.loads((out / "study" / "study.json").read_text())
    if not study["pays"]:
        assert best.k_max == 0
        assert "Speculation does not pay here" in result.out
    page = (out / "report.html").read_text()
    assert trace.meta["model"]["digest"][:12] in page
    trained_on = {d["name"] for d in trace.meta["documents"]}
    assert not trained_on & {d["name"] for d in validation["documents"]}

    before = {path: path.read_bytes() for path in (out / "trace").iterdir()}
    again = cli("demo", f"model={model}", *SMALL)
    assert again.code == 0, again.err
    assert {path: path.read_bytes() for path in (out / "trace").iterdir()} == before


def test_a_demo_into_a_directory_of_something_else(refused, model):
    refused("demo", f"model={model}", *SMALL, "out=.", says=". exists and is not a demo; choose another out=")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("repeats=0", "repeats is 0; use at least 1"),
        ("budgets=[10]", "budgets.budget is 10, smaller than sink + recent"),
        ("context=600", "exceed model's context of 512"),
        ("workload.documents=0", "workload.documents is 0"),
        ("k_max=99", "k_max is 99; use at most 64"),
    ],
)
def test_bad_settings_stop_a_demo_before_it_writes(refused, model, change, says):
    refused("demo", f"model={model}", *SMALL, change, says=says.replace("model's", f"{model.name}'s"))


def test_a_demo_with_other_settings_goes_elsewhere(cli, refused, model):
    assert cli("record", f"model={model}", *SMALL[0:2], *SMALL[7:], "out=d/trace", "dense=false").code == 0
    refused("demo", f"model={model}", *SMALL, says="d/trace holds another run (record); choose another out=")
