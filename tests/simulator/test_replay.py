"""The vectorised replay against a slow, plain re-statement of the engine's round."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdial.engine.trace.reader import read_trace
from specdial.engine.trace.writer import TraceWriter
from specdial.policies.controllers import Signals, draft_limit, make_controller
from specdial.policies.file import policy_digest
from specdial.policies.schema import policy_from_mapping
from specdial.simulator.costs import CostModel, operation
from specdial.simulator.lanes import read_record
from specdial.simulator.replay import replay, replay_rounds
from specdial.simulator.synthetic import Shape, outputs, synthetic_meta, write_trace

COLUMNS = ("doc", "round", "context_tokens", "k", "accepted", "emitted")


def slow_rounds(trace, policy, batch):
    """Rows of (doc, round, context, k, accepted, emitted), one batch of documents after another, no arrays of lanes."""
    drafts = {}
    for row in trace.drafts.to_pylist():
        drafts[row["doc"], row["position"], row["arm"], row["depth"]] = row
    output = {}
    for row in trace.outputs.to_pylist():
        output[row["doc"]] = max(output.get(row["doc"], 0), row["position"] + 1)
    documents = trace.meta["documents"]
    rows = []
    for first in range(0, len(documents), batch):
        group = documents[first : first + batch]
        variants = policy.variants()
        controllers = [make_controller([v.controller] * len(group)) for v in variants]
        n = [d["prompt_tokens"] for d in group]
        stop = [d["prompt_tokens"] + d["new_tokens"] for d in group]
        end = [output[d["doc"]] for d in group]
        number = 0
        while any(a < b for a, b in zip(n, end, strict=True)):
            v = policy.variant_index(max(a for a, b in zip(n, end, strict=True) if a < b), len(group))
            controller = controllers[v]
            wanted = variants[v].draft_kv.budget
            arm = next(a["arm"] for a in trace.meta["arms"] if a["draft_kv"]["budget"] == wanted)
            limit = draft_limit(controller, np.array([s - m for s, m in zip(stop, n, strict=True)]))
            signals = Signals.empty(len(group), 64)
            k, depth = [0] * len(group), 0
            drafting = [a < b for a, b in zip(n, end, strict=True)]
            active = np.array(drafting)
            while True:
                more = controller.draft_more(depth, signals)
                drafting = [bool(d and m and depth < x) for d, m, x in zip(drafting, more, limit, strict=True)]
                if not any(drafting):
                    break
                for i, d in enumerate(group):
                    if drafting[i]:
                        row = drafts[d["doc"], n[i], arm, depth + 1]
                        signals.entropy_nats[i, depth] = row["entropy_nats"]
                        signals.top1_prob[i, depth] = row["top1_prob"]
                        signals.margin[i, depth] = row["margin"]
                        k[i] += 1
                depth += 1
            accepted = [0] * len(group)
            for i, d in enumerate(group):
                while accepted[i] < k[i] and drafts[d["doc"], n[i], arm, accepted[i] + 1]["match"]:
                    accepted[i] += 1
            controller.observe(np.array(k), np.array(accepted), signals, active)
            for i, d in enumerate(group):
                if active[i]:
                    emitted = min(accepted[i] + 1, end[i] - n[i])
                    rows.append((d["doc"], number, n[i], k[i], accepted[i], emitted))
                    n[i] += emitted
            number += 1
    return sorted(rows)


def rows_of(log):
    return list(zip(*(getattr(log, name).tolist() for name in COLUMNS), strict=True))


controllers = st.one_of(
    st.just({"kind": "none"}),
    st.builds(lambda k: {"kind": "fixed", "k": k}, st.integers(1, 8)),
    st.builds(
        lambda k, c, t, lag: {"kind": "entropy", "k_max": k, "coefficient": c, "threshold": t, "lag": lag},
        st.integers(1, 8),
        st.floats(0, 1),
        st.floats(-1, 1),
        st.integers(0, 1),
    ),
    st.builds(lambda k, t: {"kind": "confidence", "k_max": k, "threshold": t}, st.integers(1, 8), st.floats(0, 1)),
    st.builds(
        lambda form, k, gamma, beta, ks, lag: {
            "kind": "rate",
            "form": form,
            "k_max": k,
            "gamma": gamma,
            "beta": beta,
            "lag": lag,
            "k_set": [allowed for allowed in ks if allowed <= k],
        },
        st.sampled_from(["calibrated", "paper"]),
        st.integers(1, 8),
        st.floats(0, 1),
        st.floats(0.5, 1),
        st.sampled_from([[], [1, 3, 8], [2, 4]]),
        st.integers(0, 1),
    ),
)
cells = st.lists(
    st.builds(
        lambda c, low, span, from_batch, budget: {
            "overrides": {"controller": c, "draft_kv": {"budget": budget}},
            "from_context_tokens": low,
            "to_context_tokens": low + span,
            "from_batch": from_batch,
        },
        controllers,
        st.integers(390, 480),
        st.integers(1, 60),
        st.integers(1, 3),
        st.sampled_from([128, 256]),
    ),
    max_size=2,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    made=st.lists(st.tuples(controllers, st.sampled_from([128, 256]), cells), min_size=1, max_size=4),
    batch=st.integers(1, 6),
)
def test_vectorised_replay_equals_the_slow_restatement(trace, made, batch):
    policies = [
        policy_from_mapping(
            {"controller": c, "draft_kv": {"budget": budget, "sink": 4, "recent": 16}, "cells": cell_list}
        )
        for c, budget, cell_list in made
    ]
    for policy, log in zip(policies, replay_rounds(trace, policies, batch=batch), strict=True):
        assert rows_of(log) == slow_rounds(trace, policy, batch)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made=st.lists(st.tuples(controllers, cells), min_size=2, max_size=5), batch=st.integers(1, 4))
def test_time_equals_the_sum_of_each_rounds_price(trace, costs, made, batch):
    policies = [
        policy_from_mapping({"controller": c, "draft_kv": {"budget": 256, "sink": 4, "recent": 16}, "cells": cell_list})
        for c, cell_list in made
    ]
    for outcome in replay(trace, costs, policies, batch=batch, bootstrap=0, keep_rounds=True):
        slow_us = priced_slowly(trace, costs, outcome.policy, rows_of(outcome.round_log), batch)
        assert outcome.us_per_token * outcome.tokens == pytest.approx(slow_us, rel=1e-9)
        assert sum(outcome.breakdown.values()) == pytest.approx(outcome.us_per_token)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(controller=controllers, cell_list=cells, batch=st.integers(2, 6))
def test_a_batch_kept_full_is_charged_by_the_share_of_it_that_decodes(trace, costs, controller, cell_list, batch):
    """While half of it does. Of six documents: the first ones fill up the last batch."""
    kv = {"budget": 256, "sink": 4, "recent": 16}
    drafting = policy_from_mapping({"controller": controller, "draft_kv": kv, "cells": cell_list})
    none = policy_from_mapping({"drafter": {"kind": "none"}, "controller": {"kind": "none"}, "draft_kv": kv})
    plain_us, record = None, read_record(trace)
    filled = [i % 6 for i in range(-(-6 // batch) * batch)]
    for outcome in replay(record, costs, [none, drafting], batch=batch, bootstrap=0, full_batch=True):
        full, tokens, lanes, spent_us = outcome.full_batch, 0, 0, 0.0
        for first in range(0, len(filled), batch):
            group = filled[first : first + batch]
            alone = replace(record, documents=record.documents.take(np.array(group)))
            (log,) = replay_rounds(alone, [outcome.policy], batch=batch)
            ours = SimpleNamespace(meta={"documents": [trace.meta["documents"][i] for i in group]})
            rows = rows_of(log)
            spent_us += priced_slowly(ours, costs, outcome.policy, rows, batch, shared=True)
            counted = [row for row in rows if 2 * sum(other[1] == row[1] for other in rows) >= batch]
            tokens, lanes = tokens + sum(row[5] for row in counted), lanes + len(counted)
        assert full.tokens_per_round == pytest.approx(tokens / lanes)
        us_per_token = spent_us / tokens
        plain_us = plain_us or us_per_token
        assert full.us_per_token == pytest.approx(us_per_token, rel=1e-9)
        assert full.speedup == pytest.approx(plain_us / us_per_token, rel=1e-9)
    (whole,) = replay(trace, costs, [drafting], batch=batch, bootstrap=0)
    assert whole.us_per_token == outcome.us_per_token
    assert whole.full_batch is None
    (single,) = replay(trace, costs, [drafting], batch=1, bootstrap=0, full_batch=True)
    assert single.full_batch is None


def priced_slowly(trace, costs, policy, rows, batch, *, shared=False):
    """Group logged rounds into batches and price them one by one. shared: see `replay`'s full_batch."""
    total = 0.0
    documents = trace.meta["documents"]
    by_doc = {d["doc"]: [] for d in documents}
    for row in rows:
        by_doc[row[0]].append(row)
    for first in range(0, len(documents), batch):
        group = [d["doc"] for d in documents[first : first + batch]]
        size = len(group)
        for number in range(max(len(by_doc[d]) for d in group)):
            contexts, ks, going = [], [], []
            for doc in group:
                log = by_doc[doc]
                live = number < len(log)
                contexts.append(log[number][2] if live else log[-1][2] + log[-1][5])
                ks.append(log[number][3] if live else 0)
                going += [contexts[-1]] if live else []
            share = len(going) / size if shared else 1.0
            if shared and share < 0.5:
                break
            context, k = sum(contexts) / size, max(ks)
            variant = policy.variants()[policy.variant_index(max(going), size)]
            if policy.k_max == 0:
                total += share * float(costs.plain_us(context, size))
                continue
            budget = variant.draft_kv.budget
            total += share * float(costs.verify_us(context, size, k) + costs.host_us(context, size, k))
            if k:
                drafts = k * costs.draft_us(context, size, budget) + costs.select_us(context, size, budget)
                total += share * float(drafts)
    return total


