"""Page-locked host memory in one range, which the device reads and writes at the same addresses as the host.

torch's own pinned tensors are rounded up to a power of two, which would waste up to half of what is asked here. So
memory is mapped, touched by several threads, and locked piece by piece. A copy must not cross from one piece into
another. Needs a CUDA device. Leaves out what is kept in it (offload).
"""

import ctypes
import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

PORTABLE_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped
THREADS = 16  # more do not lock faster


class PinnedMemory:
    """`host` is the memory as a tensor of bytes; `on_device` makes a tensor of the device of the same bytes."""

    def __init__(self, size_bytes: int, pieces: int) -> None:
        """Zeros. Raises RuntimeError where they cannot be locked, OSError where there is no such range.

        pieces: of equal size, in whole pages.
        """
        if size_bytes % (pieces * mmap.PAGESIZE):
            raise RuntimeError(f"{size_bytes} bytes are not {pieces} pieces of whole pages")
        mapped = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without them has more pages to lock
            mapped.madvise(mmap.MADV_HUGEPAGE)
        self.host = torch.frombuffer(mapped, dtype=torch.uint8)  # [size_bytes]
        locked: list[int] = []
        weakref.finalize(self, unlock, locked)
        with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as threads:
            list(threads.map(partial(lock, locked), self.host.chunk(pieces)))

    def on_device(self) -> Tensor:
        """The same bytes [size_bytes] for kernels, over the link. The memory stays locked as long as this lives."""
        return torch.as_tensor(Shared(self), device="cuda")


class Shared:
    """What torch makes a tensor of the device from, and keeps while that tensor lives."""

    def __init__(self, memory: PinnedMemory) -> None:
        self._memory = memory
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (memory.host.numel(),),
            "typestr": "|u1",
            "data": (memory.host.data_ptr(), False),
            "version": 3,
        }


def lock(locked: list[int], piece: Tensor) -> None:
    """Touch a piece of memory, lock it, and add its address to `locked`."""
    ctypes.memset(piece.data_ptr(), 0, piece.nbytes)  # by this thread alone
    result = int(torch.cuda.cudart().cudaHostRegister(piece.data_ptr(), piece.nbytes, PORTABLE_MAPPED))
    if result:
        raise RuntimeError(f"cudaHostRegister of {piece.nbytes} bytes: error {result}")
    locked.append(piece.data_ptr())


def unlock(addresses: list[int]) -> None:
    """Unlock pieces, once nothing is under way to or from them."""
    torch.cuda.synchronize()
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)
