"""A CUDA device that is full: one clear line, exit code 2, and what was finished stays; with room the run goes on.

The device is filled for real, down to the allocator's smallest blocks.
"""

import fcntl
import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from specdial.conf import cli
from specdial.engine.trace.reader import read_trace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SMALLEST_BYTES = 512  # what the allocator rounds up to


def filled():
    """Tensors that leave no memory on the device."""
    torch.cuda.empty_cache()
    held, size = [], torch.cuda.mem_get_info()[0]
    while size >= SMALLEST_BYTES:
        try:
            held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    return held


@pytest.fixture(autouse=True)
def one_at_a_time():
    """What one of these tests fills, another in a process beside it cannot use."""
    with (Path(tempfile.gettempdir()) / "specdial-tests-full-device.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture
def record(tiny_checkpoint, tmp_path, monkeypatch):
    """record(out) -> the command's exit code, for two documents, one after the other."""
    (tmp_path / "text.txt").write_text("\n\n".join(f"Paragraph {i}, on {i * i} things." for i in range(300)))
    model = str(tiny_checkpoint("llama", head_dim=64))
    shape = ["workload=file", "workload.documents=2", "workload.new_tokens=16", "context=96", "batch=1"]
    place = [f"model={model}", "hardware=cuda", "hardware.dtype=float32", f"workload.path={tmp_path / 'text.txt'}"]
    policy = ["policy=sparse_self", "controller=fixed", "controller.k=2", "draft_kv.page=16"]
    policy += ["draft_kv.budget=64", "draft_kv.recent=16"]
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")

    def run(out):
        monkeypatch.setattr(sys, "argv", ["specdial", "record", *shape, *place, *policy, f"out={tmp_path / out}"])
        try:
            cli.main()
        except SystemExit as end:
            return end.code
        return 0

    return run


def test_a_device_that_fills_up_midway_leaves_finished_documents_whole(record, tmp_path, monkeypatch, capsys):
    rename, hog = os.replace, []

    def filling(old, new):
        rename(old, new)
        if "rounds-00000" in str(new):
            hog.extend(filled())

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", filling)
        assert record("stopped") == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "memory" in said
    assert "; lower the batch or the context" in said
    stopped = read_trace(tmp_path / "stopped")
    assert set(stopped.rounds["doc"].to_pylist()) == {0}
    assert not list((tmp_path / "stopped").rglob("*.tmp"))
    finished = {path.name: path.read_bytes() for path in (tmp_path / "stopped").glob("*-00000.parquet")}
    hog.clear()
    torch.cuda.empty_cache()
    assert record("stopped") == record("whole") == 0
    assert finished == {name: (tmp_path / "stopped" / name).read_bytes() for name in finished}
    assert read_trace(tmp_path / "stopped").outputs.equals(read_trace(tmp_path / "whole").outputs)


def test_a_device_that_is_full_from_the_start_is_told_in_one_line(record, tmp_path, capsys):
    hog = filled()
    assert record("full") == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("specdial:")]
    assert len(said) == 1
    assert "memory" in said[0]
    assert not list((tmp_path / "full").rglob("*.parquet"))
    del hog
    torch.cuda.empty_cache()
    assert record("full") == 0
