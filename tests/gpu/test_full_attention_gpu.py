"""Full attention, history and scoring heads on a GPU: bf16 too, error budgets from float64, every call twice.

The budget of a dtype is what torch's own arithmetic in that dtype loses against float64 on the same inputs.
"""

import pytest
import torch

from specdial.kernels.full_attention import full_attention, full_attention_raw
from specdial.kernels.full_attention.launch import Tiling, full_attention_triton
from specdial.kernels.head_scores import head_scores
from specdial.kernels.history import decay_rows, push_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NAN = float("nan")
SLACK = 1.5  # a different order of the same roundings
SHAPES = [  # T, G, Hk, D, S, lengths
    (1, 1, 8, 128, 1000, (999, 0, 1, 63, 64)),
    (1, 8, 2, 64, 5000, (4999,)),
    (5, 4, 8, 128, 9000, (8995,)),
    (5, 3, 2, 128, 2100, (2000, 1)),
    (5, 6, 2, 128, 4096, (4091, 63, 1000, 64)),
    (5, 8, 4, 128, 3000, (2995, 128)),
    (9, 7, 1, 64, 1500, (1400, 17)),
    (33, 8, 2, 128, 2000, (1967, 500)),
]


def make(shape: tuple, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Random inputs; what no row may see is NaN, and so is the memory that buffers will be allocated from."""
    T, G, Hk, D, S, lengths = shape
    torch.manual_seed(S + T)
    B = len(lengths)
    q = torch.randn(B, T, Hk * G, D, dtype=dtype, device="cuda")
    k, v = (torch.randn(B, Hk, S, D, dtype=dtype, device="cuda") for _ in range(2))
    for b, length in enumerate(lengths):
        k[b, :, length + T :] = NAN
        v[b, :, length + T :] = NAN
    return q, k, v, torch.tensor(lengths, device="cuda", dtype=torch.int32)


def poison() -> None:
    torch.full((64 << 20,), NAN, device="cuda")


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def naive(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 attention and pooled token mass."""
    B, T, H, D = q.shape
    Hk, S = k.shape[1:3]
    rows = q.double().view(B, T, Hk, H // Hk, D).permute(0, 2, 1, 3, 4)  # [B, Hk, T, G, D]
    scores = torch.einsum("bhtgd,bhsd->bhtgs", rows, k.nan_to_num().double()) * D**-0.5
    last = lengths[:, None] + torch.arange(T, device="cuda")  # [B, T]
    hidden = torch.arange(S, device="cuda") > last[..., None]  # [B, T, S]
    weights = torch.softmax(scores.masked_fill(hidden[:, None, :, None], float("-inf")), dim=-1)
    out = torch.einsum("bhtgs,bhsd->bthgd", weights, v.nan_to_num().double())
    return out.reshape(B, T, H, D), weights.sum(3)


def pages(mass: torch.Tensor, page: int) -> torch.Tensor:
    return torch.nn.functional.pad(mass, (0, -mass.shape[-1] % page)).unflatten(-1, (-1, page)).sum(-1)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(shape, torch.bfloat16) for shape in SHAPES] + [(SHAPES[2], torch.float16), (SHAPES[3], torch.float32)],
    ids=str,
)
def test_output_and_masses_stay_in_budget_and_repeat(shape: tuple, dtype: torch.dtype) -> None:
    inputs = make(shape, dtype)
    q, k, v, lengths = inputs
    want, mass = naive(*inputs)
    clean = (q, k.nan_to_num(), v.nan_to_num(), lengths)
    plain, plain_mass = full_attention(*clean, backend="reference", mass=True)
    budget = SLACK * distance(plain, want)
    small_pages = (("page", 16),) if shape in SHAPES[2:5] else ()
    for kind, page in ((False, 64), ("page", 64), ("token", 64), *small_pages):
        poison()
        out, got = full_attention(*inputs, backend="triton", mass=kind, page_tokens=page)
        assert distance(out, want) <= budget
        poison()
        again, got_again = full_attention(*inputs, backend="triton", mass=kind, page_tokens=page)
        assert torch.equal(out, again)
        if got is not None:
            assert torch.equal(got, got_again)
            expected = mass if kind == "token" else pages(mass, page)
            assert distance(got, expected) <= max(SLACK * distance(plain_mass, mass), 2e-4)
            torch.testing.assert_close(got.sum(-1), torch.full_like(got.sum(-1), shape[1]), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("T", "N", "G", "lengths"), [(61, 61, 4, (4000, 64, 63)), (10, 60, 1, (3000, 5)), (17, 17, 8, (0, 127))], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_trees_stay_in_budget_and_repeat(T: int, N: int, G: int, lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    """Random rows and keys of a block, each row seeing one at least; keys past the block are NaN."""
    q, k, v, at = make((N, G, 2, 128, max(lengths) + N + 9, lengths), dtype)
    q = q[:, :T]
    ancestors = torch.rand(len(lengths), T, N, device="cuda") < 0.2
    ancestors.scatter_(2, torch.randint(N, (len(lengths), T, 1), device="cuda"), True)
    clean = (q.float(), k.nan_to_num().float(), v.nan_to_num().float(), at)
    want, _ = full_attention(*clean, backend="reference", ancestors=ancestors)
    out = [full_attention(q, k, v, at, backend="triton", ancestors=ancestors)[0] for _ in range(2)]
    assert torch.equal(*out)
    assert distance(out[0], want) < (5e-3 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("block_m", [16, 32, 64])
@pytest.mark.parametrize("tma", [False, True])
def test_every_tiling_agrees(block_m: int, tma: bool) -> None:
    inputs = make((5, 6, 2, 128, 4096, (4091, 63, 1000, 64)), torch.bfloat16)
    want, _ = naive(*inputs)
    tiling = Tiling(block_m=block_m, warps=4, stages=3, per_sm=2, crowded_per_sm=2, tma=tma)
    for granularity in (None, "page", "token"):
        poison()
        out, _ = full_attention_triton(*inputs, granularity=granularity, page_tokens=64, splits=None, tiling=tiling)
        assert distance(out, want) < 5e-3


def test_one_graph_serves_all_lengths() -> None:
    """Captured once, replayed with other lengths and other counts of committed rows; nothing waits for the host."""
    T, G, Hk, D, S, B, W = 4, 4, 2, 128, 3000, 3, 16
    q, k, v, lengths = make((T, G, Hk, D, S, (S - T,) * B), torch.bfloat16)
    committed = torch.zeros(B, device="cuda", dtype=torch.int32)
    ring, score = torch.zeros(B, Hk, W, S, device="cuda"), torch.zeros(B, Hk, S, device="cuda")
    decayed = torch.zeros(B, Hk, S, device="cuda")
    heads, weights = (0, 3, 5), torch.ones(B, T, device="cuda")

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        out, raw = full_attention_raw(q, k, v, lengths, backend="triton", granularity="token")
        push_rows(ring, raw, lengths, committed, backend="triton", score=score)
        decay_rows(decayed, raw, lengths, committed, decay=0.5, backend="triton")
        return out, head_scores(q, k, lengths, heads, backend="triton", row_weights=weights)

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, estimate = step()
    for new_lengths, new_committed in (((0, 63, 2990), (1, 4, 0)), ((2996, 1, 640), (4, 3, 2))):
        for buffer in (ring, score, decayed):
            buffer.zero_()
        lengths.copy_(torch.tensor(new_lengths))
        committed.copy_(torch.tensor(new_committed))
        graph.replay()
        want, mass = naive(q, k, v, lengths)
        assert distance(out, want) < 5e-3
        expected, faded = torch.zeros_like(score), torch.zeros_like(decayed)
        for b, rows in enumerate(new_committed):
            for t in range(rows):
                expected[b] += mass[b, :, t].float()
                faded[b] = 0.5 * faded[b] + mass[b, :, t].float()
        torch.testing.assert_close(score, expected, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(ring.sum(2), expected, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(decayed, faded, atol=1e-3, rtol=1e-3)
        reference = head_scores(q.float(), k.float(), lengths, heads, backend="reference", row_weights=weights)
        torch.testing.assert_close(estimate, reference, atol=1e-3, rtol=1e-3)
