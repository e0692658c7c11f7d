"""specdial doctor: does this machine have what specdial needs, and do the kernels run here and agree with torch?

Each line says what was found and, where it falls short, what to change. Exit code 1 when something that specdial needs
does not work; a missing GPU or optional package is only said.
"""

import glob
import platform
import re
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from rich.markup import escape
from rich.table import Table

from specdial.engine.free_memory import free_bytes
from specdial.engine.job import hardware
from specdial.engine.self_test import backend_of, run_kernels
from specdial.engine.weights import resolve
from specdial.engine.weights.wheel import WHEELS, cache_dir
from specdial.policies.artifact import provenance, write_json_atomic
from specdial.policies.console import table_console
from specdial.policies.errors import UserError
from specdial.policies.fields import parse, setting, to_plain

SCHEMA = "specdial/doctor/1"
NEEDED_DISK_BYTES = 1 << 30  # the default model, its record and a demo
NEEDED_MEMORY_BYTES = 1 << 30
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}
COPIES = 8
State = Literal["ok", "note", "fail"]
MARKS = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "fail": "[bold red]FAIL[/]"}


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of `doctor`. device, dtype: as the hardware group has them. disk: where runs would be written."""

    hardware: dict[str, Any]
    disk: str = "."
    needed_disk_bytes: int = setting(NEEDED_DISK_BYTES, low=0)
    out: str | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """One line. remedy: what to change, empty where nothing needs it."""

    part: str
    found: str
    state: State = "ok"
    remedy: str = ""


def run(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Check, print a table, write `out` if given. Returns the checks; exits with code 1 when one failed."""
    s = parse(Settings, settings)
    device, dtype = resolve(s.hardware.get("device", "auto"), s.hardware.get("dtype", "auto"))
    free = free_bytes(device)
    checks = [
        _python(),
        *_packages(_requirements()),
        _gpu(Path("/")),
        _memory(device, free),
        *_disk(Path(s.disk), s.needed_disk_bytes),
        *_models(cache_dir()),
        _bandwidth(device, free),
        *_kernels(device, dtype),
    ]
    _print(checks, f"specdial {metadata.version('specdial')} on {hardware(device)['name']}, {dtype}")
    sound = all(check.state != "fail" for check in checks)
    content = {"ok": sound, "hardware": hardware(device), "checks": to_plain(checks)}
    if s.out is not None:
        write_json_atomic(Path(s.out), {"schema": SCHEMA, **content, "provenance": provenance()})
    if not sound:
        sys.exit(1)
    return content


def _python() -> Check:
    return Check("python", f"{platform.python_version()}, {sys.platform}-{platform.machine()}")


def _requirements() -> list[str]:
    """What specdial declares. Raises UserError where it runs from a folder that was never installed."""
    try:
        return metadata.requires("specdial") or []
    except metadata.PackageNotFoundError:
        raise UserError("specdial is not installed, so what it needs is not known", "pip install -e .") from None


def _packages(requirements: list[str]) -> list[Check]:
    """Every declared package; those of an extra are notes when missing."""
    checks = []
    for line in requirements:
        requirement, _, marker = line.partition(";")
        extra = re.search(r"extra == .(\w+)", marker)
        if ("Linux" in marker and platform.system() != "Linux") or (extra and extra.group(1) == "dev"):
            continue
        name = re.split(r"[^\w.-]", requirement.strip())[0]
        least = re.search(r">=([\d.]+)", requirement)
        remedy = f"pip install '{requirement.strip()}'" + (f", for {extra.group(1)}" if extra else "")
        state: State = "note" if extra else "fail"
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            checks.append(Check(name, "not installed", state, remedy))
            continue
        old = least is not None and _numbers(version) < _numbers(least.group(1))
        checks.append(Check(name, version, state, remedy) if old else Check(name, version))
    return checks


