"""A draft model drafts what it would write itself after the committed tokens, however rounds fell."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from specdial.engine import job
from specdial.engine.job import draft_model_names, empty_sequences, history_spec, load_draft_models
from specdial.engine.loop import Decoding
from specdial.engine.memory import predict
from specdial.engine.sampling import Sampling
from specdial.engine.sequences import Sequences
from specdial.engine.tokenizer import Tokenizer
from specdial.policies.errors import UserError
from specdial.policies.schema import policy_from_mapping

PROMPTS = [np.random.default_rng(n).integers(0, 256, n).tolist() for n in (60, 131, 2)]
LIMITS = [30, 40, 25]
SILENT = {"overrides": {"controller": {"kind": "none"}}}
POLICIES = {
    "every round": {"controller": {"kind": "fixed", "k": 3}},
    "rounds of any length": {"controller": {"kind": "confidence", "threshold": 0.02, "k_max": 5}},
    "gaps": {
        "controller": {"kind": "fixed", "k": 3},
        "cells": [
            {"from_context_tokens": 131, "to_context_tokens": 133, **SILENT},
            {"from_context_tokens": 136, "to_context_tokens": 158, **SILENT},
        ],
    },
}


def policy(name, model="draft"):
    return policy_from_mapping({"drafter": {"kind": "model", "model": model}, **POLICIES[name]})


def sequences(target, draft, prompts=PROMPTS, limits=LIMITS):
    capacity = max(len(p) for p in prompts) + max(limits) + 20
    s = Sequences(target, capacity, len(prompts), history=None, backend="reference", companions={"draft": draft})
    s.prefill(prompts, limits)
    return s


def continued(full_logits, decoder, tokens, count):
    """Greedy decoding of `count` tokens from scratch."""
    text = list(tokens)
    for _ in range(count):
        text.append(int(full_logits(decoder, torch.tensor([text]))[0, -1].argmax()))
    return text[len(tokens) :]


@pytest.mark.parametrize("name", POLICIES)
def test_drafts_equal_greedy_decoding_of_the_draft_model_from_scratch(tiny_model, full_logits, name):
    target, draft = tiny_model("llama").decoder, tiny_model("qwen2", seed=3, num_hidden_layers=2).decoder
    s = sequences(target, draft)
    decoding = Decoding(s, policy(name), Sampling(), [0, 1, 2])
    drafted = 0
    while not s.done.all():
        before = [list(t) for t in s.tokens]
        round_ = decoding.decode_round()
        for b in np.flatnonzero(round_.active & (round_.k > 0)):
            k = int(round_.k[b])
            assert round_.drafts[b, :k].tolist() == continued(full_logits, draft, before[b], k)
            drafted += 1
    assert drafted > 10


@pytest.mark.parametrize("name", POLICIES)
def test_the_target_as_its_own_draft_model_is_always_right(tiny_model, name):
    decoder = tiny_model("llama").decoder
    s = sequences(decoder, decoder)
    rounds = list(Decoding(s, policy(name), Sampling(), [0, 1, 2]).rounds())
    assert sum(int(r.k.sum()) for r in rounds) > 10
    assert all((r.accepted == r.k).all() for r in rounds)


def test_copies_and_shorter_beginnings_keep_the_draft_models_keys(tiny_model):
    """A benchmark holds copies of one prompt at several lengths; each must be a beginning of what is cached."""
    decoder = tiny_model("llama").decoder
    one = sequences(decoder, decoder, PROMPTS[1:2], LIMITS[1:2])
    s = one.repeated(3)
    for length in (131, 100, 40):
        s.hold(PROMPTS[1][:length], limit=8)
        rounds = list(Decoding(s, policy("every round"), Sampling(), [0, 1, 2]).rounds())
        assert all((r.accepted == r.k).all() for r in rounds)


@pytest.mark.parametrize("vocab", [272, 304])
def test_vocabularies_padded_differently(tiny_model, vocab):
    """The shared tokenizer has 258 tokens; 288 is the target's width."""
    target, draft = tiny_model("llama"), tiny_model("llama", vocab_size=vocab, seed=5)
    s = sequences(target.decoder, draft.decoder)
    rounds = list(Decoding(s, policy("every round"), Sampling(temperature=1.5, seed=1), [0, 1, 2]).rounds())
    drafts = np.concatenate([r.drafts[b, : r.k[b]] for r in rounds for b in range(3)])
    assert drafts.max() < min(vocab, 288)
    assert max(max(t) for t in s.tokens) >= 272, "the target must have written a token that the small one does not know"
    probabilities = s.state(3).draft_probs
    assert probabilities.shape[-1] == 288
    if vocab < 288:
        assert not probabilities[..., vocab:].any()


