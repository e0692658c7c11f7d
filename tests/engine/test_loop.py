"""The crown tests: lossless speculation changes no greedy token, and no sampled token's distribution."""

import numpy as np
import pytest
import torch
from scipy.stats import chi2_contingency

from specdial.engine import acceptance
from specdial.engine.drafters.selection import choose_keys
from specdial.engine.drafters.sparse_self import CompactDraft, GatherDraft
from specdial.engine.history import HistorySpec
from specdial.engine.loop import Decoding
from specdial.engine.sampling import Sampling, Verdict, draw
from specdial.engine.sequences import Sequences
from specdial.policies.schema import DraftKV, policy_from_mapping

PLAIN = policy_from_mapping({"name": "plain", "drafter": {"kind": "none"}, "controller": {"kind": "none"}})
KV = {"budget": 40, "sink": 2, "recent": 8, "window": 8}
LOSSLESS = {
    "fixed-1": {"controller": {"kind": "fixed", "k": 1}},
    "fixed-4": {"controller": {"kind": "fixed", "k": 4}},
    "fixed-9": {"controller": {"kind": "fixed", "k": 9}},
    "entropy": {"controller": {"kind": "entropy", "threshold": 0.1}},
    "confidence": {"controller": {"kind": "confidence", "threshold": 0.2}},
    "rate": {"controller": {"kind": "rate", "gamma": 0.1}},
    "rate-paper": {"controller": {"kind": "rate", "form": "paper", "k_set": [1, 3, 6], "gamma": 0.1}},
    "layer-scope": {"controller": {"kind": "fixed", "k": 3}, "draft_kv": {**KV, "scope": "layer"}},
    "model-scope": {"controller": {"kind": "fixed", "k": 3}, "draft_kv": {**KV, "scope": "model"}},
    "cells": {
        "controller": {"kind": "fixed", "k": 2},
        "cells": [{"from_context_tokens": 140, "overrides": {"controller": {"kind": "none"}}}],
    },
}


def lossless(name):
    return policy_from_mapping({"name": name, "draft_kv": KV, **LOSSLESS[name]})


def prompt(tokens, seed=0, vocab=256):
    return np.random.default_rng(seed).integers(0, vocab, tokens).tolist()


def sequences(model, prompts, limits, *, window=8, page=1, stop=frozenset()):
    longest = max(len(p) for p in prompts) + max(limits)
    s = Sequences(model.decoder, longest + 20, len(prompts), history=HistorySpec(window, page), backend="reference")
    s.prefill(prompts, limits, stop)
    return s


def decode(s, policy, sampling=None, numbers=None):
    s.rewind()
    rounds = list(Decoding(s, policy, sampling or Sampling(), numbers or list(range(s.batch))).rounds())
    return s.outputs, rounds


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_lossless_policies_give_the_plain_greedy_tokens(tiny_model, architecture):
    s = sequences(tiny_model(architecture), [prompt(120)], [48])
    plain, _ = decode(s, PLAIN)
    drafted = accepted = 0
    for name in LOSSLESS if architecture == "llama" else ("fixed-4", "entropy", "rate", "model-scope"):
        policy = lossless(name)
        assert policy.lossless
        tokens, rounds = decode(s, policy)
        assert tokens == plain, name
        drafted += sum(int(r.k[0]) for r in rounds)
        accepted += sum(int(r.accepted[0]) for r in rounds)
    assert 0 < accepted < drafted, "drafts must be both accepted and rejected, or nothing was tested"


@pytest.mark.parametrize("page", [16, 64])
def test_pages_are_lossless_and_read_whole_pages(tiny_model, page):
    s = sequences(tiny_model("llama"), [prompt(230)], [40], page=page)
    plain, _ = decode(s, PLAIN)
    kv = {"budget": 2 * page, "sink": 1, "recent": 1, "window": 8, "page": page}
    tokens, rounds = decode(s, policy_from_mapping({"controller": {"kind": "fixed", "k": 4}, "draft_kv": kv}))
    assert tokens == plain
    assert sum(int(r.accepted[0]) for r in rounds) > 0
    selection = choose_keys(s.history, s.cache.lengths, DraftKV(**kv))
    whole = int(s.cache.host_lengths[0]) // page
    assert selection.tail_start.tolist() == [whole * page]
    assert set(selection.indices[0, 0, 0].tolist()) == {0, whole - 1}


