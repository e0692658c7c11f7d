"""Every drafter: greedy tokens equal the plain ones, drafts both accepted and rejected, ragged batches, stop tokens."""

import numpy as np
import pytest

from specdial.engine.job import history_spec
from specdial.engine.loop import Decoding
from specdial.engine.sampling import Sampling
from specdial.engine.sequences import Sequences
from specdial.policies.errors import UserError
from specdial.policies.schema import plain_policy, policy_from_mapping

PLAIN = plain_policy()
FIXED = {"kind": "fixed", "k": 4}
PAGES = {"budget": 64, "sink": 1, "recent": 16, "page": 16}
DRAFTERS = {
    "lookup": {"drafter": {"kind": "lookup"}},
    "lookup-1": {"drafter": {"kind": "lookup", "ngram": 1}},
    "model": {"drafter": {"kind": "model", "model": "small"}},
    "quest": {"drafter": {"kind": "quest"}, "draft_kv": PAGES},
    "quest-layer": {"drafter": {"kind": "quest"}, "draft_kv": {**PAGES, "scope": "layer"}},
    "streaming": {"draft_kv": {"budget": 40, "sink": 4, "recent": 36, "refresh_rounds": 0}},
    "snap": {"draft_kv": {"budget": 40, "sink": 4, "recent": 16, "window": 64, "refresh_rounds": 0}},
    "every-3": {"draft_kv": {"budget": 40, "sink": 4, "recent": 16, "refresh_rounds": 3}},
    "decay": {"draft_kv": {"budget": 40, "sink": 4, "recent": 16, "decay": 0.8}},
    "fraction": {"draft_kv": {"budget_frac": 0.3, "sink": 4, "recent": 16}},
}
ADAPTIVE = {
    "rate": {"kind": "rate", "gamma": 0.1},
    "entropy": {"kind": "entropy", "threshold": 0.1},
    "confidence-lag": {"kind": "confidence", "threshold": 0.05, "lag": 1},
}


def policy(name, controller=FIXED, **more):
    return policy_from_mapping({"name": name, "controller": controller, **DRAFTERS[name], **more})


def prompts(*lengths):
    """Random tokens. What the tiny target writes after them repeats itself, so that lookup finds something."""
    return [np.random.default_rng(seed).integers(0, 256, tokens).tolist() for seed, tokens in enumerate(lengths)]


@pytest.fixture(scope="module")
def models(tiny_model):
    """A target, and a draft model that agrees with it now and then: the same one, its weights shaken a little."""
    target, draft = tiny_model("llama", head_dim=64), tiny_model("llama", head_dim=64)
    for i, layer in enumerate(draft.decoder.layers):
        if i:
            layer.down.mul_(0.9)
    return target.decoder, draft.decoder


def sequences(models, policies, prompts, limits, stop=frozenset()):
    target, draft = models
    longest = max(len(p) for p in prompts) + max(limits)
    s = Sequences(
        target, longest + 20, len(prompts), history=history_spec(policies), backend="reference",
        companions={"small": draft} if any("model" in p.name for p in policies) else None,
    )  # fmt: skip
    s.prefill(prompts, limits, stop)
    return s


def decode(s, policy):
    s.rewind()
    rounds = list(Decoding(s, policy, Sampling(), list(range(s.batch))).rounds())
    return s.outputs, rounds


@pytest.fixture(scope="module")
def plain(models):
    """The plain tokens of a ragged batch of three."""
    return decode(sequences(models, [PLAIN], prompts(60, 131, 17), [40, 60, 30]), PLAIN)[0]


@pytest.mark.parametrize("name", DRAFTERS)
def test_lossless_on_a_ragged_batch(models, plain, name):
    tried = [policy(name)]
    if name in ("model", "quest", "snap"):  # one of each class that drafts step by step
        tried += [policy(name, controller) for controller in ADAPTIVE.values()]
    elif not name.startswith("lookup"):
        tried.append(policy(name, ADAPTIVE["rate"]))
    s = sequences(models, tried, prompts(60, 131, 17), [40, 60, 30])
    drafted = accepted = 0
    for one in tried:
        assert one.lossless
        tokens, rounds = decode(s, one)
        assert tokens == plain, one.controller
        assert not rounds[-1].active.all(), "the short sequences must finish first"
        drafted += sum(int(r.k.sum()) for r in rounds)
        accepted += sum(int(r.accepted.sum()) for r in rounds)
    assert 0 < accepted < drafted, "drafts must be both accepted and rejected, or nothing was tested"


@pytest.mark.parametrize("name", DRAFTERS)
def test_rounds_without_drafts_in_between(models, plain, name):
    """Cells that do not draft lie before, between and after those that do."""
    silent = {"overrides": {"controller": {"kind": "none"}}}
    cells = [
        {"from_context_tokens": start, "to_context_tokens": stop, **silent}
        for start, stop in ((131, 137), (150, 151), (160, 180))
    ]
    one = policy(name, cells=cells)
    tokens, rounds = decode(sequences(models, [one], prompts(60, 131, 17), [40, 60, 30]), one)
    assert tokens == plain
    longest = [int(r.context_tokens[r.active].max()) for r in rounds]
    assert all(not r.k.any() for r, n in zip(rounds, longest) if any(a <= n < b for a, b in ((131, 137), (160, 180))))
    assert any(r.k.any() for r, n in zip(rounds, longest) if 137 <= n < 150)
    assert any(r.accepted.any() for r in rounds)


@pytest.mark.parametrize("name", ["lookup", "model", "quest", "streaming"])
def test_a_stop_token_ends_a_sequence_inside_accepted_drafts(models, plain, name):
    for at in (0, 5, 21):
        stop = plain[1][at]
        expected = [t[: t.index(stop) + 1] if stop in t else t for t in plain]
        s = sequences(models, [policy(name)], prompts(60, 131, 17), [40, 60, 30], frozenset({stop}))
        assert decode(s, policy(name))[0] == expected


def test_several_drafters_take_turns_on_the_same_sequences(models, plain):
    """What one leaves in the caches must not reach the next, nor a second run of the first."""
    names = ["quest", "model", "lookup", "quest", "model"]
    policies = [policy(name) for name in names]
    s = sequences(models, policies, prompts(60, 131, 17), [40, 60, 30])
    accepted = []
    for one in policies:
        tokens, rounds = decode(s, one)
        assert tokens == plain
        accepted.append([r.accepted.tolist() for r in rounds])
    assert accepted[0] == accepted[3]
    assert accepted[1] == accepted[4]


def test_drafters_without_history_keep_none(models):
    policies = [policy(name) for name in ("lookup", "model", "quest")]
    assert history_spec(policies) is None
    assert history_spec([*policies, policy("snap")]).window == 64
    assert history_spec([policy("decay")]).decay == 0.8
    with pytest.raises(UserError, match=r"draft_kv\.decay"):
        history_spec([policy("decay"), policy("every-3")])
