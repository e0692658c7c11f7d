"""The contract that every kind of controller keeps, whatever its settings: one suite over the registry."""

import dataclasses
import typing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdial.policies.controllers import CONTROLLERS, Signals, draft_limit, longest_draft, make_controller
from specdial.policies.fields import to_plain
from specdial.policies.schema import parse_controller

ROUNDS, DEPTH = 6, 12
SIGNALS = ("entropy_nats", "top1_prob", "margin")


def setting_values(field, hint):
    """Values of one setting, bounds included."""
    if typing.get_origin(hint) is typing.Literal:
        return st.sampled_from(typing.get_args(hint))
    low, high = field.metadata["low"], field.metadata["high"]
    if typing.get_origin(hint) is tuple:
        return st.lists(st.integers(1, 3), max_size=3).map(tuple)
    if hint is int:
        return st.integers(low, min(high, DEPTH))
    return st.floats(low, high if high is not None else low + 10.0)


def configs(kind):
    """Settings of a kind, k_set inside k_max."""
    cls = CONTROLLERS[kind][0]
    hints = typing.get_type_hints(cls)
    built = st.builds(cls, **{f.name: setting_values(f, hints[f.name]) for f in dataclasses.fields(cls)})
    return built.filter(lambda c: max(getattr(c, "k_set", ()), default=0) <= getattr(c, "k_max", DEPTH))


def without_lag(config):
    return dataclasses.replace(config, lag=0) if hasattr(config, "lag") else config


def signals_of(seed, lanes):
    """Signals of ROUNDS rounds, and how many leading drafts the target would accept in each: [R, N]."""
    generator = np.random.default_rng(seed)
    rounds = []
    for _ in range(ROUNDS):
        entropy = generator.gamma(0.7, 1.0, (lanes, DEPTH))
        rounds.append(Signals(entropy, np.exp(-entropy), generator.gamma(1.0, 2.0, (lanes, DEPTH))))
    return rounds, generator.integers(0, DEPTH + 1, (ROUNDS, lanes))


def only(signals, lanes):
    return Signals(*(getattr(signals, name)[lanes] for name in SIGNALS))


def drafted(controller, signals, active, limit=DEPTH):
    """One round as the engine asks for it: k [N], depth by depth, stopped lanes left out."""
    going, k = active.copy(), np.zeros(len(active), np.int64)
    for depth in range(limit):
        going = going & controller.draft_more(depth, signals)
        if not going.any():
            break
        k[going] = depth + 1
    return k


def history(controller, rounds, luck, active):
    """k of every round, learning after each: [R, N]. active: [R, N]."""
    asked = []
    for signals, drawn, lanes in zip(rounds, luck, active):
        k = drafted(controller, signals, lanes)
        controller.observe(k, np.minimum(k, drawn), signals, lanes)
        asked.append(k)
    return np.array(asked)


