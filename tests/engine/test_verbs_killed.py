"""A recording killed at any moment: what is on disk can be read, and a second call finishes it as if nothing happened.

The kill is a real SIGKILL, at the moment before a chosen file gets its name: the worst one.
"""

import itertools
import os
import signal
from pathlib import Path

import pytest

from specdial.engine.trace.reader import read_trace
from specdial.engine.verbs import record
from specdial.policies.errors import UserError

TIMES = ["draft_us", "verify_us", "select_us", "host_us"]
# Files appear in the order run.json, meta.json, then drafts, outputs and rounds of document after document.
KILLS = {1: 0, 2: 0, 5: 0, 6: 1, 10: 2}  # file about to be renamed: documents finished by then

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def settings(tiny_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    (folder / "text.txt").write_text("\n\n".join(f"Paragraph {i}, on {i * i} things." for i in range(300)))
    return {
        "model": {"source": str(tiny_checkpoint("llama")), "device": "cpu"},
        "workload": {
            "kind": "file",
            "path": str(folder / "text.txt"),
            "context_tokens": 80,
            "documents": 3,
            "new_tokens": 12,
        },
        "policy": {
            "controller": {"kind": "fixed", "k": 3},
            "draft_kv": {"budget": 40, "sink": 2, "recent": 8, "window": 8},
        },
        "dense": True,
        "budgets": [48],
        "k_max": 4,
        "out": str(folder / "trace"),
    }


@pytest.fixture(scope="module")
def killed(settings, one_thread):
    """The folder of every kill: of a process forked here that records until its n-th rename, and dies there."""
    rename, places = os.replace, {kill: Path(f"{settings['out']}-{kill}") for kill in KILLS}
    for kill, out in places.items():
        child = os.fork()
        if child == 0:
            count = itertools.count(1)

            def replace(old, new, count=count, kill=kill):
                if next(count) == kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                rename(old, new)

            try:
                os.replace = replace
                record.run({**settings, "out": str(out)})
            finally:
                os._exit(1)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    return places


@pytest.fixture(scope="module")
def undisturbed(settings):
    record.run(settings)
    return read_trace(settings["out"])


@pytest.mark.parametrize(("kill", "finished"), KILLS.items())
def test_what_was_finished_is_read_and_the_rest_is_recorded(killed, settings, undisturbed, kill, finished):
    out = killed[kill]
    assert len(list(out.glob(".*.tmp"))) == 1  # the file that never got its name
    if finished:
        assert set(read_trace(out).rounds["doc"].to_pylist()) == set(range(finished))
    else:
        with pytest.raises(UserError, match=r"has no finished document|is not a trace"):
            read_trace(out)
    kept = {path: path.read_bytes() for path in out.glob("rounds-*.parquet")}
    found = record.run({**settings, "out": str(out)})
    assert (found["resumed_documents"], found["documents"]) == (finished, 3 - finished)
    assert not list(out.glob(".*.tmp"))
    assert all(path.read_bytes() == content for path, content in kept.items())
    trace = read_trace(out)
    assert trace.drafts.equals(undisturbed.drafts)
    assert trace.outputs.equals(undisturbed.outputs)
    assert trace.rounds.drop_columns(TIMES).equals(undisturbed.rounds.drop_columns(TIMES))
