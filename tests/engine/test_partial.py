"""Partial verification: what a full budget, a full period and a correction leave is what full verification leaves.

The lossy policies here do differ from plain decoding, or nothing was tested.
"""

import numpy as np
import pytest
import torch

from specdial.engine.job import history_spec
from specdial.engine.loop import Decoding
from specdial.engine.sampling import Sampling
from specdial.engine.sequences import Sequences
from specdial.policies.schema import plain_policy, policy_from_mapping

PLAIN = plain_policy()
TINY = {"mode": "partial", "budget": 6, "sink": 1, "recent": 3, "full_period": 0}
HEADS = {"target": [[1, 0], [1, 3], [2, 1]], "draft": [[0, 1], [2, 2]]}
TARGET = {"target": HEADS["target"]}
MODEL = {"drafter": {"kind": "model", "model": "small"}}
SOURCES = {
    "recent": {"verify_kv": {"mode": "partial", "source": "recent", "sink": 1, "recent": 5, "full_period": 0}},
    "history": {"verify_kv": TINY},
    "history-layer": {"verify_kv": {**TINY, "scope": "layer"}},
    "history-model": {"verify_kv": {**TINY, "scope": "model"}},
    "history-pages": {"verify_kv": {**TINY, "budget": 48, "page": 16}},
    "heads": {"verify_kv": {**TINY, "scope": "model"}, "scoring_heads": TARGET},
    "lookahead": {
        "verify_kv": {**TINY, "source": "lookahead", "scope": "model"},
        "scoring_heads": {"draft": HEADS["draft"]},
        **MODEL,
    },
    "hybrid": {
        "verify_kv": {**TINY, "source": "hybrid", "scope": "model", "lookahead_tokens": 1},
        "scoring_heads": HEADS,
        **MODEL,
    },
    "hybrid-window": {
        "verify_kv": {**TINY, "source": "hybrid", "scope": "model", "lookahead_tokens": 1},
        "scoring_heads": {"draft": HEADS["draft"]},
        **MODEL,
    },
    "page_bound": {"verify_kv": {**TINY, "source": "page_bound", "budget": 48, "page": 16}},
    "specpv": {
        "verify_kv": {**TINY, "source": "page_bound", "bound": "specpv", "rows": "max", "budget": 48, "page": 16}
    },
}
CONTROLLERS = {"fixed": {"kind": "fixed", "k": 3}, "entropy": {"kind": "entropy", "threshold": 0.1}}


def policy(name, *, controller="fixed", drafter="lookup", **verify_kv):
    """A source, with settings of its verification changed; by lookup, if the source needs no other drafter."""
    given = SOURCES[name]
    kind = {"drafter": {"kind": "lookup"}} if drafter == "lookup" else {"drafter": {"kind": "model", "model": "small"}}
    if drafter == "sparse_self":
        page = given["verify_kv"].get("page", 1) if given["verify_kv"].get("source", "history") == "history" else 1
        kind = {"draft_kv": {"budget": 48, "sink": 2, "recent": 8, "window": 16, "page": page}}
    whole = {**kind, **given, "verify_kv": {**given["verify_kv"], **verify_kv}}
    return policy_from_mapping({"name": name, "controller": CONTROLLERS[controller], **whole})


def full_budget(name, **verify_kv):
    """The same source with room for every key."""
    kv = SOURCES[name]["verify_kv"]
    room = {"recent": 100_000} if name == "recent" else {"budget": 100_000}
    if kv.get("page"):
        room = {"budget": 1 << 16}
    return policy(name, **room, **verify_kv)


def prompts(*lengths):
    return [np.random.default_rng(seed).integers(0, 256, tokens).tolist() for seed, tokens in enumerate(lengths)]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def models(tiny_model):
    """A target whose attention is sharpened, so that keys it does not see are missed, and a draft model like it."""
    target, draft = tiny_model("llama", head_dim=64), tiny_model("llama", head_dim=64)
    for model in (target, draft):
        for layer in model.decoder.layers:
            layer.qkv.mul_(2.0)
    for layer in draft.decoder.layers[1:]:
        layer.down.mul_(0.9)
    return target.decoder, draft.decoder


