"""A decoder's config and weights out of a GGUF file, under Hugging Face's tensor names.

llama.cpp stores Llama's q and k with rows permuted for interleaved RoPE; that is undone here. Leaves out the
tokenizer (engine/tokenizer.py) and every architecture but llama (Mistral included), qwen2 and qwen3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from specdial.engine.models.config import ModelConfig, RopeConfig
from specdial.engine.weights.gguf_header import GgufFile
from specdial.policies.errors import UserError

ARCHITECTURES = {"llama": (False, False), "qwen2": (True, False), "qwen3": (False, True)}  # qkv bias, q/k norm
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_FROM_GGUF = {theirs: ours for ours, theirs in _IN_LAYER.items()}
_END_OF_GENERATION = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "</s>")
_CONTROL = 3  # tokenizer.ggml.token_type of special tokens


class GgufWeights(Mapping[str, Tensor]):
    """Lazy mapping from Hugging Face names to dequantised tensors; nothing is kept once handed out."""

    def __init__(self, file: GgufFile, config: ModelConfig, dtype: torch.dtype) -> None:
        self._file, self._config, self._dtype = file, config, dtype
        self._names = {_hf_name(name): name for name in file.tensors if name != "rope_freqs.weight"}

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._file.load(self._names[name], self._dtype)
        if self._config.architecture != "llama":
            return tensor
        if ".q_proj." in name:
            return _unpermute(tensor, self._config.heads)
        return _unpermute(tensor, self._config.kv_heads) if ".k_proj." in name else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _hf_name(name: str) -> str:
    for ours, theirs in _TOP.items():
        if name == theirs:
            return ours
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _FROM_GGUF:
        return f"model.layers.{parts[1]}.{_FROM_GGUF[parts[2]]}.{parts[3]}"
    return name  # unknown: Decoder.from_weights reports it under its own name


def _unpermute(tensor: Tensor, heads: int) -> Tensor:
    """Rows from llama.cpp's order (pairs i, i+1) to Hugging Face's (pairs i, i + D/2), head by head."""
    if tensor.shape[0] % (2 * heads):
        return tensor  # not heads x D rows: from_weights names the tensor and its shape
    return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(tensor.shape)


def gguf_config(file: GgufFile) -> ModelConfig:
    """The config of a GGUF file. Errors: UserError for an unknown architecture or a missing or odd key."""
    meta, where = file.metadata, file.path.name
    architecture = meta.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UserError(f"{where}: unknown architecture {architecture!r}", f"use one of {', '.join(ARCHITECTURES)}")

    def get(key: str, default: Any = None) -> Any:
        return meta.get(f"{architecture}.{key}", default)

    def integer(key: str) -> int:
        value = get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise UserError(
                f"{where}: {architecture}.{key} is {value!r}", "use a file with this key, a positive integer"
            )
        return value

    if get("expert_count"):
        raise UserError(f"{where}: mixtures of experts are not supported", "use a dense model")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise UserError(f"{where}: tensor token_embd.weight is missing or not a matrix", "use a complete model file")
    heads, hidden, context = (
        integer("attention.head_count"),
        integer("embedding_length"),
        integer("context_length"),
    )
    head_dim = get("attention.key_length") or hidden // heads
    if get("rope.dimension_count", head_dim) != head_dim or get("attention.value_length", head_dim) != head_dim:
        raise UserError(f"{where}: partial RoPE or values narrower than keys are not supported", "use another model")
    epsilon = get("attention.layer_norm_rms_epsilon")
    if not isinstance(epsilon, float):
        raise UserError(f"{where}: {architecture}.attention.layer_norm_rms_epsilon is missing", "use a complete file")
    window = get("attention.sliding_window") or None
    qkv_bias, qk_norm = ARCHITECTURES[architecture]
    return ModelConfig(
        name=" ".join(str(meta.get("general.name") or file.path.stem).split()),
        architecture=architecture,
        layers=integer("block_count"),
        hidden=hidden,
        heads=heads,
        kv_heads=get("attention.head_count_kv") or heads,
        head_dim=head_dim,
        intermediate=integer("feed_forward_length"),
        vocab=embedding.shape[0],
        max_context_tokens=min(context, window) if window else context,
        norm_eps=epsilon,
        rope=_rope(file, get),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        tied_embeddings="output.weight" not in file.tensors,
        sliding_window=window,
        bos_id=meta.get("tokenizer.ggml.bos_token_id"),
        eos_ids=end_ids(meta),
    )


def _rope(file: GgufFile, get: Any) -> RopeConfig:
    theta = float(get("rope.freq_base", 10000.0))
    if "rope_freqs.weight" in file.tensors:
        divisors = file.load("rope_freqs.weight").flatten().tolist()
        return RopeConfig(theta=theta, kind="factors", freq_factors=tuple(divisors))
    kind = get("rope.scaling.type") or ("linear" if get("rope.scale_linear") else "none")
    factor = float(get("rope.scaling.factor") or get("rope.scale_linear") or 1.0)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return RopeConfig(theta=theta)
    original = get("rope.scaling.original_context_length") or get("context_length")
    attention = get("rope.scaling.attn_factor")
    if kind == "yarn" and attention is not None:
        # llama.cpp multiplies YaRN's own factor by this one; ours replaces it.
        plain = RopeConfig(theta=theta, kind=kind, factor=factor, original_context_tokens=original)
        attention = float(attention) * plain.yarn_attention
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        original_context_tokens=original,
        beta_fast=float(get("rope.scaling.yarn_beta_fast") or 32.0),
        beta_slow=float(get("rope.scaling.yarn_beta_slow") or 1.0),
        attention_factor=attention,
    )


def end_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end a generation: eos, eot, and the control tokens known to end a turn or a text."""
    ids = [metadata.get("tokenizer.ggml.eos_token_id"), metadata.get("tokenizer.ggml.eot_token_id")]
    tokens, kinds = metadata.get("tokenizer.ggml.tokens") or [], metadata.get("tokenizer.ggml.token_type") or []
    if len(tokens) == len(kinds):
        control = {tokens[i]: i for i, kind in enumerate(kinds) if kind == _CONTROL}
        ids += [control.get(text) for text in _END_OF_GENERATION]
    return tuple(dict.fromkeys(i for i in ids if isinstance(i, int)))
