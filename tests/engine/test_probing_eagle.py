"""Probes that an EAGLE head drafts: its drafts are a lossy decoding's, and nothing of a probe stays with the head."""

import numpy as np
import pytest
import torch

from specdial.engine.cache import KVCache
from specdial.engine.eagle_training import new_head
from specdial.engine.loop import Decoding
from specdial.engine.probing import Probing, _Walk, probe_arms, record_probes
from specdial.engine.sampling import Sampling
from specdial.engine.sequences import Sequences
from specdial.policies.schema import policy_from_mapping

pytestmark = pytest.mark.usefixtures("one_thread")
K, PROMPT, NEW = 3, 90, 40
SPECPV = {"mode": "partial", "source": "page_bound", "page": 16, "refresh": "full", "sink": 16, "recent": 16,
          "full_period": 3}  # fmt: skip
TEXT = np.random.default_rng(1).integers(0, 256, PROMPT + NEW).tolist()


@pytest.fixture(scope="module")
def models(tiny_model):
    """A target whose next token depends on the last one most, and a head that drafts by it, and by all it has read."""
    decoder = tiny_model("llama", head_dim=64).decoder
    for layer in decoder.layers:
        layer.out.mul_(0.5)
        layer.down.mul_(0.5)
    head = new_head(decoder, torch.arange(260), seed=0)
    w, own = head.weights, torch.eye(64)
    w.fc.mul_(0.3)
    w.down.mul_(0.3)
    w.qkv[:, :64], w.out[:, :64] = own.repeat(8, 1), own  # attention to rows of like tokens, their embeddings mixed
    w.qkv[:, 64:] *= 0.1
    w.out[:, 64:] = 0.0
    return decoder, head


def policy(*, k=K, **more):
    drafter = {"kind": "eagle", "model": "head"}
    return policy_from_mapping({"drafter": drafter, "controller": {"kind": "fixed", "k": k}, **more})


def started(models, tokens, limit=NEW):
    decoder, head = models
    s = Sequences(decoder, PROMPT + NEW + 8, 1, history=None, backend="reference", heads={"head": head})
    s.prefill([tokens], [limit])
    return s


def probing(*budgets, places=2, rounds=3):
    return Probing(sources=("page_bound", "recent"), budgets=budgets, rounds=rounds, places=places, k=K)


def decoded(s, policy):
    """The rounds of a decoding, and the tokens it ends with."""
    s.rewind()
    rounds = list(Decoding(s, policy, Sampling(), [0]).rounds())
    return [(r.drafts.tolist(), r.accepted.tolist()) for r in rounds], list(s.tokens[0])


def test_a_budget_that_holds_everything_is_full_verification(models, monkeypatch):
    """To the head too, whose drafts are the same in every round of a probe."""
    drafted, drafts_of = {}, _Walk._drafts

    def watched(walk, decoding, n):
        drafted.setdefault(n, []).append(drafts_of(walk, decoding, n))
        return drafted[n][-1]

    monkeypatch.setattr(_Walk, "_drafts", watched)
    some = probing(4096, places=3)
    s = started(models, TEXT[:PROMPT])
    decoded(s, policy(k=5, verify_kv=SPECPV))
    found = record_probes(s, s.tokens[0], probe_arms(policy(verify_kv=SPECPV), some), some)
    assert len(found["arm"]) == 2 * 3 * some.span_tokens
    assert max(found["kl_nats"]) < 1e-6
    assert all(found["top1_match"])
    assert found["draft_match"] == found["full_match"]
    assert len(drafted) == 3 * some.rounds
    assert all(one == both[0] for both in drafted.values() for one in both), "two arms, and full verification"
    assert len({tuple(both[0]) for both in drafted.values()}) > some.rounds
    for age in (1, 2, 3):
        judged = [match for match, own in zip(found["draft_match"], found["rounds_since_full"]) if own == age]
        assert {True, False} <= set(judged), "some drafts are right, some are wrong"