@pytest.mark.parametrize("drafter", ["sparse_self", "lookup"])
def test_a_recorded_policy_replays_to_its_own_rounds_and_time(trace, policy, tmp_path, drafter):
    settings = {"sparse_self": ("rate", {"gamma": 0.2, "lag": 1}), "lookup": ("fixed", {"k": 5})}
    kind, controller = settings[drafter]
    recorded = policy(kind, controller=controller, drafter={"kind": drafter})
    rows = slow_rounds(trace, recorded, 1)
    write_recorded(tmp_path, recorded, rows, dense=False)
    own = read_trace(tmp_path)
    (outcome,) = replay(own, None, [recorded], keep_rounds=True)
    assert rows_of(outcome.round_log) == rows
    table = own.rounds.to_pydict()
    total = sum(sum(table[name]) for name in ("draft_us", "verify_us", "select_us", "host_us"))
    assert outcome.us_per_token * outcome.tokens == pytest.approx(total, rel=1e-12)
    assert outcome.speedup is None
    assert operation("draft", drafter) in CostModel.from_rounds(own).measured


@pytest.mark.parametrize(
    "made_by", [{"kind": "fixed", "k": 8}, {"kind": "fixed", "k": 3}, {"kind": "rate", "k_max": 8}]
)
def test_a_sparse_trace_models_other_policies_near_their_dense_replay(tmp_path, policy, costs, made_by):
    shape = Shape(documents=12, new_tokens=150)
    write_trace(tmp_path / "dense", shape)
    dense = read_trace(tmp_path / "dense")
    recorded = policy(made_by["kind"], controller={k: v for k, v in made_by.items() if k != "kind"})
    (log,) = replay_rounds(dense, [recorded])
    write_recorded(tmp_path / "sparse", recorded, rows_of(log), dense=False, shape=shape)
    sparse = read_trace(tmp_path / "sparse")
    others = [policy("fixed", controller={"k": k}) for k in (1, 2, 3, 4, 6, 8) if k <= recorded.k_max]
    others += [policy("confidence", controller={"k_max": recorded.k_max, "threshold": 0.4})]
    for modelled, exact in zip(replay(sparse, costs, others), replay(dense, costs, others), strict=True):
        assert modelled.level == ("exact" if modelled.policy.controller == recorded.controller else "modelled")
        assert modelled.tokens_per_round == pytest.approx(exact.tokens_per_round, rel=0.08)
    (longer,) = replay(sparse, costs, [policy("fixed", controller={"k": recorded.k_max + 1})])
    assert longer.level == "refused"


