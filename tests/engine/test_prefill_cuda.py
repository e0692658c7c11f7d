"""Prefill on a CUDA device against one float32 pass on the CPU: keys, values and the rows in history."""

import numpy as np
import pytest
import torch

from specdial.engine import prefill
from specdial.engine.history import HistorySpec
from specdial.engine.sequences import Sequences
from specdial.engine.weights import load_model

pytestmark = pytest.mark.gpu
WINDOW = 8
TOLERANCE = {"float32": 2e-4, "bfloat16": 5e-2}  # relative error, in the norm


@pytest.fixture(scope="module")
def folder(tiny_checkpoint):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return str(tiny_checkpoint("llama", head_dim=64, max_position_embeddings=16384))


def prompt(tokens, seed=0):
    return np.random.default_rng(seed).integers(0, 256, tokens).tolist()


def one_pass(decoder, tokens):
    """Keys and values [L, Hk, n, D] of one causal float32 pass, and its last rows' weights [L, Hk, W, n]."""
    keys, values, masses = [], [], []

    def attend(layer, q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [1, heads, n, D]
        keys.append(k[0])
        values.append(v[0])
        group, n = q.shape[1] // k.shape[1], k.shape[2]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        tail = min(WINDOW, n)
        scores = q[:, :, -tail:] @ k.transpose(2, 3) * q.shape[-1] ** -0.5
        seen = torch.ones(tail, n, dtype=torch.bool).tril(n - tail)
        masses.append(scores.masked_fill(~seen, -torch.inf).softmax(-1)[0].unflatten(0, (-1, group)).sum(1))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    decoder.forward(torch.tensor([tokens]), torch.arange(len(tokens))[None], attend)
    return torch.stack(keys), torch.stack(values), torch.stack(masses)


def distance(got, expected):
    return float((got.float().cpu() - expected).norm() / expected.norm())


def check(folder, dtype, page, prompts):
    model = load_model(folder, device="cuda", dtype=dtype)
    reference = load_model(folder, device="cpu", dtype="float32").decoder
    capacity = max(map(len, prompts)) + 20
    s = Sequences(model.decoder, capacity, len(prompts), history=HistorySpec(WINDOW, page), backend="triton")
    s.prefill(prompts, [4] * len(prompts))
    for b, given in enumerate(prompts):
        n = len(given) - 1
        if n == 0:
            assert not s.history.ring[:, b].any()
            continue
        keys, values, masses = one_pass(reference, given[:-1])
        assert distance(s.cache.k[:, b, :, :n], keys) < TOLERANCE[dtype]
        assert distance(s.cache.v[:, b, :, :n], values) < TOLERANCE[dtype]
        padded = torch.nn.functional.pad(masses, (0, s.cache.capacity_tokens - n))
        pooled = padded.unflatten(-1, (-1, page)).sum(-1)  # [L, Hk, W, S / page]
        slots = [position % WINDOW for position in range(n - pooled.shape[2], n)]
        assert distance(s.history.ring[:, b][:, :, slots], pooled) < TOLERANCE[dtype]
        assert distance(s.history.scores()[:, b], pooled.sum(2)) < TOLERANCE[dtype]


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_equal_one_pass(folder, monkeypatch, dtype, page):
    """Empty, shorter than the window, whole chunks, a chunk of one row, and a ragged end."""
    monkeypatch.setattr(prefill, "CUDA_CHUNK_TOKENS", 64)
    lengths = (1, WINDOW - 1, WINDOW + 2, 64 + WINDOW + 1, 128 + WINDOW + 2, 451)
    check(folder, dtype, page, [prompt(n, seed) for seed, n in enumerate(lengths)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_default_chunk(folder, dtype):
    check(folder, dtype, 16, [prompt(prefill.CUDA_CHUNK_TOKENS + 1500)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "keys"), [(64, 64), (64, 80), (1, 9), (130, 200), (7, 300)])
def test_the_last_row_sees_the_last_key(dtype, rows, keys):
    """Few keys, so that one too many or too few would show."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    g = torch.Generator().manual_seed(0)
    q, cache = (
        torch.randn(1, rows, 8, 64, generator=g).to(dtype),
        torch.randn(2, 2, keys + 50, 64, generator=g).to(dtype),
    )
    k, v = cache[:1, :, :keys], cache[1:, :, :keys]
    seen = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.float().transpose(1, 2), k.float(), v.float(), attn_mask=seen, enable_gqa=True
    ).transpose(1, 2)
    on_gpu = cache.cuda()
    out = prefill.causal_attention(q.cuda(), on_gpu[:1, :, :keys], on_gpu[1:, :, :keys])
    assert distance(out, expected) < (1e-4 if dtype is torch.float32 else 1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_attention_of_a_chunk_needs_no_memory_by_context(dtype, head_dim):
    """Beyond its output and the normalisers, at most a copy of the chunk: neither keys nor a mask."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    T, S, H, Hk = 512, 65536, 8, 2
    cache = torch.randn(2, Hk, S, head_dim, device="cuda", dtype=dtype)
    q = torch.randn(1, T, H, head_dim, device="cuda", dtype=dtype)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = prefill.causal_attention(q, cache[:1], cache[1:])
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 4 * out.nbytes + 4 * T * H * 4 + (16 << 20)
    rows = slice(T - 16, T)  # against a plain softmax, for the last rows
    scores = q[0, rows].float().unflatten(1, (Hk, -1)).permute(1, 2, 0, 3) @ cache[0, :, None].float().transpose(2, 3)
    seen = torch.ones(16, S, dtype=torch.bool, device="cuda").tril(S - 16)
    weights = (scores * head_dim**-0.5).masked_fill(~seen, -torch.inf).softmax(-1)  # [Hk, G, 16, S]
    expected = (weights @ cache[1, :, None].float()).permute(2, 0, 1, 3).flatten(1, 2)
    error = (out[0, rows].float() - expected).norm() / expected.norm()
    assert float(error) < (1e-3 if dtype is torch.float32 else 2e-2)
