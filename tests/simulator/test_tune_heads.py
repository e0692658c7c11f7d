"""tune_heads as a verb: what it writes is what it found, and the policy file loads."""

import json

import numpy as np
import pytest

from specdial.engine.trace.attention import ALL_HEADS, DRAFT, TARGET, AttentionMeta, HeadScore, KeptRows, RowRun
from specdial.engine.trace.attention_file import write_attention, write_rows
from specdial.policies.errors import UserError
from specdial.policies.file import load_policy
from specdial.simulator.verbs import tune_heads

FIRST, ROWS = 90, 24
SEARCH = {"budget": 40, "stage_budgets": [32], "heads_per_layer": 1, "trials": 8}


@pytest.fixture
def recorded(tmp_path):
    """recorded(draft=True) -> a trace of two documents, of random rows: two layers of one head each.

    random: the source whose weights were random, if any.
    """

    def write(*, draft=True, random=""):
        rng = np.random.default_rng(0)
        out = tmp_path / "trace"
        sources = (TARGET, DRAFT) if draft else (TARGET,)
        for doc in range(2):
            names = [(source, layer, 0) for source in sources for layer in range(2)]
            kept = {name: rows(rng) for name in [*names, (TARGET, 0, ALL_HEADS), (TARGET, 1, ALL_HEADS)]}
            write_rows(out, doc, kept, FIRST)
        runs = tuple(RowRun(doc, split, FIRST, FIRST, ROWS) for doc, split in enumerate(("train", "test")))
        heads = [HeadScore(source, layer, 0, 0.5, 0.0, 1, layer + 1) for source in sources for layer in range(2)]
        model, small = {"digest": "d", "random": random == TARGET}, {"name": "small", "random": random == DRAFT}
        meta = AttentionMeta(model, small if draft else None, runs, 1, 4096, 4096, {}, {}, {}, {})
        write_attention(out, meta, heads)
        return str(out)

    def rows(rng):
        raw = rng.gamma(0.3, size=(ROWS, FIRST + ROWS)) * np.tri(ROWS, FIRST + ROWS, FIRST)
        keys = np.broadcast_to(np.arange(raw.shape[1]), raw.shape)
        return KeptRows.of(keys, (raw / raw.sum(-1, keepdims=True)).astype(np.float32), FIRST + 1 + np.arange(ROWS))

    return write


def test_the_choice_is_written_as_a_policy(recorded, tmp_path, capsys):
    found = tune_heads.run({"trace": recorded(), "out": str(tmp_path / "o"), "budgets": [30], "search": SEARCH})
    document = json.loads((tmp_path / "o" / "heads.json").read_text())
    policy = load_policy(tmp_path / "o" / "policy.yaml")
    assert document["choice"]["m"] == found["m"]
    assert [row["budget"] for row in document["by_budget"]] == [30, 40]
    assert policy.verify_kv.budget == 40
    assert policy.verify_kv.lookahead_tokens == found["m"]
    assert [list(head) for head in policy.scoring_heads.target] == found["target"]
    assert policy.drafter.kind == ("model" if found["m"] else "sparse_self")
    assert not policy.lossless
    assert policy.provenance["model_digest"] == "d"
    said = capsys.readouterr()
    assert f"{found['by_budget'][1]['oracle']:.4f}" in said.out
    assert said.err.startswith("tune_heads 0/2 searching heads")
    assert (document["caveats"], "random weights" in said.out) == ([], False)


@pytest.mark.parametrize("source", [TARGET, DRAFT])
def test_random_weights_are_said(recorded, source, tmp_path, capsys):
    tune_heads.run({"trace": recorded(random=source), "out": str(tmp_path / "o"), "budgets": [30], "search": SEARCH})
    assert json.loads((tmp_path / "o" / "heads.json").read_text())["caveats"] == ["random weights"]
    titles = [line for line in capsys.readouterr().out.splitlines() if "documents:" in line]
    assert len(titles) == 4
    assert all(line.strip().endswith("(random weights)") for line in titles)


def test_without_a_draft_model_the_policy_verifies_by_history(recorded, tmp_path):
    found = tune_heads.run({"trace": recorded(draft=False), "out": str(tmp_path / "o"), "search": SEARCH})
    policy = load_policy(tmp_path / "o" / "policy.yaml")
    assert (found["draft"], found["m"]) == ([], 0)
    assert (policy.verify_kv.source, policy.drafter.kind) == ("history", "sparse_self")
    assert found["by_budget"][0]["hybrid"] is None


def test_a_search_without_stage_budgets_is_refused(recorded, tmp_path):
    search = {**SEARCH, "stage_budgets": []}
    with pytest.raises(UserError, match=r"search\.stage_budgets is empty; give at least one"):
        tune_heads.run({"trace": recorded(), "out": str(tmp_path / "o"), "search": search})
    assert not (tmp_path / "o").exists()


def test_a_split_without_documents_is_refused(recorded, tmp_path):
    with pytest.raises(UserError, match="no document in split validation"):
        tune_heads.run({"trace": recorded(), "out": str(tmp_path / "o"), "shown": "validation", "search": SEARCH})
    assert not (tmp_path / "o").exists()
