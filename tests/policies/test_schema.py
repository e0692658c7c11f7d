"""Cells: where they begin and end, which one wins, and what the policy as a whole then is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdial.policies.errors import UserError
from specdial.policies.schema import policy_from_mapping

CELLS = [
    {"from_context_tokens": 100, "to_context_tokens": 200, "overrides": {"controller": {"kind": "fixed", "k": 2}}},
    {"to_context_tokens": 200, "from_batch": 4, "to_batch": 8, "overrides": {"controller": {"kind": "none"}}},
    {"from_context_tokens": 150, "overrides": {"controller": {"k": 9}, "draft_kv": {"budget": 128}}},
]
POLICY = policy_from_mapping({"controller": {"kind": "fixed", "k": 5}, "cells": CELLS})


@pytest.mark.parametrize(
    ("context", "batch", "k", "budget"),
    [
        (99, 1, 5, 512),  # outside every cell
        (100, 1, 2, 512),  # from is inclusive
        (199, 1, 2, 512),  # the first that covers wins, though the third does too
        (200, 1, 9, 128),  # to is exclusive; a cell without an end has none
        (10**9, 1, 9, 128),
        (99, 3, 5, 512),
        (99, 4, 0, 512),
        (99, 7, 0, 512),
        (99, 8, 5, 512),
        (120, 4, 2, 512),
    ],
)
def test_the_first_cell_that_covers_a_round_wins(context, batch, k, budget):
    variant = POLICY.variants()[POLICY.variant_index(context, batch)]
    assert (getattr(variant.controller, "k", 0), variant.draft_kv.budget) == (k, budget)


def test_variants_are_policies_without_cells():
    assert len(POLICY.variants()) == len(CELLS) + 1
    assert all(variant.cells == () for variant in POLICY.variants())
    assert POLICY.variants()[-1].controller == POLICY.controller
    assert POLICY.k_max == 9
    assert POLICY.lossless


def test_a_cell_of_the_same_kind_keeps_the_other_settings_and_another_kind_does_not():
    rate = {"kind": "rate", "k_max": 6, "gamma": 0.7}
    same, other = policy_from_mapping(
        {
            "controller": rate,
            "cells": [
                {"to_context_tokens": 10, "overrides": {"controller": {"kind": "rate", "gamma": 0.1}}},
                {"overrides": {"controller": {"kind": "entropy"}}},
            ],
        }
    ).variants()[:2]
    assert (same.controller.k_max, same.controller.gamma) == (6, 0.1)
    assert other.controller.k_max == 8


@given(st.integers(0, 400), st.integers(1, 12))
def test_a_round_has_exactly_one_variant(context, batch):
    index = POLICY.variant_index(context, batch)
    covering = [i for i, cell in enumerate(POLICY.cells) if cell.covers(context, batch)]
    assert index == (covering[0] if covering else len(CELLS))


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ({"overrides": {"speed": {}}}, r"cells\[0\]\.overrides\.speed cannot vary by cell"),
        ({"overrides": {"cells": []}}, r"cells\[0\]\.overrides\.cells cannot vary by cell"),
        ({"overrides": {"controller": {"kind": "x"}}}, r"cells\[0\]\.overrides\.controller\.kind is 'x'"),
        ({"overrides": {"drafter": {"kind": "none"}}}, r"cells\[0\]\.overrides\.drafter none cannot serve"),
        ({"overrides": {"draft_kv": {"sink": 512}}}, r"cells\[0\]\.overrides\.draft_kv\.budget is 512, smaller"),
        ({"overrides": {}, "from_batch": 0}, r"cells\[0\]\.from_batch is 0"),
        ({"overrides": {}, "from_context_tokens": 8, "to_context_tokens": 8}, r"not above where the cell starts \(8\)"),
        ({"overrides": 3}, r"cells\[0\]\.overrides must be a mapping"),
    ],
)
def test_bad_cells_are_named(cell, says):
    with pytest.raises(UserError, match=says):
        policy_from_mapping({"controller": {"kind": "fixed"}, "cells": [cell]})


@pytest.mark.parametrize("value", [None, 3, [], "sparse_self"])
def test_a_policy_is_a_mapping(value):
    with pytest.raises(UserError, match="policy must be a mapping"):
        policy_from_mapping(value, "policy")