def test_a_budget_beyond_the_cache_reads_all_of_it_and_no_more(tiny_model):
    s = sequences(tiny_model("llama"), [prompt(60)], [20])
    plain, _ = decode(s, PLAIN)
    kv = {**KV, "budget": 100_000}
    tokens, rounds = decode(s, policy_from_mapping({"controller": {"kind": "fixed", "k": 4}, "draft_kv": kv}))
    assert tokens == plain
    assert all((r.accepted == r.k).all() for r in rounds), "a draft over every key is the target's own choice"
    assert choose_keys(s.history, s.cache.lengths, DraftKV(**kv)).indices.shape[-1] == s.cache.capacity_tokens


@pytest.mark.parametrize("page", [1, 16])
def test_the_shortest_prompts(tiny_model, page):
    """No cached key at all, fewer keys than sink and recent, less than a page."""
    prompts = [prompt(1), prompt(2), prompt(9)]
    s = sequences(tiny_model("llama"), prompts, [24, 24, 24], page=page)
    plain, _ = decode(s, PLAIN)
    kv = {"budget": 48, "sink": 2, "recent": 8, "window": 8, "page": page}
    for controller in ({"kind": "fixed", "k": 4}, {"kind": "rate"}):
        tokens, _ = decode(s, policy_from_mapping({"controller": controller, "draft_kv": kv}))
        assert tokens == plain


def test_ragged_batch_equals_each_sequence_alone(tiny_model):
    model = tiny_model("llama")
    prompts, limits = [prompt(60, 1), prompt(131, 2), prompt(17, 3)], [20, 33, 5]
    alone = [decode(sequences(model, [p], [n]), PLAIN)[0][0] for p, n in zip(prompts, limits)]
    together = sequences(model, prompts, limits)
    for name in ("fixed-4", "entropy", "rate"):
        tokens, rounds = decode(together, lossless(name))
        assert tokens == alone
        assert [len(t) for t in tokens] == limits
        assert not rounds[-1].active.all(), "the short sequence must finish first"


def test_stop_token_ends_a_sequence_inside_accepted_drafts(tiny_model):
    model = tiny_model("llama")
    s = sequences(model, [prompt(120)], [48])
    (plain,), _ = decode(s, PLAIN)
    for at in (0, 5, 11, 30):
        first = plain.index(plain[at])
        stopping = sequences(model, [prompt(120)], [48], stop=frozenset({plain[at]}))
        for name in ("fixed-4", "fixed-9", "rate"):
            (tokens,), rounds = decode(stopping, lossless(name))
            assert tokens == plain[: first + 1]
            assert all(int(r.accepted[0]) <= len(r.emitted[0]) for r in rounds)


def test_scores_and_keys_are_functions_of_the_committed_tokens_alone(tiny_model):
    """However rounds fell, the same committed tokens leave the same ring and the same keys, bit for bit."""
    s = sequences(tiny_model("llama"), [prompt(120)], [40])
    states = []
    for name in ("fixed-1", "fixed-4", "fixed-9"):
        decode(s, lossless(name))
        length = int(s.cache.host_lengths[0])
        states.append((s.tokens[0], s.history.ring.clone(), s.cache.k[:, :, :, :length].clone()))
    for tokens, ring, keys in states[1:]:
        assert tokens == states[0][0]
        assert torch.equal(keys, states[0][2])
        assert torch.equal(ring, states[0][1])


def test_drafting_writes_nothing_into_the_cache(tiny_model):
    s = sequences(tiny_model("llama"), [prompt(120)], [40])
    before = s.cache.k.clone()
    decoding = Decoding(s, lossless("fixed-4"), Sampling(), [0])
    draft = decoding.drafters[0].begin(4)
    for depth in range(4):
        draft.step(depth, s.pending)
    assert torch.equal(s.cache.k, before)


