"""Drafters under captured graphs, played on a CPU: practice runs, buffers frozen at capture, and rounds started early.

A pass that is new runs twice inside `at_rest`; afterwards the first function of its key is called, as a captured graph
goes on reading the buffers that it was captured with, though the drafter that asked for it is gone.
"""

import numpy as np
import pytest

from specdial.engine.cache import KVCache
from specdial.engine.dense import record_dense
from specdial.engine.drafters.model import ModelDrafter
from specdial.engine.history import HistorySpec
from specdial.engine.loop import Decoding
from specdial.engine.sampling import Sampling
from specdial.engine.sequences import Sequences
from specdial.policies.schema import DraftKV, plain_policy, policy_from_mapping

FIXED, RATE = {"kind": "fixed", "k": 4}, {"kind": "rate", "gamma": 0.1, "k_max": 5}
PAGES = {"budget": 64, "sink": 1, "recent": 16, "page": 16}
DRAFTERS = {
    "lookup": {"drafter": {"kind": "lookup", "ngram": 2}},
    "model": {"drafter": {"kind": "model", "model": "draft"}},
    "paged": {"drafter": {"kind": "model", "model": "draft", "budget": 96}},
    "quest": {"drafter": {"kind": "quest"}, "draft_kv": PAGES},
}
CASES = [(name, kind) for name in DRAFTERS for kind in (FIXED, RATE) if (name, kind) != ("lookup", RATE)]


@pytest.fixture
def make(tiny_model):
    target, draft = (tiny_model("llama", head_dim=64).decoder for _ in range(2))
    draft.layers[-1].down.mul_(0.9)

    def build() -> Sequences:
        prompts = [np.random.default_rng(n).integers(0, 256, n).tolist() for n in (80, 190, 17)]
        s = Sequences(target, 290, 3, history=None, backend="reference", companions={"draft": draft})
        s.prefill(prompts, [40, 60, 50])
        return s

    return build


def outcome(s, policy, sampling):
    rounds = list(Decoding(s, policy, sampling, [0, 1, 2]).rounds())
    return [list(t) for t in s.tokens], [(r.k.tolist(), r.accepted.tolist()) for r in rounds]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=5)], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("name", "controller"), CASES, ids=[f"{n}-{c['kind']}" for n, c in CASES])
def test_captured_rounds_are_the_plain_calls_rounds(played, make, monkeypatch, name, controller, sampling):
    policy = policy_from_mapping({"controller": controller, **DRAFTERS[name]})
    s = make()
    want = outcome(s, policy, sampling)
    s.graphs = played(s)
    monkeypatch.setattr(Decoding, "_may_run_ahead", lambda self: False)
    for _ in range(2):  # the second time a new drafter finds everything captured
        s.rewind()
        assert outcome(s, policy, sampling) == want
    assert sum(sum(accepted) for _, accepted in want[1]) > 0


@pytest.mark.parametrize("name", ["model", "quest"])
def test_rounds_started_before_the_last_one_is_read(played, make, monkeypatch, name):
    """The host is a round behind: a draft model must not take what it has not heard of for missing."""
    policy = policy_from_mapping({"controller": FIXED, **DRAFTERS[name]})
    s = make()
    want = outcome(s, policy, Sampling())
    s.graphs = played(s)
    monkeypatch.setattr(KVCache, "width", lambda self, block_tokens: self.capacity_tokens)  # as on a GPU
    monkeypatch.setattr(ModelDrafter, "_catch_up", None)
    s.rewind()
    decoding = Decoding(s, policy, Sampling(), [0, 1, 2])
    assert decoding._may_run_ahead()
    rounds = list(decoding.rounds())
    assert [list(t) for t in s.tokens] == want[0]
    assert [(r.k.tolist(), r.accepted.tolist()) for r in rounds] == want[1]


@pytest.mark.parametrize("controller", [FIXED, RATE], ids=lambda c: c["kind"])
def test_a_captured_round_drafts_to_the_end_of_its_pass(played, make, monkeypatch, controller):
    """What `drafts_whole` says, and prices follow: drafts that an output no longer needs are made under fixed k."""
    policy = policy_from_mapping({"controller": controller, **DRAFTERS["quest"]})
    steps, step = [], Decoding._step

    def counted(self, draft, depth):
        steps[-1] += 1
        step(self, draft, depth)

    monkeypatch.setattr(Decoding, "_step", counted)
    monkeypatch.setattr(Decoding, "_may_run_ahead", lambda self: False)
    s = make()
    s.graphs = played(s)
    for _ in range(2):  # what is new is practised: the second time counts
        s.rewind()
        decoding, widest = Decoding(s, policy, Sampling(), [0, 1, 2]), []
        steps.clear()
        while not s.done.all():
            steps.append(0)
            widest.append(int(decoding.decode_round().k.max()))
    assert policy.drafts_whole == (controller is FIXED)
    assert widest[-1] < max(widest)
    assert steps == ([4] * len(widest) if policy.drafts_whole else widest)


def test_dense_drafts_of_a_captured_pass_are_the_plain_ones(played, tiny_model):
    """Chunk after chunk goes through one pass of its shape: what it reads is what the new chunk wrote there."""
    arms = [DraftKV(budget=24, sink=2, recent=8, window=8), DraftKV(budget=48, sink=2, recent=8, window=8)]
    prompt = np.random.default_rng(1).integers(0, 256, 90).tolist()
    s = Sequences(tiny_model("llama").decoder, 160, 1, history=HistorySpec(8, 1), backend="reference")
    s.prefill([prompt], [40])
    list(Decoding(s, plain_policy(), Sampling(), [0]).rounds())
    written = [list(s.tokens[0])]
    want = record_dense(s, 0, arms, 3)
    s.graphs = played(s)
    for _ in range(2):
        s.tokens = [list(written[0])]
        got = record_dense(s, 0, arms, 3)
        assert all(np.array_equal(got[name], want[name]) for name in want)
    assert len(s.graphs.first) == 2, "of 16 positions and of the last 8: both budgets fill copies of one width"


def test_lookup_never_starts_before_it_has_seen_the_last_round(played, make):
    s = make()
    s.graphs = played(s)
    policy = policy_from_mapping({"controller": FIXED, **DRAFTERS["lookup"]})
    assert not Decoding(s, policy, Sampling(), [0, 1, 2])._may_run_ahead()
    assert Decoding(s, plain_policy(), Sampling(), [0, 1, 2])._may_run_ahead()
