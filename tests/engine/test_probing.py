"""Probes: what they say of a partial verification is what a lossy decoding of the same text has from its rounds."""

import dataclasses

import numpy as np
import pytest

from specdial.engine.drafters.model import ModelDraft
from specdial.engine.fidelity import measure_fidelity, plain_output
from specdial.engine.job import history_spec
from specdial.engine.loop import Decoding
from specdial.engine.probing import Probing, _Walk, places_of, probe_arms, record_probes
from specdial.engine.sampling import Sampling
from specdial.engine.sequences import Sequences
from specdial.engine.trace.reader import read_trace
from specdial.engine.verbs import record
from specdial.policies.errors import UserError
from specdial.policies.schema import policy_from_mapping

pytestmark = pytest.mark.usefixtures("one_thread")
KV = {"budget": 40, "sink": 2, "recent": 8, "window": 16}
LOSSLESS = policy_from_mapping({"controller": {"kind": "fixed", "k": 3}, "draft_kv": KV})
TINY = Probing(sources=("history", "recent"), budgets=(16, 4096), rounds=2, places=3, k=3)
LOOKUP = {"drafter": {"kind": "lookup"}, "controller": {"kind": "fixed", "k": 3}}
TREES = {"kind": "eagle", "model": "head", "tree": {"width": 2}}
SMALL = {"mode": "partial", "sink": 2, "recent": 6}


@pytest.fixture(scope="module")
def decoder(tiny_model):
    model = tiny_model("llama", head_dim=64)
    for layer in model.decoder.layers:
        layer.qkv.mul_(2.0)
    return model.decoder


def lossy(**verify_kv):
    given = {"mode": "partial", "sink": 2, "recent": 6, "full_period": 0, **verify_kv}
    return policy_from_mapping({"controller": {"kind": "fixed", "k": 3}, "draft_kv": KV, "verify_kv": given})


def decoded(decoder, policy, arms):
    prompt = np.random.default_rng(3).integers(0, 256, 90).tolist()
    s = Sequences(decoder, 90 + 40 + 8, 1, history=history_spec([policy, *arms]), backend="reference")
    s.prefill([prompt], [30])
    for _ in Decoding(s, policy, Sampling(), [0]).rounds():
        pass
    return s


def test_every_arm_at_the_first_place_is_the_first_round_of_its_policy(decoder):
    """The text of plain decoding; a first round starts from the same keys and scores."""
    base = lossy(budget=16)
    arms = probe_arms(base, TINY)
    s = decoded(decoder, LOSSLESS, arms)
    text = s.outputs
    found = record_probes(s, list(s.tokens[0]), arms, TINY)
    assert [len(t) for t in s.tokens] == [90]
    assert s.limits.tolist() == [30]
    assert places_of(90, 120, TINY) == [90, 100, 110]
    rows = [dict(zip(found, row)) for row in zip(*found.values())]
    assert len(rows) == len(arms) * 3 * TINY.span_tokens
    plain = plain_output(s, [0])
    assert plain == text
    for number, arm in enumerate(arms, start=1):
        mine = [row for row in rows if row["arm"] == number]
        first = next(row for row in mine if row["position"] == 90)
        assert {row["rounds_since_full"] for row in mine} == {1, 2}
        (real,) = measure_fidelity(s, arm, [0], plain)
        assert first["kl_nats"] == pytest.approx(float(real.kl_nats[0]), abs=1e-5)
        assert first["top1_match"] == bool(real.top1_match[0])
        if arm.verify_kv.keys.budget == 4096:
            assert max(row["kl_nats"] for row in mine) < 1e-6
            assert all(row["top1_match"] for row in mine)
            assert all(row["arr"] == pytest.approx(1.0, abs=1e-5) for row in mine)
            assert [r["draft_match"] for r in mine if r["rounds_since_full"] == 1] == [
                r["full_match"] for r in mine if r["rounds_since_full"] == 1
            ]
        else:
            assert max(row["kl_nats"] for row in mine) > 1e-3
            assert all(0.0 < row["arr"] < 1.0 for row in mine)


def test_a_kept_selection_is_the_first_rounds(decoder):
    """It differs from a new one only from the second round on."""
    probing = dataclasses.replace(TINY, sources=("history",), budgets=(16,), places=1)
    found = []
    for refresh in ("round", "full"):
        arms = probe_arms(lossy(budget=16, refresh=refresh), probing)
        s = decoded(decoder, LOSSLESS, arms)
        found.append(record_probes(s, list(s.tokens[0]), arms, probing))
    anew, kept = found
    first = probing.k + 1
    assert anew["kl_nats"][:first] == pytest.approx(kept["kl_nats"][:first], abs=1e-6)
    assert anew["kl_nats"][first:] != pytest.approx(kept["kl_nats"][first:], abs=1e-6)


