"""Decoder-only transformers in plain torch: configuration, RoPE, and the forward pass.

Leaves out the KV cache and attention (the caller's `attend` does both), sampling, and training.
"""

from specdial.engine.models.config import ModelConfig, RopeConfig
from specdial.engine.models.decoder import Attend, Decoder

__all__ = ["Attend", "Decoder", "ModelConfig", "RopeConfig"]
