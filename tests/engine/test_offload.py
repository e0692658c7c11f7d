"""Keys in host memory: decoding equals decoding with keys on the device, token for token and key for key.

On a CPU the host's memory is the device's, but layers pass through the same two buffers, and rows go home the same way.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from specdial.engine import job, prefill
from specdial.engine.drafters.selection import choose_keys
from specdial.engine.drafters.sparse_self import CompactDraft, HostedDraft
from specdial.engine.eagle_training import new_head
from specdial.engine.graphs import UNCAPTURED
from specdial.engine.loop import Decoding
from specdial.engine.memory import HOST_USED_FRAC, predict, require_host
from specdial.engine.offload import HostCache
from specdial.engine.partial_cache import PartialCache
from specdial.engine.sampling import Sampling
from specdial.engine.sequences import Sequences
from specdial.policies.errors import UserError
from specdial.policies.schema import plain_policy, policy_from_mapping

pytestmark = pytest.mark.usefixtures("one_thread")
HOST = {"kv": {"where": "host"}}
KEPT = {"mode": "partial", "budget": 6, "sink": 1, "recent": 3, "refresh": "full", "full_period": 4}
PAGES = {**KEPT, "budget": 48, "page": 16}
HEADS = {"target": [[1, 0], [1, 3], [2, 1]], "draft": [[0, 1], [2, 2]]}
MODEL = {"drafter": {"kind": "model", "model": "small"}}
LOOKUP = {"drafter": {"kind": "lookup"}}
ADAPTIVE = {"controller": {"kind": "entropy", "threshold": 0.1, "k_max": 4}}
POLICIES = {
    "plain": {"drafter": {"kind": "none"}, "controller": {"kind": "none"}},
    "sparse_self": {"draft_kv": {"budget": 48, "sink": 16, "recent": 16, "page": 16}, **ADAPTIVE},
    "history, P 1": {"verify_kv": {**KEPT, "full_period": 1}, **MODEL},
    "history, P 4": {"verify_kv": KEPT, **MODEL},
    "history by page": {"verify_kv": PAGES, **MODEL, **ADAPTIVE},
    "heads": {
        "verify_kv": {**KEPT, "scope": "model"},
        "scoring_heads": {"target": HEADS["target"]},
        **LOOKUP,
    },
    "hybrid": {
        "verify_kv": {**KEPT, "source": "hybrid", "scope": "model", "lookahead_tokens": 1},
        "scoring_heads": HEADS,
        **MODEL,
    },
    "page_bound": {"verify_kv": {**PAGES, "source": "page_bound"}, **MODEL},
    "eagle": {"verify_kv": KEPT, "drafter": {"kind": "eagle", "model": "head"}},
}


def policy(name, **more):
    return policy_from_mapping({"controller": {"kind": "fixed", "k": 3}, **POLICIES[name], **more})


@pytest.fixture(scope="module")
def models(tiny_model):
    """A target with sharpened attention, and a draft model that agrees with it now and then."""
    target, draft = (tiny_model("llama", head_dim=64) for _ in range(2))
    for model in (target, draft):
        for layer in model.decoder.layers:
            layer.qkv.mul_(2.0)
    for layer in draft.decoder.layers[1:]:
        layer.down.mul_(0.9)
    return target, draft


@pytest.fixture
def sequences(models, monkeypatch):
    """sequences(policy, where): three ragged prompts, the long one in several chunks."""
    monkeypatch.setattr(prefill, "CPU_CHUNK_TOKENS", 32)

    def make(policy, where):
        target, draft = models
        eagle = any(v.drafter.kind == "eagle" for v in policy.variants())
        prompts = [np.random.default_rng(seed).integers(0, 256, n).tolist() for seed, n in enumerate((30, 90, 17))]
        s = Sequences(
            target.decoder, 130, 3, history=job.history_spec([policy]), backend="reference", kv_where=where,
            companions={} if eagle else {"small": draft.decoder},
            heads={"head": new_head(target.decoder, torch.arange(250), seed=0)} if eagle else {},
        )  # fmt: skip
        s.prefill(prompts, [16, 20, 11])
        return s

    return make


def decode(s, policy):
    rounds = Decoding(s, policy, Sampling(), list(range(s.batch))).rounds()
    said = [(r.mode, r.rounds_since_full, r.k.tolist(), r.accepted.tolist()) for r in rounds]
    return [list(t) for t in s.tokens], said


@pytest.mark.parametrize("name", POLICIES)
def test_tokens_rounds_and_keys_are_those_of_keys_on_the_device(sequences, name):
    """Keys as far as a full round saw to them: what partial ones left since then is not at home."""
    one = policy(name)
    s, hosted = sequences(one, "device"), sequences(one, "host")
    tokens, rounds = decode(s, one)
    assert decode(hosted, one) == (tokens, rounds)
    assert {mode for mode, *_ in rounds} == ({"full"} if one.lossless else {"full", "partial"})
    for b, n in enumerate(s.cache.host_lengths if one.lossless else s.prompt_tokens - 1):
        assert torch.equal(hosted.cache.k[:, b, :, :n], s.cache.k[:, b, :, :n])
        assert torch.equal(hosted.cache.v[:, b, :, :n], s.cache.v[:, b, :, :n])
    moved_us, waited_us = hosted.cache.transfer_us()
    assert 0 < moved_us == waited_us


def test_kept_selections_are_not_those_chosen_every_round(sequences):
    kept = policy("history, P 4")
    every = policy("history, P 4", verify_kv={**KEPT, "refresh": "round"})
    assert decode(sequences(kept, "device"), kept) != decode(sequences(every, "device"), every)


@pytest.mark.parametrize("name", ["history by page", "page_bound"])
def test_only_full_rounds_and_those_after_them_touch_host_memory(sequences, monkeypatch, name):
    """And rounds that touch it are not captured. The second decoding finds every buffer as the first one left it."""
    one = policy(name)
    s = sequences(one, "host")
    touched = []
    for method in ("_copy_rows", "gather", "write_behind"):
        original = getattr(HostCache, method)
        monkeypatch.setattr(HostCache, method, lambda *a, f=original, **kw: touched.append(1) or f(*a, **kw))
    found = []
    for _ in range(2):
        s.rewind()
        decoding = Decoding(s, one, Sampling(), [0, 1, 2])
        while not s.done.all():
            touched.clear()
            played = decoding.decode_round()
            may = played.rounds_since_full < 2
            assert bool(touched) == may
            assert (UNCAPTURED in decoding._verify_key) == may
        found.append([list(t) for t in s.tokens])
    assert found[0] == found[1]


def test_captured_rounds_are_the_plain_calls_rounds(sequences, played, monkeypatch):
    """Those that read whole layers are called, never practised: the others find what they left."""

    class Hosting(played):
        called = 0

        def run(self, key, function, *inputs):
            if UNCAPTURED in key:
                self.called += 1
                return function(*inputs)
            return super().run(key, function, *inputs)

    monkeypatch.setattr(HostCache, "width", lambda self, block_tokens: self.capacity_tokens)  # as on a GPU
    monkeypatch.setattr(Decoding, "_may_run_ahead", lambda self: False)
    one = policy("history by page")
    s = sequences(one, "host")
    want = decode(s, one)
    s.graphs = Hosting(s, frozen=False)
    for _ in range(2):
        s.rewind()
        assert decode(s, one) == want
    touching = sum(since_full < 2 for _, since_full, *_ in want[1])
    assert s.graphs.called == 2 * touching
    assert any("verify" in key for key in s.graphs.first)


def test_gathered_drafts_are_the_compact_ones(sequences):
    one = policy("sparse_self")
    s = sequences(one, "host")
    chosen = choose_keys(s.history, s.cache.lengths, one.draft_kv)
    compact = CompactDraft(s, chosen, s.cache.lengths.clone(), steps=3)
    hosted = HostedDraft(s, s.cache, chosen)
    tokens = s.pending.clone()
    for depth in range(3):
        want, got = compact.step(depth, tokens), hosted.step(depth, tokens)
        assert torch.allclose(got.logits, want.logits, atol=1e-4)
        tokens = want.token


def test_predicted_device_bytes_are_those_of_the_buffers(models):
    """Two layers, and what partial rounds read; the rest is the host's."""
    target, _ = models
    one = policy("history by page", **HOST, **LOOKUP, controller={"kind": "fixed", "k": 3})
    demand = job.memory_demand(target, 400, 2, [one, plain_policy()])
    s = job.empty_sequences(target, 400, 2, [one])
    c, capacity = target.config, s.cache.capacity_tokens
    assert s.cache.device_bytes == 4 * 2 * c.kv_heads * capacity * c.head_dim * 4
    s.prefill([[1, 2, 3] * 20] * 2, [4, 4])
    Decoding(s, one, Sampling(), [0, 1])
    (held,) = (kept for kept in s._lasting.values() if isinstance(kept, PartialCache))
    assert predict(demand).kv_cache == s.cache.device_bytes + held.k.nbytes + held.v.nbytes
    assert (
        require_host(demand, 1 << 40)
        == s.cache.k.nbytes + s.cache.v.nbytes
        == 2 * c.layers * 2 * c.kv_heads * (capacity * c.head_dim * 4)
    )


