"""One dense greedy trace replays to the rounds the engine really does, under any controller, k and budget."""

import random

import pytest

from specdial.engine.job import ModelSettings, load_job
from specdial.engine.loop import Decoding
from specdial.engine.sampling import Sampling
from specdial.engine.trace.reader import read_trace
from specdial.engine.verbs import record
from specdial.policies.schema import policy_from_mapping
from specdial.simulator.replay import replay, replay_rounds

KV = {"sink": 2, "recent": 8, "window": 8}
PLAIN = {"drafter": {"kind": "none"}, "controller": {"kind": "none"}}
CONTROLLERS = [
    {"kind": "fixed", "k": 1},
    {"kind": "fixed", "k": 3},
    {"kind": "fixed", "k": 8},
    {"kind": "entropy", "threshold": 0.3},
    {"kind": "entropy", "threshold": -0.2, "coefficient": 0.4},
    {"kind": "confidence", "threshold": 0.3},
    {"kind": "confidence", "threshold": 0.7, "k_max": 5},
    {"kind": "rate"},
    {"kind": "rate", "form": "paper", "gamma": 0.2},
    {"kind": "rate", "gamma": 0.05, "k_set": [1, 2, 4, 8], "learning_rate": 0.2},
]


@pytest.fixture(scope="module")
def tiny(tiny_checkpoint, tmp_path_factory):
    """Settings of a tiny model and of a workload of three documents of random letters."""
    letters = random.Random(1)
    text = "\n\n".join("".join(letters.choices("abcdefgh ,.\n", k=90)) for _ in range(40))
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(text)
    workload = {"kind": "file", "path": str(path), "context_tokens": 200, "documents": 3, "new_tokens": 37}
    return {"model": {"source": str(tiny_checkpoint("llama")), "device": "cpu"}, "workload": workload}


def engine_rounds(s, document, policy):
    s.rewind()
    return [
        (document.index, i, int(r.context_tokens[0]), int(r.k[0]), int(r.accepted[0]), len(r.emitted[0]))
        for i, r in enumerate(Decoding(s, policy, Sampling(), [document.index]).rounds())
    ]


def compare(settings, trace, policies):
    """Mismatching policies, and the number of rounds compared. Tokens must equal the trace's plain greedy output."""
    job = load_job(ModelSettings(**settings["model"]), settings["workload"])
    done = {policy.name: [] for policy in policies}
    greedy = {}
    for doc, token in zip(trace.outputs["doc"].to_pylist(), trace.outputs["token_id"].to_pylist()):
        greedy.setdefault(doc, []).append(token)
    for document in job.documents:
        s = job.sequences([document], policies)
        for policy in policies:
            done[policy.name] += engine_rounds(s, document, policy)
            assert s.tokens[0][len(document.prompt_ids) :] == greedy[document.index], policy.name
    mismatches, rounds = [], 0
    for policy, replayed in zip(policies, replay_rounds(trace, policies), strict=True):
        ours = done[policy.name]
        theirs = zip(
            *(getattr(replayed, n).tolist() for n in ("doc", "round", "context_tokens", "k", "accepted", "emitted"))
        )
        rounds += len(ours)
        if ours != list(theirs):
            mismatches.append(policy.name)
    return mismatches, rounds


def policies(budgets, controllers, kv):
    return [
        policy_from_mapping({"name": f"{c}-{b}", "controller": c, "draft_kv": {**kv, "budget": b}})
        for b in budgets
        for c in controllers
    ]


def test_replay_of_one_trace_equals_the_engine_under_twenty_policies(tiny, tmp_path):
    arms = {"dense": True, "budgets": [24, 60], "k_max": 8, "policy": {**PLAIN, "draft_kv": {**KV, "budget": 24}}}
    record.run({**tiny, **arms, "out": str(tmp_path / "trace")})
    trace = read_trace(tmp_path / "trace")
    mismatches, rounds = compare(tiny, trace, policies([24, 60], CONTROLLERS, KV))
    assert mismatches == []
    assert rounds > 20 * 3 * 5


def test_replay_equals_the_engine_on_pages(tiny, tmp_path):
    kv = {"sink": 1, "recent": 8, "window": 8, "page": 16}
    arms = {"dense": True, "budgets": [32, 64], "k_max": 8, "policy": {**PLAIN, "draft_kv": {**kv, "budget": 32}}}
    record.run({**tiny, **arms, "out": str(tmp_path / "trace")})
    mismatches, rounds = compare(tiny, read_trace(tmp_path / "trace"), policies([32, 64], CONTROLLERS[2:8], kv))
    assert mismatches == []
    assert rounds > 12 * 3 * 5


def test_replaying_the_recorded_policy_gives_its_rounds_and_its_time(tiny, tmp_path):
    mapping = {"name": "own", "controller": {"kind": "entropy"}, "draft_kv": {**KV, "budget": 24}}
    record.run({**tiny, "policy": mapping, "dense": True, "out": str(tmp_path / "trace")})
    trace = read_trace(tmp_path / "trace")
    policy = policy_from_mapping(mapping)
    (replayed,) = replay_rounds(trace, [policy])
    for name in ("doc", "round", "context_tokens", "k", "accepted", "emitted"):
        assert getattr(replayed, name).tolist() == trace.rounds[name].to_pylist(), name
    (outcome,) = replay(trace, None, [policy])
    recorded = sum(sum(trace.rounds[f"{part}_us"].to_pylist()) for part in ("draft", "verify", "select", "host"))
    assert outcome.us_per_token * outcome.tokens == pytest.approx(recorded, rel=1e-9)


@pytest.mark.model
def test_replay_equals_the_engine_on_smollm2(smollm2, tmp_path):
    """The real model on real text: six policies, one dense trace, no mismatch."""
    workload = {"kind": "book", "context_tokens": 256, "documents": 2, "new_tokens": 20}
    settings = {"model": {"source": "smollm2-135m", "device": "cpu", "dtype": "float32"}, "workload": workload}
    kv = {"sink": 4, "recent": 16, "window": 16}
    arms = {"dense": True, "budgets": [48, 128], "k_max": 6, "policy": {**PLAIN, "draft_kv": {**kv, "budget": 48}}}
    record.run({**settings, **arms, "out": str(tmp_path / "trace")})
    chosen = [
        {**c, "k_max": 6} if "k" not in c else {**c, "k": min(c["k"], 6)} for c in (CONTROLLERS[i] for i in (2, 3, 7))
    ]
    mismatches, rounds = compare(settings, read_trace(tmp_path / "trace"), policies([48, 128], chosen, kv))
    assert mismatches == []
    assert rounds > 6 * 2 * 4
