"""The skinny products: the reference against float64, eight-bit weights, launch shapes, the boundary."""

import itertools

import pytest
import torch

from specdial.kernels.linear import MAX_ROWS, Prepared, Quantised, linear, linear_gated, linear_into_norm, quantise
from specdial.kernels.linear.plan import LONE_BYTES, SHARED_BYTES, plan
from specdial.kernels.linear.prepared import LARGEST_PIECE, PIECE, SHRINK, store
from specdial.kernels.linear.workspace import ARRIVALS, PARTIALS
from specdial.kernels.norm import add_rms_norm
from specdial.kernels.swiglu import swiglu

EPS = 1e-5
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ROUNDING = {  # relative, of one rounding and sums
    torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2e-6, PIECE: 4e-3,
}  # fmt: skip
SHAPES = [  # output columns, K, gated
    (2048, 1536, False), (1536, 1536, False), (8960, 1536, True), (1536, 8960, False), (151936, 1536, False),
    (1152, 896, False), (896, 896, False), (4864, 896, True), (896, 4864, False), (151936, 896, False),
    (6144, 4096, False), (4096, 4096, False), (14336, 4096, True), (4096, 14336, False), (128256, 4096, False),
    (960, 576, False), (576, 576, False), (1536, 576, True), (576, 1536, False), (49152, 576, False),
    (3072, 2048, False), (2048, 2048, False), (8192, 2048, True), (2048, 8192, False),
    (1, 1, False), (7, 33, True), (100, 100000, False),
]  # fmt: skip


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """N = 24, K = 40; `residual` is a stream of hidden size N, `after` a product that follows its norm."""
    random = torch.Generator().manual_seed(0)
    shapes = {
        "x": (2, 3, 40), "weight": (24, 40), "bias": (24,), "residual": (2, 3, 24), "norm": (24,), "after": (10, 24),
    }  # fmt: skip
    return {name: torch.randn(shape, generator=random).to(dtype) for name, shape in shapes.items()}


def exact(weight: torch.Tensor | Quantised) -> torch.Tensor:
    """Weights in float64."""
    if isinstance(weight, Quantised):
        return weight.values.double() * weight.scale.double()[:, None]
    return weight.double()