def sequences(models, policies, prompts, limits, stop=frozenset()):
    target, draft = models
    longest = max(len(p) for p in prompts) + max(limits)
    s = Sequences(
        target, longest + 20, len(prompts), history=history_spec(policies), backend="reference",
        companions={"small": draft},
    )  # fmt: skip
    s.prefill(prompts, limits, stop)
    return s


def decode(s, policy):
    s.rewind()
    rounds = list(Decoding(s, policy, Sampling(), list(range(s.batch))).rounds())
    return s.outputs, rounds


RAGGED = (40, 90, 17), [20, 26, 14]


@pytest.fixture(scope="module")
def plain(models):
    """Plain tokens and the keys they leave."""
    s = sequences(models, [PLAIN], prompts(*RAGGED[0]), RAGGED[1])
    tokens, _ = decode(s, PLAIN)
    return tokens, s.cache.k.clone(), s.cache.v.clone()


def assert_same_cache(s, keys, values, atol=2e-4):
    for b, length in enumerate(s.cache.host_lengths):
        assert torch.allclose(s.cache.k[:, b, :, :length], keys[:, b, :, :length], atol=atol)
        assert torch.allclose(s.cache.v[:, b, :, :length], values[:, b, :, :length], atol=atol)


@pytest.mark.parametrize("name", SOURCES)
def test_a_budget_beyond_the_context_equals_full_verification(models, plain, name):
    one = full_budget(name)
    assert not one.lossless
    s = sequences(models, [one], prompts(*RAGGED[0]), RAGGED[1])
    tokens, rounds = decode(s, one)
    assert tokens == plain[0]
    assert all(r.mode == "partial" for r in rounds)
    assert [r.rounds_since_full for r in rounds] == list(range(1, len(rounds) + 1))
    assert_same_cache(s, *plain[1:])


@pytest.mark.parametrize("name", SOURCES)
def test_a_full_period_of_one_is_lossless(models, plain, name):
    one = policy(name, full_period=1)
    assert one.lossless
    tokens, rounds = decode(sequences(models, [one], prompts(*RAGGED[0]), RAGGED[1]), one)
    assert tokens == plain[0]
    assert all((r.mode, r.rounds_since_full) == ("full", 0) for r in rounds)


@pytest.mark.parametrize("name", SOURCES)
def test_a_tiny_budget_differs_from_plain(models, plain, name):
    one = policy(name)
    tokens, rounds = decode(sequences(models, [one], prompts(*RAGGED[0]), RAGGED[1]), one)
    assert tokens != plain[0]
    assert [len(t) for t in tokens] == RAGGED[1]
    assert sum(int(r.k.sum()) for r in rounds) > 0


def one_pass(s):
    """Keys, values and history rows of every committed token but the pending one, verified in full at once."""
    fresh = Sequences(
        s.decoder, s.cache.capacity_tokens - 4, s.batch, history=None if s.history is None else s.history.spec,
        backend="reference",
    )  # fmt: skip
    fresh.prefill([list(t) for t in s.tokens], [1] * s.batch)
    return fresh


@pytest.mark.parametrize("period", [2, 5])
@pytest.mark.parametrize(
    ("name", "drafter"),
    [("recent", "lookup"), ("history", "lookup"), ("history", "sparse_self"), ("history-pages", "sparse_self"),
     ("heads", "lookup"), ("hybrid", "model"), ("page_bound", "sparse_self")],
)  # fmt: skip
def test_a_full_round_leaves_what_one_full_pass_over_the_committed_tokens_leaves(models, name, drafter, period):
    one = policy(name, drafter=drafter, full_period=period)
    assert not one.lossless
    s = sequences(models, [one], prompts(*RAGGED[0]), [44, 44, 44])
    decoding = Decoding(s, one, Sampling(), [0, 1, 2])
    seen, bitten = 0, False
    while not s.done.any():
        played = decoding.decode_round()
        seen += 1
        expected = one_pass(s) if played.mode == "full" or not bitten else None
        assert played.mode == ("full" if seen % period == 0 else "partial")
        assert played.rounds_since_full == seen % period
        if played.mode == "full":
            assert_same_cache(s, expected.cache.k, expected.cache.v)
            if s.history is not None:
                assert torch.allclose(s.history.scores(), expected.history.scores(), atol=2e-4)
        elif expected is not None:
            length = int(s.cache.host_lengths[1])
            bitten = not torch.allclose(s.cache.k[:, 1, :, :length], expected.cache.k[:, 1, :, :length], atol=2e-3)
    assert seen >= period, "there was a full round"
    assert bitten, "partial rounds left other keys"