def test_a_prompt_of_one_token_is_refused(tiny_model):
    decoder = tiny_model("llama").decoder
    s = sequences(decoder, decoder, [[1], [1, 2, 3]], [4, 4])
    with pytest.raises(UserError, match="starts from two tokens"):
        Decoding(s, policy("every round"), Sampling(), [0, 1])


def test_draft_models_are_loaded_once_and_sized(tiny_model, tiny_checkpoint):
    target, source = tiny_model("llama"), str(tiny_checkpoint("qwen2", seed=3))
    one = policy("gaps", model=source)
    assert draft_model_names([one]) == {source}
    assert history_spec([one]) is None
    loaded = {}
    s = empty_sequences(target, 200, 2, [one], draft_models=loaded)
    again = empty_sequences(target, 200, 2, [one], draft_models=loaded)
    assert s.companions[source].decoder is again.companions[source].decoder is loaded[source].decoder
    assert s.companions[source].cache.capacity_tokens == s.cache.capacity_tokens


def test_memory_is_predicted_with_draft_models_and_page_summaries(tiny_model, tiny_checkpoint, monkeypatch):
    """A byte less than target, draft model and summaries take is refused."""
    target, source = tiny_model("llama"), str(tiny_checkpoint("qwen2", seed=3))
    kv = {"budget": 64, "sink": 1, "recent": 16, "page": 16}
    quest = policy_from_mapping({"drafter": {"kind": "quest"}, "controller": {"kind": "fixed", "k": 3}, "draft_kv": kv})
    policies, loaded = [policy("every round", model=source), quest], {}
    job.load_draft_models(target, policies, loaded)
    demand = job.memory_demand(target, 200, 2, policies)
    summaries = predict(demand).kv_cache // 16
    both = [predict(replace(demand, config=c)).to_allocate for c in (target.config, loaded[source].config)]
    monkeypatch.setattr(job, "free_bytes", lambda device: sum(both) + summaries)
    job.empty_sequences(target, 200, 2, policies, draft_models=loaded)
    monkeypatch.setattr(job, "free_bytes", lambda device: sum(both) + summaries - 1)
    with pytest.raises(UserError, match="are free"):
        job.empty_sequences(target, 200, 2, policies, draft_models=loaded)


def test_another_tokenizer_is_refused(tiny_model, tiny_checkpoint, tmp_path):
    """Two models with the same number of tokens, two of which have each other's ids."""
    target = tiny_model("llama")
    folder = shutil.copytree(tiny_checkpoint("llama"), tmp_path / "other")
    backend = Tokenizer.of_bytes()._backend
    backend.add_special_tokens(["<|im_end|>", "<|im_start|>"])
    backend.save(str(folder / "tokenizer.json"))
    with pytest.raises(UserError, match=r"other.*number their tokens differently"):
        load_draft_models(target, [policy("every round", model=str(folder))], {})


def test_the_same_tokens_written_differently_are_the_same_tokenizer(tiny_model):
    """Digests are of files, and one tokenizer can come in several."""
    ours = tiny_model("llama").tokenizer
    other = Tokenizer(ours._backend, digest="other")
    assert other.same_ids(ours)
    assert not Tokenizer.of_bytes().same_ids(ours)
