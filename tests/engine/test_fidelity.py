"""Fidelity of lossy output, against a plain statement of it: one full pass over the finished text, a row a token."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch

from specdial.engine.fidelity import measure_fidelity, plain_output, summary
from specdial.engine.job import history_spec
from specdial.engine.sequences import Sequences
from specdial.engine.trace.reader import read_trace
from specdial.engine.verbs import record, validate
from specdial.policies.errors import UserError
from specdial.policies.file import load_policy
from specdial.policies.schema import policy_from_mapping

KV = {"mode": "partial", "source": "recent", "sink": 1, "recent": 5}
LOSSY = {
    "name": "lossy",
    "drafter": {"kind": "lookup"},
    "controller": {"kind": "fixed", "k": 3},
    "verify_kv": {**KV, "full_period": 3},
}
WHOLE = {**LOSSY, "name": "whole", "verify_kv": {**KV, "recent": 5000, "full_period": 0}}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def decoder(tiny_model):
    model = tiny_model("llama", head_dim=64)
    for layer in model.decoder.layers:
        layer.qkv.mul_(2.0)
    return model.decoder


def prefilled(decoder, policy):
    prompts = [np.random.default_rng(n).integers(0, 256, n).tolist() for n in (90, 25)]
    s = Sequences(decoder, 90 + 22 + 4, 2, history=history_spec([policy]), backend="reference")
    s.prefill(prompts, [22, 40])
    return s, prompts


def test_every_token_is_judged_by_full_logits_of_the_same_text(decoder, full_logits, make_attend):
    policy = policy_from_mapping(LOSSY)
    s, prompts = prefilled(decoder, policy)
    plain = plain_output(s, [0, 1])
    found = measure_fidelity(s, policy, [0, 1], plain)
    from specdial.engine.loop import Decoding
    from specdial.engine.sampling import Sampling

    s.rewind()
    decoding = Decoding(s, policy, Sampling(), [0, 1], keep_logits=True)
    kept, states, since = [[], []], [[], []], [[], []]
    for played in decoding.rounds():
        for b, emitted in enumerate(played.emitted):
            kept[b] += list(decoding.logits[b, : len(emitted)].clone())
            states[b] += list(decoding.states.kept[b, : len(emitted)].clone())
            since[b] += [played.rounds_since_full] * len(emitted)
    for b, one in enumerate(found):
        text, start = s.tokens[b], len(prompts[b])
        logits = full_logits(decoder, torch.tensor([text]))[0, start - 1 : -1]  # [N, V]
        assert one.top1_match.tolist() == [int(row.argmax()) == t for row, t in zip(logits, text[start:])]
        log_full, log_own = logits.log_softmax(-1), torch.stack(kept[b]).log_softmax(-1)
        expected = (log_full.exp() * (log_full - log_own)).sum(-1)
        assert np.allclose(one.kl_nats, expected.numpy(), atol=1e-4)
        assert one.rounds_since_full.tolist() == since[b]
        at, last = torch.arange(len(text))[None], decoder.config.layers - 1
        exact = decoder.forward_with_taps(torch.tensor([text]), at, make_attend(), (last,))[1][0, 0, start - 1 : -1]
        own = torch.stack(states[b])  # [N, hidden]
        expected = (exact * own).sum(-1) / exact.norm(dim=-1) / own.norm(dim=-1)
        assert np.allclose(one.hidden_cosine, expected.numpy(), atol=1e-4)
        ours, theirs = text[start:], plain[b][start:]
        assert one.agreeing_tokens == sum(a == c for a, c in zip(ours, theirs))
        assert ours[: one.prefix_tokens] == theirs[: one.prefix_tokens]
        assert one.prefix_tokens == len(theirs) or ours[one.prefix_tokens] != theirs[one.prefix_tokens]
    said = summary(found)
    assert 0.0 < said["top1_agreement"] < 1.0
    assert said["kl_nats"] > 0.01
    assert said["kl_tokens"] == 62
    assert said["prefix_frac"] < 1.0
    ages = {age.pop("rounds_since_full"): age for age in said["drift"]}
    assert sorted(ages) == [0, 1, 2]
    assert sum(age["tokens"] for age in ages.values()) == 62
    assert ages[0]["hidden_cosine"] > 1 - 1e-5 > ages[1]["hidden_cosine"] > 0
    assert sum(age["kl_nats"] * age["tokens"] for age in ages.values()) == pytest.approx(62 * said["kl_nats"], rel=1e-4)
    full_rounds = np.concatenate([f.kl_nats[f.rounds_since_full == 0] for f in found])
    assert full_rounds.max() < 1e-3 < np.concatenate([f.kl_nats[f.rounds_since_full > 0] for f in found]).max()


def test_tokens_past_what_may_be_kept_have_no_divergence(decoder):
    policy = policy_from_mapping(LOSSY)
    s, _ = prefilled(decoder, policy)
    found = measure_fidelity(s, policy, [0, 1], plain_output(s, [0, 1]), kept_bytes=10 * 288 * 4)
    known = [int((~np.isnan(f.kl_nats)).sum()) for f in found]
    assert 6 <= sum(known) <= 10
    assert all(not np.isnan(f.kl_nats[:n]).any() for f, n in zip(found, known))


def test_reading_every_key_strays_nowhere(decoder):
    policy = policy_from_mapping(WHOLE)
    s, _ = prefilled(decoder, policy)
    said = summary(measure_fidelity(s, policy, [0, 1], plain_output(s, [0, 1])))
    assert (said["top1_agreement"], said["prefix_frac"], said["token_agreement"]) == (1.0, 1.0, 1.0)
    assert said["kl_nats"] < 1e-6


@pytest.fixture
def shared(tiny_checkpoint, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"The {i}th paragraph, on {i * i} things that happened." for i in range(200)))
    workload = {"kind": "file", "path": str(text), "context_tokens": 96, "documents": 3, "new_tokens": 20}
    return {"model": {"source": str(tiny_checkpoint("llama", head_dim=64)), "device": "cpu"}, "workload": workload}


def test_record_files_probes_and_modes(shared, tmp_path):
    found = record.run({**shared, "policy": LOSSY, "fidelity": True, "batch": 2, "out": str(tmp_path / "t")})
    trace = read_trace(tmp_path / "t")
    assert set(trace.rounds["mode"].to_pylist()) == {"full", "partial"}
    assert set(trace.rounds["rounds_since_full"].to_pylist()) == {0, 1, 2}
    probes, outputs = trace.probes.to_pylist(), trace.outputs.to_pylist()
    assert [(p["doc"], p["position"]) for p in probes] == [(o["doc"], o["position"]) for o in outputs]
    assert {p["arr"] for p in probes} == {None}
    assert all(0.0 < p["hidden_cosine"] < 1.0001 for p in probes)
    rounds = trace.rounds.to_pylist()
    after = [(r["mode"], r["recomputed"], before["rounds_since_full"]) for before, r in pairwise(rounds)]
    assert {rows > 0 for mode, rows, since in after if mode == "full" and since} == {True}
    assert {rows for mode, rows, _ in after if mode == "partial"} == {0}
    assert {(r["transfer_us"], r["exposed_us"]) for r in rounds} == {(None, None)}
    share = sum(p["top1_match"] for p in probes) / len(probes)
    assert found["fidelity"]["top1_agreement"] == pytest.approx(share)
    plain_trace = record.run({**shared, "policy": LOSSY, "out": str(tmp_path / "u")})
    assert "fidelity" not in plain_trace
    assert read_trace(tmp_path / "u").probes.num_rows == 0
    assert read_trace(tmp_path / "u").outputs.equals(trace.outputs)


def test_record_files_how_long_full_rounds_moved_keys_from_host_memory(shared, tmp_path):
    policy = {**LOSSY, "kv": {"where": "host"}, "verify_kv": {**LOSSY["verify_kv"], "refresh": "full"}}
    workload = {**shared["workload"], "documents": 1}
    record.run({**shared, "workload": workload, "policy": policy, "out": str(tmp_path / "t")})
    rounds = read_trace(tmp_path / "t").rounds.to_pylist()
    assert {r["mode"] for r in rounds} == {"full", "partial"}
    for r in rounds:
        assert (r["transfer_us"] is None) == (r["exposed_us"] is None) == (r["mode"] == "partial")
    assert all(0.0 < r["exposed_us"] <= r["transfer_us"] for r in rounds if r["mode"] == "full"), "a CPU waits for all"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sampling": {"temperature": 0.7}}, "fidelity=true compares with the likeliest token"),
        ({"acceptance": {"synthetic": [0.5]}}, "fidelity=true judges a text"),
        ({"policy": {**LOSSY, "verify_kv": {}}}, "fidelity=true judges lossy policies"),
    ],
)
def test_what_cannot_be_judged_is_refused(shared, tmp_path, changes, says):
    with pytest.raises(UserError, match=says):
        record.run({**shared, "policy": LOSSY, "fidelity": True, "out": str(tmp_path / "t"), **changes})


def test_validate_says_what_a_lossy_policy_costs_beside_its_speed(shared, tmp_path, capsys):
    said = {"value": 0.9, "low": 0.8, "high": 1.0}
    expected = {"speedup": 1.2, "fidelity": {"top1_agreement": said, "kl_nats": {**said, "value": 0.25}, "arr": None}}
    expected["tokens_per_round"] = 100.0
    exact = {**LOSSY, "name": "exact", "verify_kv": {}, "expected": {"speedup": 1.1, "tokens_per_round": 2.0}}
    policies = [{**LOSSY, "expected": expected}, WHOLE, exact]
    settings = {**shared, "policies": policies, "split": "all", "repeats": 1, "bootstrap": 10}
    validate.run({**settings, "out": str(tmp_path / "v")})
    validation = json.loads((tmp_path / "v" / "validation.json").read_text())
    lossy, whole, lossless = validation["policies"]
    assert (lossy["lossless"], whole["lossless"], lossless["lossless"]) == (False, False, True)
    assert (validation["regret"], validation["lossy_ranking"]["regret"]) == (None, None), "one prediction of each kind"
    off = 2.0 / lossless["measured"]["tokens_per_round"] - 1.0
    assert validation["tokens_error_frac"] == pytest.approx(abs(off)), "of those that are ranked, as its worst error is"
    assert lossy["predicted"]["fidelity"] == expected["fidelity"]
    error = lossy["measured"]["fidelity"]["kl_nats"] + lossy["fidelity_error"]["kl_nats"]
    assert error == pytest.approx(0.25)
    low, high = lossy["measured"]["fidelity"]["top1_agreement_interval"]
    assert low <= lossy["measured"]["fidelity"]["top1_agreement"] <= high
    assert whole["fidelity_error"] == {"top1_agreement": None, "kl_nats": None}
    assert "fidelity" not in lossless["measured"]
    assert whole["measured"]["fidelity"]["top1_agreement"] == 1.0
    assert whole["measured"]["documents_differing_from_plain"] == 0
    assert 0.0 < lossy["measured"]["fidelity"]["top1_agreement"] <= 1.0
    assert lossy["measured"]["fidelity"]["kl_nats"] > whole["measured"]["fidelity"]["kl_nats"]
    saved = load_policy(tmp_path / "v" / "policies" / "lossy.yaml")
    assert saved.measured["fidelity"] == lossy["measured"]["fidelity"]
    printed = capsys.readouterr().out
    assert all(column in printed for column in ("top-1", "KL nats", "same text", "(90.0%)", "(0.25)"))
