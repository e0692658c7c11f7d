"""Rotary position embedding: inverse frequencies for every scaling, and the rotation itself.

Leaves out caching of cos and sin: they are made once a forward pass, which is cheap beside one layer.
"""

import math

import torch
from torch import Tensor

from specdial.engine.models.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies [D/2] float32 on the CPU, and the factor that multiplies cos and sin.

    Sources: Llama 3.1's scaling by wavelength; YaRN (Peng et al. 2023, eq. 17-23), both as transformers computes them.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim  # [D/2]
    inverse = 1.0 / (rope.theta**exponents)  # [D/2]
    if rope.kind == "linear":
        return inverse / rope.factor, 1.0
    if rope.kind == "factors":
        return inverse / torch.tensor(rope.freq_factors, dtype=torch.float32), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, inverse), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, inverse, head_dim)
    return inverse, 1.0


def _llama3(rope: RopeConfig, inverse: Tensor) -> Tensor:
    original = rope.original_context_tokens or 0
    wavelength = 2 * math.pi / inverse  # [D/2] tokens
    scaled = torch.where(wavelength > original / rope.low_freq_factor, inverse / rope.factor, inverse)
    smooth = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (wavelength >= original / rope.high_freq_factor) & (wavelength <= original / rope.low_freq_factor)
    return torch.where(between, (1 - smooth) * scaled / rope.factor + smooth * scaled, scaled)


def _yarn(rope: RopeConfig, inverse: Tensor, head_dim: int) -> tuple[Tensor, float]:
    original = rope.original_context_tokens or 0

    def dimension(rotations: float) -> float:
        """The dimension that turns `rotations` times over the original context."""
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as transformers: no division by zero
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)  # [D/2]
    return inverse / rope.factor * ramp + inverse * (1 - ramp), rope.yarn_attention


def cos_sin(positions: Tensor, inverse: Tensor, attention_factor: float) -> tuple[Tensor, Tensor]:
    """cos and sin, each [B, T, 1, D] float32, of integer positions [B, T] and frequencies [D/2]."""
    angle = positions[..., None].float() * inverse  # [B, T, D/2]
    angle = torch.cat((angle, angle), dim=-1)[..., None, :]  # [B, T, 1, D]
    return angle.cos() * attention_factor, angle.sin() * attention_factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [B, T, heads, D] by halves (Hugging Face's pairing of i with i + D/2), in float32, back in x's dtype."""
    half = x.shape[-1] // 2
    swapped = torch.cat((-x[..., half:], x[..., :half]), dim=-1)  # [B, T, heads, D]
    return (x * cos + swapped * sin).to(x.dtype)
