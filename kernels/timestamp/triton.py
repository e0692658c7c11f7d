"""Triton kernel of `timestamp`: one thread's reading. Not launched early: it must see the work before it finished."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["first", "last"])
def timestamp_kernel(into, first, last):
    """into[first .. last] = the GPU's global timer in nanoseconds."""
    now = tl.extra.cuda.globaltimer()
    for slot in range(first, last + 1):
        tl.store(into + slot, now)
