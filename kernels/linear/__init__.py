"""A decoder's matrix product of few rows, with everything around it: norm before, bias, gate or residual after.

Leaves out many rows: a prefill's product is bound by arithmetic, and torch's own does it.
"""

import torch

from specdial.kernels import Backend
from specdial.kernels.checks import FLOATS, check_backend, check_device, check_dtype, check_shape
from specdial.kernels.linear.plan import MAX_ROWS
from specdial.kernels.linear.quantised import FLOAT8, Quantised, quantise
from specdial.kernels.linear.reference import linear_reference
from specdial.kernels.linear.workspace import LinearWorkspace

__all__ = ["MAX_ROWS", "LinearWorkspace", "Quantised", "linear", "quantise"]


def linear(
    x: torch.Tensor,
    weight: torch.Tensor | Quantised,
    *,
    bias: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
    backend: Backend,
    workspace: LinearWorkspace | None = None,
) -> torch.Tensor:
    """weight @ x for each row of x, [..., N], with what a decoder does around it.

    x: [..., K] contiguous, 1 to MAX_ROWS rows for backend "triton"; weight: [N, K] contiguous, in x's dtype or
    `Quantised`. In this order:
    norm [K]: x becomes norm * x / rms(x) first, with eps in the root, as `add_rms_norm` does;
    bias [N] is added to the product;
    gated: weight is gate rows, then as many up rows; the result is silu(gate) * up, [..., N / 2];
    residual [..., N], in x's dtype: the product, rounded to it, is added IN PLACE, and residual itself is returned.
    out_dtype: of the result, x's by default; torch.float32 leaves the sums unrounded.

    Sums are in float32. Backend "triton" rounds less than "reference" does: neither the normalised x nor gate and up
    are rounded to a 16-bit dtype on their own. On a device with early launch it reads weight, its scale and nothing
    else while the kernel before it may still run: they are constants, not that kernel's output.
    workspace: reused between calls of backend "triton" (one stream at a time); without one, a call that splits K
    allocates and clears its own.
    Raises ValueError on a wrong shape, dtype, device, stride or backend, for gated with bias or residual, and when
    residual is x.
    """
    _check(x, weight, bias=bias, norm=norm, residual=residual, gated=gated, out_dtype=out_dtype)
    check_backend(backend, x.device)
    if backend == "reference":
        return linear_reference(
            x, weight, bias=bias, norm=norm, eps=eps, residual=residual, gated=gated, out_dtype=out_dtype
        )
    rows = x.numel() // x.shape[-1]
    if rows > MAX_ROWS:
        raise ValueError(f'x {list(x.shape)} has {rows} rows, backend "triton" takes up to {MAX_ROWS}')
    from specdial.kernels.linear.launch import linear_triton

    return linear_triton(
        x, weight, bias=bias, norm=norm, eps=eps, residual=residual, gated=gated, out_dtype=out_dtype,
        workspace=workspace,
    )  # fmt: skip


def _check(
    x: torch.Tensor,
    weight: torch.Tensor | Quantised,
    *,
    bias: torch.Tensor | None,
    norm: torch.Tensor | None,
    residual: torch.Tensor | None,
    gated: bool,
    out_dtype: torch.dtype | None,
) -> None:
    """Raise ValueError unless the arguments fit together."""
    values = weight.values if isinstance(weight, Quantised) else weight
    if x.dim() == 0 or x.numel() == 0:
        raise ValueError(f"x has shape {list(x.shape)}, expected [..., K] with at least one row")
    K = x.shape[-1]
    check_shape("weight", values, (None, K))
    N = values.shape[0]
    check_dtype("x", x, FLOATS)
    check_dtype("weight", values, (FLOAT8,) if isinstance(weight, Quantised) else (x.dtype,))
    others: dict[str, torch.Tensor | None] = {"weight": values, "bias": bias, "norm": norm, "residual": residual}
    if isinstance(weight, Quantised):
        check_shape("scale", weight.scale, (N,))
        check_dtype("scale", weight.scale, (torch.float32,))
        others["scale"] = weight.scale
    for name, tensor, shape in (
        ("bias", bias, (N,)), ("norm", norm, (K,)), ("residual", residual, (*x.shape[:-1], N)),
    ):  # fmt: skip
        if tensor is not None:
            check_shape(name, tensor, shape)
            check_dtype(name, tensor, (x.dtype,))
    for name, tensor in {"x": x, **others}.items():
        if tensor is not None:
            check_device(name, tensor, x.device)
            if not tensor.is_contiguous():
                raise ValueError(
                    f"{name} {list(tensor.shape)} has strides {list(tensor.stride())}, expected contiguous"
                )
    if N == 0 or (gated and N % 2):
        raise ValueError(f"weight has shape {list(values.shape)}, expected some rows, an even number of them if gated")
    if gated and (bias is not None or residual is not None):
        raise ValueError("a gated product takes neither bias nor residual")
    if residual is not None and residual.data_ptr() == x.data_ptr():
        raise ValueError("residual is x itself, expected two tensors: residual is overwritten")
    if out_dtype not in (None, x.dtype, torch.float32) or (residual is not None and out_dtype not in (None, x.dtype)):
        raise ValueError(f"out_dtype is {out_dtype}, expected x's, or torch.float32 where there is no residual")
