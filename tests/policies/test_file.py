"""Policy files: what is written reads back byte for byte; what is wrong is refused by field and line."""

import dataclasses
import re
import typing
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specdial import policies
from specdial.policies.controllers import CONTROLLERS
from specdial.policies.errors import UserError
from specdial.policies.fields import to_plain
from specdial.policies.file import dump_policy, load_policy, parse_policy, policy_digest, save_policy, short_digest
from specdial.policies.schema import SCHEMA, Policy, policy_from_mapping

BUILTIN = sorted((Path(policies.__file__).parent / "builtin").glob("*.yaml"))
CONF = Path(policies.__file__).parents[1] / "conf"

# Line numbers below count from the schema line, 1.
TEXT = """\
schema: specdial/policy/1
name: mine
drafter:
  kind: sparse_self
controller:
  kind: rate
  k_max: 8
  k_set: [2, 4]
draft_kv:
  budget: 512
  sink: 4
cells:
- from_context_tokens: 100
  overrides:
    controller: {kind: none}
- overrides:
    draft_kv:
      budget: 256
lossless: true
expected: {speedup: 1.5, low: null}
"""

DRAFTERS = [
    {"kind": "sparse_self", "weights": "fp8"},
    {"kind": "model", "model": "a"},
    {"kind": "model", "model": "b"},
    {"kind": "lookup"},
    {"kind": "lookup", "ngram": 5},
]
names = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=20).filter(
    lambda name: not name.startswith(".") and "/" not in name and "\\" not in name
)
plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
blocks = st.none() | st.dictionaries(st.text(max_size=8), plain_values, max_size=3)
controllers = st.one_of(
    st.just({"kind": "none"}),
    st.builds(lambda k: {"kind": "fixed", "k": k}, st.integers(1, 64)),
    st.builds(lambda k, t: {"kind": "entropy", "k_max": k, "threshold": t}, st.integers(1, 64), st.floats(-10, 1)),
    st.builds(
        lambda k, t, lag: {"kind": "confidence", "k_max": k, "threshold": t, "lag": lag},
        st.integers(1, 64),
        st.floats(0, 1),
        st.integers(0, 1),
    ),
    st.builds(
        lambda form, g, ks: {"kind": "rate", "form": form, "k_max": 64, "gamma": g, "k_set": ks},
        st.sampled_from(["calibrated", "paper"]),
        st.floats(0, 100),
        st.lists(st.integers(1, 64), max_size=4),
    ),
)
draft_kvs = st.builds(
    lambda sink, recent, size, scope, decay, refresh: {
        **size(sink + recent),
        "sink": sink,
        "recent": recent,
        "scope": scope,
        "decay": decay,
        "refresh_rounds": refresh,
    },
    st.integers(0, 64),
    st.integers(0, 64),
    st.one_of(
        st.integers(1, 4096).map(lambda more: lambda least: {"budget": least + more}),
        st.floats(0.001, 1.0).map(lambda frac: lambda least: {"budget_frac": frac}),
    ),
    st.sampled_from(["kv_head", "layer"]),
    st.floats(0.1, 1.0),
    st.integers(0, 9),
)
cells = st.builds(
    lambda low, more, controller: {
        "from_context_tokens": low,
        "to_context_tokens": None if more is None else low + more,
        "overrides": {"controller": controller},
    },
    st.integers(0, 10**6),
    st.none() | st.integers(1, 10**6),
    controllers,
)
any_policy = st.builds(
    lambda **parts: policy_from_mapping(parts),
    name=names,
    controller=controllers,
    draft_kv=draft_kvs,
    cells=st.lists(cells, max_size=3),
    expected=blocks,
    measured=blocks,
    provenance=blocks,
)


@settings(max_examples=60, deadline=None)
@given(any_policy)
@example(policy_from_mapping({"name": "é", "provenance": {"a\x85b": "\u2028", "c": " \u2029\r\n\ufeff"}}))
def test_a_saved_policy_reads_back_and_saves_to_the_same_bytes(policy):
    text = dump_policy(policy)
    again = parse_policy(text)
    assert again == policy
    assert dump_policy(again) == text
    assert policy_digest(again) == policy_digest(policy)


def test_files_round_trip_byte_for_byte(tmp_path):
    policy = parse_policy(TEXT)
    save_policy(policy, tmp_path / "a.yaml")
    save_policy(load_policy(tmp_path / "a.yaml"), tmp_path / "b.yaml")
    assert (tmp_path / "a.yaml").read_bytes() == (tmp_path / "b.yaml").read_bytes()
    assert load_policy(tmp_path / "b.yaml") == policy