def _numbers(version: str) -> tuple[int, ...]:
    """2.13.0+cpu -> (2, 13, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def _gpu(root: Path) -> Check:
    """root: where dev lies."""
    if torch.cuda.is_available():
        p = torch.cuda.get_device_properties(0)
        count = torch.cuda.device_count()
        several = f"{count} × " if count > 1 else ""
        memory = f"{p.total_memory / 2**30:.0f} GiB"
        return Check("gpu", f"{several}{p.name}, {memory}, sm_{p.major}{p.minor}, CUDA {torch.version.cuda}")
    if not glob.glob(str(root / "dev/nvidia[0-9]*")):
        return Check("gpu", "none: everything runs on the CPU", "note", "for speed, a machine with an NVIDIA GPU")
    if torch.version.cuda is None:
        built = f"there is one, but torch {torch.__version__} was built without CUDA"
        return Check("gpu", built, "fail", "pip install --force-reinstall torch, from an index of CUDA builds")
    return Check("gpu", "there is one, but torch cannot use it", "fail", "update the NVIDIA driver, then restart")


def _memory(device: torch.device, free: int) -> Check:
    text = f"{free / 2**30:.1f} GiB free of {'the GPU' if device.type == 'cuda' else 'this machine'}"
    if free < NEEDED_MEMORY_BYTES:
        return Check("memory", text, "fail", "end other programs: a small model needs 1 GiB")
    return Check("memory", text)


def _disk(runs: Path, needed: int) -> list[Check]:
    """Free space where runs and fetched models are written; a folder that is not there yet counts as its parent."""
    checks = []
    for part, folder, remedy in (
        ("disk, runs", runs, "free space, or give out= on another disk"),
        ("disk, models", cache_dir(), "free space, or set XDG_CACHE_HOME"),
    ):
        place = folder.resolve()
        while not place.exists():
            place = place.parent
        free = shutil.disk_usage(place).free
        text = f"{free / 2**30:.1f} GiB free in {folder}"
        checks.append(Check(part, text) if free >= needed else Check(part, text, "fail", remedy))
    return checks


def _models(cache: Path) -> list[Check]:
    """Models that are fetched when first used: whether they have been."""
    checks = []
    for name, wheel in WHEELS.items():
        there = any(cache.glob(f"{name}-{wheel.sha256[:12]}*"))
        found = "in the cache" if there else "not fetched yet"
        remedy = "" if there else "have a network and pip when it is first used, or give model=FILE.gguf"
        checks.append(Check(f"model {name}", found, "ok" if there else "note", remedy))
    return checks


def _bandwidth(device: torch.device, free: int) -> Check:
    """Bytes read and written by copying memory, over the fastest of a few copies."""
    size = max(min(COPY_BYTES[device.type], free // 8), 1 << 20)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    into = torch.empty_like(source)
    times_s = []
    for _ in range(COPIES):
        _wait(device)
        start_s = time.perf_counter()
        into.copy_(source)
        _wait(device)
        times_s.append(time.perf_counter() - start_s)
    threads = f" with {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return Check("bandwidth", f"{2 * size / min(times_s) / 1e9:.0f} GB/s, copying {size >> 20} MiB{threads}")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _kernels(device: torch.device, dtype: torch.dtype) -> list[Check]:
    backend = backend_of(device)
    checks = []
    for trial in run_kernels(device, dtype):
        part = f"kernel {trial.kernel}"
        if not trial.ok:
            remedy = "update triton and the driver; if it stays, report this line"
            checks.append(Check(part, trial.fault or "fault unknown", "fail", remedy))
        elif backend == "reference":
            checks.append(Check(part, "torch reference"))
        else:
            checks.append(Check(part, f"Triton, within {trial.error:.1g} of its reference"))
    return checks


def _print(checks: list[Check], title: str) -> None:
    table = Table(title=escape(title), title_justify="left")
    for column in ("part", "", "found", "what to change"):
        table.add_column(column, overflow="fold")
    for check in checks:
        table.add_row(check.part, MARKS[check.state], escape(check.found), escape(check.remedy))
    console = table_console()
    console.print(table)
    failed = [check.part for check in checks if check.state == "fail"]
    console.print(f"does not work: {', '.join(failed)}" if failed else "everything that specdial needs is here")
