"""Replay of policies that verify partially: their schedule and price, what they accept, what their tokens are worth."""

import dataclasses
import json

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from specdial.engine.trace.reader import CostTable
from specdial.engine.trace.schema import COSTS, PARTIAL_OPS, PROBES
from specdial.engine.trace.sources import of_source, source_label
from specdial.engine.trace.writer import write_costs, write_table
from specdial.policies.fields import to_plain
from specdial.policies.file import load_policy
from specdial.policies.schema import ScoringHeads, VerifyKV
from specdial.simulator.costs import CostModel
from specdial.simulator.fidelity import Model, predict
from specdial.simulator.lanes import read_record
from specdial.simulator.pricing import Setting
from specdial.simulator.replay import replay
from specdial.simulator.synthetic import Shape, cost_us, write_trace
from specdial.simulator.tables import print_outcomes
from specdial.simulator.verbs import replay as replay_verb

PARTIAL = VerifyKV(mode="partial", source="history")
BUDGETS = (64, 256)
PARTIAL_US = {"verify_partial": 400.0, "select_partial": 30.0, "host_partial": 7.0}


def priced(op, context, k, budget):
    """The made-up machine of simulator.synthetic, and what partial verification takes on it."""
    if op == "refresh":
        return 11.0 * k * (1.0 + 0.1 * budget) + 0.01 * context  # there the place of the round's own drafts
    if op in PARTIAL_US:
        return PARTIAL_US[op] + (2.0 * k + 0.5 * budget if op == "verify_partial" else 0.0)
    return cost_us(op, context, 1, k, budget)


def cost_rows():
    """A cost table's rows for one drafter, alone and with source history."""
    rows = []
    for context in (256, 1024):
        places = {op: [(k, 0) for k in (0, 8)] for op in ("verify", "host", "host_partial")}
        places |= {"verify_partial": [(k, b) for k in (0, 8) for b in BUDGETS]}
        places |= {op: [(0, b) for b in (64, 128, 256)] for op in ("draft", "select", "select_partial")}
        places |= {"refresh": [(rows, drafts) for rows in (4, 32) for drafts in (2, 4, 8)], "plain": [(0, 0)]}
        for op, pairs in places.items():
            for k, budget in pairs:
                row = dict.fromkeys(COSTS.names, 0) | {"op": op, "source": "history", "drafter": "sparse_self"}
                row |= {"context_tokens": context, "batch": 1, "k": k, "budget": budget, "n": 1}
                row |= {"median_us": priced(op, context, k, budget)}
                if op not in PARTIAL_OPS:
                    rows.append(row | {"source": "", "drafter": "none" if op == "plain" else "sparse_self"})
                if op != "plain":
                    rows.append(row)
    return rows


@pytest.fixture(scope="module")
def lossy_costs():
    return CostModel.from_table(CostTable("made up", {"model": {}}, pa.Table.from_pylist(cost_rows(), COSTS)))


def probed(trace, error, *, kept=1.0, lifted=0.0):
    """The trace with probes of two budgets and ages 1 to 3: error(budget, age, quantity) is each one's mean."""
    random = np.random.default_rng(0)
    rows = []
    for doc in trace.meta["documents"]:
        for arm, budget in enumerate(BUDGETS, start=1):
            for place in range(90):
                for age in (1, 2, 3):
                    noise = random.uniform(0.5, 1.5)
                    full = bool(random.random() < 0.8)
                    rows.append(
                        {
                            "doc": doc["doc"], "position": doc["prompt_tokens"] + 3 * place + age, "arm": arm,
                            "arr": 1.0 - error(budget, age, "arr"), "kl_nats": noise * error(budget, age, "kl_nats"),
                            "top1_match": (place + 0.5) / 90 >= error(budget, age, "top1"),
                            "rounds_since_full": age, "full_match": full,
                            "draft_match": bool(random.random() < (kept if full else lifted)),
                        }
                    )  # fmt: skip
    arms = [
        {"arm": i, "verify_kv": to_plain(dataclasses.replace(PARTIAL, budget=b, full_period=0), complete=True)}
        for i, b in enumerate(BUDGETS, start=1)
    ]
    return dataclasses.replace(
        trace, meta={**trace.meta, "probe_arms": arms}, probes=pa.Table.from_pylist(rows, PROBES)
    )


def power(budget, age, quantity):
    return min({"kl_nats": 3.0, "top1": 4.0, "arr": 2.0}[quantity] * age**0.5 / budget, 0.4)


