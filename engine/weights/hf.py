"""A Hugging Face folder or hub id: config.json, safetensors (one file or shards), tokenizer.json.

Leaves out pickled checkpoints (loading one runs code) and every quantised format.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdial.engine.models.config import ModelConfig
from specdial.engine.tokenizer import Tokenizer
from specdial.engine.weights.wheel import sha256_of
from specdial.policies.errors import UserError

_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"[\w-][\w.-]{0,199}\.safetensors", re.ASCII)  # a file of the same folder, and nothing hidden
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja"]


class SafetensorsWeights(Mapping[str, Tensor]):
    """Lazy mapping over every safetensors file of a folder; one tensor is read at a time."""

    def __init__(self, folder: Path) -> None:
        self._files = weight_files(folder)
        self._open: dict[str, Any] = {}  # tensor name: the handle of its file
        for path in self._files:
            try:
                handle = safe_open(path, framework="pt")
                names = list(handle.keys())
            except (SafetensorError, OSError) as error:
                cause = " ".join(str(error).split())
                raise UserError(f"{path} is missing, truncated or damaged: {cause}", "download it again") from None
            self._open.update(dict.fromkeys(names, handle))

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._open[name].get_tensor(name)
        if not tensor.is_floating_point():
            raise UserError(f"tensor {name} holds {tensor.dtype}, not floating point", "use an unquantised checkpoint")
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._open)

    def __len__(self) -> int:
        return len(self._open)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: those of the index, or else every one. Errors: UserError if there is none."""
    if (folder / _INDEX).exists():
        shards = _json(folder / _INDEX).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise UserError(f"{folder / _INDEX} has no weight_map", "download it again")
        names = sorted(set(shards.values()))
        strange = next((name for name in names if not _SHARD.fullmatch(name)), None)
        if strange is not None:
            raise UserError(f"{folder / _INDEX} names the shard {strange[:60]!r}", "use a checkpoint in one folder")
        files = [folder / name for name in names]
        for path in files:
            if not path.is_file():
                raise UserError(f"shard {path} is missing", "download it again")
        return files
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder} holds no safetensors file", "convert the checkpoint to safetensors")
    return files


def read_config(folder: Path, name: str) -> ModelConfig:
    """config.json, with the end-of-text ids of generation_config.json where that has more."""
    raw = _json(folder / "config.json")
    if (folder / "generation_config.json").exists():
        more = _json(folder / "generation_config.json").get("eos_token_id")
        raw["eos_token_id"] = raw.get("eos_token_id") if more is None else more
    return ModelConfig.from_hf(raw, name=name)


def read_tokenizer(folder: Path, config: ModelConfig) -> Tokenizer:
    """tokenizer.json, and the chat template beside it. Errors: UserError if tokenizer.json is missing or damaged."""
    template = None
    if (folder / "chat_template.jinja").exists():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    elif (folder / "tokenizer_config.json").exists():
        found = _json(folder / "tokenizer_config.json").get("chat_template")
        template = found if isinstance(found, str) else None
    return Tokenizer.from_file(
        folder / "tokenizer.json", eos_ids=config.eos_ids, bos_id=config.bos_id, chat_template=template
    )


def folder_digest(folder: Path) -> str:
    """sha256 over config.json and the weight files, each by name and sha256: the config changes the model too."""
    lines = [f"{path.name} {sha256_of(path)}\n" for path in [folder / "config.json", *weight_files(folder)]]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def hub_folder(source: str) -> Path | None:
    """The local snapshot of a hub id, downloaded if need be; None if `source` does not look like an id.

    Errors: UserError if it can be neither found in the cache nor downloaded.
    """
    if not _HUB_ID.fullmatch(source):
        return None
    import huggingface_hub  # here: it takes longer to import than a local model's header to read

    try:
        return Path(huggingface_hub.snapshot_download(source, allow_patterns=_HUB_FILES))
    except Exception as error:  # many unrelated types: HTTP, validation, offline, disk
        cause = (" ".join(str(error).split()) or type(error).__name__)[:160]
        raise UserError(
            f"no folder {source!r}, and the hub gave no model of that id ({cause})",
            "go online once, or give a local path: model=path model.source=PATH",
        ) from None


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise UserError(f"no file {path}", "give a folder with config.json and safetensors") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error})", "download it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} does not hold an object", "download it again")
    return value
