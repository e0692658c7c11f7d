"""Drafters through the verbs: sparse recordings name them, dense ones refuse them, static arms replay exactly."""

import random

import pytest

from specdial.engine.job import ModelSettings, load_job
from specdial.engine.loop import Decoding
from specdial.engine.sampling import Sampling
from specdial.engine.trace.reader import read_trace
from specdial.engine.verbs import record, run
from specdial.policies.errors import UserError
from specdial.policies.schema import policy_from_mapping
from specdial.simulator.replay import replay_rounds

FIXED = {"kind": "fixed", "k": 3}
KV = {"sink": 2, "recent": 8}
COLUMNS = ("doc", "round", "context_tokens", "k", "accepted", "emitted")


@pytest.fixture(scope="module")
def tiny(tiny_checkpoint, tmp_path_factory):
    """Settings of a tiny model and of two documents of random letters."""
    letters = random.Random(1)
    text = "\n\n".join("".join(letters.choices("abcdefgh ,.\n", k=90)) for _ in range(40))
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(text)
    workload = {"kind": "file", "path": str(path), "context_tokens": 200, "documents": 2, "new_tokens": 30}
    return {"model": {"source": str(tiny_checkpoint("llama", head_dim=64)), "device": "cpu"}, "workload": workload}


@pytest.fixture(scope="module")
def drafters(tiny_checkpoint):
    quest = {"budget": 64, "sink": 1, "recent": 16, "page": 16}
    return {
        "lookup": {"drafter": {"kind": "lookup", "ngram": 2}},
        "model": {"drafter": {"kind": "model", "model": str(tiny_checkpoint("llama", head_dim=64, seed=1))}},
        "quest": {"drafter": {"kind": "quest"}, "draft_kv": quest},
    }


@pytest.fixture(scope="module")
def plain(tiny, tmp_path_factory):
    """The output of plain decoding."""
    out = tmp_path_factory.mktemp("plain")
    record.run({**tiny, "policy": {"drafter": {"kind": "none"}}, "out": str(out)})
    return read_trace(out).outputs["token_id"].to_pylist()


@pytest.mark.parametrize("name", ["lookup", "model", "quest"])
@pytest.mark.parametrize("batch", [1, 2])
def test_recordings_hold_the_plain_output_and_name_the_drafter(tiny, drafters, plain, tmp_path, name, batch):
    policy = {"controller": FIXED, **drafters[name]}
    record.run({**tiny, "policy": policy, "batch": batch, "out": str(tmp_path / "t")})
    trace = read_trace(tmp_path / "t")
    assert trace.outputs["token_id"].to_pylist() == plain
    assert trace.meta["arms"][0]["drafter"] == drafters[name]["drafter"]
    assert list(trace.meta.get("draft_models", {})) == ([policy["drafter"]["model"]] if name == "model" else [])
    assert sum(trace.rounds["k"].to_pylist()) > 0
    (replayed,) = replay_rounds(trace, [policy_from_mapping(policy)])
    for column in COLUMNS:
        assert getattr(replayed, column).tolist() == trace.rounds[column].to_pylist(), column


def test_run_loads_the_draft_model(tiny, drafters):
    settings = {"model": tiny["model"], "policy": {"controller": FIXED, **drafters["model"]}, "new_tokens": 12}
    found = run.run({**settings, "prompt": "a tiny model writes", "ignore_eos": True})
    assert found["new_tokens"] == 12
    assert found["alpha"] is not None


@pytest.mark.parametrize("name", ["lookup", "model", "quest", "fp8"])
def test_dense_recordings_refuse_other_drafters(tiny, drafters, tmp_path, name):
    changes = drafters.get(name, {"drafter": {"kind": "sparse_self", "weights": "fp8"}})
    settings = {**tiny, "policy": {"controller": FIXED, **changes}, "dense": True, "out": str(tmp_path / "t")}
    with pytest.raises(UserError, match="dense=true drafts with the target and its own weights"):
        record.run(settings)
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(
    "kv",
    [
        {**KV, "budget": 24, "refresh_rounds": 0, "window": 32},
        {**KV, "budget": 10, "refresh_rounds": 0},
        {**KV, "budget_frac": 0.1},
        {**KV, "budget": 24, "decay": 0.8},
    ],
    ids=["snap", "streaming", "fraction", "decay"],
)
def test_replay_of_a_dense_trace_equals_the_engine(tiny, tmp_path, kv):
    """Static selections, budgets by fraction, and decayed scores, under controllers that were not recorded."""
    recorded = {"controller": FIXED, "draft_kv": kv}
    record.run({**tiny, "policy": recorded, "dense": True, "k_max": 6, "out": str(tmp_path / "t")})
    trace = read_trace(tmp_path / "t")
    controllers = [FIXED, {"kind": "fixed", "k": 6}, {"kind": "confidence", "threshold": 0.1, "k_max": 6, "lag": 1}]
    policies = [policy_from_mapping({"name": str(c), "controller": c, "draft_kv": kv}) for c in controllers]
    job = load_job(ModelSettings(**tiny["model"]), tiny["workload"])
    done = [[] for _ in policies]
    for document in job.documents:
        s = job.sequences([document], policies)
        for policy, rounds in zip(policies, done):
            s.rewind()
            for i, r in enumerate(Decoding(s, policy, Sampling(), [document.index]).rounds()):
                context, k, accepted = int(r.context_tokens[0]), int(r.k[0]), int(r.accepted[0])
                rounds.append((document.index, i, context, k, accepted, len(r.emitted[0])))
    accepted = 0
    for rounds, replayed in zip(done, replay_rounds(trace, policies)):
        assert rounds == list(zip(*(getattr(replayed, column).tolist() for column in COLUMNS)))
        accepted += sum(row[4] for row in rounds)
    assert accepted > 0
