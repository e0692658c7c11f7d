"""Rows between two products of a decoder: what one leaves for the next one to finish.

An RMS norm needs a whole row before it can divide by it, and programs of a product have a few columns each. So whoever
adds to the residual stream multiplies by the norm's weights and leaves partial sums of squares, and the next product
divides its own result: the division commutes with it.

Float8 weights go to the tensor cores as they are, which want a float8 x as well: two float8_e5m2 pieces, the second
what the first has lost. A value keeps 6 bits or more, all rows have one factor, and both pieces are a bfloat16's bytes.
"""

from dataclasses import dataclass

import torch

PIECE = torch.float8_e5m2
LARGEST_PIECE = 57344.0  # largest finite float8_e5m2
SHRINK = {  # what values are multiplied by; other dtypes have the range of float32
    torch.float16: 2.0**-6,  # 4e6 still fits, and no value is off by more than 2e-6 for it
    PIECE: 2.0**-2,  # 2e5 still fits, and no value is off by more than 3e-5 for it
}


@dataclass(frozen=True, slots=True)
class Prepared:
    """x = values / shrink, or values / shrink / sqrt(mean(h^2) + eps) where squares are given; a product has the eps.

    Float8 values are pieces, that add up over their first dimension. squares add up over parts to sum(h^2) of each row
    of the residual stream h, and values are h times the norm's weights. How many parts there are is up to whoever made
    them.
    """

    values: torch.Tensor  # [..., K], or [2, ..., K] float8_e5m2
    shrink: float = 1.0
    squares: torch.Tensor | None = None  # [parts, rows] float32

    @property
    def in_pieces(self) -> bool:
        """Whether values are pieces."""
        return self.values.dtype == PIECE

    @property
    def shape(self) -> torch.Size:
        """[..., K], of x."""
        return self.values.shape[1:] if self.in_pieces else self.values.shape

    def wide(self) -> torch.Tensor:
        """values / shrink, [..., K] float32, pieces added up."""
        wide = self.values.float()
        return (wide.sum(0) if self.in_pieces else wide) / self.shrink


def store(x: torch.Tensor, dtype: torch.dtype, squares: torch.Tensor | None = None) -> Prepared:
    """x [..., K] float32 as values of `dtype`, in pieces for `PIECE`: larger ones than a piece holds are cut off."""
    shrink = shrink_for(dtype)
    values = x * shrink
    if dtype != PIECE:
        return Prepared(values.to(dtype), shrink, squares)
    high = _piece(values)
    return Prepared(torch.stack((high, _piece(values - high.float()))), shrink, squares)


def shrink_for(dtype: torch.dtype) -> float:
    """The factor of values stored as `dtype`."""
    return SHRINK.get(dtype, 1.0)


def _piece(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-LARGEST_PIECE, LARGEST_PIECE).to(PIECE)
