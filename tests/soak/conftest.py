"""The scripts of this folder, importable as when they are run, and what their verbs leave undisturbed."""

import importlib
import os
import tempfile
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def script():
    """script("kill") -> the module, its neighbours importable as when it is run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        yield importlib.import_module


@pytest.fixture(scope="module")
def world(script):
    """Runs to disturb, in a folder that others may look into: see kill.World."""
    kill = script("kill")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # children are forked
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.chmod(folder, 0o755)
        yield kill.prepared(folder, ("record", "tune", "export"))
    torch.set_num_threads(threads)
