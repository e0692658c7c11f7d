"""What a decoder is: sizes, RoPE, biases, limits; read from config.json, from GGUF metadata, or from a named shape.

Leaves out everything that changes how it runs (device, dtype, cache): those are arguments elsewhere.
Anything the decoder could not reproduce exactly (other activations, MoE, partial RoPE) is refused here, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdial.engine.models.rope_config import RopeConfig
from specdial.policies.errors import UserError

__all__ = ["ModelConfig", "RopeConfig"]

ARCHITECTURES = {  # HF class: (our name, bias on q/k/v, RMSNorm on q and k)
    "LlamaForCausalLM": ("llama", False, False),
    "MistralForCausalLM": ("mistral", False, False),
    "Qwen2ForCausalLM": ("qwen2", True, False),
    "Qwen3ForCausalLM": ("qwen3", False, True),
}
_REPAIR = "repair the model's config"
_USE_KNOWN = f"use a model of {', '.join(ARCHITECTURES)}"
# What the classes of `transformers` assume when config.json leaves a key out.
_DEFAULT_CONTEXT_TOKENS = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and switches of one decoder; `max_context_tokens` is what it can attend to without a sliding mask.

    Errors: UserError if the sizes do not fit together.
    """

    name: str
    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_context_tokens: int
    norm_eps: float
    rope: RopeConfig
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    sliding_window: int | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "max_context_tokens")
        for size in sizes:
            value = getattr(self, size)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
                raise UserError(f"{self.name}: {size} is {value!r}, not a positive integer", _REPAIR)
        if self.layers > 1000 or self.heads % self.kv_heads or self.head_dim % 2 or not 0 < self.norm_eps < 1:
            raise UserError(
                f"{self.name}: {self.layers} layers, {self.heads} heads over {self.kv_heads} kv heads of dim "
                f"{self.head_dim}, norm_eps {self.norm_eps} do not make a decoder",
                _REPAIR,
            )
        if not all(isinstance(i, int) for i in self.eos_ids) or not isinstance(self.bos_id, int | None):
            raise UserError(f"{self.name}: eos_token_id {self.eos_ids!r}, bos_token_id {self.bos_id!r}", _REPAIR)
        factors = self.rope.freq_factors
        if factors is not None and len(factors) != self.head_dim // 2:
            raise UserError(f"{self.name}: {len(factors)} RoPE factors for head dim {self.head_dim}", "repair the file")

    def check_context(self, context_tokens: int) -> None:
        """Raise UserError if `context_tokens` (prompt and output) is more than the model can attend to exactly."""
        if context_tokens <= self.max_context_tokens:
            return
        window = self.sliding_window is not None and self.sliding_window <= self.max_context_tokens
        what = "sliding window (masks beyond it are not supported)" if window else "context"
        raise UserError(
            f"{context_tokens} tokens exceed {self.name}'s {what} of {self.max_context_tokens}",
            f"set the context and new tokens to {self.max_context_tokens} or less together",
        )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, name: str | None = None) -> ModelConfig:
        """From the object in config.json. Errors: UserError naming what is missing or unsupported."""
        name = name or str(config.get("_name_or_path") or "model")
        try:
            return cls._from_hf(config, name)
        except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:
            cause = " ".join(str(error).split())
            raise UserError(f"{name}: a value in config.json is of the wrong kind ({cause})", _REPAIR) from None

    @classmethod
    def _from_hf(cls, config: Mapping[str, Any], name: str) -> ModelConfig:
        named = config.get("architectures") or ["(none)"]
        if named[0] not in ARCHITECTURES:
            raise UserError(f"{name}: unknown architecture {named[0]}", _USE_KNOWN)
        architecture, qkv_bias, qk_norm = ARCHITECTURES[named[0]]
        for key, wanted in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
            if config.get(key, wanted) != wanted:
                raise UserError(f"{name}: {key}={config[key]!r} is not supported", _USE_KNOWN)
        need = _Needed(config, name)
        heads, hidden = need.integer("num_attention_heads"), need.integer("hidden_size")
        eos = config.get("eos_token_id")
        window = config.get("sliding_window")
        if architecture in ("llama",) or (architecture != "mistral" and not config.get("use_sliding_window", False)):
            window = None
        context = config.get("max_position_embeddings") or _DEFAULT_CONTEXT_TOKENS[architecture]
        return cls(
            name=name,
            architecture=architecture,
            layers=need.integer("num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // max(heads, 1),
            intermediate=need.integer("intermediate_size"),
            vocab=need.integer("vocab_size"),
            max_context_tokens=min(context, window) if window else context,
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=RopeConfig.from_hf(config, name, context),
            qkv_bias=qkv_bias,
            qk_norm=qk_norm,
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            sliding_window=window,
            bos_id=config.get("bos_token_id"),
            eos_ids=tuple(eos) if isinstance(eos, list) else (() if eos is None else (eos,)),
        )


class _Needed:
    """Reads required integers, naming the key and the model when one is missing or not an integer."""

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        self.values, self.name = values, name

    def integer(self, key: str) -> int:
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise UserError(f"{self.name}: {key} is {value!r}, not a positive integer", _REPAIR)
        return value
