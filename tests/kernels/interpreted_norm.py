"""Cases for Triton's interpreter: the residual add and norm against its reference.

Started by test_decode_step_interpreted.
"""

import pytest
import torch

from specdial.kernels.norm import add_rms_norm

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3}  # the sum's order moves a float16 by one step at most


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 576), (2, 3, 64), (7, 8192), (3, 1001)], ids=str)
@pytest.mark.parametrize("with_residual", [True, False])
def test_norm_equals_the_reference(dtype: torch.dtype, shape: tuple[int, ...], with_residual: bool) -> None:
    torch.manual_seed(shape[-1])
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    residual = torch.randn(shape).to(dtype) if with_residual else None
    copy = None if residual is None else residual.clone()
    want, want_h = add_rms_norm(x, copy, weight, 1e-6, backend="reference")
    normed, h = add_rms_norm(x, residual, weight, 1e-6, backend="triton")
    assert h is (x if residual is None else residual)
    assert torch.equal(h, want_h)
    torch.testing.assert_close(normed, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