def normed(h: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """norm * h / rms(h) in float64."""
    return h.double() / (h.double().square().mean(-1, keepdim=True) + EPS).sqrt() * norm.double()


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("eight", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_in_float64(dtype: torch.dtype, biased: bool, eight: bool) -> None:
    t = tensors(dtype)
    weight, x = (quantise(t["weight"]), store(t["x"].float(), PIECE)) if eight else (t["weight"], Prepared(t["x"]))
    want = x.wide().double() @ exact(weight).T + (t["bias"].double() if biased else 0)
    for out_dtype in (dtype, torch.float32) if eight else (None, torch.float32):
        got = linear(x, weight, bias=t["bias"] if biased else None, eps=EPS, out_dtype=out_dtype, backend="reference")
        assert got.dtype == (out_dtype or dtype)
        assert distance(got, want) <= ROUNDING[got.dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_and_up_in_float64(dtype: torch.dtype) -> None:
    t = tensors(dtype)
    gate, up = (t["x"].double() @ t["weight"].double().T).chunk(2, -1)
    got = linear_gated(t["x"], t["weight"], backend="reference")
    assert got.values.dtype == dtype
    assert got.shrink == SHRINK.get(dtype, 1)
    assert got.squares is None
    assert distance(got.wide(), gate * torch.sigmoid(gate) * up) <= ROUNDING[dtype]


def test_gate_and_up_of_pieces_in_float64() -> None:
    t = tensors()
    weight, x = quantise(t["weight"]), store(t["x"], PIECE)
    gate, up = (x.wide().double() @ exact(weight).T).chunk(2, -1)
    got = linear_gated(x, weight, backend="reference")
    assert got.in_pieces
    assert got.shape == (2, 3, 12)
    assert distance(got.wide(), gate * torch.sigmoid(gate) * up) <= ROUNDING[PIECE]


@pytest.mark.parametrize("eight", [False, True])
@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_into_a_norm_and_out_of_it_in_float64(dtype: torch.dtype, pieces: bool, eight: bool) -> None:
    """eight: of this product, pieces: for the one after it."""
    t = tensors(dtype)
    weight, x = (quantise(t["weight"]), store(t["x"].float(), PIECE)) if eight else (t["weight"], Prepared(t["x"]))
    product = (x.wide().double() @ exact(weight).T).to(dtype)
    want = t["residual"].double() + product.double()
    residual = t["residual"].clone()
    x = linear_into_norm(x, weight, residual=residual, norm=t["norm"], pieces=pieces, backend="reference")
    stored = PIECE if pieces else dtype
    assert x.values.dtype == stored
    assert x.shape == residual.shape
    assert distance(residual, want) <= ROUNDING[dtype]
    assert distance(x.wide(), residual.double() * t["norm"].double()) <= ROUNDING[stored]
    assert x.squares is not None
    assert distance(x.squares.sum(0), residual.double().square().sum(-1).flatten()) <= 1e-6
    after = quantise(t["after"]) if pieces else t["after"]
    got = linear(x, after, eps=EPS, out_dtype=torch.float32, backend="reference")
    assert distance(got, normed(residual, t["norm"]) @ exact(after).T) <= ROUNDING[stored]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_agrees_with_the_separate_operations(dtype: torch.dtype) -> None:
    t = tensors(dtype)
    together, apart = t["residual"].clone(), t["residual"].clone()
    product = torch.nn.functional.linear(t["x"], t["weight"])
    after, _ = add_rms_norm(product, apart, t["norm"], EPS, backend="reference")
    want = torch.nn.functional.linear(after, t["after"])
    x = linear_into_norm(t["x"], t["weight"], residual=together, norm=t["norm"], backend="reference")
    got = linear(x, t["after"], eps=EPS, out_dtype=dtype, backend="reference")
    gated = linear_gated(x, t["after"], eps=EPS, backend="reference")
    tolerance = max(1e-5, 3 * ROUNDING[dtype])  # a layer's separate operations round three times as often
    assert distance(together, apart.double()) <= tolerance
    assert distance(got, want.double()) <= tolerance
    assert distance(gated.wide(), swiglu(want, backend="reference").double()) <= 2 * tolerance


def test_squares_may_come_in_any_parts() -> None:
    t = tensors()
    x = linear_into_norm(t["x"], t["weight"], residual=t["residual"], norm=t["norm"], backend="reference")
    assert x.squares is not None
    shares = torch.tensor([0.25, 0.5, 0.25])[:, None]
    pieces = Prepared(x.values, x.shrink, shares * x.squares)
    whole = linear(x, t["after"], eps=EPS, backend="reference")
    torch.testing.assert_close(linear(pieces, t["after"], eps=EPS, backend="reference"), whole)


def test_pieces_keep_six_bits_and_cut_off_what_is_too_large() -> None:
    x = torch.randn(3, 4000) * torch.logspace(-12, 5, 4000)
    error = (store(x, PIECE).wide() - x).abs()
    smallest = 2**-16 / SHRINK[PIECE]
    assert (error <= 2**-6 * x.abs() + smallest / 2).all()  # the second piece's half step, half the smallest step
    assert distance(store(x, PIECE).wide(), x.double()) <= ROUNDING[PIECE]
    largest = 2 * LARGEST_PIECE / SHRINK[PIECE]
    far = torch.tensor([largest, 1e30, -1e30, float("nan")])
    torch.testing.assert_close(
        store(far, PIECE).wide(), torch.tensor([largest, largest, -largest, float("nan")]), equal_nan=True
    )


def test_eight_bits_keep_the_largest_and_three_bits_of_mantissa() -> None:
    weight = torch.randn(50, 64) * torch.logspace(-20, 20, 50)[:, None]
    weight[7] = 0
    small = quantise(weight)
    back = exact(small)
    error = (back - weight.double()).abs()
    largest = weight.abs().amax(-1, keepdim=True)
    assert (error <= 2**-4 * weight.abs() + largest / 448 * 2**-9).all()  # half a step, half the smallest step
    torch.testing.assert_close(back.abs().amax(-1, keepdim=True), largest.double(), atol=0, rtol=1e-6)
    assert torch.isfinite(back).all()


@pytest.mark.parametrize("item_bytes", [1, 2])
def test_launch_shapes_cover_k_once_and_fit(item_bytes: int) -> None:
    for (N, K, gated), rows in itertools.product(SHAPES, range(1, MAX_ROWS + 1)):
        c = plan(N, K, rows, item_bytes=item_bytes, gated=gated)
        steps = -(-K // c.block_k)
        each = -(-steps // c.splits)
        assert c.block_m >= rows
        assert c.block_n * c.fold == 64
        assert c.fold * c.block_m * (2 if item_bytes == 1 and not c.apart else 1) >= 16
        assert c.block_k % ((32 if item_bytes == 1 else 16) * c.fold) == 0  # a tensor-core step of every part
        assert each * (c.splits - 1) < steps  # every split has a step
        programs = -(-N // c.block_n) * c.splits
        assert c.shared_bytes(item_bytes, gated=gated) <= (SHARED_BYTES if programs > 132 else LONE_BYTES)
        if c.splits > 1:
            assert programs <= 132  # no second wave
            assert programs * c.block_m * c.block_n * (2 if gated else 1) <= PARTIALS
            assert programs <= ARRIVALS
        large = N * K * item_bytes * (2 if gated else 1) > 8 << 20
        assert (c.prefetch_bytes == 0) == large
        assert c.prefetch_bytes <= 32 << 10


@pytest.mark.parametrize(
    ("N", "K", "gated", "rows", "item_bytes", "best"),
    [  # columns, step, splits, stages of the fastest of a sweep on one H200
        (2048, 1536, False, 1, 2, (16, 256, 1, 6)),
        (1536, 1536, False, 16, 2, (16, 256, 1, 6)),
        (8960, 1536, True, 1, 2, (32, 64, 1, 4)),
        (8960, 1536, True, 16, 2, (64, 64, 1, 4)),
        (1536, 8960, False, 1, 2, (16, 512, 1, 6)),
        (1536, 8960, False, 16, 2, (16, 256, 1, 6)),
        (151936, 1536, False, 1, 2, (64, 128, 1, 4)),
        (1536, 1536, False, 64, 2, (32, 128, 2, 6)),
    ],
)
def test_the_plan_finds_what_a_sweep_found(
    N: int, K: int, gated: bool, rows: int, item_bytes: int, best: tuple[int, int, int, int]
) -> None:
    c = plan(N, K, rows, item_bytes=item_bytes, gated=gated)
    assert (c.block_n, c.block_k, c.splits, c.stages) == best


GOOD: dict[str, object] = {"x": torch.zeros(2, 16), "weight": torch.zeros(8, 16)}
SPLIT, SMALL = store(torch.zeros(2, 16), PIECE), quantise(torch.ones(8, 16))
PIECES: dict[str, object] = {"x": SPLIT, "weight": SMALL}
INTO = GOOD | {"residual": torch.zeros(2, 8), "norm": torch.zeros(8)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(0, 16)}, r"x has shape \[0, 16\]"),
        ({"x": torch.zeros(16, 2).t()}, r"x \[2, 16\] has strides"),
        ({"x": torch.zeros(2, 16).double()}, "x .* dtype torch.float64"),
        ({"x": Prepared(torch.zeros(2, 16), shrink=0.0)}, "x has shrink 0"),
        ({"x": Prepared(torch.zeros(2, 16), squares=torch.zeros(3, 1))}, r"squares has shape \[3, 1\]"),
        ({"x": Prepared(torch.zeros(2, 16), squares=torch.zeros(0, 2))}, r"squares has shape \[0, 2\]"),
        ({"x": Prepared(torch.zeros(2, 16), squares=torch.zeros(3, 2).half())}, "squares .* dtype torch.float16"),
        ({"weight": torch.zeros(8, 15)}, r"weight has shape \[8, 15\]"),
        ({"weight": torch.zeros(0, 16)}, "expected some rows"),
        ({"weight": torch.zeros(8, 16).half()}, "weight .* dtype torch.float16"),
        ({"weight": torch.zeros(16, 8).t()}, r"weight \[8, 16\] has strides"),
        ({"weight": SMALL}, "float8 weights expect the float8 pieces"),
        (PIECES | {"weight": torch.zeros(8, 16)}, "x .* dtype torch.float8_e5m2"),
        (PIECES, "out_dtype is torch.float8_e5m2"),
        (PIECES | {"x": Prepared(SPLIT.values[:1])}, r"x has shape \[1, 2, 16\], expected \[2, ..., K\]"),
        (PIECES | {"weight": Quantised(torch.zeros(8, 16), torch.ones(8))}, "weight .* dtype torch.float32"),
        (PIECES | {"weight": Quantised(SMALL.values, torch.ones(7))}, r"scale has shape \[7\]"),
        ({"bias": torch.zeros(7)}, r"bias has shape \[7\]"),
        ({"out_dtype": torch.float64}, "out_dtype is torch.float64"),
        ({"backend": "fast"}, "backend is 'fast'"),
        ({"backend": "triton"}, "needs a CUDA device"),
    ],
)
def test_a_wrong_argument_is_named(change: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=message):
        linear(**({"backend": "reference"} | GOOD | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(0, 16)}, r"x has shape \[0, 16\]"),
        ({"x": Prepared(torch.zeros(2, 16), squares=torch.zeros(3, 2))}, "on its way through a norm"),
        ({"residual": torch.zeros(2, 16)}, r"residual has shape \[2, 16\]"),
        ({"residual": torch.zeros(8, 2).t()}, r"residual \[2, 8\] has strides"),
        ({"norm": torch.zeros(16)}, r"norm has shape \[16\]"),
        ({"norm": torch.zeros(8).half()}, "norm .* dtype torch.float16"),
    ],
)
def test_a_wrong_argument_of_a_product_into_a_norm_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear_into_norm(**({"backend": "reference"} | INTO | change))


def test_a_gated_product_needs_as_many_up_rows() -> None:
    with pytest.raises(ValueError, match="as many up rows"):
        linear_gated(torch.zeros(2, 16), torch.zeros(7, 16), backend="reference")


def test_x_cannot_be_its_own_residual() -> None:
    x = torch.zeros(2, 16)
    with pytest.raises(ValueError, match="residual is x itself"):
        linear_into_norm(x, torch.zeros(16, 16), residual=x, norm=torch.zeros(16), backend="reference")
