"""What partial verification selects, against a plain statement of every source's rule, ties included."""

import numpy as np
import pytest
import torch

from specdial.engine.drafters.model import ModelDrafter
from specdial.engine.history import HistorySpec
from specdial.engine.key_scores import Chooser, LastQueries, recent_keys
from specdial.engine.loop import Decoding
from specdial.engine.sampling import Sampling
from specdial.engine.sequences import Sequences
from specdial.policies.errors import UserError
from specdial.policies.schema import ScoringHeads, VerifyKV, policy_from_mapping

BASE = {"mode": "partial", "full_period": 0, "sink": 2, "recent": 3}
HEADS = ScoringHeads(target=((1, 0), (1, 3), (2, 1)), draft=((0, 1), (2, 2)))
PROMPTS = [np.random.default_rng(n).integers(0, 256, n).tolist() for n in (70, 31, 4, 1)]


@pytest.fixture(scope="module")
def decoder(tiny_model):
    return tiny_model("llama", head_dim=64).decoder


@pytest.fixture(scope="module")
def s(decoder):
    made = Sequences(decoder, 100, len(PROMPTS), history=HistorySpec(8, 1), backend="reference")
    made.prefill(PROMPTS, [20] * len(PROMPTS))
    return made


def protected(length, sink, recent):
    return set(range(min(sink, length))) | set(range(max(length - recent, 0), length))


def best(scores, taken, wanted, length):
    """The `wanted` highest-scored keys that are not taken; ties go to the lowest index."""
    left = sorted((n for n in range(length) if n not in taken), key=lambda n: (-scores[n], n))
    return set(left[: max(wanted, 0)])


def expected_keys(source, length, history, lookahead, *, budget, m):
    chosen = protected(length, BASE["sink"], BASE["recent"])
    if source == "recent":
        return chosen
    if source in ("lookahead", "hybrid"):
        chosen |= best(lookahead, chosen, m if source == "hybrid" else budget - len(chosen), length)
    if source in ("history", "hybrid"):
        chosen |= best(history, chosen, budget - len(chosen), length)
    return chosen


def found_keys(selection, b, length):
    assert selection.tail_start.tolist()[b] == length
    used = selection.indices[:, b, :, : int(selection.counts[b])]
    assert (used == used[:1, :1]).all(), "one selection for all layers and heads"
    keys = used[0, 0].tolist()
    assert keys == sorted(set(keys))
    return set(keys)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    ("source", "m"), [("recent", 0), ("history", 0), ("lookahead", 0), *(("hybrid", m) for m in (0, 3, 7))]
)
def test_every_source_follows_its_rule(s, monkeypatch, source, m, ties):
    random = np.random.default_rng(m)
    S, B = s.cache.capacity_tokens, s.batch
    draw = random.random(5 * B * S)
    values = (np.floor(3 * draw) if ties else draw).astype(np.float32).reshape(5, B, S)
    history, steps = values[0], values[1:]
    k = torch.tensor([4, 2, 0, 1])
    budget = 12
    kv = {**BASE, "source": source} | ({"scope": "model", "budget": budget} if source != "recent" else {})
    queries = LastQueries(s, HEADS)
    monkeypatch.setattr(queries, "scores", lambda: torch.from_numpy(history))
    choose = Chooser(s, VerifyKV(**kv, lookahead_tokens=m), lookahead=torch.from_numpy(steps), queries=queries)
    selection = choose(k)
    for b, length in enumerate(s.cache.host_lengths.tolist()):
        lookahead = steps[: int(k[b]), b].sum(axis=0)
        expected = expected_keys(source, length, history[b], lookahead, budget=budget, m=m)
        assert found_keys(selection, b, length) == expected


@pytest.mark.parametrize(("m", "same_as"), [(0, "history"), (7, "lookahead")])
def test_the_ends_of_hybrid_are_history_and_lookahead(s, m, same_as):
    lookahead = torch.rand(3, s.batch, s.cache.capacity_tokens, generator=torch.Generator().manual_seed(1))
    kv = {**BASE, "scope": "model", "budget": 12}
    k = torch.tensor([3, 2, 1, 3])
    queries = LastQueries(s, HEADS)
    queries.start()
    hybrid, other = (
        Chooser(s, VerifyKV(**kv, **changes), lookahead=lookahead, queries=queries)(k)
        for changes in ({"source": "hybrid", "lookahead_tokens": m}, {"source": same_as})
    )
    assert torch.equal(hybrid.counts, other.counts)
    for b, count in enumerate(hybrid.counts.tolist()):
        assert torch.equal(hybrid.indices[:, b, :, :count], other.indices[:, b, :, :count])


