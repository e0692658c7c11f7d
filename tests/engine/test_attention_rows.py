"""Attention rows against the plainest computation there is, and the ranking of heads by what they look at."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdial.engine.attention_rows import BLOCK_ROWS, attention_rows, largest, read_queries
from specdial.engine.cache import KVCache
from specdial.engine.head_ranking import needle_scores, rank_heads, ranks
from specdial.engine.models.decoder import Decoder
from specdial.engine.sequences import Sequences
from specdial.engine.tokenizer import Tokenizer
from specdial.engine.weights import LoadedModel
from specdial.engine.workloads import WorkloadSpec, build
from specdial.kernels.head_scores import head_scores
from specdial.policies.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")


def prefilled(decoder, prompt, capacity=512):
    s = Sequences(decoder, capacity, 1, history=None, backend="reference")
    s.prefill([prompt], [0])
    return s


def plain_rows(decoder, attend, tokens):
    """Softmax rows of every layer in float64, [L, T, H, T], from one pass over the whole text."""
    weights = []

    def watch(layer, q, k, v):
        group = q.shape[2] // k.shape[2]
        keys = k[0].repeat_interleave(group, 1).double()  # [T, H, D]
        logits = torch.einsum("thd,shd->ths", q[0].double(), keys) * q.shape[3] ** -0.5
        visible = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
        weights.append(torch.softmax(logits.masked_fill(~visible[:, None], float("-inf")), -1))
        return attend(layer, q, k, v)

    decoder.forward(torch.tensor([tokens]), torch.arange(len(tokens))[None], watch)
    return torch.stack(weights)


def all_rows(s, tokens, start):
    queries = read_queries(s, tokens, start)
    keys = [s.cache.view(layer, len(tokens))[0][0] for layer in range(len(queries))]
    return torch.stack([attention_rows(q, k, start) for q, k in zip(queries, keys)])  # [L, T, H, S]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("start", [0, 1, 45])
def test_rows_are_the_softmax_of_one_plain_pass(tiny_model, make_attend, architecture, start):
    decoder = tiny_model(architecture).decoder
    tokens = torch.randint(0, 256, (83,), generator=torch.Generator().manual_seed(1)).tolist()
    assert len(tokens) - start > BLOCK_ROWS  # more than one pass, the last one short
    rows = all_rows(prefilled(decoder, tokens[: start + 1]), tokens, start)
    expected = plain_rows(decoder, make_attend(), tokens)[:, start:]
    assert rows.dtype == torch.float32
    torch.testing.assert_close(rows.double(), expected, atol=2e-5, rtol=0)
    torch.testing.assert_close(rows.sum(-1), torch.ones(rows.shape[:-1]))


def test_the_passes_of_a_gpu_read_the_same_queries(tiny_model, monkeypatch):
    """One pass through the functions of prefill, here by their references and the library's kernel for the CPU."""
    decoder = tiny_model("qwen2").decoder
    tokens, start = list(range(60, 143)), 45
    expected = all_rows(prefilled(decoder, tokens[: start + 1]), tokens, start)
    s = prefilled(decoder, tokens[: start + 1])
    monkeypatch.setattr(KVCache, "on_gpu", True)
    torch.testing.assert_close(all_rows(s, tokens, start), expected, atol=2e-5, rtol=0)


def test_rows_do_not_depend_on_what_the_cache_held_after_the_start(tiny_model):
    """As after decoding: the keys of the whole text, and another text's keys behind it."""
    decoder = tiny_model("llama").decoder
    tokens = list(range(100))
    fresh = all_rows(prefilled(decoder, tokens[:61]), tokens, 60)
    used = all_rows(prefilled(decoder, [*tokens, *range(150, 200)]), tokens, 60)
    torch.testing.assert_close(used, fresh, atol=1e-6, rtol=0)


def test_the_kernel_for_scoring_heads_sums_the_same_rows(tiny_model):
    """What partial verification scores keys by is what the rows say."""
    decoder = tiny_model("qwen2").decoder
    tokens, start, heads = list(range(70)), 64, (0, 3)
    s = prefilled(decoder, tokens[: start + 1])
    queries = read_queries(s, tokens, start)
    for layer in range(decoder.config.layers):
        keys = s.cache.view(layer, len(tokens))[0]  # [1, Hk, S, D]
        scores = head_scores(queries[layer][None], keys, torch.tensor([start]), heads, backend="reference")
        rows = attention_rows(queries[layer], keys[0], start)[:, list(heads)]
        torch.testing.assert_close(scores[0], rows.sum((0, 1)), atol=1e-5, rtol=0)


def test_a_kept_row_keeps_the_lowest_of_equal_entries_and_sums_to_what_it_held():
    rows = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.1, 0.3, 0.3, 0.3]])
    (kept,) = largest(rows[:, None], 2, 2)
    assert kept.keys.tolist() == [0, 1, 1, 2]
    assert kept.dense(4) == pytest.approx(np.array([[0.5, 0.25, 0, 0], [0, 0.3, 0.3, 0]]), abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), start=st.integers(0, 6), most_keys=st.integers(1, 14), ties=st.booleans())
