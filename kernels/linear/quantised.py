"""Weights in eight bits: float8 values and one scale per output row."""

from dataclasses import dataclass

import torch

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0  # largest finite float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Quantised:
    """weight[n, k] = values[n, k] * scale[n]."""

    values: torch.Tensor  # [N, K] float8_e4m3fn
    scale: torch.Tensor  # [N] float32


def quantise(weight: torch.Tensor) -> Quantised:
    """The largest magnitude of each row of weight [N, K] becomes 448; a row of zeros keeps scale 1."""
    wide = weight.float()  # [N, K]
    largest = wide.abs().amax(-1)  # [N]
    scale = torch.where(largest > 0, largest / LARGEST, torch.ones_like(largest))
    return Quantised((wide / scale[:, None]).clamp(-LARGEST, LARGEST).to(FLOAT8), scale)