@pytest.mark.parametrize("scope", ["kv_head", "layer", "model"])
def test_windowed_history_adds_up_what_shares_a_selection(s, scope):
    chosen = Chooser(s, VerifyKV(**BASE, budget=12, scope=scope), lookahead=None, queries=None)(torch.zeros(s.batch))
    scores = s.history.scores().double()  # [L, B, Hk, S]
    L, _, Hk, _ = scores.shape
    for b, length in enumerate(s.cache.host_lengths.tolist()):
        for layer in range(L):
            for head in range(Hk):
                part = {"kv_head": scores[layer, b, head], "layer": scores[layer, b].sum(0)}
                own = part.get(scope, scores[:, b].sum((0, 1))).numpy()
                taken = protected(length, 2, 3)
                expected = taken | best(own, taken, 12 - len(taken), length)
                assert set(chosen.indices[layer, b, head, : int(chosen.counts[b])].tolist()) == expected


def slow_attention(q, keys):
    """Softmax weights of one query [D] over keys [n, D]."""
    return torch.softmax((keys.double() @ q.double()) * q.shape[0] ** -0.5, dim=0)


def head_queries(decoder, text, layer):
    """Queries and keys of one layer over a whole text, by the plain pass: [T, H, D], [T, Hk, D]."""
    seen = {}

    def attend(index, q, k, v):
        seen[index] = q[0], k[0]
        G = q.shape[2] // k.shape[2]
        keys, values = (x.transpose(1, 2).repeat_interleave(G, dim=1) for x in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), keys, values, is_causal=True
        ).transpose(1, 2)

    tokens = torch.tensor([text])
    decoder.forward(tokens, torch.arange(len(text))[None], attend)
    return seen[layer]


