"""Attention rows on a GPU: the CPU's, for texts that take several passes, and within memory at a long context."""

import numpy as np
import pytest
import torch

from specdial.engine.attention_rows import attention_rows, largest, read_queries
from specdial.engine.sequences import Sequences
from specdial.engine.weights import load_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def all_rows(decoder, tokens, start, backend):
    s = Sequences(decoder, len(tokens), 1, history=None, backend=backend)
    s.prefill([tokens[: start + 1]], [0])
    queries = read_queries(s, tokens, start)
    keys = [s.cache.view(layer, len(tokens))[0][0] for layer in range(len(queries))]
    return torch.stack([attention_rows(q, k, start) for q, k in zip(queries, keys)]).cpu()  # [L, T, H, S]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(("dtype", "worst"), [("float32", 1e-3), ("bfloat16", 0.1)])
def test_rows_match_the_cpu(architecture, dtype, worst, tiny_checkpoint):
    folder = str(tiny_checkpoint(architecture, head_dim=64))
    tokens = torch.randint(0, 256, (300,), generator=torch.Generator().manual_seed(2)).tolist()
    cpu = load_model(folder, device="cpu", dtype="float32").decoder
    gpu = load_model(folder, device="cuda", dtype=dtype).decoder
    wanted = all_rows(cpu, tokens, 250, "reference")
    got = all_rows(gpu, tokens, 250, "triton")
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.sum(-1), torch.ones(got.shape[:-1]))
    assert (got - wanted).abs().max() < worst


def test_a_layer_of_a_long_context_takes_little_more_than_its_rows():
    """48 rows of 32 heads over 31k keys: the result is 190 MB; eight kv heads take turns."""
    T, S = 48, 31_000
    queries = torch.randn(T, 32, 128, device="cuda", dtype=torch.bfloat16)
    keys = torch.randn(8, S, 128, device="cuda", dtype=torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    rows = attention_rows(queries, keys, S - T)
    result = rows.numel() * rows.element_size()
    assert torch.cuda.max_memory_allocated() - before < 2 * result


@pytest.mark.parametrize("most_keys", [16, 1024, 4096])
def test_what_is_kept_is_the_cpu_s(most_keys):
    """Of rows whose entries are few values, so that most of what is kept are ties."""
    rows = torch.randint(0, 8, (48, 5, 8000), generator=torch.Generator().manual_seed(3)) / 8
    for got, wanted in zip(largest(rows.cuda(), 7952, most_keys), largest(rows, 7952, most_keys)):
        for name in ("keys", "weights", "offsets", "mass"):
            np.testing.assert_array_equal(getattr(got, name), getattr(wanted, name))