def test_too_little_host_memory_is_one_line_with_the_longest_that_fits(models, monkeypatch):
    target, _ = models
    one = policy("plain", **HOST)
    demand = job.memory_demand(target, 480, 2, [one])
    free = int(require_host(demand, 1 << 40) * 0.6)
    with pytest.raises(UserError, match=r"^keys of batch 2 at 480 tokens take 3 MB of host memory") as caught:
        require_host(demand, free)
    assert "\n" not in str(caught.value)
    longest = int(str(caught.value).rsplit(" ", 1)[1])
    assert require_host(job.memory_demand(target, longest, 2, [one]), free) <= HOST_USED_FRAC * free
    with pytest.raises(UserError):
        require_host(job.memory_demand(target, longest + 1, 2, [one]), free)
    monkeypatch.setattr(job, "free_host_bytes", lambda root: free if root == Path("/") else 0)
    monkeypatch.setattr(job, "Sequences", None)  # calling it would be another error
    with pytest.raises(UserError, match=f"lower context and new tokens together to {longest}"):
        job.empty_sequences(target, 480, 2, [one])


def test_policies_of_one_job_agree_on_where():
    host, device = policy("sparse_self", **HOST), policy("sparse_self")
    assert job.kv_where([host, plain_policy()]) == "host"
    assert job.kv_where([plain_policy()]) == job.kv_where([device, plain_policy()]) == "device"
    with pytest.raises(UserError, match=r"policies with different kv.where \['device', 'host'\]"):
        job.kv_where([host, device])
