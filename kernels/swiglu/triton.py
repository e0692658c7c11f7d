"""Triton kernel of `swiglu`: one program per row and block of columns."""

import triton
import triton.language as tl

from specdial.kernels.full_attention.plan import await_previous


@triton.jit
def swiglu_kernel(gate_up, out, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Axis 0: row. Axis 1: BLOCK of its `width` output columns."""
    if PDL:
        await_previous()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    silu = tl.div_rn(wide, 1.0 + tl.exp(-wide)).to(gate.dtype)
    product = silu.to(tl.float32) * up.to(tl.float32)  # exact for 16-bit floats, so rounded once
    tl.store(out + row * width + column, product.to(out.dtype.element_ty), mask=inside)
