"""The skinny product: the reference against float64, eight-bit weights, launch shapes, the boundary."""

import itertools

import pytest
import torch

from specdial.kernels.linear import MAX_ROWS, Quantised, linear, quantise
from specdial.kernels.linear.plan import SHARED_BYTES, plan
from specdial.kernels.linear.workspace import ARRIVALS, PARTIALS
from specdial.kernels.norm import add_rms_norm
from specdial.kernels.swiglu import swiglu

EPS = 1e-5
SHAPES = [  # output columns, K, gated, normed
    (2048, 1536, False, True), (1536, 1536, False, False), (8960, 1536, True, True), (1536, 8960, False, False),
    (151936, 1536, False, True), (1152, 896, False, True), (896, 896, False, False), (4864, 896, True, True),
    (896, 4864, False, False), (151936, 896, False, True), (6144, 4096, False, True), (4096, 4096, False, False),
    (14336, 4096, True, True), (4096, 14336, False, False), (128256, 4096, False, True), (960, 576, False, True),
    (576, 576, False, False), (1536, 576, True, True), (576, 1536, False, False), (49152, 576, False, True),
    (3072, 2048, False, True), (2048, 2048, False, False), (8192, 2048, True, True), (2048, 8192, False, False),
    (1, 1, False, False), (7, 33, True, True), (100, 100000, False, False),
]  # fmt: skip


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    shapes = {"x": (2, 3, 40), "weight": (24, 40), "bias": (24,), "norm": (40,), "residual": (2, 3, 24)}
    return {name: torch.randn(shape, generator=random).to(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("eight", [False, True])
@pytest.mark.parametrize("used", [(), ("bias",), ("norm", "bias"), ("norm", "bias", "residual"), ("residual",)])
def test_values_are_the_formula_in_float64(used: tuple[str, ...], eight: bool) -> None:
    t = tensors()
    weight = quantise(t["weight"]) if eight else t["weight"]
    exact = weight.values.double() * weight.scale.double()[:, None] if eight else weight.double()
    x = t["x"].double()
    if "norm" in used:
        x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * t["norm"].double()
    want = x @ exact.T + sum(t[name].double() for name in used if name != "norm")
    got = linear(t["x"], weight, **{name: t[name] for name in used}, eps=EPS, backend="reference")
    torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=1e-5)
    assert (got is t["residual"]) == ("residual" in used)


def test_gate_and_up_in_float64() -> None:
    t = tensors()
    gate, up = (t["x"].double() @ t["weight"].double().T).chunk(2, -1)
    got = linear(t["x"], t["weight"], gated=True, backend="reference")
    torch.testing.assert_close(got.double(), gate * torch.sigmoid(gate) * up, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bits_are_those_of_the_separate_operations(dtype: torch.dtype) -> None:
    t = tensors(dtype)
    normed, _ = add_rms_norm(t["x"], None, t["norm"], EPS, backend="reference")
    product = torch.nn.functional.linear(normed, t["weight"], t["bias"])
    shared = {"norm": t["norm"], "eps": EPS, "backend": "reference"}
    want = t["residual"] + product
    assert torch.equal(linear(t["x"], t["weight"], bias=t["bias"], **shared), product)
    assert torch.equal(linear(t["x"], t["weight"], bias=t["bias"], residual=t["residual"], **shared), want)
    gate_up = torch.nn.functional.linear(normed, t["weight"])
    assert torch.equal(linear(t["x"], t["weight"], gated=True, **shared), swiglu(gate_up, backend="reference"))


def test_float32_out_keeps_the_sums_unrounded() -> None:
    t = tensors(torch.bfloat16)
    got = linear(t["x"], t["weight"], out_dtype=torch.float32, backend="reference")
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), t["x"].double() @ t["weight"].double().T, atol=2e-5, rtol=1e-5)


