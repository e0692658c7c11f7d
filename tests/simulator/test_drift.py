"""Drift: silent at the stated rate where nothing changed, loud where hazard or costs did; the file tells of what."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdial.engine.trace.reader import read_trace
from specdial.engine.trace.writer import TraceWriter
from specdial.policies.errors import UserError
from specdial.policies.fields import to_plain
from specdial.policies.file import load_policy, policy_digest, save_policy, short_digest
from specdial.policies.schema import policy_from_mapping
from specdial.simulator.drift import acceptance_scores, cost_scores, judge, jumper
from specdial.simulator.lanes import longest_k, read_record
from specdial.simulator.replay import replay_rounds
from specdial.simulator.synthetic import Shape, synthetic_meta, write_synthetic_costs, write_trace
from specdial.simulator.tuned_on import MOST_DOCUMENTS, DocumentCounts, RoundCost, TunedOn, count_documents, thinned
from specdial.simulator.verbs import drift

K = 4
SHAPE = Shape(documents=16, new_tokens=40)


def documents(generator, count, hazard, *, ks=(K,), contexts=(4096,), slower=1.0, rounds=60):
    """Documents of 60 rounds; each has an ease of its own, since texts differ."""
    found = []
    for _ in range(count):
        mine = np.clip(hazard + generator.normal(0.0, 0.08), 0.02, 0.98)
        k = generator.choice(ks, rounds)
        run = (generator.random((rounds, K)) < mine).cumprod(axis=1).sum(axis=1)
        accepted, depth = np.minimum(run, k), np.arange(K)[:, None]
        judged = ((k > depth) & (accepted >= depth)).sum(axis=1)
        excess = np.log(slower) + generator.normal(0.0, 0.03)
        taken = (accepted > depth).sum(axis=1)
        found.append(DocumentCounts(int(generator.choice(contexts)), tuple(judged), tuple(taken), float(excess)))
    return found


def test_the_capital_is_a_martingale_that_rarely_grows():
    p = np.random.default_rng(0).random((400, 60))
    capital = np.array([jumper(row) for row in p])
    assert abs(capital[:, 5].mean() - 1.0) < 4 * capital[:, 5].std() / 20
    assert (capital.max(axis=1) >= 10.0).mean() <= 0.1 + 3 * np.sqrt(0.1 * 0.9 / 400)
    assert min(jumper(np.full(12, p))[-1] for p in (0.01, 0.99)) > 500


@pytest.mark.parametrize(
    ("score", "mixed"), [(acceptance_scores, {"ks": (1, 2, 4), "contexts": (4096, 9000)}), (cost_scores(0.01), {})]
)
def test_false_alarms_are_as_rare_as_stated(score, mixed):
    """With alpha = 0.2, so that a test too loose would show; live documents have another mix of k and contexts."""
    alpha, runs = 0.2, 80
    alarms = 0
    for seed in range(runs):
        generator = np.random.default_rng(seed)
        tuned = [*documents(generator, 8, 0.6), *documents(generator, 8, 0.6, contexts=(9000,))]
        live = documents(generator, 16, 0.6, **mixed)
        alarms += judge(tuned, live, score, alpha, seed).alarm_at is not None
    assert alarms / runs <= alpha + 3 * np.sqrt(alpha * (1 - alpha) / runs)


@settings(max_examples=8, deadline=None)
@given(st.floats(0.3, 0.9), st.sampled_from([-0.25, 0.25]), st.integers(0, 30), st.integers(0, 10**6))
def test_a_shifted_hazard_is_found_whenever_it_comes(hazard, shift, quiet, seed):
    generator = np.random.default_rng(seed)
    other = hazard - shift if not 0.05 < hazard + shift < 0.95 else hazard + shift
    tuned = documents(generator, 24, hazard)
    live = [*documents(generator, quiet, hazard), *documents(generator, 40, other)]
    found = judge(tuned, live, acceptance_scores, 0.001, seed)
    assert found.alarm_at is not None
    assert found.alarm_at >= quiet  # at this alpha an earlier one would be a find


@settings(max_examples=8, deadline=None)
@given(st.floats(0.86, 1.16), st.integers(0, 10**6))
def test_costs_within_the_tolerance_are_no_drift_and_beyond_it_they_are(slower, seed):
    generator = np.random.default_rng(seed)
    tuned = [replace(d, excess_log=0.0) for d in documents(generator, 24, 0.6)]  # replayed: no times of its own
    near = documents(generator, 40, 0.6, slower=slower)
    far = documents(generator, 40, 0.6, slower=slower * (1.6 if slower >= 1 else 0.6))
    assert judge(tuned, near, cost_scores(0.3), 1e-4, seed).alarm_at is None
    assert judge(tuned, far, cost_scores(0.3), 1e-4, seed).alarm_at is not None


FIXED = {"name": "four", "controller": {"kind": "fixed", "k": K}, "draft_kv": {"budget": 256, "sink": 4, "recent": 16}}


def live_trace(out: Path, policy, shape: Shape, slower: float = 1.0, dense: Path | None = None) -> None:
    """What `run` would have left of a policy on such documents: a sparse trace of its rounds, at what costs said."""
    if dense is None:
        dense = out.with_suffix(".dense")
        write_trace(dense, shape)
    source = read_trace(dense)
    [log] = replay_rounds(source, [policy])
    meta = synthetic_meta(shape) | {"policy": policy.decisions(), "policy_digest": policy_digest(policy)}
    meta |= {"dense": False, "k_max": policy.k_max, "arms": [{**meta["arms"][1], "arm": 0}]}
    writer = TraceWriter(out, meta)
    outputs = source.outputs.to_pydict()
    for doc in np.unique(log.doc):
        mine = log.doc == doc
        rounds = {
            name: getattr(log, name)[mine] for name in ("doc", "round", "context_tokens", "k", "accepted", "emitted")
        }
        n = int(mine.sum())
        context = rounds["context_tokens"]
        rounds |= {"batch": np.ones(n, int), "mode": ["full"] * n, "rounds_since_full": np.zeros(n, int)}
        rounds |= {"draft_us": slower * rounds["k"] * (160.0 + 0.2 * 256), "host_us": slower * np.full(n, 30.0)}
        rounds |= {"verify_us": slower * (700.0 + 0.2 * context + 10.0 * (K + 1))}
        rounds |= {"select_us": slower * (20.0 + 0.005 * context)}
        kept = [i for i, d in enumerate(outputs["doc"]) if d == doc]
        writer.write(int(doc), {"rounds": rounds, "outputs": {n: [outputs[n][i] for i in kept] for n in outputs}})


@pytest.fixture(scope="module")
def stamped(tmp_path_factory):
    """A folder with a policy file that says what it was tuned on, that trace, and its costs."""
    folder = tmp_path_factory.mktemp("drift")
    write_trace(folder / "tuned", SHAPE)
    write_synthetic_costs(folder / "costs", (256, 512, 1024), (1,), SHAPE)
    save_policy(policy_from_mapping({**FIXED, "expected": {"speedup": 1.5}}), folder / "bare.yaml")
    given = {"reference": str(folder / "tuned"), "costs": str(folder / "costs"), "stamp": str(folder / "best.yaml")}
    assert drift.run({"policy": str(folder / "bare.yaml"), **given})["tuned_documents"] == 16
    return folder


def test_a_live_trace_of_the_same_text_is_as_tuned_and_of_another_is_not(stamped, tmp_path, capsys):
    policy = load_policy(stamped / "best.yaml")
    assert policy.expected["speedup"] == 1.5
    live_trace(tmp_path / "live" / short_digest(policy), policy, replace(SHAPE, seed=7, documents=20))
    found = drift.run(
        {"policy": str(stamped / "best.yaml"), "trace": str(tmp_path / "live"), "out": str(tmp_path / "d.json")}
    )
    assert (found["alarm"], found["acceptance"]["alarm"], found["costs"]["alarm"]) == (False, False, False)
    for row in found["strata"]:
        assert row["live"]["time_over_expected"] == pytest.approx(1.0, abs=0.02)
    assert json.loads((tmp_path / "d.json").read_text())["alarm"] is False
    harder = replace(SHAPE, seed=7, documents=20, difficulty_nats=1.6)
    live_trace(tmp_path / "hard", policy, harder, slower=1.3)
    found = drift.run({"policy": str(stamped / "best.yaml"), "trace": str(tmp_path / "hard")})
    assert found["acceptance"]["alarm"]
    assert found["costs"]["alarm"]
    assert found["acceptance"]["after_documents"] < 20
    assert "acceptance DRIFTED at document" in capsys.readouterr().out
    alone = {"policy": str(stamped / "bare.yaml"), "reference": str(stamped / "tuned")}
    assert drift.run({**alone, "trace": str(tmp_path / "hard")})["acceptance"] == found["acceptance"]


def test_a_policy_s_own_rounds_and_their_replay_count_alike(stamped, tmp_path):
    policy = load_policy(stamped / "best.yaml")
    live_trace(tmp_path / "own", policy, SHAPE, dense=stamped / "tuned")
    told = policy.expected["tuned_on"]["documents"]
    own = count_documents(read_trace(tmp_path / "own"), policy.k_max, TunedOn(1, ()))
    assert [to_plain(d)["accepted"] for d in own] == [d["accepted"] for d in told]
    assert read_record(read_trace(tmp_path / "own")).policy_digest == policy_digest(policy)


def test_a_policy_file_holds_so_many_documents_at_most():
    many = TunedOn(1, tuple(DocumentCounts(i + 1) for i in range(1000)))
    kept = [d.context_tokens for d in thinned(many).documents]
    assert len(kept) == MOST_DOCUMENTS
    assert (kept[0], kept[-1] > 950, kept == sorted(kept)) == (1, True, True)


def damaged(policy, **changes):
    return replace(policy, expected={"tuned_on": {**policy.expected["tuned_on"], **changes}})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda p: replace(p, expected=None), "policy four does not say what it was tuned on; add reference=TRACE"),
        (lambda p: damaged(p, version=2), "expected.tuned_on.version is 2; this version reads 1"),
        (lambda p: damaged(p, documents=[{"context_tokens": 0}]), "documents[0].context_tokens is 0; use at least 1"),
        (
            lambda p: damaged(p, documents=[{"context_tokens": 9, "accepted": [1]}]),
            "documents[0].accepted does not fit",
        ),
        (lambda p: replace(p, controller=replace(p.controller, k=3)), "is of another policy than four"),
        (lambda p: replace(p, provenance={"model_digest": "1" * 64}), "was tuned on another model than synthetic"),
    ],
)
def test_what_cannot_be_compared_is_refused(stamped, tmp_path, change, says):
    policy = load_policy(stamped / "best.yaml")
    live_trace(tmp_path / "live", policy, replace(SHAPE, documents=1))
    save_policy(change(policy), tmp_path / "p.yaml")
    with pytest.raises(UserError) as caught:
        drift.run({"policy": str(tmp_path / "p.yaml"), "trace": str(tmp_path / "live")})
    assert says in str(caught.value)


def test_a_round_s_time_is_held_against_its_batch_s_longest_draft():
    """Two documents decoded together and a third alone, whose time nothing tuned says."""
    rows = [(3, 0, 2, 1), (3, 1, 2, 4), (5, 0, 2, 3), (5, 1, 2, 0), (6, 0, 1, 2)]  # doc, round, batch, k
    doc, number, batch, k = (list(column) for column in zip(*rows))
    part = {"context_tokens": [500] * 5, "accepted": [0] * 5, "emitted": [1] * 5, "mode": ["full"] * 5}
    rest = dict.fromkeys(("verify_us", "select_us", "host_us"), [2.0] * 5)
    drafted = {"k": k, "draft_us": [30.0, 40.0, 30.0, 40.0, 99.0]}
    table = pa.table({"doc": doc, "round": number, "batch": batch, **drafted, **part, **rest})
    meta = {"batch": 2, "documents": [{"doc": 3}, {"doc": 5}, {"doc": 6}]}
    trace = SimpleNamespace(meta=meta, rounds=table)
    assert longest_k(trace).tolist() == [3, 4, 3, 4, 2]
    assert longest_k(SimpleNamespace(meta={**meta, "imported": {}}, rounds=table)).tolist() == k
    costs = tuple(RoundCost(500, drafts, 10.0 * drafts + 6.0) for drafts in range(5))
    found = count_documents(trace, 4, TunedOn(1, (), costs, batch=2))
    assert [d.excess_log for d in found] == [pytest.approx(0.0), pytest.approx(0.0), 0.0]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"trace": "live", "costs": "c"}, "costs is given without a reference"),
        ({"trace": "live", "split": "train"}, "split is given without a reference"),
        ({"reference": "t", "stamp": "s", "out": "o"}, "out is given, and there is no trace to judge"),
        ({"reference": "t"}, "trace is missing"),
        ({"stamp": "s", "trace": "live"}, "stamp is given without a reference"),
    ],
)
def test_what_would_change_nothing_is_refused(stamped, given, says):
    with pytest.raises(UserError, match=says):
        drift.run({"policy": str(stamped / "best.yaml"), **given})


@pytest.mark.parametrize("batch", ["many", 0, 2.5, True, None])
def test_a_batch_that_is_none_is_named(stamped, tmp_path, batch):
    policy = policy_from_mapping({**FIXED, "expected": {"batch": batch}})
    save_policy(policy, tmp_path / "p.yaml")
    given = {"reference": str(stamped / "tuned"), "costs": str(stamped / "costs"), "stamp": str(tmp_path / "s.yaml")}
    with pytest.raises(UserError, match=r"expected\.batch is "):
        drift.run({"policy": str(tmp_path / "p.yaml"), **given})


def test_a_live_trace_says_what_of_it_is_not_real(stamped, tmp_path, capsys):
    """Random weights; and acceptance that was set is not judged."""
    policy = load_policy(stamped / "best.yaml")
    live_trace(tmp_path / "live", policy, SHAPE)
    given = {"policy": str(stamped / "best.yaml"), "trace": str(tmp_path / "live")}
    assert drift.run(given)["caveats"] == ["random weights"]
    assert "(random weights)" in capsys.readouterr().out
    meta = json.loads((tmp_path / "live" / "meta.json").read_text())
    (tmp_path / "live" / "meta.json").write_text(json.dumps({**meta, "synthetic_acceptance": [0.7]}))
    found = drift.run(given)
    assert (found["acceptance"], found["caveats"]) == (None, ["random weights", "synthetic acceptance"])
