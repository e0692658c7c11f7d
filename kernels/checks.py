"""Boundary checks shared by the operations: a wrong shape, dtype, device or stride raises ValueError naming it.

They read metadata only, so they never wait for the device. Values (lengths, indices) are the caller's contract.
"""

import os

import torch

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INTEGERS = (torch.int32, torch.int64)


def check_shape(name: str, tensor: torch.Tensor, expected: tuple[int | None, ...]) -> None:
    """Raise unless `tensor` has the expected shape; None accepts any size."""
    shape = tuple(tensor.shape)
    if len(shape) != len(expected) or any(want not in (None, have) for have, want in zip(shape, expected)):
        wanted = ", ".join("any" if size is None else str(size) for size in expected)
        raise ValueError(f"{name} has shape {list(shape)}, expected [{wanted}]")


def check_dtype(name: str, tensor: torch.Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    """Raise unless the dtype is one of `allowed`."""
    if tensor.dtype not in allowed:
        raise ValueError(f"{name} {list(tensor.shape)} has dtype {tensor.dtype}, expected one of {list(allowed)}")


def check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raise unless `tensor` is on `device`."""
    if tensor.device != device:
        raise ValueError(f"{name} {list(tensor.shape)} is on {tensor.device}, expected {device}")


def check_last_stride(name: str, tensor: torch.Tensor) -> None:
    """Raise unless the last dimension is contiguous, which every kernel's vector loads need."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} {list(tensor.shape)} has strides {list(tensor.stride())}, its last must be 1")


def check_backend(backend: str, device: torch.device) -> None:
    """Raise for an unknown backend, and for "triton" on a device it cannot run on. Nothing falls back silently."""
    if backend not in ("reference", "triton"):
        raise ValueError(f'backend is {backend!r}, expected "reference" or "triton"')
    if backend == "triton" and device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f'backend "triton" needs a CUDA device (or TRITON_INTERPRET=1), the tensors are on {device}')
