"""Residual addition and RMS norm in one pass, as a decoder does them between its matrix products.

Leaves out the per-head norm of q and k, which `rope_cache` does where it has them in registers.
"""

import torch

from specdial.kernels import Backend
from specdial.kernels.checks import FLOATS, check_backend, check_device, check_dtype, check_shape
from specdial.kernels.norm.reference import add_rms_norm_reference

__all__ = ["add_rms_norm"]

MAX_HIDDEN = 16384  # a row stays in the registers of one program


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, *, backend: Backend
) -> tuple[torch.Tensor, torch.Tensor]:
    """h = residual + x in their dtype; normed = weight * round(h / rms(h)), statistics in float32.

    x: [..., hidden], contiguous, any number of rows; residual: like x, or None for h = x; weight: [hidden].
    Returns (normed, h). normed is new. h is `residual` itself, overwritten IN PLACE (or `x` itself, untouched, when
    there is no residual): whoever keeps the residual stream of an earlier layer copies it first. Rounding is Hugging
    Face's: h to the dtype, h / rms(h) to the dtype, then times weight. On a device with early launch, weight is read
    while the kernel before this one may still run: it is constant, not that kernel's output.
    Raises ValueError on a wrong shape, dtype, device, stride or backend, and when x and residual share memory.
    """
    if x.dim() == 0 or x.numel() == 0:
        raise ValueError(f"x has shape {list(x.shape)}, expected [..., hidden] with at least one row")
    hidden = x.shape[-1]
    check_dtype("x", x, FLOATS)
    _check_contiguous("x", x)
    if residual is not None:
        check_shape("residual", residual, tuple(x.shape))
        check_dtype("residual", residual, (x.dtype,))
        check_device("residual", residual, x.device)
        _check_contiguous("residual", residual)
        if residual.data_ptr() == x.data_ptr():
            raise ValueError("residual is x itself, expected two tensors: residual is overwritten")
    check_shape("weight", weight, (hidden,))
    check_dtype("weight", weight, (x.dtype,))
    check_device("weight", weight, x.device)
    _check_contiguous("weight", weight)
    check_backend(backend, x.device)
    if backend == "reference":
        return add_rms_norm_reference(x, residual, weight, eps)
    if hidden > MAX_HIDDEN:
        raise ValueError(f'x {list(x.shape)} has hidden size {hidden}, backend "triton" takes up to {MAX_HIDDEN}')
    from specdial.kernels.norm import launch

    return launch.add_rms_norm_triton(x, residual, weight, eps)


def _check_contiguous(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"{name} {list(tensor.shape)} has strides {list(tensor.stride())}, expected contiguous")
