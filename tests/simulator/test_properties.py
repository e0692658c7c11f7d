"""What must hold of any replay: support is judged, order does not matter, seeds decide, more is not less."""

from dataclasses import replace

import numpy as np
import pytest

from specdial.engine.trace.reader import Trace, read_trace
from specdial.policies.errors import UserError
from specdial.simulator.costs import CostModel
from specdial.simulator.lanes import read_record
from specdial.simulator.outcome import bootstrap_interval
from specdial.simulator.replay import replay, replay_rounds
from specdial.simulator.synthetic import Shape, write_trace


@pytest.fixture(scope="module")
def several(policy):
    return [
        policy("none", drafter={"kind": "none"}),
        policy("fixed", controller={"k": 3}),
        policy("fixed", budget=128, controller={"k": 8}),
        policy("entropy", controller={"threshold": 0.5}),
        policy("confidence", controller={"threshold": 0.5}),
        policy("rate", controller={"gamma": 0.2}),
    ]


def test_plain_has_speedup_one_at_every_batch(trace, costs, several):
    for batch in (1, 2, 4, 6):
        plain = replay(trace, costs, several, batch=batch)[0]
        assert (plain.speedup, plain.k, plain.tokens_per_round) == (pytest.approx(1.0), 0.0, 1.0)
        assert plain.breakdown["plain"] == pytest.approx(plain.us_per_token)


def test_document_order_does_not_matter(trace, costs, several):
    backwards = Trace(
        trace.path,
        {**trace.meta, "documents": trace.meta["documents"][::-1]},
        trace.rounds.take(np.arange(trace.rounds.num_rows)[::-1].copy()),
        trace.drafts.take(np.arange(trace.drafts.num_rows)[::-1].copy()),
        trace.outputs.take(np.arange(trace.outputs.num_rows)[::-1].copy()),
    )
    for a, b in zip(replay(trace, costs, several), replay(backwards, costs, several), strict=True):
        assert a.speedup == pytest.approx(b.speedup, rel=1e-12)
        assert (a.rounds, a.tokens, a.alpha) == (b.rounds, b.tokens, b.alpha)


def test_policy_order_and_company_do_not_matter(trace, costs, several):
    together = replay(trace, costs, several, batch=2)
    for place, policy in enumerate(several):
        (alone,) = replay(trace, costs, [policy], batch=2)
        assert alone.plain() == together[place].plain()
    for a, b in zip(together, reversed(replay(trace, costs, several[::-1], batch=2)), strict=True):
        assert a.plain() == b.plain()


def test_seeds_decide(trace, costs, several):
    first, again = (replay(trace, costs, several, seed=5)[3].plain() for _ in range(2))
    other = replay(trace, costs, several, seed=6)[3].plain()
    assert first == again
    assert (first["speedup"], first["low"]) != (other["speedup"], other["low"])
    assert first["speedup"] == other["speedup"]


def test_a_split_carries_only_its_documents(trace, costs, several):
    outcome = replay(trace, costs, several, split="validation")[1]
    assert outcome.documents == (1, 4)
    with pytest.raises(UserError, match="no finished document in split 'nowhere'"):
        replay(trace, costs, several, split="nowhere")


def test_cheaper_drafts_never_slow_a_policy_down(trace, costs, policy):
    fixed = [policy("fixed", controller={"k": k}) for k in range(1, 9)]
    draft = costs.measured["draft"]
    cheap = CostModel(
        {**costs.measured, "draft": replace(draft, values_us=draft.values_us / 2)}, costs.meta, "cheaper drafts"
    )
    for dear, less in zip(replay(trace, costs, fixed), replay(trace, cheap, fixed), strict=True):
        assert less.speedup > dear.speedup
        assert less.tokens_per_round == dear.tokens_per_round


def test_longer_fixed_drafts_accept_no_less_at_each_position(trace, policy):
    logs = replay_rounds(trace, [policy("fixed", controller={"k": k}) for k in (2, 8)])
    short = {(d, c): a for d, c, a in zip(logs[0].doc, logs[0].context_tokens, logs[0].accepted, strict=True)}
    for d, c, a in zip(logs[1].doc, logs[1].context_tokens, logs[1].accepted, strict=True):
        assert a >= short.get((d, c), 0)


