"""Prefill in chunks leaves the keys, values and attention rows of one causal pass."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from specdial.engine import prefill
from specdial.engine.cache import KVCache
from specdial.engine.history import HistorySpec
from specdial.engine.prefill import CPU_CHUNK_TOKENS, causal_attention, prefill_one
from specdial.engine.sequences import Sequences

WINDOW = 8


@pytest.fixture
def model(tiny_model):
    return tiny_model("llama", max_position_embeddings=4096)


def prompt(tokens, seed=0):
    return np.random.default_rng(seed).integers(0, 256, tokens).tolist()


def prefilled(model, prompts, *, history=True, page=1):
    spec = HistorySpec(WINDOW, page) if history else None
    s = Sequences(model.decoder, max(map(len, prompts)) + 20, len(prompts), history=spec, backend="reference")
    s.prefill(prompts, [4] * len(prompts))
    return s


def one_pass(decoder, tokens):
    """Keys and values [L, Hk, n, D] of one causal pass, and attention weights summed over each group [L, Hk, n, n]."""
    keys, values, masses = [], [], []

    def attend(layer, q, k, v):
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        keys.append(k[0])
        values.append(v[0])
        group = q.shape[2] // k.shape[1]
        q, k, v = q.transpose(1, 2), k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = (q @ k.transpose(2, 3)) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
        masses.append(weights[0].unflatten(0, (-1, group)).sum(1))
        return (weights @ v).transpose(1, 2)

    decoder.forward(torch.tensor([tokens]), torch.arange(len(tokens))[None], attend)
    return torch.stack(keys), torch.stack(values), torch.stack(masses)


@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("tokens", [1, 2, WINDOW - 1, WINDOW + 1, WINDOW + 2, 72, 73, 74, 130])
def test_chunks_equal_one_pass(model, monkeypatch, tokens, chunk):
    """Prompts shorter than the window, of the window, and on either side of chunk boundaries."""
    monkeypatch.setattr(prefill, "CPU_CHUNK_TOKENS", chunk)
    check(model, prompt(tokens))


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("tokens", [1, WINDOW - 1, WINDOW + 2, 73, 130])
def test_the_way_a_gpu_goes_equals_one_pass(tiny_model, monkeypatch, tokens, architecture):
    """Fused pass, bottom-right bias, the whole capacity in view: here by the reference kernels."""
    monkeypatch.setattr(prefill, "CUDA_CHUNK_TOKENS", 32)
    monkeypatch.setattr(KVCache, "on_gpu", True)
    check(tiny_model(architecture), prompt(tokens))


def check(model, given):
    s = prefilled(model, [given])
    n = len(given) - 1  # the last one stays pending
    assert s.cache.host_lengths.tolist() == [n]
    if n == 0:
        assert not s.history.ring.any()
        return
    keys, values, masses = one_pass(model.decoder, given[:-1])
    torch.testing.assert_close(s.cache.k[:, 0, :, :n], keys, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(s.cache.v[:, 0, :, :n], values, atol=2e-5, rtol=1e-4)
    for position in range(max(0, n - WINDOW), n):
        row = s.history.ring[:, 0, :, position % WINDOW]
        torch.testing.assert_close(row[..., :n], masses[:, :, position], atol=2e-5, rtol=1e-3)
        assert not row[..., n:].any()


def test_the_default_chunk_and_without_history(model):
    """A prompt of more than one chunk; without history no row is set apart."""
    given = prompt(CPU_CHUNK_TOKENS + 70)
    keys, values, _ = one_pass(model.decoder, given[:-1])
    for history in (True, False):
        s = prefilled(model, [given], history=history)
        torch.testing.assert_close(s.cache.k[:, 0, :, : len(given) - 1], keys, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(s.cache.v[:, 0, :, : len(given) - 1], values, atol=2e-5, rtol=1e-4)


def test_a_sequence_leaves_the_others_alone(model):
    prompts = [prompt(90, 1), prompt(30, 2), prompt(700, 3)]
    together = prefilled(model, prompts)
    for b, given in enumerate(prompts):
        alone = prefilled(model, [given])
        n = len(given) - 1
        assert torch.equal(together.cache.k[:, b, :, :n], alone.cache.k[:, 0, :, :n])
        width = min(together.history.ring.shape[-1], alone.history.ring.shape[-1])
        torch.testing.assert_close(together.history.ring[:, b, ..., :width], alone.history.ring[:, 0, ..., :width])
    before = together.cache.k.clone()
    prefill_one(together, 1, prompt(30, 4))
    assert torch.equal(before[:, 0], together.cache.k[:, 0])
    assert torch.equal(before[:, 2], together.cache.k[:, 2])
    assert not torch.equal(before[:, 1], together.cache.k[:, 1])


@pytest.mark.parametrize(("rows", "keys", "heads", "kv_heads"), [(5, 5, 4, 2), (1, 9, 4, 4), (7, 40, 6, 1)])
def test_causal_attention_aligns_the_last_row_with_the_last_key(rows, keys, heads, kv_heads):
    """What the GPU runs, here with the mask that the library makes of the same bias on a CPU."""
    g = torch.Generator().manual_seed(0)
    q = torch.randn(1, rows, heads, 16, generator=g)
    cache = torch.randn(2, kv_heads, keys + 24, 16, generator=g)  # a view of it is what prefill passes
    k, v = cache[:1, :, :keys], cache[1:, :, :keys]
    mask = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
    expected = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(causal_attention(q, k, v), expected)


def test_the_bias_is_the_library_s_and_stores_nothing():
    bias = prefill._bottom_right(3, 5)
    assert torch.equal(bias._materialize(), torch.ones(3, 5, dtype=torch.bool).tril(2))
    assert bias.untyped_storage().nbytes() == 0
