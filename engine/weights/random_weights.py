"""Random weights for a config, made tensor by tensor on the device: for measuring cost where weights do not matter.

Matrices are N(0, 0.02), norms 1, biases 0, as models are initialised. Leaves out any likeness to a trained model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from specdial.engine.models.config import ModelConfig
from specdial.engine.models.tensors import tensor_shapes

_STD = 0.02


class RandomWeights(Mapping[str, Tensor]):
    """Lazy mapping from tensor names to random tensors; each depends on (seed, name) only."""

    def __init__(self, config: ModelConfig, seed: int, device: torch.device, dtype: torch.dtype) -> None:
        self._shapes = dict(tensor_shapes(config))
        self._seed, self._device, self._dtype = seed, device, dtype

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        out = torch.empty(shape, device=self._device, dtype=self._dtype)
        if name.endswith("norm.weight"):
            return out.fill_(1.0)
        if name.endswith(".bias"):
            return out.zero_()
        word = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()[:7]
        generator = torch.Generator(self._device).manual_seed(int.from_bytes(word))
        return out.normal_(0.0, _STD, generator=generator)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)
