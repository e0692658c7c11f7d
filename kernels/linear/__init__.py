"""A decoder's matrix products of few rows, with everything around them: norm, bias, gate, residual.

Leaves out many rows: a prefill's product is bound by arithmetic, and torch's own does it.
"""

import torch

from specdial.kernels import Backend
from specdial.kernels.checks import FLOATS, check_backend, check_device, check_dtype, check_shape
from specdial.kernels.linear.plan import MAX_ROWS
from specdial.kernels.linear.prepared import PIECE, Prepared
from specdial.kernels.linear.quantised import FLOAT8, Quantised, quantise
from specdial.kernels.linear.reference import linear_gated_reference, linear_into_norm_reference, linear_reference
from specdial.kernels.linear.workspace import LinearWorkspace

__all__ = [
    "MAX_ROWS", "LinearWorkspace", "Prepared", "Quantised", "linear", "linear_gated", "linear_into_norm", "quantise",
]  # fmt: skip


def linear(
    x: torch.Tensor | Prepared,
    weight: torch.Tensor | Quantised,
    *,
    bias: torch.Tensor | None = None,
    eps: float = 0.0,
    out_dtype: torch.dtype | None = None,
    backend: Backend,
    workspace: LinearWorkspace | None = None,
) -> torch.Tensor:
    """weight @ x + bias for each row of x, [..., N] in out_dtype, by default that of x's values, which pieces have not.

    x: [..., K], its values contiguous, 1 to MAX_ROWS rows for backend "triton"; weight: [N, K] contiguous, in x's
    dtype, or `Quantised` where x is in float8 pieces; bias: [N]. eps belongs to the norm that x has been prepared for,
    and is not used otherwise.

    Sums are in float32, and so is everything up to the one rounding of the result; within a step of K (a few hundred
    elements) a GPU's tensor cores keep 14 bits of the sums of float8 products. On a device with early launch parts
    of the weights move to the L2 cache while the kernel before may still run; nothing is read before its end.
    workspace: reused between calls of backend "triton" (one stream at a time); without one, a call that splits K
    allocates and clears its own. This paragraph holds for every function here.
    Raises ValueError on a wrong shape, dtype, device, stride or backend.
    """
    x = _checked(x, weight, backend)
    out_dtype = out_dtype or x.values.dtype
    if out_dtype not in FLOATS:
        raise ValueError(f"out_dtype is {out_dtype}, expected one of {', '.join(map(str, FLOATS))}")
    if bias is not None:
        _check_dense("bias", bias, (_columns(weight),), FLOATS, x.values.device)
    if backend == "reference":
        return linear_reference(x, weight, bias=bias, eps=eps, out_dtype=out_dtype)
    from specdial.kernels.linear.launch import linear_triton

    return linear_triton(x, weight, bias=bias, eps=eps, out_dtype=out_dtype, workspace=workspace)


def linear_gated(
    x: torch.Tensor | Prepared,
    weight: torch.Tensor | Quantised,
    *,
    eps: float = 0.0,
    backend: Backend,
    workspace: LinearWorkspace | None = None,
) -> Prepared:
    """silu(gate) * up, [..., N / 2], of weight @ x: weight is gate rows, then as many up rows. See `linear`.

    The values have x's dtype, and are pieces if those of x are; float16 and pieces are shrunk.
    """
    x = _checked(x, weight, backend)
    if _columns(weight) % 2:
        raise ValueError(f"weight has {_columns(weight)} rows, expected gate rows and as many up rows")
    if backend == "reference":
        return linear_gated_reference(x, weight, eps=eps)
    from specdial.kernels.linear.launch import linear_gated_triton

    return linear_gated_triton(x, weight, eps=eps, workspace=workspace)