@pytest.fixture(scope="module")
def record(trace):
    """Probes of the power law, which accept what full verification accepts."""
    return read_record(probed(trace, power))


def partial(period, budget=64):
    return {"mode": "partial", "full_period": period, "budget": budget}


def test_a_lossy_policy_costs_its_rounds_and_their_corrections(record, lossy_costs, policy):
    """Everything that is accepted in full is accepted: the rounds are those of the lossless twin, which is exact."""
    twin = policy("fixed", controller={"k": 4})
    for period in (0, 1, 2, 5):
        one = policy("fixed", controller={"k": 4}, verify_kv=partial(period))
        lossless, outcome = replay(record, lossy_costs, [twin, one], keep_rounds=True, bootstrap=0)
        assert (outcome.level, outcome.lossless) == (("exact", True) if period == 1 else ("modelled", False))
        log = outcome.round_log
        for name in ("doc", "k", "accepted", "emitted"):
            assert np.array_equal(getattr(log, name), getattr(lossless.round_log, name))
        if period == 1:
            continue
        expected = dict.fromkeys(("draft", "verify", "select", "host", "verify_partial", "refresh"), 0.0)
        uncorrected = 0
        for number, context, k, emitted in zip(log.round, log.context_tokens, log.k, log.emitted, strict=True):
            uncorrected = 0 if number == 0 else uncorrected
            full = period > 0 and number % period == period - 1
            expected["draft"] += k * priced("draft", context, 0, min(256, context))
            expected["select"] += priced("select", context, 0, 256) if k else 0.0
            if full:
                expected["verify"] += priced("verify", context, k, 0)
                expected["host"] += priced("host", context, k, 0)
                expected["refresh"] += priced("refresh", context, uncorrected, k)
            else:
                expected["verify_partial"] += priced("verify_partial", context, k, 64)
                expected["select"] += priced("select_partial", context, 0, 64)
                expected["host"] += priced("host_partial", context, k, 0)
            uncorrected = 0 if full else uncorrected + emitted
        for term, us in expected.items():
            rel = 0.02 if term == "refresh" else 1e-6  # below the fewest rows that were timed it is a line through 0
            assert outcome.breakdown[term] * outcome.tokens == pytest.approx(us, rel=rel), (period, term)
        assert sum(outcome.breakdown.values()) == pytest.approx(outcome.us_per_token)


def test_probes_thin_what_partial_rounds_accept(trace, lossy_costs, policy):
    record = read_record(probed(trace, power, kept=0.6))
    twin = policy("fixed", controller={"k": 4})
    never, half = (policy("fixed", controller={"k": 4}, verify_kv=partial(period)) for period in (0, 2))
    lossless, thinned, mixed = replay(record, lossy_costs, [twin, never, half], keep_rounds=True, bootstrap=0)
    arm = next(i for i in range(len(record.arms)) if record.budget(i) == 256)
    run = np.minimum(record.run[arm :: len(record.arms)], 4)
    (selection,) = record.fidelity.selections.values()
    changes = selection.changes(64, 9)
    kept = changes.kept
    assert (kept[0], changes.lifted.max()) == (1.0, 0.0)
    assert kept[1:4] == pytest.approx([0.6] * 3, abs=0.08)
    assert set(kept[3:]) == {kept[3]}, "older rounds accept what the oldest probed did"
    expected = np.mean([sum(kept[3] ** d for d in range(1, r + 1)) for r in run])
    assert thinned.tokens_per_round - 1.0 == pytest.approx(expected, rel=0.2)
    assert thinned.tokens_per_round < mixed.tokens_per_round < lossless.tokens_per_round


def test_a_record_of_some_documents_replays_as_these_documents_of_the_whole_do(trace, lossy_costs, policy):
    """As surfaces are judged, cell by cell: the same draws at the same places."""
    record = read_record(probed(trace, power, kept=0.6))
    one = policy("fixed", controller={"k": 4}, verify_kv=partial(4))
    for split in ("train", "validation"):
        kept = record.documents.take(np.flatnonzero(record.documents.split == split))
        (whole,) = replay(record, lossy_costs, [one], split, bootstrap=0)
        (alone,) = replay(dataclasses.replace(record, documents=kept), lossy_costs, [one], bootstrap=0)
        assert alone.plain() == whole.plain()


