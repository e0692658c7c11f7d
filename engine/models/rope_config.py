"""Rotary embedding settings: which scaling, its numbers, and how config.json spells them.

Leaves out the arithmetic (rope.py) and GGUF's spelling (weights/gguf_model.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdial.policies.errors import UserError

ROPE_KINDS = ("default", "linear", "llama3", "yarn", "factors")
_REPAIR = "repair the model's config"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. `kind`: default; linear (positions / factor); llama3; yarn; factors (one divisor a frequency).

    theta: base wavelength. original_context_tokens: context before scaling (llama3, yarn).
    attention_factor: multiplies cos and sin under yarn; None means 0.1 ln(factor) + 1.
    freq_factors: D/2 divisors, the `rope_freqs` tensor of Llama-3.1 GGUF files.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_context_tokens: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    freq_factors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise UserError(f"unknown RoPE scaling {self.kind!r}", f"use a model with one of {', '.join(ROPE_KINDS)}")
        numbers = (self.theta, self.factor, self.low_freq_factor, self.high_freq_factor, self.beta_fast, self.beta_slow)
        if not all(math.isfinite(x) and x > 0 for x in numbers):
            raise UserError(f"RoPE settings must be finite and positive, got {self}", _REPAIR)
        if self.kind in ("llama3", "yarn") and not self.original_context_tokens:
            raise UserError(f"RoPE scaling {self.kind} lacks its original context", _REPAIR)

    @property
    def yarn_attention(self) -> float:
        """What YaRN multiplies cos and sin by: `attention_factor`, or else its paper's 0.1 ln(factor) + 1."""
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], name: str, context_tokens: int) -> RopeConfig:
        """From config.json: `rope_theta` with `rope_scaling`, or transformers 5's `rope_parameters`."""
        scaling = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if scaling.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0) != 1.0:
            raise UserError(f"{name}: partial RoPE is not supported", "use a model that rotates whole heads")
        if kind not in ROPE_KINDS or kind == "factors":
            raise UserError(f"{name}: unknown RoPE scaling {kind!r}", f"use one of {', '.join(ROPE_KINDS[:-1])}")
        attention = scaling.get("attention_factor")
        factor = float(scaling.get("factor") or 1.0)
        mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        if kind == "yarn" and attention is None and mscale and mscale_all and factor > 1:
            attention = (0.1 * mscale * math.log(factor) + 1) / (0.1 * mscale_all * math.log(factor) + 1)
        return cls(
            theta=float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0),
            kind=kind,
            factor=factor,
            original_context_tokens=scaling.get("original_max_position_embeddings") or context_tokens,
            low_freq_factor=float(scaling.get("low_freq_factor") or 1.0),
            high_freq_factor=float(scaling.get("high_freq_factor") or 4.0),
            beta_fast=float(scaling.get("beta_fast") or 32.0),
            beta_slow=float(scaling.get("beta_slow") or 1.0),
            attention_factor=attention,
            truncate=bool(scaling.get("truncate", True)),
        )
