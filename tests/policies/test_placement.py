"""Keys in host memory: what goes with them, and what old files keep."""

import pytest

from specdial.policies.errors import UserError
from specdial.policies.file import dump_policy, parse_policy, policy_digest
from specdial.policies.schema import plain_policy, policy_from_mapping

HOST = {"kv": {"where": "host"}}
PARTIAL = {"mode": "partial", "full_period": 4, "refresh": "full"}
LOOKUP = {"drafter": {"kind": "lookup"}}


def policy(**parts):
    return policy_from_mapping({"controller": {"kind": "fixed", "k": 4}, **HOST, **parts})


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"drafter": {"kind": "quest"}, "draft_kv": {"page": 16, "sink": 16}}, "drafter quest reads the target's keys"),
        ({"verify_kv": PARTIAL}, "drafter sparse_self reads the target's keys, which partial rounds leave incomplete"),
        ({"draft_kv": {"refresh_rounds": 3}}, "draft_kv.refresh_rounds is 3, which keys in host memory cannot serve"),
        ({"verify_kv": {**PARTIAL, "refresh": "round"}, **LOOKUP}, "verify_kv.refresh is 'round', which keys in host"),
        ({"verify_kv": {**PARTIAL, "full_period": 0}, **LOOKUP}, "verify_kv.full_period is 0, which keys in host"),
        (
            {"verify_kv": PARTIAL, **LOOKUP, "cells": [{"overrides": {"verify_kv": {"budget": 64}}}]},
            "kv.where is 'host', and cells verify over different selections",
        ),
        (
            {"drafter": {"kind": "eagle", "model": "head", "tree": {"width": 2, "nodes": 8}}},
            "drafter.tree is '2 wide', which keys in host memory cannot serve",
        ),
        ({"kv": {"where": "disk"}}, "kv.where is 'disk'; use one of device, host"),
        ({"kv": {"where": "device"}, "verify_kv": {"refresh": "full"}}, "verify_kv.refresh is 'full', which mode full"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(parts, says):
    with pytest.raises(UserError) as caught:
        policy(**parts)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_goes_together():
    for parts in ({}, {"verify_kv": {**PARTIAL, "full_period": 1}}, {"verify_kv": PARTIAL, **LOOKUP}):
        one = policy(**parts)
        assert parse_policy(dump_policy(one)) == one
        assert policy_digest(one) != policy_digest(policy(**parts, kv={"where": "device"}))


def test_old_files_keep_their_bytes():
    assert "kv:" not in dump_policy(plain_policy()).replace("draft_kv:", "").replace("verify_kv:", "")
    assert "refresh:" not in dump_policy(policy(verify_kv={"mode": "partial"}, kv={"where": "device"}))


def test_a_plain_cell_may_carry_what_no_draft_reads():
    """Beside cells that draft, and alone."""
    plain = {"controller": {"kind": "none"}, "draft_kv": {"refresh_rounds": 3}}
    assert policy(**plain).k_max == 0
    assert policy(cells=[{"to_batch": 2, "overrides": plain}]).k_max == 4
    with pytest.raises(UserError, match="which keys in host memory cannot serve"):
        policy(cells=[{"to_batch": 2, "overrides": {**plain, "controller": {"kind": "fixed", "k": 1}}}])
    tree = {"kind": "eagle", "model": "head", "tree": {}}
    beside = [{"to_batch": 2, "overrides": {"drafter": {"kind": "sparse_self"}, "controller": {"kind": "none"}}}]
    assert policy(kv={"where": "device"}, drafter=tree, cells=beside).slots == 60
