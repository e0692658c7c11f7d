"""Each controller's own rule, against a plain statement of its formula."""

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from specdial.policies.controllers import (
    ConfidenceConfig,
    EntropyConfig,
    FixedConfig,
    RateConfig,
    Signals,
    make_controller,
)

nats = st.floats(0.0, 8.0)


def one_lane(entropy, top1=None):
    row = np.array([entropy], dtype=np.float64)
    return Signals(row, np.exp(-row) if top1 is None else np.array([top1]), np.zeros_like(row))


def length(controller, signals, depth):
    """k of a lone lane that may draft `depth` tokens."""
    for done in range(depth):
        if not controller.draft_more(done, signals)[0]:
            return done
    return depth


@given(st.integers(1, 10))
def test_fixed_drafts_k(k):
    assert length(make_controller([FixedConfig(k=k)]), one_lane([9.0] * 12), 12) == k


@given(st.lists(nats, min_size=8, max_size=8), st.floats(0.0, 2.0), st.floats(-1.0, 1.0))
def test_entropy_stops_by_its_formula(entropy, coefficient, threshold):
    bounds = [1.0 - math.sqrt(coefficient * h) for h in entropy]
    assume(all(abs(bound - threshold) > 1e-9 for bound in bounds))
    stops = [i + 1 for i, bound in enumerate(bounds) if bound < threshold]
    controller = make_controller([EntropyConfig(k_max=8, coefficient=coefficient, threshold=threshold)])
    assert length(controller, one_lane(entropy), 8) == min([*stops, 8])


@given(st.lists(st.floats(0.0, 1.0), min_size=8, max_size=8), st.floats(0.0, 1.0))
def test_confidence_stops_by_its_formula(top1, threshold):
    stops = [i + 1 for i, p in enumerate(top1) if p < threshold]
    controller = make_controller([ConfidenceConfig(k_max=8, threshold=threshold)])
    assert length(controller, one_lane([0.0] * 8, top1), 8) == min([*stops, 8])


def sigmoid(x):
    return 1.0 / (1.0 + math.exp(-x))


def probability(c, h):
    if c.form == "calibrated":
        return sigmoid(c.bias - c.slope * h)
    near_accepted, near_rejected = math.exp(-abs(h - c.accepted_nats)), math.exp(-abs(h - c.rejected_nats))
    return near_accepted / (near_accepted + near_rejected)


def slow_length(c, entropy):
    """The stop rule said slowly: after m drafts go on iff the rate at the next allowed k beats the rate now."""
    allowed = sorted(set(c.k_set)) or range(1, c.k_max + 1)

    def rate(k, drafted):
        ps = [probability(c, h) for h in entropy[:drafted]] + [c.acceptance] * (k - drafted)
        return (1.0 + sum(math.prod(ps[:m]) for m in range(1, k + 1))) / (k * c.gamma + 1.0)

    m = 0
    while m < max(allowed):
        following = min(k for k in allowed if k > m)
        now, then = rate(m, m), rate(following, m)
        if m in allowed and abs(then - now) < 1e-12:
            return None  # a tie that rounding decides
        if m in allowed and then <= now:
            break
        m += 1
    return m


rate_configs = st.builds(
    RateConfig,
    form=st.sampled_from(["calibrated", "paper"]),
    k_max=st.just(10),
    k_set=st.lists(st.integers(1, 10), max_size=4).map(tuple),
    gamma=st.floats(0.0, 2.0),
    bias=st.floats(-2.0, 6.0),
    slope=st.floats(0.0, 4.0),
    accepted_nats=st.floats(0.0, 1.0),
    rejected_nats=st.floats(0.0, 4.0),
    acceptance=st.floats(0.0, 1.0),
)


@given(rate_configs, st.lists(nats, min_size=10, max_size=10))
def test_rate_stops_where_the_slow_statement_does(config, entropy):
    expected = slow_length(config, entropy)
    assume(expected is not None)
    assert length(make_controller([config]), one_lane(entropy), 10) == expected


@given(rate_configs, st.lists(nats, min_size=10, max_size=10))
def test_rate_stops_only_inside_its_k_set(config, entropy):
    assume(config.k_set)
    assert length(make_controller([config]), one_lane(entropy), 10) in config.k_set


