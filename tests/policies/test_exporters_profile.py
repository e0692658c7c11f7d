"""Speculation profiles: counted from a trace by depth, or told from a policy's blocks, and never invented."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specdial.engine.trace.reader import read_trace
from specdial.engine.trace.schema import ROUNDS
from specdial.policies.errors import UserError
from specdial.policies.exporters import EXPORTERS, Options
from specdial.policies.fields import to_plain
from specdial.policies.schema import policy_from_mapping
from specdial.simulator.synthetic import Shape, draft_kv, write_trace

FIXED = {"name": "p", "controller": {"kind": "fixed", "k": 3}}
# (k, accepted) of every round: a round may be offered fewer than k near the end.
RECORD = [(3, 3), (3, 0), (3, 1), (2, 2), (3, 3), (0, 0)]


def profile(policy, trace=None):
    lowered = EXPORTERS["profile"](policy, Options(trace=None if trace is None else str(trace)), "mine")
    return json.loads(lowered.files[".json"]), lowered


@pytest.fixture
def recorded(tmp_path):
    """A trace directory whose rounds are RECORD, of policy FIXED."""
    policy = policy_from_mapping(FIXED)
    write_trace(tmp_path / "t", Shape(documents=1, new_tokens=8))
    meta = json.loads((tmp_path / "t" / "meta.json").read_text())
    (tmp_path / "t" / "meta.json").write_text(json.dumps({**meta, "policy": policy.decisions()}))
    (part,) = (tmp_path / "t").glob("rounds-*.parquet")
    rows = [
        {
            **{field.name: 0 for field in ROUNDS},
            "round": i,
            "context_tokens": 9,
            "batch": 1,
            "k": k,
            "accepted": a,
            "emitted": a + 1,
            "mode": "full",
        }
        for i, (k, a) in enumerate(RECORD)
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=ROUNDS), part, write_page_checksum=True)
    return tmp_path / "t"


def test_rounds_of_the_recorded_policy_are_counted_by_depth(recorded):
    content, lowered = profile(policy_from_mapping(FIXED), recorded)
    assert (content["basis"], content["rounds"]) == ("rounds", 6)
    assert content["marginal"] == [4 / 6, 3 / 6, 2 / 6]
    # Depth 3 was drafted after two accepted by two rounds only: the round of k 2 does not count against it.
    assert content["conditional"] == [4 / 5, 3 / 4, 2 / 2]
    emitted = read_trace(recorded).rounds["emitted"].to_numpy()
    assert content["acceptance_length"] == pytest.approx(emitted.mean())
    assert content["acceptance_length"] == pytest.approx(1 + sum(content["marginal"]))
    assert [row.fate for row in lowered.rows] == ["kept", "dropped"]


def test_random_weights_are_said(recorded):
    content, lowered = profile(policy_from_mapping(FIXED), recorded)
    assert (content["random_weights"], lowered.rows[0].note.endswith(", of random weights")) == (True, True)
    meta = json.loads((recorded / "meta.json").read_text())
    meta["model"]["random"] = False
    (recorded / "meta.json").write_text(json.dumps(meta))
    content, lowered = profile(policy_from_mapping(FIXED), recorded)
    assert ("random_weights" in content, "random" in lowered.rows[0].note) == (False, False)


@pytest.mark.parametrize("k", [1.0, 3.0])
@pytest.mark.parametrize(
    "said", [{"measured": {"random_weights": True}}, {"expected": {"caveats": ["random weights"]}}]
)
def test_a_block_says_random_weights(said, k):
    ((basis, about),) = said.items()
    for random in (True, False):
        block = {"tokens_per_round": 1.5, "k": k, **(about if random else {})}
        content, lowered = profile(policy_from_mapping({**FIXED, basis: block}), None)
        assert content["basis"] == basis
        assert content.get("random_weights", False) is random
        assert lowered.rows[0].note.endswith(", of random weights") is random


@pytest.mark.parametrize("model", [None, "m", [1]])
def test_a_meta_without_a_model_is_no_traceback(recorded, model):
    meta = json.loads((recorded / "meta.json").read_text())
    (recorded / "meta.json").write_text(json.dumps({**meta, "model": model}))
    assert "random_weights" not in profile(policy_from_mapping(FIXED), recorded)[0]


def test_a_dense_arm_gives_every_positions_acceptance(tmp_path):
    shape = Shape(documents=3, new_tokens=24)
    write_trace(tmp_path / "t", shape)
    budget = shape.budgets[0]
    policy = policy_from_mapping({**FIXED, "draft_kv": to_plain(draft_kv(budget))})
    content, _ = profile(policy, tmp_path / "t")
    drafts = read_trace(tmp_path / "t").drafts
    arm, depth, match, reached = (drafts[name].to_numpy() for name in ("arm", "depth", "match", "reached"))
    for d in (1, 2, 3):
        mine = (arm == 0) & (depth == d) & reached
        assert content["conditional"][d - 1] == pytest.approx(match[mine].mean())
    assert (content["basis"], content["rounds"]) == ("positions", int(((arm == 0) & (depth == 1)).sum()))
    assert content["marginal"] == pytest.approx(np.cumprod(content["conditional"]))
    assert all(0 <= c <= 1 for c in content["conditional"])


@pytest.mark.parametrize(
    "changed",
    [
        {"controller": {"kind": "rate", "k_max": 3}},
        {"controller": {"kind": "fixed", "k": 60}},
        {"draft_kv": {"budget": 77, "sink": 4, "recent": 16}},
        {"drafter": {"kind": "lookup"}},
    ],
)
def test_a_trace_of_another_policy_is_refused(tmp_path, changed):
    shape = Shape(documents=1, new_tokens=8)
    write_trace(tmp_path / "t", shape)
    base = {**FIXED, "draft_kv": to_plain(draft_kv(shape.budgets[0]))}
    profile(policy_from_mapping(base), tmp_path / "t")
    if "drafter" in changed:
        base.pop("draft_kv")
    with pytest.raises(UserError, match="records another policy, and has no dense arm of this one"):
        profile(policy_from_mapping({**base, **changed}), tmp_path / "t")


def test_what_is_no_trace_or_damaged_is_refused(recorded, tmp_path):
    policy = policy_from_mapping(FIXED)
    with pytest.raises(UserError, match="is not a trace"):
        profile(policy, tmp_path)
    meta = json.loads((recorded / "meta.json").read_text())
    (recorded / "meta.json").write_text(json.dumps({**meta, "synthetic_acceptance": [0.5]}))
    with pytest.raises(UserError, match="accepted drafts by chance"):
        profile(policy, recorded)
    (recorded / "meta.json").write_text(json.dumps({**meta, "schema": "specdial/trace/2"}))
    with pytest.raises(UserError, match="has schema 'specdial/trace/2'"):
        profile(policy, recorded)
    (recorded / "meta.json").write_text(json.dumps(meta))
    for part in recorded.glob("rounds-*.parquet"):
        part.write_bytes(part.read_bytes()[:-40])
    with pytest.raises(UserError, match="no readable rounds"):
        profile(policy, recorded)


def test_blocks_tell_what_they_know_and_no_more():
    policy = policy_from_mapping({**FIXED, "expected": {"tokens_per_round": 2.5, "k": 3.0}})
    content, lowered = profile(policy)
    assert (content["basis"], content["acceptance_length"]) == ("expected", 2.5)
    assert content["marginal"] is content["conditional"] is None
    assert lowered.rows[0].fate == "approximated"
    measured = replace(policy, measured={"tokens_per_round": 2.25, "k": 3.0})
    assert profile(measured)[0]["basis"] == "measured"
    single = policy_from_mapping(
        {"controller": {"kind": "fixed", "k": 1}, "expected": {"tokens_per_round": 1.75, "k": 1.0}}
    )
    content, _ = profile(single)
    assert content["marginal"] == content["conditional"] == [0.75]


@pytest.mark.parametrize("expected", [None, {}, {"tokens_per_round": None}, {"tokens_per_round": True}])
def test_nothing_to_tell_is_refused(expected):
    with pytest.raises(UserError, match="no measured or expected tokens per round; give trace=DIR"):
        profile(policy_from_mapping({**FIXED, "expected": expected}))
