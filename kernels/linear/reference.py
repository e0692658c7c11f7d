"""A decoder's matrix product in plain torch: the specification of `linear`."""

import torch
import torch.nn.functional as F

from specdial.kernels.linear.quantised import Quantised
from specdial.kernels.norm.reference import rms_norm_reference
from specdial.kernels.swiglu.reference import swiglu_reference


def linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor | Quantised,
    *,
    bias: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See `linear`."""
    if norm is not None:
        x = rms_norm_reference(x, norm, eps)
    dtype = out_dtype or x.dtype
    if isinstance(weight, Quantised):  # float8 values are exact in float32, the scale is applied to the sum
        product = F.linear(x.float(), weight.values.float()) * weight.scale
        product = (product if bias is None else product + bias).to(dtype)
    elif dtype != x.dtype:
        product = F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    else:
        product = F.linear(x, weight, bias)
    if gated:
        return swiglu_reference(product)
    return product if residual is None else residual.add_(product)
