"""A recording killed at any moment: what is on disk can be read, and a second call finishes it as if nothing happened.

The kill is a real SIGKILL, at the moment before a chosen file gets its name: the worst one. Of a validation, which
groups of documents a second call measures; random kills of it are in tests/soak.
"""

import itertools
import json
import math
import os
import signal
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from specdial.engine import timed
from specdial.engine.batches import Batches
from specdial.engine.fidelity import Fidelity
from specdial.engine.trace.reader import read_trace
from specdial.engine.verbs import record, validate
from specdial.engine.verbs.validate_groups import FILE, TYPES, Group, KeptGroup, KeptGroups
from specdial.policies.artifact import digest_of
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


@pytest.fixture
def stopped(validation, groups, tmp_path):
    """Where a validation of two groups was stopped in the second one."""
    groups.at = 2
    with pytest.raises(KeyboardInterrupt):
        validate.run({**validation, "out": str(tmp_path / "stopped")})
    groups.at, groups.seen[:] = None, []
    return tmp_path / "stopped"


def counted(found):
    """What validate says of its policies, without times and what follows from them."""
    timed = {"speedup", "low", "high", "us_per_token", "repeat_spread_frac", "longest_round", "full_batch"}
    return [{name: x for name, x in p["measured"].items() if name not in timed} for p in found["policies"]]


def test_a_validation_goes_on_with_the_groups_that_it_had_not_measured(
    validation, groups, stopped, tmp_path, capsys, monkeypatch
):
    whole = validate.run({**validation, "out": str(tmp_path / "whole")})
    wanted = counted(whole)
    assert (groups.seen, whole["resumed_groups"]) == ([0, 2], 0)
    (line,) = (json.loads(line)[1] for line in (stopped / FILE).read_text().splitlines())
    line["policies"][1]["times_us"] = [1e9, 1e9]  # the first after plain decoding
    line["spent_s"] = 1e6
    (stopped / FILE).write_text(json.dumps([digest_of(line), line]) + "\n" + '["torn')
    groups.seen[:] = []
    decoded, decode = [], timed.decode
    monkeypatch.setattr(timed, "decode", lambda *args, **more: decoded.append(args[1].name) or decode(*args, **more))
    found = validate.run({**validation, "out": str(stopped)})
    assert groups.seen == [2]
    assert Counter(decoded) == {"plain": 1 + 2 * 2, "three": 1 + 2, "lossy": 1 + 2}  # once to warm up, then timed
    said = capsys.readouterr()
    assert "1 of 2 groups of documents were measured before" in said.out
    assert wanted[1]["fidelity"]["top1_agreement"] is not None
    assert counted(found) == wanted
    assert found["policies"][0]["measured"]["us_per_token"] > 1e9 / wanted[0]["tokens"]
    content = json.loads((stopped / "validation.json").read_text())
    assert (content["resumed_groups"], found["resumed_groups"]) == (1, 1)
    assert content["engine_s"] > 1e6
    assert not (stopped / FILE).exists()
    validate.run({**validation, "out": str(stopped)})
    assert groups.seen == [2, 0, 2]  # a finished run is measured again


def test_progress_is_over_what_is_left_to_measure(validation, stopped, monkeypatch):
    bars = []

    @contextmanager
    def progress(name, total):
        bars.append(SimpleNamespace(total=total, done=0))
        bars[0].advance = lambda count, said: setattr(bars[0], "done", bars[0].done + count)
        yield bars[0]

    monkeypatch.setattr(validate, "progress", progress)
    validate.run({**validation, "out": str(stopped)})
    assert bars[0].done == bars[0].total == 3 + 2 * 4


def test_groups_of_another_text_are_measured_again(validation, groups, stopped):
    path = Path(validation["workload"]["path"])
    text = path.read_text()
    try:
        path.write_text(text.replace("things", "thinks"))
        validate.run({**validation, "out": str(stopped)})
    finally:
        path.write_text(text)
    assert groups.seen == [0, 2]


