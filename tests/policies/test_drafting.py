"""Drafters and selections: what a kind refuses, what a fraction of the prompt comes to, what costs are filed under."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdial.policies.drafting import Drafter, DraftKV
from specdial.policies.errors import UserError
from specdial.policies.fields import to_plain
from specdial.policies.schema import policy_from_mapping

FIXED = {"kind": "fixed", "k": 4}


@pytest.mark.parametrize(
    ("drafter", "draft_kv", "says"),
    [
        ({"kind": "lookup", "weights": "fp8"}, {}, "drafter.weights is 'fp8', which drafter lookup does not use"),
        ({"kind": "quest", "model": "x"}, {"page": 16}, "drafter.model is 'x', which drafter quest does not use"),
        ({"kind": "model", "model": "x", "ngram": 4}, {}, "drafter.ngram is 4, which drafter model does not use"),
        ({"kind": "none", "weights": "fp8"}, {}, "drafter.weights is 'fp8', which drafter none does not use"),
        ({"kind": "model"}, {}, "drafter.model is missing; name the drafting model"),
        ({"kind": "lookup", "ngram": 0}, {}, "drafter.ngram is 0; use at least 1"),
        ({"kind": "lookup", "ngram": 17}, {}, "drafter.ngram is 17; use at most 16"),
        ({"kind": "sparse_self", "weights": "int4"}, {}, "drafter.weights is 'int4'; use one of model, fp8"),
        ({"kind": "quest"}, {}, "draft_kv.page is 1, and drafter quest chooses whole pages"),
        ({"kind": "quest"}, {"page": 16, "decay": 0.5}, "draft_kv.decay is 0.5, which drafter quest does not use"),
        ({"kind": "lookup"}, {"refresh_rounds": 0}, "draft_kv.refresh_rounds is 0, which drafter lookup does not use"),
        ({"kind": "lookup"}, {"budget_frac": 0.1}, "draft_kv.budget_frac is 0.1, which drafter lookup does not use"),
        ({}, {"decay": 0.0}, "draft_kv.decay is 0; use more than 0"),
        ({}, {"decay": 1.5}, "draft_kv.decay is 1.5; use at most 1"),
        ({}, {"decay": 0.9, "window": 8}, "draft_kv.window is 8, which decay 0.9 does not use"),
        ({}, {"budget_frac": 0.1, "budget": 256}, "draft_kv.budget is 256, which budget_frac 0.1 does not use"),
        ({}, {"refresh_rounds": -1}, "draft_kv.refresh_rounds is -1; use at least 0"),
    ],
)
def test_what_a_kind_does_not_use_is_refused_by_name(drafter, draft_kv, says):
    with pytest.raises(UserError) as caught:
        policy_from_mapping({"drafter": drafter, "draft_kv": draft_kv, "controller": {"kind": "none"}})
    assert says in str(caught.value)
    assert caught.value.field == says.split(" ")[0]


@pytest.mark.parametrize("kind", ["entropy", "confidence", "rate"])
def test_a_rule_that_needs_signals_is_refused_with_a_drafter_that_has_none(kind):
    with pytest.raises(UserError, match=f"controller {kind} asks how sure each draft is, which drafter lookup"):
        policy_from_mapping({"drafter": {"kind": "lookup"}, "controller": {"kind": kind}})
    assert policy_from_mapping({"drafter": {"kind": "lookup"}, "controller": FIXED}).k_max == 4


def test_plain_decoding_may_carry_any_selection():
    """A cell that decodes plainly keeps its policy's selection."""
    kv = {"decay": 0.9, "refresh_rounds": 0, "budget_frac": 0.1}
    off = {"drafter": {"kind": "none"}, "controller": {"kind": "none"}}
    policy = policy_from_mapping({"controller": FIXED, "draft_kv": kv, "cells": [{"overrides": off}]})
    assert policy.variants()[0].k_max == 0


