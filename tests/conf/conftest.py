"""The command line in this process, and things for it to work on: a trace, costs, tiny models."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from specdial.conf import cli as command
from specdial.simulator.synthetic import Shape, write_synthetic_costs, write_trace


@dataclass(frozen=True, slots=True)
class Result:
    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def one_thread_always(one_thread):
    """See one_thread."""


@pytest.fixture
def cli(tmp_path, monkeypatch, capfd):
    """cli("replay", "trace=...") -> Result: the whole command but the process, in a fresh working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # so that what the command sets is taken back

    def run(*arguments: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["specdial", *map(str, arguments)])
        capfd.readouterr()
        try:
            command.main()
            code = 0
        except SystemExit as stop:
            code = stop.code
        sys.stdout.flush()
        return Result(code, *capfd.readouterr())

    return run


@pytest.fixture
def refused(cli, tmp_path):
    """refused("replay", ..., says=WORDS): exit code 2, one line with the words on stderr, no file made or changed."""

    def check(*arguments: str, says: str) -> None:
        before = {path: path.read_bytes() for path in everything(tmp_path)}
        result = cli(*arguments)
        lines = result.err.splitlines()
        assert (result.code, len(lines)) == (2, 1), result
        assert lines[0].startswith("specdial: ")
        assert says in lines[0]
        assert "; " in lines[0]  # a cause, then a remedy
        assert {path: path.read_bytes() for path in everything(tmp_path)} == before

    return check


def everything(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.name != "multirun.yaml"]


@pytest.fixture(scope="session")
def synthetic(tmp_path_factory):
    """A folder with dense synthetic traces under runs/, said to be of `book` and `stdlib`, and costs."""
    folder = tmp_path_factory.mktemp("synthetic")
    shape = Shape(documents=3, new_tokens=24)
    for kind in ("book", "stdlib"):
        write_trace(folder / "runs" / kind, shape)
        meta = json.loads((folder / "runs" / kind / "meta.json").read_text())
        (folder / "runs" / kind / "meta.json").write_text(json.dumps({**meta, "workload": {"kind": kind}}))
    write_synthetic_costs(folder / "costs", (256, 512, 1024), (1,), shape)
    return folder


@pytest.fixture
def replayed(synthetic):
    """Arguments that every replay of the synthetic trace needs."""
    return (
        f"trace={synthetic / 'runs' / 'book'}",
        f"costs={synthetic / 'costs'}",
        "bootstrap=0",
        "draft_kv.sink=4",
        "draft_kv.recent=16",
    )
