"""A wheel holds everything, and works from anywhere without the checkout. Built here, in a copy, without a network."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("conf", "engine", "kernels", "policies", "simulator")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this checkout, unpacked: what pip puts into site-packages."""
    copy = tmp_path_factory.mktemp("checkout")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    code = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    built, site = copy / "dist", copy / "site"
    built.mkdir()
    run = subprocess.run(
        [sys.executable, "-c", code, str(built)], cwd=copy, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    [path] = built.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(site)
    return site


def _run(wheel, tmp_path, *command):
    """Runs a command with the unpacked wheel first on the path, from an empty directory."""
    env = {**os.environ, "PYTHONPATH": str(wheel)}
    return subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )


def test_wheel_holds_every_source_and_data_file(wheel):
    inside = {p.relative_to(wheel / "specdial") for p in (wheel / "specdial").rglob("*") if p.is_file()}
    here = {
        p.relative_to(ROOT)
        for folder in FOLDERS
        for p in (ROOT / folder).rglob("*")
        if p.is_file() and p.suffix != ".pyc"
    }
    assert sorted(map(str, here - inside)) == []
    assert sorted(map(str, inside - here)) == []


def test_wheel_holds_nothing_beside_specdial(wheel):
    top = sorted(p.name.removesuffix(".dist-info").split("-")[0] for p in wheel.iterdir())
    assert top == ["specdial", "specdial"]


def test_wheel_imports_from_anywhere(wheel, tmp_path):
    run = _run(
        wheel, tmp_path, "-c", "import specdial, specdial.simulator as s; print(specdial.__path__[0], s.__file__)"
    )
    assert run.returncode == 0, run.stderr
    assert all(path.startswith(str(wheel)) for path in run.stdout.split())


def test_wheel_brings_the_book(wheel, tmp_path):
    code = "from specdial.engine.workloads.sources import book; print(sum(len(p.text) for p in book()))"
    run = _run(wheel, tmp_path, "-c", code)
    assert run.returncode == 0, run.stderr
    assert 150_000 <= int(run.stdout) <= 250_000


def test_command_is_declared(wheel):
    [declared] = wheel.glob("*.dist-info/entry_points.txt")
    assert declared.read_text("utf-8").split("\n")[:2] == ["[console_scripts]", "specdial = specdial.conf.cli:main"]


@pytest.mark.parametrize("arguments", [["record", "--cfg", "job"], ["record", "--help"], ["replay", "--help"], []])
def test_command_works_from_anywhere(wheel, tmp_path, arguments):
    """What the installed script does: call main. The settings it composes come from the wheel."""
    run = _run(wheel, tmp_path, "-c", "from specdial.conf.cli import main; main()", *arguments)
    assert run.returncode == 0, run.stderr
    assert ("context_tokens" if "--cfg" in arguments else "specdial") in run.stdout
    assert list(tmp_path.iterdir()) == []
