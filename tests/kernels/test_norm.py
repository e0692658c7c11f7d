"""The residual add and norm: the reference against float64 and, bit for bit, against the decoder; the boundary."""

import pytest
import torch

from specdial.engine.models.decoder import rms_norm
from specdial.kernels.norm import add_rms_norm

EPS = 1e-5


def tensors(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(shape[-1])
    x, residual = (3 * torch.randn(shape, generator=random).to(dtype) for _ in range(2))
    return x, residual, torch.randn(shape[-1], generator=random).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bits_are_the_decoders(dtype: torch.dtype) -> None:
    x, residual, weight = tensors((2, 3, 576), dtype)
    want_h = residual + x
    normed, h = add_rms_norm(x, residual, weight, EPS, backend="reference")
    assert torch.equal(h, want_h)
    assert torch.equal(normed, rms_norm(want_h, weight, EPS))
    alone, same = add_rms_norm(x, None, weight, EPS, backend="reference")
    assert torch.equal(alone, rms_norm(x, weight, EPS))
    assert same is x


def test_values_are_the_formula_in_float64() -> None:
    x, residual, weight = tensors((5, 100), torch.float32)
    h = x.double() + residual.double()
    want = weight.double() * h / (h.square().mean(-1, keepdim=True) + EPS).sqrt()
    normed, _ = add_rms_norm(x, residual, weight, EPS, backend="reference")
    torch.testing.assert_close(normed.double(), want, atol=1e-6, rtol=1e-6)


def test_the_residual_is_overwritten_and_x_is_not() -> None:
    x, residual, weight = tensors((4, 64), torch.float32)
    before, sum_before = x.clone(), x + residual
    _, h = add_rms_norm(x, residual, weight, EPS, backend="reference")
    assert h is residual
    assert torch.equal(residual, sum_before)
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(0, 64)}, r"x has shape \[0, 64\]"),
        ({"x": torch.zeros(64, 2).t()}, r"x \[2, 64\] has strides \[1, 2\]"),
        ({"x": torch.zeros(2, 64, dtype=torch.int32)}, "x .* dtype torch.int32"),
        ({"residual": torch.zeros(2, 32)}, r"residual has shape \[2, 32\]"),
        ({"residual": torch.zeros(2, 64).half()}, "residual .* dtype torch.float16"),
        ({"weight": torch.zeros(32)}, r"weight has shape \[32\]"),
        ({"weight": torch.zeros(64).half()}, "weight .* dtype torch.float16"),
        ({"backend": "fast"}, "backend is 'fast'"),
        ({"backend": "triton"}, "needs a CUDA device"),
    ],
)
def test_a_wrong_argument_is_named(change: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    call = {"x": torch.zeros(2, 64), "residual": torch.zeros(2, 64), "weight": torch.ones(64), "eps": EPS}
    with pytest.raises(ValueError, match=message):
        add_rms_norm(**(call | {"backend": "reference"} | change))


def test_x_cannot_be_its_own_residual() -> None:
    x = torch.zeros(2, 64)
    with pytest.raises(ValueError, match="residual is x itself"):
        add_rms_norm(x, x, torch.ones(64), EPS, backend="reference")
