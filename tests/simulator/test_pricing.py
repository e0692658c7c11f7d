"""Prices by hand: what a round is made of, which setting a policy has, and where tables are made."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from specdial.simulator.costs import CostRefusedError
from specdial.simulator.pricing import (
    TERMS,
    Bins,
    Setting,
    depends_on_document,
    knots_for,
    plain_time_us,
    rows_for,
    tabulate,
    tabulate_refresh,
)

KNOTS = np.array([100.0, 300.0])


def price(op, context, batch, k, budget, drafter="sparse_self", source=""):
    """Every argument shows."""
    names = 7.0 * len(op) + 0.3 * len(drafter) + 0.7 * len(source)
    return names + 0.01 * context + 1000.0 * batch + 17.0 * k + 0.1 * budget


class Made:
    """Costs as `price` says, extrapolated past 200 tokens, refused for k of 3."""

    captured = False

    def at(self, op, context, batch, k=0, budget=0, drafter="sparse_self", *, source=""):
        if k == 3:
            raise CostRefusedError(f"{op} at {context:.0f}")
        return price(op, context, batch, k, budget, drafter, source), context > 200

    def contexts(self):
        return [50.0, 100.0, 300.0, 400.0]

    def refresh_rows(self):
        return [4.0, 8.0, 32.0]


FULL = Setting(False, 3, "quest", budget=40, refresh_rounds=4, tail_tokens=7, page=16, source="history")
PARTIAL = Setting(
    False, 3, "quest", budget=40, refresh_rounds=0, tail_tokens=7, source="history", verified_keys=24, partial=True,
    choosing_frac=0.25,
)  # fmt: skip


@pytest.mark.parametrize("captured", [False, True])
def test_a_round_that_is_one_pass_drafts_its_k_to_the_end(monkeypatch, captured):
    """However few of its drafts the output still needs; a controller of its own passes stops where they do."""
    monkeypatch.setattr(Made, "captured", captured)
    each = tabulate(Made(), replace(FULL, k_max=2), 2, KNOTS).cost_us
    whole = tabulate(Made(), replace(FULL, k_max=2, whole_k=2), 2, KNOTS).cost_us
    assert np.array_equal(whole, np.broadcast_to(each[:, 2:], each.shape) if captured else each)


@pytest.mark.parametrize("setting", [FULL, PARTIAL], ids=["full", "partial"])
def test_a_round_costs_its_parts(setting):
    table = tabulate(Made(), setting, 2, KNOTS)
    assert table.cost_us.shape == (len(TERMS), 4, 2)
    for k in range(3):
        for i, context in enumerate(KNOTS):

            def us(op, op_k, budget, context=context):
                return price(op, context, 2, op_k, budget, "quest", "history")

            wanted = dict.fromkeys(TERMS, 0.0) | {"draft": k * us("draft", k, 47)}
            if setting.partial:
                wanted |= {"verify_partial": us("verify_partial", k, 24), "host": us("host_partial", k, 0)}
                wanted["select"] = 0.25 * us("select_partial", 0, 24)  # its drafts' keys were chosen at prefill
            else:
                wanted |= {"verify": us("verify", k, 0), "host": us("host", k, 0)}
                wanted["select"] = us("select", k, 40) / 4 if k else 0.0
            assert table.cost_us[:, k, i] == pytest.approx(list(wanted.values()))
    assert np.array_equal(table.extrapolated_us[:, :3], table.cost_us[:, :3] * [0.0, 1.0])
    assert table.refused.tolist() == [[False, False]] * 3 + [[True, True]]
    assert table.reason == "draft at 100"


def test_a_policy_that_never_drafts_costs_plain_steps():
    table = tabulate(Made(), Setting(plain=True, k_max=0), 3, KNOTS)
    plain = [price("plain", c, 3, 0, 0, "none") for c in KNOTS]
    assert table.cost_us[TERMS.index("plain"), 0].tolist() == plain
    assert table.cost_us.sum() == sum(plain)
    assert (table.refused.any(), table.reason) == (False, None)


def test_corrections_cost_by_rows_and_nothing_for_none():
    table = tabulate_refresh(Made(), FULL, 2, KNOTS, np.array([0.0, 3.0, 8.0]))
    eight = [price("refresh", c, 2, 8, FULL.k_max, "quest", "history") for c in KNOTS]
    assert table.cost_us.tolist() == [[0.0, 0.0], [0.0, 0.0], eight]
    assert table.extrapolated.tolist() == [[False, False], [False, False], [False, True]]
    assert table.reason == "refresh at 100"
    assert tabulate_refresh(Made(), FULL, 2, KNOTS, np.array([0.0, 8.0])).reason is None


def test_tables_are_made_where_costs_were_measured_and_at_the_ends():
    assert knots_for(Made(), 100, 350).tolist() == [100.0, 300.0, 350.0]
    assert knots_for(Made(), 60, 300).tolist() == [60.0, 100.0, 300.0]
    assert knots_for(Made(), 70, 70).tolist() == [70.0]
    assert rows_for(Made(), 8).tolist() == [0.0, 4.0, 8.0]
    assert rows_for(Made(), 40).tolist() == [0.0, 4.0, 8.0, 32.0, 40.0]


def test_plain_time_is_every_step_at_the_mean_context_until_the_last_member_ends():
    start, end = np.array([90, 110]), np.array([93, 115])
    contexts = [(min(90 + step, 93) + min(110 + step, 115)) / 2 for step in range(5)]
    prices = [price("plain", c, 2, 0, 0) for c in contexts]
    assert plain_time_us(Made(), start, end) == (pytest.approx(sum(prices)), 8)
    kept_full = sum(prices[:3]) + 0.5 * sum(prices[3:])
    assert plain_time_us(Made(), start, end, full=True) == (pytest.approx(kept_full), 8)
    start, end = np.append(start, 100), np.append(end, 101)  # two of three, then one
    contexts = [(min(90 + step, 93) + min(110 + step, 115) + min(100 + step, 101)) / 3 for step in range(3)]
    prices = [price("plain", c, 3, 0, 0) for c in contexts]
    assert plain_time_us(Made(), start, end, full=True) == (pytest.approx(prices[0] + sum(prices[1:]) * 2 / 3), 7)
    start, end = start[:2], end[:2]
    curved = SimpleNamespace(at=lambda op, c, batch: (c * c * batch, False), contexts=lambda: [50.0, 102.0, 300.0])
    knots = np.array([100.0, 102.0, 103.5])
    wanted = np.interp([100.0, 101.0, 102.0, 103.0, 103.5], knots, 2 * knots**2)
    assert plain_time_us(curved, start, end) == (pytest.approx(wanted.sum()), 8)


def test_corrections_are_counted_between_the_neighbouring_rows_and_contexts():
    grid, rows = np.array([0.0, 4.0, 8.0]), np.array([3.0, 8.0, 4.0])
    bins = Bins.empty(2, 3, len(grid) - 1, KNOTS)
    where = np.array([1, 0, 1]), np.array([2, 1, 2])
    bins.add_rows(*where, rows, np.array([150.0, 100.0, 300.0]), grid, np.ones(3))
    assert bins.counts[1, 2].tolist() == [[0.1875, 0.0625], [0.5625, 1.1875], [0.0, 0.0]]
    assert bins.counts[0, 1].tolist() == [[0.0, 0.0], [0.0, 0.0], [1.0, 0.0]]
    assert bins.counts.sum() == 3.0
    half = Bins.empty(2, 3, len(grid) - 1, KNOTS)
    half.add_rows(*where, rows, np.array([150.0, 100.0, 300.0]), grid, np.full(3, 0.5))
    assert half.counts.tolist() == (bins.counts / 2).tolist()
    one = Bins.empty(1, 1, 2, KNOTS[:1])
    one.add(np.zeros(2, np.int64), np.zeros(2, np.int64), np.array([2, 2]), np.array([100.0, 100.0]), np.ones(2))
    one.add(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([1]), np.array([100.0]), np.array([0.25]))
    assert one.counts[0, 0].tolist() == [[0.0], [0.25], [2.0]]


@pytest.mark.parametrize(
    ("verify_kv", "frac"),
    [
        ({"refresh": "round", "full_period": 5}, 1.0),
        ({"refresh": "full", "full_period": 5}, 0.25),
        ({"refresh": "full", "full_period": 2}, 1.0),
        ({"refresh": "full", "full_period": 1}, 0.0),
        ({"refresh": "full", "full_period": 0}, 0.0),
    ],
)
def test_kept_keys_are_chosen_once_a_period(policy, verify_kv, frac):
    lossy = policy("fixed", verify_kv={"mode": "partial", "source": "history", "budget": 48, **verify_kv})
    found = Setting.of(lossy, lossy, 400, partial=True)
    assert (found.partial, found.verified_keys, found.choosing_frac) == (True, 48, frac)
    assert found.verify_kv_tokens(KNOTS).tolist() == [48.0, 48.0]
    full = Setting.of(lossy, lossy, 400)
    assert (full.partial, full.verified_keys, full.choosing_frac) == (False, 0, 1.0)
    assert full.verify_kv_tokens(KNOTS).tolist() == KNOTS.tolist()
    assert found.source == full.source
    assert (found.source == "") == lossy.lossless == (verify_kv["full_period"] == 1)


def test_the_setting_of_a_policy(policy):
    none = Setting.of(policy("none"), policy("none"), 400)
    assert none == Setting(
        plain=True, k_max=0, drafter="none", budget=0, refresh_rounds=1, tail_tokens=0, page=0, source="",
        verified_keys=0, partial=False, choosing_frac=1.0,
    )  # fmt: skip
    quest = policy("fixed", drafter={"kind": "quest"}, draft_kv={"budget": 128, "sink": 16, "recent": 16, "page": 16})
    found = Setting.of(quest, quest, 400, 61)
    assert (found.drafter, found.budget, found.tail_tokens, found.page, found.k_max) == (
        "quest",
        128,
        0,
        16,
        quest.k_max,
    )
    assert found.draft_keys(np.array([100.0, 320.0])).tolist() == [100.0, 128.0]
    assert found.draft_kv_tokens(np.array([100.0, 320.0])).tolist() == [106.25, 148.0]
    kept = policy("fixed", draft_kv={"budget": 128, "sink": 4, "recent": 16, "refresh_rounds": 0})
    found = Setting.of(kept, kept, 400, 61)
    assert (found.tail_tokens, found.page) == (30, 0)
    assert found.draft_kv_tokens(np.array([100.0, 320.0])).tolist() == [100.0, 158.0]
    beside = policy(
        "fixed", cells=[{"to_batch": 4, "overrides": {"drafter": {"kind": "none"}, "controller": {"kind": "none"}}}]
    )
    assert Setting.of(beside, beside.variants()[0], 400).drafter == beside.drafter.label


def test_what_depends_on_the_document(policy):
    kv = {"sink": 4, "recent": 16}
    assert not depends_on_document(policy("fixed"))
    assert depends_on_document(policy("fixed", draft_kv={**kv, "budget_frac": 0.5}))
    assert depends_on_document(policy("fixed", draft_kv={**kv, "budget": 64, "refresh_rounds": 0}))
    later = [{"from_batch": 2, "overrides": {"draft_kv": {"refresh_rounds": 0}}}]
    assert depends_on_document(policy("fixed", cells=later))
