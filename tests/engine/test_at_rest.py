"""Practising a pass before it is captured changes nothing that lasts: rounds come out as if every pass ran once.

Capture is played on a CPU: a pass that is new runs twice inside `at_rest`, then for real. Rounds start one by one,
since a CPU cannot start one before it knows the last one's lengths.
"""

import numpy as np
import pytest
import torch

from specdial.engine.graphs import WARMUP_RUNS
from specdial.engine.history import HistorySpec
from specdial.engine.loop import Decoding
from specdial.engine.sampling import Sampling
from specdial.engine.sequences import Sequences
from specdial.policies.schema import policy_from_mapping

KV = {"budget": 40, "sink": 2, "recent": 8}
POLICIES = {
    "plain": {"drafter": {"kind": "none"}, "controller": {"kind": "none"}},
    "whole rounds": {"controller": {"kind": "fixed", "k": 4}, "draft_kv": KV},
    "a kept selection": {"controller": {"kind": "fixed", "k": 3}, "draft_kv": {**KV, "refresh_rounds": 3}},
    "step by step": {"controller": {"kind": "rate", "gamma": 0.1, "k_max": 6}, "draft_kv": KV},
    "early stops": {"controller": {"kind": "entropy", "threshold": 0.1, "k_max": 5}, "draft_kv": KV},
}
SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=0.8, top_p=0.95, seed=5)}
LASTING = ("pending", "before", "room")


@pytest.fixture(scope="module")
def make(tiny_model):
    model = tiny_model("llama")

    def build(spec: HistorySpec) -> Sequences:
        prompts = [np.random.default_rng(n).integers(0, 256, n).tolist() for n in (60, 131, 17)]
        s = Sequences(model.decoder, 190, 3, history=spec, backend="reference")
        s.prefill(prompts, [20, 33, 7], frozenset({41, 97, 202}))
        return s

    return build


def decode(s, policy, sampling):
    """Every round, and what is left afterwards."""
    decoding = Decoding(s, policy, sampling, [0, 1, 2])
    rounds, states = [], []
    while not s.done.all():
        rounds.append(decoding.decode_round())
        states.append([getattr(s, name).tolist() for name in LASTING] + [s.cache.lengths.tolist()])
    return rounds, states


def told(r):
    """What a round says, apart from its times; drafts and signals as far as they count."""
    counted = np.arange(r.drafts.shape[1]) < r.k[:, None]
    signals = [np.where(counted, x, 0).tolist() for x in (r.signals.entropy_nats, r.signals.top1_prob)]
    probability = None if r.accept_prob is None else np.where(counted, r.accept_prob, 0).tolist()
    drafts = np.where(counted, r.drafts, 0).tolist()
    return [r.active.tolist(), r.k.tolist(), r.accepted.tolist(), r.emitted, drafts, signals, probability]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("spec", [HistorySpec(16, 1), HistorySpec(16, 16), HistorySpec(16, 1, decay=0.9)])
@pytest.mark.parametrize("name", POLICIES)
def test_practice_changes_nothing_that_lasts(played, make, name, spec, sampling):
    page = spec.page
    changes = {"draft_kv": {**POLICIES[name]["draft_kv"], "page": page}} if "draft_kv" in POLICIES[name] else {}
    if page > 1 and changes:
        changes["draft_kv"] |= {"budget": 48}
    policy = policy_from_mapping({**POLICIES[name], **changes})
    found = []
    for runs in (0, WARMUP_RUNS):
        s = make(spec)
        s.graphs = played(s, runs=runs, frozen=name in ("plain", "whole rounds"))  # the others hand on new buffers here
        for _ in range(2):  # the second time everything is captured
            s.rewind()
            rounds, states = decode(s, policy, SAMPLINGS[sampling])
            length = int(s.cache.host_lengths.max())
            kept = [s.history.ring.clone(), s.history._scores.clone(), s.cache.k[:, :, :, :length].clone()]
            found.append(([told(r) for r in rounds], states, [list(t) for t in s.tokens], kept))
            assert s.cache.lengths.tolist() == s.cache.host_lengths.tolist() == [len(t) - 1 for t in s.tokens]
            assert [t[-1] for t in s.tokens] == s.pending.tolist()
            assert [t[-2] for t in s.tokens] == s.before.tolist()
            assert s.room.tolist() == [0, 0, 0]
    want = found[0]
    for got in found[1:]:
        assert got[:3] == want[:3]
        for b, n in enumerate(s.cache.host_lengths):  # past its length a sequence's keys are scratch
            assert torch.equal(got[3][2][:, b, :, :n], want[3][2][:, b, :, :n])
        assert torch.equal(got[3][0], want[3][0])
        assert torch.equal(got[3][1], want[3][1])
    assert len(want[0]) > 2


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", ["step by step", "early stops"])
def test_a_round_whose_first_draft_started_early_is_the_same_round(played, make, name, sampling):
    policy = policy_from_mapping(POLICIES[name])
    s = make(HistorySpec(16, 1))
    want = [told(r) for r in decode(s, policy, SAMPLINGS[sampling])[0]]
    s.graphs = played(s, runs=WARMUP_RUNS, frozen=False)
    s.rewind()
    decoding = Decoding(s, policy, SAMPLINGS[sampling], [0, 1, 2])
    got, opened = [], 0
    while not s.done.all():
        got.append(told(decoding.decode_round()))
        opened += decoding._opened is not None
    assert got == want
    assert 0 < opened < len(got)


