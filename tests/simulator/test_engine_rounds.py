"""Replay against the engine itself: one dense greedy recording, then the engine's real rounds under other policies."""

import json

import numpy as np
import pytest

from specdial.engine.job import ModelSettings, load_job
from specdial.engine.loop import Decoding
from specdial.engine.recorder import Recorder
from specdial.engine.sampling import Sampling
from specdial.engine.trace.reader import read_costs, read_trace
from specdial.engine.verbs import calibrate, record
from specdial.policies.fields import to_plain
from specdial.policies.schema import policy_from_mapping
from specdial.simulator.costs import CostModel
from specdial.simulator.lanes import read_record
from specdial.simulator.loop import rounds
from specdial.simulator.replay import replay, replay_rounds

KV = {"budget": 40, "sink": 2, "recent": 8, "window": 8}
BUDGETS = (24, 40, 80)
K_MAX = 8
PLAIN = {"drafter": {"kind": "none"}, "controller": {"kind": "none"}, "draft_kv": KV}
COLUMNS = ("doc", "round", "context_tokens", "k", "accepted", "emitted")


@pytest.fixture(scope="module")
def source(tiny_checkpoint, tmp_path_factory):
    """Settings of a tiny random model and three documents of random letters."""
    path = tmp_path_factory.mktemp("text") / "letters.jsonl"
    generator = np.random.default_rng(0)
    texts = ["".join(map(chr, generator.integers(97, 122, 400))) for _ in range(6)]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    workload = {"kind": "file", "path": str(path), "context_tokens": 130, "documents": 3, "new_tokens": 33}
    checkpoint = str(tiny_checkpoint("llama"))
    return {"model": {"source": checkpoint, "device": "cpu", "dtype": "float32"}, "workload": workload}


@pytest.fixture(scope="module")
def dense(source, tmp_path_factory):
    """One dense trace of plain greedy decoding under three budgets."""
    out = tmp_path_factory.mktemp("dense") / "trace"
    record.run({**source, "policy": PLAIN, "out": str(out), "dense": True, "budgets": list(BUDGETS), "k_max": K_MAX})
    return read_trace(out)


def random_policy(generator):
    k = int(generator.integers(1, K_MAX + 1))
    settings = {
        "fixed": {"k": k},
        "entropy": {"k_max": k, "coefficient": 0.2, "threshold": float(generator.uniform(-0.4, 0.4))},
        "confidence": {"k_max": k, "threshold": float(generator.uniform(0.0, 0.5))},
        "rate": {
            "k_max": k,
            "form": str(generator.choice(["paper", "calibrated"])),
            "gamma": float(generator.uniform(0.0, 0.3)),
            "k_set": [allowed for allowed in [[], [1, 3, 6]][int(generator.integers(2))] if allowed <= k],
        },
    }
    kind = str(generator.choice(list(settings)))
    if kind != "fixed":
        settings[kind]["lag"] = int(generator.integers(2))
    policy = {
        "controller": {"kind": kind, **settings[kind]},
        "draft_kv": {**KV, "budget": int(generator.choice(BUDGETS))},
    }
    if generator.random() < 0.3:
        start = int(generator.integers(130, 150))
        override = {"controller": {"kind": "none"}} if generator.random() < 0.5 else {"draft_kv": {"budget": 24}}
        policy["cells"] = [{"from_context_tokens": start, "to_context_tokens": start + 15, "overrides": override}]
    return policy_from_mapping(policy)


def decode(groups, policy):
    """Rounds of the engine under a policy: rows of COLUMNS, sorted by document."""
    rows = []
    for group, s in groups:
        s.rewind()
        recorder = Recorder(group)
        for round_ in Decoding(s, policy, Sampling(), [d.index for d in group]).rounds():
            recorder.add(round_)
        rows += [row for columns in recorder.rounds for row in zip(*(columns[name] for name in COLUMNS))]
    return sorted(rows)


def replayed_rows(log):
    return list(zip(*(getattr(log, name).tolist() for name in COLUMNS)))


@pytest.mark.parametrize("batch", [1, 2])
def test_fifty_random_policies_replay_to_the_rounds_the_engine_really_does(source, dense, batch):
    generator = np.random.default_rng(batch)
    policies = [random_policy(generator) for _ in range(25)]
    job = load_job(ModelSettings(**source["model"]), source["workload"])
    groups = [job.documents[i : i + batch] for i in range(0, len(job.documents), batch)]
    prefilled = [(group, job.sequences(group, policies)) for group in groups]
    lengths = set()
    for policy, log in zip(policies, replay_rounds(dense, policies, batch=batch)):
        rows = decode(prefilled, policy)
        assert replayed_rows(log) == rows
        lengths |= {row[3] for row in rows}
    assert len(lengths) >= 7  # the policies were as different as they should be


