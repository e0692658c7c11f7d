"""The tensors of an EAGLE-3 checkpoint under one set of names, whatever layout its files have.

Pickled files are read as tensors only (`weights_only`): one that holds anything else is refused, unread. Leaves out
what the tensors mean (weights/eagle.py).
"""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specdial.engine.weights.hf import weight_files
from specdial.policies.errors import UserError

_PICKLED = "pytorch_model.bin"
_LAYER = ("self_attn.", "mlp.", "hidden_norm", "input_layernorm", "post_attention_layernorm")
AGAIN = "download it again"


def checkpoint_files(folder: Path) -> list[Path]:
    """The weight files of a folder: safetensors if there are any, else pytorch_model.bin. Raises UserError."""
    if any(folder.glob("*.safetensors*")):
        return weight_files(folder)
    if (folder / _PICKLED).is_file():
        return [folder / _PICKLED]
    raise UserError(f"{folder} holds neither model.safetensors nor {_PICKLED}", "give the folder of an EAGLE-3 head")


def read_tensors(files: list[Path]) -> dict[str, Tensor]:
    """Every tensor of the files, by its name here. Raises UserError naming a file that cannot be read."""
    return {canonical(name): tensor for path in files for name, tensor in _read(path).items()}


def canonical(name: str) -> str:
    """A tensor's name here: no `model.` in front, no `.weight` behind, the layer's parts under `midlayer.`."""
    name = re.sub(r"^(draft_model\.)?(model\.)?", "", name).removesuffix(".weight")
    name = re.sub(r"^layers\.0\.", "midlayer.", name)
    return f"midlayer.{name}" if name.startswith(_LAYER) else name


def read_settings(path: Path) -> dict[str, Any]:
    """The object in a config.json. Raises UserError where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise UserError(f"no file {path}", "give a folder with config.json and its weights") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error})", AGAIN) from None
    if not isinstance(value, dict):
        raise UserError(f"{path} does not hold an object", AGAIN)
    return value


def _read(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            cause = " ".join(str(error).split())
            raise UserError(f"{path} is missing, truncated or damaged: {cause}", AGAIN) from None
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise UserError(
            f"{path} holds more than tensors, which loading would run", "convert it to safetensors where you trust it"
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        cause = " ".join(str(error).split())[:160]
        raise UserError(f"{path} is truncated or damaged: {cause}", AGAIN) from None
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise UserError(f"{path} is not a mapping of names to tensors", AGAIN)
    return found
