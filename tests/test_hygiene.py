"""Rules about files that no linter knows: length, docstrings, no unfinished work, and the package list complete."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("conf", "engine", "kernels", "policies", "simulator")
SOURCES = sorted(p for f in FOLDERS for p in (ROOT / f).rglob("*.py"))
PYTHON_FILES = SOURCES + sorted(p for f in ("tests", "benchmarks") for p in (ROOT / f).rglob("*.py"))
MAX_LINES = 400


PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
DISTRIBUTIONS = {"yaml": "pyyaml", "hydra": "hydra-core", "omegaconf": "hydra-core"}


def setuptools_settings():
    return PYPROJECT["tool"]["setuptools"]


def test_files_are_short():
    lines = {str(p.relative_to(ROOT)): len(p.read_text("utf-8").splitlines()) for p in PYTHON_FILES}
    assert {name: n for name, n in lines.items() if n > MAX_LINES} == {}


def test_every_file_says_what_it_is():
    trees = {str(p.relative_to(ROOT)): ast.parse(p.read_text("utf-8")) for p in PYTHON_FILES}
    assert [name for name, tree in trees.items() if tree.body and not ast.get_docstring(tree)] == []


def test_no_unfinished_work():
    # Spelled in two halves so that this file does not find itself.
    marks = re.compile("|".join(a + b for a, b in [("TO", "DO"), ("FIX", "ME"), ("raise NotImplemented", "Error")]))
    assert [str(p.relative_to(ROOT)) for p in PYTHON_FILES if marks.search(p.read_text("utf-8"))] == []


def test_package_list_is_complete():
    """Every folder with Python files is a package, and pyproject.toml lists it: a wheel would leave it out."""
    folders = sorted({p.parent.relative_to(ROOT) for p in SOURCES})
    assert [str(f) for f in folders if not (ROOT / f / "__init__.py").is_file()] == []
    names = [".".join(["specdial", *f.parts]) for f in folders]
    listed = setuptools_settings()["packages"]
    assert {"add": sorted(set(names) - set(listed)), "remove": sorted(set(listed) - set(names))} == {
        "add": [],
        "remove": [],
    }
    assert listed == sorted(set(listed))


def test_package_dirs_are_the_five_folders():
    assert setuptools_settings()["package-dir"] == {f"specdial.{f}": f for f in FOLDERS}


@pytest.mark.parametrize("folder", FOLDERS)
def test_data_files_are_packaged(folder):
    """Whatever is not Python, under the five folders, is matched by package-data."""
    patterns = setuptools_settings()["package-data"]
    matched = {
        path
        for package, globs in patterns.items()
        for glob in globs
        for path in ROOT.joinpath(*package.split(".")[1:]).glob(glob)
    }
    ignored = {".py", ".pyc"}
    data = {p for p in (ROOT / folder).rglob("*") if p.is_file() and p.suffix not in ignored}
    assert sorted(str(p.relative_to(ROOT)) for p in data - matched) == []


def test_what_is_imported_is_declared():
    declared = {re.match(r"[\w-]+", d).group().lower() for d in PYPROJECT["project"]["dependencies"]}
    imported = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(node.module.split(".")[0])
    foreign = imported - set(sys.stdlib_module_names) - {"specdial"}
    assert sorted({DISTRIBUTIONS.get(name, name) for name in foreign} - declared) == []