@pytest.mark.parametrize("path", BUILTIN, ids=lambda path: path.stem)
def test_built_in_policies_are_canonical(path):
    policy = load_policy(path)
    assert policy.name == path.stem
    body = "".join(line for line in path.read_text().splitlines(keepends=True) if not line.startswith("#"))
    assert body == re.sub("^digest: .*\n", "", dump_policy(policy), flags=re.MULTILINE)


def test_there_are_built_in_policies():
    assert {"plain", "sparse_self"} <= {path.stem for path in BUILTIN}


@pytest.mark.parametrize("kind", CONTROLLERS)
def test_the_conf_group_holds_the_defaults(kind):
    defaults = to_plain(CONTROLLERS[kind][0](), complete=True)
    assert yaml.safe_load((CONF / "controller" / f"{kind}.yaml").read_text()) == defaults


def test_the_conf_group_knows_every_kind():
    assert {path.stem for path in (CONF / "controller").glob("*.yaml")} == set(CONTROLLERS)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("name: mine", "name: 7", "name must be text, got 7 (line 2)"),
        ("name: mine", "name: a/b", "name is 'a/b' (line 2)"),
        ("name: mine", "name: ''", "name is '' (line 2)"),
        ("name: mine", "name: ..", "name is '..' (line 2)"),
        ("name: mine", "name: 2024-01-01", "name is a date at line 2; put it in quotes"),
        ("name: mine", "speed: 7", "unknown field speed (line 2); use one of name, drafter"),
        ("name: mine", "speed-up: 7", "unknown field speed-up (line 2)"),
        ("name: mine", "'a\\nb': 7", "(line 2)"),
        ("kind: sparse_self", "kind: medusa", "drafter.kind is 'medusa' (line 4); use one of none, sparse_self, model"),
        ("kind: sparse_self", "kind: none", "drafter none cannot serve controller rate (line 3)"),
        ("kind: sparse_self", "kind: model", "drafter.model is missing (line 3)"),
        ("kind: sparse_self", "ngram: 5", "drafter.ngram is 5, which drafter sparse_self does not use (line 4)"),
        ("k_max: 8", "lag: 2", "controller.lag is 2 (line 7); use one of 0, 1"),
        ("sink: 4", "decay: 0", "draft_kv.decay is 0 (line 11); use more than 0"),
        (
            "sink: 4",
            "budget_frac: 0.1",
            "cells[1].overrides.draft_kv.budget is 256, which budget_frac 0.1",
        ),
        ("kind: rate", "kind: magic", "controller.kind is 'magic' (line 6); use one of none, fixed"),
        ("kind: rate", "kind: [rate]", "controller.kind is ['rate'] (line 6)"),
        ("  kind: rate\n", "", "controller.kind is None (line 5)"),
        ("k_max: 8", "k_max: 8.0", "controller.k_max must be a whole number, got 8.0 (line 7)"),
        ("k_max: 8", "k_max: 65", "controller.k_max is 65 (line 7); use at most 64"),
        ("k_max: 8", "gamma: .nan", "controller.gamma is nan (line 7)"),
        ("k_max: 8", "gamma: .inf", "controller.gamma is inf (line 7)"),
        ("k_max: 8", "gamma: yes", "controller.gamma must be a number, got True (line 7)"),
        ("k_max: 8", "kmax: 8", "unknown field controller.kmax (line 7)"),
        ("k_max: 8", "k_max: 3", "controller.k_set holds 4, k_max is 3 (line 8)"),
        ("[2, 4]", "[2, four]", "controller.k_set[1] must be a whole number, got 'four' (line 8)"),
        ("[2, 4]", "2", "controller.k_set must be a list, got 2 (line 8)"),
        ("budget: 512", "budget: -1", "draft_kv.budget is -1 (line 10); use at least 1"),
        ("budget: 512", "budget: 60", "draft_kv.budget is 60, smaller than sink + recent = 68 (line 10)"),
        ("sink: 4", "sink: 600", "draft_kv.budget is 512, smaller than sink + recent = 664 (line 10)"),
        ("text_tokens: 100\n", "text_tokens: 99999999\n", "cells[0].from_context_tokens is 99999999 (line 13); use at"),
        ("text_tokens: 100\n", "text_tokens: -1\n", "cells[0].from_context_tokens is -1 (line 13); use at least 0"),
        ("from_context_tokens: 100\n", "to_batch: 1048577\n", "cells[0].to_batch is 1048577 (line 13); use at most"),
        ("- from_context_tokens: 100\n", "- from_context: 1\n", "unknown field cells[0].from_context (line 13)"),
        ("  overrides:\n    controller", "  x:\n    controller", "unknown field cells[0].x (line 14)"),
        ("  overrides:\n    controller: {kind: none}\n", "", "cells[0].overrides is missing (line 13)"),
        ("controller: {kind: none}", "name: other", "cells[0].overrides.name cannot vary by cell (line 15)"),
        ("controller: {kind: none}", "controller: none", "cells[0].overrides.controller must be a mapping (line 15)"),
        ("{kind: none}", "{kind: fixed, k: 0}", "cells[0].overrides.controller.k is 0 (line 15)"),
        ("from_context_tokens: 100\n", "to_batch: 2\n  from_batch: 2\n", "cells[0].to_batch is 2, not above"),
        ("      budget: 256", "      budget: 10", "cells[1].overrides.draft_kv.budget is 10, smaller than sink"),
        ("lossless: true", "lossless: false", "lossless is False at line 19 but its settings make it True"),
        ("lossless: true", "lossless: 1", "lossless is 1 at line 19"),
        ("low: null", "low: .nan", "expected.low is nan (line 20)"),
        ("low: null", "low: 2024-01-01", "expected.low is a date at line 20"),
        ("{speedup: 1.5, low: null}", "1.5", "expected must be a mapping, got 1.5 (line 20)"),
        ("name: mine", "name: ../../etc/passwd", "name is '../../etc/passwd' (line 2)"),
        ("name: mine", 'name: "a\\0b"', "name is 'a\\x00b' (line 2)"),
        ("name: mine", "name: C:\\x", "name is 'C:\\\\x' (line 2)"),
        ("name: mine", "name: !!binary bWluZQ==", "anchor, alias or tag at line 2"),
        ("budget: 512", "budget: 0x" + "f" * 400, "use at most 16777216"),
        ("budget: 512", "budget: 1" + "0" * 400, "use at most 16777216"),
        ("budget: 512", "budget: 1e400", "draft_kv.budget must be a whole number, got '1e400' (line 10)"),
        ("k_max: 8", "k_max: 1:30", "controller.k_max is 90 (line 7); use at most 64"),
        ("k_max: 8", "gamma: 1" + "0" * 400, "(line 7); give a finite number"),
        ("- overrides:\n    draft_kv", "- &x\n  overrides:\n    draft_kv", "anchor, alias or tag at line 16"),
        ("      budget: 256", "      budget: !!int 256", "anchor, alias or tag at line 18"),
        ("policy/1", "policy/10", "policy schema is 'specdial/policy/10' at line 1"),
        ("policy/1", "policy/1.1", "policy schema is 'specdial/policy/1.1' at line 1"),
        ("specdial/policy/1", "specdial/trace/1", "policy schema is 'specdial/trace/1' at line 1"),
        ("policy/1", "policy/2", "policy schema is 'specdial/policy/2' at line 1; this version reads"),
        ("schema: specdial/policy/1\n", "", "policy schema is None at line 1"),
        ("name: mine", "name: &a mine", "anchor, alias or tag at line 2"),
        ("name: mine", "name: *a", "at line 2"),
        ("name: mine", "name: !!str mine", "anchor, alias or tag at line 2"),
        ("name: mine", "name: !!python/object/apply:os.system [touch pwned]", "anchor, alias or tag at line 2"),
        ("name: mine", "name: mine\nname: yours", "name is given twice, again at line 3"),
        ("name: mine", "<<: {name: mine}", "a key that is not text at line 2"),
        ("name: mine", "3: mine", "a key that is not text at line 2"),
        ("name: mine", "? [a, b]\n: mine", "a key that is not text at line 2"),
        ("name: mine", "name: [mine", "not valid YAML at line"),
        ("name: mine", "name: @mine", "not valid YAML at line 2"),
        ("name: mine", "\tname: mine", "not valid YAML at line 2"),
        ("name: mine", "name: mi\0ne", "not valid YAML"),
        ("name: mine", "--- {}", "not valid YAML at line 3"),
    ],
)
def test_every_mistake_is_refused_by_field_and_line(old, new, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert TEXT.count(old) == 1
    with pytest.raises(UserError) as caught:
        parse_policy(TEXT.replace(old, new))
    assert says in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["nothing.yaml", "."])