def test_labels_tell_drafters_apart():
    assert Drafter().label == "sparse_self"
    assert Drafter(weights="fp8").label == "sparse_self/fp8"
    assert Drafter(kind="model", model="smollm2-135m").label == "model/smollm2-135m"
    assert [Drafter(kind=kind).label for kind in ("lookup", "quest", "none")] == ["lookup", "quest", "none"]


@given(
    frac=st.floats(0.001, 1.0),
    prompt=st.integers(1, 200_000),
    page=st.sampled_from([1, 16, 64]),
    sink=st.integers(0, 80),
    recent=st.integers(0, 80),
)
def test_a_fraction_of_the_prompt_is_whole_pages_and_holds_sink_and_recent(frac, prompt, page, sink, recent):
    kv = DraftKV(budget_frac=frac, page=page, sink=sink, recent=recent)
    found = kv.resolved(prompt)
    assert found.budget_frac == 0.0
    assert found.budget % page == 0
    assert found.budget >= max(found.protected_tokens, frac * prompt - 1e-5)
    smallest = max(math.ceil(sink / page) + math.ceil(recent / page), math.ceil(frac * prompt / page + 1e-9), 1) * page
    assert found.budget <= smallest
    found.check()
    assert found.resolved(prompt + 1) == found


def test_a_fraction_is_of_the_prompt_as_people_count():
    assert DraftKV(budget_frac=0.1, sink=0, recent=0).resolved(30).budget == 3
    assert DraftKV(budget_frac=0.1, sink=4, recent=64).resolved(4000).budget == 400
    assert DraftKV(budget_frac=0.1, sink=4, recent=64, page=64).resolved(4000).budget == 448
    assert DraftKV(budget_frac=0.01, sink=4, recent=64).resolved(400).budget == 68
    assert DraftKV(budget=300).resolved(4000) == DraftKV(budget=300)


EAGLE = {"kind": "eagle", "model": "head"}
SELF = {"overrides": {"drafter": {"kind": "sparse_self"}}}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"drafter": {"kind": "lookup", "tree": {}}}, "drafter.tree is Tree(width=10, nodes=60), which drafter lookup"),
        ({"tree": {"width": 0}}, "drafter.tree.width is 0; use at least 1"),
        ({"tree": {"nodes": 3}}, "drafter.tree.nodes is 3, a tree 4 deep (controller k) needs as many"),
        ({"controller": {"kind": "rate"}}, "controller rate stops a chain of drafts, and drafter.tree drafts a tree"),
        ({"cells": [SELF]}, "drafter sparse_self scores keys by attention that rounds with drafter.tree leave out"),
        ({"verify_kv": {"mode": "partial", "full_period": 2}}, "verify_kv.source is 'history', which scores keys by"),
    ],
)
def test_what_a_tree_does_not_go_with_is_refused_by_name(change, says):
    drafter = change.pop("drafter", EAGLE | {"tree": change.pop("tree", {})})
    with pytest.raises(UserError) as caught:
        policy_from_mapping({"drafter": drafter, "controller": FIXED, **change})
    assert str(caught.value).startswith(says)
    assert caught.value.field == says.split(" ")[0]


def test_a_tree_takes_room_for_all_it_verifies_or_drafts_on():
    def slots(k, **tree):
        return policy_from_mapping({"drafter": EAGLE | {"tree": tree}, "controller": {"kind": "fixed", "k": k}}).slots

    assert [slots(k) for k in (1, 2, 7)] == [10, 60, 60]
    assert slots(7, width=10, nodes=12) == 60
    assert slots(3, width=1) == 3
    assert policy_from_mapping({"drafter": EAGLE, "controller": FIXED}).slots == 4
    with_tree = policy_from_mapping({"drafter": EAGLE | {"tree": {}}, "controller": FIXED})
    assert with_tree.lossless
    assert with_tree.k_max == 4
    assert with_tree.drafter.label == "eagle/head/w10-n60"
    assert policy_from_mapping(to_plain(with_tree)) == with_tree