DECAY = {"budget": 40, "sink": 2, "recent": 8, "decay": 0.9}
FRAC = {"budget_frac": 0.2, "sink": 2, "recent": 8, "window": 8}
STATIC = {**KV, "refresh_rounds": 0}
RATE, LATE = {"kind": "rate", "gamma": 0.1}, {"kind": "rate", "gamma": 0.1, "lag": 1}


@pytest.mark.parametrize("kv", [DECAY, FRAC, STATIC], ids=["decay", "frac", "static"])
def test_selections_that_only_the_text_decides_replay_to_the_rounds_the_engine_really_does(source, tmp_path, kv):
    recorded = {"controller": {"kind": "fixed", "k": 1}, "draft_kv": kv}
    settings = {"policy": recorded, "dense": True, "budgets": [], "k_max": K_MAX, "out": str(tmp_path / "trace")}
    record.run({**source, **settings})
    policies = [policy_from_mapping({"controller": c, "draft_kv": kv}) for c in ({"kind": "fixed", "k": 5}, RATE, LATE)]
    job = load_job(ModelSettings(**source["model"]), source["workload"])
    prefilled = [([d], job.sequences([d], policies)) for d in job.documents]
    for policy, log in zip(policies, replay_rounds(read_trace(tmp_path / "trace"), policies)):
        assert replayed_rows(log) == decode(prefilled, policy)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    "parts",
    [
        {"drafter": {"kind": "sparse_self", "weights": "fp8"}, "draft_kv": KV, "controller": LATE},
        {"drafter": {"kind": "lookup"}, "controller": {"kind": "fixed", "k": 5}},
        {"draft_kv": {**KV, "refresh_rounds": 3}, "controller": LATE},
        {"draft_kv": DECAY, "controller": RATE},
        {"draft_kv": FRAC, "controller": RATE},
    ],
    ids=["fp8", "lookup", "refresh", "decay", "frac"],
)
def test_a_recording_of_any_drafter_replays_to_its_own_rounds(source, tmp_path, parts, batch):
    policy = policy_from_mapping(parts)
    record.run({**source, "policy": to_plain(policy), "batch": batch, "out": str(tmp_path / "own")})
    own = read_trace(tmp_path / "own")
    (outcome,) = replay(own, None, [policy], batch=batch, keep_rounds=True)
    assert outcome.level == "exact"
    rounds = own.rounds.to_pylist()
    assert replayed_rows(outcome.round_log) == sorted(tuple(row[name] for name in COLUMNS) for row in rounds)
    assert sum(row["k"] for row in rounds) > 0


