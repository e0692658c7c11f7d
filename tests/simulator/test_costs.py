"""The cost model: exact on its grid and on linear costs, marked outside, refused where nothing is known."""

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdial.engine.trace.reader import CostTable, read_costs
from specdial.engine.trace.schema import COSTS
from specdial.engine.trace.sources import policy_source
from specdial.policies.schema import policy_from_mapping
from specdial.simulator.costs import CostModel, CostRefusedError, operation
from specdial.simulator.measured import Measured
from specdial.simulator.physics import fit_physics, physical_terms
from specdial.simulator.pricing import Bins, Setting
from specdial.simulator.synthetic import Shape, cost_us, write_synthetic_costs


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    context=st.floats(256, 1024), batch=st.sampled_from([1, 2, 4]), k=st.integers(0, 8), budget=st.integers(128, 256)
)
def test_linear_costs_are_interpolated_exactly(costs, context, batch, k, budget):
    assert costs.plain_us(context, batch) == pytest.approx(cost_us("plain", context, batch, 0, 0))
    assert costs.verify_us(context, batch, k) == pytest.approx(cost_us("verify", context, batch, k, 0))
    assert costs.draft_us(context, batch, budget) == pytest.approx(cost_us("draft", context, batch, 0, budget))
    assert costs.select_us(context, batch, budget) == pytest.approx(cost_us("select", context, batch, 0, budget))
    assert not costs.at("verify", context, batch, k)[1]


def test_arrays_broadcast(costs):
    values = costs.verify_us(np.array([300.0, 400.0])[:, None], 1, np.arange(3))
    assert values.shape == (2, 3)
    assert values[1, 2] == pytest.approx(cost_us("verify", 400, 1, 2, 0))


def test_outside_the_grid_physical_terms_carry_on_and_say_so(costs):
    for op, place in [("plain", (4096, 1, 0, 0)), ("verify", (4096, 12, 16, 0)), ("draft", (512, 12, 0, 512))]:
        value, extrapolated = costs.at(op, *place)
        assert extrapolated
        assert value == pytest.approx(cost_us(op, *place), rel=0.02)


def test_one_measured_value_holds_nearby_and_is_refused_far_away(tmp_path):
    write_synthetic_costs(tmp_path, (1000,), (1,), Shape(budgets=(128,)))
    model = CostModel.from_table(read_costs(tmp_path))
    at_1000 = model.at("plain", 1000, 1)
    assert model.at("plain", 1080, 1) == at_1000
    for context, batch in [(1200, 1), (1000, 2)]:
        with pytest.raises(CostRefusedError, match="measured at"):
            model.at("plain", context, batch)
    with pytest.raises(CostRefusedError, match="budget 128 only, not 256"):
        model.at("draft", 1000, 1, 0, 256)


def test_an_operation_never_measured_is_refused(costs):
    model = CostModel({"plain": costs.measured["plain"]}, costs.meta, "a table")
    with pytest.raises(CostRefusedError, match="no measurement of verify"):
        model.at("verify", 300, 1, 4)


def test_a_ragged_grid_interpolates_inside_each_part():
    points = np.array([[1, 0, 0, 100], [1, 0, 0, 200], [2, 0, 0, 100], [2, 0, 0, 300]], float)
    measured = Measured.of("plain", points, np.array([10.0, 20.0, 20.0, 60.0]))
    assert measured.at(np.array([1.0, 0, 0, 150])) == (pytest.approx(15.0), False)
    assert measured.at(np.array([2.0, 0, 0, 200])) == (pytest.approx(40.0), False)
    assert measured.at(np.array([1.5, 0, 0, 150])) == (pytest.approx(22.5), False)