def test_a_sparse_trace_with_hardly_a_draft_refuses_others(tmp_path, policy, costs):
    shape = Shape(documents=1, new_tokens=8)
    write_trace(tmp_path / "dense", shape)
    recorded = policy("fixed", controller={"k": 4})
    (log,) = replay_rounds(read_trace(tmp_path / "dense"), [recorded])
    write_recorded(tmp_path / "sparse", recorded, rows_of(log), dense=False, shape=shape)
    (other,) = replay(read_trace(tmp_path / "sparse"), costs, [policy("fixed", controller={"k": 2})])
    assert other.level == "refused"
    assert "dense=true" in other.reason


def write_recorded(out, policy, rows, dense, shape=None):
    """A trace of `policy` itself: its rounds with noisy times, and only the drafts that it made."""
    shape, source = shape or Shape(), out / "source"
    write_trace(source, shape)
    full = read_trace(source)
    meta = {
        **synthetic_meta(shape),
        "policy": policy.decisions(),
        "policy_digest": policy_digest(policy),
        "dense": dense,
        "k_max": policy.k_max,
    }
    meta["arms"] = [{**meta["arms"][1], "arm": 0}]
    writer = TraceWriter(out, meta)
    generator = np.random.default_rng(3)
    for entry in meta["documents"]:
        mine = [row for row in rows if row[0] == entry["doc"]]
        made = {(row[2], d): row[1] for row in mine for d in range(1, row[3] + 1)}
        drafts = [
            {**d, "round": made[d["position"], d["depth"]], "arm": 0}
            for d in full.drafts.to_pylist()
            if d["doc"] == entry["doc"] and d["arm"] == 1 and (d["position"], d["depth"]) in made
        ]
        columns = dict(zip(COLUMNS, (list(column) for column in zip(*mine, strict=True)), strict=True))
        n = len(mine)
        times = {name: generator.random(n) * 100 for name in ("draft_us", "verify_us", "select_us", "host_us")}
        constant = {"batch": [1] * n, "mode": ["full"] * n, "rounds_since_full": [0] * n}
        writer.write(
            entry["doc"],
            {
                "drafts": {name: [d[name] for d in drafts] for name in full.drafts.column_names},
                "outputs": outputs(entry["doc"], entry["prompt_tokens"], entry["new_tokens"], shape.seed),
                "rounds": {**columns, **constant, **times},
            },
        )


def test_an_early_end_of_text_cuts_the_last_round(tmp_path, policy):
    """Output shorter than asked for: drafts may reach past the end, what is emitted may not."""
    shape = Shape(documents=1)
    write_trace(tmp_path / "source", shape)
    full = read_trace(tmp_path / "source")
    meta = synthetic_meta(shape)
    writer = TraceWriter(tmp_path / "cut", meta)
    start = meta["documents"][0]["prompt_tokens"]
    drafts = full.drafts.to_pylist()
    kept = [d for d in drafts if d["position"] < start + 40]
    rounds = [r for r in full.rounds.to_pylist() if r["context_tokens"] < start + 40]
    writer.write(
        0,
        {
            "drafts": {name: [d[name] for d in kept] for name in full.drafts.column_names},
            "outputs": outputs(0, start, 40, 0),
            "rounds": {name: [r[name] for r in rounds] for name in full.rounds.column_names},
        },
    )
    cut = read_trace(tmp_path / "cut")
    tested = policy("fixed", controller={"k": 8})
    (log,) = replay_rounds(cut, [tested])
    assert rows_of(log) == slow_rounds(cut, tested, 1)
    assert log.emitted.sum() == 40
