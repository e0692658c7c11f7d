"""The gated activation of a feed-forward layer: silu(gate) * up from the fused gate and up projection."""

import torch

from specdial.kernels import Backend
from specdial.kernels.checks import FLOATS, check_backend, check_dtype
from specdial.kernels.swiglu.reference import swiglu_reference

__all__ = ["swiglu"]


def swiglu(gate_up: torch.Tensor, *, backend: Backend) -> torch.Tensor:
    """silu(gate) * up: [..., intermediate], new, from gate_up [..., 2 * intermediate], contiguous, gate first.

    silu is computed in float32 and rounded to the dtype before the product, as torch does.
    Raises ValueError on a wrong shape, dtype, stride or backend.
    """
    if gate_up.dim() == 0 or gate_up.numel() == 0 or gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up has shape {list(gate_up.shape)}, expected [..., 2 * intermediate] with some rows")
    check_dtype("gate_up", gate_up, FLOATS)
    if not gate_up.is_contiguous():
        strides = list(gate_up.stride())
        raise ValueError(f"gate_up {list(gate_up.shape)} has strides {strides}, expected contiguous")
    check_backend(backend, gate_up.device)
    if backend == "reference":
        return swiglu_reference(gate_up)
    from specdial.kernels.swiglu import launch

    return launch.swiglu_triton(gate_up)
