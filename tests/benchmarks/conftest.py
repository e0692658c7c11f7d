"""What tests of benchmark scripts share: the scripts as modules."""

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    """script("prediction") -> the module, its neighbours importable as when it is run."""
    for folder in (FOLDER, FOLDER / "kernels", FOLDER / "engine"):
        monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module
