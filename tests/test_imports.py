"""The arrows between the folders go one way, and the simulator needs no torch. Read from the source, then run."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("conf", "engine", "kernels", "policies", "simulator")
NO_TORCH = ("torch", "triton", "specdial.kernels")

# folder: (our packages it may import besides itself, packages it must not import)
RULES = {
    "kernels": ((), ("hydra", "omegaconf")),
    "policies": ((), ("hydra", "omegaconf", *NO_TORCH)),
    "simulator": (("specdial.policies", "specdial.engine.trace"), ("hydra", "omegaconf", *NO_TORCH)),
    "engine": (("specdial.kernels", "specdial.policies"), ("hydra", "omegaconf")),
    "conf": (tuple(f"specdial.{f}" for f in FOLDERS), ()),
}


def imported_names(source, package):
    """(line, full dotted name) of everything a module imports, anywhere in it. package: the one the module is in."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from a import b` may import the module a.b: only the longer name says whether that is allowed.
            names += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"):
            names += [(node.lineno, arg.value) for arg in node.args if isinstance(arg, ast.Constant)]
    return [(line, str(name)) for line, name in names]


def _called(node):
    return getattr(node.func, "attr", getattr(node.func, "id", None))


def inside(name, package):
    return name == package or name.startswith(package + ".")


def broken_arrows(folder, source, package):
    """One line for each import that the folder may not make."""
    may, must_not = RULES[folder]
    ours = (f"specdial.{folder}", *may)
    faults = []
    for line, name in imported_names(source, package):
        bare = name.split(".")[0] in FOLDERS
        foreign = inside(name, "specdial") and not any(inside(name, p) for p in ours)
        if bare or foreign or any(inside(name, p) for p in (*must_not, "transformers")):
            faults.append(f"line {line}: {name}")
    return faults


@pytest.mark.parametrize("folder", FOLDERS)
def test_arrows_go_one_way(folder):
    faults = []
    files = sorted((ROOT / folder).rglob("*.py"))
    for path in files:
        package = ".".join(["specdial", *path.relative_to(ROOT).parent.parts])
        faults += [f"{path.relative_to(ROOT)} {f}" for f in broken_arrows(folder, path.read_text("utf-8"), package)]
    assert files
    assert faults == []


@pytest.mark.parametrize(
    ("folder", "source", "faults"),
    [
        ("kernels", "from specdial.policies.errors import UserError", ["line 1: specdial.policies.errors.UserError"]),
        ("kernels", "from . import reference\nfrom ..history import x", []),
        ("kernels", "def f():\n    from ... import engine", ["line 2: specdial.engine"]),
        ("kernels", "import kernels.history", ["line 1: kernels.history"]),
        ("policies", "import torch.nn", ["line 1: torch.nn"]),
        ("policies", "import torchaudio", []),
        ("simulator", "from specdial.engine.trace import read", []),
        ("simulator", "from specdial.engine import trace", []),
        ("simulator", "from specdial.engine import loop", ["line 1: specdial.engine.loop"]),
        ("simulator", "importlib.import_module('specdial.engine.loop')", ["line 1: specdial.engine.loop"]),
        ("engine", "import specdial.simulator", ["line 1: specdial.simulator"]),
        ("engine", "from omegaconf import OmegaConf", ["line 1: omegaconf.OmegaConf"]),
        ("engine", "from transformers import AutoModel", ["line 1: transformers.AutoModel"]),
        ("conf", "import hydra\nfrom specdial.engine import loop", []),
    ],
)
def test_the_check_itself(folder, source, faults):
    assert broken_arrows(folder, source, f"specdial.{folder}.full_attention") == faults


@pytest.mark.parametrize("package", ["specdial.simulator", "specdial.policies", "specdial.engine.trace"])
def test_import_leaves_torch_out(package):
    code = f"""
import importlib, pkgutil, sys
package = importlib.import_module({package!r})
names = [m.name for m in pkgutil.walk_packages(getattr(package, "__path__", []), {package + "."!r})]
for name in names:
    importlib.import_module(name)
print(len(names), *sorted(m for m in ("torch", "triton") if m in sys.modules))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split()[1:] == []
