"""The header of a GGUF file: metadata and where each tensor lies; every declared size is held against the file's.

The gguf library's own reader keeps a NumPy view per token and merge (9 s and 0.5 GB for Qwen's vocabulary), and
trusts declared sizes; its block sizes and dequantisers are used, its reader is not. Leaves out writing and big endian.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from specdial.policies.errors import UserError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_CHUNK_ELEMENTS = 1 << 22  # dequantise 16 MB of float32 at a time: NumPy's temporaries are several times that


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies: shape in torch's order, quantised type, byte range in the file."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset_bytes: int
    size_bytes: int


class GgufFile:
    """An opened GGUF file. `metadata`: key to value; `tensors`: name to GgufTensor; data is read on demand.

    Errors: UserError when the file is missing, is not GGUF v2/v3, or is cut short.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as f:
                self._data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise UserError(f"no model file {path}", "give the path of a .gguf file") from None
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise UserError(f"cannot read {path}: {error}", "give a readable .gguf file") from None
        if self._data[:4] != b"GGUF":
            raise UserError(f"{path} is not a GGUF file", "give a file that begins with the bytes GGUF")
        self._at = 4
        version = self._scalar("<I")
        if version not in (2, 3):
            raise UserError(f"{path} is GGUF version {version}", "convert the model to GGUF version 3, little endian")
        tensor_count, key_count = self._scalar("<Q"), self._scalar("<Q")
        self._fits(tensor_count * 24 + key_count * 12)
        self.metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("<I"))
        self.tensors = self._read_tensors(tensor_count)

    def _truncated(self, what: str) -> UserError:
        return UserError(f"{self.path} is truncated or damaged: {what}", "download the model file again")

    def _fits(self, size_bytes: int) -> None:
        if size_bytes > len(self._data) - self._at:
            raise self._truncated(f"{size_bytes} bytes declared at {self._at}, the file has {len(self._data)}")

    def _scalar(self, code: str) -> Any:
        size = struct.calcsize(code)
        self._fits(size)
        (value,) = struct.unpack_from(code, self._data, self._at)
        self._at += size
        return value

    def _string(self) -> str:
        size = self._scalar("<Q")
        self._fits(size)
        raw = self._data[self._at : self._at + size]
        self._at += size
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self._truncated(f"a name or text at {self._at - size} is not UTF-8") from None

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise self._truncated(f"unknown value type {kind} at {self._at}")
        item, count = self._scalar("<I"), self._scalar("<Q")
        if item == _STRING:
            self._fits(count * 8)
            return [self._string() for _ in range(count)]
        if item not in _SCALARS:
            raise self._truncated(f"unknown array type {item} at {self._at}")
        size = struct.calcsize(_SCALARS[item]) * count
        self._fits(size)
        values = np.frombuffer(self._data, dtype=_SCALARS[item], count=count, offset=self._at).tolist()
        self._at += size
        return values

    def _read_tensors(self, count: int) -> dict[str, GgufTensor]:
        placed = []
        for _ in range(count):
            name, dims = self._string(), self._scalar("<I")
            if dims > 4:
                raise self._truncated(f"tensor {name} has {dims} dimensions")
            shape = tuple(reversed([self._scalar("<Q") for _ in range(dims)]))
            placed.append((name, shape, self._scalar("<I"), self._scalar("<Q")))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise self._truncated(f"alignment {alignment!r}")
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in placed:
            try:
                quantisation = GGMLQuantizationType(kind)
            except ValueError:
                raise UserError(
                    f"{self.path}: tensor {name} has unknown type {kind}", "use a model of another quantisation"
                ) from None
            block, block_bytes = GGML_QUANT_SIZES[quantisation]
            if name in tensors or not math.prod(shape) or not shape or shape[-1] % block:
                raise self._truncated(f"tensor {name} is there twice or its shape {shape} is odd")
            size = math.prod(shape) // block * block_bytes
            if start + offset + size > len(self._data):
                raise self._truncated(f"tensor {name} ends at byte {start + offset + size} of {len(self._data)}")
            tensors[name] = GgufTensor(shape, quantisation, start + offset, size)
        return tensors

    def load(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Tensor `name` dequantised to `dtype` on the CPU, a few megabytes at a time.

        Errors: KeyError for an unknown name; UserError for a type the gguf library does not dequantise.
        """
        tensor = self.tensors[name]
        out = torch.empty(tensor.shape, dtype=dtype)
        rows, width = math.prod(tensor.shape[:-1]), tensor.shape[-1]
        raw = np.frombuffer(self._data, np.uint8, tensor.size_bytes, tensor.offset_bytes).reshape(rows, -1)
        flat = out.view(rows, width)
        step = max(1, _CHUNK_ELEMENTS // width)
        try:
            for row in range(0, rows, step):
                block = dequantize(np.array(raw[row : row + step]), tensor.kind)  # a copy: the file may be unaligned
                flat[row : row + step] = torch.from_numpy(np.asarray(block, dtype=np.float32).reshape(-1, width))
        except NotImplementedError:  # the library's word for a type it only knows the size of
            raise UserError(
                f"{self.path}: cannot dequantise {tensor.kind.name} (tensor {name})",
                "use a model quantised as F16, BF16, Q8_0, Q4_0/1, Q5_0/1, Q2_K..Q6_K or IQ*",
            ) from None
        return out