def test_probes_lift_what_partial_rounds_accept_beyond_full_ones(trace, lossy_costs, policy):
    """Full rounds accept four of five drafts; partial ones half of the others too."""
    record = read_record(probed(trace, power, lifted=0.5))
    twin = policy("fixed", controller={"k": 4})
    never, half = (policy("fixed", controller={"k": 4}, verify_kv=partial(period)) for period in (0, 2))
    lossless, more, mixed = replay(record, lossy_costs, [twin, never, half], bootstrap=0)
    (selection,) = record.fidelity.selections.values()
    changes = selection.changes(64, 3)
    assert (changes.kept.min(), changes.lifted[0]) == (1.0, 0.0)
    assert changes.lifted[1:] == pytest.approx([0.5] * 3, abs=0.1)
    arm = next(i for i in range(len(record.arms)) if record.budget(i) == 256)
    run = np.minimum(record.run[arm :: len(record.arms)], 4)
    p, lift = changes.accepted[3], changes.lifted[3]
    expected = np.mean([r + lift * sum(p**d for d in range(4 - r)) for r in run])  # one more, and as many as follow
    assert more.tokens_per_round - 1.0 == pytest.approx(expected, rel=0.12)
    assert lossless.tokens_per_round < mixed.tokens_per_round < more.tokens_per_round


def test_curves_find_what_probes_were_made_by(trace):
    model = Model.of(probed(trace, power))
    (selection,) = model.selections.values()
    assert (selection.budgets, selection.oldest, model.fitted_on) == ((64, 256), 3, "train")
    for name in ("kl_nats", "top1", "arr"):
        curve = selection.curves[name]
        assert curve.flat == ()
        for budget in BUDGETS:
            for age in (1, 3):
                found = curve.error(float(budget), np.array([float(age)]))[0, 0]
                close = {"abs": 0.01} if name == "top1" else {"rel": 0.06}  # of 90 tokens each
                assert found == pytest.approx(power(budget, age, name), **close)
        assert curve.held_out < curve.mean_alone


def test_what_the_data_do_not_bear_out_is_flat(trace):
    model = Model.of(probed(trace, lambda budget, age, quantity: 0.1 + budget / 1000.0 - 0.02 * age))
    (selection,) = model.selections.values()
    assert set(selection.curves["kl_nats"].flat) == {"budget", "age"}
    assert selection.curves["kl_nats"].error(64.0, np.array([1.0]))[0, 0] == pytest.approx(0.22, rel=0.1)


def test_fidelity_is_the_mean_over_every_token_of_its_round(record, lossy_costs, policy, capsys):
    one = policy("fixed", controller={"k": 4}, verify_kv=partial(3))
    (outcome,) = replay(record, lossy_costs, [one], keep_rounds=True, bootstrap=0)
    log = outcome.round_log
    since = np.where(log.round % 3 == 2, 0, log.round % 3 + 1)
    (selection,) = record.fidelity.selections.values()
    kl = sum(
        selection.curves["kl_nats"].error(64.0, np.array([float(age)]))[0, 0] * log.emitted[since == age].sum()
        for age in (1, 2)
    )
    found = outcome.fidelity
    assert found.kl_nats.value == pytest.approx(kl / log.emitted.sum())
    assert found.kl_nats.low <= found.kl_nats.value <= found.kl_nats.high
    assert found.partial_frac == pytest.approx(log.emitted[since > 0].sum() / log.emitted.sum())
    assert found.extrapolated_frac == 0.0
    assert 0.9 < found.top1_agreement.value < 1.0
    print_outcomes([outcome], "mixed")
    assert f"predicted KL {found.kl_nats.value:.2g}, top-1 " in " ".join(capsys.readouterr().out.split())
    never = policy("fixed", controller={"k": 4}, verify_kv=partial(0))
    (older,) = replay(record, lossy_costs, [never], bootstrap=0)
    assert older.fidelity.partial_frac == 1.0
    assert older.fidelity.extrapolated_frac > 0.5
    assert older.fidelity.kl_nats.value > found.kl_nats.value
    assert predict(record.fidelity, one, np.array([[5.0, 0.0]])).kl_nats.value == 0.0


def test_one_document_has_no_interval(trace, policy):
    given = probed(trace, power)
    model = Model.of(dataclasses.replace(given, probes=given.probes.filter(pc.equal(given.probes["doc"], 0))))
    found = predict(model, policy("fixed", verify_kv=partial(0)), np.array([[0.0, 5.0]]))
    assert found.kl_nats.value > 0.0
    assert (found.kl_nats.low, found.kl_nats.high) == (None, None)


