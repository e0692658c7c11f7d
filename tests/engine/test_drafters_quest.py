"""Quest as a drafter: the pages it reads are those whose summaries promise its query most."""

import numpy as np
import pytest
import torch

from specdial.engine.drafters import make_drafter, quest
from specdial.engine.loop import Decoding
from specdial.engine.sampling import Sampling
from specdial.engine.sequences import Sequences
from specdial.policies.errors import UserError
from specdial.policies.schema import policy_from_mapping

PAGE = 16
PROMPTS = [np.random.default_rng(n).integers(0, 256, n).tolist() for n in (60, 200, 5)]
LIMITS = [30, 40, 20]


def policy(budget, **more):
    kv = {"budget": budget, "sink": 1, "recent": 16, "page": PAGE}
    return policy_from_mapping(
        {"drafter": {"kind": "quest"}, "controller": {"kind": "fixed", "k": 4}, "draft_kv": kv, **more}
    )


@pytest.fixture(scope="module")
def decoder(tiny_model):
    return tiny_model("llama", head_dim=64).decoder


def sequences(decoder, prompts=PROMPTS, limits=LIMITS):
    capacity = max(len(p) for p in prompts) + max(limits) + 20
    s = Sequences(decoder, capacity, len(prompts), history=None, backend="reference")
    s.prefill(prompts, limits)
    return s


@pytest.mark.parametrize("budget", [256, 1 << 20])
def test_a_budget_of_everything_accepts_everything(decoder, budget):
    s = sequences(decoder)
    rounds = list(Decoding(s, policy(budget), Sampling(), [0, 1, 2]).rounds())
    assert sum(int(r.k.sum()) for r in rounds) > 20
    assert all((r.accepted == r.k).all() for r in rounds)


def test_summaries_are_those_of_the_committed_keys_after_every_round(decoder):
    """Rounds without drafts, a rewind and another policy's drafts in between."""
    silent = {"overrides": {"controller": {"kind": "none"}}}
    one = policy(64, cells=[{"from_context_tokens": 206, "to_context_tokens": 225, **silent}])
    s = sequences(decoder)
    for _ in range(2):
        decoding = Decoding(s, one, Sampling(), [0, 1, 2])
        drafter = decoding.drafters[1]
        checked = 0
        while not s.done.all():
            lengths = s.cache.lengths.tolist()
            if decoding.decode_round().k.any():
                checked += 1
                for b, n in enumerate(lengths):
                    for page in range(n // PAGE):
                        keys = s.cache.k[:, b, :, page * PAGE : (page + 1) * PAGE]  # [L, Hk, P, D]
                        assert torch.equal(drafter.summaries.low[:, b, :, page], keys.amin(dim=2))
                        assert torch.equal(drafter.summaries.high[:, b, :, page], keys.amax(dim=2))
        assert checked > 5
        s.rewind()


@pytest.mark.parametrize("scope", ["kv_head", "layer"])
def test_every_step_reads_the_pages_of_the_largest_bounds(decoder, monkeypatch, scope):
    """Each step's choice, worked out from the query and the keys themselves, page by page."""
    s = sequences(decoder)
    one = policy(64)
    kv = {"budget": 64, "sink": 1, "recent": 16, "page": PAGE, "scope": scope}
    one = policy(64, draft_kv=kv)
    seen = []
    genuine = quest.sparse_attention

    def watched(q, keys, values, indices, counts, **settings):
        seen.append((q.clone(), keys.clone(), indices.clone(), counts.tolist(), settings["tail_start"].tolist()))
        return genuine(q, keys, values, indices, counts, **settings)

    monkeypatch.setattr(quest, "sparse_attention", watched)
    drafter = make_drafter(s, one)
    s.turn += 1
    drafter.prepare(np.array([4, 4, 4]))
    draft = drafter.begin(4)
    for depth in range(2):
        draft.step(depth, s.pending)
    group = decoder.config.heads // decoder.config.kv_heads
    assert len(seen) == 2 * decoder.config.layers
    lengths = [len(p) - 1 for p in PROMPTS]
    for q, keys, indices, counts, tail in seen:
        assert tail == [n // PAGE * PAGE for n in lengths]
        for b, n in enumerate(lengths):
            pages = n // PAGE
            assert counts[b] == min(4, pages)
            if pages <= 4:
                assert indices[b, :, : counts[b]].tolist() == [list(range(pages))] * indices.shape[1]
                continue
            bounds = np.zeros((indices.shape[1], pages))
            for h in range(indices.shape[1]):
                for page in range(pages):
                    block = keys[b, h, page * PAGE : (page + 1) * PAGE]
                    for query in q[b, 0, h * group : (h + 1) * group]:
                        best = torch.maximum(query * block.amin(dim=0), query * block.amax(dim=0))
                        bounds[h, page] += float(best.sum()) / group
            if scope == "layer":
                bounds[:] = bounds.sum(axis=0)
            bounds[:, [0, pages - 1]] = np.inf  # sink and recent
            for h in range(indices.shape[1]):
                assert indices[b, h].tolist() == sorted(np.argsort(-bounds[h])[:4].tolist())


def test_verification_overwrites_what_drafts_left_in_the_cache(decoder):
    s, plain = sequences(decoder), sequences(decoder)
    list(Decoding(s, policy(64), Sampling(), [0, 1, 2]).rounds())
    none = policy_from_mapping({"drafter": {"kind": "quest"}, "draft_kv": {"page": PAGE}})
    list(Decoding(plain, none, Sampling(), [0, 1, 2]).rounds())
    assert s.tokens == plain.tokens
    for b, n in enumerate(s.cache.host_lengths):
        assert torch.allclose(s.cache.k[:, b, :, :n], plain.cache.k[:, b, :, :n], atol=1e-4)


def test_what_it_cannot_do_is_refused(decoder, tiny_model):
    shared = {"budget": 64, "sink": 1, "recent": 16, "page": PAGE, "scope": "model"}
    with pytest.raises(UserError, match="layer by layer"):
        make_drafter(sequences(decoder), policy(64, draft_kv=shared))
    with pytest.raises(UserError, match="head dimensions"):
        make_drafter(sequences(tiny_model("llama").decoder), policy(64))
