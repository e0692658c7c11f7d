"""The small operations of a decode step on a GPU: bf16 too, against the references, alone and inside one graph.

Sums over a row run in another order than torch's, so a result in a 16-bit dtype may land one step away, now and then.
Where no sum is involved, the bits are torch's own.
"""

import pytest
import torch
import torch.nn.functional as F

from specdial.kernels.norm import add_rms_norm
from specdial.kernels.rope_cache import rope_and_cache
from specdial.kernels.swiglu import swiglu
from specdial.kernels.token_statistics import logit_statistics

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NAN = float("nan")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
STEP = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 4e-6}  # largest relative step of the dtype


def poison() -> None:
    torch.full((16 << 20,), NAN, device="cuda")


def randn(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(*shape, device="cuda")).to(dtype)


def assert_steps(got: torch.Tensor, want: torch.Tensor, *, steps: int = 2, apart_frac: float = 0.01) -> None:
    """At most `steps` steps of the dtype apart, and (in 16 bits) rarely apart at all."""
    step = STEP[got.dtype]
    torch.testing.assert_close(got, want, atol=step * 1e-2, rtol=steps * step)
    if got.dtype != torch.float32:
        assert (got != want).float().mean().item() <= apart_frac


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 1, 576), (16, 5, 1536), (3, 4096), (70000, 64), (2, 8192), (2, 16384), (5, 1001)]
)
def test_norm_equals_the_reference(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(shape[-1])
    x, residual, weight = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype)
    want, want_h = add_rms_norm(x, residual.clone(), weight, 1e-6, backend="reference")
    alone = add_rms_norm(x, None, weight, 1e-6, backend="reference")[0]
    poison()
    again = add_rms_norm(x, residual.clone(), weight, 1e-6, backend="triton")[0]
    normed, h = add_rms_norm(x, residual, weight, 1e-6, backend="triton")
    assert h is residual
    assert torch.equal(h, want_h)
    assert torch.equal(normed, again)
    assert_steps(normed, want)
    assert_steps(add_rms_norm(x, None, weight, 1e-6, backend="triton")[0], alone)


def angles(positions: int, D: int) -> tuple[torch.Tensor, torch.Tensor]:
    inverse = 1e6 ** (-torch.arange(0, D, 2, device="cuda", dtype=torch.float32) / D)
    angle = torch.arange(positions, device="cuda", dtype=torch.float32)[:, None] * inverse
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("T", "H", "Hk", "D", "ahead", "lengths"),
    [
        (1, 32, 8, 128, 0, (2999,)),
        (1, 12, 2, 128, 3, (5, 2990, 0, 2999)),
        (5, 9, 3, 64, 0, (2995, 2997, 3000, 17)),
        (9, 40, 40, 80, 1, (100, 7)),
        (700, 16, 8, 128, 0, (0, 1300)),
    ],
)
def test_rotation_and_cache_equal_the_reference(
    dtype: torch.dtype, normed: bool, T: int, H: int, Hk: int, D: int, ahead: int, lengths: tuple[int, ...]
) -> None:
    torch.manual_seed(T + H)
    B, S = len(lengths), 3000
    qkv = randn(B, T, (H + 2 * Hk) * D, dtype=dtype)
    where = torch.tensor(lengths, device="cuda", dtype=torch.int32)
    caches = torch.full((2, 2, B, Hk, S, D), NAN, device="cuda", dtype=dtype)  # [backend, k | v, B, Hk, S, D]
    cos, sin = angles(S, D)
    options = {"cos": cos, "sin": sin, "ahead": ahead}
    if normed:
        options |= {"q_norm": randn(D, dtype=dtype), "k_norm": randn(D, dtype=dtype), "eps": 1e-6}
    want = rope_and_cache(qkv, where, *caches[0], backend="reference", **options)
    poison()
    got = rope_and_cache(qkv, where, *caches[1], backend="triton", **options)
    assert torch.equal(caches[0].isnan(), caches[1].isnan())
    assert torch.equal(caches[0, 1].nan_to_num(), caches[1, 1].nan_to_num())
    ours, theirs = (got, caches[1, 0].nan_to_num()), (want, caches[0, 0].nan_to_num())
    for mine, reference in zip(ours, theirs):
        if not normed:
            assert torch.equal(mine, reference)
        else:  # a step before the turn is a step of the larger of two channels after it
            atol = 2e-5 if dtype == torch.float32 else 32 * STEP[dtype]
            torch.testing.assert_close(mine, reference, atol=atol, rtol=0)
            assert dtype == torch.float32 or (mine != reference).float().mean().item() <= 0.02


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 2 * 8960), (16, 5, 2 * 14336), (70000, 2 * 32), (3, 2 * 1001)])
def test_activation_equals_the_reference(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(shape[-1])
    gate_up = randn(*shape, dtype=dtype, scale=4.0)
    gate_up[..., :4] = torch.tensor([0.0, 100.0, -100.0, -11.0], device="cuda").to(dtype)
    want = swiglu(gate_up, backend="reference")
    poison()
    assert_steps(swiglu(gate_up, backend="triton"), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "V"), [(1, 151936), (16, 151936), (144, 49152), (2000, 32000), (3, 1001), (2, 2)])