def test_what_is_kept_are_the_first_of_a_stable_sort(seed, start, most_keys, ties):
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 3, (4, 3, 10)).astype(np.float32) if ties else rng.random((4, 3, 10), dtype=np.float32)
    for head, kept in enumerate(largest(torch.from_numpy(rows), start, most_keys)):
        for r, row in enumerate(rows[:, head, :]):
            visible = row[: start + r + 1]
            wanted = np.sort(np.argsort(-visible, kind="stable")[:most_keys])
            part = slice(kept.offsets[r], kept.offsets[r + 1])
            assert kept.keys[part].tolist() == wanted.tolist()
            assert kept.weights[part].tolist() == visible[wanted].astype(np.float16).tolist()
            assert kept.mass[r] == pytest.approx(min(visible[wanted].sum(), 1.0))


def test_misuse_is_refused(tiny_model):
    decoder = tiny_model("llama").decoder
    s = prefilled(decoder, [1, 2, 3])
    with pytest.raises(ValueError, match="start 3 is outside a text of 3 tokens"):
        read_queries(s, [1, 2, 3], 3)
    with pytest.raises(ValueError, match="not of 2"):
        read_queries(Sequences(decoder, 64, 2, history=None, backend="reference"), [1, 2, 3], 1)
    with pytest.raises(ValueError, match="need as many keys, there are 5"):
        attention_rows(torch.zeros(2, 4, 16), torch.zeros(2, 5, 16), 4)


def needles(documents=3, **settings):
    return build(WorkloadSpec("needle", 320, documents=documents, **settings), Tokenizer.of_bytes())


PLANTED = (1, 2)  # the layer and head that look for digits


@pytest.fixture
def digit_model(tiny_model):
    """A random decoder in which one head's query asks for digits, wherever they are.

    Digits carry a large feature 0; the keys of the head's kv head show it in the slowest-turning dimension, which the
    head's query, constant by its bias, reads.
    """
    base = tiny_model("qwen2", rope_theta=1e12, num_hidden_layers=2)
    c, embedding = base.config, base.decoder.embedding.clone()
    digits = base.tokenizer.encode("0123456789")
    embedding[:, 0] = 0.0
    embedding[digits, 0] = 30.0
    layers = list(base.decoder.layers)
    layer, head = PLANTED
    slow = c.head_dim // 2 - 1
    query, key = head * c.head_dim, (c.heads + head // (c.heads // c.kv_heads)) * c.head_dim
    qkv, bias = layers[layer].qkv.clone(), layers[layer].qkv_bias.clone()
    qkv[query : query + c.head_dim], bias[query : query + c.head_dim] = 0.0, 0.0
    bias[query + slow] = 40.0
    qkv[key + slow], bias[key + slow] = 0.0, 0.0
    qkv[key + slow, 0] = 1.0
    layers[layer] = replace(layers[layer], qkv=qkv, qkv_bias=bias)
    decoder = Decoder(c, embedding, layers, base.decoder.norm, base.decoder.head)
    return LoadedModel(decoder, base.tokenizer, c, "planted", "hf")


def test_a_planted_head_is_ranked_first(digit_model):
    scores = needle_scores(digit_model, needles())
    heads = rank_heads("target", scores)
    best = next(head for head in heads if head.rank == 1)
    assert (best.layer, best.head, best.rank_in_layer) == (*PLANTED, 1)
    assert best.needle_mass > 2 * max(head.needle_mass for head in heads if head.rank > 1)
    assert len(heads) == digit_model.config.layers * digit_model.config.heads
    assert ((scores.needle_mass >= 0) & (scores.needle_mass <= 1)).all()
    assert ((scores.copy_frac >= 0) & (scores.copy_frac <= 1)).all()


def test_scores_are_what_they_say(tiny_model, make_attend):
    """Mass on the needle's tokens in the rows that predict the answer, and how often the most attended token is it."""
    model, documents = tiny_model("llama", seed=5), needles(2, needles=2)
    mass, copies = [], []
    for d in documents:
        answer = model.tokenizer.encode(f" {d.answer}")
        text = [*d.prompt_ids, *answer]
        rows = plain_rows(model.decoder, make_attend(), text)[:, len(d.prompt_ids) - 1 : -1]  # [L, T, H, S]
        span = range(d.meta["needles"][0]["start_token"], d.meta["needles"][0]["end_token"])
        assert model.tokenizer.decode(text[span.start : span.stop]).strip().endswith(f"is {d.answer}.")
        mass.append(rows[..., list(span)].sum(-1).mean(1))
        first = rows.argmax(-1)
        hits = [[[int(j) in span and text[j] == a for j in row] for a, row in zip(answer, part)] for part in first]
        copies.append(torch.tensor(hits).double().mean(1))
    scores = needle_scores(model, documents)
    np.testing.assert_allclose(scores.needle_mass, torch.stack(mass).mean(0).numpy(), atol=1e-5)
    np.testing.assert_array_equal(scores.copy_frac, torch.stack(copies).mean(0).numpy())


def test_equal_heads_are_ranked_by_index():
    assert ranks(np.array([[0.5, 0.5, 0.9], [0.0, 0.0, 0.0]])).tolist() == [[2, 3, 1], [1, 2, 3]]


def test_documents_without_a_needle_are_refused(tiny_model):
    documents = build(WorkloadSpec("book", 64, documents=1), Tokenizer.of_bytes())
    with pytest.raises(UserError, match="a document has none; use workload needle"):
        needle_scores(tiny_model("llama"), documents)