def test_physics_recovers_its_own_coefficients():
    generator = np.random.default_rng(0)
    points = np.column_stack(
        [generator.integers(1, 17, 60), np.zeros(60), generator.integers(0, 9, 60), generator.integers(256, 8192, 60)]
    ).astype(float)
    truth = np.array([500.0, 0.1, 7.0, 0.002])
    fitted = fit_physics("verify", points, physical_terms("verify", points) @ truth)
    assert fitted.coefficients == pytest.approx(truth, rel=1e-4)
    assert fitted.predict_us(points[:1]) == pytest.approx(physical_terms("verify", points[:1]) @ truth, rel=1e-4)


def test_leave_one_out_is_small_for_a_smooth_machine_and_large_for_a_noisy_one(costs):
    smooth = costs.leave_one_out()["verify"]
    assert smooth["worst_frac"] < 0.1
    assert smooth["n"] == len(costs.measured["verify"].values_us)
    verify = costs.measured["verify"]
    noise = np.random.default_rng(1).uniform(0.5, 1.5, len(verify.values_us))
    noisy = CostModel({"verify": Measured.of("verify", verify.points, verify.values_us * noise)}, {}, "noise")
    assert noisy.leave_one_out()["verify"]["median_frac"] > 2 * smooth["median_frac"]


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 4), st.floats(100, 400), st.sampled_from([0.5, 1.0])),
        min_size=1,
        max_size=50,
    )
)
def test_bins_price_rounds_as_interpolation_would(found):
    knots = np.array([100.0, 150.0, 400.0])
    bins = Bins.empty(3, 1, 4, knots)
    unit, k, context, weight = (np.array(column) for column in zip(*found, strict=True))
    bins.add(unit, np.zeros(len(unit), np.int64), k, context, weight)
    table = np.random.default_rng(0).random((5, 3))
    by_bins = np.einsum("uskc,kc->u", bins.counts, table)
    singly = np.zeros(3)
    for u, ki, c, w in found:
        singly[u] += w * np.interp(c, knots, table[ki])
    assert by_bins == pytest.approx(singly)


@pytest.mark.parametrize(("refresh", "tail"), [(0, 30), (1, 0), (4, 0)])
def test_a_selection_chosen_at_prefill_is_read_beside_half_the_output(policy, refresh, tail):
    drafting = policy("fixed", draft_kv={"budget": 128, "sink": 4, "recent": 16, "refresh_rounds": refresh})
    found = Setting.of(drafting, drafting, 400, 60)
    assert (found.budget, found.refresh_rounds, found.tail_tokens, found.page) == (128, refresh, tail, 0)
    lookup = policy("fixed", drafter={"kind": "lookup"}, draft_kv={})
    assert (Setting.of(lookup, lookup, 400, 60).budget, Setting.of(lookup, lookup, 400, 60).tail_tokens) == (0, 0)


def made(rows):
    """A cost table of (op, drafter, source, context, batch, k, budget, median, bytes)."""
    names = ("op", "drafter", "source", "context_tokens", "batch", "k", "budget", "median_us", "bytes")
    whole = [dict.fromkeys(COSTS.names, 0) | dict(zip(names, row, strict=True)) for row in rows]
    return CostModel.from_table(CostTable("made up", {"model": {}}, pa.Table.from_pylist(whole, COSTS)))


