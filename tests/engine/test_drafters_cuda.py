"""Every drafter on a CUDA device: captured float32 rounds give the plain greedy tokens, policy after policy."""

import numpy as np
import pytest
import torch

from specdial.engine.job import history_spec
from specdial.engine.loop import Decoding
from specdial.engine.sampling import Sampling
from specdial.engine.sequences import Sequences
from specdial.policies.schema import plain_policy, policy_from_mapping

pytestmark = pytest.mark.gpu
KV = {"budget": 64, "sink": 2, "recent": 16}
DRAFTERS = {
    "lookup": {"drafter": {"kind": "lookup"}},
    "model": {"drafter": {"kind": "model", "model": "draft"}},
    "windowed": {"drafter": {"kind": "model", "model": "draft", "window": 40}},
    "paged": {"drafter": {"kind": "model", "model": "draft", "budget": 96}},
    "quest": {"drafter": {"kind": "quest"}, "draft_kv": {**KV, "page": 16}},
    "streaming": {"draft_kv": {"budget": 40, "sink": 4, "recent": 36, "refresh_rounds": 0}},
    "snap": {"draft_kv": {**KV, "window": 64, "refresh_rounds": 0}},
    "every-3": {"draft_kv": {**KV, "refresh_rounds": 3}},
    "decay": {"draft_kv": {**KV, "decay": 0.8}},
    "fraction": {"draft_kv": {**KV, "budget": 512, "budget_frac": 0.3}},
}
CONTROLLERS = [{"kind": "fixed", "k": 4}, {"kind": "rate", "gamma": 0.1}, {"kind": "confidence", "lag": 1}]
SILENT = {"from_context_tokens": 137, "to_context_tokens": 160, "overrides": {"controller": {"kind": "none"}}}


@pytest.fixture(scope="module")
def decoders(cuda_pair):
    return cuda_pair(sharpened=False)


def sequences(decoders, policies):
    prompts = [np.random.default_rng(n).integers(0, 256, n).tolist() for n in (60, 131, 17)]
    target, draft = decoders
    s = Sequences(
        target, 260, 3, history=history_spec(policies), backend="triton", companions={"draft": draft}
    )  # fmt: skip
    s.prefill(prompts, [40, 60, 48])
    return s


def decode(s, policy):
    s.rewind()
    rounds = list(Decoding(s, policy, Sampling(), [0, 1, 2]).rounds())
    return [list(t) for t in s.tokens], rounds


@pytest.mark.parametrize("name", DRAFTERS)
def test_lossless_with_fixed_and_adaptive_controllers(decoders, name):
    controllers = CONTROLLERS[:1] if name == "lookup" else CONTROLLERS
    policies = [policy_from_mapping({"controller": c, **DRAFTERS[name]}) for c in controllers]
    policies.append(policy_from_mapping({"controller": CONTROLLERS[0], "cells": [SILENT], **DRAFTERS[name]}))
    s = sequences(decoders, policies)
    plain, _ = decode(s, plain_policy())
    drafted = accepted = 0
    for policy in [*policies, policies[0]]:  # the first one again, all of it captured by a drafter that is gone
        tokens, rounds = decode(s, policy)
        assert tokens == plain, policy.controller
        drafted += sum(int(r.k.sum()) for r in rounds)
        accepted += sum(int(r.accepted.sum()) for r in rounds)
    assert 0 < accepted < drafted


def test_the_target_as_its_own_draft_model_is_always_right(decoders):
    """Fixed rounds run ahead of the host; the keys of the draft model must follow all the same."""
    s = sequences((decoders[0], decoders[0]), [])
    policies = [policy_from_mapping({"controller": c, **DRAFTERS["model"]}) for c in CONTROLLERS]
    policies.append(policy_from_mapping({"controller": CONTROLLERS[0], "cells": [SILENT], **DRAFTERS["model"]}))
    for policy in policies:
        _, rounds = decode(s, policy)
        assert sum(int(r.k.sum()) for r in rounds) > 0
        assert all((r.accepted == r.k).all() for r in rounds)


def test_quest_over_every_page_is_always_right(decoders):
    s = sequences(decoders, [])
    kv = {"budget": 512, "sink": 2, "recent": 16, "page": 16}
    policy = policy_from_mapping({"drafter": {"kind": "quest"}, "controller": CONTROLLERS[0], "draft_kv": kv})
    _, rounds = decode(s, policy)
    assert all((r.accepted == r.k).all() for r in rounds)


@pytest.mark.parametrize("name", ["lookup", "model", "quest"])
def test_no_step_of_a_captured_round_waits_for_the_device(decoders, name):
    policy = policy_from_mapping({"controller": CONTROLLERS[0], **DRAFTERS[name]})
    s = sequences(decoders, [policy])
    decode(s, policy)
    s.rewind()
    decoding = Decoding(s, policy, Sampling(), [0, 1, 2])
    decoding.decode_round()
    torch.cuda.set_sync_debug_mode("error")
    try:
        launched = decoding._launch()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert decoding._finish(launched).active.any()
