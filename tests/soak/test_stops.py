"""What may stop a run: a kill, Ctrl-C, a full disk, a directory that cannot be written, another run. Nothing is lost.

Kills are a few of the many that `make soak` does.
"""

import os
import resource
import signal
import sys

import pytest
import torch

from specdial.conf import cli
from specdial.engine.trace.reader import read_trace
from specdial.policies.errors import UserError

DISTURBED = ["record", "tune", "export"]
VERBS = ["record", "calibrate", "tune", "validate", "export"]
NOBODY = 65534


@pytest.fixture
def same(script, world):
    """same(verb, out): the files of a run are those of an undisturbed one."""
    kill = script("kill")

    def check(verb, out):
        assert kill.differing(kill.everything(out), world.undisturbed[verb]) == []

    return check


@pytest.fixture
def in_child(script):
    """in_child(work) -> exit code of a process forked here: 0, or 2 for a UserError that `says` all these words."""

    def run(work, *says):
        child = os.fork()
        if child == 0:
            code = 4
            try:
                script("kill").silence()
                work()
                code = 0
            except UserError as error:
                code = 2 if all(word in str(error) for word in says) and "\n" not in str(error) else 3
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    return run


def test_kill_9_at_any_moment(script, world):
    kills = script("kill").kill_many(world, 3, seed=3)
    assert min(kills[verb] for verb in DISTURBED) >= 1


@pytest.mark.parametrize("verb", DISTURBED)
def test_a_full_disk_is_told_in_one_line_and_the_run_goes_on_when_there_is_room(script, world, same, in_child, verb):
    """The limit on a file's size stands for the disk: the largest file does not fit, whatever times it holds."""
    kill, out = script("kill"), world.folder / f"{verb}-full"
    sizes = [path.stat().st_size for path in (world.folder / f"{verb}-undisturbed").rglob("*") if path.is_file()]

    def crowded():
        resource.setrlimit(resource.RLIMIT_FSIZE, (max(sizes) * 3 // 4, resource.RLIM_INFINITY))
        world.actions[verb](out)

    assert in_child(crowded, f"cannot write {out}/", "File too large; free space or choose another out=") == 2
    kill.everything(out)  # whole files only
    assert not list(out.rglob("*.tmp"))
    kill.completed(world.actions[verb], out)
    same(verb, out)


@pytest.mark.parametrize("verb", VERBS)
def test_a_directory_that_cannot_be_written_is_named(world, in_child, verb):
    locked = world.folder / f"{verb}-locked"
    locked.mkdir(mode=0o555)

    def unprivileged():
        if os.geteuid() == 0:
            os.seteuid(NOBODY)
        world.actions[verb](locked / "out")

    assert in_child(unprivileged, "cannot write", str(locked), "Permission denied") == 2
    assert list(locked.iterdir()) == []


def test_two_runs_on_one_directory(world, same, in_child, monkeypatch):
    """The first one stops itself midway, the second one is refused, the first one ends as if alone."""
    out, rename, files = world.folder / "record-two", os.replace, []

    def stop_at_the_fifth(old, new):
        files.append(new)
        if len(files) == 5:
            os.kill(os.getpid(), signal.SIGSTOP)
        rename(old, new)

    first = os.fork()
    if first == 0:
        os.replace = stop_at_the_fifth
        try:
            world.actions["record"](out)
        finally:
            os._exit(0)
    assert os.WIFSTOPPED(os.waitpid(first, os.WUNTRACED)[1])
    words = (f"{out} is in use by another run; wait until it has ended, or choose another out=",)
    assert in_child(lambda: world.actions["record"](out), *words) == 2
    os.kill(first, signal.SIGCONT)
    os.waitpid(first, 0)
    same("record", out)


STOPS = {
    "ctrl-c": (lambda: signal.raise_signal(signal.SIGINT), 130, "interrupted; finished parts are on disk"),
    "no memory on the device": (
        lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\n2 GiB")),
        2,
        "specdial: out of memory: CUDA out of memory. Tried to allocate; lower the batch or the context, then start",
    ),
}


@pytest.mark.parametrize("name", STOPS)
def test_what_was_finished_stays_and_the_next_call_goes_on(
    name, tiny_checkpoint, tmp_path, monkeypatch, capsys, one_thread, request
):
    """Stopped at the moment before a file of the second document gets its name, the signal a real one."""
    stop, code, said = STOPS[name]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    (tmp_path / "text.txt").write_text("\n\n".join(f"Paragraph {i}, on {i * i} things." for i in range(300)))
    shape = ["hardware=cpu", "workload=file", "workload.documents=2", "workload.new_tokens=8", "context=64"]
    place = [f"model={tiny_checkpoint('llama')}", f"workload.path={tmp_path / 'text.txt'}", "policy=plain"]

    def record(out):
        monkeypatch.setattr(sys, "argv", ["specdial", "record", *shape, *place, f"out={tmp_path / out}"])
        monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # so that what the command sets is taken back
        try:
            cli.main()
        except SystemExit as end:
            return end.code
        return 0

    rename = os.replace

    def stopping(old, new):
        if "drafts-00001" in str(new):
            stop()
        rename(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", stopping)
        assert record("stopped") == code
    assert capsys.readouterr().err.splitlines()[-1].startswith(said)
    assert set(read_trace(tmp_path / "stopped").rounds["doc"].to_pylist()) == {0}
    assert record("stopped") == record("whole") == 0
    assert read_trace(tmp_path / "stopped").outputs.equals(read_trace(tmp_path / "whole").outputs)
    assert not list((tmp_path / "stopped").glob(".*"))


def test_what_is_out_of_memory_and_what_is_a_fault():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    assert cli.out_of_memory(caught.value)
    assert cli.out_of_memory(MemoryError())
    assert cli.out_of_memory(RuntimeError("Triton Error [CUDA]: out of memory"))
    assert not cli.out_of_memory(RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"))


def test_a_sweep_where_nothing_can_be_written_is_one_line(monkeypatch, capsys):
    """In /proc not even root can make a folder."""
    monkeypatch.chdir("/proc")
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(sys, "argv", ["specdial", "export", "-m", "policy=plain,lookup", "out=x.yaml"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capsys.readouterr().err.splitlines()
    assert (end.value.code, len(said)) == (2, 1)
    assert said[0].startswith("specdial: cannot use multirun")
