"""Other hardware, and where plain decoding wins."""

from dataclasses import replace

import numpy as np
import pytest

from specdial.policies.errors import UserError
from specdial.simulator.costs import CostModel
from specdial.simulator.crossover import crossover_surface, kept
from specdial.simulator.lanes import read_record
from specdial.simulator.measured import Measured
from specdial.simulator.replay import replay
from specdial.simulator.synthetic import MODEL
from specdial.simulator.whatif import on_other_hardware


def test_the_same_machine_changes_nothing(costs):
    assert on_other_hardware(costs, 1.0, 1.0) is costs


def test_keys_follow_bandwidth_rows_follow_compute_and_all_is_extrapolated(costs):
    faster = on_other_hardware(costs, 2.0, 1.0)
    slope = (costs.plain_us(1024, 1) - costs.plain_us(256, 1)) / 768
    assert (faster.plain_us(1024, 1) - faster.plain_us(256, 1)) / 768 == pytest.approx(slope / 2, rel=0.02)
    assert faster.at("plain", 512, 1)[1]
    rows = on_other_hardware(costs, 1.0, 2.0)
    step = costs.verify_us(256, 1, 8) - costs.verify_us(256, 1, 0)
    assert rows.verify_us(256, 1, 8) - rows.verify_us(256, 1, 0) == pytest.approx(step / 2, rel=0.05)
    assert rows.host_us(256, 1) == costs.host_us(256, 1)


def test_the_link_to_the_host_stays(costs):
    moved = Measured.of("transfer", np.array([[1, 0, 0, 256], [1, 0, 0, 512]], float), np.array([10.0, 20.0]))
    hosted = CostModel({**costs.measured, "transfer": moved}, costs.meta, "keys in host memory")
    assert on_other_hardware(hosted, 2.0, 2.0).at("transfer", 384, 1) == (15.0, True)


def test_a_replay_on_other_hardware_says_that_all_of_it_is_extrapolated(trace, costs, policy):
    (outcome,) = replay(trace, on_other_hardware(costs, 4.0, 4.0), [policy("fixed")])
    assert outcome.extrapolated_frac == pytest.approx(1.0)
    assert outcome.level == "exact"  # acceptance is; its costs are not


def test_costs_that_do_not_show_bandwidth_are_refused(costs):
    points = np.array([[1, 0, 0, 256], [1, 0, 0, 512]], float)
    flat = CostModel({"plain": Measured.of("plain", points, np.array([10.0, 10.0]))}, {"model": MODEL}, "flat")
    with pytest.raises(UserError, match="do not rise with context"):
        on_other_hardware(flat, 2.0, 1.0)


@pytest.mark.parametrize(
    ("model", "missing"),
    [
        ({"kv_bytes_per_token": 0.0}, "kv_bytes_per_token and weight_bytes"),
        ({"kv_bytes_per_token": 9.0}, "the weight_bytes"),
    ],
)
def test_costs_of_a_model_of_unknown_size_are_refused(costs, model, missing):
    with pytest.raises(UserError, match=missing):
        on_other_hardware(CostModel(costs.measured, {"model": model}, "imported"), 2.0, 1.0)


def test_all_but_the_times_is_kept(costs):
    costs = replace(costs, own_rounds=True, plain_gbps=100.0)
    before = costs.at("plain", 1024, 1)[0]
    other = on_other_hardware(costs, 2.0, 1.0)
    assert (other.own_rounds, other.meta) == (True, costs.meta)
    assert other.at("plain", 1024, 1)[0] < before == costs.at("plain", 1024, 1)[0]
    assert other.plain_gbps == pytest.approx(100.0 * before / other.at("plain", 1024, 1)[0])


def test_times_at_one_context_do_not_show_bandwidth():
    """As a trace's own rounds whose last batch was smaller: nothing tells a step's keys from its rows."""
    points = np.array([[4, 0, 0, 500], [2, 0, 0, 500]], float)
    own = CostModel({"plain": Measured.of("plain", points, np.array([1100.0, 1050.0]))}, {"model": MODEL}, "own")
    with pytest.raises(UserError, match="do not rise with context"):
        on_other_hardware(own, 2.0, 1.0)


def test_plain_wins_where_drafting_grows_dear(trace, costs):
    """The made-up machine drafts at a cost that grows with batch while a verification's fixed part is shared."""
    record = read_record(trace)
    corners = {(c.context_tokens, c.batch): c for c in crossover_surface(record, costs, [256, 1024], [1, 6])}
    assert corners[256, 1].k > 0
    assert corners[256, 1].speedup > corners[256, 6].speedup
    assert corners[1024, 6].speedup > corners[256, 6].speedup  # long contexts make verification worth sharing
    dear = CostModel(
        {
            **costs.measured,
            "draft": Measured.of("draft", costs.measured["draft"].points, costs.measured["draft"].values_us * 50),
        },
        costs.meta,
        "dear drafts",
    )
    assert all(c.k == 0 and c.speedup == 1.0 for c in crossover_surface(record, dear, [256, 1024], [1, 6]))


def test_accepted_drafts_grow_with_k_and_budget(trace):
    found = kept(read_record(trace))
    accepted = {place: each.tokens_per_round - 1.0 for place, each in found.items()}
    assert accepted[1, 1] <= accepted[1, 8]
    assert accepted[0, 8] < accepted[1, 8]  # arms of 128 and 256 keys
    assert set(accepted) == {(arm, k) for arm in (0, 1) for k in range(1, 9)}
