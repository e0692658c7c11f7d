"""What seeded faults showed no other test to hold: bounds, defaults that older files rely on, what the rate learns."""

import math
from dataclasses import fields

import numpy as np
import pytest

from specdial.policies import schema
from specdial.policies.controllers import (
    CONTROLLERS,
    ConfidenceConfig,
    EntropyConfig,
    FixedConfig,
    RateConfig,
    Signals,
    make_controller,
)
from specdial.policies.drafting import DEFAULT_BUDGET, DEFAULT_WINDOW, Tree
from specdial.policies.errors import UserError
from specdial.policies.exporters.options import Options
from specdial.policies.fields import parse, to_plain
from specdial.policies.schema import Cell, Drafter, DraftKV, Policy, VerifyKV, policy_from_mapping

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


# The same, of what files may leave out or cells may set.
MORE_BOUNDS = [
    (RateConfig, "accepted_nats", 0.0, None),
    (RateConfig, "rejected_nats", 0.0, None),
    (Tree, "width", 1, 64),
    (Tree, "nodes", 1, 512),
    (Drafter, "window", 0, 1 << 24),
    (Drafter, "budget", 0, 1 << 24),
    (VerifyKV, "full_period", 0, 1 << 16),
    (VerifyKV, "budget", 1, 1 << 24),
    (VerifyKV, "sink", 0, 1 << 24),
    (VerifyKV, "recent", 0, 1 << 24),
    (VerifyKV, "lookahead_tokens", 0, 1 << 24),
    (VerifyKV, "buffer", 0, 1 << 24),
    (Cell, "from_context_tokens", 0, 1 << 24),
    (Cell, "to_context_tokens", 1, 1 << 24),
    (Cell, "from_batch", 1, 1 << 20),
    (Cell, "to_batch", 2, 1 << 20),
    (Options, "context_tokens", 0, None),
    (Options, "batch", 1, None),
    (Options, "max_batch", 1, 1 << 20),
]


@pytest.mark.parametrize(("of", "name", "low", "high"), MORE_BOUNDS, ids=lambda x: getattr(x, "__name__", str(x)))
def test_these_bounds_are_inclusive_and_no_wider(of, name, low, high):
    rest = {"overrides": {}} if of is Cell else {"kind": "rate"} if of is RateConfig else {}
    for bound, way in ((low, -1), (high, 1)):
        if bound is not None:
            assert getattr(parse(of, {**rest, name: bound}), name) == bound
            with pytest.raises(UserError, match=name):
                parse(of, {**rest, name: bound + way})


def test_defaults_are_those_that_files_rely_on():
    """A file says only what differs: another default would change what older ones mean."""
    adaptive = {"k_max": 8, "lag": 0}
    learned = {"gamma": 0.3, "beta": 0.9, "bias": 3.0, "slope": 1.5, "learning_rate": 0.02}
    start = {"accepted_nats": 0.3, "rejected_nats": 2.0, "acceptance": 0.8}
    selection = {"sink": 4, "scope": "kv_head", "page": 1, "budget": 512}
    wanted = {
        FixedConfig: {"k": 4},
        EntropyConfig: {**adaptive, "coefficient": 0.2, "threshold": 0.4},
        ConfidenceConfig: {**adaptive, "threshold": 0.4},
        RateConfig: {**adaptive, **learned, **start, "form": "calibrated", "k_set": []},
        Tree: {"width": 10, "nodes": 60},
        Drafter: {
            "kind": "sparse_self", "weights": "model", "model": "", "ngram": 3, "tree": None, "window": 0, "budget": 0
        },
        DraftKV: {**selection, "recent": 64, "window": 16, "budget_frac": 0.0, "decay": 1.0, "refresh_rounds": 1},
        VerifyKV: {
            **selection, "mode": "full", "full_period": 1, "source": "history", "recent": 16, "lookahead_tokens": 0,
            "refresh": "round", "bound": "quest", "rows": "mean", "buffer": 0,
        },
    }  # fmt: skip
    for of, values in wanted.items():
        found = to_plain(of(), complete=True)
        assert {**found, **values} == found
        assert set(found) - {"kind"} == set(values) - {"kind"}
    cell = Cell({})
    assert (cell.from_context_tokens, cell.to_context_tokens, cell.from_batch, cell.to_batch) == (0, None, 1, None)
    options = Options()
    assert (options.context_tokens, options.batch, options.max_batch) == (None, None, 512)
    assert (options.vllm_context_ranges, options.trtllm_schedule) == (False, "upto")
    assert (DEFAULT_BUDGET, DEFAULT_WINDOW) == (512, 16)


def test_settings_of_a_partial_verification_leave_no_trace_where_it_is_full():
    assert to_plain(VerifyKV()) == {"mode": "full", "full_period": 1}
    assert set(to_plain(Policy())) & {"scoring_heads", "kv"} == set()
    assert set(to_plain(Drafter())) == {"kind"}


def test_a_list_of_draft_lengths_stays_within_the_longest():
    def rate(k_set):
        return {"controller": {"kind": "rate", "k_max": 8, "k_set": k_set}}

    assert policy_from_mapping(rate([1, 8])).controller.k_set == (1, 8)
    assert policy_from_mapping(rate([])).k_max == 8
    for refused in ([0, 8], [8, 65]):
        with pytest.raises(UserError, match=r"controller\.k_set is"):
            policy_from_mapping(rate(refused))
    with pytest.raises(UserError, match=r"controller\.k_set holds 9, k_max is 8"):
        policy_from_mapping(rate([1, 9]))


def test_a_cell_ends_above_where_it_starts_and_there_are_at_most_a_thousand(monkeypatch):
    def cells(*given):
        return policy_from_mapping({"cells": [{"overrides": {}, **cell} for cell in given]})

    for axis, start in (("context_tokens", 7), ("batch", 3)):
        (cell,) = cells({f"from_{axis}": start, f"to_{axis}": start + 1}).cells
        assert [cell.covers(*((n, 1) if axis == "context_tokens" else (0, n))) for n in (start - 1, start, start + 1)] \
            == [False, True, False]  # fmt: skip
        with pytest.raises(UserError, match=rf"cells\[0\]\.to_{axis} is {start}, not above where the cell starts"):
            cells({f"from_{axis}": start, f"to_{axis}": start})
    with pytest.raises(UserError, match="cells has 1001 entries"):
        cells(*({"from_batch": 1 + i} for i in range(1001)))
    monkeypatch.setattr(schema, "MOST_CELLS", 20)
    assert len(cells(*({"from_batch": 1 + i} for i in range(20))).cells) == 20
    with pytest.raises(UserError, match="cells has 21 entries"):
        cells(*({"from_batch": 1 + i} for i in range(21)))


@pytest.mark.parametrize(("length", "shown"), [(58, 60), (59, 60)])
def test_long_values_are_cut_where_messages_show_them(length, shown):
    """Sixty characters, quotes included, are shown whole."""
    with pytest.raises(UserError) as whole:
        parse(FixedConfig, {"kind": "fixed", "k": "x" * length})
    text = str(whole.value).split("got ")[1].split(";")[0]
    assert len(text) == shown
    assert text.endswith("x'" if length == 58 else "x...")
