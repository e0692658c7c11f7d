"""An EAGLE head computes what its papers' formulas say, restated plainly; as a drafter it changes no token."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import chisquare

from specdial.engine import tree_acceptance
from specdial.engine.cache import KVCache
from specdial.engine.loop import Decoding
from specdial.engine.models.eagle import EagleHead, HeadConfig, HeadWeights, default_taps, head_shapes
from specdial.engine.sampling import Sampling
from specdial.engine.sequences import Sequences
from specdial.policies.errors import UserError
from specdial.policies.schema import plain_policy, policy_from_mapping

LIMITS = [30, 40, 25]
CONTROLLERS = {
    "fixed": {"kind": "fixed", "k": 3},
    "confidence": {"kind": "confidence", "threshold": 0.02, "k_max": 5},
    "rate": {"kind": "rate", "gamma": 0.1},
    "lag": {"kind": "entropy", "threshold": 0.1, "lag": 1},
}


def prompts(*lengths):
    return [np.random.default_rng(seed).integers(0, 256, tokens).tolist() for seed, tokens in enumerate(lengths)]


PROMPTS = prompts(60, 131, 17)


def random_head(decoder, *, draft_vocab=200, seed=0, agreeing=False):
    """agreeing: its attention and MLP add little to the last tap, which the target's own head then reads."""
    c = decoder.config
    layer = replace(c, layers=1, qkv_bias=False, qk_norm=False, tied_embeddings=False)
    config = HeadConfig(layer, c.hidden, draft_vocab, default_taps(c.layers))
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: 1 + 0.2 * torch.randn(shape, generator=generator)
        if name.endswith("norm")
        else torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        for name, shape in head_shapes(config).items()
    }
    ids = torch.randperm(c.vocab, generator=generator)[:draft_vocab].sort().values
    if agreeing:
        weights["lm_head"] = decoder.head[ids]
        weights["norm"] = decoder.norm
    return EagleHead(config, HeadWeights(**weights), ids, decoder.embedding)


def rms(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x, position, theta):
    """RoPE of one row [heads, D] in complex numbers: dimension i with i + D/2."""
    half = x.shape[-1] // 2
    angle = position * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    z = torch.complex(x[:, :half].double(), x[:, half:].double()) * torch.polar(torch.ones(half).double(), angle)
    return torch.cat([z.real, z.imag], -1)


