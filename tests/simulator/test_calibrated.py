"""From the clock to a replay: what calibrate writes is what the cost model reads."""

import pytest

from specdial.engine.trace.reader import read_costs
from specdial.engine.verbs import calibrate
from specdial.policies.errors import UserError
from specdial.simulator.costs import CostModel

KV = {"budget": 40, "sink": 2, "recent": 8, "window": 8}


@pytest.fixture
def settings(tiny_checkpoint, tmp_path):
    text = tmp_path / "words.txt"
    text.write_text("\n\n".join(f"{i} times upon a time there was a key. " * 4 for i in range(20)))
    return {
        "model": {"source": str(tiny_checkpoint("llama")), "device": "cpu", "dtype": "float32"},
        "workload": {"kind": "file", "path": str(text)},
        "out": str(tmp_path / "costs"),
        "contexts": [64],
        "ks": [0, 2],
        "budgets": [40, 48],
        "repeats": 3,
        "draft_kv": KV,
    }


def test_what_is_timed_can_be_priced(settings):
    calibrate.run(settings)
    table = read_costs(settings["out"])
    drafters = {(row["op"], row["drafter"]) for row in table.rows.to_pylist()}
    assert drafters == {("plain", "none"), *((op, "sparse_self") for op in ("draft", "verify", "select", "host"))}
    model = CostModel.from_table(table)
    assert model.at("draft", 64.0, 1, 2, 40)[0] > 0.0
    assert "drafters" not in table.meta["config"]  # as before there were others: an earlier run is found again


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"drafters": []}, "drafters is empty"),
        ({"drafters": [{"kind": "lookup"}, {"kind": "lookup", "ngram": 5}]}, "drafters holds lookup twice"),
        ({"drafters": [{"kind": "none"}]}, r"drafters\[0\].kind is none"),
        ({"drafters": [{"kind": "lookup", "weights": "fp8"}]}, "drafter.weights is 'fp8', which drafter lookup"),
        ({"drafters": [{"kind": "quest"}]}, "draft_kv.page is 1, and drafter quest chooses whole pages"),
        ({"draft_kv": {"budget_frac": 0.1}}, "draft_kv.budget_frac is 0.1; leave it at 0.0: replay prices it"),
        ({"draft_kv": {"refresh_rounds": 0}}, "draft_kv.refresh_rounds is 0; leave it at 1"),
    ],
)
def test_what_cannot_be_timed_is_refused_before_the_model_is_loaded(settings, change, says):
    with pytest.raises(UserError, match=says):
        calibrate.run({**settings, "model": {"source": "nowhere"}, **change})
