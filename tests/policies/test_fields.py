"""Strict settings: what is refused, under which name, and what comes back unchanged."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdial.policies.errors import UserError
from specdial.policies.fields import parse, setting, to_plain


@dataclass(frozen=True, slots=True)
class Inner:
    share: float = setting(0.5, low=0.0, high=1.0)
    ks: tuple[int, ...] = setting((1, 2), low=1, high=64)


@dataclass(frozen=True, slots=True)
class Outer:
    name: str
    count: int = setting(3, low=1)
    on: bool = False
    mode: Literal["a", "b"] = "a"
    limit: int | None = setting(None, low=1)
    page: Literal[1, 16] = 1
    inner: Inner = field(default_factory=Inner)
    parts: tuple[Inner, ...] = ()
    free: dict[str, Any] | None = None


@pytest.mark.parametrize(
    ("change", "field", "says"),
    [
        ({"speed": 1}, "speed", "unknown field speed; use one of name, count"),
        ({"inner": {"speed": 1}}, "inner.speed", "unknown field inner.speed; use one of share, ks"),
        ({"name": ...}, "name", "name is missing; add name"),
        ({"name": 3}, "name", "name must be text, got 3"),
        ({"name": None}, "name", "name must be text, got None"),
        ({"count": 0}, "count", "count is 0; use at least 1"),
        ({"count": 2.0}, "count", "count must be a whole number, got 2.0"),
        ({"count": "2"}, "count", "count must be a whole number, got '2'"),
        ({"count": True}, "count", "count must be a whole number, got True"),
        ({"count": None}, "count", "count must be a whole number, got None"),
        ({"on": 1}, "on", "on must be true or false, got 1"),
        ({"mode": "c"}, "mode", "mode is 'c'; use one of a, b"),
        ({"mode": ["a"]}, "mode", "mode is ['a']"),
        ({"page": 16.0}, "page", "page is 16.0; use one of 1, 16"),
        ({"page": True}, "page", "page is True; use one of 1, 16"),
        ({"limit": 0}, "limit", "limit is 0; use at least 1"),
        ({"limit": True}, "limit", "limit must be a whole number, got True"),
        ({"inner": 3}, "inner", "inner must be a mapping, got 3"),
        ({"inner": {"share": math.nan}}, "inner.share", "inner.share is nan; give a finite number"),
        ({"inner": {"share": -math.inf}}, "inner.share", "inner.share is -inf; give a finite number"),
        ({"inner": {"share": 10**400}}, "inner.share", "inner.share is 1000"),
        ({"inner": {"share": 1.5}}, "inner.share", "inner.share is 1.5; use at most 1.0"),
        ({"inner": {"share": False}}, "inner.share", "inner.share must be a number, got False"),
        ({"inner": {"share": "0.5"}}, "inner.share", "inner.share must be a number, got '0.5'"),
        ({"inner": {"ks": 3}}, "inner.ks", "inner.ks must be a list, got 3"),
        ({"inner": {"ks": "12"}}, "inner.ks", "inner.ks must be a list, got '12'"),
        ({"inner": {"ks": [1, 2.5]}}, "inner.ks[1]", "inner.ks[1] must be a whole number, got 2.5"),
        ({"inner": {"ks": [1, 65]}}, "inner.ks", "inner.ks is 65; use at most 64"),
        ({"parts": [{}, {"share": 2}]}, "parts[1].share", "parts[1].share is 2.0; use at most 1.0"),
        ({"parts": [{}, 7]}, "parts[1]", "parts[1] must be a mapping, got 7"),
        ({"free": []}, "free", "free must be a mapping, got []"),
        ({"free": {"a": [1, math.nan]}}, "free.a[1]", "free.a[1] is nan; give a finite number"),
        ({"free": {"a": {1: 2}}}, "free.a", "free.a has the key 1; use text for keys"),
        ({"free": {"a": {1, 2}}}, "free.a", "free.a is {1, 2}"),
    ],
)
def test_every_mistake_is_named(change, field, says):
    value = {k: v for k, v in ({"name": "x"} | change).items() if v is not ...}
    with pytest.raises(UserError) as caught:
        parse(Outer, value)
    assert says in str(caught.value)
    assert caught.value.field == field


@pytest.mark.parametrize("value", [None, 3, "name: x", [("name", "x")]])
def test_only_a_mapping_is_parsed(value):
    with pytest.raises(UserError, match=r"settings must be a mapping"):
        parse(Outer, value, "settings")


def test_a_path_in_front_names_the_place():
    with pytest.raises(UserError, match=r"^policy\.inner\.share is 7\.0; use at most 1\.0$"):
        parse(Outer, {"name": "x", "inner": {"share": 7}}, "policy")


def test_a_long_value_is_cut_in_the_message():
    with pytest.raises(UserError) as caught:
        parse(Outer, {"name": "x", "count": "9" * 1000})
    assert len(str(caught.value)) < 150


def test_int_becomes_float_and_nothing_else_changes():
    parsed = parse(Outer, {"name": "x", "inner": {"share": 1, "ks": (3,)}, "free": {"a": [1, {"b": None}]}})
    assert isinstance(parsed.inner.share, float)
    assert parsed.inner.ks == (3,)
    assert parsed.free == {"a": [1, {"b": None}]}
    assert parsed.limit is None


shares = st.floats(0.0, 1.0)
inners = st.builds(Inner, share=shares, ks=st.lists(st.integers(1, 64)).map(tuple))
outers = st.builds(
    Outer,
    name=st.text(),
    count=st.integers(1),
    on=st.booleans(),
    mode=st.sampled_from(["a", "b"]),
    limit=st.none() | st.integers(1),
    inner=inners,
    parts=st.lists(inners, max_size=3).map(tuple),
    free=st.none() | st.dictionaries(st.text(), st.integers() | st.text() | st.lists(shares)),
)


@given(outers)
def test_to_plain_and_parse_are_inverse(value):
    assert parse(Outer, to_plain(value)) == value