def restated(head, taps, tokens, drafts):
    """Logits after rows of taps [n, R, H] with next tokens [R], then after each of `drafts`: row by row, in float64."""
    c = head.config.layer
    w = {name: getattr(head.weights, name).double() for name in HeadWeights.__slots__}
    group, keys, values, logits = c.heads // c.kv_heads, [], [], []
    hidden = None
    for position, token in enumerate([*tokens, *drafts]):
        if position < len(tokens):
            hidden = w["fc"] @ torch.cat(list(taps[:, position].double()))
        embedded = head.embedding[token].double()
        x = torch.cat([rms(embedded, w["input_norm"], c.norm_eps), rms(hidden, w["hidden_norm"], c.norm_eps)])
        q, k, v = (w["qkv"] @ x).split([c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim])
        q = turned(q.view(c.heads, -1), position, c.rope.theta)
        keys.append(turned(k.view(c.kv_heads, -1), position, c.rope.theta))
        values.append(v.view(c.kv_heads, -1))
        K, V = torch.stack(keys), torch.stack(values)  # [S, Hk, D]
        mixed = []
        for h in range(c.heads):
            weights = torch.softmax(K[:, h // group] @ q[h] / c.head_dim**0.5, 0)
            mixed.append(weights @ V[:, h // group])
        hidden = hidden + w["out"] @ torch.cat(mixed)
        gate, up = (w["gate_up"] @ rms(hidden, w["mlp_norm"], c.norm_eps)).chunk(2)
        hidden = hidden + w["down"] @ (F.silu(gate) * up)
        logits.append(w["lm_head"] @ rms(hidden, w["norm"], c.norm_eps))
    return torch.stack(logits[len(tokens) - 1 :])


def target_taps(decoder, tokens, layers, attend):
    at = torch.arange(len(tokens))[None]
    return decoder.forward_with_taps(torch.tensor([tokens]), at, attend, layers)[1][:, 0]


def sequences(decoder, head, *, prompts=PROMPTS, limits=LIMITS, stop=frozenset()):
    capacity = max(len(p) for p in prompts) + max(limits) + 60
    heads = {} if head is None else {"head": head}
    s = Sequences(decoder, capacity, len(prompts), history=None, backend="reference", heads=heads)
    s.prefill(prompts, limits, stop)
    return s


def policy(controller="fixed", *, tree=None, **more):
    drafter = {"kind": "eagle", "model": "head", "tree": tree}
    return policy_from_mapping({"drafter": drafter, "controller": CONTROLLERS[controller], **more})


def decode(s, policy, **sampling):
    s.rewind()
    rounds = list(Decoding(s, policy, Sampling(**sampling), list(range(s.batch))).rounds())
    return s.outputs, rounds


@pytest.fixture(scope="module")
def decoder(tiny_model):
    return tiny_model("llama", head_dim=64).decoder


@pytest.fixture(scope="module")
def head(decoder):
    return random_head(decoder, agreeing=True, draft_vocab=260)


@pytest.fixture(scope="module")
def plain(decoder):
    return decode(sequences(decoder, None), plain_policy())[0]


def test_default_taps_lie_within_the_model():
    assert default_taps(32) == (2, 16, 29)
    assert default_taps(3) == (2, 1, 0)
    assert default_taps(1) == (0, 0, 0)


SILENT = {"from_context_tokens": 136, "to_context_tokens": 150, "overrides": {"controller": {"kind": "none"}}}
ALL_PAGES = {"mode": "partial", "source": "page_bound", "page": 16, "budget": 400, "full_period": 4, "refresh": "full"}
ALL_KEYS = {"mode": "partial", "source": "recent", "sink": 1, "recent": 400, "full_period": 3}


@pytest.mark.parametrize("more", [{"cells": [SILENT]}, {"verify_kv": ALL_KEYS}], ids=["gaps", "partial"])
def test_drafts_are_those_of_the_plain_restatement_however_rounds_fell(decoder, head, make_attend, more):
    """Every draft of every round, from the committed tokens alone: between rounds without drafts, and where partial
    verification, here over every key, has full rounds that begin with rows committed before."""
    s = sequences(decoder, head)
    decoding = Decoding(s, policy(**more), Sampling(), [0, 1, 2])
    compared = 0
    while not s.done.all():
        before = [list(t) for t in s.tokens]
        round_ = decoding.decode_round()
        for b in np.flatnonzero(round_.active & (round_.k > 0)):
            drafts = round_.drafts[b, : round_.k[b]].tolist()
            taps = target_taps(decoder, before[b][:-1], head.config.taps, make_attend())
            expected = restated(head, taps, before[b][1:], drafts[:-1])
            assert head.token_ids[expected.argmax(-1)].tolist() == drafts
            compared += len(drafts)
    assert compared > 30


def best_tree(head, taps, committed, *, width, nodes, depth):
    """{path: sum of log-probabilities} of the nodes that a tree should have, path by path from the restatement."""
    proposed, beam = {}, {(): 0.0}
    for _ in range(depth):
        found = {}
        for path, total in beam.items():
            sure = torch.log_softmax(restated(head, taps, committed, path)[-1], -1).topk(width)
            for value, place in zip(sure.values.tolist(), sure.indices.tolist()):
                found[(*path, int(head.token_ids[place]))] = total + value
        proposed |= found
        beam = dict(sorted(found.items(), key=lambda item: -item[1])[:width])
    return dict(sorted(proposed.items(), key=lambda item: -item[1])[:nodes])


def test_a_tree_holds_the_best_paths_of_the_plain_restatement(decoder, head, make_attend):
    """At the start and after rounds, whose keys and hidden states are those of an accepted path."""
    s = sequences(decoder, head, prompts=PROMPTS[2:] + PROMPTS[:1], limits=[9, 9])
    decoding = Decoding(s, policy(tree={"width": 3, "nodes": 9}), Sampling(), [0, 1])
    deeper = 0
    for _ in range(3):
        for b, tree in enumerate(trees(decoding, 3)):
            taps = target_taps(decoder, s.tokens[b][:-1], head.config.taps, make_attend())
            want = best_tree(head, taps, s.tokens[b][1:], width=3, nodes=9, depth=3)
            assert set(tree) == set(want)
            deeper += sum(len(path) > 1 for path in tree)
        decoding.decode_round()
    assert deeper > 10


def trees(decoding, depth):
    """The paths of each sequence's next tree; nothing changes by asking."""
    tree = decoding.drafters[0].grow(depth, decoding.state.signals)
    assert (tree.parents[:, 1:] < torch.arange(1, tree.tokens.shape[1])).all(), "a parent comes first"
    ancestors = tree.branches().ancestors
    assert torch.equal(ancestors.sum(2) - 1, tree.depths)
    for b, tokens in enumerate(tree.tokens.tolist()):
        yield [tuple(tokens[i] for i in row.nonzero()[1:, 0].tolist()) for row in ancestors[b, 1:]]


TREES = {
    "wide": ({"width": 8, "nodes": 30}, {}),
    "unpruned": ({"width": 2, "nodes": 60}, {}),
    "corrected": ({"width": 4, "nodes": 12}, {"verify_kv": {"mode": "partial", "source": "recent", "full_period": 1}}),
    "gaps": ({"width": 4, "nodes": 12}, {"cells": [SILENT]}),
    "partial over all keys": ({"width": 4, "nodes": 12}, {"verify_kv": ALL_KEYS}),
    "partial over all pages": ({"width": 4, "nodes": 9}, {"verify_kv": ALL_PAGES}),
    "beside chains": (
        {"width": 4, "nodes": 12},
        {"cells": [{"overrides": {"drafter": {"tree": None}}, "to_context_tokens": 150}]},
    ),
}


@pytest.mark.parametrize("name", TREES)
def test_greedy_tokens_of_trees_equal_plain_ones(decoder, head, plain, name):
    tree, more = TREES[name]
    chosen = policy(tree=tree, **more)
    assert chosen.lossless or name.startswith("partial")
    tokens, rounds = decode(sequences(decoder, head), chosen)
    assert tokens == plain
    accepted = sum(int(r.accepted.sum()) for r in rounds)
    assert accepted > 0
    for r in rounds:
        for b in np.flatnonzero(r.active):
            assert r.drafts[b, : r.accepted[b]].tolist() == r.emitted[b][: r.accepted[b]]
    if name == "wide":
        chain = decode(sequences(decoder, head), policy())[1]
        assert accepted > sum(int(r.accepted.sum()) for r in chain), "one draft is accepted less often than one of 8"


def test_a_trees_rounds_keep_the_logits_of_what_they_emit(decoder, head):
    s = sequences(decoder, head, limits=[9, 9, 9])
    chosen = policy(tree={"width": 8, "nodes": 30}, verify_kv=ALL_PAGES)
    decoding = Decoding(s, chosen, Sampling(), [0, 1, 2], keep_logits=True)
    while not s.done.all():
        played = decoding.decode_round()
        for b, emitted in enumerate(played.emitted):
            assert decoding.logits[b, : len(emitted)].argmax(-1).tolist() == emitted


FEW_PAGES = {"mode": "partial", "source": "page_bound", "page": 16, "sink": 1, "budget": 48, "full_period": 3}


@pytest.mark.parametrize("more", [{}, {"verify_kv": FEW_PAGES}], ids=["full", "partial"])
def test_a_tree_of_width_one_is_the_chain(decoder, head, plain, more):
    chain, tree = (decode(sequences(decoder, head), policy(tree=t, **more)) for t in (None, {"width": 1, "nodes": 8}))
    assert (chain[0] == plain) == (not more)
    assert tree[0] == chain[0]
    played = [[(r.k.tolist(), r.accepted.tolist(), r.emitted) for r in rounds] for _, rounds in (chain, tree)]
    assert played[0] == played[1]
    assert np.allclose(*(rounds[0].signals.entropy_nats for _, rounds in (chain, tree)), atol=1e-4)


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_greedy_tokens_equal_plain_ones(decoder, head, plain, controller):
    tokens, rounds = decode(sequences(decoder, head), policy(controller))
    assert tokens == plain
    drafted, accepted = (sum(int(getattr(r, name).sum()) for r in rounds) for name in ("k", "accepted"))
    assert 0 < accepted < drafted
    assert not rounds[-1].active.all()


def test_a_stop_token_ends_a_sequence_inside_accepted_drafts(decoder, head, plain):
    for at, tree in ((0, None), (5, None), (21, None), (5, {"width": 8, "nodes": 40})):
        stop = plain[1][at]
        expected = [t[: t.index(stop) + 1] if stop in t else t for t in plain]
        assert decode(sequences(decoder, head, stop=frozenset({stop})), policy(tree=tree))[0] == expected


def test_a_second_run_and_copies_draft_the_same(decoder, head):
    s = sequences(decoder, head)
    first, again = decode(s, policy())[1], decode(s, policy())[1]
    assert [r.accepted.tolist() for r in first] == [r.accepted.tolist() for r in again]
    one = sequences(decoder, head, prompts=PROMPTS[1:2], limits=LIMITS[1:2])
    copies = one.repeated(2)
    for length in (131, 100):
        copies.hold(PROMPTS[1][:length], limit=12)
        alone = sequences(decoder, head, prompts=[PROMPTS[1][:length]], limits=[12])
        drafts = [
            [r.drafts[0, : r.k[0]].tolist() for r in Decoding(x, policy(), Sampling(), [0, 1][: x.batch]).rounds()]
            for x in (copies, alone)
        ]
        assert drafts[0] == drafts[1]


def test_sampled_drafts_lie_in_the_reduced_vocabulary(decoder, head):
    s = sequences(decoder, head)
    _, rounds = decode(s, policy(), temperature=1.2, seed=3)
    drafts = np.concatenate([r.drafts[b, : r.k[b]] for r in rounds for b in np.flatnonzero(r.active)])
    known = set(head.token_ids.tolist())
    assert set(drafts.tolist()) <= known
    outside = [token for token in range(decoder.config.vocab) if token not in known]
    probabilities = s.state(3).draft_probs
    assert not probabilities[..., outside].any()
    assert torch.allclose(probabilities.sum(-1), torch.ones(()))
    assert any(t in outside for tokens in s.tokens for t in tokens), "the target itself may write what is never drafted"


def test_a_prompt_of_one_token_is_refused(decoder, head):
    s = sequences(decoder, head, prompts=[[1], [1, 2, 3]], limits=[4, 4])
    with pytest.raises(UserError, match="starts from two tokens"):
        Decoding(s, policy(), Sampling(), [0, 1])


def test_a_tree_wider_than_the_heads_vocabulary_is_refused(decoder):
    s = sequences(decoder, random_head(decoder, draft_vocab=5), prompts=[[1, 2]], limits=[4])
    with pytest.raises(UserError, match=r"drafter\.tree\.width is 10, the head drafts 5 tokens; use at most 5"):
        Decoding(s, policy(tree={}), Sampling(), [0])


def test_the_folder_of_the_head_must_be_named():
    with pytest.raises(UserError, match=r"drafter\.model is missing; name the folder"):
        policy_from_mapping({"drafter": {"kind": "eagle"}, "controller": CONTROLLERS["fixed"]})


@pytest.mark.parametrize(
    ("most_rows", "tree"), [(64, None), (0, None), (64, {"width": 4, "nodes": 9}), (0, {"width": 3})]
)
def test_fused_passes_leave_a_head_what_plain_ones_do(decoder, head, monkeypatch, most_rows, tree):
    """Few rows and many, on references: the same drafts, accepted alike."""
    s = sequences(decoder, head)
    tokens, rounds = decode(s, policy(tree=tree))
    monkeypatch.setattr("specdial.engine.sequences.MAX_ROWS", most_rows)
    monkeypatch.setattr(KVCache, "on_gpu", property(lambda cache: True))
    again, fused = decode(s, policy(tree=tree))
    assert again == tokens
    assert [r.drafts.tolist() for r in fused] == [r.drafts.tolist() for r in rounds]
    assert sum(int(r.accepted.sum()) for r in rounds) > 0


def pvalue(tokens, p):
    """Of tokens drawn from p [V], rare ones taken together."""
    expected, counts = len(tokens) * p, np.bincount(tokens, minlength=len(p))
    often = expected >= 5
    table = np.array([[*x[often], x[~often].sum()] for x in (counts, expected)])
    table = table[:, table[1] > 1e-9]
    return chisquare(table[0], table[1] * (table[0].sum() / table[1].sum())).pvalue


@pytest.mark.parametrize(("lanes", "broken"), [(240, False), (120, True)])
def test_sampled_trees_write_what_the_target_writes(decoder, head, full_logits, monkeypatch, lanes, broken):
    """Every token given those before it, over many copies of a prompt and several rounds; a sharper draw fails."""
    temperature = 0.25
    if broken:
        draw = tree_acceptance.draw
        monkeypatch.setattr(tree_acceptance, "draw", lambda p, uniform: draw(p.pow(1.5), uniform))
    s = sequences(decoder, head, prompts=PROMPTS[2:], limits=[3]).repeated(lanes)
    s.hold(PROMPTS[2], limit=3)
    sampling, trees = Sampling(temperature=temperature, seed=5), policy(tree={"width": 40, "nodes": 48})
    accepted = [int(r.accepted.sum()) for r in Decoding(s, trees, sampling, list(range(lanes))).rounds()]
    assert sum(accepted) > lanes // 8
    written, found = np.array(s.tokens)[:, len(PROMPTS[2]) :], []
    for n in range(3):
        prefixes, which, counts = np.unique(written[:, :n], axis=0, return_inverse=True, return_counts=True)
        for number in np.argsort(-counts)[:4]:
            if counts[number] >= 20:
                text = torch.tensor([[*PROMPTS[2], *prefixes[number].tolist()]])
                p = torch.softmax(full_logits(decoder, text)[0, -1].double() / temperature, -1).numpy()
                found.append(pvalue(written[which.ravel() == number, n], p))
    assert len(found) >= 2
    assert (min(found) > 0.001) != broken