@pytest.mark.parametrize("spread", [0.01, 3.0])
def test_statistics_of_logits(dtype: torch.dtype, N: int, V: int, spread: float) -> None:
    """A narrow spread leaves many equal largest logits in 16 bits: the lowest index wins."""
    torch.manual_seed(V)
    logits = randn(N, V, dtype=dtype, scale=spread)
    logits[0, V // 2 :] = float("-inf")
    logits[-1, V // 3] = logits[-1, V - 1] = 50.0
    poison()
    first = logit_statistics(logits, backend="triton")
    token, entropy, top1, margin = logit_statistics(logits, backend="triton")
    assert all(torch.equal(a, b) for a, b in zip(first, (token, entropy, top1, margin)))
    columns = torch.arange(V, device="cuda")
    top = logits.amax(-1, keepdim=True)
    assert torch.equal(token, torch.where(logits == top, columns, V).amin(-1))
    top2 = logits.float().topk(2, dim=-1).values
    assert torch.equal(margin, top2[:, 0] - top2[:, 1])
    for rows in torch.arange(N, device="cuda").split(64):
        p = torch.softmax(logits[rows].double(), dim=-1)
        torch.testing.assert_close(entropy[rows].double(), torch.special.entr(p).sum(-1), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(top1[rows].double(), p.amax(-1), atol=0, rtol=1e-5)


def test_one_graph_serves_every_length() -> None:
    """One layer and its logits, captured once; lengths move on the device, nothing waits for the host."""
    torch.manual_seed(0)
    B, T, H, Hk, D, S, hidden, inner, V = 3, 2, 8, 2, 64, 500, 512, 1024, 5000
    dtype = torch.bfloat16
    w_qkv, w_out = randn((H + 2 * Hk) * D, hidden, dtype=dtype), randn(hidden, H * D, dtype=dtype)
    w_up, w_down = randn(2 * inner, hidden, dtype=dtype), randn(hidden, inner, dtype=dtype)
    head, scale = randn(V, hidden, dtype=dtype, scale=0.05), randn(hidden, dtype=dtype)
    cos, sin = angles(S, D)
    start = randn(B, T, hidden, dtype=dtype)
    lengths = torch.zeros(B, device="cuda", dtype=torch.int64)
    cache = torch.zeros(2, 2, B, Hk, S, D, device="cuda", dtype=dtype)  # [triton | reference, k | v, B, Hk, S, D]

    def step(backend: str, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        residual = start.clone()
        normed, residual = add_rms_norm(residual, None, scale, 1e-5, backend=backend)
        turns = {"cos": cos, "sin": sin, "ahead": 1, "q_norm": scale[:D], "k_norm": scale[:D], "eps": 1e-5}
        q = rope_and_cache(F.linear(normed, w_qkv), lengths, k, v, backend=backend, **turns)
        normed, residual = add_rms_norm(F.linear(q.flatten(-2), w_out), residual, scale, 1e-5, backend=backend)
        mixed = F.linear(swiglu(F.linear(normed, w_up), backend=backend), w_down)
        normed, residual = add_rms_norm(mixed, residual, scale, 1e-5, backend=backend)
        lengths.add_(1)
        return residual, *logit_statistics(F.linear(normed, head).flatten(0, 1), backend=backend)

    step("triton", *cache[0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        step("triton", *cache[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        residual, _, entropy, _, _ = step("triton", *cache[0])
    for begin in ((0, 7, 300), (499, 2, 497)):
        cache.zero_()
        lengths.copy_(torch.tensor(begin))
        start.copy_(randn(B, T, hidden, dtype=dtype))
        graph.replay()
        graph.replay()
        assert lengths.tolist() == [n + 2 for n in begin]
        lengths.copy_(torch.tensor(begin))
        step("reference", *cache[1])
        want, _, want_entropy, _, _ = step("reference", *cache[1])
        assert torch.equal(cache[0] != 0, cache[1] != 0)
        for got, wanted in ((cache[0], cache[1]), (residual, want), (entropy, want_entropy)):
            assert (got.double() - wanted.double()).norm() <= 1e-2 * wanted.double().norm()
