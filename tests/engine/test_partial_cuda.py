"""Partial verification on a CUDA device: captured rounds, corrected keys, and no step that waits for the device."""

import numpy as np
import pytest
import torch

from specdial.engine.fidelity import measure_fidelity, plain_output, summary
from specdial.engine.job import history_spec
from specdial.engine.loop import Decoding
from specdial.engine.sampling import Sampling
from specdial.engine.sequences import Sequences
from specdial.policies.schema import plain_policy, policy_from_mapping

pytestmark = pytest.mark.gpu
PARTIAL = {"mode": "partial", "full_period": 0, "budget": 6, "sink": 1, "recent": 3}
MODEL = {"drafter": {"kind": "model", "model": "draft"}}
HEADS = {"target": [[1, 0], [1, 3], [2, 1]], "draft": [[0, 1], [2, 2]]}
HYBRID = {**PARTIAL, "source": "hybrid", "scope": "model", "lookahead_tokens": 1}
PAGES = {**PARTIAL, "budget": 48, "page": 16}
SELF = {"drafter": {"kind": "sparse_self"}, "draft_kv": {"budget": 40, "sink": 2, "recent": 8}}
SOURCES = {
    "recent": {"verify_kv": {"mode": "partial", "full_period": 0, "source": "recent", "sink": 1, "recent": 5}},
    "history": {"verify_kv": PARTIAL, **SELF},
    "history-model": {"verify_kv": {**PARTIAL, "scope": "model"}},
    "history-pages": {"verify_kv": PAGES},
    "heads": {"verify_kv": {**PARTIAL, "scope": "model"}, "scoring_heads": {"target": HEADS["target"]}},
    "lookahead": {
        "verify_kv": {**PARTIAL, "source": "lookahead", "scope": "model"},
        "scoring_heads": {"draft": HEADS["draft"]},
        **MODEL,
    },
    "hybrid": {"verify_kv": HYBRID, "scoring_heads": HEADS, **MODEL},
    "page_bound": {"verify_kv": {**PAGES, "source": "page_bound"}, **SELF},
    "specpv": {"verify_kv": {**PAGES, "source": "page_bound", "bound": "specpv", "rows": "max"}, **SELF},
}
FIXED, RATE = {"kind": "fixed", "k": 3}, {"kind": "rate", "gamma": 0.1}


def policy(name, controller=FIXED, **verify_kv):
    whole = {"drafter": {"kind": "lookup"}, "controller": controller, **SOURCES[name]}
    return policy_from_mapping({**whole, "verify_kv": {**whole["verify_kv"], **verify_kv}})


@pytest.fixture(scope="module")
def decoders(cuda_pair):
    return cuda_pair(sharpened=True)


def sequences(decoders, policies):
    prompts = [np.random.default_rng(n).integers(0, 256, n).tolist() for n in (60, 131, 17)]
    target, draft = decoders
    s = Sequences(target, 260, 3, history=history_spec(policies), backend="triton", companions={"draft": draft})
    s.prefill(prompts, [40, 60, 48])
    return s


def decode(s, policy):
    s.rewind()
    rounds = list(Decoding(s, policy, Sampling(), [0, 1, 2]).rounds())
    return [list(t) for t in s.tokens], rounds


def controllers_of(name):
    return [FIXED, RATE] if policy(name).drafter.has_signals else [FIXED]


@pytest.mark.parametrize("name", SOURCES)
def test_room_for_every_key_or_a_full_period_of_one_is_plain(decoders, name):
    room = {"recent": 1000} if name == "recent" else {"budget": 1024}
    tried = [policy(name, c, **more) for c in controllers_of(name) for more in (room, {"full_period": 1})]
    s = sequences(decoders, tried)
    plain, _ = decode(s, plain_policy())
    for one in [*tried, tried[0]]:
        assert decode(s, one)[0] == plain


@pytest.mark.parametrize("name", SOURCES)
def test_a_tiny_budget_differs_from_plain_and_the_same_again(decoders, name):
    one = policy(name)
    s = sequences(decoders, [one])
    plain, _ = decode(s, plain_policy())
    tokens, rounds = decode(s, one)
    assert tokens != plain
    assert all(r.mode == "partial" for r in rounds)
    assert decode(s, one)[0] == tokens


@pytest.mark.parametrize("name", SOURCES)
def test_full_rounds_correct_the_keys(decoders, name):
    for controller in controllers_of(name):
        one = policy(name, controller, full_period=3)
        s = sequences(decoders, [one])
        decoding = Decoding(s, one, Sampling(), [0, 1, 2])
        corrected = 0
        while not s.done.any():
            if decoding.decode_round().mode != "full":
                continue
            corrected += 1
            fresh = Sequences(s.decoder, 260, 3, history=None, backend="triton")
            fresh.prefill([list(t) for t in s.tokens], [1, 1, 1])
            for b, length in enumerate(s.cache.host_lengths):
                assert torch.allclose(s.cache.k[:, b, :, :length], fresh.cache.k[:, b, :, :length], atol=2e-3)
                assert torch.allclose(s.cache.v[:, b, :, :length], fresh.cache.v[:, b, :, :length], atol=2e-3)
        assert corrected > 0


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("period", [0, 3])
def test_no_step_of_a_captured_round_waits_for_the_device(decoders, name, period):
    one = policy(name, full_period=period)
    s = sequences(decoders, [one])
    decode(s, one)
    s.rewind()
    decoding = Decoding(s, one, Sampling(), [0, 1, 2])
    decoding.decode_round()
    for _ in range(3):
        torch.cuda.set_sync_debug_mode("error")
        try:
            launched = decoding._launch()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert decoding._finish(launched).active.any()


def test_a_buffer_fills_alike_whether_rounds_are_launched_ahead_or_not(decoders):
    one = policy("page_bound", full_period=50, buffer=13, refresh="full")
    s = sequences(decoders, [one])
    tokens, rounds = decode(s, one)
    s.rewind()
    decoding, modes = Decoding(s, one, Sampling(), [0, 1, 2]), []
    while not s.done.all():
        modes.append(decoding.decode_round().mode)
    assert [list(t) for t in s.tokens] == tokens
    assert modes == [r.mode for r in rounds]
    assert 0 < modes.count("full") < len(modes)


def test_fidelity_on_the_device(decoders):
    one, whole = policy("history-model", full_period=4), policy("history-model", budget=1024)
    s = sequences(decoders, [one, whole])
    plain = plain_output(s, [0, 1, 2])
    strayed, exact = (summary(measure_fidelity(s, p, [0, 1, 2], plain)) for p in (one, whole))
    assert exact["token_agreement"] == 1.0
    assert strayed["kl_nats"] > exact["kl_nats"]
    assert strayed["hidden_cosine"] < exact["hidden_cosine"]
    assert exact["hidden_cosine"] == pytest.approx(1.0, abs=1e-3)
