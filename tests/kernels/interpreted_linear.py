"""Cases for Triton's interpreter: the skinny products against the reference.

Started by test_linear_interpreted. The interpreter's bf16 is wrong, so fp16 and fp32 only. It multiplies float8
exactly but for the smallest, and rounds to it carelessly: a piece may be off by more than a step, of which the second
one makes up for most.
"""

import itertools

import pytest
import torch

from specdial.kernels.linear import (
    LinearWorkspace,
    Prepared,
    Quantised,
    linear,
    linear_gated,
    linear_into_norm,
    quantise,
)
from specdial.kernels.linear.launch import linear_gated_triton, linear_into_norm_triton, linear_triton
from specdial.kernels.linear.plan import LinearConfig
from specdial.kernels.linear.prepared import PIECE, SHRINK, store

TOLERANCE = {torch.float32: 2e-5, torch.float16: 6e-3, PIECE: 0.06}
FLOAT8_TOLERANCE = 5e-4  # of a product at least
EPS = 1e-5
NAN = float("nan")
KINDS = [
    "plain",
    "bias",
    "wide",
    "finish",
    "finish bias",
    "finish wide",
    "gated",
    "finish gated",
    "into",
    "into pieces",
]


def matrix(N: int, K: int, dtype: torch.dtype, eight: bool) -> torch.Tensor | Quantised:
    weight = (torch.randn(N, K) / K**0.5).to(dtype)
    return quantise(weight) if eight else weight


def halfway(rows: int, K: int, dtype: torch.dtype, parts: int = 5) -> Prepared:
    """Rows [1, rows, K] on their way through a norm. Their squares lie between NaNs."""
    h, norm = torch.randn(1, rows, K), torch.randn(K)
    around = torch.full((parts + 2, rows), NAN)
    share = torch.rand(parts, rows)
    around[1:-1] = share / share.sum(0) * h.square().sum(-1)
    return store(h * norm, dtype, around[1:-1])


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, *, eight: bool = False) -> None:
    assert got.dtype == want.dtype
    tolerance = max(TOLERANCE[dtype], FLOAT8_TOLERANCE if eight else 0)
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


def close_rows(got: Prepared, want: Prepared, dtype: torch.dtype, *, eight: bool = False) -> None:
    """Same values unshrunk, and the same sums of squares whatever the parts. dtype: of what comes before them."""
    assert got.values.dtype == want.values.dtype
    assert got.values.shape == want.values.shape
    assert got.shrink == want.shrink == SHRINK.get(got.values.dtype, 1.0)
    close(got.wide(), want.wide(), PIECE if got.in_pieces else dtype, eight=eight)
    assert (got.squares is None) == (want.squares is None)
    if got.squares is not None and want.squares is not None:
        torch.testing.assert_close(
            got.squares.sum(0), want.squares.sum(0), atol=1e-3, rtol=1e-3 if eight else TOLERANCE[dtype]
        )


