"""The time at a point of a stream of work, written where the work is done: no host waits for it."""

import time

import torch

from specdial.kernels import Backend
from specdial.kernels.checks import check_backend, check_dtype, check_last_stride, check_shape

__all__ = ["timestamp"]


def timestamp(into: torch.Tensor, first: int, last: int, *, backend: Backend) -> None:
    """Write the clock, in nanoseconds, to into[first .. last]; into: [n] int64. Clocks of two devices do not compare.

    Backend "triton" reads the GPU's global timer once everything before it in the stream is finished.
    Raises ValueError on a wrong shape, dtype, stride, slot or backend.
    """
    check_shape("into", into, (None,))
    check_dtype("into", into, (torch.int64,))
    check_last_stride("into", into)
    if not 0 <= first <= last < into.shape[0]:
        raise ValueError(f"slots are {first} to {last}, into has {into.shape[0]}")
    check_backend(backend, into.device)
    if backend == "reference":
        into[first : last + 1] = time.perf_counter_ns()
        return
    from specdial.kernels.timestamp.triton import timestamp_kernel

    timestamp_kernel[(1,)](into, first, last, num_warps=1)
