"""Laws that every replay of a real recording obeys, on the small traces that lie in tests/data/traces.

benchmarks/prediction.py --traces leaves them. Their numbers are the models'; nothing here depends on which they are.
"""

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from specdial.engine.trace.reader import read_costs, read_trace
from specdial.engine.trace.writer import write_costs
from specdial.policies.schema import plain_policy, policy_from_mapping
from specdial.simulator.analytic import speedup
from specdial.simulator.costs import CostModel
from specdial.simulator.lanes import read_record
from specdial.simulator.replay import replay, replay_rounds

FOLDER = Path(__file__).resolve().parents[1] / "data" / "traces"
FOUND = sorted(path.parent for path in FOLDER.glob("*/meta.json"))
if not FOUND:
    pytest.skip("no recorded trace lies in tests/data/traces", allow_module_level=True)
LARGEST_BYTES = 150_000
COLUMNS = ("doc", "round", "context_tokens", "k", "accepted", "emitted")
PLAIN_US, DRAFT_US, VERIFY_US = 1000.0, 300.0, 1100.0


@pytest.fixture(scope="module", params=FOUND, ids=lambda path: path.name)
def path(request):
    return request.param


@pytest.fixture(scope="module")
def trace(path):
    return read_trace(path)


@pytest.fixture(scope="module")
def record(trace):
    return read_record(trace)


@pytest.fixture(scope="module")
def costs(trace, record, tmp_path_factory):
    """The same time for a draft at every budget and for a verification at every k; selection and host take none."""
    out = tmp_path_factory.mktemp("costs")
    ends = (int(record.documents.start.min()), int(record.documents.end.max()))
    budgets, ks = [record.budget(arm) for arm in range(len(record.arms))], range(record.k_max + 1)
    points = [("plain", "none", 0, 0, PLAIN_US)]
    points += [(op, "sparse_self", k, 0, us) for op, us in (("verify", VERIFY_US), ("host", 0.0)) for k in ks]
    points += [(op, "sparse_self", 0, b, us) for op, us in (("draft", DRAFT_US), ("select", 0.0)) for b in budgets]
    names = ("op", "drafter", "k", "budget", "median_us")
    rest = {"batch": 1, "n": 1, "bytes": 0}
    rows = [
        {**dict(zip(names, point)), "context_tokens": context, "p10_us": point[-1], "p90_us": point[-1], **rest}
        for context in ends
        for point in points
    ]
    write_costs(out, {"model": trace.meta["model"]}, rows)
    return CostModel.from_table(read_costs(out))


def policy_of(record, arm, controller):
    recorded = record.arms[arm]
    return policy_from_mapping(
        {"drafter": recorded["drafter"], "controller": controller, "draft_kv": recorded["draft_kv"]}
    )


def fixed(record, arm):
    return [policy_of(record, arm, {"kind": "fixed", "k": k}) for k in range(1, record.k_max + 1)]


def adaptive(record, arm):
    kinds = [
        *({"kind": "entropy", "threshold": threshold} for threshold in (-0.2, 0.2, 0.6)),
        *({"kind": "confidence", "threshold": threshold} for threshold in (0.2, 0.7)),
        *({"kind": "rate", "gamma": gamma} for gamma in (0.1, 0.5)),
    ]
    return [policy_of(record, arm, {**kind, "k_max": record.k_max}) for kind in kinds]


def everything(record):
    arms = range(len(record.arms))
    return [policy for arm in arms for policy in (*fixed(record, arm), *adaptive(record, arm))]


def test_it_is_small_real_dense_and_says_nothing_of_the_machine_but_its_hardware(path, trace, record):
    assert sum(part.stat().st_size for part in path.iterdir()) <= LARGEST_BYTES
    assert trace.meta["dense"]
    assert not trace.meta["model"]["random"]
    assert trace.meta["config"] is None
    assert record.complete.all()
    assert set(record.documents.doc.tolist()) == {d["doc"] for d in trace.meta["documents"]}
    assert '"/' not in json.dumps(trace.meta)  # no absolute path


