"""Files that outlive a killed process: atomic writes, digests, provenance, and directories that hold one run.

A reader sees a file either as it was or as it became. Leaves out the content of any particular artifact.
"""

import datetime
import hashlib
import json
import os
import platform
import secrets
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from specdial.policies.errors import UserError

RUN_FILE = "run.json"
RUN_SCHEMA = "specdial/run/1"
TEMPORARY = ".tmp"


def write_bytes_atomic(path: Path, content: bytes) -> None:
    """Write to a temporary name in the same directory, sync, rename. Raises UserError when the directory refuses it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not tempfile: its files are readable by their owner alone.
        temporary = path.parent / f".{path.name}.{secrets.token_hex(4)}{TEMPORARY}"
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}", "choose another out=") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}", "free space or choose another out=") from None
    finally:
        temporary.unlink(missing_ok=True)


def write_text_atomic(path: Path, text: str) -> None:
    """`write_bytes_atomic` of UTF-8 text."""
    write_bytes_atomic(path, text.encode("utf-8"))


def write_json_atomic(path: Path, value: Any) -> None:
    """`write_text_atomic` of indented JSON; NaN and infinity are refused (ValueError)."""
    write_text_atomic(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def digest_of(value: Any) -> str:
    """sha256 of plain data in canonical JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, allow_nan=False).encode()).hexdigest()


def claim_directory(out: Path, verb: str, config: dict[str, Any]) -> bool:
    """Make `out` this run's own and say whether it already was (True: resume or rewrite in place).

    An empty or new directory is marked with run.json; where it lies (`out` of the config) does not count. Raises
    UserError when it holds another run or foreign files.
    """
    digest = digest_of({name: value for name, value in config.items() if name != "out"})
    marker = out / RUN_FILE
    if marker.exists():
        found = _read_marker(marker)
        if found.get("verb") == verb and found.get("config_digest") == digest:
            return True
        raise UserError(
            f"{out} holds another run ({found.get('verb')})", "choose another out= or delete that directory"
        )
    if out.is_file() or (out.is_dir() and any(path.suffix != TEMPORARY for path in out.iterdir())):
        raise UserError(f"{out} exists and is not a run of specdial", "choose another out=")
    write_json_atomic(
        marker,
        {"schema": RUN_SCHEMA, "verb": verb, "config_digest": digest, "config": config, "provenance": provenance()},
    )
    return False


def provenance() -> dict[str, Any]:
    """Where and with what something was made: time (UTC), versions, platform. No host name, no user, no paths."""
    versions = {}
    for name in ("specdial", "torch", "triton", "numpy", "scipy", "optuna", "hydra-core", "pyarrow"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "made_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": f"{sys.platform}-{platform.machine()}",
        "versions": versions,
    }


def _read_marker(marker: Path) -> dict[str, Any]:
    try:
        found = json.loads(marker.read_text())
    except (OSError, ValueError):
        raise UserError(f"{marker} is not readable JSON", "choose another out= or delete that directory") from None
    if not isinstance(found, dict):
        raise UserError(f"{marker} is not a run marker", "choose another out= or delete that directory")
    return found
