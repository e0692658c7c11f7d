"""Cases for Triton's interpreter: the gated activation against its reference.

Started by test_decode_step_interpreted.
"""

import pytest
import torch

from specdial.kernels.swiglu import swiglu

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3}  # exp may differ in its last bit, and a float16 by two steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 2 * 1536), (3, 2, 34), (5, 2050)], ids=str)
def test_activation_equals_the_reference(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(shape[-1])
    gate_up = (4 * torch.randn(shape)).to(dtype)
    gate_up[..., :4] = torch.tensor([0.0, 100.0, -100.0, -11.0]).to(dtype)
    want = swiglu(gate_up, backend="reference")
    got = swiglu(gate_up, backend="triton")
    torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