@pytest.mark.parametrize("kind", CONTROLLERS)
class TestContract:
    @settings(max_examples=25, deadline=None)
    @given(data=st.data(), seed=st.integers(0, 2**32 - 1))
    def test_lanes_are_independent(self, kind, data, seed):
        lanes = data.draw(st.lists(configs(kind), min_size=2, max_size=4))
        rounds, luck = signals_of(seed, len(lanes))
        active = np.random.default_rng(seed).random((ROUNDS, len(lanes))) < 0.8
        together = history(make_controller(lanes), rounds, luck, active)
        for n, config in enumerate(lanes):
            alone = [only(r, [n]) for r in rounds]
            np.testing.assert_array_equal(
                history(make_controller([config]), alone, luck[:, [n]], active[:, [n]])[:, 0], together[:, n]
            )

    @settings(max_examples=25, deadline=None)
    @given(data=st.data(), seed=st.integers(0, 2**32 - 1))
    def test_it_asks_for_one_to_k_max_drafts(self, kind, data, seed):
        config = data.draw(configs(kind))
        controller = make_controller([config] * 3)
        rounds, luck = signals_of(seed, 3)
        k = history(controller, rounds, luck, np.ones((ROUNDS, 3), np.bool_))
        assert controller.k_max.tolist() == [longest_draft(config)] * 3
        assert (k <= controller.k_max).all()
        assert (k >= min(1, longest_draft(config))).all()  # a lane that may draft never stops learning
        assert draft_limit(controller, np.array([0, 1, 4])).tolist() == [0, 0, min(3, longest_draft(config))]

    @settings(max_examples=15, deadline=None)
    @given(data=st.data(), seed=st.integers(0, 2**32 - 1))
    def test_it_is_deterministic(self, kind, data, seed):
        config = data.draw(configs(kind))
        rounds, luck = signals_of(seed, 2)
        active = np.ones((ROUNDS, 2), np.bool_)
        first = history(make_controller([config] * 2), rounds, luck, active)
        np.testing.assert_array_equal(first, history(make_controller([config] * 2), rounds, luck, active))

    @settings(max_examples=15, deadline=None)
    @given(data=st.data(), seed=st.integers(0, 2**32 - 1))
    def test_garbage_is_never_looked_at(self, kind, data, seed):
        """NaN past a lane's depth, and everywhere in lanes that took no part, changes nothing."""
        config = data.draw(configs(kind))
        rounds, luck = signals_of(seed, 3)
        active = np.random.default_rng(seed + 1).random((ROUNDS, 3)) < 0.6
        clean = history(make_controller([config] * 3), rounds, luck, active)
        soiled = []
        for signals, k, lanes in zip(rounds, clean, active):
            garbage = ~(lanes[:, None] & (np.arange(DEPTH) < k[:, None]))
            soiled.append(Signals(*(np.where(garbage, np.nan, getattr(signals, name)) for name in SIGNALS)))
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(history(make_controller([config] * 3), soiled, luck, active), clean)

    @settings(max_examples=40, deadline=None)
    @given(data=st.data(), seed=st.integers(0, 2**32 - 1))
    def test_with_lag_it_does_after_d_drafts_what_it_would_have_done_after_one_fewer(self, kind, data, seed):
        """Lanes of mixed lag, each beside an unlagged twin that learns from the same rounds; what is late reads NaN."""
        lanes = data.draw(st.lists(configs(kind), min_size=1, max_size=4))
        lagged, twins = make_controller(lanes), make_controller([without_lag(config) for config in lanes])
        rounds, luck = signals_of(seed, len(lanes))
        everyone = np.ones(len(lanes), np.bool_)
        for signals, drawn in zip(rounds, luck):
            rule = np.array([twins.draft_more(d, signals) for d in range(DEPTH)])  # [DEPTH, N]
            going, k = everyone, np.zeros(len(lanes), np.int64)
            for d in range(DEPTH):
                read = np.where(np.arange(DEPTH) < d - lagged.lag[:, None], 0.0, np.nan)
                with np.errstate(invalid="ignore"):
                    more = lagged.draft_more(d, Signals(*(getattr(signals, name) + read for name in SIGNALS)))
                expected = [rule[max(d - lag, 0), n] and d < lagged.k_max[n] for n, lag in enumerate(lagged.lag)]
                assert more[going].tolist() == np.array(expected)[going].tolist()
                going = going & more
                k += going
            for controller in (lagged, twins):
                controller.observe(k, np.minimum(k, drawn), signals, everyone)

    @given(data=st.data())
    def test_its_settings_survive_a_round_trip(self, kind, data):
        config = data.draw(configs(kind))
        assert parse_controller(to_plain(config), "controller") == config

    def test_it_lags_only_where_it_looks_at_signals(self, kind):
        config = CONTROLLERS[kind][0]
        lags = [config(lag=1), config()] if CONTROLLERS[kind][1].adaptive else [config(), config()]
        assert make_controller(lags).lag.tolist() == ([1, 0] if CONTROLLERS[kind][1].adaptive else [0, 0])

    def test_its_kind_is_its_name_in_the_registry(self, kind):
        config_class, controller_class = CONTROLLERS[kind]
        assert config_class().kind == controller_class.kind == kind


def test_kinds_do_not_mix():
    with pytest.raises(ValueError, match="lanes of one kind"):
        make_controller([config() for config, _ in CONTROLLERS.values()])
    with pytest.raises(ValueError, match="lanes of one kind"):
        make_controller([])