@given(st.floats(0.0, 3.0), st.floats(0.0, 3.0), nats)
def test_the_paper_form_is_capped(accepted, rejected, entropy):
    """As printed, p never exceeds sigmoid(Hr - Ha) where the accepted centre is the lower one."""
    assume(accepted <= rejected)
    config = RateConfig(form="paper", accepted_nats=accepted, rejected_nats=rejected)
    p = make_controller([config]).probability(np.array([entropy]))[0]
    assert p == pytest.approx(probability(config, entropy))
    assert p <= sigmoid(rejected - accepted) + 1e-12


def test_observing_moves_the_centres_by_ema():
    """One round of 4 drafts, 2 accepted: two labels of 1, one of 0, the fourth draft unlabelled."""
    config = RateConfig(form="paper", beta=0.5, learning_rate=0.0)
    controller = make_controller([config])
    controller.observe(np.array([4]), np.array([2]), one_lane([0.5, 1.0, 3.0, 7.0]), np.array([True]))
    accepted = 0.5 * (0.5 * config.accepted_nats + 0.5 * 0.5) + 0.5 * 1.0
    assert controller.accepted_nats[0] == pytest.approx(accepted)
    assert controller.rejected_nats[0] == pytest.approx(0.5 * config.rejected_nats + 0.5 * 3.0)
    assert controller.acceptance[0] == pytest.approx(((config.acceptance * 0.5 + 0.5) * 0.5 + 0.5) * 0.5)
    assert controller.bias[0] == config.bias


def test_a_round_that_accepts_all_labels_no_rejection():
    config = RateConfig(beta=0.5)
    controller = make_controller([config])
    controller.observe(np.array([2]), np.array([2]), one_lane([0.5, 1.0, 3.0]), np.array([True]))
    assert controller.rejected_nats[0] == config.rejected_nats


def log_loss(controller, entropy, label):
    p = controller.probability(entropy)
    return float(-np.mean(np.where(label, np.log(p), np.log(1.0 - p))))


def test_the_calibrated_form_learns():
    """Started far from the truth, its log-loss on the stream's distribution falls, most of the way to the best."""
    generator = np.random.default_rng(0)
    entropy = generator.gamma(1.0, 1.0, 4000)
    label = generator.random(4000) < 1.0 / (1.0 + np.exp(-(1.0 - 2.0 * entropy)))
    best = make_controller([RateConfig(bias=1.0, slope=2.0)])
    learner = make_controller([RateConfig(bias=3.0, slope=0.2, learning_rate=0.05)])
    before = log_loss(learner, entropy, label)
    for h, accepted in zip(entropy, label):
        learner.observe(np.array([1]), np.array([int(accepted)]), one_lane([h]), np.array([True]))
    after, floor = log_loss(learner, entropy, label), log_loss(best, entropy, label)
    assert after - floor < 0.1 * (before - floor)
    assert make_controller([RateConfig()]).learning_rate[0] > 0.0  # it does so unasked


def test_what_just_reaches_a_threshold_goes_on():
    """1 - sqrt(0.25 * 1) is the threshold itself; so is a probability of 0.5."""
    just, over = [1.0] * 3, [math.nextafter(1.0, 2.0)] * 3
    entropy = make_controller([EntropyConfig(k_max=3, coefficient=0.25, threshold=0.5)])
    assert [length(entropy, one_lane(h), 3) for h in (just, [1.01] * 3)] == [3, 1]
    confidence = make_controller([ConfidenceConfig(k_max=3, threshold=0.5)])
    below = [math.nextafter(0.5, 0.0)] * 3
    assert [length(confidence, one_lane(over, p), 3) for p in ([0.5] * 3, below)] == [3, 1]


def test_a_rate_that_would_stay_as_it_is_stops():
    """Every draft surely accepted, at the cost of a verification: after the first nothing is won any more."""
    sure = RateConfig(k_max=4, gamma=1.0, bias=50.0, slope=0.0, acceptance=1.0)
    assert length(make_controller([sure]), one_lane([0.0] * 4), 4) == 1
    cheaper = RateConfig(k_max=4, gamma=0.999, bias=50.0, slope=0.0, acceptance=1.0)
    assert length(make_controller([cheaper]), one_lane([0.0] * 4), 4) == 4
