"""Damaged and hostile files for every reader: each gives what was meant or a UserError of one line, and nothing else.

Nothing else means: no other exception, no process started, no connection, no file written but by this script, no
memory beyond LIMIT_BYTES. Edits are drawn by chance; guided.py lets them follow what the readers' code does. The last
line on standard output is one JSON document with the counts.

    python tests/soak/fuzz.py --inputs 100000
"""

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
from _edits import edited, reshaped
from _tiny import CONFIG, tiny_model
from gguf.quants import quantize
from safetensors.torch import load_file, save_file

from specdial.engine.eagle_training import new_head
from specdial.engine.models.config import ModelConfig
from specdial.engine.models.tensors import tensor_shapes
from specdial.engine.tokenizer import Tokenizer
from specdial.engine.trace.reader import read_costs, read_trace
from specdial.engine.weights import load_model
from specdial.engine.weights.eagle import load_head, save_head
from specdial.engine.weights.gguf_header import GgufFile
from specdial.engine.weights.gguf_model import gguf_config
from specdial.engine.weights.gguf_tokenizer import gguf_tokenizer
from specdial.engine.weights.hf import SafetensorsWeights, read_config, weight_files
from specdial.policies.errors import UserError
from specdial.policies.file import dump_policy, load_policy
from specdial.policies.schema import policy_from_mapping
from specdial.simulator.costs import CostModel
from specdial.simulator.lanes import read_record
from specdial.simulator.synthetic import Shape, write_synthetic_costs, write_trace

LIMIT_BYTES = 2 << 30
FINE = ("read", "refused")
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
    config = json.loads((hf / "config.json").read_text())
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "mscale": 1.0}
    (folder / "config.json").write_text(json.dumps({**config, "rope_scaling": scaling, "sliding_window": None}))

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
        "costs": (folder / "costs" / "costs.parquet", edited, costs, 2),
        "eagle config": (eagle / "config.json", reshaped, lambda: load_head(eagle, model.decoder), 2),
        "eagle tensors": (eagle / "model.safetensors", edited, lambda: load_head(eagle, model.decoder), 1),
        "eagle pickled": (bins / "pytorch_model.bin", edited, lambda: load_head(bins, model.decoder), 2),
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


def judge(target: Target, data: bytes) -> str:
    """Read the file that `data` makes: "read", "refused", or else what happened and where."""
    target.path.write_bytes(target.edit(target.seed, data))
    try:
        target.read()
    except UserError as error:
        return "refused" if "\n" not in str(error) and error.remedy else f"not a line with a remedy: {error!r}"
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} in {Path(frame.filename).name}:{frame.lineno}: {error}"[:300]
    return "read"


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[list[str]]:
    """What files have no business doing: starting processes, connecting, writing anywhere but in `folder`."""
    deeds: list[str] = []
    watching = [True]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if not watching:
            return
        if event.split(".")[0] in ("subprocess", "socket", "pty") or event in (
            "os.system",
            "os.exec",
            "os.posix_spawn",
        ):
            deeds.append(f"{event} {arguments!r}"[:200])
        elif event == "open" and isinstance(arguments[0], str) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            deeds.extend([f"writes {arguments[0]}"] * (not arguments[0].startswith((str(folder), "/dev/"))))

    sys.addaudithook(hook)
    try:
        yield deeds
    finally:
        watching.clear()


def by_chance(target: Target, inputs: int, seed: int) -> Counter[str]:
    """Outcomes of so many inputs of random bytes, few edits more often than many."""
    chance = random.Random(seed)
    return Counter(judge(target, chance.randbytes(chance.choice((4, 4, 8, 12, 24)))) for _ in range(inputs))


def by_atheris(target: Target, inputs: int, seed: int) -> Counter[str]:
    """The same in a process of its own, which libFuzzer ends; counts come back through a file."""
    import atheris

    told, child = target.path.parent / "counts.json", os.fork()
    if child == 0:
        counts: Counter[str] = Counter()

        def one(data: bytes) -> None:
            counts[judge(target, data)] += 1
            told.write_text(json.dumps(counts))

        atheris.Setup([sys.argv[0], f"-runs={inputs}", f"-seed={seed + 1}", "-max_len=32", "-verbosity=0"], one)
        atheris.Fuzz()
    if os.waitpid(child, 0)[1]:
        raise AssertionError(f"atheris found a crash in {target.path.name}; see above")
    found = Counter(json.loads(told.read_text()))
    told.unlink()
    return found


def main(run: Callable[[Target, int, int], Counter[str]] = by_chance) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="the name of one target")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = {n: t for n, t in targets(folder).items() if options.only in ("", n)}
        resource.setrlimit(resource.RLIMIT_AS, (address_space() + LIMIT_BYTES, resource.RLIM_INFINITY))
        total, counts = sum(t.share for t in found.values()), {}
        with watched(folder) as deeds:
            for label, target in found.items():
                inputs = -(-options.inputs * target.share // total)
                print(f"{label}: {inputs} inputs", file=sys.stderr, flush=True)
                counts[label] = run(target, inputs, options.seed)
                target.path.write_bytes(target.seed)
    inputs = sum(sum(c.values()) for c in counts.values())
    faults = {f"{label}: {what}": n for label, c in counts.items() for what, n in c.items() if what not in FINE}
    faults |= {f"a file made its reader do this: {deed}": 1 for deed in deeds}
    counts = {label: {what: c[what] for what in FINE} for label, c in counts.items()}
    result = {
        "id": "fuzz",
        "inputs": inputs,
        "by": run.__name__,
        "seed": options.seed,
        "targets": counts,
        "faults": faults,
    }
    print(json.dumps(result))
    sys.exit(1 if faults else 0)


def address_space() -> int:
    """Bytes of address space this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