def test_eight_bits_keep_the_largest_and_three_bits_of_mantissa() -> None:
    weight = torch.randn(50, 64) * torch.logspace(-20, 20, 50)[:, None]
    weight[7] = 0
    small = quantise(weight)
    back = small.values.double() * small.scale.double()[:, None]
    error = (back - weight.double()).abs()
    largest = weight.abs().amax(-1, keepdim=True)
    assert (error <= 2**-4 * weight.abs() + largest / 448 * 2**-9).all()  # half a step, half the smallest step
    torch.testing.assert_close(back.abs().amax(-1, keepdim=True), largest.double(), atol=0, rtol=1e-6)
    assert torch.isfinite(back).all()


@pytest.mark.parametrize("item_bytes", [1, 2])
def test_launch_shapes_cover_k_once_and_fit(item_bytes: int) -> None:
    for (N, K, gated, normed), rows in itertools.product(SHAPES, range(1, MAX_ROWS + 1)):
        c = plan(N, K, rows, item_bytes=item_bytes, gated=gated, normed=normed)
        steps = -(-K // c.block_k)
        each = -(-steps // c.splits)
        assert c.block_m >= rows
        assert c.block_n * c.fold == 64
        assert c.fold * c.block_m >= 16
        assert each * (c.splits - 1) < steps  # every split has a step
        assert c.shared_bytes(item_bytes, gated=gated, normed=normed) <= SHARED_BYTES
        programs = -(-N // c.block_n) * c.splits
        if c.splits > 1:
            assert programs <= 132  # no second wave
            assert programs * c.block_m * (c.block_n * (2 if gated else 1) + 1) <= PARTIALS
            assert programs <= ARRIVALS
        assert c.prefetch_bytes * min(programs, 264) <= 16 << 20


GOOD = {"x": torch.zeros(2, 16), "weight": torch.zeros(8, 16)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(0, 16)}, r"x has shape \[0, 16\]"),
        ({"x": torch.zeros(16, 2).t()}, r"x \[2, 16\] has strides"),
        ({"x": torch.zeros(2, 16).double()}, "x .* dtype torch.float64"),
        ({"weight": torch.zeros(8, 15)}, r"weight has shape \[8, 15\]"),
        ({"weight": torch.zeros(0, 16)}, "expected some rows"),
        ({"weight": torch.zeros(8, 16).half()}, "weight .* dtype torch.float16"),
        ({"weight": torch.zeros(16, 8).t()}, r"weight \[8, 16\] has strides"),
        ({"weight": Quantised(torch.zeros(8, 16), torch.ones(8))}, "weight .* dtype torch.float32"),
        ({"weight": Quantised(quantise(torch.ones(8, 16)).values, torch.ones(7))}, r"scale has shape \[7\]"),
        ({"bias": torch.zeros(7)}, r"bias has shape \[7\]"),
        ({"norm": torch.zeros(8)}, r"norm has shape \[8\]"),
        ({"norm": torch.zeros(16).half()}, "norm .* dtype torch.float16"),
        ({"residual": torch.zeros(2, 16)}, r"residual has shape \[2, 16\]"),
        ({"residual": torch.zeros(8, 2).t()}, r"residual \[2, 8\] has strides"),
        ({"residual": torch.zeros(2, 8), "gated": True}, "neither bias nor residual"),
        ({"bias": torch.zeros(8), "gated": True}, "neither bias nor residual"),
        ({"weight": torch.zeros(7, 16), "gated": True}, "an even number"),
        ({"out_dtype": torch.float16}, "out_dtype is torch.float16"),
        ({"backend": "fast"}, "backend is 'fast'"),
        ({"backend": "triton"}, "needs a CUDA device"),
    ],
)
def test_a_wrong_argument_is_named(change: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=message):
        linear(**({"backend": "reference"} | GOOD | change))


def test_x_cannot_be_its_own_residual() -> None:
    x = torch.zeros(2, 16)
    with pytest.raises(ValueError, match="residual is x itself"):
        linear(x, torch.zeros(16, 16), residual=x, backend="reference")


def test_a_residual_leaves_no_room_for_float32() -> None:
    t = tensors(torch.bfloat16)
    with pytest.raises(ValueError, match=r"out_dtype is torch\.float32"):
        linear(t["x"], t["weight"], residual=t["residual"], out_dtype=torch.float32, backend="reference")