def expected_history(decoder, text):
    """Of the row before the pending token, over everything up to itself."""
    total = torch.zeros(len(text) - 1, dtype=torch.float64)
    for layer, head in HEADS.target:
        q, keys = head_queries(decoder, text[:-1], layer)
        G = q.shape[1] // keys.shape[1]
        total += slow_attention(q[-1, head], keys[:, head // G])
    return total


def test_history_by_heads_is_the_attention_of_the_last_committed_row(decoder):
    """At the start of decoding, after full rounds, and after a full round that recomputed."""
    kv = {**BASE, "full_period": 3, "scope": "model", "budget": 12}
    policy = policy_from_mapping(
        {
            "drafter": {"kind": "lookup"},
            "controller": {"kind": "fixed", "k": 3},
            "verify_kv": kv,
            "scoring_heads": {"target": [list(head) for head in HEADS.target]},
        }
    )
    s = Sequences(decoder, 120, 2, history=None, backend="reference")
    s.prefill(PROMPTS[:2], [30, 30])
    decoding = Decoding(s, policy, Sampling(), [0, 1])
    decoding.queries.start()
    compared = 0
    for number in range(7):
        if number % 3 == 0 and not s.done.any():
            scores = decoding.queries.scores()
            for b, text in enumerate(s.tokens):
                expected = expected_history(decoder, text)
                assert torch.allclose(scores[b, : len(expected)].double(), expected, atol=2e-4)
                compared += 1
        if not s.done.all():
            decoding.decode_round()
    assert compared >= 4


def test_lookahead_is_the_attention_of_the_draft_models_steps(decoder, tiny_model):
    draft = tiny_model("llama", head_dim=64, seed=3).decoder
    s = Sequences(decoder, 120, 2, history=None, backend="reference", companions={"small": draft})
    s.prefill(PROMPTS[:2], [30, 30])
    drafter = ModelDrafter(s, "small", heads=HEADS.by_layer("draft"), most_drafts=3)
    s.turn += 1
    drafter.prepare(np.array([3, 3]))
    steps, token, drafted = drafter.begin(3), s.pending.clone(), [list(t) for t in s.tokens]
    for depth in range(3):
        token = steps.step(depth, token).token
        for b, text in enumerate(drafted):
            total = torch.zeros(len(text), dtype=torch.float64)
            for layer, head in HEADS.draft:
                q, keys = head_queries(draft, text, layer)
                total += slow_attention(q[-1, head], keys[:, head // (q.shape[1] // keys.shape[1])])
            assert torch.allclose(drafter.lookahead.scores[depth, b, : len(text)].double(), total, atol=2e-4)
            text.append(int(token[b]))


@pytest.mark.parametrize(
    ("scope", "bound", "rows"),
    [("kv_head", "quest", "mean"), ("layer", "quest", "last"), ("kv_head", "specpv", "mean"),
     ("kv_head", "specpv", "max"), ("layer", "specpv", "last")],
)  # fmt: skip
def test_page_bound_follows_its_bound_by_the_rounds_queries(s, scope, bound, rows):
    """Whole pages only; of the rows that count the mean, largest or last one, and of the group's heads the mean."""
    kv = {"mode": "partial", "full_period": 0, "source": "page_bound", "page": 16, "sink": 1, "recent": 1}
    policy = policy_from_mapping(
        {
            "drafter": {"kind": "lookup"},
            "controller": {"kind": "fixed", "k": 3},
            "verify_kv": {**kv, "budget": 48, "scope": scope, "bound": bound, "rows": rows},
        }
    )
    s.rewind()
    verification = Decoding(s, policy, Sampling(), [0, 1, 2, 3]).verifications[0]
    pages = verification.summaries[0]
    pages.update(s.cache.capacity_tokens)
    c = s.decoder.config
    q = torch.randn(s.batch, 4, c.heads, c.head_dim, generator=torch.Generator().manual_seed(2))
    k = torch.tensor([3, 1, 0, 2])
    selection = verification._by_pages(1, q, k + 1)
    for b, length in enumerate(s.cache.host_lengths.tolist()):
        whole = length // 16
        assert selection.tail_start.tolist()[b] == whole * 16
        scores, counted, group = np.zeros((c.kv_heads, whole)), int(k[b]) + 1, c.heads // c.kv_heads
        for own in range(c.kv_heads):
            for page in range(whole):
                keys = s.cache.k[1, b, own, page * 16 : page * 16 + 16]
                queries = q[b, :counted, own * group : (own + 1) * group]  # [T, G, D]
                high, low = queries * keys.amax(0), queries * keys.amin(0)
                promised = torch.maximum(high, low).sum(-1)
                if bound == "specpv":
                    promised = torch.maximum(high.sum(-1), low.sum(-1))
                by_row = promised.mean(1)  # [T]
                scores[own, page] = {"mean": by_row.mean(), "max": by_row.max(), "last": by_row[-1]}[rows]
        for head in range(c.kv_heads):
            own = scores[head] if scope == "kv_head" else scores.sum(0)
            taken = protected(whole, 1, 1)
            expected = taken | best(own, taken, 3 - len(taken), whole)
            assert set(selection.indices[0, b, head, : int(selection.counts[b])].tolist()) == expected


@pytest.mark.parametrize(("sink", "recent"), [(2, 3), (0, 4), (4, 0), (0, 1), (200, 200)])
def test_recent_keys(sink, recent):
    lengths = torch.tensor([0, 1, 4, 5, 6, 50])
    indices, counts = recent_keys(lengths, sink, recent, 64)
    for b, length in enumerate(lengths.tolist()):
        keys = indices[b, 0, : int(counts[b])].tolist()
        assert keys == sorted(protected(length, sink, recent))


def test_heads_that_a_model_lacks_are_refused_before_decoding(s):
    policy = policy_from_mapping(
        {
            "drafter": {"kind": "lookup"},
            "controller": {"kind": "fixed", "k": 3},
            "verify_kv": {"mode": "partial", "full_period": 0, "scope": "model"},
            "scoring_heads": {"target": [[3, 0]]},
        }
    )
    with pytest.raises(UserError, match=r"scoring_heads.target\[0\] is \[3, 0\], .* has 3 layers of 4 heads"):
        Decoding(s, policy, Sampling(), [0, 1, 2, 3])


def test_a_head_dimension_that_sparse_attention_lacks_is_refused(tiny_model):
    s = Sequences(tiny_model("llama").decoder, 100, 1, history=None, backend="reference")
    s.prefill(PROMPTS[:1], [8])
    policy = policy_from_mapping(
        {
            "drafter": {"kind": "lookup"},
            "controller": {"kind": "fixed", "k": 3},
            "verify_kv": {"mode": "partial", "source": "recent", "full_period": 0},
        }
    )
    with pytest.raises(UserError, match="partial verification takes head dimensions"):
        Decoding(s, policy, Sampling(), [0])
