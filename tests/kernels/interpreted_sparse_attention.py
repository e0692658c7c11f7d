"""Cases for Triton's interpreter: sparse attention's kernel against the reference.

Started by test_sparse_attention_interpreted. The interpreter's bf16 is wrong, so fp16 and fp32 only.
"""

import pytest
import torch

from specdial.kernels.sparse_attention import SparseWorkspace, rotate_and_attend, sparse_attention, workspace_for
from specdial.kernels.sparse_attention.triton import SparseConfig, sizes, sparse_attention_triton


def problem(
    *, G: int = 1, T: int = 1, D: int = 64, keys: int = 63, budget: int = 8, page: int = 1, drafted: int = 0
) -> dict[str, torch.Tensor]:
    """Two sequences of about `keys` cached keys, the rest of the buffers NaN, the slots past the count garbage."""
    torch.manual_seed(G * 100 + T)
    B, Hk = 2, 2
    tail_start = torch.tensor([keys, max(1, keys // 2)]) // page * page
    lengths = tail_start + drafted
    S = int(lengths.max()) + T + 3
    k, v = torch.randn(B, Hk, S, D), torch.randn(B, Hk, S, D)
    for b in range(B):
        k[b, :, int(lengths[b]) + T :] = float("nan")
        v[b, :, int(lengths[b]) + T :] = float("nan")
    counts = torch.minimum(torch.full((B, Hk), budget), tail_start[:, None] // page)
    counts[1, 1] = 0
    indices = torch.full((B, Hk, budget), 2**30 // page, dtype=torch.int32)
    for b in range(B):
        for h in range(Hk):
            chosen = torch.randperm(int(tail_start[b]) // page)[: int(counts[b, h])].sort().values
            indices[b, h, : len(chosen)] = chosen.int()
    q = torch.randn(B, T, Hk * G, D)
    return {
        "q": q, "k_cache": k, "v_cache": v, "indices": indices, "counts": counts, "tail_start": tail_start,
        "lengths": lengths,
    }  # fmt: skip


def compare(call: dict[str, torch.Tensor], tolerance: float, **options: object) -> None:
    """Both backends on one problem."""
    tensors = [call[name] for name in ("q", "k_cache", "v_cache", "indices", "counts")]
    where = {"tail_start": call["tail_start"], "lengths": call["lengths"]}
    got = sparse_attention(*tensors, backend="triton", **where, **options)
    same = {name: option for name, option in options.items() if name in ("page", "ancestors")}
    want = sparse_attention(*tensors, backend="reference", **where, **same)
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("G", [1, 3, 4, 6, 7, 8])
@pytest.mark.parametrize("T", [1, 5])
def test_groups_and_rows(G: int, T: int) -> None:
    compare(problem(G=G, T=T), 1e-5)


@pytest.mark.parametrize(("keys", "budget"), [(1, 1), (63, 63), (1000, 40), (1000, 65)])
def test_odd_lengths(keys: int, budget: int) -> None:
    compare(problem(keys=keys, budget=budget, T=2, D=128, G=2), 1e-5)


@pytest.mark.parametrize(("page", "drafted", "T"), [(16, 0, 3), (4, 9, 1), (16, 40, 2)])
def test_pages_and_drafted_tokens(page: int, drafted: int, T: int) -> None:
    compare(problem(keys=150, budget=3, page=page, drafted=drafted, T=T, G=2), 1e-5, page=page)


@pytest.mark.parametrize(("T", "G", "page", "drafted"), [(7, 3, 16, 5), (18, 1, 1, 0)])
def test_trees(T: int, G: int, page: int, drafted: int) -> None:
    ancestors = (torch.rand(2, T, T) < 0.3) | torch.eye(T, dtype=torch.bool)
    call = problem(keys=70, budget=3, page=page, drafted=drafted, T=T, G=G)
    compare(call, 1e-5, page=page, ancestors=ancestors)


def test_long_drafts_take_several_row_blocks() -> None:
    compare(problem(T=33, G=2), 1e-5)


def test_half_precision_is_read_as_such() -> None:
    call = problem(G=3, T=2, D=128)
    compare({name: x.half() if x.is_floating_point() else x for name, x in call.items()}, 5e-3)


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_any_split_merges_to_the_same_result_and_leaves_the_counters_at_zero(splits: int) -> None:
    call = problem(G=3, T=2, keys=90, budget=40, drafted=3)
    config = SparseConfig(block_m=16, block_n=16, splits=splits, warps=4, stages=2)
    partials, arrivals = sizes(4, 6, 64, config)
    workspace = SparseWorkspace.allocate(partials, arrivals, "cpu")
    tensors = [call[name] for name in ("q", "k_cache", "v_cache", "indices", "counts")]
    where = {"tail_start": call["tail_start"], "lengths": call["lengths"]}
    want = sparse_attention(*tensors, backend="reference", **where)
    for _ in range(2):
        workspace.partials.fill_(float("nan"))
        got = sparse_attention_triton(*tensors, **where, workspace=workspace, config=config)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        assert workspace.arrivals.count_nonzero() == 0


def test_a_workspace_too_small_is_refused() -> None:
    call = problem()
    tensors = [call[name] for name in ("q", "k_cache", "v_cache", "indices", "counts")]
    with pytest.raises(ValueError, match="workspace holds 1 partials"):
        sparse_attention_triton(
            *tensors, tail_start=call["tail_start"], lengths=call["lengths"],
            workspace=SparseWorkspace.allocate(1, 1, "cpu"), config=SparseConfig(16, 16, 2, 4, 2),
        )  # fmt: skip


def test_an_expanded_selection_is_read_through_its_strides() -> None:
    call = problem(G=2)
    call["indices"] = call["indices"][:, :1].expand(-1, 2, -1)
    call["counts"] = torch.tensor([5, 0])
    compare(call, 1e-5)


def test_a_workspace_made_for_the_shapes_is_enough_and_reusable() -> None:
    call = problem(G=3, T=2, keys=400, budget=300)
    call = {name: x.half() if x.is_floating_point() else x for name, x in call.items()}
    workspace = workspace_for(call["q"].shape, call["k_cache"], call["indices"])
    assert workspace.arrivals.numel() == 4  # four (sequence, kv head) pairs, split
    for _ in range(2):
        compare(call, 5e-3, workspace=workspace)


@pytest.mark.parametrize(("G", "D", "page", "drafted", "dtype"), [
    (6, 128, 16, 9, torch.float32), (1, 64, 1, 0, torch.float32), (3, 64, 4, 2, torch.float16),
])  # fmt: skip
@pytest.mark.parametrize("splits", [1, 3])
def test_a_drafted_token_is_rotated_cached_and_attended_to_in_one_launch(
    G: int, D: int, page: int, drafted: int, dtype: torch.dtype, splits: int
) -> None:
    call = problem(G=G, D=D, keys=70, budget=3 if page > 1 else 30, page=page, drafted=drafted)
    B, Hk, S, _ = call["k_cache"].shape
    for b, length in enumerate(call["lengths"]):  # the new token's key is not there yet
        call["k_cache"][b, :, length] = call["v_cache"][b, :, length] = float("nan")
    qkv = torch.randn(B, 1, (G + 2) * Hk * D)
    turn = torch.rand(S + 2, D // 2) * 6
    tables = {"cos": turn.cos(), "sin": turn.sin()}
    call = {name: x.to(dtype) if x.is_floating_point() else x for name, x in (call | {"qkv": qkv}).items()}
    where = {"tail_start": call["tail_start"], "lengths": call["lengths"], "page": page}
    caches = {backend: (call["k_cache"].clone(), call["v_cache"].clone()) for backend in ("reference", "triton")}
    want = rotate_and_attend(
        call["qkv"], *caches["reference"], call["indices"], call["counts"], backend="reference", **tables, **where
    )
    config = SparseConfig(block_m=16, block_n=16, splits=splits, warps=4, stages=2)
    got = sparse_attention_triton(
        call["qkv"].view(B, 1, -1, D), *caches["triton"], call["indices"], call["counts"], config=config,
        angles=(tables["cos"], tables["sin"]), **where,
    )  # fmt: skip
    tolerance = 1e-5 if dtype == torch.float32 else 5e-3
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
    for written, expected in zip(caches["triton"], caches["reference"]):
        torch.testing.assert_close(written, expected, atol=tolerance, rtol=tolerance, equal_nan=True)
