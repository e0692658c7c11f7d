"""Whole files for every reader, to be damaged, and what reads each of them."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import torch
import yaml
from _edits import edited, reshaped, table_edited
from _texts import text_targets
from _tiny import CONFIG, tiny_model
from gguf.quants import quantize
from safetensors.torch import load_file, save_file

from specdial.engine.eagle_training import new_head
from specdial.engine.models.config import ModelConfig
from specdial.engine.models.tensors import tensor_shapes
from specdial.engine.tokenizer import Tokenizer
from specdial.engine.trace.reader import read_costs, read_trace
from specdial.engine.verbs.validate_groups import FILE, Group, KeptGroup, KeptGroups
from specdial.engine.weights import load_model
from specdial.engine.weights.eagle import load_head, save_head
from specdial.engine.weights.gguf_header import GgufFile
from specdial.engine.weights.gguf_model import gguf_config
from specdial.engine.weights.gguf_tokenizer import gguf_tokenizer
from specdial.engine.weights.hf import SafetensorsWeights, read_config, weight_files
from specdial.policies.file import dump_policy, load_policy
from specdial.policies.schema import policy_from_mapping
from specdial.simulator.costs import CostModel
from specdial.simulator.lanes import read_record
from specdial.simulator.synthetic import Shape, write_synthetic_costs, write_trace

Edit = Callable[[bytes, bytes], bytes]


@dataclass(frozen=True, slots=True)
class Target:
    """A file to damage and what reads it. share: of all inputs, in parts; slower readers get fewer."""

    path: Path
    edit: Edit
    read: Callable[[], object]
    share: int
    seed: bytes


def targets(folder: Path) -> dict[str, Target]:
    """Every reader over whole files, made in `folder`."""
    model, hf, eagle, bins = tiny_model(), folder / "hf", folder / "eagle", folder / "pickled"
    gguf_path = folder / "tiny.gguf"
    write_folder(hf)
    write_gguf(gguf_path)
    save_head(eagle, new_head(model.decoder, torch.arange(200), seed=0))
    shutil.copytree(eagle, bins)
    (bins / "model.safetensors").unlink()
    torch.save(load_file(eagle / "model.safetensors"), bins / "pytorch_model.bin")
    write_trace(folder / "trace", Shape(documents=2, new_tokens=12))
    write_synthetic_costs(folder / "costs", (256, 512), (1,), Shape())
    kv = {"budget": 64, "sink": 2, "recent": 8}
    cells = [{"to_context_tokens": 99, "overrides": {"controller": {"kind": "none"}}}]
    policy = {"name": "p", "controller": {"kind": "rate"}, "draft_kv": kv, "cells": cells, "expected": {"speedup": 1.5}}
    (folder / "p.yaml").write_text(dump_policy(policy_from_mapping(policy)))
    hand = yaml.safe_load((folder / "p.yaml").read_text())
    del hand["digest"]  # which would refuse every edit
    (folder / "hand.yaml").write_text(json.dumps(hand))
    config = json.loads((hf / "config.json").read_text())
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "mscale": 1.0}
    (folder / "config.json").write_text(json.dumps({**config, "rope_scaling": scaling, "sliding_window": None}))

    groups = KeptGroups(folder, {})
    for number in range(2):
        groups.save(number, KeptGroup([Group([1.5])], 1.0))

    def all_tensors() -> None:
        weights = SafetensorsWeights(hf)
        for name in weights:
            weights[name]

    def header() -> None:
        file = GgufFile(gguf_path)
        gguf_config(file)
        gguf_tokenizer(file.metadata, "tiny.gguf").encode("a b")

    def tokenizer() -> None:
        found = Tokenizer.from_file(hf / "tokenizer.json")
        found.decode(found.encode("Once upon a time 123 é"))

    def trace() -> None:
        read_record(read_trace(folder / "trace"))

    def costs() -> None:
        CostModel.from_table(read_costs(folder / "costs"))

    def of_hf() -> None:
        ModelConfig.from_hf(json.loads((folder / "config.json").read_text()), name="c")

    made = {
        "policy": (folder / "p.yaml", edited, lambda: load_policy(folder / "p.yaml"), 20),
        "policy by hand": (folder / "hand.yaml", reshaped, lambda: load_policy(folder / "hand.yaml"), 20),
        "config": (folder / "config.json", reshaped, of_hf, 80),
        "config text": (hf / "config.json", edited, lambda: read_config(hf, "c"), 30),
        "gguf header": (gguf_path, edited, header, 30),
        "gguf model": (gguf_path, edited, lambda: load_model(str(gguf_path), device="cpu", dtype="float32"), 2),
        "safetensors": (hf / "model.safetensors", edited, all_tensors, 12),
        "safetensors index": (hf / "model.safetensors.index.json", reshaped, lambda: weight_files(hf), 14),
        "tokenizer": (hf / "tokenizer.json", edited, tokenizer, 3),
        "trace meta": (folder / "trace" / "meta.json", reshaped, trace, 2),
        "trace meta text": (folder / "trace" / "meta.json", edited, trace, 1),
        "trace rounds": (folder / "trace" / "rounds-00000.parquet", edited, trace, 1),
        "trace drafts": (folder / "trace" / "drafts-00001.parquet", edited, trace, 1),
        "trace rounds values": (folder / "trace" / "rounds-00000.parquet", table_edited, trace, 3),
        "trace drafts values": (folder / "trace" / "drafts-00001.parquet", table_edited, trace, 3),
        "costs": (folder / "costs" / "costs.parquet", edited, costs, 2),
        "costs values": (folder / "costs" / "costs.parquet", table_edited, costs, 3),
        "validated groups": (folder / FILE, edited, groups.load, 4),
        "eagle config": (eagle / "config.json", reshaped, lambda: load_head(eagle, model.decoder), 2),
        "eagle tensors": (eagle / "model.safetensors", edited, lambda: load_head(eagle, model.decoder), 1),
        "eagle pickled": (bins / "pytorch_model.bin", edited, lambda: load_head(bins, model.decoder), 2),
        **text_targets(folder / "texts"),
    }  # fmt: skip
    return {name: Target(path, edit, read, n, path.read_bytes()) for name, (path, edit, read, n) in made.items()}


def write_folder(folder: Path) -> None:
    """A tiny model as Hugging Face writes it, with an index and a chat template."""
    folder.mkdir()
    weights = {name: torch.zeros(shape) for name, shape in tensor_shapes(CONFIG)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(weights, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 16, "intermediate_size": 96, "vocab_size": 256, "max_position_embeddings": 4096}
    other = {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, "rope_theta": 1e4, "eos_token_id": [2, 3]}
    (folder / "config.json").write_text(json.dumps({**sizes, **other}))
    Tokenizer.of_bytes()._backend.save(str(folder / "tokenizer.json"))


def write_gguf(path: Path) -> None:
    """The same shape as a GGUF file, its matrices in eight bits."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    letters = [Tokenizer.of_bytes()._backend.id_to_token(i) for i in range(256)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*letters, letters[0] + letters[1]])
    writer.add_token_types([1] * 257)
    writer.add_token_merges([f"{letters[0]} {letters[1]}"])
    kind = gguf.GGMLQuantizationType.Q8_0
    block = {"attn_norm": (64,), "attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
    block |= {"ffn_norm": (64,), "ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}
    shapes = {"token_embd": (257, 64), "output_norm": (64,), **{f"blk.0.{name}": s for name, s in block.items()}}
    for name, shape in shapes.items():
        values, one = torch.ones(shape).numpy(), kind if len(shape) == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{name}.weight", quantize(values, one), raw_dtype=one)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
