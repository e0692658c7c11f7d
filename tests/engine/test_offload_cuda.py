"""Keys in host memory on a CUDA device: tokens are those of keys on the device, and only rounds that move keys wait."""

import numpy as np
import pytest
import torch

from specdial.engine import prefill
from specdial.engine.job import history_spec
from specdial.engine.loop import Decoding
from specdial.engine.pinned_memory import PinnedMemory
from specdial.engine.sampling import Sampling
from specdial.engine.sequences import Sequences
from specdial.policies.schema import plain_policy, policy_from_mapping

pytestmark = pytest.mark.gpu
KEPT = {"mode": "partial", "budget": 6, "sink": 1, "recent": 3, "refresh": "full", "full_period": 4}
PAGES = {**KEPT, "budget": 48, "page": 16}
MODEL = {"drafter": {"kind": "model", "model": "draft"}}
SELF = {"draft_kv": {"budget": 48, "sink": 16, "recent": 16, "page": 16}}
FIXED, RATE = {"controller": {"kind": "fixed", "k": 3}}, {"controller": {"kind": "rate", "gamma": 0.1, "k_max": 4}}
POLICIES = {
    "plain": None,
    "sparse_self": {**SELF, **FIXED},
    "sparse_self, rate": {**SELF, **RATE},
    "history, P 1": {"verify_kv": {**KEPT, "full_period": 1}, **MODEL, **FIXED},
    "history, P 4": {"verify_kv": KEPT, **MODEL, **FIXED},
    "history, rate": {"verify_kv": PAGES, **MODEL, **RATE},
    "heads": {
        "verify_kv": {**KEPT, "scope": "model"},
        "scoring_heads": {"target": [[1, 0], [2, 1]]},
        "drafter": {"kind": "lookup"},
        **FIXED,
    },
    "page_bound": {"verify_kv": {**PAGES, "source": "page_bound"}, **MODEL, **FIXED},
}


def policy(name):
    return plain_policy() if POLICIES[name] is None else policy_from_mapping(POLICIES[name])


@pytest.fixture(scope="module")
def decoders(cuda_pair):
    return cuda_pair(sharpened=True)


@pytest.fixture
def sequences(decoders, monkeypatch):
    """sequences(policy, where): three ragged prompts, read in several chunks."""
    monkeypatch.setattr(prefill, "CUDA_CHUNK_TOKENS", 32)

    def make(policy, where):
        target, draft = decoders
        s = Sequences(
            target, 260, 3, history=history_spec([policy]), backend="triton", companions={"draft": draft},
            kv_where=where,
        )  # fmt: skip
        prompts = [np.random.default_rng(n).integers(0, 256, n).tolist() for n in (60, 131, 17)]
        s.prefill(prompts, [40, 60, 48])
        return s

    return make


def decode(s, policy):
    s.rewind()
    rounds = Decoding(s, policy, Sampling(), [0, 1, 2]).rounds()
    said = [(r.mode, r.k.tolist(), r.accepted.tolist()) for r in rounds]
    return [list(t) for t in s.tokens], said


def test_locked_memory_is_the_same_bytes_on_both_sides(decoders):
    memory = PinnedMemory(1 << 20, pieces=4)
    device = memory.on_device()
    assert device.is_cuda
    assert device.data_ptr() == memory.host.data_ptr()
    memory.host.copy_(torch.randint(0, 256, (1 << 20,), dtype=torch.uint8))
    for there, here in zip(device.chunk(4), memory.host.chunk(4)):  # no copy crosses from piece to piece
        assert torch.equal(there.cpu(), here)
    device[12345:12400] = 7
    torch.cuda.synchronize()
    assert (memory.host[12345:12400] == 7).all()


@pytest.mark.parametrize("name", POLICIES)
def test_tokens_and_keys_are_those_of_keys_on_the_device(sequences, name):
    """Twice: the second time everything is captured. Drafts that another kernel makes may differ in a rounding."""
    one = policy(name)
    s, hosted = sequences(one, "device"), sequences(one, "host")
    for layer in range(s.decoder.config.layers):
        for b, n in enumerate(s.prompt_tokens - 1):
            assert torch.equal(hosted.cache.k[layer, b, :, :n], s.cache.k[layer, b, :, :n])
            assert torch.equal(hosted.cache.v[layer, b, :, :n], s.cache.v[layer, b, :, :n])
    tokens, rounds = decode(s, one)
    for _ in range(2):
        found, said = decode(hosted, one)
        assert found == tokens
        assert said == rounds or name.startswith("sparse_self")
    moved_us, waited_us = hosted.cache.transfer_us()
    assert moved_us > 0
    assert waited_us >= 0  # the device's clock is coarse beside such a wait


@pytest.mark.parametrize("name", ["history, P 4", "heads"])
def test_partial_rounds_wait_for_nothing(sequences, name):
    one = policy(name)
    s = sequences(one, "host")
    decode(s, one)
    s.rewind()
    decoding = Decoding(s, one, Sampling(), [0, 1, 2])
    decoding.decode_round()
    for _ in range(2):
        torch.cuda.set_sync_debug_mode("error")
        try:
            launched = decoding._launch()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert launched.plan.partial
        assert not launched.plan.chooses
        decoding._finish(launched)