def test_record_files_arms_beside_the_policy_itself(tiny_checkpoint, shared, tmp_path):
    model = {**shared["model"], "source": str(tiny_checkpoint("llama", head_dim=64))}
    probe = {"sources": ["history", "page_bound"], "budgets": [32], "rounds": 2, "places": 9, "k": 2}
    policy = {**LOOKUP, "verify_kv": {**SMALL, "source": "recent", "full_period": 3}}
    settings = {**shared, "model": model, "policy": policy, "probes": True, "probe": probe, "fidelity": True}
    record.run({**settings, "out": str(tmp_path / "t")})
    trace = read_trace(tmp_path / "t")
    rows = trace.probes.to_pylist()
    assert [arm["verify_kv"]["source"] for arm in trace.meta["probe_arms"]] == ["history", "page_bound"]
    counts = [sum(row["arm"] == arm for row in rows) for arm in (0, 1, 2)]
    assert counts == [60, 54, 54], "every token once; three places of 20 tokens, two rounds of three"
    assert all(row["arr"] is None for row in rows if row["arm"] == 2)
    assert any(row["draft_match"] for row in rows)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"policy": {"drafter": {"kind": "none"}, "controller": {"kind": "none"}}}, "probes=true takes a policy that"),
        ({"batch": 2}, "probes=true takes one document at a time, batch is 2"),
        ({"acceptance": {"synthetic": [0.5]}}, "probes=true judges a text"),
        ({"probe": {"sources": ["magic"]}}, "probe.sources holds 'magic'; name some of history"),
        ({"probe": {"budgets": [8]}}, "smaller than sink"),
        ({"policy": {**LOOKUP, "kv": {"where": "host"}}}, "probes=true reads keys on the device"),
        (
            {"policy": {**LOOKUP, "drafter": TREES}},
            "probes=true judges chains, the policy drafts trees; record a policy",
        ),
    ],
)
def test_what_cannot_be_probed_is_refused(shared, tmp_path, change, says):
    with pytest.raises(UserError, match=says):
        record.run({**shared, "policy": LOOKUP, "probes": True, "out": str(tmp_path / "t"), **change})


@pytest.mark.parametrize("source", ["lookahead", "hybrid"])
def test_a_draft_model_drafts_at_every_place_what_it_drafts_there_afresh(tiny_model, source):
    """Though it drafted what is not the text, for other arms and rounds, before."""
    target, draft = (tiny_model("llama", head_dim=64).decoder for _ in range(2))
    for layer in draft.layers[1:]:
        layer.down.mul_(0.9)
    heads = {"draft": [[0, 1], [2, 2]], **({"target": [[1, 0]]} if source == "hybrid" else {})}
    policy = policy_from_mapping(
        {
            "drafter": {"kind": "model", "model": "small"}, "controller": {"kind": "fixed", "k": 3},
            "verify_kv": {"mode": "partial", "source": source, "scope": "model", "budget": 12, "sink": 2, "recent": 4},
            "scoring_heads": heads,
        }
    )  # fmt: skip
    probing = Probing(sources=(source,), budgets=(12,), rounds=2, places=2, k=3)
    (arm,) = probe_arms(policy, probing)
    text = np.random.default_rng(5).integers(0, 256, 90).tolist()

    def started(tokens):
        s = Sequences(target, 120, 1, history=history_spec([arm]), backend="reference", companions={"small": draft})
        s.prefill([tokens], [20])
        return s

    walk = _Walk(started(text[:60]), text, probing)
    for n in (60, 68, 81):
        walk.advance(n)
        said = walk.partial_rounds(arm, n)
        fresh = started(text[:n])
        decoding = Decoding(fresh, arm, Sampling(), [0], keep_logits=True)
        first = decoding.decode_round()
        assert said[0].drafts == first.drafts[0].tolist()
        assert np.allclose(said[0].logits[0], decoding.logits[0, 0], atol=1e-4)
        (row, *_) = walk.judged([arm], [said], n)
        assert row["kl_nats"] > 0.0


def test_arms_share_what_a_draft_model_drafts(tiny_model, monkeypatch):
    """Each arm's rows are those it has alone, and a model drafts once a place and round for arms of the same heads."""
    target, draft = (tiny_model("llama", head_dim=64).decoder for _ in range(2))
    for layer in draft.layers[1:]:
        layer.down.mul_(0.9)
    policy = policy_from_mapping(
        {
            "drafter": {"kind": "model", "model": "small"}, "controller": {"kind": "fixed", "k": 3},
            "verify_kv": {"source": "hybrid", "scope": "model", **SMALL, "budget": 12},
            "scoring_heads": {"draft": [[0, 1], [2, 2]], "target": [[1, 0]]},
        }
    )  # fmt: skip
    probing = Probing(sources=("recent", "history", "lookahead", "hybrid"), budgets=(12, 20), rounds=2, places=2, k=3)
    arms = probe_arms(policy, probing)
    text = np.random.default_rng(5).integers(0, 256, 90).tolist()
    steps, step = [], ModelDraft.step
    monkeypatch.setattr(ModelDraft, "step", lambda *of: steps.append(of[1]) or step(*of))

    def probed(some):
        s = Sequences(target, 120, 1, history=history_spec(some), backend="reference", companions={"small": draft})
        s.prefill([text[:60]], [20])
        return record_probes(s, text, some, probing)

    together = probed(arms)
    assert len(steps) == 2 * probing.places * probing.rounds * probing.k, "with scoring heads of its own, and without"
    for number, arm in enumerate(arms, start=1):
        mine, alone = np.array(together["arm"]) == number, probed([arm])
        for name in ("position", "top1_match", "draft_match", "full_match"):
            assert np.array(together[name])[mine].tolist() == alone[name], (arm.name, name)
        for name in ("arr", "kl_nats"):
            assert np.allclose(np.array(together[name])[mine], alone[name], atol=1e-5), (arm.name, name)
