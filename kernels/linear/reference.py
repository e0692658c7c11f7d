"""A decoder's matrix products in plain torch: the specification of `linear` and of what is fused to it."""

import torch
import torch.nn.functional as F

from specdial.kernels.linear.prepared import Prepared, store
from specdial.kernels.linear.quantised import Quantised


def linear_reference(
    x: Prepared, weight: torch.Tensor | Quantised, *, bias: torch.Tensor | None, eps: float, out_dtype: torch.dtype
) -> torch.Tensor:
    """See `linear`."""
    product = _product(x, weight, eps)
    return (product if bias is None else product + bias).to(out_dtype)


def linear_gated_reference(x: Prepared, weight: torch.Tensor | Quantised, *, eps: float) -> Prepared:
    """See `linear_gated`."""
    gate, up = _product(x, weight, eps).chunk(2, -1)  # [..., N / 2] each
    return store(F.silu(gate) * up, x.values.dtype)


def linear_into_norm_reference(
    x: Prepared, weight: torch.Tensor | Quantised, *, residual: torch.Tensor, norm: torch.Tensor, dtype: torch.dtype
) -> Prepared:
    """See `linear_into_norm`; dtype: of the values."""
    h = residual.add_(_product(x, weight, 0.0).to(residual.dtype)).float()  # [..., N]
    return store(h * norm.float(), dtype, h.square().sum(-1).reshape(1, -1))  # squares [1, rows]


def _product(x: Prepared, weight: torch.Tensor | Quantised, eps: float) -> torch.Tensor:
    """weight @ x, [..., N] float32. Float8 values are exact in float32, their scale is applied to the sum."""
    wide = x.wide()  # [..., K]
    if isinstance(weight, Quantised):
        product = F.linear(wide, weight.values.float()) * weight.scale
    else:
        product = F.linear(wide, weight.float())
    if x.squares is None:
        return product
    mean = x.squares.sum(0).view(wide.shape[:-1]) / wide.shape[-1]  # [...]
    return product * torch.rsqrt(mean + eps)[..., None]
