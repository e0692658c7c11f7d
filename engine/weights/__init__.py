"""From what a user writes after `model.source=` to a decoder, its tokenizer and where both came from.

Leaves out the formats themselves: gguf_header and gguf_model, hf (safetensors), random_weights, wheel.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from specdial.engine.models.config import ModelConfig
from specdial.engine.models.decoder import Decoder
from specdial.engine.models.shapes import SHAPES
from specdial.engine.tokenizer import Tokenizer
from specdial.engine.weights.gguf_header import GgufFile
from specdial.engine.weights.gguf_model import GgufWeights, gguf_config
from specdial.engine.weights.gguf_tokenizer import gguf_tokenizer
from specdial.engine.weights.hf import SafetensorsWeights, folder_digest, hub_folder, read_config, read_tokenizer
from specdial.engine.weights.random_weights import RandomWeights
from specdial.engine.weights.wheel import WHEELS, fetch, sha256_of
from specdial.policies.errors import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run. digest: of the weights; origin: hf, gguf or random; random: outputs must say so."""

    decoder: Decoder
    tokenizer: Tokenizer
    config: ModelConfig
    digest: str
    origin: str

    @property
    def random(self) -> bool:
        """True if the weights are random: good for measuring cost, meaningless as text."""
        return self.origin == "random"


def load_model(
    source: str, *, device: torch.device | str = "auto", dtype: torch.dtype | str = "auto", seed: int = 0
) -> LoadedModel:
    """Load a model from `source` onto `device` in `dtype`.

    source: a name of WHEELS (fetched once), or `wheel:NAME`; a .gguf file; a folder with config.json and safetensors;
    `shape:NAME` for random weights from `seed`; or a hub id `owner/name`.
    device "auto" is cuda if there is one, else cpu; dtype "auto" is float32 on the CPU, bfloat16 on a GPU.
    Errors: UserError, one line, naming the file, key or tensor that is wrong.
    """
    place, kind = resolve(device, dtype)
    named = source.removeprefix("wheel:")
    if named in WHEELS and not Path(source).exists():
        return _from_gguf(fetch(named), place, kind)
    if source.startswith("wheel:"):
        raise UserError(f"no wheel is known for {named!r}", f"use one of {', '.join(WHEELS)}")
    path = Path(source).expanduser()
    if path.suffix == ".gguf" or path.is_file():
        return _from_gguf(path, place, kind)
    if source.startswith("shape:"):
        return _random(source.removeprefix("shape:"), seed, place, kind)
    if path.is_dir():
        return _from_folder(path, place, kind)
    if (folder := None if path.exists() else hub_folder(source)) is not None:
        return _from_folder(folder, place, kind, name=source)
    raise UserError(
        f"no model at {source!r}",
        f"give a .gguf file, a folder, a hub id owner/name, shape:NAME, or one of {', '.join(WHEELS)}",
    )


def resolve(device: torch.device | str, dtype: torch.dtype | str) -> tuple[torch.device, torch.dtype]:
    """The device and dtype meant, "auto" worked out. Errors: UserError for one that is not there."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
    except RuntimeError:
        raise UserError(f"unknown device {device!r}", "use auto, cpu or cuda") from None
    if place.type == "cuda" and not torch.cuda.is_available():
        raise UserError("there is no CUDA device here", "set device=cpu")
    if dtype == "auto":
        dtype = "bfloat16" if place.type == "cuda" else "float32"
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise UserError(f"unknown dtype {dtype!r}", f"use auto, {', '.join(DTYPES)}")
        dtype = DTYPES[dtype]
    return place, dtype


def _from_gguf(path: Path, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    file = GgufFile(path)
    config = gguf_config(file)
    tokenizer = gguf_tokenizer(file.metadata, path.name)
    decoder = Decoder.from_weights(config, GgufWeights(file, config, dtype), device=device, dtype=dtype)
    return LoadedModel(decoder, tokenizer, config, sha256_of(path), "gguf")


def _from_folder(folder: Path, device: torch.device, dtype: torch.dtype, *, name: str | None = None) -> LoadedModel:
    config = read_config(folder, name or folder.resolve().name)
    tokenizer = read_tokenizer(folder, config)
    decoder = Decoder.from_weights(config, SafetensorsWeights(folder), device=device, dtype=dtype)
    return LoadedModel(decoder, tokenizer, config, folder_digest(folder), "hf")


def _random(shape: str, seed: int, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    if shape not in SHAPES:
        raise UserError(f"unknown shape {shape!r}", f"use one of {', '.join(SHAPES)}")
    config = SHAPES[shape]
    weights = RandomWeights(config, seed, device, dtype)
    decoder = Decoder.from_weights(config, weights, device=device, dtype=dtype)
    return LoadedModel(decoder, Tokenizer.of_bytes(), config, f"random:{shape}:{seed}", "random")