def test_files_that_cannot_be_read_are_named(tmp_path, name):
    with pytest.raises(UserError, match=r"cannot read policy .*; check the path"):
        load_policy(tmp_path / name)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, len(TEXT) - 1), st.characters(codec="utf-8"), st.booleans())
def test_one_character_of_damage_never_gives_anything_but_a_user_error(at, character, insert):
    try:
        policy = parse_policy(TEXT[:at] + character + TEXT[at + (not insert) :])
    except UserError:
        return
    assert parse_policy(dump_policy(policy)) == policy


@given(st.binary(max_size=60))
def test_random_bytes_never_give_anything_but_a_user_error(content):
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return
    with pytest.raises(UserError):
        parse_policy(text)


def test_the_digest_is_of_the_decisions():
    policy = parse_policy(TEXT)
    aside = {"name": "other", "expected": None, "measured": {"speedup": 2.0}, "provenance": {"made_at": "now"}}
    for part, value in aside.items():
        assert policy_digest(replace(policy, **{part: value})) == policy_digest(policy)


def other_values(config):
    """(name, a value it does not have) of every field of a settings dataclass that has more than one value."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value, hint = getattr(config, field.name), hints[field.name]
        if typing.get_origin(hint) is typing.Literal:
            others = [option for option in typing.get_args(hint) if option != value]
            if others:
                yield field.name, others[-1]
        elif typing.get_origin(hint) is tuple:
            yield field.name, [2]
        else:
            yield field.name, 0.37 if hint is float else value + 64


def test_the_digest_changes_with_every_decision():
    whole = parse_policy(TEXT.replace("k_max: 8", "k_max: 4"))
    policy = replace(whole, cells=())
    plain = to_plain(policy)
    fixed = {**plain, "controller": {"kind": "fixed"}}
    changed = [to_plain(whole), *({**fixed, "drafter": drafter} for drafter in DRAFTERS)]
    for part in ("controller", "draft_kv"):
        for name, value in other_values(getattr(policy, part)):
            changed.append({**plain, part: {**plain[part], name: min(value, 64) if name == "k_max" else value}})
    digests = [policy_digest(policy), *(policy_digest(policy_from_mapping(mapping)) for mapping in changed)]
    assert len(set(digests)) == len(digests) > 22


def test_files_and_digests_from_before_a_setting_existed_stay_as_they_were():
    """Digests of the built-in policies as the first release computed them."""
    path = BUILTIN[0].parent / "sparse_self_rate.yaml"
    assert "lag" not in dump_policy(load_policy(path))
    assert policy_digest(load_policy(path)) == "3c8fc43d247c5c9b1a8838f66cb79b94ff33ab92f7cab8c7aa2373d519ed0f3e"
    whole = to_plain(load_policy(path), complete=True)
    del whole["expected"], whole["measured"], whole["provenance"]
    assert whole["controller"]["lag"] == 0
    assert whole["draft_kv"]["refresh_rounds"] == 1
    assert policy_from_mapping(whole) == load_policy(path)


def test_an_empty_policy_is_plain_and_a_file_of_nothing_but_its_schema_was_cut():
    assert policy_from_mapping({}) == Policy()
    assert (Policy().k_max, Policy().lossless) == (0, True)
    with pytest.raises(UserError, match="policy ends after its schema at line 1"):
        parse_policy(f"schema: {SCHEMA}\n")


def test_a_policy_file_has_at_most_a_quarter_of_a_megabyte(tmp_path):
    path = tmp_path / "policy.yaml"
    text = f"schema: {SCHEMA}\nname: padded\n"
    path.write_text(text + "#" * (250_000 - len(text) - 1) + "\n")
    assert load_policy(path).name == "padded"
    path.write_text(text + "#" * (250_000 - len(text)) + "\n")
    with pytest.raises(UserError, match="is too large; a policy file has at most 250000 bytes"):
        load_policy(path)


@pytest.mark.parametrize(("end", "longest"), [("b", 121), ("\u2028", 123)])
def test_long_texts_are_broken_where_they_always_were(end, longest):
    """At 120 columns: another width would give every file that holds one another digest."""
    text = dump_policy(Policy(provenance={"note": "a " * 200 + end}))
    assert max(map(len, text.splitlines()[2:])) == longest
    assert parse_policy(text).provenance == {"note": "a " * 200 + end}


def test_a_short_digest_is_the_start_of_the_digest():
    assert short_digest(Policy()) == policy_digest(Policy())[:12]
    assert len(short_digest(Policy())) == 12


def test_a_fault_in_what_the_file_does_not_say_is_named_at_its_first_line():
    text = f"schema: {SCHEMA}\nname: q\ndrafter:\n  kind: quest\ncontroller:\n  kind: fixed\n"
    with pytest.raises(UserError, match=r"draft_kv\.page is 1, and drafter quest chooses whole pages \(line 1\)"):
        parse_policy(text)
