"""Cases for Triton's interpreter: the skinny product against the reference.

Started by test_linear_interpreted. The interpreter's bf16 is wrong, so fp16 and fp32 only.
"""

import pytest
import torch

from specdial.kernels.linear import LinearWorkspace, Quantised, linear, quantise
from specdial.kernels.linear.launch import linear_triton
from specdial.kernels.linear.plan import LinearConfig

TOLERANCE = {torch.float32: 2e-5, torch.float16: 6e-3}
EPS = 1e-5
OPTIONS: list[dict[str, object]] = [  # what a decoder asks for: qkv, out and down, gate_up, head, and plain
    {"norm": True, "bias": True},
    {"norm": True},
    {"residual": True},
    {"norm": True, "gated": True},
    {"out_dtype": torch.float32},
    {"norm": True, "out_dtype": torch.float32},
    {"bias": True, "residual": True},
    {},
]


def problem(
    options: dict[str, object], *, N: int, K: int, rows: int, dtype: torch.dtype, eight: bool = False
) -> tuple[torch.Tensor, torch.Tensor | Quantised, dict[str, object]]:
    """x [1, rows, K], the weight and the call's options, with tensors for the flags."""
    torch.manual_seed(N + K + rows)
    x = torch.randn(1, rows, K).to(dtype)
    weight = (torch.randn(N, K) / K**0.5).to(dtype)
    tensors = {"norm": (K,), "bias": (N,), "residual": (1, rows, N)}
    call = {name: torch.randn(tensors[name]).to(dtype) if name in tensors else value for name, value in options.items()}
    return x, quantise(weight) if eight else weight, call | {"eps": EPS}


def compare(
    options: dict[str, object], *, config: LinearConfig | None = None, workspace: LinearWorkspace | None = None,
    **shape: object,
) -> None:  # fmt: skip
    """Both backends on one problem; the residual is overwritten by both."""
    x, weight, call = problem(options, **shape)
    residual = call.pop("residual", None)
    want = linear(x, weight, **call, residual=None if residual is None else residual.clone(), backend="reference")
    if config is None:
        got = linear(x, weight, **call, residual=residual, backend="triton", workspace=workspace)
    else:
        got = linear_triton(x, weight, **call, residual=residual, config=config, workspace=workspace)
    assert (got is residual) == (residual is not None)
    assert got.dtype == want.dtype
    tolerance = TOLERANCE[x.dtype]
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option(options: dict[str, object], dtype: torch.dtype) -> None:
    compare(options, N=100, K=200, rows=3, dtype=dtype)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_with_weights_in_eight_bits(options: dict[str, object]) -> None:
    compare(options, N=100, K=256, rows=3, dtype=torch.float16, eight=True)


@pytest.mark.parametrize(
    ("N", "K", "rows"), [(2, 1, 1), (34, 17, 2), (130, 65, 5), (66, 512, 16), (18, 700, 33), (128, 96, 64)]
)
@pytest.mark.parametrize("options", [{"norm": True, "gated": True}, {"residual": True}], ids=str)
def test_odd_shapes(options: dict[str, object], N: int, K: int, rows: int) -> None:
    compare(options, N=N, K=K, rows=rows, dtype=torch.float16)


def config(*, fold: int = 1, splits: int = 1, block_m: int = 16) -> LinearConfig:
    return LinearConfig(64 // fold, block_m, 16 * fold, fold, splits, warps=4, stages=2, prefetch_bytes=0)


@pytest.mark.parametrize("fold", [1, 2, 4, 8])
@pytest.mark.parametrize("splits", [1, 3, 5])
@pytest.mark.parametrize("options", [{"norm": True, "gated": True}, {"norm": True, "bias": True}], ids=str)
def test_any_fold_and_split_is_the_same_product_and_leaves_the_counters_at_zero(
    options: dict[str, object], fold: int, splits: int
) -> None:
    workspace = LinearWorkspace.allocate("cpu", partials=1 << 16, arrivals=64)
    for K in (320, 301):
        workspace.partials.fill_(float("nan"))
        compare(options, N=70, K=K, rows=5, dtype=torch.float16, workspace=workspace,
                config=config(fold=fold, splits=splits))  # fmt: skip
        assert workspace.arrivals.count_nonzero() == 0


@pytest.mark.parametrize(("fold", "block_m"), [(4, 4), (8, 2), (2, 8)])
def test_few_rows_need_few_columns(fold: int, block_m: int) -> None:
    compare({"norm": True}, N=50, K=300, rows=2, dtype=torch.float32, config=config(fold=fold, block_m=block_m))


def test_nothing_but_the_result_is_written() -> None:
    rows, N = 3, 50
    x, weight, _ = problem({}, N=N, K=64, rows=rows, dtype=torch.float32)
    around = torch.full((rows + 2, N), float("nan"))
    around[1:-1] = 0
    got = linear(x[0], weight, residual=around[1:-1], backend="triton")
    torch.testing.assert_close(got, x[0] @ weight.T, atol=1e-5, rtol=1e-5)
    assert around[0].isnan().all()
    assert around[-1].isnan().all()


def test_large_activations_stay_finite_in_half_precision() -> None:
    x, weight, call = problem({"norm": True}, N=32, K=128, rows=2, dtype=torch.float16)
    x[..., 5] = 30000.0
    call["norm"] = torch.full_like(call["norm"], 10.0)
    want = linear(x, weight, **call, backend="reference")
    torch.testing.assert_close(linear(x, weight, **call, backend="triton"), want, atol=0.05, rtol=6e-3)


def test_a_workspace_too_small_is_refused() -> None:
    x, weight, _ = problem({}, N=64, K=64, rows=1, dtype=torch.float32)
    with pytest.raises(ValueError, match="workspace holds 1 partials and 1 counters"):
        linear_triton(
            x, weight, config=config(splits=2), workspace=LinearWorkspace.allocate("cpu", partials=1, arrivals=1)
        )


def test_more_rows_than_a_tile_holds_are_refused() -> None:
    with pytest.raises(ValueError, match="has 65 rows"):
        linear(torch.zeros(65, 16), torch.zeros(16, 16), backend="triton")
