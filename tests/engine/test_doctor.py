"""`doctor`: every kernel is tried, wrong ones are caught, and what falls short says what to change."""

import json
from importlib import metadata
from pathlib import Path

import pytest
import torch

from specdial.engine import self_test
from specdial.engine.verbs import doctor
from specdial.policies.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def check(monkeypatch, tmp_path):
    """doctor.run on the CPU, copying little; returns its answer, or what it wrote before exit code 1."""
    monkeypatch.setattr(doctor, "COPY_BYTES", {"cpu": 1 << 20})

    def run(**settings):
        out = tmp_path / "doctor.json"
        given = {"hardware": {"device": "cpu", "dtype": "float32"}, "disk": str(tmp_path), "out": str(out)}
        try:
            doctor.run({**given, **settings})
            code = 0
        except SystemExit as stop:
            code = stop.code
        found = json.loads(out.read_text())
        assert found["ok"] is (code == 0)
        return code, {line["part"]: line for line in found["checks"]}

    return run


def test_a_sound_machine(check, capsys):
    code, found = check()
    assert code == 0
    assert {part: line["found"] for part, line in found.items() if line["state"] == "fail"} == {}
    assert found["torch"]["found"] == torch.__version__
    assert "GB/s" in found["bandwidth"]["found"]
    out = capsys.readouterr().out
    assert "kernel full_attention" in out
    assert "everything that specdial needs is here" in out


def test_every_kernel_folder_is_tried():
    folders = {path.parent.name for path in (ROOT / "kernels").glob("*/__init__.py")}
    assert {name.split()[0] for name in self_test.CASES} == folders


def test_a_nan_in_any_output_is_no_result(monkeypatch):
    second = iter([float("nan"), 1.0])  # of the kernel, then of its reference

    def spoiled(inputs, backend):
        return [torch.ones(3), torch.full((3,), next(second)), torch.ones(3)]

    monkeypatch.setattr(self_test, "CASES", {"spoiled": spoiled})
    (trial,) = self_test.run_kernels(torch.device("cpu"), torch.float32)
    assert not trial.ok


def test_a_wrong_kernel_and_one_that_does_not_compile(check, monkeypatch, capsys):
    def wrong(inputs, backend):
        return [torch.full((3,), 1.0 if backend == "reference" else 1.5)]

    def broken(inputs, backend):
        raise RuntimeError("ptxas fatal\nmore")

    monkeypatch.setattr(self_test, "CASES", {"wrong": wrong, "broken": broken})
    monkeypatch.setattr(self_test, "backend_of", lambda device: "triton")
    code, found = check()
    assert code == 1
    assert found["kernel wrong"]["found"] == "differs from its reference by 0.5 of the largest value"
    assert found["kernel broken"]["found"] == "RuntimeError: ptxas fatal"
    assert found["kernel broken"]["remedy"].startswith("update triton")
    assert "does not work: kernel wrong, kernel broken" in capsys.readouterr().out


def test_no_room_on_the_disk(check):
    code, found = check(needed_disk_bytes=1 << 60)
    assert code == 1
    assert found["disk, runs"]["state"] == "fail"
    assert "out=" in found["disk, runs"]["remedy"]


def test_packages_missing_old_and_optional():
    lines = [
        "torch>=99",
        "numpy>=2.0",
        "nowhere-to-be-found>=1",
        'absent-too>=5.24; extra == "report"',
        'x; extra == "dev"',
    ]
    found = {line.part: (line.state, line.remedy) for line in doctor._packages(lines)}
    assert found == {
        "torch": ("fail", "pip install 'torch>=99'"),
        "numpy": ("ok", ""),
        "nowhere-to-be-found": ("fail", "pip install 'nowhere-to-be-found>=1'"),
        "absent-too": ("note", "pip install 'absent-too>=5.24', for report"),
    }


def test_a_folder_that_was_never_installed(monkeypatch):
    def unknown(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "requires", unknown)
    with pytest.raises(UserError, match=r"specdial is not installed.*pip install -e"):
        doctor.run({"hardware": {"device": "cpu"}})


def test_models_that_are_yet_to_be_fetched(tmp_path):
    (name, wheel), *_ = doctor.WHEELS.items()
    assert doctor._models(tmp_path / "nowhere")[0].state == "note"
    (tmp_path / f"{name}-{wheel.sha256[:12]}.gguf").touch()
    assert doctor._models(tmp_path)[0] == doctor.Check(f"model {name}", "in the cache")


def test_a_gpu_that_torch_cannot_use_is_not_overlooked(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("torch has a GPU here")
    assert doctor._gpu(tmp_path).state == "note"
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    assert doctor._gpu(tmp_path).state == "fail"