def linear_into_norm(
    x: torch.Tensor | Prepared,
    weight: torch.Tensor | Quantised,
    *,
    residual: torch.Tensor,
    norm: torch.Tensor,
    pieces: bool = False,
    backend: Backend,
    workspace: LinearWorkspace | None = None,
) -> Prepared:
    """h = residual + weight @ x, and what the next product needs of norm * h / rms(h). See `linear`.

    residual: [..., N], overwritten IN PLACE by h; the product is rounded to its dtype before it is added. norm: [N], in
    residual's dtype. x: as `linear` takes it, not itself on its way through a norm.
    The values returned are a new tensor in residual's dtype, or float8 pieces, which `Quantised` weights want. Float16
    and pieces are shrunk.
    Raises ValueError as `linear` does, and when residual is x.
    """
    x = _checked(x, weight, backend)
    if x.squares is not None:
        raise ValueError("x is on its way through a norm, expected rows that are finished")
    _check_dense("residual", residual, (*x.shape[:-1], _columns(weight)), FLOATS, x.values.device)
    _check_dense("norm", norm, (_columns(weight),), (residual.dtype,), x.values.device)
    if residual.data_ptr() == x.values.data_ptr():
        raise ValueError("residual is x itself, expected two tensors: residual is overwritten")
    dtype = PIECE if pieces else residual.dtype
    if backend == "reference":
        return linear_into_norm_reference(x, weight, residual=residual, norm=norm, dtype=dtype)
    from specdial.kernels.linear.launch import linear_into_norm_triton

    return linear_into_norm_triton(x, weight, residual=residual, norm=norm, dtype=dtype, workspace=workspace)


def _checked(
    x: torch.Tensor | Prepared, weight: torch.Tensor | Quantised, backend: Backend,
) -> Prepared:  # fmt: skip
    """x as rows for a product with this weight. Raises ValueError unless they fit together."""
    rows = x if isinstance(x, Prepared) else Prepared(x)
    values, matrix = rows.values, weight.values if isinstance(weight, Quantised) else weight
    if not rows.shape or values.numel() == 0 or (rows.in_pieces and values.shape[0] != 2):
        wanted = "[2, ..., K]" if rows.in_pieces else "[..., K]"
        raise ValueError(f"x has shape {list(values.shape)}, expected {wanted} with at least one row")
    count = rows.shape.numel() // rows.shape[-1]
    if isinstance(weight, Quantised) and not rows.in_pieces:
        raise ValueError(
            f"x has dtype {values.dtype}, float8 weights expect the float8 pieces of a product before them"
        )
    _check_dense("x", values, tuple(values.shape), (PIECE,) if isinstance(weight, Quantised) else FLOATS, values.device)
    if rows.shrink <= 0:
        raise ValueError(f"x has shrink {rows.shrink}, expected a positive factor")
    if rows.squares is not None:
        _check_dense("squares", rows.squares, (None, count), (torch.float32,), values.device)
        if rows.squares.shape[0] == 0:
            raise ValueError(f"squares has shape {list(rows.squares.shape)}, expected at least one part")
    dtypes = (FLOAT8,) if isinstance(weight, Quantised) else (values.dtype,)
    _check_dense("weight", matrix, (None, values.shape[-1]), dtypes, values.device)
    if matrix.shape[0] == 0:
        raise ValueError(f"weight has shape {list(matrix.shape)}, expected some rows")
    if isinstance(weight, Quantised):
        _check_dense("scale", weight.scale, (matrix.shape[0],), (torch.float32,), values.device)
    check_backend(backend, values.device)
    if backend == "triton" and count > MAX_ROWS:
        raise ValueError(f'x {list(rows.shape)} has {count} rows, backend "triton" takes up to {MAX_ROWS}')
    return rows


def _columns(weight: torch.Tensor | Quantised) -> int:
    return (weight.values if isinstance(weight, Quantised) else weight).shape[0]


def _check_dense(
    name: str, tensor: torch.Tensor, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:  # fmt: skip
    check_shape(name, tensor, shape)
    check_dtype(name, tensor, dtypes)
    check_device(name, tensor, device)
    if not tensor.is_contiguous():
        raise ValueError(f"{name} {list(tensor.shape)} has strides {list(tensor.stride())}, expected contiguous")
