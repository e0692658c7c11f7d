"""Runs the interpreter's cases in a process that chose the interpreter before importing Triton."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    cases = Path(__file__).with_name("interpreted_full_attention.py")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "--import-mode=importlib",
        "-p",
        "no:cacheprovider",
        str(cases),
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