def test_signals_are_what_probabilities_can_be(trace, record):
    top, margin, entropy = (record.signals[name] for name in ("top1_prob", "margin", "entropy_nats"))
    assert (top > 0).all()
    assert (top <= 1 + 1e-5).all()
    assert (margin >= 0).all()
    assert (entropy >= -1e-5).all()
    assert (entropy <= np.log(trace.meta["model"]["vocab"]) + 1e-3).all()
    assert (-np.log(top) <= entropy + 1e-2).all()  # the surest token's information is at most the mean one's


def test_plain_decoding_replays_to_its_own_rounds_and_time(trace):
    recorded = policy_from_mapping(trace.meta["policy"])
    assert recorded.k_max == 0
    (log,) = replay_rounds(trace, [recorded])
    order = np.lexsort((trace.rounds["round"].to_numpy(), trace.rounds["doc"].to_numpy()))
    for name in COLUMNS:
        assert getattr(log, name).tolist() == trace.rounds[name].to_numpy()[order].tolist()
    (outcome,) = replay(trace, None, [recorded])
    times = sum(trace.rounds[name].to_numpy().sum() for name in ("draft_us", "verify_us", "select_us", "host_us"))
    assert (outcome.level, outcome.tokens) == ("exact", trace.outputs.num_rows)
    assert outcome.us_per_token * outcome.tokens == pytest.approx(times)


def test_every_policy_is_exact_and_emits_every_token(trace, record, costs):
    policies = everything(record)
    for outcome, log in zip(replay(record, costs, policies, bootstrap=0), replay_rounds(record, policies)):
        assert outcome.level == "exact"
        assert outcome.tokens == log.emitted.sum() == trace.outputs.num_rows
        assert outcome.rounds == len(log.doc)
        assert (log.emitted == log.accepted + 1).all()
        assert (log.k <= record.k_max).all()
        assert (log.accepted <= log.k).all()


def test_a_longer_draft_accepts_no_less_at_the_same_position(record):
    """Rounds fall elsewhere under another k, so totals need not be monotone; what one position accepts must be."""
    for arm in range(len(record.arms)):
        logs = replay_rounds(record, fixed(record, arm))
        at = [dict(zip(zip(log.doc.tolist(), log.context_tokens.tolist()), log.accepted.tolist())) for log in logs]
        common = 0
        for k, (shorter, longer) in enumerate(itertools.pairwise(at), start=1):
            shared = shorter.keys() & longer.keys()
            common += len(shared)
            assert all(shorter[place] == min(longer[place], k) for place in shared)
        assert common >= len(record.documents) * (record.k_max - 1)  # every document's first round, at least


def test_rounds_lie_between_all_accepted_and_none(record):
    lengths = record.documents.end - record.documents.start
    for arm in range(len(record.arms)):
        for k, log in enumerate(replay_rounds(record, fixed(record, arm)), start=1):
            rounds = np.array([(log.doc == doc).sum() for doc in record.documents.doc])
            assert (rounds >= -(-lengths // (k + 1))).all()
            assert (rounds <= lengths).all()


def test_constant_costs_give_the_closed_form(record, costs):
    """S = (alpha k + 1) / ((k gamma + 1) r), with the k that rounds really had: the last ones are cut short."""
    for outcome in replay(record, costs, everything(record), bootstrap=0):
        closed = speedup(outcome.alpha, outcome.k, DRAFT_US / VERIFY_US, VERIFY_US / PLAIN_US)
        assert outcome.speedup == pytest.approx(closed, rel=1e-9)
        assert outcome.gamma == pytest.approx(DRAFT_US / VERIFY_US)
        assert outcome.tokens_per_round == pytest.approx(outcome.alpha * outcome.k + 1.0)


def test_the_order_of_documents_changes_no_total(trace, record, costs):
    turned = {**trace.meta, "documents": trace.meta["documents"][::-1]}
    other = read_record(dataclasses.replace(trace, meta=turned))
    assert other.documents.doc.tolist() == record.documents.doc.tolist()[::-1]
    policies = [plain_policy(), *everything(record)]
    pairs = zip(replay(record, costs, policies, bootstrap=0), replay(other, costs, policies, bootstrap=0))
    for one, two in pairs:
        assert (one.tokens, one.rounds) == (two.tokens, two.rounds)
        assert one.speedup == pytest.approx(two.speedup, rel=1e-9)
        assert sorted(one.unit_us) == pytest.approx(sorted(two.unit_us), rel=1e-9)
