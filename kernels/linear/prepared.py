"""Rows between two products of a decoder: what one leaves for the next one to finish.

An RMS norm needs a whole row before it can divide by it, and programs of a product have a few columns each. So whoever
adds to the residual stream multiplies by the norm's weights and leaves partial sums of squares, and the next product
divides its own result: the division commutes with it.
"""

from dataclasses import dataclass

import torch

SHRINK = 2.0**-6  # what float16 values are multiplied by: 4e6 still fits, and no value is off by more than 2e-6 for it


@dataclass(frozen=True, slots=True)
class Prepared:
    """x = values / shrink, or values / shrink / sqrt(mean(h^2) + eps) where squares are given; a product has the eps.

    squares add up over parts to sum(h^2) of each row of the residual stream h, and values are h times the norm's
    weights. How many parts there are is up to whoever made them.
    """

    values: torch.Tensor  # [..., K]
    shrink: float = 1.0
    squares: torch.Tensor | None = None  # [parts, rows] float32


def shrink_for(dtype: torch.dtype) -> float:
    """The factor of values stored as `dtype`: other dtypes than float16 have the range of float32."""
    return SHRINK if dtype == torch.float16 else 1.0
