"""The built wheel, installed and used in clean environments: one a combination of Python, torch, Optuna and Hydra.

What is tested is the last commit. The source distribution is built from it and the wheel from that; both must hold
every file. In each environment: the command's help, an import of every module, a recording in an empty folder, and
tests that need no weights. An environment takes up to 8 GB and is removed afterwards, unless --keep names a folder;
what lies there is used again. Leaves out GPUs, and other versions of what the table does not name.
"""

import argparse
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("conf", "engine", "kernels", "policies", "simulator")

# Python, torch, Optuna, Hydra: every version of the two ends of what pyproject.toml allows, in as few as it takes.
COMBINATIONS = (
    ("3.11", "==2.13.*", "==5.0.*", "==1.3.8"),
    ("3.11", "==2.13.*", "==4.9.*", ">=1.4.0rc1,<1.5"),
    ("3.12", "==2.11.*", "==4.9.*", "==1.3.8"),
    ("3.13", "==2.13.*", "==5.0.*", ">=1.4.0rc1,<1.5"),
)
NAMED = ("torch", "optuna", "hydra-core")
TOOLS = ("pytest>=8", "hypothesis>=6.100", "plotly>=5.24")
TESTS = (
    "tests/policies",
    "tests/simulator/test_objectives.py",
    "tests/simulator/test_replay_verb.py",
    "tests/simulator/test_space.py",
    "tests/simulator/test_study.py",
    "tests/conf/test_cli.py",
    "tests/conf/test_help.py",
    "tests/conf/test_returns.py",
    "tests/conf/test_verify_overrides.py",
)
SMALL = ("context=64", "workload.documents=1", "workload.new_tokens=4")
RECORD = ("model=random", "model.shape=smollm2-135m", *SMALL, "out=trace")
IMPORT_ALL = """
import importlib, pkgutil, specdial
found = [m.name for m in pkgutil.walk_packages(specdial.__path__, "specdial.", onerror=print)]
for name in found:
    importlib.import_module(name)
assert len(found) > 200, found
assert "site-packages" in list(specdial.__path__)[0], specdial.__path__
"""


class Failed(Exception):
    """What failed, and the end of what it printed."""


def command(what: str, *parts: str | Path, cwd: Path) -> str:
    """What the command printed. Raises Failed when it fails."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env |= {"OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run([str(p) for p in parts], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Failed(f"{what}, exit code {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def interpreter(version: str) -> str:
    """A Python of this version, from PATH or pyenv. Raises Failed when there is none."""
    installed = (Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python")
    for path in (f"python{version}", *map(str, installed)):
        code = f"import sys; sys.exit('%d.%d' % sys.version_info[:2] != {version!r})"
        if shutil.which(path) and subprocess.run([path, "-c", code], capture_output=True, check=False).returncode == 0:
            return path
    raise Failed(f"no Python {version} on PATH or in pyenv")


def built_wheel(source: Path, work: Path) -> Path:
    """The wheel, built from the source distribution that is built from `source`; both checked for every file."""
    python = work / "build" / "bin" / "python"
    command("venv", sys.executable, "-m", "venv", python.parents[1], cwd=work)
    command("pip install build", python, "-m", "pip", "install", "--quiet", "build", cwd=work)
    command("python -m build", python, "-m", "build", "--outdir", work / "dist", source, cwd=work)
    [sdist], [wheel] = (list((work / "dist").glob(kind)) for kind in ("*.tar.gz", "*.whl"))
    wanted = {str(p.relative_to(source)) for f in FOLDERS for p in (source / f).rglob("*") if p.is_file()}
    with tarfile.open(sdist) as archive:
        missing = wanted - {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        missing |= wanted - {name.removeprefix("specdial/") for name in archive.namelist()}
    if missing:
        raise Failed(f"the distributions lack {', '.join(sorted(missing))}")
    return wheel


def used(combination: Sequence[str], wheel: Path, source: Path, place: Path) -> tuple[str, str]:
    """(versions installed, pytest's closing line). Raises Failed at the first thing that does not work."""
    python = place / "bin" / "python"
    if not python.exists():
        command("venv", interpreter(combination[0]), "-m", "venv", place, cwd=source)
    pins = [name + version for name, version in zip(NAMED, combination[1:])]
    pip = (python, "-m", "pip", "install", "--quiet")
    command("pip install", *pip, wheel, *pins, *TOOLS, cwd=source)
    command("pip install of the wheel", *pip, "--force-reinstall", "--no-deps", wheel, cwd=source)
    names = "from importlib.metadata import version as v; import platform; print(platform.python_version(), "
    versions = command("versions", python, "-c", f"{names}{', '.join(f'v({n!r})' for n in NAMED)})", cwd=source)
    with tempfile.TemporaryDirectory() as empty:
        command("specdial --help", place / "bin" / "specdial", "--help", cwd=Path(empty))
        command("import of every module", python, "-c", IMPORT_ALL, cwd=Path(empty))
        command("specdial record", place / "bin" / "specdial", "record", *RECORD, cwd=Path(empty))
        if not list(Path(empty).glob("trace/**/*.parquet")):
            raise Failed("specdial record left no table")
    # -P: without it the checkout's own folders would come before the installed ones.
    closing = command("pytest", python, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS, cwd=source)
    return versions.strip(), re.sub(r"^=+|=+$", "", closing.strip().splitlines()[-1]).strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", type=Path, help="a folder to keep the environments in")
    parser.add_argument("--only", type=int, nargs="*", help="rows of the table, counted from 0")
    options = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        work, source = Path(name), Path(name) / "source"
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(source, filter="data")
        wheel = built_wheel(source, work)
        print(f"{wheel.name}, {wheel.stat().st_size:,} bytes: built from its sdist, no file missing", flush=True)
        print("python torch optuna hydra-core: result", flush=True)
        for number, combination in enumerate(COMBINATIONS):
            if options.only is not None and number not in options.only:
                continue
            place = (options.keep or work).resolve() / f"env{number}"
            started_s = time.monotonic()
            try:
                versions, closing = used(combination, wheel, source, place)
                print(f"{versions}: ok, {closing}; {time.monotonic() - started_s:.0f} s in all", flush=True)
            except Failed as error:
                failed += 1
                print(f"{' '.join(combination)}: FAILED at {error}", flush=True)
            if not options.keep:
                shutil.rmtree(place, ignore_errors=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
