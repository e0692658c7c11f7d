"""Policy files that cannot be trusted: hostile, cut, or changed after they were written. Each is refused by line."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdial import policies
from specdial.policies.errors import UserError
from specdial.policies.file import MAX_BYTES, dump_policy, load_policy, parse_policy, policy_digest
from specdial.policies.schema import MOST_CELLS, SCHEMA, policy_from_mapping

POLICY = policy_from_mapping(
    {
        "name": "mine",
        "controller": {"kind": "fixed", "k": 4},
        "draft_kv": {"sink": 4},
        "cells": [{"from_context_tokens": 100, "overrides": {"controller": {"kind": "none"}}}],
        "expected": {"speedup": 1.5, "text": "a: [b]\n# c é", "low": None},
    }
)
BUILTIN = sorted((Path(policies.__file__).parent / "builtin").glob("*.yaml"))
POLICIES = [POLICY, *(load_policy(path) for path in BUILTIN)]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "must be a mapping"),
        (b"- a\n", "must be a mapping"),
        (b"just text", "must be a mapping"),
        (b"\xff\xfe\x00", "is not UTF-8 text at line 1"),
        (b"name: a\n# \xe9\n", "is not UTF-8 text at line 2"),
        (b"name: a\nk: \x00\x7f", "not valid YAML: a character that is not text at line 2"),
        (b"name: a\nk: 0b_", "k is not a number at line 2"),
        (b"name: a\nk: [1, 2024-13-45]", "k[1] is a date at line 2"),
        (b"name: a\nk: {b: =}", "k.b is a value of YAML's own at line 2"),
        (b"a: " + b"[" * 100_000, "nests too deeply"),
        (b"a: " + b"{b: " * 3000 + b"1" + b"}" * 3000, "nests too deeply"),
        (b"k: " + b"9" * 10_000, "k has 10000 digits at line 1"),
        (b"#" * (MAX_BYTES + 1), "is too large"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_hostile_files_are_refused_in_one_line(tmp_path, content, says):
    path = tmp_path / "policy.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_policy(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 300


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(POLICIES), st.data())
def test_a_file_cut_or_changed_after_it_was_written_is_refused(policy, data):
    text = dump_policy(policy)
    at = data.draw(st.integers(0, len(text) - 1), "at")
    with pytest.raises(UserError, match=r"line \d"):
        parse_policy(text[:at])
    sealed = text.index("\n", text.index("digest:")) + 1
    at = data.draw(st.integers(sealed, len(text) - 1), "changed at")
    other = data.draw(st.characters(codec="ascii").filter(lambda c: c != text[at]), "to")
    with pytest.raises(UserError, match=r"line \d"):
        parse_policy(text[:at] + other + text[at + 1 :])


def test_every_line_that_a_file_loses_at_its_end_is_missed():
    lines = dump_policy(POLICY).splitlines(keepends=True)
    for kept in range(len(lines)):
        with pytest.raises(UserError) as caught:
            parse_policy("".join(lines[:kept]))
        assert "line" in str(caught.value)
    with pytest.raises(UserError, match="digest at line 2 is of other content: the file was cut or changed"):
        parse_policy("".join(lines[:-1]))


def test_a_digest_may_be_taken_off_and_comments_may_stand_above_it():
    text = dump_policy(POLICY)
    assert parse_policy("# mine\n" + text) == POLICY
    by_hand = re.sub("^digest: .*\n", "", text, flags=re.MULTILINE)
    assert parse_policy(by_hand.replace("sink: 4", "sink: 5")).draft_kv.sink == 5


def test_a_prediction_of_other_decisions_is_refused():
    stamped = replace(POLICY, provenance={"policy_digest": "0" * 64})
    with pytest.raises(UserError, match=r"provenance.policy_digest is of other decisions.* \(line \d\d\)"):
        parse_policy(dump_policy(stamped))
    good = replace(stamped, provenance={"policy_digest": policy_digest(stamped)})
    assert parse_policy(dump_policy(good)) == good


def test_cells_without_end_are_refused():
    cells = "".join("- overrides: {}\n" for _ in range(MOST_CELLS + 1))
    with pytest.raises(UserError, match=rf"cells has {MOST_CELLS + 1} entries \(line 3\); use at most {MOST_CELLS}"):
        parse_policy(f"schema: {SCHEMA}\nname: many\ncells:\n{cells}")


def test_billions_of_laughs_are_refused(tmp_path):
    rows = ["a0: &a0 [x, x]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 40))]
    with pytest.raises(UserError, match="anchor, alias or tag at line 1"):
        parse_policy("\n".join(rows))
