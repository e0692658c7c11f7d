"""Selection and page summaries on a GPU: exact against the references, ties and races included, inside a graph."""

import pytest
import torch

from specdial.kernels.page_summary import score_pages, update_pages
from specdial.kernels.selection import select
from specdial.kernels.selection.reference import select_reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NAN = float("nan")


def scores_of(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if kind == "normal":
        return torch.randn(shape, device="cuda").to(dtype)
    if kind == "attention":
        return torch.softmax(torch.randn(shape, device="cuda") * 3.0, dim=-1).to(dtype)
    if kind == "ties":
        levels = torch.tensor([0.0, -0.0, 1.0, -1.0, float("-inf"), 0.5], device="cuda", dtype=dtype)
        return levels[torch.randint(0, 6, shape, device="cuda")]
    if kind == "clustered":  # all the largest side by side
        return torch.arange(shape[-1], device="cuda").to(dtype).expand(shape).contiguous()
    return torch.zeros(shape, device="cuda", dtype=dtype)


@pytest.mark.parametrize("kind", ["normal", "attention", "ties", "clustered", "constant"])
@pytest.mark.parametrize(
    ("shape", "budget"),
    [
        ((2, 3, 2, 1), 1), ((2, 3, 2, 63), 40), ((2, 3, 2, 1000), 512), ((3, 2, 2, 4097), 100),
        ((2, 4, 2, 32768), 512), ((1, 2, 8, 20001), 2048), ((1, 1, 1, 32768), 512), ((1, 2, 2, 131072), 512),
        ((1, 2, 2, 131072), 8192), ((1, 1, 2, 40000), 32768),
    ],
)  # fmt: skip
def test_selections_equal_the_reference(kind: str, shape: tuple[int, ...], budget: int) -> None:
    torch.manual_seed(budget)
    B, S = shape[-3], shape[-1]
    dtype = torch.bfloat16 if kind == "normal" else torch.float32
    scores = scores_of(kind, shape, dtype)
    lengths = torch.linspace(S, max(1, S // 3), B).int().cuda()
    options = {"budget": budget, "sink": min(4, budget // 2), "recent": min(16, budget // 2)}
    want = select_reference(scores, lengths, **options)
    scores.masked_fill_(torch.arange(S, device="cuda") >= lengths[:, None, None], NAN)
    for _ in range(2):
        got = select(scores, lengths, backend="triton", **options)
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("S", [2048, 32768])
def test_one_graph_serves_every_length(S: int) -> None:
    scores, lengths = scores_of("attention", (2, 2, 2, S), torch.float32), torch.tensor([S, S // 2], device="cuda")
    options = {"budget": 256, "sink": 4, "recent": 16}
    select(scores, lengths, backend="triton", **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        indices, counts = select(scores, lengths, backend="triton", **options)
    for length in (S, 1000, 100, 1):
        lengths.copy_(torch.tensor([length, S - length], device="cuda"))
        scores.copy_(scores.roll(17, dims=-1))
        graph.replay()
        want = select_reference(scores, lengths, **options)
        assert torch.equal(indices, want[0])
        assert torch.equal(counts, want[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("page", [16, 64])
def test_page_summaries_equal_the_reference(dtype: torch.dtype, page: int) -> None:
    torch.manual_seed(page)
    k = torch.randn(3, 2, 2000, 128, device="cuda", dtype=dtype)
    empty = torch.full((3, 2, -(-2000 // page), 128), NAN, device="cuda", dtype=dtype)
    got, want = (empty.clone(), empty.clone()), (empty.clone(), empty.clone())
    lengths = torch.zeros(3, dtype=torch.int32, device="cuda")
    for added in ([1500, 1, 0], [5, 33, 0], [1, 17, 16]):
        committed = torch.tensor(added, dtype=torch.int32, device="cuda")
        for (low, high), backend in ((got, "triton"), (want, "reference")):
            update_pages(k, low, high, lengths, committed, page=page, max_tokens=max(added), backend=backend)
        lengths += committed
    for ours, theirs in zip(got, want):
        torch.testing.assert_close(ours, theirs, equal_nan=True, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rule", ["specpv", "quest"])
@pytest.mark.parametrize("pool", ["mean", "max", "last"])
@pytest.mark.parametrize(("T", "G"), [(1, 8), (5, 6), (33, 7)])
def test_page_scores_equal_float32_arithmetic(dtype: torch.dtype, rule: str, pool: str, T: int, G: int) -> None:
    torch.manual_seed(T)
    B, Hk, pages, D = 2, 2, 100, 128
    q = torch.randn(B, T, Hk * G, D, device="cuda", dtype=dtype)
    low = torch.randn(B, Hk, pages, D, device="cuda", dtype=dtype) - 1
    high = low + torch.rand(B, Hk, pages, D, device="cuda", dtype=dtype)
    lengths = torch.tensor([1600, 777], device="cuda")
    rows = torch.tensor([T, max(1, T // 2)], device="cuda")
    low[1, :, 49:], high[1, :, 49:], q[1, int(rows[1]) :] = NAN, NAN, NAN
    options = {"page": 16, "rule": rule, "pool": pool, "rows": rows}
    got = score_pages(q, low, high, lengths, backend="triton", **options)
    assert torch.equal(got, score_pages(q, low, high, lengths, backend="triton", **options))
    q[1, int(rows[1]) :] = 0.0
    want = score_pages(q, low, high, lengths, backend="reference", **options)
    torch.testing.assert_close(got, want, atol=2e-3, rtol=1e-3)  # products of bf16 are exact in float32
