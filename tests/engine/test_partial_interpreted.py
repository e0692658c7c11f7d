"""Runs the interpreter's cases of partial verification in a process of their own.

The interpreter must be chosen before the kernels are imported.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_partial_verification_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    file = str(Path(__file__).with_name("interpreted_partial.py"))
    command = [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider", file]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