def test_batched_rounds_last_as_long_as_the_longest(trace, costs, policy):
    """Adaptive lanes wait for each other in a batch, so each drafts as before but the batch pays for the longest."""
    rate = policy("rate", controller={"gamma": 0.2})
    alone, batched = (replay(trace, costs, [rate], batch=b, keep_rounds=True)[0] for b in (1, 6))
    assert alone.tokens_per_round == batched.tokens_per_round
    assert batched.speedup < alone.speedup


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"controller": {"k": 9}}, "drafts up to 9 tokens, 8 were recorded"),
        ({"budget": 512}, "no recorded arm has draft_kv.budget 512"),
        ({"budget": 64}, "no recorded arm has draft_kv.budget 64"),
        ({"draft_kv": {"budget": 256, "sink": 8, "recent": 16}}, "draft_kv.sink 8"),
        ({"draft_kv": {"budget": 256, "sink": 4, "recent": 32}}, "draft_kv.recent 32"),
        ({"draft_kv": {"budget": 256, "sink": 4, "recent": 16, "window": 8}}, "draft_kv.window 8"),
        ({"draft_kv": {"budget": 200, "sink": 4, "recent": 16, "scope": "layer"}}, "draft_kv.scope layer"),
    ],
)
def test_what_was_not_recorded_is_refused_by_name(trace, costs, policy, parts, reason):
    (outcome,) = replay(trace, costs, [policy("fixed", **parts)])
    assert outcome.level == "refused"
    assert reason in outcome.reason
    assert outcome.speedup is None


def test_missing_costs_refuse_by_name(trace, costs, policy):
    (outcome,) = replay(trace, costs, [policy("fixed")], batch=1)
    assert outcome.level == "exact"
    narrow = CostModel({"plain": costs.measured["plain"]}, costs.meta, "a table")
    (outcome,) = replay(trace, narrow, [policy("fixed")])
    assert (outcome.level, outcome.reason) == ("refused", "there is no measurement of verify in a table")


def test_budgets_between_recorded_ones_are_modelled_between_them(trace, costs, policy):
    found = replay(trace, costs, [policy("fixed", budget=b, controller={"k": 8}) for b in (128, 180, 256)])
    assert [o.level for o in found] == ["exact", "modelled", "exact"]
    assert found[0].tokens_per_round < found[1].tokens_per_round < found[2].tokens_per_round


def test_sampled_decoding_is_modelled_and_near_its_recorded_chance(tmp_path, costs, policy):
    shape = Shape(documents=12, temperature=1.0, new_tokens=120)
    write_trace(tmp_path, shape)
    record = read_record(read_trace(tmp_path))
    (outcome,) = replay(record, costs, [policy("fixed", controller={"k": 1})])
    assert outcome.level == "modelled"
    chance = record.accept_prob[0].reshape(-1, 2)[:, 1]
    assert outcome.alpha == pytest.approx(float(chance[chance > 0].mean()), abs=0.04)


def test_bootstrap_brackets_the_ratio_and_narrows_with_documents():
    generator = np.random.default_rng(0)
    widths = []
    for units in (8, 128):
        base = generator.uniform(90, 110, units)
        time = base / generator.uniform(1.5, 2.5, units)
        low, high = bootstrap_interval(base, time[None], 500, seed=1)
        assert low[0] < base.sum() / time.sum() < high[0]
        widths.append(high[0] - low[0])
    assert widths[1] < widths[0] / 2
    one = bootstrap_interval(np.array([4.0]), np.array([[2.0]]), 50, seed=1)
    assert [float(bound[0]) for bound in one] == [2.0, 2.0]


def test_one_document_has_no_interval(trace, costs, several):
    outcome = replay(trace, costs, several, batch=6)[1]
    assert outcome.speedup > 0.0
    assert (outcome.low, outcome.high) == (None, None)
