"""EAGLE-3 heads on disk: a folder with config.json and model.safetensors or pytorch_model.bin, read and written.

Takes the layouts of EAGLE's and SpecForge's checkpoints: the layer under `midlayer.`, `layers.0.` or no name at all,
all of it perhaps under `model.` or `draft_model.` (weights/eagle_files.py). Ours may also hold their matrices in 8
bits, `name.weight` with a scale a row in `name.weight_scale`; other engines do not know that, and config.json says so.
Leaves out heads that compute something else (norms elsewhere, biases), which are refused by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from specdial.engine.models.config import ModelConfig
from specdial.engine.models.decoder import Decoder
from specdial.engine.models.eagle import EagleHead, HeadConfig, HeadWeights, default_taps, head_shapes
from specdial.engine.models.rope_config import RopeConfig
from specdial.engine.weights.eagle_files import AGAIN, checkpoint_files, read_settings, read_tensors
from specdial.engine.weights.wheel import sha256_of
from specdial.policies.artifact import write_bytes_atomic, write_json_atomic
from specdial.policies.errors import UserError

_OTHER_TARGET = "give a head that was trained for this target"
# Ours: the public names that make it up, in order.
_NAMES = {
    "fc": ("fc",),
    "input_norm": ("midlayer.input_layernorm",),
    "hidden_norm": ("midlayer.hidden_norm",),
    "qkv": ("midlayer.self_attn.q_proj", "midlayer.self_attn.k_proj", "midlayer.self_attn.v_proj"),
    "out": ("midlayer.self_attn.o_proj",),
    "mlp_norm": ("midlayer.post_attention_layernorm",),
    "gate_up": ("midlayer.mlp.gate_proj", "midlayer.mlp.up_proj"),
    "down": ("midlayer.mlp.down_proj",),
    "norm": ("norm",),
    "lm_head": ("lm_head",),
}
_SCALE = ".weight_scale"  # behind the name of a matrix in 8 bits: its scales [rows, 1]
_FOLLOWS = "specdial_rope_of_target"  # in config.json, ours: its RoPE is the target's
_REFUSED = ("norm_before_residual", "norm_before_fc", "norm_output", "fc_norm")  # heads that compute otherwise


def load_head(source: str | Path, target: Decoder) -> EagleHead:
    """The head in folder `source`, beside `target`, whose embedding it uses unless it has its own.

    Errors: UserError naming the first file, setting or tensor that is missing, damaged, or made for another target.
    """
    folder = Path(source).expanduser()
    if not folder.is_dir():
        raise UserError(f"no EAGLE head at {str(source)!r}", "give a folder with config.json and its weights")
    raw = read_settings(folder / "config.json")
    files = checkpoint_files(folder)
    tensors = _whole(read_tensors(files), folder.name)
    config = _config(raw, folder.name, target.config, tensors)
    place, dtype = target.device, target.dtype
    shapes = _public_shapes(config)
    unknown = [n for n in tensors if n not in (*shapes, "embed_tokens", "d2t", "t2d") and not n.endswith("inv_freq")]
    if unknown:
        raise UserError(f"{folder.name}: tensor {min(unknown)} is unexpected", "give an EAGLE-3 head of one layer")
    parts = {}
    for name, public in _NAMES.items():
        taken = [_take(tensors, part, shapes[part], folder.name) for part in public]
        parts[name] = (taken[0] if len(taken) == 1 else torch.cat(taken)).to(place, dtype)
    embedding = target.embedding
    if "embed_tokens" in tensors:
        wanted = (target.config.vocab, config.layer.hidden)
        embedding = _take(tensors, "embed_tokens", wanted, folder.name).to(place, dtype)
    elif config.layer.hidden != target.config.hidden:
        raise UserError(
            f"{folder.name}: its width is {config.layer.hidden}, the embedding of {target.config.name} has "
            f"{target.config.hidden}, and it has no embed_tokens",
            _OTHER_TARGET,
        )
    ids = _token_ids(tensors, config, folder.name)
    lines = [f"{path.name} {sha256_of(path)}\n" for path in [folder / "config.json", *files]]
    digest = hashlib.sha256("".join(lines).encode()).hexdigest()
    return EagleHead(config, HeadWeights(**parts), ids, embedding, digest=digest)


def save_head(folder: Path, head: EagleHead, *, int8: bool = False) -> None:
    """Write a head as `load_head` reads it, weights first and each file at once; the embedding is the target's.

    int8: matrices in 8 bits, a scale a row. Other engines then cannot read it.
    """
    c = head.config.layer
    tensors: dict[str, Tensor] = {}
    shapes = _public_shapes(head.config)
    for name, public in _NAMES.items():
        rows = [shapes[part][0] for part in public]
        for part, tensor in zip(public, getattr(head.weights, name).detach().split(rows)):
            tensor = tensor.contiguous().cpu()
            if int8 and tensor.dim() == 2:
                scale = tensor.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 127  # [rows, 1]
                tensors[f"{part}{_SCALE}"] = scale
                tensor = (tensor.float() / scale).round().to(torch.int8)
            tensors[f"{part}.weight"] = tensor
    ids = head.token_ids.cpu()
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(c.vocab, dtype=torch.bool).index_fill(0, ids, True)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "hidden_size": c.hidden,
        "target_hidden_size": head.config.target_hidden,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.intermediate,
        "vocab_size": c.vocab,
        "draft_vocab_size": head.config.draft_vocab,
        "rms_norm_eps": c.norm_eps,
        "max_position_embeddings": c.max_context_tokens,
        "tie_word_embeddings": False,
        "torch_dtype": str(head.weights.fc.dtype).removeprefix("torch."),
        # These count the layers that the states come out of, hence one less.
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in head.config.taps]},
        **({"quantization_config": {"quant_method": "specdial_int8_rows"}} if int8 else {}),
        **_rope(c.rope),
    }
    write_bytes_atomic(folder / "model.safetensors", save(tensors, metadata={"format": "pt"}))
    write_json_atomic(folder / "config.json", config)


def _config(raw: Mapping[str, Any], name: str, target: ModelConfig, tensors: Mapping[str, Tensor]) -> HeadConfig:
    for setting in _REFUSED:
        if raw.get(setting):
            raise UserError(f"{name}: heads with {setting} are not supported", "use one without")
    plain = {**raw, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "tie_word_embeddings": False}
    layer = ModelConfig.from_hf(plain, name=name)
    if layer.vocab != target.vocab:
        raise UserError(f"{name}: its vocabulary is {layer.vocab}, {target.name} has {target.vocab}", _OTHER_TARGET)
    layer = replace(layer, rope=_rope_beside(layer.rope, target.rope, follows=raw.get(_FOLLOWS) is True))
    taps = _taps(raw, name, target)
    target_hidden = raw.get("target_hidden_size") or target.hidden
    if target_hidden != target.hidden:
        raise UserError(f"{name}: reads states {target_hidden} wide, {target.name} has {target.hidden}", _OTHER_TARGET)
    draft_vocab = raw.get("draft_vocab_size") or (len(tensors["lm_head"]) if "lm_head" in tensors else layer.vocab)
    if isinstance(draft_vocab, bool) or not isinstance(draft_vocab, int) or not 0 < draft_vocab <= layer.vocab:
        raise UserError(f"{name}: draft_vocab_size is {draft_vocab!r}, of {layer.vocab} tokens", AGAIN)
    return HeadConfig(layer, target.hidden, draft_vocab, taps)


def _rope_beside(own: RopeConfig, target: RopeConfig, *, follows: bool) -> RopeConfig:
    """A head's RoPE: its config's, where that says nothing plain RoPE of base 10,000, as EAGLE computes it.

    follows: its config says that it takes the target's. It also does if it was trained for the target as it was before
    YaRN extended its context: plain RoPE of the same base.
    """
    before = own.kind == "default" and own.theta == target.theta
    return target if follows or (before and target.kind == "yarn") else own


def _taps(raw: Mapping[str, Any], name: str, target: ModelConfig) -> tuple[int, ...]:
    """The layers whose inputs are read. Under eagle_config their outputs are counted, at the top level their inputs."""
    nested = raw.get("eagle_config")
    nested = nested if isinstance(nested, Mapping) else {}
    keys = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
    given = next((nested[key] for key in keys if nested.get(key)), None)
    after = 1 if given is not None else 0
    given = given if given is not None else next((raw[key] for key in keys if raw.get(key)), None)
    if given is None:
        return default_taps(target.layers)
    whole = isinstance(given, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in given)
    if not whole or not all(0 <= i + after < target.layers for i in given):
        raise UserError(f"{name}: reads layers {given!r}, {target.name} has {target.layers}", _OTHER_TARGET)
    return tuple(i + after for i in given)


def _public_shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Shapes by public name: those of `head_shapes`, what is fused taken apart."""
    c, ours = config.layer, head_shapes(config)
    rows = {
        "qkv": (c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim),
        "gate_up": (c.intermediate, c.intermediate),
    }
    return {
        part: (count, *ours[name][1:])
        for name, public in _NAMES.items()
        for part, count in zip(public, rows.get(name, (ours[name][0],)))
    }