def test_a_table_is_filed_by_operation_drafter_and_source():
    model = made(
        [
            ("plain", "none", "", 500, 1, 0, 0, 20.0, 30_000),
            ("plain", "none", "", 900, 1, 0, 0, 40.0, 200_000),
            ("verify", "sparse_self", "", 500, 2, 3, 0, 5.0, 0),
            ("verify", "lookup", "history", 700, 4, 3, 0, 6.0, 0),
            ("refresh", "sparse_self", "history", 700, 4, 8, 0, 7.0, 0),
            ("refresh", "sparse_self", "history", 700, 4, 2, 0, 6.0, 0),
        ]
    )
    names = {"plain", "verify", "verify (lookup) from history", "refresh from history"}
    assert set(model.measured) == names
    assert model.plain_gbps == pytest.approx(200_000 / 40.0 / 1e3)
    assert (model.contexts(), model.batches(), model.refresh_rows()) == ([500.0, 700.0, 900.0], [1, 2, 4], [2.0, 8.0])
    assert (model.recomputed_multiple, model.own_rounds) == (1, False)
    assert set(model.leave_one_out()) == set()  # two of each say nothing about a third
    assert model.at("plain", 500, 1, source="history") == (20.0, False)
    assert model.at("verify", 700, 4, 3, drafter="lookup", source="history") == (6.0, False)
    with pytest.raises(CostRefusedError, match=r"no measurement of verify \(quest\) in cost table made up"):
        model.at("verify", 700, 4, 3, drafter="quest")
    # Older tables timed corrections at one draft length, and do not say which.
    assert model.at("refresh", 700, 4, 2, 5, source="history") == (6.0, False)
    assert made([("verify", "lookup", "", 500, 1, 3, 0, 5.0, 9)]).plain_gbps is None


def test_costs_of_a_traces_own_rounds_are_their_medians():
    """Two batch sizes, of which one was also decoded plainly; k of 0 and 2; partial rounds beside full ones."""
    columns = ("mode", "batch", "k", "context_tokens", "draft_us", "verify_us", "select_us", "host_us")
    rows = [
        ("plain", 1, 0, 100, 0.0, 50.0, 0.0, 4.0),
        ("plain", 1, 0, 200, 0.0, 52.0, 0.0, 6.0),
        ("plain", 1, 0, 300, 0.0, 90.0, 0.0, 1.0),
        ("full", 1, 2, 100, 8.0, 60.0, 3.0, 5.0),
        ("full", 1, 2, 300, 12.0, 70.0, 5.0, 9.0),
        ("partial", 1, 2, 200, 16.0, 30.0, 7.0, 2.0),
        ("full", 1, 0, 200, 0.0, 55.0, 1.0, 3.0),
        ("full", 4, 2, 200, 40.0, 99.0, 11.0, 8.0),
    ]
    waited = pa.array([*[None] * 7, 9.0])  # of the last, in its verification
    table = pa.table({**{name: [row[i] for row in rows] for i, name in enumerate(columns)}, "exposed_us": waited})
    verify_kv = {"mode": "partial", "full_period": 4, "budget": 64}
    policy = {"controller": {"kind": "fixed", "k": 2}, "draft_kv": {"budget_frac": 0.5}, "verify_kv": verify_kv}
    meta = {"policy": policy, "documents": [{"prompt_tokens": 300}, {"prompt_tokens": 501}]}
    model = CostModel.from_rounds(SimpleNamespace(path="t", meta=meta, rounds=table))
    source = policy_source(policy_from_mapping(policy))
    budget = policy_from_mapping(policy).draft_kv.resolved(400).budget
    assert (model.own_rounds, model.source, model.plain_gbps) == (True, "the rounds of t", None)

    def points(op, *, of=source):
        found = model.measured[operation(op, "sparse_self", of)]
        assert found.context_range == (100.0, 300.0)
        assert set(found.points[:, 3]) == {200.0}
        rows = zip(found.points[:, :3].tolist(), found.values_us.tolist(), strict=True)
        return {tuple(int(x) for x in point): us for point, us in rows}  # (batch, budget, k)

    assert points("transfer") == {(4, 0, 0): 9.0}
    assert points("verify") == {(1, 0, 0): 55.0, (1, 0, 2): 65.0, (4, 0, 2): 90.0}
    assert points("host") == {(1, 0, 0): 3.0, (1, 0, 2): 7.0, (4, 0, 2): 8.0}
    assert points("verify_partial") == {(1, 64, 2): 30.0}
    assert points("host_partial") == {(1, 0, 2): 2.0}
    assert points("select_partial") == {(1, 64, 0): 0.0}
    assert points("draft") == {(1, budget, 2): 6.0, (4, budget, 2): 20.0}
    assert points("select") == {(1, budget, 2): 5.0, (4, budget, 2): 11.0}
    (plain,) = (m for name, m in model.measured.items() if name.startswith("plain"))
    assert (plain.points.tolist(), plain.values_us.tolist()) == ([[1.0, 0.0, 0.0, 200.0]], [58.0])


