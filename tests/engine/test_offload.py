"""Keys in host memory: decoding equals decoding with keys on the device, token for token and key for key.

On a CPU the host's memory is the device's, but layers pass through the same two buffers, and rows go home the same way.
"""

import numpy as np
import pytest
import torch

from specdial.engine.job import history_spec
from specdial.engine.loop import Decoding
from specdial.engine.sampling import Sampling
from specdial.engine.sequences import Sequences
from specdial.policies.schema import plain_policy, policy_from_mapping

pytestmark = pytest.mark.usefixtures("one_thread")
KEPT = {"mode": "partial", "budget": 6, "sink": 1, "recent": 3, "refresh": "full"}
PAGES = {**KEPT, "budget": 48, "page": 16}
HEADS = {"target": [[1, 0], [1, 3], [2, 1]], "draft": [[0, 1], [2, 2]]}
MODEL = {"drafter": {"kind": "model", "model": "small"}}
LOOKUP = {"drafter": {"kind": "lookup"}}
SELF = {"draft_kv": {"budget": 40, "sink": 2, "recent": 8}}
ADAPTIVE = {"controller": {"kind": "entropy", "threshold": 0.1, "k_max": 5}}
POLICIES = {
    "plain": None,
    "sparse_self": SELF,
    "sparse_self, adaptive": {**SELF, **ADAPTIVE},
    "sparse_self, pages": {"draft_kv": {"budget": 48, "sink": 16, "recent": 16, "page": 16}},
    "recent": {"verify_kv": {**KEPT, "source": "recent", "budget": 512, "full_period": 4}, **LOOKUP},
    "history": {"verify_kv": {**KEPT, "full_period": 4}, **MODEL},
    "history, full": {"verify_kv": {**KEPT, "full_period": 1}, **MODEL},
    "history pages": {"verify_kv": {**PAGES, "full_period": 4}, **MODEL, **ADAPTIVE},
    "heads": {
        "verify_kv": {**KEPT, "scope": "model", "full_period": 3},
        "scoring_heads": {"target": HEADS["target"]},
        **LOOKUP,
    },
    "hybrid": {
        "verify_kv": {**KEPT, "source": "hybrid", "scope": "model", "lookahead_tokens": 1, "full_period": 4},
        "scoring_heads": HEADS,
        **MODEL,
    },
    "page_bound": {"verify_kv": {**PAGES, "source": "page_bound", "full_period": 4}, **MODEL},
}  # fmt: skip


def policy(name):
    parts = POLICIES[name]
    whole = {"controller": {"kind": "fixed", "k": 3}, **(parts or {})}
    return plain_policy() if parts is None else policy_from_mapping(whole)


@pytest.fixture(scope="module")
def decoders(tiny_model):
    target, draft = (tiny_model("llama", head_dim=64, max_position_embeddings=4096).decoder for _ in range(2))
    for decoder in (target, draft):
        for layer in decoder.layers:
            layer.qkv.mul_(2.0)
    for layer in draft.layers[1:]:
        layer.down.mul_(0.9)
    return target, draft


def decoded(decoders, policy, where, lengths, limits):
    """Tokens, what rounds said, and the sequences; decoded twice, the second time after a rewind."""
    target, draft = decoders
    prompts = [np.random.default_rng(seed).integers(0, 256, n).tolist() for seed, n in enumerate(lengths)]
    s = Sequences(
        target, max(lengths) + max(limits) + 20, len(lengths), history=history_spec([policy]), backend="reference",
        companions={"small": draft}, kv_where=where,
    )  # fmt: skip
    s.prefill(prompts, limits)
    found = []
    for _ in range(2):
        s.rewind()
        rounds = Decoding(s, policy, Sampling(), list(range(s.batch))).rounds()
        said = [(r.mode, r.rounds_since_full, r.k.tolist(), r.accepted.tolist()) for r in rounds]
        found.append(([list(t) for t in s.tokens], said))
    assert found[0] == found[1]
    return *found[0], s


@pytest.mark.parametrize("name", POLICIES)
def test_tokens_rounds_and_keys_are_those_of_keys_on_the_device(decoders, name):
    """Keys as far as a full round saw to them: what partial ones leave since then is not at home."""
    one = policy(name)
    tokens, rounds, s = decoded(decoders, one, "device", (40, 90, 17), [20, 26, 14])
    other, same, hosted = decoded(decoders, one, "host", (40, 90, 17), [20, 26, 14])
    assert other == tokens
    assert same == rounds
    modes = {mode for mode, *_ in rounds}
    assert modes == ({"full"} if one.lossless else {"full", "partial"})
    for b, n in enumerate(s.cache.host_lengths if one.lossless else s.prompt_tokens - 1):
        assert torch.equal(hosted.cache.k[:, b, :, :n], s.cache.k[:, b, :, :n])
        assert torch.equal(hosted.cache.v[:, b, :, :n], s.cache.v[:, b, :, :n])
    moved_us, waited_us = hosted.cache.transfer_us()
    assert 0 < moved_us == waited_us
