"""Sparse attention on a GPU: bf16 too, error budgets from float64, every call twice, inside a graph with new lengths.

The budget of a dtype is what torch's own arithmetic in that dtype loses against float64 on the same inputs.
"""

import pytest
import torch

from specdial.kernels.rope_cache import rope_and_cache
from specdial.kernels.sparse_attention import SparseWorkspace, rotate_and_attend, sparse_attention
from specdial.kernels.sparse_attention.reference import sparse_attention_reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NAN = float("nan")
SLACK = 1.5  # a different order of the same roundings
SHAPES = [  # T, G, Hk, D, budget, page, drafted, cached keys
    (1, 1, 8, 128, 63, 1, 0, (1000, 64, 1)),
    (1, 6, 2, 128, 512, 1, 7, (5000, 600)),
    (5, 8, 8, 128, 512, 1, 0, (4000, 700, 63)),
    (5, 3, 2, 64, 128, 1, 3, (2000,)),
    (5, 4, 8, 128, 4096, 1, 0, (9000,)),
    (5, 7, 2, 128, 32, 16, 20, (2048, 544)),
    (33, 8, 2, 128, 100, 1, 1, (1500, 10)),
]


def problem(shape: tuple, dtype: torch.dtype) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Random inputs; unwritten keys are NaN, slots past the count are garbage, one head selects nothing."""
    T, G, Hk, D, budget, page, drafted, cached = shape
    torch.manual_seed(sum(cached) + T)
    B = len(cached)
    tail_start = torch.tensor(cached, dtype=torch.int32) // page * page
    lengths = tail_start + drafted
    S = int(lengths.max()) + T + 5
    k, v = (torch.randn(B, Hk, S, D, dtype=dtype, device="cuda") for _ in range(2))
    indices = torch.full((B, Hk, budget), 2**30 // page, dtype=torch.int32)
    counts = torch.zeros(B, Hk, dtype=torch.int32)
    for b in range(B):
        k[b, :, int(lengths[b]) + T :] = NAN
        v[b, :, int(lengths[b]) + T :] = NAN
        for h in range(Hk):
            units = int(tail_start[b]) // page
            chosen = torch.randperm(units)[:budget].sort().values if (b, h) != (0, 1) else torch.arange(0)
            indices[b, h, : len(chosen)], counts[b, h] = chosen.int(), len(chosen)
    q = torch.randn(B, T, Hk * G, D, dtype=dtype, device="cuda")
    where = {"tail_start": tail_start.cuda(), "lengths": lengths.cuda()}
    return [q, k, v, indices.cuda(), counts.cuda()], where


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_error_stays_in_the_dtypes_budget_and_nothing_races(shape: tuple, dtype: torch.dtype) -> None:
    tensors, where = problem(shape, dtype)
    page = shape[5]
    exact = sparse_attention_reference(*(x.double() for x in tensors[:3]), *tensors[3:], **where, page=page)
    budget = distance(sparse_attention_reference(*tensors, **where, page=page), exact)
    torch.full((64 << 20,), NAN, device="cuda")  # poison what buffers will be allocated from
    first = sparse_attention(*tensors, **where, page=page, backend="triton")
    again = sparse_attention(*tensors, **where, page=page, backend="triton")
    assert torch.equal(first, again)
    assert distance(first, exact) <= SLACK * max(budget, 1e-6)


def test_one_graph_serves_every_length_and_selection() -> None:
    tensors, where = problem((5, 6, 2, 128, 256, 1, 2, (3000, 500)), torch.bfloat16)
    workspace = SparseWorkspace.allocate(1 << 20, 1 << 10, "cuda")

    def call() -> torch.Tensor:
        return sparse_attention(*tensors, **where, backend="triton", workspace=workspace)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for step in range(4):
        where["lengths"] -= step
        where["tail_start"] -= step
        tensors[3][:, :, :256] = torch.randperm(400, device="cuda")[:256].sort().values.int()
        tensors[4].fill_(256 - step)
        graph.replay()
        want = sparse_attention_reference(*(x.double() for x in tensors[:3]), *tensors[3:], **where)
        assert distance(out, want) < 6e-3
        assert workspace.arrivals.count_nonzero() == 0


@pytest.mark.parametrize(
    "shape", [s for s in SHAPES if s[0] == 1] + [(1, 6, 2, 128, 64, 16, 9, (5000, 600) * 8)], ids=str
)
def test_one_launch_rotates_caches_and_attends_as_two_do(shape: tuple) -> None:
    (q, k, v, indices, counts), where = problem(shape, torch.bfloat16)
    B, _, H, D = q.shape
    Hk, S = k.shape[1:3]
    for b, length in enumerate(where["lengths"]):  # the new token's key is not there yet
        k[b, :, length] = v[b, :, length] = NAN
    qkv = torch.randn(B, 1, (H + 2 * Hk) * D, dtype=torch.bfloat16, device="cuda")
    turn = torch.rand(S, D // 2, device="cuda") * 6
    options = {"backend": "triton", "cos": turn.cos(), "sin": turn.sin()}
    keys, values = k.clone(), v.clone()
    rotated = rope_and_cache(qkv, where["lengths"], keys, values, **options)
    want = sparse_attention_reference(
        rotated.double(), keys.double(), values.double(), indices, counts, **where, page=shape[5]
    )
    found = []
    for _ in range(2):
        own_keys, own_values = k.clone(), v.clone()
        found.append(rotate_and_attend(qkv, own_keys, own_values, indices, counts, page=shape[5], **where, **options))
        torch.testing.assert_close(own_keys, keys, rtol=1e-2, atol=1e-6, equal_nan=True)  # a rounding apart at most
        assert torch.equal(own_values.isnan(), values.isnan())
        torch.testing.assert_close(own_values, values, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(*found)
    assert distance(found[0], want) <= 6e-3
