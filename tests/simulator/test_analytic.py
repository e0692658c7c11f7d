"""Closed forms, and the papers' own printed numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdial.simulator import analytic, printed

share = st.floats(0.0, 1.0)
lengths = st.integers(1, 64)
costs = st.floats(0.0, 5.0)


@given(k=lengths, gamma=costs)
def test_nothing_accepted_costs_every_draft(k, gamma):
    assert analytic.speedup(0.0, k, gamma) == pytest.approx(1.0 / (k * gamma + 1.0))


@given(k=lengths, alpha=share)
def test_free_drafts_gain_every_accepted_token(k, alpha):
    assert analytic.speedup(alpha, k, 0.0) == pytest.approx(alpha * k + 1.0)
    assert analytic.speedup(1.0, k, 1.0) == pytest.approx(1.0)


@given(alpha=share, gamma=costs)
def test_no_drafts_change_nothing(alpha, gamma):
    assert analytic.speedup(alpha, 0, gamma) == 1.0
    assert analytic.optimal_k(np.zeros(5), max(gamma, 1e-3)) == 0


@given(alpha=share, gamma=costs, k=st.floats(0.5, 50.0))
def test_slope_is_the_derivative(alpha, gamma, k):
    step = 1e-5
    rise = analytic.speedup(alpha, k + step, gamma) - analytic.speedup(alpha, k - step, gamma)
    assert analytic.speedup_slope(alpha, k, gamma) == pytest.approx(rise / (2 * step), abs=1e-6)


@given(p=share, k=lengths)
def test_geometric_acceptance_is_the_sum_of_powers_and_inverts(p, k):
    accepted = analytic.geometric_accepted(p, k)
    assert accepted == pytest.approx(sum(p**i for i in range(1, k + 1)), abs=1e-9)
    assert analytic.geometric_accepted(analytic.geometric_p(accepted, k), k) == pytest.approx(accepted, abs=1e-6)


@given(p=share, gamma=st.floats(0.01, 2.0))
def test_the_best_k_lies_before_the_inversion(p, gamma):
    accepted = analytic.geometric_accepted(p, np.arange(1, 33))
    best, inverted = analytic.optimal_k(accepted, gamma), analytic.inversion_k(accepted, gamma)
    assert inverted is None or best < inverted


@given(k=lengths, gamma=costs, alpha=share, ratio=st.floats(0.5, 3.0))
def test_at_the_crossover_speedup_is_one(k, gamma, alpha, ratio):
    assert analytic.speedup(analytic.crossover_alpha(k, gamma, ratio), k, gamma, ratio) == pytest.approx(1.0)
    if (needed := analytic.crossover_gamma(k, alpha, ratio)) > 0.0:
        assert analytic.speedup(alpha, k, needed, ratio) == pytest.approx(1.0)


def test_geometric_p_refuses_the_impossible():
    with pytest.raises(ValueError, match="accepted must lie"):
        analytic.geometric_p(5.0, 4)


def test_two_costs_reproduce_the_fixed_k_table_of_sparsespec_l():
    """Its printed accepted lengths and tokens/s, within 5 % from one (C_d, C_v)."""
    found = printed.sparsespec_l()
    assert found.worst_frac < 0.05
    assert 0.0 < found.draft < found.round[0] - 4 * found.draft


def test_the_row_of_dustin_is_reproduced_from_what_a_round_costs():
    """8B shape, batch 16, 32k tokens: within 5 %, and by less than a plain step of its own baseline a round."""
    found = printed.dustin()
    assert found.worst_frac < 0.05
    assert 0.5 < found.round[0] < 1.0


def test_acceptance_of_sparsespec_l_is_geometric_with_p_of_96_percent():
    table = {4: 3.66, 8: 6.75, 12: 9.16, 16: 11.31, 20: 13.01}
    assert [analytic.geometric_p(a, k) for k, a in table.items()] == pytest.approx([0.96] * 5, abs=0.01)


@given(p=share, gamma=st.floats(0.0, 2.0), ratio=st.floats(0.5, 3.0))
def test_the_best_k_is_the_first_of_the_largest_speedups(p, gamma, ratio):
    ks = np.arange(0, 13)
    accepted = analytic.geometric_accepted(p, ks)
    speedups = [1.0, *((accepted[k] + 1.0) / ((k * gamma + 1.0) * ratio) for k in ks[1:])]
    assert analytic.optimal_k(accepted[1:], gamma, ratio) == speedups.index(max(speedups))


def test_best_and_inverted_k_by_hand():
    accepted = np.array([0.75, 1.25, 1.5, 1.75])
    assert analytic.inversion_k(accepted, 0.8) == 1
    assert analytic.inversion_k(accepted, 0.5) == 3  # a draft that saves what it costs still pays
    assert analytic.inversion_k(accepted, 0.25) is None
    assert analytic.optimal_k(np.array([0.5, 0.5]), 0.5) == 0  # 1.5 tokens for 1.5 is no gain
    assert analytic.optimal_k(np.array([0.75, 1.5]), 0.0) == 2
    assert analytic.optimal_k(np.array([1.0, 2.0]), 0.0, 4.0) == 0
    assert analytic.geometric_p(0.0, 3) == pytest.approx(0.0, abs=1e-12)
    assert analytic.geometric_p(3.0, 3) == pytest.approx(1.0, abs=1e-12)
    with pytest.raises(ValueError, match=r"lie in \[0, 3\]"):
        analytic.geometric_p(-0.1, 3)


def test_two_costs_are_those_of_a_line_and_never_negative():
    k = np.array([1.0, 2.0, 5.0])
    assert analytic.fit_two_costs(k, 0.25 * k + 1.5) == pytest.approx((0.25, 1.5))
    # Of times 3, 3 and 6 the line 1.2 (k + 1) misses each by a fifth.
    draft, verify = analytic.fit_two_costs(np.array([1.0, 2.0, 3.0]), np.array([3.0, 3.0, 6.0]))
    errors = np.array([draft + verify, 2 * draft + verify, 3 * draft + verify]) / [3.0, 3.0, 6.0] - 1.0
    assert np.abs(errors) == pytest.approx([0.2] * 3)
    assert analytic.fit_two_costs(k, 8.0 - k)[0] == pytest.approx(0.0, abs=1e-9)


def test_certain_acceptance_divides_by_nothing():
    with np.errstate(all="raise"):
        assert analytic.geometric_accepted(1.0, 4) == 4.0
        assert analytic.geometric_accepted(np.array([0.0, 0.5, 1.0]), 2).tolist() == [0.0, 0.75, 2.0]


def test_a_verification_is_taken_to_cost_a_plain_step():
    assert analytic.speedup(0.5, 2, 0.25) == pytest.approx(2.0 / 1.5)
    assert analytic.optimal_k(np.array([0.5]), 0.1) == 1  # 1.5 tokens for 1.1; at twice the cost it would not pay
    assert analytic.crossover_alpha(2, 0.25) == analytic.crossover_gamma(2, 0.25) == 0.25