@pytest.mark.parametrize(
    ("graph_mode", "kind", "ks"), [("passes", "fixed", [2]), ("passes", "rate", [1, 2]), ("none", "fixed", [1, 2])]
)
def test_a_recorded_round_that_was_one_pass_counts_as_its_whole_draft(graph_mode, kind, ks):
    """The last round of an output accepts fewer drafts than it made."""
    columns = ("k", "context_tokens", "draft_us", "verify_us", "select_us", "host_us")
    rows = [(2, 100, 20.0, 60.0, 3.0, 5.0), (1, 102, 20.0, 60.0, 3.0, 5.0)]
    values = {name: [float(row[i]) for row in rows] for i, name in enumerate(columns)}
    table = pa.table({"mode": ["full"] * 2, "batch": [1.0] * 2, "exposed_us": pa.nulls(2, pa.float64()), **values})
    policy = {"controller": {"kind": kind, {"fixed": "k", "rate": "k_max"}[kind]: 2}}
    meta = {"policy": policy, "documents": [{"prompt_tokens": 100}], "graph_mode": graph_mode}
    drafts = CostModel.from_rounds(SimpleNamespace(path="t", meta=meta, rounds=table)).measured["draft"]
    assert drafts.points[:, 2].tolist() == ks
    assert drafts.values_us.tolist() == [20.0 / k for k in ks]


def test_each_price_asks_for_its_own_place():
    """Prices that tell batch, budget, k and context apart."""
    weights = np.array([1.0, 1e3, 1e6, 1e9])  # of batch, budget, k, context
    asked = SimpleNamespace(at=lambda query: (float(query @ weights), False))
    model = CostModel(dict.fromkeys(("plain", "draft", "verify", "select", "host"), asked), {}, "made up")
    found = [
        model.plain_us(7, 3), model.plain_us(7), model.draft_us(7, 3, 5, 2), model.draft_us(7, 3, 5),
        model.verify_us(7, 3, 2), model.select_us(7, 3, 5), model.host_us(7, 3, 2), model.host_us(7, 3),
    ]  # fmt: skip
    places = [(3, 0, 0), (1, 0, 0), (3, 5, 2), (3, 5, 0), (3, 0, 2), (3, 5, 0), (3, 0, 2), (3, 0, 0)]
    assert [float(us) for us in found] == [float(np.array([*place, 7]) @ weights) for place in places]
    assert model.at("draft", 7, 3)[0] == 7e9 + 3


def test_costs_of_a_traces_own_batches_go_by_their_longest_drafts():
    rows = [(0, 0, 1, 30.0), (0, 1, 2, 20.0), (1, 0, 3, 30.0), (1, 1, 0, 20.0)]  # doc, round, k, draft_us
    doc, number, k, draft_us = (list(column) for column in zip(*rows))
    times = {"context_tokens": [100.0] * 4, **dict.fromkeys(("verify_us", "select_us", "host_us"), [5.0] * 4)}
    others = {"mode": ["full"] * 4, "batch": [2] * 4, "exposed_us": pa.nulls(4, pa.float64())}
    table = pa.table({"doc": doc, "round": number, "k": k, "draft_us": draft_us, **times, **others})
    meta = {"policy": {"controller": {"kind": "rate", "k_max": 4}}, "batch": 2}
    meta["documents"] = [{"doc": i, "prompt_tokens": 100} for i in range(2)]
    drafts = CostModel.from_rounds(SimpleNamespace(path="t", meta=meta, rounds=table)).measured["draft"]
    assert drafts.points[:, 2].tolist() == [2.0, 3.0]
    assert drafts.values_us.tolist() == [10.0, 10.0]