def _whole(tensors: dict[str, Tensor], model: str) -> dict[str, Tensor]:
    """The tensors, with those in 8 bits multiplied by their scales, float32."""
    whole = {name: tensor for name, tensor in tensors.items() if not name.endswith(_SCALE)}
    for name, scale in tensors.items():
        if name.endswith(_SCALE):
            part = name.removesuffix(_SCALE)
            small = whole.get(part)
            if small is None or small.dtype != torch.int8 or scale.shape != (len(small), 1):
                raise UserError(f"{model}: {name} is not the scales of an 8-bit {part}.weight", AGAIN)
            whole[part] = small.float() * scale
    return whole


def _take(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...], model: str) -> Tensor:
    if name not in tensors:
        raise UserError(f"{model}: tensor {name}.weight is missing", "give an EAGLE-3 head")
    tensor = tensors[name]
    if tuple(tensor.shape) != shape:
        raise UserError(
            f"{model}: tensor {name}.weight has shape {tuple(tensor.shape)}, config and target say {shape}",
            _OTHER_TARGET,
        )
    if not tensor.is_floating_point():
        raise UserError(f"{model}: tensor {name}.weight holds {tensor.dtype}", "use an unquantised checkpoint")
    return tensor


def _token_ids(tensors: Mapping[str, Tensor], config: HeadConfig, model: str) -> Tensor:
    """The target's id of every token the head drafts, [draft_vocab] int64, from d2t; t2d must agree with it."""
    place = torch.arange(config.draft_vocab)
    if "d2t" not in tensors:
        if config.draft_vocab == config.layer.vocab:
            return place
        raise UserError(
            f"{model}: d2t is missing, and {config.draft_vocab} of {config.layer.vocab} tokens are drafted",
            "give the checkpoint with its d2t",
        )
    d2t = tensors["d2t"]
    if tuple(d2t.shape) != (config.draft_vocab,) or d2t.is_floating_point() or d2t.dtype == torch.bool:
        raise UserError(f"{model}: d2t is {tuple(d2t.shape)} of {d2t.dtype}, not {config.draft_vocab} integers", AGAIN)
    ids = place + d2t.to(torch.int64)  # [draft_vocab]
    if int(ids.min()) < 0 or int(ids.max()) >= config.layer.vocab or len(ids.unique()) != len(ids):
        raise UserError(f"{model}: d2t does not name {config.draft_vocab} tokens of {config.layer.vocab}", AGAIN)
    if "t2d" in tensors:
        drafted = torch.zeros(config.layer.vocab, dtype=torch.bool).index_fill(0, ids, True)
        if tensors["t2d"].shape != drafted.shape or not torch.equal(tensors["t2d"].to(torch.bool), drafted):
            raise UserError(f"{model}: t2d and d2t name different tokens", AGAIN)
    return ids


def _rope(rope: RopeConfig) -> dict[str, Any]:
    """RoPE as config.json spells it; where it cannot spell factors, that the head takes the target's."""
    if rope.kind == "factors":
        return {_FOLLOWS: True}
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = rope.original_context_tokens
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        scaling |= {} if rope.attention_factor is None else {"attention_factor": rope.attention_factor}
    return {"rope_theta": rope.theta, "rope_scaling": None if rope.kind == "default" else scaling}
