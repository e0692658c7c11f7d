"""What seeded faults showed no other test to hold: bounds, defaults that older files rely on, what the rate learns."""

import math
from dataclasses import fields

import numpy as np
import pytest

from specdial.policies.controllers import (
    CONTROLLERS,
    ConfidenceConfig,
    EntropyConfig,
    FixedConfig,
    RateConfig,
    Signals,
    make_controller,
)
from specdial.policies.errors import UserError
from specdial.policies.fields import parse, to_plain
from specdial.policies.schema import Drafter, DraftKV, VerifyKV, policy_from_mapping

SETTINGS = [*(config for config, _ in CONTROLLERS.values()), Drafter, DraftKV, VerifyKV]
# (of what, which, smallest, largest); None: none is too small or large
BOUNDS = [
    (FixedConfig, "k", 1, 64),
    (EntropyConfig, "k_max", 1, 64),
    (EntropyConfig, "coefficient", 0.0, None),
    (EntropyConfig, "threshold", -10.0, 1.0),
    (ConfidenceConfig, "k_max", 1, 64),
    (ConfidenceConfig, "threshold", 0.0, 1.0),
    (RateConfig, "k_max", 1, 64),
    (RateConfig, "gamma", 0.0, 100.0),
    (RateConfig, "beta", 0.0, 1.0),
    (RateConfig, "bias", -50.0, 50.0),
    (RateConfig, "slope", 0.0, 50.0),
    (RateConfig, "learning_rate", 0.0, 1.0),
    (RateConfig, "acceptance", 0.0, 1.0),
    (Drafter, "ngram", 1, 16),
    (DraftKV, "budget", 1, 1 << 24),
    (DraftKV, "sink", 0, 1 << 24),
    (DraftKV, "recent", 0, 1 << 24),
    (DraftKV, "window", 1, 256),
    (DraftKV, "budget_frac", 0.0, 1.0),
    (DraftKV, "decay", 0.0, 1.0),
    (DraftKV, "refresh_rounds", 0, 1 << 16),
]


@pytest.mark.parametrize(("of", "name", "low", "high"), BOUNDS, ids=lambda x: getattr(x, "__name__", str(x)))
def test_bounds_are_inclusive_and_no_wider(of, name, low, high):
    def beyond(bound, way):
        return math.nextafter(bound, way * math.inf) if isinstance(bound, float) else bound + way

    kind = {"kind": of().kind} if hasattr(of(), "kind") else {}
    for bound, way in ((low, -1), (high, 1)):
        if bound is not None:
            assert getattr(parse(of, {**kind, name: bound}), name) == bound
            with pytest.raises(UserError, match=name):
                parse(of, {**kind, name: beyond(bound, way)})


@pytest.mark.parametrize("of", SETTINGS, ids=lambda of: of.__name__)
def test_defaults_are_settings_that_would_be_accepted(of):
    assert parse(of, to_plain(of(), complete=True)) == of()


def test_settings_that_came_later_leave_no_trace_in_older_files():
    """Or the digest of every older policy would change."""
    later = {of.__name__: {f.name for f in fields(of)} - set(to_plain(of())) for of in SETTINGS}
    assert later["DraftKV"] == {"budget_frac", "decay", "refresh_rounds"}
    assert later["Drafter"] >= {"weights", "model", "ngram", "tree"}
    assert all(later[name] == {"lag"} for name in ("EntropyConfig", "ConfidenceConfig", "RateConfig"))
    assert to_plain(DraftKV(decay=0.5, refresh_rounds=0))["refresh_rounds"] == 0
    kv = DraftKV()
    assert (kv.budget_frac, kv.decay, kv.refresh_rounds, kv.page, kv.scope) == (0.0, 1.0, 1, 1, "kv_head")


def test_the_rate_learns_from_accepted_and_first_rejected_drafts_alone():
    """Three drafts of four: two accepted, the third rejected, the fourth unlabelled. Beside it a lane that is done."""
    config = RateConfig(beta=0.75, bias=1.0, slope=0.5, learning_rate=0.1, accepted_nats=1.0, rejected_nats=2.0)
    rate = make_controller([config, config])
    entropy = np.array([[0.25, 0.5, 3.0, 7.0], [math.nan] * 4])
    signals = Signals(entropy, np.exp(-entropy), np.zeros_like(entropy))
    rate.observe(np.array([4, 4]), np.array([2, 2]), signals, np.array([True, False]))
    centre, acceptance, bias, slope = 1.0, config.acceptance, 1.0, 0.5
    for nats, label in ((0.25, 1.0), (0.5, 1.0), (3.0, 0.0)):
        centre = 0.75 * centre + 0.25 * nats if label else centre
        acceptance = 0.75 * acceptance + 0.25 * label
        step = 0.1 * (label - 1.0 / (1.0 + math.exp(-(bias - slope * nats))))
        bias, slope = bias + step, max(slope - step * nats, 0.0)
    learned = (rate.accepted_nats, rate.rejected_nats, rate.acceptance, rate.bias, rate.slope)
    assert [values[0] for values in learned] == pytest.approx(
        [centre, 0.75 * 2.0 + 0.25 * 3.0, acceptance, bias, slope]
    )
    assert [values[1] for values in learned] == [1.0, 2.0, config.acceptance, 1.0, 0.5]


def test_a_partial_verification_s_keys_are_its_own_selection():
    recent = VerifyKV(mode="partial", source="recent", sink=3, recent=9, full_period=0)
    assert (recent.keys.budget, recent.keys.sink, recent.keys.recent) == (12, 3, 9)
    paged = VerifyKV(mode="partial", budget=96, sink=5, recent=16, page=16, full_period=0).keys
    assert (paged.budget, paged.sink, paged.recent, paged.page) == (96, 5, 16, 16)


@pytest.mark.parametrize(("page", "fits"), [(1, False), (16, True), (64, True)])
def test_quest_chooses_whole_pages(page, fits):
    kv = {"budget": 128, "sink": 0, "recent": 0, "page": page}
    mapping = {"drafter": {"kind": "quest"}, "controller": {"kind": "fixed"}, "draft_kv": kv}
    if fits:
        assert policy_from_mapping(mapping).draft_kv.page == page
    else:
        with pytest.raises(UserError, match=r"draft_kv\.page is 1, and drafter quest chooses whole pages"):
            policy_from_mapping(mapping)


@pytest.mark.parametrize("name", ["", "  ", ".hidden", "a/b", "a\\b", "a\nb", "x" * 101])
def test_names_that_could_not_name_a_file_are_refused(name):
    with pytest.raises(UserError, match="name is"):
        policy_from_mapping({"name": name})
    assert policy_from_mapping({"name": "x" * 100}).name == "x" * 100
