"""The space: points hold what their choices give a meaning to, and whatever it names becomes a policy or a refusal."""

from dataclasses import replace

import pytest

from specdial.policies.errors import UserError
from specdial.policies.fields import parse
from specdial.policies.file import policy_digest, save_policy
from specdial.policies.schema import ScoringHeads, policy_from_mapping
from specdial.simulator.axes import Search
from specdial.simulator.lanes import read_record
from specdial.simulator.search import fixed_points
from specdial.simulator.space import Space

COMBINED = {
    "controllers": ["fixed"],
    "k_max": 2,
    "draft_kv": {"budget_frac": [0.1], "decay": [0.9, 1.0], "window": [1, 16], "sink": [4, 200]},
    "verify_kv": {"mode": ["full", "partial"], "source": ["history", "recent"], "full_period": [2, 4]},
}


def space_of(trace, **search):
    return Space.of(parse(Search, search), read_record(trace), gamma=0.3)


def test_a_point_holds_what_its_choices_give_a_meaning_to(trace):
    space = space_of(trace, **COMBINED, budgets=[128, 256])
    seen = set()
    for point in space.grid_points():
        assert ("draft_kv.window" in point) == (point["draft_kv.decay"] == 1.0)
        assert ("verify_kv.full_period" in point) == (point["verify_kv.mode"] == "partial")
        try:
            policy = space.policy(point)
        except UserError:
            assert point["draft_kv.sink"] == 200 or (
                point["verify_kv.mode"] == "partial" and point["draft_kv.decay"] < 1.0
            )
            continue
        assert policy_digest(policy) not in seen, "two points of one policy"
        seen.add(policy_digest(policy))
        fraction = isinstance(point["draft_kv.budget"], float)
        assert (policy.draft_kv.budget_frac > 0.0) == fraction
        assert policy.lossless == (point["verify_kv.mode"] == "full")
    assert len(seen) > 20


def test_a_buffer_and_what_page_bounds_are_made_of_are_searched(trace):
    verify = {"mode": ["partial"], "source": ["history", "page_bound"], "page": [16], "full_period": [32]}
    space = space_of(
        trace, controllers=["fixed"], k_max=1, verify_kv={**verify, "buffer": [0, 64], "rows": ["mean", "max"]}
    )
    found = [space.policy(point).verify_kv for point in space.grid_points()]
    kinds = {(kv.source, kv.buffer, kv.rows) for kv in found}
    by_page = {("page_bound", buffer, rows) for buffer in (0, 64) for rows in ("mean", "max")}
    assert kinds == {("history", 0, "mean"), ("history", 64, "mean")} | by_page


def test_the_fitted_rate_is_tried_shifted_and_steeper(trace):
    space = space_of(trace, controllers=["rate"], k_max=4)
    point = {"controller": "rate", "arm": 0, "k": 4, "rate.form": "calibrated", "rate.gamma": 0.3, "rate.beta": 0.9}
    point |= {"rate.learning_rate": 0.0, "rate.shift": 0.5}
    axis = space.axes(point)["rate.steepness"]
    slopes = [space.policy({**point, "rate.steepness": factor}).controller.slope for factor in axis]
    fit = space.fits[0]
    assert slopes == pytest.approx([fit.slope * factor for factor in axis], abs=1e-5)
    assert space.policy({**point, "rate.steepness": 1.0}).controller.bias == pytest.approx(fit.bias + 0.5, abs=1e-5)


def test_recorded_selections_are_tried_as_they_were_unless_values_are_named(trace):
    space = space_of(trace)
    assert set(space.axes({"controller": "fixed"})) == {"controller", "arm", "k"}
    assert space.axes({"controller": "fixed"})["arm"] == (0, 1)
    assert all(space.policy(point).draft_kv.budget in (128, 256) for point in space.suggestions())


@pytest.mark.parametrize("modes", [["full"], ["partial"], ["partial", "full"]])
def test_fixed_ks_verify_in_full_whatever_is_searched(trace, modes):
    space = space_of(trace, verify_kv={"mode": modes})
    fixed = [space.policy(point) for point in fixed_points(space)]
    assert len(fixed) == 2 * space.k_max
    assert all(policy.lossless for policy in fixed)


def test_scoring_heads_come_from_a_policy_and_its_first_so_many(trace, tmp_path):
    parts = {"mode": "partial", "full_period": 4, "source": "history", "scope": "model"}
    heads = ScoringHeads(target=((3, 1), (3, 0), (5, 2)))
    known = policy_from_mapping(
        {
            "name": "heads",
            "controller": {"kind": "fixed", "k": 2},
            "verify_kv": parts,
            "scoring_heads": {"target": [list(pair) for pair in heads.target]},
        }
    )
    save_policy(known, tmp_path / "heads.yaml")
    verify = {"mode": ["partial"], "scope": ["model"], "heads": str(tmp_path / "heads.yaml")}
    space = space_of(trace, controllers=["fixed"], k_max=1, verify_kv={**verify, "head_counts": [1, 3]})
    found = {point["heads"]: space.policy(point).scoring_heads.target for point in space.grid_points()}
    assert found == {1: heads.target[:1], 3: heads.target}
    whole = space_of(trace, controllers=["fixed"], k_max=1, verify_kv=verify)
    assert whole.policy(next(whole.grid_points())).scoring_heads == heads
    with pytest.raises(UserError, match="has 3 target heads"):
        space_of(trace, verify_kv={**verify, "head_counts": [4]})


@pytest.mark.parametrize(
    ("search", "message"),
    [
        ({"drafters": ["lookup"]}, "drafter lookup was not recorded; use some of sparse_self"),
        ({"verify_kv": {"mode": []}}, "search.verify_kv.mode is empty"),
        ({"verify_kv": {"head_counts": [2]}}, "head_counts is given without heads"),
        ({"draft_kv": {"page": [8]}}, r"draft_kv.page\[0\] is 8"),
    ],
)
def test_mistakes_are_named(trace, search, message):
    with pytest.raises(UserError, match=message):
        space_of(trace, **search)


def test_a_drafter_that_has_none_of_the_budgets_is_named(trace):
    record = read_record(trace)
    first, second = record.arms
    mixed = replace(record, arms=[first, {**second, "drafter": {"kind": "sparse_self", "weights": "fp8"}}])
    budgets = [record.budget(arm) for arm in range(2)]
    assert Space.of(parse(Search, {"budgets": budgets[1:]}), mixed, gamma=0.3).arms == (1,)
    with pytest.raises(UserError, match=r"search.drafters and search.budgets leave no recorded drafts"):
        Space.of(parse(Search, {"drafters": ["sparse_self"], "budgets": budgets[1:]}), mixed, gamma=0.3)
