"""Drafters and selections in replay: which recorded arm speaks for a policy, and which costs it is priced at."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from specdial.engine.trace.reader import read_costs, read_trace
from specdial.engine.trace.writer import write_costs
from specdial.policies.errors import UserError
from specdial.policies.fields import to_plain
from specdial.policies.schema import DraftKV
from specdial.simulator.costs import CostModel
from specdial.simulator.crossover import crossover_surface, kept
from specdial.simulator.inversion import inversion_table
from specdial.simulator.lanes import read_record
from specdial.simulator.load import load_costs
from specdial.simulator.measured import Measured
from specdial.simulator.pricing import Setting, tabulate
from specdial.simulator.replay import replay, replay_rounds
from specdial.simulator.synthetic import MODEL, Shape, cost_us, write_synthetic_costs, write_trace

KV = {"budget": 256, "sink": 4, "recent": 16}
SELF, QUEST, LOOKUP = {"kind": "sparse_self"}, {"kind": "quest"}, {"kind": "lookup"}
ARMS = [
    (SELF, KV),
    ({**SELF, "weights": "fp8"}, KV),
    (LOOKUP, {}),
    (QUEST, {**KV, "page": 16, "sink": 16}),
    (SELF, {**KV, "refresh_rounds": 0}),
    (SELF, {**KV, "decay": 0.9}),
    (SELF, {"budget_frac": 0.5, "sink": 4, "recent": 16}),
    ({"kind": "model", "model": "small"}, {}),
]
LABELS = ("sparse_self", "sparse_self/fp8", "lookup", "quest", "model/small")
DRAFT_US = dict(zip(LABELS, (200.0, 120.0, 5.0, 260.0, 90.0), strict=True))


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A dense trace of eight arms, each with chains of its own."""
    out = tmp_path_factory.mktemp("many")
    write_trace(out, Shape(documents=4, budgets=tuple(128 + 16 * i for i in range(len(ARMS)))))
    meta = json.loads((out / "meta.json").read_text())
    meta["arms"] = [
        {"arm": i, "drafter": drafter, "draft_kv": to_plain(DraftKV(**kv))} for i, (drafter, kv) in enumerate(ARMS)
    ]
    (out / "meta.json").write_text(json.dumps(meta))
    return read_trace(out)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Costs of five drafters over contexts and budgets."""
    out = tmp_path_factory.mktemp("by-drafter")
    rows = []
    for context in (256, 512, 1024):
        for batch in (1, 2, 4):
            place = {"context_tokens": context, "batch": batch, "p10_us": 1.0, "p90_us": 1.0, "n": 3, "bytes": 0}
            plain = {"op": "plain", "drafter": "none", "k": 0, "budget": 0, "median_us": 900.0 + 0.2 * batch * context}
            rows.append({**place, **plain})
            for drafter, draft_us in DRAFT_US.items():
                budgets = (0,) if drafter.startswith(("lookup", "model")) else (64, 256, 512)
                for op, ks, sizes in (("verify", (0, 8), (0,)), ("host", (0,), (0,)), ("draft", (0,), budgets),
                                      ("select", (0,), budgets)):  # fmt: skip
                    for k in ks:
                        for budget in sizes:
                            us = {"verify": 1000.0 + len(drafter) + 10.0 * k, "host": 30.0, "select": 40.0}
                            us["draft"] = draft_us + 0.1 * budget
                            rows.append(
                                {**place, "op": op, "drafter": drafter, "k": k, "budget": budget, "median_us": us[op]}
                            )
    write_costs(out, {"model": MODEL}, rows)
    return CostModel.from_table(read_costs(out))


def drafting(policy, drafter, kv, k=4, **parts):
    return policy("fixed", drafter=drafter, draft_kv=kv, controller={"k": k}, **parts)


@pytest.mark.parametrize("arm", range(len(ARMS)))
def test_each_policy_replays_exactly_from_its_own_arm(many, table, policy, arm):
    drafter, kv = ARMS[arm]
    record = read_record(many)
    tested = drafting(policy, drafter, kv, k=8)
    (outcome,) = replay(record, table, [tested], keep_rounds=True)
    assert (outcome.level, outcome.reason) == ("exact", None)
    start, offset = record.documents.start, record.documents.offset
    log = outcome.round_log
    place = {int(doc): i for i, doc in enumerate(record.documents.doc)}
    index = np.array([place[d] for d in log.doc.tolist()])
    run = record.run[(offset[index] + log.context_tokens - start[index]) * len(ARMS) + arm]
    assert log.accepted.tolist() == np.minimum(run, log.k).tolist()


def without_drafts_at_even_positions(out):
    """Remove the chains of the lookup arm at even positions: nothing was found there."""
    for part in out.glob("drafts-*.parquet"):
        rows = pq.read_table(part)
        lost = pc.and_(pc.equal(rows["arm"], 2), pc.equal(pc.bit_wise_and(rows["position"], 1), 0))
        pq.write_table(rows.filter(pc.invert(lost)), part, write_page_checksum=True)


def test_a_round_in_which_lookup_finds_nothing_drafts_nothing(many, table, policy, tmp_path):
    shutil.copytree(many.path, tmp_path / "gaps")
    without_drafts_at_even_positions(tmp_path / "gaps")
    gaps = read_trace(tmp_path / "gaps")
    lookup, ours = replay(gaps, table, [drafting(policy, *ARMS[2]), drafting(policy, *ARMS[0])], keep_rounds=True)
    assert (lookup.level, ours.level) == ("exact", "exact")
    end = {d["doc"]: d["prompt_tokens"] + d["new_tokens"] for d in gaps.meta["documents"]}
    log = lookup.round_log
    for doc, n, k in zip(log.doc.tolist(), log.context_tokens.tolist(), log.k.tolist(), strict=True):
        assert k == (0 if n % 2 == 0 else min(4, end[doc] - n - 1))
    assert (ours.round_log.k > 0).sum() > (log.k > 0).sum()


def test_another_lookup_on_a_sparse_trace_is_refused(many, table, policy):
    sparse = replace(many, meta={**many.meta, "dense": False})
    (outcome,) = replay(sparse, table, [drafting(policy, *ARMS[2])])
    assert outcome.level == "refused"
    assert "does not show where its drafter had no draft" in outcome.reason


def test_the_surface_leaves_out_what_the_record_does_not_support(trace, table):
    def sparse(controller):
        kv = trace.meta["arms"][0]["draft_kv"]
        recorded = {**trace.meta["policy"], "drafter": LOOKUP, "controller": controller, "draft_kv": kv}
        return read_record(replace(trace, meta={**trace.meta, "dense": False, "policy": recorded}))

    only = sparse({"kind": "fixed", "k": 3})
    assert set(kept(only)) == {(0, 3)}
    (corner,) = crossover_surface(only, table, [512], [1])
    assert (corner.k, corner.drafter) == (3, "lookup")
    assert crossover_surface(sparse({"kind": "none"}), table, [512], [1]) == []


def test_a_selection_that_a_drafter_does_not_read_makes_no_difference(many, policy):
    ours, theirs = (drafting(policy, LOOKUP, kv) for kv in ({}, {"budget": 64, "recent": 8}))
    logs = replay_rounds(many, [ours, theirs])
    assert logs[0].k.tolist() == logs[1].k.tolist()
    assert logs[0].accepted.tolist() == logs[1].accepted.tolist()


@pytest.mark.parametrize(
    ("drafter", "kv", "reason"),
    [
        (
            {**LOOKUP, "ngram": 5},
            {},
            "no recorded arm has drafter.ngram 5 (drafters recorded: sparse_self, sparse_self/fp",
        ),
        ({"kind": "model", "model": "other"}, {}, "drafter.model other (drafters recorded: "),
        (SELF, {**KV, "decay": 0.8}, "no recorded arm has draft_kv.decay 0.8 (budgets recorded: 256, 256"),
        (SELF, {"budget_frac": 0.4, "sink": 4, "recent": 16}, "draft_kv.budget_frac 0.4"),
        ({**SELF, "weights": "fp8"}, {**KV, "refresh_rounds": 0}, "no recorded arm has draft_kv.refresh_rounds 0"),
        (SELF, {**KV, "budget": 999, "refresh_rounds": 4}, "no recorded arm has draft_kv.budget 999"),
    ],
)
def test_what_no_arm_shows_is_refused_by_name(many, table, policy, drafter, kv, reason):
    (outcome,) = replay(many, table, [drafting(policy, drafter, kv)])
    assert outcome.level == "refused"
    assert reason in outcome.reason


def test_a_selection_kept_for_rounds_is_modelled_by_the_one_chosen_anew(many, table, policy):
    anew, kept = replay(many, table, [drafting(policy, SELF, {**KV, "refresh_rounds": r}) for r in (1, 4)])
    assert (anew.level, kept.level) == ("exact", "modelled")
    assert "a selection serves 4 rounds" in kept.reason
    assert kept.tokens_per_round == anew.tokens_per_round
    assert kept.breakdown["select"] == pytest.approx(anew.breakdown["select"] / 4)
    assert kept.breakdown["draft"] == pytest.approx(anew.breakdown["draft"])


def test_each_drafter_is_priced_at_its_own_costs(many, table, policy):
    """The draft term of every arm whose budget does not depend on the prompt."""
    for drafter, kv in (ARMS[0], ARMS[1], ARMS[2], ARMS[3], ARMS[7]):
        tested = drafting(policy, drafter, kv)
        (outcome,) = replay(many, table, [tested], keep_rounds=True)
        label = tested.drafter.label
        budget = kv.get("budget", 0)
        drafted, rounds = int(outcome.round_log.k.sum()), outcome.round_log.k
        assert outcome.breakdown["draft"] * outcome.tokens == pytest.approx(drafted * (DRAFT_US[label] + 0.1 * budget))
        verify = (1000.0 + len(label)) * len(rounds) + 10.0 * drafted
        assert outcome.breakdown["verify"] * outcome.tokens == pytest.approx(verify)
        assert outcome.budget == budget


def test_a_drafter_that_was_not_timed_is_refused_by_name(many, costs, policy):
    (outcome,) = replay(many, costs, [drafting(policy, LOOKUP, {})])
    assert outcome.level == "refused"
    assert outcome.reason.startswith("there is no measurement of verify (lookup) in cost table")


def test_a_static_selection_is_free_and_its_tail_counts_at_its_mean(many, table, policy):
    (outcome,) = replay(many, table, [drafting(policy, SELF, ARMS[4][1])], keep_rounds=True)
    assert outcome.breakdown["select"] == 0.0
    prompt = {d["doc"]: d["prompt_tokens"] for d in many.meta["documents"]}
    log = outcome.round_log
    tail = log.context_tokens - np.array([prompt[d] for d in log.doc.tolist()])
    slow_us = float((log.k * (200.0 + 0.1 * (256 + tail))).sum())
    assert outcome.breakdown["draft"] * outcome.tokens == pytest.approx(slow_us, rel=0.01)
    read = float((log.k * (256 + tail) + log.context_tokens).sum()) * MODEL["kv_bytes_per_token"]
    assert outcome.kv_bytes_per_token * outcome.tokens == pytest.approx(read, rel=0.01)
    mean_us = float((log.k * (200.0 + 0.1 * (256 + 30))).sum())  # 60 tokens are generated
    assert outcome.breakdown["draft"] * outcome.tokens == pytest.approx(mean_us)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_fraction_is_priced_at_the_prompt_of_each_unit(many, table, policy, batch):
    (outcome,) = replay(many, table, [drafting(policy, SELF, ARMS[6][1])], batch=batch, keep_rounds=True)
    prompts = [d["prompt_tokens"] for d in many.meta["documents"]]  # 400, 407, 414, 421
    expected = 0.0
    for first in range(0, 4, batch):
        unit = range(first, min(first + batch, 4))
        budget = DraftKV(**ARMS[6][1]).resolved(max(prompts[d] for d in unit)).budget
        rows = [
            [k for d, k in zip(outcome.round_log.doc, outcome.round_log.k, strict=True) if d == doc] for doc in unit
        ]
        longest = [max(row[i] for row in rows if i < len(row)) for i in range(max(map(len, rows)))]
        expected += sum(longest) * (200.0 + 0.1 * budget)
    assert outcome.breakdown["draft"] * outcome.tokens == pytest.approx(expected, rel=1e-9)
    assert outcome.level == ("exact" if batch == 1 else "modelled")
    assert outcome.budget == DraftKV(**ARMS[6][1]).resolved(round(float(np.mean(prompts)))).budget


def test_pages_cost_their_summaries_too(policy):
    tested = drafting(policy, QUEST, ARMS[3][1])
    setting = Setting.of(tested, tested, 400)
    assert setting.draft_kv_tokens(np.array([400.0])).tolist() == [256 + 25]
    assert setting.draft_keys(np.array([100.0])).tolist() == [100]


def test_a_cell_that_does_not_draft_verifies_as_the_rest_of_its_policy(table, policy):
    off = {"overrides": {"controller": {"kind": "none"}, "drafter": {"kind": "none"}}}
    mixed = drafting(policy, LOOKUP, {}, cells=[off])
    setting = Setting.of(mixed, mixed.variants()[0], 400)
    assert setting.drafter == "lookup"
    assert tabulate(table, setting, 1, np.array([512.0])).cost_us[1, 0, 0] == 1006.0


def test_the_surface_takes_the_best_drafter(many, table):
    (corner,) = crossover_surface(read_record(many), table, [512], [1])
    assert corner.k > 0
    assert corner.speedup > 1.0
    rows = inversion_table(read_record(many), table)
    assert {row.drafter for row in rows} == set(LABELS)
    assert corner.drafter in LABELS


def test_a_table_from_before_drafters_had_a_column_is_of_self_drafting(tmp_path, trace):
    write_synthetic_costs(tmp_path, (256, 512), (1,), Shape())
    path = tmp_path / "costs.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["drafter"]), path)
    model = load_costs(str(tmp_path), trace)
    assert set(model.measured) == {"plain", "draft", "verify", "select", "host"}
    assert model.at("draft", 400.0, 1, 0, 128)[0] == pytest.approx(cost_us("draft", 400, 1, 0, 128))
    assert set(read_costs(tmp_path).rows["drafter"].to_pylist()) == {"sparse_self"}


def test_a_table_with_a_drafter_twice_is_refused(tmp_path):
    row = {"op": "draft", "drafter": "lookup", "context_tokens": 256, "batch": 1, "k": 0, "budget": 0}
    row |= {"median_us": 1.0, "p10_us": 1.0, "p90_us": 1.0, "n": 1, "bytes": 0}
    write_costs(tmp_path, {"model": MODEL}, [row, row])
    with pytest.raises(UserError, match="repeats a row of"):
        read_costs(tmp_path)


def test_costs_without_a_budget_are_carried_on_by_context():
    """A drafting model reads the whole context: outside the measured range its time goes on rising."""
    points = np.array([[1, 0, 0, 1000], [1, 0, 0, 2000], [1, 0, 0, 4000]], float)
    measured = Measured.of("draft", points, np.array([110.0, 120.0, 140.0]))
    assert measured.at(np.array([1.0, 0, 0, 8000])) == (pytest.approx(180.0, rel=0.01), True)