def keys_of(s, tokens):
    """The head's keys and values of the rows of a text of so many tokens."""
    cache = s.heads["head"].cache
    return torch.stack([cache.k[..., : tokens - 1, :], cache.v[..., : tokens - 1, :]])


@torch.inference_mode()
def test_every_round_of_a_probe_drafts_what_a_lossy_decoding_drafts(models):
    """Of the text that a decoding writes whose drafts are all accepted, and which is never verified in full: there, and
    at a place further on, reached in full and probed by other arms before, which the decoding reaches by prefill."""
    some = probing(48)
    arms = probe_arms(policy(verify_kv=SPECPV), some)
    walk = _Walk(started(models, TEXT[:PROMPT]), TEXT, some)
    for n in (PROMPT, PROMPT + 14):
        walk.advance(n)
        assert torch.allclose(keys_of(walk.s, n), keys_of(started(models, TEXT[:n]), n), atol=1e-5)
        for arm in arms:
            fresh = started(models, TEXT[:n], limit=some.span_tokens)
            decoding = Decoding(fresh, arm, Sampling(), [0], synthetic=(1.0,), keep_logits=True)
            drafts, logits = [], []
            for _ in range(some.rounds):
                drafts.append(decoding.decode_round().drafts[0].tolist())
                logits.append(decoding.logits[0].clone())
            walk.tokens = [*fresh.tokens[0], *TEXT[len(fresh.tokens[0]) :]]
            said = walk.partial_rounds(arm, n)
            assert [own.drafts for own in said] == drafts
            assert all(torch.allclose(own.logits, x, atol=1e-4) for own, x in zip(said, logits))
        walk.tokens = TEXT


@torch.inference_mode()
def test_the_first_round_of_a_probe_drafts_what_decoding_drafts_after_a_full_round(models):
    some = probing(48, rounds=1)
    (arm, _), s = probe_arms(policy(verify_kv=SPECPV), some), started(models, TEXT[:PROMPT])
    rounds = list(Decoding(s, policy(), Sampling(), [0]).rounds())
    text = list(s.tokens[0])
    s.rewind()
    walk, compared = _Walk(s, text, some), 0
    for n, drafts in ((int(r.context_tokens[0]), r.drafts[0].tolist()) for r in rounds):
        if n + some.span_tokens <= len(text):
            walk.advance(n)
            assert walk.partial_rounds(arm, n)[0].drafts == drafts
            compared += 1
    assert compared > 20


@pytest.mark.parametrize("graphs", [False, True], ids=["called", "captured"])
def test_a_probe_leaves_nothing_behind(models, played, graphs, monkeypatch):
    """Neither in the sequences nor in the head's keys: the next probe, and decodings with more drafts, are the same."""
    some = probing(48, 80)
    arms, chosen = probe_arms(policy(verify_kv=SPECPV), some), policy(k=5, **({} if graphs else {"verify_kv": SPECPV}))
    s = started(models, TEXT[:PROMPT])
    if graphs:
        s.graphs = played(s)
        monkeypatch.setattr(KVCache, "width", lambda self, block_tokens: self.capacity_tokens)  # as on a GPU
    before = decoded(s, chosen)
    kept = keys_of(s, PROMPT), s.cache.k[..., : PROMPT - 1, :].clone()
    found = [record_probes(s, before[1], arms, some) for _ in range(2)]
    assert found[0] == found[1]
    assert len(set(found[0]["draft_match"]) - {None}) == 2
    assert found[0]["draft_match"] != found[0]["full_match"], "small budgets decide otherwise"
    assert all(map(torch.equal, kept, (keys_of(s, PROMPT), s.cache.k[..., : PROMPT - 1, :])))
    assert (s.tokens, s.limits.tolist()) == ([TEXT[:PROMPT]], [NEW])
    assert decoded(s, chosen) == before
