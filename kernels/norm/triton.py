"""Triton kernel of `add_rms_norm`: one program per row, the row held in registers between its two uses."""

import triton
import triton.language as tl

from specdial.kernels.full_attention.plan import await_previous


@triton.jit
def add_rms_norm_kernel(
    x, residual, weight, normed, hidden, eps, BLOCK: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr
):
    """One row: h = residual + x, written over the residual; normed = weight * (h / rms(h)). ADD False: h = x."""
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    scale = tl.load(weight + column, mask=inside, other=0.0)  # constant, so it may come ahead of the wait
    if PDL:
        await_previous()
    place = tl.program_id(0).to(tl.int64) * hidden + column  # [BLOCK]
    row = tl.load(x + place, mask=inside, other=0.0)
    if ADD:
        # The sum is rounded to the dtype before it is squared, as a tensor of that dtype would be.
        row = (row.to(tl.float32) + tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)).to(row.dtype)
        tl.store(residual + place, row, mask=inside)
    wide = row.to(tl.float32)
    rounded = (wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / hidden + eps)).to(row.dtype)
    # A product of two 16-bit floats is exact in float32, so one rounding as in the dtype's own multiplication.
    product = scale.to(tl.float32) * rounded.to(tl.float32)
    tl.store(normed + place, product.to(normed.dtype.element_ty), mask=inside)
