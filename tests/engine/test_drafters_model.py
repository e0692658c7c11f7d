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
from specdial.policies.drafting import WINDOW_SINK
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


WIDE = {"head_dim": 64, "num_hidden_layers": 2}


def windowed(window, **more):
    drafter = {"kind": "model", "model": "draft", "window": window}
    return policy_from_mapping({"drafter": drafter, "controller": {"kind": "fixed", "k": 3}, **more})


def rounds_of(s, chosen):
    return [r.drafts.tolist() for r in Decoding(s, chosen, Sampling(), [0, 1, 2]).rounds()]


def test_a_window_that_holds_everything_changes_no_draft(tiny_model):
    target, draft = tiny_model("llama").decoder, tiny_model("qwen2", seed=3, **WIDE).decoder
    expected, found = (rounds_of(sequences(target, draft), windowed(window)) for window in (0, 400))
    assert found == expected


def test_a_draft_model_with_a_window_reads_its_first_and_last_keys_alone(tiny_model):
    """Keys in between may be anything, and drafts still say what the window lets them see."""
    target, draft = tiny_model("llama").decoder, tiny_model("qwen2", seed=3, **WIDE).decoder
    window, seen = 24, []
    for poisoned in (False, True):
        s = sequences(target, draft)
        decoding = Decoding(s, windowed(window), Sampling(), [0, 1, 2])
        own = s.companions["draft"].cache
        if poisoned:
            for b, prompt in enumerate(PROMPTS):
                end = max(len(prompt) - 2 - window, WINDOW_SINK)  # the first step reads the keys before the last two
                own.k[:, b, :, WINDOW_SINK:end] = own.v[:, b, :, WINDOW_SINK:end] = float("nan")
        seen.append([r.drafts.tolist() for r in decoding.rounds()])
    assert seen[0] == seen[1]
    assert seen[0] != rounds_of(sequences(target, draft), windowed(0))


def test_what_is_decoded_with_a_window_is_what_the_target_says(tiny_model):
    target, draft = tiny_model("llama").decoder, tiny_model("qwen2", seed=3, **WIDE).decoder
    texts = []
    for chosen in (policy_from_mapping({"controller": {"kind": "none"}}), windowed(16)):
        s = sequences(target, draft)
        for _ in Decoding(s, chosen, Sampling(), [0, 1, 2]).rounds():
            pass
        texts.append([list(t) for t in s.tokens])
    assert texts[0] == texts[1]


def paged(budget, **more):
    drafter = {"kind": "model", "model": "draft", "budget": budget}
    return policy_from_mapping({"drafter": drafter, "controller": {"kind": "fixed", "k": 3}, **more})


def test_a_budget_that_holds_everything_changes_no_draft(tiny_model):
    target, draft = tiny_model("llama").decoder, tiny_model("qwen2", seed=3, **WIDE).decoder
    expected, found = (rounds_of(sequences(target, draft), chosen) for chosen in (windowed(0), paged(400)))
    assert found == expected
    assert rounds_of(sequences(target, draft), paged(96)) != expected


def test_pages_of_a_draft_model_are_those_of_its_final_keys(tiny_model):
    """In every round, also after rounds that did not draft: what its queries choose by is what the keys say."""
    target, draft = tiny_model("llama").decoder, tiny_model("qwen2", seed=3, **WIDE).decoder
    s = sequences(target, draft)
    plain, chosen = policy_from_mapping({"controller": {"kind": "none"}}), paged(96)
    decoding, summaries, rounds = Decoding(s, chosen, Sampling(), [0, 1, 2]), None, 0
    while not s.done.all():
        if rounds == 3:
            other = Decoding(s, plain, Sampling(), [0, 1, 2])
            for _ in range(4):
                other.decode_round()
        before = s.committed - 2
        decoding.decode_round()
        rounds += 1
        summaries = decoding.drafters[0].paged[0]
        keys = s.companions["draft"].cache.k
        for b, end in enumerate(before.tolist()):
            if s.done[b]:
                continue
            whole = end // 16
            by_page = keys[:, b, :, : whole * 16].unflatten(2, (whole, 16))  # [L, Hk, pages, 16, D]
            assert torch.equal(summaries.low[:, b, :, :whole], by_page.amin(3))
            assert torch.equal(summaries.high[:, b, :, :whole], by_page.amax(3))
    assert rounds > 6
    texts = [list(t) for t in s.tokens]
    s.rewind()
    list(Decoding(s, plain, Sampling(), [0, 1, 2]).rounds())
    assert [list(t) for t in s.tokens] == texts


def test_a_budget_excludes_a_window_and_holds_whole_pages():
    drafter = {"kind": "model", "model": "m"}
    for settings, said in (
        ({"budget": 96, "window": 8}, r"drafter\.budget is 96 and drafter\.window 8"),
        ({"budget": 90}, r"drafter\.budget is 90"),
        ({"budget": 64}, r"drafter\.budget is 64"),
    ):
        with pytest.raises(UserError, match=said):
            policy_from_mapping({"drafter": {**drafter, **settings}, "controller": {"kind": "fixed", "k": 3}})


def test_windows_are_for_draft_models_with_heads_that_the_kernel_takes(tiny_model):
    with pytest.raises(UserError, match=r"drafter\.window is 8, which drafter sparse_self does not use"):
        policy_from_mapping({"drafter": {"kind": "sparse_self", "window": 8}})
    target = tiny_model("llama").decoder
    with pytest.raises(UserError, match=r"a window takes head dimensions \[64, 128\], draft model draft has 16"):
        Decoding(sequences(target, tiny_model("qwen2", seed=3).decoder), windowed(8), Sampling(), [0, 1, 2])