@pytest.mark.parametrize("page", [1, 16])
def test_gathered_and_copied_keys_give_the_same_drafts(tiny_model, page):
    prompts = [prompt(11, 0), prompt(60, 1), prompt(131, 2)]
    s = sequences(tiny_model("llama", head_dim=64), prompts, [8, 8, 8], page=page)
    draft_kv = DraftKV(budget=48, sink=2, recent=8, window=8, page=page)
    selection = choose_keys(s.history, s.cache.lengths, draft_kv)
    copied, gathered = CompactDraft(s, selection, s.cache.lengths, steps=4), GatherDraft(s, selection)
    token = s.pending
    for depth in range(4):
        a, b = copied.step(depth, token), gathered.step(depth, token)
        assert torch.allclose(a.logits, b.logits, atol=1e-4)
        assert torch.allclose(a.signals, b.signals, atol=1e-4)
        token = a.token


LANES = 1500


def narrow(name):
    return policy_from_mapping({**LOSSLESS[name], "draft_kv": {**KV, "budget": 3, "sink": 1, "recent": 1}})


def sampled_pairs(model, policy, seed):
    """Counts of the second and third new token over many lanes of one prompt: [V, V]."""
    one = sequences(model, [prompt(60, vocab=11)], [3])
    s = one.repeated(LANES)
    s.hold(one.tokens[0], limit=3)
    list(Decoding(s, policy, Sampling(temperature=0.7, seed=seed), list(range(LANES))).rounds())
    counts = np.zeros((12, 12))
    for tokens in s.tokens:
        counts[tokens[-2], tokens[-1]] += 1
    return counts


def p_value(a, b):
    """Two-sample chi-square over cells that hold at least 8 counts together; the rest is pooled."""
    a, b = a.ravel(), b.ravel()
    big = a + b >= 8
    table = np.array([[*x[big], x[~big].sum()] for x in (a, b)])
    return chi2_contingency(table[:, table.sum(axis=0) > 0]).pvalue


@pytest.fixture(scope="module")
def small_vocabulary(tiny_model):
    """Attention sharpened, so that drafts over a few keys really differ from the target."""
    model = tiny_model("llama", vocab_size=12, eos_token_id=11)
    for layer in model.decoder.layers:
        layer.qkv.mul_(3.0)
    return model


@pytest.fixture(scope="module")
def plain_pairs(small_vocabulary):
    return sampled_pairs(small_vocabulary, PLAIN, seed=1)


def test_sampled_speculation_has_the_plain_distribution(small_vocabulary, plain_pairs):
    for name in ("fixed-1", "fixed-4", "entropy"):
        assert p_value(plain_pairs, sampled_pairs(small_vocabulary, narrow(name), seed=2)) > 0.001, name


def accept_all(drafts, k, draft_probs, target_probs, u):
    following = target_probs[torch.arange(len(k)), k]
    return Verdict(k.clone(), draw(following, u[:, -1]), torch.ones_like(u[:, :-1]))


def test_a_broken_acceptance_rule_fails_the_same_test(small_vocabulary, plain_pairs, monkeypatch):
    monkeypatch.setattr(acceptance, "verify_sampled", accept_all)
    assert p_value(plain_pairs, sampled_pairs(small_vocabulary, narrow("fixed-4"), seed=2)) < 0.001


def test_sampled_output_does_not_depend_on_the_rest_of_the_batch(tiny_model):
    model = tiny_model("llama")
    sampling = Sampling(temperature=0.9, top_p=0.95, seed=7)
    prompts = [prompt(60, 1), prompt(80, 2)]
    alone = [decode(sequences(model, [p], [12]), PLAIN, sampling, [i])[0][0] for i, p in enumerate(prompts)]
    assert decode(sequences(model, prompts, [12, 12]), PLAIN, sampling, [0, 1])[0] == alone
