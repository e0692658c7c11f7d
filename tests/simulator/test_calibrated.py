"""From the clock to a replay: what calibrate writes is what the cost model reads."""

from types import SimpleNamespace

import numpy as np
import pytest

from specdial.engine.trace.reader import read_costs
from specdial.engine.trace.schema import WATCHED, WATCHED_OPS
from specdial.engine.verbs import calibrate, calibrate_bench
from specdial.engine.verbs.calibrate_bench import Bench
from specdial.engine.verbs.calibrate_plan import Plan, Settings, plans_of
from specdial.policies.errors import UserError
from specdial.policies.fields import parse
from specdial.policies.schema import Drafter, policy_from_mapping
from specdial.simulator.costs import CostModel
from specdial.simulator.pricing import DRAFT, HOST, Setting, tabulate

OPS = ("draft", "verify", "select", "host")
KV = {"budget": 40, "sink": 2, "recent": 8, "window": 8}


@pytest.fixture
def settings(tiny_checkpoint, tmp_path):
    text = tmp_path / "words.txt"
    text.write_text("\n\n".join(f"{i} times upon a time there was a key. " * 4 for i in range(20)))
    return {
        "model": {"source": str(tiny_checkpoint("llama")), "device": "cpu", "dtype": "float32"},
        "workload": {"kind": "file", "path": str(text)},
        "out": str(tmp_path / "costs"),
        "contexts": [64],
        "ks": [0, 2],
        "budgets": [40, 48],
        "repeats": 3,
        "draft_kv": KV,
    }


def test_what_is_timed_can_be_priced(settings):
    calibrate.run(settings)
    table = read_costs(settings["out"])
    drafters = {(row["op"], row["drafter"]) for row in table.rows.to_pylist()}
    assert drafters == {("plain", "none"), *((op, "sparse_self") for op in OPS)}
    model = CostModel.from_table(table)
    assert model.at("draft", 64.0, 1, 2, 40)[0] > 0.0
    assert "drafters" not in table.meta["config"]  # as before there were others: an earlier run is found again


def test_every_budget_is_timed_where_ks_and_repeats_suffice(settings):
    calibrate.run({**settings, "ks": [0, 1, 2], "budgets": [40, 44, 48, 52]})
    rows = read_costs(settings["out"]).rows.to_pylist()
    assert {row["budget"] for row in rows if row["op"] == "draft"} == {40, 44, 48, 52}


def test_a_controller_that_looks_at_signals_is_priced_by_rounds_that_waited_for_it(settings, monkeypatch):
    """As on a GPU, where rounds of others do not wait."""
    monkeypatch.setattr(Bench, "waits", True)
    calibrate.run({**settings, "ks": [0, 1, 2]})
    rows = read_costs(settings["out"]).rows.to_pylist()
    timed = {(row["op"], row["k"], row["budget"]) for row in rows if row["op"] in WATCHED_OPS}
    assert timed == {(f"draft_{how}", k, b) for how in WATCHED for k in (1, 2) for b in (40, 48)} | {
        (f"host_{how}", k, 0) for how in WATCHED for k in (1, 2)
    }
    model = CostModel.from_table(read_costs(settings["out"]))
    knots = np.array([64.0])
    kinds = {"entropy": ("lag0", "lag1"), "confidence": ("lag0", "lag1"), "rate": ("rate_lag0", "lag1")}
    wanted = [({"kind": kind, "k_max": 2, "lag": lag}, f"_{kinds[kind][lag]}") for kind in kinds for lag in (0, 1)]
    for controller, end in (*wanted, ({"kind": "fixed", "k": 2}, "")):
        policy = policy_from_mapping({"draft_kv": {**KV, "budget": 40}, "controller": controller})
        table = tabulate(model, Setting.of(policy, policy, 64), 1, knots)
        assert table.cost_us[DRAFT, 2, 0] == 2 * model.at(f"draft{end}", 64.0, 1, 2, 40)[0]
        assert table.cost_us[HOST, 2, 0] == model.at(f"host{end}", 64.0, 1, 2)[0]
        assert table.cost_us[HOST, 0, 0] == model.at("host", 64.0, 1, 0)[0], "nothing is looked at without drafts"


def test_every_configuration_is_also_timed_without_a_pause(settings, monkeypatch):
    """As on a GPU, whose clocks fall under a load that lasts."""
    monkeypatch.setattr(Bench, "waits", True)
    counts = []
    for sustains in (False, True):
        monkeypatch.setattr(Bench, "sustains", sustains)
        monkeypatch.setattr(calibrate_bench, "SUSTAINED_S", 0.1)
        monkeypatch.setattr(calibrate_bench, "WATCHED_S", 0.1)
        calibrate.run({**settings, "ks": [0, 1, 2], "out": f"{settings['out']}-{sustains}"})
        rows = read_costs(f"{settings['out']}-{sustains}").rows.to_pylist()
        counts.append({(row["op"], row["k"], row["budget"]): row["n"] for row in rows})
    short, long = counts
    assert short.keys() == long.keys()
    assert all(long[key] > short[key] for key in short)


def test_every_drafter_is_priced_by_its_own_rounds(settings):
    drafters = [{"kind": "sparse_self"}, {"kind": "lookup"}]
    calibrate.run({**settings, "drafters": drafters})
    table = read_costs(settings["out"])
    model = CostModel.from_table(table)
    assert set(model.measured) == {"plain", *(op + who for op in OPS for who in ("", " (lookup)"))}
    assert sum(row["op"] == "plain" for row in table.rows.to_pylist()) == 1
    assert model.at("draft", 64.0, 1, 2, 0, "lookup")[0] < model.at("draft", 64.0, 1, 2, 40)[0]


