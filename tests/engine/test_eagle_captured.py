"""An EAGLE head under captured graphs, played on a CPU as in test_drafters_captured, and through the kernels.

A pass that is new runs twice inside `at_rest`; afterwards the first function of its key is called, as a captured graph
goes on reading the buffers that it was captured with.
"""

import numpy as np
import pytest
import torch

from specdial.engine.cache import KVCache
from specdial.engine.eagle_training import new_head
from specdial.engine.loop import Decoding
from specdial.engine.sampling import Sampling
from specdial.engine.sequences import Sequences
from specdial.policies.schema import policy_from_mapping

FIXED, RATE = {"kind": "fixed", "k": 4}, {"kind": "rate", "gamma": 0.1, "k_max": 5}
FEW_PAGES = {"mode": "partial", "source": "page_bound", "page": 16, "sink": 1, "budget": 48, "full_period": 3}
SILENT = {"from_context_tokens": 200, "to_context_tokens": 210, "overrides": {"controller": {"kind": "none"}}}
CASES = {
    "fixed": {"controller": FIXED},
    "rate": {"controller": RATE},
    "gaps": {"controller": FIXED, "cells": [SILENT]},
    "tree": {"controller": FIXED, "tree": {"width": 4, "nodes": 14}},
    "partial tree": {"controller": FIXED, "tree": {"width": 3, "nodes": 8}, "verify_kv": FEW_PAGES},
}


@pytest.fixture
def s(tiny_model):
    """The head is an untrained one that drafts by the last tap, which is the target's last layer's input."""
    decoder = tiny_model("llama", head_dim=64).decoder
    head = new_head(decoder, torch.arange(260), seed=0)
    head.weights.fc.zero_()
    head.weights.fc[:, :64] = torch.eye(64)
    prompts = [np.random.default_rng(n).integers(0, 256, n).tolist() for n in (80, 190, 17)]
    made = Sequences(decoder, 290, 3, history=None, backend="reference", heads={"head": head})
    made.prefill(prompts, [40, 60, 50])
    return made


def policy(name):
    case = dict(CASES[name])
    drafter = {"kind": "eagle", "model": "head", "tree": case.pop("tree", None)}
    return policy_from_mapping({"drafter": drafter, **case})


def shorten(s, name):
    """Rounds of trees take longest."""
    if "tree" in name:
        s.limits //= 3
        s.rewind()


def outcome(s, policy, sampling):
    rounds = list(Decoding(s, policy, sampling, [0, 1, 2]).rounds())
    return [list(t) for t in s.tokens], [(r.k.tolist(), r.accepted.tolist(), r.drafts.tolist()) for r in rounds]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=5)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", [name for name in CASES if name != "tree"])
def test_captured_rounds_are_the_plain_calls_rounds(played, s, monkeypatch, name, sampling):
    shorten(s, name)
    want = outcome(s, policy(name), sampling)
    s.graphs = played(s, frozen=name != "partial tree")  # a drafter that is gone knows no plan of later rounds
    monkeypatch.setattr(Decoding, "_may_run_ahead", lambda self: False)
    for _ in range(2):  # the second time a new drafter finds everything captured
        s.rewind()
        found = outcome(s, policy(name), sampling)
        assert found[0] == want[0]
        assert [r[:2] for r in found[1]] == [r[:2] for r in want[1]]
    assert sum(sum(accepted) for _, accepted, _ in want[1]) > 0


@pytest.mark.parametrize("name", ["fixed", "tree"])
def test_rounds_started_before_the_last_one_is_read(played, s, monkeypatch, name):
    shorten(s, name)
    want = outcome(s, policy(name), Sampling())
    s.graphs = played(s)
    monkeypatch.setattr(KVCache, "width", lambda self, block_tokens: self.capacity_tokens)  # as on a GPU
    s.rewind()
    decoding = Decoding(s, policy(name), Sampling(), [0, 1, 2])
    assert decoding._may_run_ahead()
    rounds = list(decoding.rounds())
    assert [list(t) for t in s.tokens] == want[0]
    assert [(r.k.tolist(), r.accepted.tolist()) for r in rounds] == [r[:2] for r in want[1]]


def test_drafts_in_the_interpreter(in_interpreter):
    in_interpreter(__file__, "interpreted_eagle.py")