PAGES = {"budget": 48, "sink": 2, "recent": 16, "page": 16}
DRAFTERS = {
    "quest": {"drafter": {"kind": "quest"}, "draft_kv": PAGES},
    "model": {"drafter": {"kind": "model", "model": "small"}},
    "lookup": {"drafter": {"kind": "lookup"}},
}
CONTROLLERS = {"fixed": {"kind": "fixed", "k": 4}, "entropy": {"kind": "entropy", "threshold": 0.1, "k_max": 5}}


@pytest.fixture(scope="module")
def read_along(tiny_model):
    """Sequences with a draft model: the target itself, its weights shaken a little."""
    target, draft = tiny_model("llama", head_dim=64), tiny_model("llama", head_dim=64)
    draft.decoder.layers[1].down.mul_(0.9)
    prompts = [np.random.default_rng(n).integers(0, 256, n).tolist() for n in (60, 131, 17)]

    def build() -> Sequences:
        s = Sequences(target.decoder, 190, 3, history=None, backend="reference", companions={"small": draft.decoder})
        s.prefill(prompts, [20, 33, 7])
        return s

    return build


@pytest.mark.parametrize(
    ("name", "kind"),
    [("quest", "fixed"), ("quest", "entropy"), ("model", "fixed"), ("model", "entropy"), ("lookup", "fixed")],
)
def test_practice_changes_nothing_that_drafters_keep(played, read_along, name, kind):
    controller = CONTROLLERS[kind]
    policy, plain = (policy_from_mapping(p) for p in ({**DRAFTERS[name], "controller": controller}, POLICIES["plain"]))
    found = []
    for runs in (0, WARMUP_RUNS):
        s = read_along()
        s.graphs = played(s, runs=runs, frozen=kind == "fixed" and name != "lookup")
        Decoding(s, plain, Sampling(), [0, 1, 2]).decode_round()  # what drafters missed they make up for
        rounds, states = decode(s, policy, Sampling())
        s.rewind()
        again, _ = decode(s, policy, Sampling())
        found.append(([told(r) for r in rounds], states, [told(r) for r in again], [list(t) for t in s.tokens]))
    assert found[0] == found[1]
    assert any(r.accepted.sum() for r in rounds) or name == "lookup"


def test_a_policy_captured_in_the_middle_of_another_ones_run(played, make):
    """Graphs are shared by policies of one batch: practising one leaves the state of the last one's rounds alone."""
    s = make(HistorySpec(16, 1))
    s.graphs = played(s, runs=WARMUP_RUNS, frozen=False)
    four, rate = (policy_from_mapping(POLICIES[name]) for name in ("whole rounds", "step by step"))
    plain, _ = decode(s, policy_from_mapping(POLICIES["plain"]), Sampling())
    want = [list(t) for t in s.tokens]
    s.rewind()
    while not s.done.all():
        for policy in (four, rate):
            if not s.done.all():
                Decoding(s, policy, Sampling(), [0, 1, 2]).decode_round()
    assert [list(t) for t in s.tokens] == want
    assert len(plain) > 2


def test_a_rest_that_lets_sequences_emit_is_noticed(played, make):
    """The test above would see a practice run that commits."""
    s = make(HistorySpec(16, 1))
    s.graphs = played(s, runs=WARMUP_RUNS, frozen=False)
    s.rewind()
    before = s.cache.lengths.tolist()
    decoding = Decoding(s, policy_from_mapping(POLICIES["whole rounds"]), Sampling(), [0, 1, 2])
    decoding.judge.prepare()
    decoding._whole(decoding.drafters[0], 4)  # what practice would be without rest
    assert s.cache.lengths.tolist() != before
    assert s.room.tolist() != [20, 33, 7]