def test_a_text_in_which_lookup_finds_nothing_is_named(settings, tmp_path):
    """One paragraph in which no character repeats; documents are made of whole paragraphs."""
    text = tmp_path / "once.txt"
    text.write_text("\n\n".join("".join(map(chr, range(33, 33 + 80))) for _ in range(20)))
    settings["workload"]["path"] = str(text)
    with pytest.raises(UserError, match="drafter lookup found no 2 drafts at context 64 of this text"):
        calibrate.run({**settings, "drafters": [{"kind": "lookup"}]})


def test_partial_verification_is_timed_term_by_term(settings, tiny_checkpoint):
    sizes = {"ks": [0, 2], "budgets": [40], "verify_budgets": [32, 48], "refresh_rows": [3, 6], "repeats": 3}
    model = {**settings["model"], "source": str(tiny_checkpoint("llama", head_dim=64))}
    partial = {"mode": "partial", "sink": 2, "recent": 8}
    found = calibrate.run(
        {**settings, **sizes, "model": model, "verify_kv": partial, "sources": ["history", "page_bound"]}
    )
    table = read_costs(settings["out"])
    rows = table.rows.to_pylist()
    assert found["rows"] == len(rows)
    assert {row["source"] for row in rows} == {"", "history", "page_bound-page16"}
    for source in ("history", "page_bound-page16"):
        mine = [row for row in rows if row["source"] == source]
        places = {op: {(r["k"], r["budget"]) for r in mine if r["op"] == op} for op in {r["op"] for r in mine}}
        assert places["verify_partial"] == {(k, keys) for k in (0, 2) for keys in (32, 48)}
        assert places["select_partial"] == {(0, 32), (0, 48)}
        assert places["refresh"] == {(3, 2), (6, 2)}
        assert places["verify"] == places["host"] == places["host_partial"] == {(0, 0), (2, 0)}
        assert places["draft"] == {(0, 40)}
        assert all(row["median_us"] > 0.0 for row in mine if row["op"] not in ("refresh", "verify_partial"))
    assert table.meta["recomputed_multiple"] == 1


def test_corrections_of_every_draft_length_are_timed_or_it_is_said():
    plan = Plan(Drafter(), (40,), {}, "history", {(2, 40, 32): None, (4, 40, 32): None}, {(3, 2): None, (5, 4): None})
    bench = SimpleNamespace(settings=SimpleNamespace(ks=(0, 2, 4)), plans=[plan])
    full = {("verify", k, 0): [1.0] for k in (0, 2, 4)}
    partial = {("verify_partial", k, 32): [1.0] for k in (2, 4)} | {("refresh", 3, 2): [1.0]}
    with pytest.raises(UserError, match="drafter sparse_self found no 4 drafts at context 64"):
        Bench._check(bench, full, {"history": partial}, 64)
    Bench._check(bench, full, {"history": partial | {("refresh", 5, 4): [1.0]}}, 64)


def test_verification_by_lookahead_is_timed_with_drafts_alone(settings, tiny_checkpoint):
    """Rounds without drafts have nothing to choose keys by."""
    model = {**settings["model"], "source": str(tiny_checkpoint("llama", head_dim=64))}
    drafter = {"kind": "model", "model": model["source"]}
    partial = {"mode": "partial", "sink": 2, "recent": 8, "scope": "model"}
    calibrate.run({
        **settings, "model": model, "drafters": [drafter], "verify_kv": partial, "sources": ["lookahead", "history"],
        "verify_budgets": [32], "refresh_rows": [3, 6], "scoring_heads": {"target": [[1, 0]], "draft": [[0, 1]]},
    })  # fmt: skip
    rows = read_costs(settings["out"]).rows.to_pylist()
    places = {(row["source"], row["k"]) for row in rows if row["op"] == "verify_partial"}
    by_heads = next(source for source, _ in places if source.startswith("history"))
    assert places == {("lookahead", 2), (by_heads, 0), (by_heads, 2)}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"verify_budgets": [64]}, "verify_budgets is given, and verify_kv.mode is full"),
        ({"verify_kv": {"mode": "partial", "full_period": 3}}, "verify_kv.full_period is 3; leave it at 1"),
        ({"verify_kv": {"mode": "partial"}, "sources": ["attention"]}, "sources holds 'attention'; name some of"),
        ({"drafters": []}, "drafters is empty"),
        ({"budgets": [40, 48, 56, 64]}, r"3 repeats with draft lengths \[0, 2\] time 3 of 4 budgets; set repeats=4"),
        ({"drafters": [{"kind": "lookup"}, {"kind": "lookup", "ngram": 5}]}, "drafters holds lookup twice"),
        ({"drafters": [{"kind": "none"}]}, r"drafters\[0\].kind is none"),
        ({"drafters": [{"kind": "lookup", "weights": "fp8"}]}, "drafter.weights is 'fp8', which drafter lookup"),
        ({"drafters": [{"kind": "quest"}]}, "draft_kv.page is 1, and drafter quest chooses whole pages"),
        ({"draft_kv": {"budget_frac": 0.1}}, "draft_kv.budget_frac is 0.1; leave it at 0.0: replay prices it"),
        ({"draft_kv": {"refresh_rounds": 0}}, "draft_kv.refresh_rounds is 0; leave it at 1"),
    ],
)
def test_what_cannot_be_timed_is_refused_before_the_model_is_loaded(settings, change, says):
    with pytest.raises(UserError, match=says):
        calibrate.run({**settings, "model": {"source": "nowhere"}, **change})


def test_budgets_that_no_drafter_reads_need_no_repeats(settings):
    many = {**settings, "drafters": [{"kind": "lookup"}], "budgets": [40, 44, 48, 52, 56]}
    (group,) = plans_of(parse(Settings, many))
    assert [plan.budgets for plan in group] == [(0,)]