def compare(
    kind: str, *, N: int, K: int, rows: int, dtype: torch.dtype, eight: bool = False, parts: int = 5,
    config: LinearConfig | None = None, workspace: LinearWorkspace | None = None,
) -> None:  # fmt: skip
    """Both backends on one problem. eight: of weights, and x is in pieces."""
    torch.manual_seed(N + K + rows)
    stored = PIECE if eight else dtype
    x = halfway(rows, K, stored, parts) if "finish" in kind else store(torch.randn(1, rows, K), stored)
    weight = matrix(N, K, dtype, eight)
    if "into" in kind:
        residual, norm = torch.randn(1, rows, N).to(dtype), torch.randn(N).to(dtype)
        h, pieces = residual.clone(), "pieces" in kind
        want = linear_into_norm(x, weight, residual=h, norm=norm, pieces=pieces, backend="reference")
        if config is None:
            got = linear_into_norm(
                x, weight, residual=residual, norm=norm, pieces=pieces, backend="triton", workspace=workspace
            )
        else:
            got = linear_into_norm_triton(
                x, weight, residual=residual, norm=norm, dtype=want.values.dtype, workspace=workspace, config=config
            )
        close(residual, h, dtype, eight=eight)
        close_rows(got, want, dtype, eight=eight)
    elif "gated" in kind:
        if config is None:
            got = linear_gated(x, weight, eps=EPS, backend="triton", workspace=workspace)
        else:
            got = linear_gated_triton(x, weight, eps=EPS, workspace=workspace, config=config)
        close_rows(got, linear_gated(x, weight, eps=EPS, backend="reference"), dtype, eight=eight)
    else:
        bias = torch.randn(N).to(dtype) if "bias" in kind else None
        out_dtype = torch.float32 if "wide" in kind else dtype
        call = {"bias": bias, "eps": EPS, "out_dtype": out_dtype}
        if config is None:
            product = linear(x, weight, **call, backend="triton", workspace=workspace)
        else:
            product = linear_triton(x, weight, **call, workspace=workspace, config=config)
        close(product, linear(x, weight, **call, backend="reference"), dtype, eight=eight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind: str, dtype: torch.dtype) -> None:
    compare(kind, N=100, K=200, rows=3, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_with_weights_in_eight_bits(kind: str, dtype: torch.dtype) -> None:
    compare(kind, N=100, K=256, rows=3, dtype=dtype, eight=True)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("fold", [1, 4])
@pytest.mark.parametrize("kind", ["finish gated", "finish bias", "into pieces"])
def test_pieces_side_by_side_or_apart(kind: str, fold: int, apart: bool) -> None:
    for K in (256, 301):
        compare(kind, N=70, K=K, rows=5, dtype=torch.float32, eight=True,
                config=config(fold=fold, splits=2, block_k=32, apart=apart))  # fmt: skip


@pytest.mark.parametrize(
    ("N", "K", "rows"), [(2, 1, 1), (34, 17, 2), (130, 65, 5), (66, 512, 16), (18, 700, 33), (128, 96, 64)]
)
@pytest.mark.parametrize("kind", ["finish gated", "into", "finish bias"])
def test_odd_shapes(kind: str, N: int, K: int, rows: int) -> None:
    compare(kind, N=N, K=K, rows=rows, dtype=torch.float16)


@pytest.mark.parametrize(("parts", "rows"), [(1, 1), (2, 5), (96, 4), (100, 60), (257, 16)])
def test_squares_in_any_number_of_parts(parts: int, rows: int) -> None:
    """Before the loop where few registers hold them, else piece by piece after it."""
    compare("finish", N=20, K=64, rows=rows, dtype=torch.float32, parts=parts)


def config(
    *, fold: int = 1, splits: int = 1, block_m: int = 16, block_k: int = 16, apart: bool = False
) -> LinearConfig:
    """block_k: of one part."""
    return LinearConfig(64 // fold, block_m, block_k * fold, fold, splits, 4, stages=2, prefetch_bytes=0, apart=apart)


@pytest.mark.parametrize(
    ("fold", "splits", "kind"),  # every two of them together
    [
        (fold, splits, ("finish gated", "finish bias", "into")[(i + j) % 3])
        for i, fold in enumerate((1, 2, 4, 8))
        for j, splits in enumerate((1, 3, 5))
    ],
)
def test_any_fold_and_split_is_the_same_product_and_leaves_the_counters_at_zero(
    kind: str, fold: int, splits: int
) -> None:
    workspace = LinearWorkspace.allocate("cpu", partials=1 << 16, arrivals=64)
    for K in (320, 301):
        workspace.partials.fill_(NAN)
        compare(kind, N=70, K=K, rows=5, dtype=torch.float16, workspace=workspace,
                config=config(fold=fold, splits=splits))  # fmt: skip
        assert workspace.arrivals.count_nonzero() == 0


@pytest.mark.parametrize(("fold", "block_m"), [(4, 4), (8, 2), (2, 8)])
@pytest.mark.parametrize("kind", ["finish", "into"])
def test_few_rows_need_few_columns(kind: str, fold: int, block_m: int) -> None:
    compare(kind, N=50, K=300, rows=2, dtype=torch.float32, config=config(fold=fold, block_m=block_m))


@pytest.mark.parametrize("splits", [1, 2])
def test_nothing_but_the_results_is_written(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, N, K = 3, 50, 64
    x, weight, norm = torch.randn(rows, K), torch.randn(N, K), torch.randn(N)
    made: list[torch.Tensor] = []
    empty = torch.empty

    def between(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        around = empty(shape[0] + 2, *shape[1:], dtype=dtype, device=device).fill_(NAN)
        made.append(around)
        return around[1:-1]

    around = torch.full((rows + 2, N), NAN)
    around[1:-1] = 0
    monkeypatch.setattr(torch, "empty", between)
    workspace = LinearWorkspace(torch.full((1 << 14,), NAN), torch.zeros(8, dtype=torch.int32))
    got = linear_into_norm_triton(
        Prepared(x), weight, residual=around[1:-1], norm=norm, dtype=torch.float32, workspace=workspace,
        config=config(fold=4, splits=splits),
    )  # fmt: skip
    monkeypatch.undo()
    close(around[1:-1], x @ weight.T, torch.float32)
    assert len(made) == 2
    for edges in (around, *made):
        assert edges[0].isnan().all()
        assert edges[-1].isnan().all()
    assert got.values.isfinite().all()
    assert got.squares is not None
    assert got.squares.shape == (4, rows)
    torch.testing.assert_close(got.squares.sum(0), (x @ weight.T).square().sum(-1))


@pytest.mark.parametrize("eight", [False, True])
@pytest.mark.parametrize("backends", list(itertools.product(["reference", "triton"], repeat=2)))
def test_a_layer_by_either_backend_or_both(backends: tuple[str, str], eight: bool) -> None:
    """out, gate_up, down, qkv of one layer: what one backend leaves for a norm the other finishes. eight: not out."""
    torch.manual_seed(1)
    hidden, inner, rows, dtype = 48, 80, 3, torch.float16
    shapes = {"out": (hidden, 64), "gate_up": (2 * inner, hidden), "down": (hidden, inner), "qkv": (96, hidden)}
    weights = {name: matrix(*shape, dtype, eight and name != "out") for name, shape in shapes.items()}
    norms = [(1 + 0.2 * torch.randn(hidden)).to(dtype) for _ in range(2)]
    mixed, start = torch.randn(rows, 64).to(dtype), 3 * torch.randn(rows, hidden).to(dtype)

    def layer(left: str, right: str) -> torch.Tensor:
        h = start.clone()
        x = linear_into_norm(mixed, weights["out"], residual=h, norm=norms[0], pieces=eight, backend=left)
        active = linear_gated(x, weights["gate_up"], eps=EPS, backend=right)
        x = linear_into_norm(active, weights["down"], residual=h, norm=norms[1], pieces=eight, backend=left)
        return linear(x, weights["qkv"], eps=EPS, out_dtype=torch.float32, backend=right)

    got, want = layer(*backends), layer("reference", "reference")
    assert (got - want).norm() <= (0.02 if eight else 2e-3) * want.norm()


def test_large_activations_stay_finite_in_half_precision() -> None:
    """h * norm is ten times what float16 holds; the next product gets it nevertheless."""
    torch.manual_seed(0)
    rows, hidden = 2, 32
    h = torch.randn(1, rows, hidden).half()
    h[..., 5] = 60000.0
    zero, ten = torch.zeros(hidden, 16).half(), torch.full((hidden,), 10.0).half()
    weight = torch.randn(24, hidden).half()
    x = linear_into_norm(torch.zeros(1, rows, 16).half(), zero, residual=h, norm=ten, backend="triton")
    assert x.values.isfinite().all()
    exact = h.double() * torch.rsqrt(h.double().square().mean(-1, keepdim=True) + EPS) * 10 @ weight.double().T
    got = linear(x, weight, eps=EPS, out_dtype=torch.float32, backend="triton")
    torch.testing.assert_close(got.double(), exact, atol=0.05, rtol=6e-3)


def test_a_workspace_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="workspace holds 1 partials and 1 counters"):
        linear_triton(
            Prepared(torch.zeros(1, 64)), torch.zeros(64, 64), bias=None, eps=0.0, out_dtype=torch.float32,
            config=config(splits=2), workspace=LinearWorkspace.allocate("cpu", partials=1, arrivals=1),
        )  # fmt: skip


def test_more_rows_than_a_tile_holds_are_refused() -> None:
    with pytest.raises(ValueError, match="has 65 rows"):
        linear(torch.zeros(65, 16), torch.zeros(16, 16), backend="triton")
