"""The gated activation: the reference against float64 and, bit for bit, the decoder's expression; the boundary."""

import pytest
import torch

from specdial.kernels.swiglu import swiglu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bits_are_the_decoders(dtype: torch.dtype) -> None:
    gate_up = 4 * torch.randn(2, 3, 200, generator=torch.Generator().manual_seed(0)).to(dtype)
    gate, up = gate_up.chunk(2, -1)
    assert torch.equal(swiglu(gate_up, backend="reference"), torch.nn.functional.silu(gate) * up)


def test_values_are_the_formula_in_float64() -> None:
    gate_up = 4 * torch.randn(7, 64, generator=torch.Generator().manual_seed(1))
    gate, up = gate_up.double().chunk(2, -1)
    want = gate / (1 + torch.exp(-gate)) * up
    torch.testing.assert_close(swiglu(gate_up, backend="reference").double(), want, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("gate_up", "backend", "message"),
    [
        (torch.zeros(2, 5), "reference", r"gate_up has shape \[2, 5\]"),
        (torch.zeros(0, 4), "reference", r"gate_up has shape \[0, 4\]"),
        (torch.zeros(2, 4, dtype=torch.int64), "reference", "gate_up .* dtype torch.int64"),
        (torch.zeros(4, 2).t(), "reference", r"gate_up \[2, 4\] has strides \[1, 2\]"),
        (torch.zeros(2, 4), "fast", "backend is 'fast'"),
    ],
)
def test_a_wrong_argument_is_named(gate_up: torch.Tensor, backend: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        swiglu(gate_up, backend=backend)