@pytest.mark.parametrize("other", ["hardware", "versions", "model", "draft_models"])
def test_groups_measured_under_other_facts_are_measured_again(validation, groups, stopped, other, monkeypatch):
    described, made = validate.describe, validate.provenance
    if other == "hardware":
        monkeypatch.setattr(validate, "hardware", lambda device: {"device": "cpu", "name": "another"})
    if other == "versions":
        monkeypatch.setattr(validate, "provenance", lambda: {**made(), "versions": {"specdial": "99"}})
    if other == "draft_models":
        changed = {"draft_models": {"small": "another digest"}}
        monkeypatch.setattr(validate, "describe", lambda *args: {**described(*args), **changed})
    if other == "model":
        weights = Path(validation["model"]["source"]) / "model.safetensors"
        kept = weights.read_bytes()
        weights.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    try:
        validate.run({**validation, "out": str(stopped)})
    finally:
        if other == "model":
            weights.write_bytes(kept)
    assert groups.seen == [0, 2]


def kept_line(tmp_path):
    kept = KeptGroups(tmp_path, {"model": "m"})
    kept.save(0, KeptGroup([Group()], 1.5))
    return kept, tmp_path / FILE


@given(damage=st.data())
@hypothesis_settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_group_is_one_clear_error(tmp_path, damage):
    kept, path = kept_line(tmp_path)
    whole = path.read_bytes()
    place = damage.draw(st.sampled_from([i for i, byte in enumerate(whole[:-1]) if byte != ord(" ")]))
    byte = damage.draw(st.integers(0, 255).filter(lambda b: b != whole[place]))
    path.write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
    with pytest.raises(UserError, match=r"line [12] of .*groups.journal is damaged"):
        kept.load()
    kept.forget()


@pytest.mark.parametrize("line", ["[]", "{}", "null", "[" * 100_000, '["digest", {}]', "[1, 2, 3]", ""])
def test_a_line_of_something_else_is_one_clear_error(tmp_path, line):
    kept, path = kept_line(tmp_path)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(UserError, match=r"line 2 of .*groups.journal is damaged"):
        kept.load()


@pytest.mark.parametrize("rest", [b"", b"[", b"\x00" * 7])
def test_a_line_without_an_end_counts_for_nothing(tmp_path, rest):
    kept, path = kept_line(tmp_path)
    path.write_bytes(path.read_bytes() + rest)
    assert list(kept.load()) == [0]
    kept.save(1, KeptGroup([Group()], 1.0))
    assert list(kept.load()) == [0, 1]


def test_a_journal_that_cannot_be_read_or_written_is_one_clear_error(tmp_path):
    (tmp_path / FILE).mkdir()
    kept = KeptGroups(tmp_path, {})
    with pytest.raises(UserError, match="cannot read"):
        kept.load()
    with pytest.raises(UserError, match="cannot write"):
        kept.save(0, KeptGroup([], 0.0))


def test_what_is_kept_of_a_group_comes_back_as_it_was(tmp_path):
    columns = {"top1_match": [True, False], "kl_nats": [0.25, math.nan], "hidden_cosine": [math.nan, 1.0]}
    arrays = {name: np.array(columns[name], dtype) for name, dtype in TYPES.items() if name in columns}
    judged = Fidelity(**arrays, rounds_since_full=np.array([0, 3]), prefix_tokens=1, agreeing_tokens=2, plain_tokens=4)
    groups = [Group([1.5, 2.0], [1.0], 3, 4, 5, 6, 7, 8, 9, {"draft": 0.5, "host": 2.0}, [judged]), Group()]
    kept = KeptGroups(tmp_path, {"hardware": {"name": "here"}})
    kept.save(3, KeptGroup(groups, 4.5))
    assert KeptGroups(tmp_path, {"hardware": {"name": "there"}}).load() == {}
    ((number, found),) = kept.load().items()
    one, empty = found.groups
    assert (number, found.spent_s, empty) == (3, 4.5, groups[1])
    (fidelity,) = one.fidelity
    for name, dtype in TYPES.items():
        assert getattr(fidelity, name).dtype == dtype
        np.testing.assert_array_equal(getattr(fidelity, name), getattr(judged, name))
    assert replace(fidelity, **{name: getattr(judged, name) for name in TYPES}) == judged
    assert replace(one, fidelity=[]) == replace(groups[0], fidelity=[])
