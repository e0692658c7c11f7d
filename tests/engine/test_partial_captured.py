"""Partial verification under captured graphs, played on a CPU: practice runs, frozen buffers, rounds started early.

A pass that is new runs twice inside `at_rest`; afterwards the first function of its key is called, with the plan that
its key names, though the decoding that asked for it is gone. So whatever lasts must lie in buffers that stay.
"""

import numpy as np
import pytest

from specdial.engine.cache import KVCache
from specdial.engine.drafters.model import ModelDrafter
from specdial.engine.job import history_spec
from specdial.engine.loop import Decoding
from specdial.engine.sampling import Sampling
from specdial.engine.sequences import Sequences
from specdial.policies.schema import policy_from_mapping

PARTIAL = {"mode": "partial", "budget": 8, "sink": 1, "recent": 3}
MODEL = {"drafter": {"kind": "model", "model": "draft"}}
QUEST = {"drafter": {"kind": "quest"}, "draft_kv": {"budget": 48, "sink": 1, "recent": 16, "page": 16}}
HEADS = {"target": [[1, 0], [2, 1]], "draft": [[0, 1], [2, 2]]}
SOURCES = {
    "recent": {"verify_kv": {"mode": "partial", "source": "recent", "sink": 1, "recent": 5}, **MODEL},
    "history": {"verify_kv": PARTIAL, **QUEST},
    "heads": {
        "verify_kv": {**PARTIAL, "scope": "model"}, "scoring_heads": {"target": HEADS["target"]},
        "drafter": {"kind": "lookup"},
    },
    "hybrid": {
        "verify_kv": {**PARTIAL, "source": "hybrid", "scope": "model", "lookahead_tokens": 2}, "scoring_heads": HEADS,
        **MODEL,
    },
    "page_bound": {"verify_kv": {**PARTIAL, "source": "page_bound", "budget": 48, "page": 16}, **QUEST},
}  # fmt: skip
FIXED, RATE = {"kind": "fixed", "k": 3}, {"kind": "rate", "gamma": 0.1, "k_max": 4}


@pytest.fixture
def sharing(played):
    """Graphs played for decodings that come after each other: one that is gone has the plan of the present one."""

    class Sharing(played):
        def __init__(self, sequences):
            super().__init__(sequences)
            self.decodings = []

        def before_call(self):
            for gone in self.decodings:
                gone._plan = self.decodings[-1]._plan

    return Sharing


@pytest.fixture
def make(tiny_model):
    target, draft = (tiny_model("llama", head_dim=64).decoder for _ in range(2))
    for decoder in (target, draft):
        for layer in decoder.layers:
            layer.qkv.mul_(2.0)
    draft.layers[-1].down.mul_(0.9)

    def build(policy):
        prompts = [np.random.default_rng(n).integers(0, 256, n).tolist() for n in (60, 110, 17)]
        s = Sequences(target, 190, 3, history=history_spec([policy]), backend="reference", companions={"draft": draft})
        s.prefill(prompts, [24, 30, 28])
        return s

    return build


def made(name, controller, period, **more):
    whole = {"controller": controller, **SOURCES[name]}
    return policy_from_mapping({**whole, "verify_kv": {**whole["verify_kv"], "full_period": period, **more}})


def outcome(s, policy):
    decoding = Decoding(s, policy, Sampling(), [0, 1, 2])
    if s.graphs.enabled:
        s.graphs.decodings.append(decoding)
    rounds = list(decoding.rounds())
    return [list(t) for t in s.tokens], [(r.mode, r.k.tolist(), r.accepted.tolist()) for r in rounds]


@pytest.mark.parametrize("period", [0, 3])
@pytest.mark.parametrize("name", SOURCES)
def test_captured_rounds_are_the_plain_calls_rounds(sharing, make, monkeypatch, name, period):
    monkeypatch.setattr(KVCache, "width", lambda self, block_tokens: self.capacity_tokens)  # as on a GPU
    controllers = (FIXED, RATE) if period else (RATE,)
    for controller in (FIXED,) if name == "heads" else controllers:
        policy = made(name, controller, period)
        s = make(policy)
        want = outcome(s, policy)
        assert {mode for mode, _, _ in want[1]} == ({"partial", "full"} if period else {"partial"})
        s.graphs = sharing(s)
        monkeypatch.setattr(Decoding, "_may_run_ahead", lambda self: False)
        for _ in range(2):  # the second time a new decoding finds everything captured
            s.rewind()
            assert outcome(s, policy) == want


@pytest.mark.parametrize(
    ("name", "period", "more"),
    [*((name, period, {}) for name in ("recent", "history", "hybrid", "page_bound") for period in (0, 3)),
     ("page_bound", 50, {"budget": 112, "buffer": 13})],
)  # fmt: skip
def test_rounds_started_before_the_last_one_is_read(sharing, make, monkeypatch, name, period, more):
    """Only rounds that must know what there is to correct, or whether the buffer is full, wait for it."""
    policy = made(name, FIXED, period, **more)
    s = make(policy)
    monkeypatch.setattr(KVCache, "width", lambda self, block_tokens: self.capacity_tokens)  # as on a GPU
    want = outcome(s, policy)
    s.graphs = sharing(s)
    monkeypatch.setattr(ModelDrafter, "_catch_up", None)
    s.rewind()
    decoding = Decoding(s, policy, Sampling(), [0, 1, 2])
    s.graphs.decodings.append(decoding)
    ahead = []
    may = decoding._may_run_ahead
    monkeypatch.setattr(decoding, "_may_run_ahead", lambda: ahead.append(may()) or ahead[-1])
    rounds = list(decoding.rounds())
    assert [list(t) for t in s.tokens] == want[0]
    assert [(r.mode, r.k.tolist(), r.accepted.tolist()) for r in rounds] == want[1]
    assert any(ahead)
    assert period == 0 or not all(ahead[:9])
    assert not more or {r.mode for r in rounds} == {"full", "partial"}
