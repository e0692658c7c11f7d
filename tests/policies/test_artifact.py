"""Files appear whole or not at all; a directory holds one run."""

import ast
import json
import os
import stat
from pathlib import Path

import pytest

from specdial.policies import artifact
from specdial.policies.artifact import claim_directory, digest_of, write_json_atomic, write_text_atomic
from specdial.policies.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("conf", "engine", "kernels", "policies", "simulator")


def everything(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def test_it_writes_and_overwrites(tmp_path):
    path = tmp_path / "new" / "a.txt"
    write_text_atomic(path, "één")
    write_text_atomic(path, "twee")
    assert path.read_text(encoding="utf-8") == "twee"
    assert everything(tmp_path) == ["new", "new/a.txt"]


def test_others_may_read_what_the_umask_lets_them(tmp_path):
    before = os.umask(0o022)
    try:
        write_text_atomic(tmp_path / "a.txt", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.txt").stat().st_mode) == 0o644


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_on_the_way_leaves_the_old_content_and_no_other_file(tmp_path, monkeypatch, step, error):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fail(*arguments):
        raise error

    monkeypatch.setattr(artifact.os, step, fail)
    with pytest.raises((UserError, KeyboardInterrupt)) as caught:
        write_text_atomic(path, "new")
    if isinstance(error, OSError):
        assert str(caught.value) == f"cannot write {path}: No space left on device; free space or choose another out="
    assert path.read_text() == "old"
    assert everything(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("name", ["file/a.txt", "x" * 300])
def test_a_place_that_cannot_be_written_is_named(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*; choose another out="):
        write_text_atomic(tmp_path / name, "x")
    assert everything(tmp_path) == ["file"]


def test_a_folder_in_the_way_is_left(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(UserError, match="cannot write"):
        write_text_atomic(tmp_path / "a", "x")
    assert everything(tmp_path) == ["a"]


def test_json_with_nan_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json_atomic(tmp_path / "a.json", {"x": float("nan")})
    assert everything(tmp_path) == []


def test_digests_follow_content_not_order():
    assert digest_of({"a": 1, "b": [1, 2]}) == digest_of({"b": [1, 2], "a": 1})
    assert digest_of({"a": 1}) != digest_of({"a": 1.5})


CONFIG = {"out": "here", "seed": 3}


def test_a_new_and_an_empty_directory_are_claimed(tmp_path):
    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "new" / "deep", tmp_path / "empty"):
        assert claim_directory(out, "tune", CONFIG) is False
        marker = json.loads((out / "run.json").read_text())
        assert (marker["schema"], marker["verb"], marker["config"]) == ("specdial/run/1", "tune", CONFIG)
        assert set(marker["provenance"]) == {"made_at", "python", "platform", "versions"}


def test_the_same_run_comes_back_wherever_the_directory_now_lies(tmp_path):
    claim_directory(tmp_path / "a", "tune", CONFIG)
    before = (tmp_path / "a" / "run.json").read_text()
    assert claim_directory(tmp_path / "a", "tune", {**CONFIG, "out": "./here"}) is True
    assert (tmp_path / "a" / "run.json").read_text() == before


@pytest.mark.parametrize(("verb", "config"), [("record", CONFIG), ("tune", {**CONFIG, "seed": 4})])
def test_another_run_is_refused(tmp_path, verb, config):
    claim_directory(tmp_path, "tune", CONFIG)
    with pytest.raises(UserError, match=r"holds another run \(tune\); choose another out="):
        claim_directory(tmp_path, verb, config)
    assert everything(tmp_path) == ["run.json"]


def test_foreign_files_are_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    for out in (tmp_path, tmp_path / "thesis.tex"):
        with pytest.raises(UserError, match="is not a run of specdial"):
            claim_directory(out, "tune", CONFIG)
    assert everything(tmp_path) == ["thesis.tex"]


def test_a_run_killed_before_its_marker_was_in_place_can_be_claimed(tmp_path):
    (tmp_path / ".run.json.12ab.tmp").write_text("{")
    assert claim_directory(tmp_path, "tune", CONFIG) is False
    assert everything(tmp_path) == ["run.json"]


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"3"])
def test_a_damaged_marker_is_refused(tmp_path, content):
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(UserError, match=r"run\.json is not"):
        claim_directory(tmp_path, "tune", CONFIG)
    assert (tmp_path / "run.json").read_bytes() == content


def forked(work) -> int:
    """What a process forked from this one says of `work`: 0 done, 2 refused as in use."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except UserError as error:
            os._exit(2 if "is in use by another run; wait until it has ended, or" in str(error) else 3)
        except BaseException:
            os._exit(4)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_one_process_at_a_time_has_a_directory_until_it_is_gone(tmp_path):
    out = tmp_path / "out"
    assert forked(lambda: claim_directory(out, "tune", CONFIG)) == 0  # and is gone
    assert claim_directory(out, "tune", CONFIG) is True
    assert claim_directory(out, "tune", CONFIG) is True  # one process may come again
    inside = (out / "run.json").read_bytes()
    (out / "policies").mkdir()
    (out / "policies" / ".best.yaml.12ab.tmp").write_text("of the run that is going on")
    assert forked(lambda: claim_directory(out, "tune", CONFIG)) == 2
    assert forked(lambda: claim_directory(out, "record", CONFIG)) == 2
    assert forked(lambda: claim_directory(tmp_path / "other", "tune", CONFIG)) == 0
    assert (out / "policies" / ".best.yaml.12ab.tmp").exists()
    assert (out / "run.json").read_bytes() == inside


def test_workers_share_a_directory_and_keep_others_out(tmp_path):
    claim_directory(tmp_path, "tune", CONFIG, shared=True)
    (tmp_path / ".study.json.12ab.tmp").write_text("of a worker that is going on")
    assert forked(lambda: claim_directory(tmp_path, "tune", CONFIG, shared=True)) == 0
    assert forked(lambda: claim_directory(tmp_path, "tune", CONFIG)) == 2
    assert (tmp_path / ".study.json.12ab.tmp").exists()


def test_what_a_killed_run_left_half_written_is_removed_when_it_comes_back(tmp_path):
    claim_directory(tmp_path, "tune", CONFIG)
    (tmp_path / "policies").mkdir()
    for name in ("study.json", "policies/best.yaml"):
        (tmp_path / name).write_text("whole")
        (tmp_path / name).with_name(f".{(tmp_path / name).name}.12ab.tmp").write_text("half")
    claim_directory(tmp_path, "tune", CONFIG)
    assert everything(tmp_path) == ["policies", "policies/best.yaml", "run.json", "study.json"]


def test_no_time_is_taken_from_a_clock_that_can_jump():
    """The wall clock says when something was made, and nothing else: durations come from monotonic clocks."""
    wall = {"time.time", "time.time_ns", "datetime.now", "datetime.datetime.now", "datetime.utcnow", "date.today"}
    found = set()
    for path in (p for room in ROOMS for p in (ROOT / room).rglob("*.py")):
        calls = {n.func for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.Call)}
        found |= {(path.name, name) for name in map(ast.unparse, calls) if name in wall}
    assert found == {("artifact.py", "datetime.datetime.now")}
