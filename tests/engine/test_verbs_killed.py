"""A recording killed at any moment: what is on disk can be read, and a second call finishes it as if nothing happened.

The kill is a real SIGKILL, at the moment before a chosen file gets its name: the worst one. Of a validation, which
groups of documents a second call measures; random kills of it are in tests/soak.
"""

import itertools
import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specdial.engine.batches import Batches
from specdial.engine.fidelity import Fidelity
from specdial.engine.trace.reader import read_trace
from specdial.engine.verbs import record, validate
from specdial.engine.verbs.validate_groups import TYPES, Group, KeptGroups
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


LOSSY = {"name": "lossy", "drafter": {"kind": "lookup"}, "controller": {"kind": "fixed", "k": 3}}
LOSSY |= {"verify_kv": {"mode": "partial", "source": "recent", "sink": 1, "recent": 5, "full_period": 3}}


@pytest.fixture
def groups(monkeypatch):
    """The first document of every group that is prefilled; where `at` is set, the group of that one is ctrl-c."""
    seen, prefilled = [], Batches.prefilled

    def noted(self, documents):
        if documents[0].index == noted.at:
            raise KeyboardInterrupt
        seen.append(documents[0].index)
        return prefilled(self, documents)

    noted.at, noted.seen = None, seen
    monkeypatch.setattr(Batches, "prefilled", noted)
    return noted


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def validation(settings, tiny_checkpoint, request):
    policies = [{**settings["policy"], "name": "three"}, LOSSY]
    shared = {"model": {"source": str(tiny_checkpoint("llama", head_dim=64)), "device": request.param}}
    return {
        **shared,
        "workload": settings["workload"],
        "policies": policies,
        "split": "all",
        "batch": 2,
        "repeats": 2,
        "bootstrap": 20,
    }


def counted(found):
    """What validate says of its policies, without times and what follows from them."""
    timed = {"speedup", "low", "high", "us_per_token", "repeat_spread_frac", "longest_round", "full_batch"}
    return [{name: x for name, x in p["measured"].items() if name not in timed} for p in found["policies"]]


def test_a_validation_goes_on_with_the_groups_that_it_had_not_measured(validation, groups, tmp_path, capsys):
    wanted = counted(validate.run({**validation, "out": str(tmp_path / "whole")}))
    assert groups.seen == [0, 2]
    out = tmp_path / "stopped"
    groups.at = 2
    with pytest.raises(KeyboardInterrupt):
        validate.run({**validation, "out": str(out)})
    path = out / "groups" / "00000.json"
    kept = json.loads(path.read_text())
    kept["policies"][1]["times_us"] = [1e9, 1e9]  # the first after plain decoding
    path.write_text(json.dumps(kept))
    groups.at, groups.seen[:] = None, []
    found = validate.run({**validation, "out": str(out)})
    assert groups.seen == [2]
    assert "1 of 2 groups of documents were measured before" in capsys.readouterr().out
    assert wanted[1]["fidelity"]["top1_agreement"] is not None
    assert counted(found) == wanted
    assert found["policies"][0]["measured"]["us_per_token"] > 1e9 / wanted[0]["tokens"]
    assert not (out / "groups").exists()
    validate.run({**validation, "out": str(out)})
    assert groups.seen == [2, 0, 2]  # a finished run is measured again


def test_groups_of_another_text_are_measured_again(validation, groups, tmp_path):
    groups.at = 2
    with pytest.raises(KeyboardInterrupt):
        validate.run({**validation, "out": str(tmp_path / "v")})
    path = Path(validation["workload"]["path"])
    text = path.read_text()
    groups.at, groups.seen[:] = None, []
    try:
        path.write_text(text.replace("things", "thinks"))
        validate.run({**validation, "out": str(tmp_path / "v")})
    finally:
        path.write_text(text)
    assert groups.seen == [0, 2]


def test_groups_measured_on_another_machine_are_measured_again(validation, groups, tmp_path, monkeypatch):
    groups.at = 2
    here = validate.hardware
    monkeypatch.setattr(validate, "hardware", lambda device: {"device": "cpu", "name": "another"})
    with pytest.raises(KeyboardInterrupt):
        validate.run({**validation, "out": str(tmp_path / "v")})
    monkeypatch.setattr(validate, "hardware", here)
    groups.at, groups.seen[:] = None, []
    validate.run({**validation, "out": str(tmp_path / "v")})
    assert groups.seen == [0, 2]


def test_a_damaged_group_is_one_clear_error(tmp_path):
    kept = KeptGroups(tmp_path, {"model": "m"})
    kept.save(0, [Group()])
    path = tmp_path / "groups" / "00000.json"
    whole = path.read_text()
    for damaged in (whole[:-9], "[]", "{}", whole.replace('"times_us"', '"times"')):
        path.write_text(damaged)
        with pytest.raises(UserError, match=r"00000.json is damaged; delete it"):
            kept.load(0)


def test_what_is_kept_of_a_group_comes_back_as_it_was(tmp_path):
    columns = {"top1_match": [True, False], "kl_nats": [0.25, math.nan], "hidden_cosine": [math.nan, 1.0]}
    arrays = {name: np.array(columns[name], dtype) for name, dtype in TYPES.items() if name in columns}
    judged = Fidelity(**arrays, rounds_since_full=np.array([0, 3]), prefix_tokens=1, agreeing_tokens=2, plain_tokens=4)
    groups = [Group([1.5, 2.0], [1.0], 3, 4, 5, 6, 7, 8, 9, {"draft": 0.5, "host": 2.0}, [judged]), Group()]
    kept = KeptGroups(tmp_path, {"hardware": {"name": "here"}})
    kept.save(3, groups)
    assert kept.load(2) is None
    assert KeptGroups(tmp_path, {"hardware": {"name": "there"}}).load(3) is None
    one, empty = kept.load(3)
    assert empty == groups[1]
    (found,) = one.fidelity
    for name, dtype in TYPES.items():
        assert getattr(found, name).dtype == dtype
        np.testing.assert_array_equal(getattr(found, name), getattr(judged, name))
    assert replace(found, **{name: getattr(judged, name) for name in TYPES}) == judged
    assert replace(one, fidelity=[]) == replace(groups[0], fidelity=[])