@pytest.mark.parametrize(("batch", "temperature"), [(1, 0.0), (2, 0.0), (3, 0.0), (1, 1.0), (2, 1.0)])
def test_a_recording_replays_to_its_own_rounds_and_time(source, tmp_path, batch, temperature):
    generator = np.random.default_rng(7)
    for i in range(3):
        policy = random_policy(generator)
        settings = {**source, "policy": to_plain(policy), "batch": batch, "out": str(tmp_path / str(i))}
        record.run({**settings, "sampling": {"temperature": temperature}})
        own = read_trace(tmp_path / str(i))
        (outcome,) = replay(own, None, [policy], batch=batch, keep_rounds=True)
        assert outcome.level == "exact"
        rounds = own.rounds.to_pylist()
        assert replayed_rows(outcome.round_log) == sorted(tuple(row[name] for name in COLUMNS) for row in rounds)
        once = {}  # members of a batch share a round's time
        for row in rounds:
            parts = (row["draft_us"], row["verify_us"], row["select_us"], row["host_us"])
            once[row["doc"] // batch, row["round"]] = sum(parts)
        assert outcome.us_per_token * outcome.tokens == pytest.approx(sum(once.values()), rel=1e-9)


def test_a_lossy_recording_replays_to_its_own_rounds_time_and_schedule(source, tiny_checkpoint, tmp_path):
    """In batches and two cells: partial rounds are counted as the engine counts them. Other selections are refused."""
    verify_kv = {"mode": "partial", "budget": 24, "sink": 2, "recent": 8, "full_period": 3}
    cell = {"from_context_tokens": 145, "overrides": {"verify_kv": {"full_period": 5}}}
    policy = {"controller": {"kind": "fixed", "k": 3}, "draft_kv": KV, "verify_kv": verify_kv, "cells": [cell]}
    model = {**source["model"], "source": str(tiny_checkpoint("llama", head_dim=64))}
    record.run({**source, "model": model, "policy": policy, "batch": 2, "out": str(tmp_path / "t")})
    read = read_record(read_trace(tmp_path / "t"))
    one = policy_from_mapping(policy)
    (outcome,) = replay(read, None, [one], batch=2, keep_rounds=True, bootstrap=0)
    assert (outcome.level, outcome.lossless) == ("modelled", False)
    table = read.trace.rounds.sort_by([("doc", "ascending"), ("round", "ascending")])
    for name in COLUMNS:
        assert getattr(outcome.round_log, name).tolist() == table[name].to_pylist(), name
    spent = sum(table[name].to_numpy() for name in ("draft_us", "verify_us", "select_us", "host_us"))
    doc, number = table["doc"].to_numpy(), table["round"].to_numpy()
    batches = [dict(zip(number[mine], spent[mine])) for mine in (doc < 2, doc == 2)]  # members share a round's time
    assert outcome.us_per_token * outcome.tokens == pytest.approx(sum(sum(batch.values()) for batch in batches))
    assert outcome.breakdown["verify_partial"] > 0.0
    rows = {(r["doc"], r["round"]): (r["mode"] == "partial", r["rounds_since_full"]) for r in table.to_pylist()}
    counted = {}
    for at, step in enumerate(rounds(read, read.documents, [one], [(0, 0)], batch=2)):
        for place in np.flatnonzero(step.active):
            seen = step.verified
            counted[int(read.documents.doc[place]), at] = bool(seen.partial[place]), int(seen.since_full[place])
    assert counted == rows
    lossless = policy_from_mapping({k: v for k, v in policy.items() if k not in ("verify_kv", "cells")})
    wider = policy_from_mapping({**policy, "verify_kv": {**verify_kv, "budget": 32}})
    shorter = policy_from_mapping({**policy, "controller": {"kind": "fixed", "k": 2}})
    found = replay(read, None, [lossless, wider, shorter], batch=2, bootstrap=0)
    assert [o.level for o in found] == ["refused"] * 3
    assert "another selection" in found[1].reason
    assert "measured" in found[2].reason, "what a correction costs cannot be told from rounds"
    assert replay_rounds(read, [shorter], batch=2)[0].k.max() == 2


def test_keys_in_host_memory_replay_to_their_own_rounds_and_time_and_price_no_others(source, dense, tmp_path):
    """What is accepted does not depend on where keys live; what it costs does, waiting for them apart."""
    parts = {"controller": {"kind": "fixed", "k": 3}, "draft_kv": KV}
    here, there = policy_from_mapping(parts), policy_from_mapping({**parts, "kv": {"where": "host"}})
    record.run({**source, "policy": to_plain(there), "out": str(tmp_path / "host")})
    own = read_trace(tmp_path / "host")
    mine, other = replay(own, None, [there, here], bootstrap=0, keep_rounds=True)
    assert (mine.level, other.level) == ("exact", "refused")
    rounds = own.rounds.to_pylist()
    assert replayed_rows(mine.round_log) == sorted(tuple(row[name] for name in COLUMNS) for row in rounds)
    spent = sum(row[f"{part}_us"] for row in rounds for part in ("draft", "verify", "select", "host"))
    assert mine.us_per_token * mine.tokens == pytest.approx(spent, rel=1e-9)
    waited = sum(row["exposed_us"] for row in rounds)
    assert waited > 0.0
    assert mine.breakdown["transfer"] * mine.tokens == pytest.approx(waited)
    (other,) = replay(dense, None, [there], bootstrap=0)
    assert other.reason == "its keys live in host memory, and costs are of keys on the device: validate measures it"
    assert replay_rounds(dense, [here])[0].k.tolist() == replay_rounds(dense, [there])[0].k.tolist()
    ranges = {"contexts": [130, 163], "ks": [0, 3], "budgets": [40], "draft_kv": KV, "repeats": 3}
    calibrate.run({**source, **ranges, "kv": {"where": "host"}, "out": str(tmp_path / "costs")})
    costs = CostModel.from_table(read_costs(tmp_path / "costs"))
    mine, other = replay(own, costs, [there, here], bootstrap=0)
    assert (mine.level, other.level) == ("exact", "refused")
    steps = [costs.at("transfer", row["context_tokens"], 1)[0] for row in rounds]
    assert mine.breakdown["transfer"] * mine.tokens == pytest.approx(sum(steps))
    assert sum(mine.breakdown.values()) == pytest.approx(mine.us_per_token)