def test_a_full_buffer_is_corrected_before_the_full_period_is_up(models):
    """And sequences that the budget holds whole are verified in full: their text is plain decoding's."""
    one = policy("page_bound", full_period=50, buffer=9, budget=96, refresh="full")
    s = sequences(models, [one], prompts(90, 60), [40, 20])
    decoding = Decoding(s, one, Sampling(), [0, 1])
    uncorrected, modes = np.zeros(2, dtype=np.int64), []
    while not s.done.all():
        before = s.committed
        wanted = "partial" if before.max() > 96 and uncorrected.max() + 4 <= 9 else "full"
        played = decoding.decode_round()
        assert played.mode == wanted
        modes.append(wanted)
        uncorrected = uncorrected + s.committed - before if wanted == "partial" else 0 * uncorrected
        if modes[-2:] == ["partial", "full"]:
            expected = one_pass(s)
            assert_same_cache(s, expected.cache.k, expected.cache.v)
    first = modes.index("partial")
    assert first > 2
    assert modes[first:].count("full") > 2
    assert modes[first:].count("partial") > 4
    plain = sequences(models, [PLAIN], prompts(90, 60), [7, 4])
    decode(plain, PLAIN)
    assert s.tokens[0][:97] == plain.tokens[0]
    assert s.tokens[1][:64] == plain.tokens[1]


def test_partial_rounds_leave_history_alone(models):
    one = policy("history", full_period=3)
    s = sequences(models, [one], prompts(60, 131), [40, 40])
    decoding = Decoding(s, one, Sampling(), [0, 1])
    before = s.history.ring.clone()
    for _ in range(2):
        assert decoding.decode_round().mode == "partial"
        assert torch.equal(s.history.ring, before)
    assert decoding.decode_round().mode == "full"
    assert not torch.equal(s.history.ring, before)


@pytest.mark.parametrize(
    ("name", "period"), [*((name, 3) for name in SOURCES), ("recent", 0), ("history", 0), ("hybrid", 0)]
)
def test_a_ragged_batch_equals_each_sequence_alone(models, name, period):
    """Corrections are as wide as the most that any sequence needs, and must not touch the others."""
    controller = "fixed" if policy(name).drafter.kind == "lookup" or period == 0 else "entropy"
    one = policy(name, full_period=period, controller=controller)
    texts, limits = prompts(*RAGGED[0]), RAGGED[1]
    alone = [decode(sequences(models, [one], [p], [n]), one)[0][0] for p, n in zip(texts, limits)]
    tokens, rounds = decode(sequences(models, [one], texts, limits), one)
    assert tokens == alone
    assert not rounds[-1].active.all()


@pytest.mark.parametrize("name", ["recent", "history", "heads", "hybrid", "page_bound"])
def test_prompts_shorter_than_everything(models, name):
    texts = prompts(2, 3, 9)
    one = policy(name, full_period=2)
    tokens, rounds = decode(sequences(models, [one], texts, [30, 20, 30]), one)
    assert [len(t) for t in tokens] == [30, 20, 30]
    assert {r.mode for r in rounds} == {"full", "partial"}
    assert decode(sequences(models, [one], texts[1:2], [20]), one)[0] == tokens[1:2]


@pytest.mark.parametrize("name", ["recent", "heads", "hybrid"])
def test_a_stop_token_ends_a_sequence(models, name):
    one = policy(name, full_period=3)
    (whole,), _ = decode(sequences(models, [one], prompts(120), [40]), one)
    stop = whole[17]
    (tokens,), _ = decode(sequences(models, [one], prompts(120), [40], stop=frozenset({stop})), one)
    assert tokens == whole[: whole.index(stop) + 1]


def test_the_same_decoding_again_is_the_same(models):
    """What lasts from one decoding to the next decides nothing."""
    for name in SOURCES:
        one = policy(name, full_period=3)
        s = sequences(models, [one], prompts(60, 131), [16, 16])
        first = decode(s, one)[0]
        decode(s, PLAIN)
        assert decode(s, one)[0] == first, name