@pytest.mark.parametrize(
    ("verify_kv", "says"),
    [
        (partial(4, budget=512), "a verification of 512 keys lies outside the probed budgets (64, 256)"),
        ({**partial(4), "source": "recent", "budget": 512}, "verification from recent with these settings was not"),
        ({**partial(4), "scope": "layer"}, "was not probed (probed: history)"),
    ],
)
def test_what_was_not_probed_is_refused(record, lossy_costs, policy, verify_kv, says):
    (outcome,) = replay(record, lossy_costs, [policy("fixed", controller={"k": 4}, verify_kv=verify_kv)])
    assert outcome.level == "refused"
    assert says in outcome.reason


def test_a_source_that_was_not_timed_is_refused(record, costs, policy):
    (outcome,) = replay(record, costs, [policy("fixed", controller={"k": 4}, verify_kv=partial(4))])
    assert (outcome.level, outcome.lossless) == ("refused", False)
    assert "no measurement of" in outcome.reason


def test_replay_shows_lossy_policies_apart_and_writes_what_it_predicts(tmp_path, trace, policy, capsys):
    write_trace(tmp_path / "trace", Shape())
    given = probed(trace, power)
    (tmp_path / "trace" / "meta.json").write_text(json.dumps(given.meta))
    for doc in range(6):
        mine = given.probes.filter(pc.equal(given.probes["doc"], doc))
        columns = {name: mine[name].to_pylist() for name in mine.column_names}
        write_table(tmp_path / "trace" / f"probes-{doc:05d}.parquet", columns, PROBES)
    write_costs(tmp_path / "costs", {"model": given.meta["model"]}, cost_rows())
    policies = [
        policy("fixed", name="exact"),
        policy("fixed", name="lossy", verify_kv=partial(4)),
        policy("fixed", name="unknown", verify_kv=partial(4, budget=512)),
    ]
    replay_verb.run(
        {
            "trace": str(tmp_path / "trace"), "costs": str(tmp_path / "costs"), "out": str(tmp_path / "out"),
            "policies": [to_plain(one) for one in policies], "bootstrap": 50,
        }
    )  # fmt: skip
    printed = capsys.readouterr().out
    exact_table, lossy_table = printed.split("lossy: replay of")
    assert "exact" in exact_table
    assert "KL nats" in lossy_table
    assert "unknown: refused: it is lossy: a verification of 512 keys" in lossy_table
    assert "fidelity from history, fitted on train" in lossy_table
    written = json.loads((tmp_path / "out" / "replay.json").read_text())
    assert [o["lossless"] for o in written["outcomes"]] == [True, False, False]
    assert [o["fidelity"] is None for o in written["outcomes"]] == [True, False, True]
    assert {row["quantity"] for row in written["fidelity_model"]} >= {"kl_nats", "top1", "arr"}
    saved = load_policy(tmp_path / "out" / "policies" / "lossy.yaml")
    assert saved.expected["fidelity"] == written["outcomes"][1]["fidelity"]
    assert sorted(path.stem for path in (tmp_path / "out" / "policies").iterdir()) == ["exact", "lossy"]


@pytest.mark.parametrize(("period", "frac"), [(2, 1.0), (5, 0.25), (0, 0.0)])
def test_a_kept_selection_is_chosen_once_a_period(policy, period, frac):
    one = policy("fixed", controller={"k": 4}, verify_kv={**partial(period), "refresh": "full"})
    assert Setting.of(one, one, 400, partial=True).choosing_frac == frac
    assert Setting.of(one, one, 400, partial=True).source == "history-kept"


def test_labels_of_sources_tell_costs_apart():
    heads = ScoringHeads(target=((0, 1), (0, 2)))
    named = {
        source_label(of_source(dataclasses.replace(PARTIAL, full_period=4), source, 64), none): source
        for source, none in [(s, ScoringHeads()) for s in ("history", "recent", "page_bound", "lookahead", "hybrid")]
    }
    assert list(named) == ["history", "recent", "page_bound-page16", "lookahead", "hybrid"]
    shared = dataclasses.replace(PARTIAL, scope="model", full_period=4)
    assert (source_label(shared, ScoringHeads()), source_label(shared, heads)) == ("history-model", "history-heads2")
    assert source_label(VerifyKV(), ScoringHeads()) == ""
