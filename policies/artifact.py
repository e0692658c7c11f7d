"""Files that outlive a killed process: atomic writes, digests, provenance, and directories that hold one run.

A reader sees a file either as it was or as it became. Leaves out the content of any particular artifact.
"""

import datetime
import fcntl
import hashlib
import json
import os
import platform
import secrets
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from specdial.policies.errors import UserError

RUN_FILE = "run.json"
RUN_SCHEMA = "specdial/run/1"
TEMPORARY = ".tmp"
# Directories claimed, by process, device and inode: an open handle of each, which carries its lock. They stay open
# until the process ends, however it ends, and the system lets go of the locks.
_CLAIMED: dict[tuple[int, int, int], int] = {}


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


def claim_directory(out: Path, verb: str, config: dict[str, Any], *, shared: bool = False) -> bool:
    """Make `out` this run's own and say whether it already was (True: resume or rewrite in place).

    An empty or new directory is marked with run.json; where it lies (`out` of the config) does not count. Until this
    process ends no other one can claim it, unless both do so `shared`. What a killed run left half-written is removed.
    Raises UserError when it holds another run or foreign files, and while another process has it.
    """
    digest = digest_of({name: value for name, value in config.items() if name != "out"})
    marker = out / RUN_FILE
    alone = not out.is_file() and _lock(out, shared)
    if marker.exists():
        found = _read_marker(marker)
        if found.get("verb") == verb and found.get("config_digest") == digest:
            _tidy(out, alone)
            return True
        raise UserError(
            f"{out} holds another run ({found.get('verb')})", "choose another out= or delete that directory"
        )
    if out.is_file() or (out.is_dir() and any(path.suffix != TEMPORARY for path in out.iterdir())):
        raise UserError(f"{out} exists and is not a run of specdial", "choose another out=")
    _tidy(out, alone)
    write_json_atomic(
        marker,
        {"schema": RUN_SCHEMA, "verb": verb, "config_digest": digest, "config": config, "provenance": provenance()},
    )
    return False


def _tidy(out: Path, alone: bool) -> None:
    """Remove what killed runs left half-written, unless another one may be writing it."""
    for left in out.rglob(f".*{TEMPORARY}") if alone else ():
        left.unlink()


def _lock(out: Path, shared: bool) -> bool:
    """Keep other processes out of a directory, made if need be, while this one lives; this one may come again.

    Returns whether no other process had it. A file system that has no locks is not guarded. Raises UserError when
    another process has it and not both share it, or when it cannot be made.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        handle = os.open(out, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}", "choose another out=") from None
    seen = os.fstat(handle)
    place = (os.getpid(), seen.st_dev, seen.st_ino)
    if place in _CLAIMED:
        os.close(handle)
        return not shared
    alone = False
    try:
        for kind in (fcntl.LOCK_EX, fcntl.LOCK_SH) if shared else (fcntl.LOCK_EX,):
            with suppress(BlockingIOError):
                fcntl.flock(handle, kind | fcntl.LOCK_NB)
                _CLAIMED[place] = handle
                alone = alone or kind == fcntl.LOCK_EX  # and then shares it
    except OSError:
        os.close(handle)
        return False
    if place not in _CLAIMED:
        os.close(handle)
        raise UserError(f"{out} is in use by another run", "wait until it has ended, or choose another out=")
    return alone


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
