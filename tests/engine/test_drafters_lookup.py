"""Prompt lookup against a plain statement of its rule, and sampled decoding with drafts that are certain."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2_contingency

from specdial.engine.drafters.lookup import NgramIndex
from specdial.engine.loop import Decoding
from specdial.engine.sampling import Sampling
from specdial.engine.sequences import Sequences
from specdial.policies.schema import plain_policy, policy_from_mapping

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def by_rule(tokens, longest, most):
    """The rule as one would say it: longest run first, latest earlier place, copied token by token."""
    for n in range(longest, 0, -1):
        for end in range(len(tokens) - 2, n - 2, -1):
            if tokens[end - n + 1 : end + 1] == tokens[len(tokens) - n :]:
                text = list(tokens)
                for i in range(most):
                    text.append(text[end + 1 + i])
                return text[len(tokens) :]
    return []


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=6), st.integers(1, 5), st.integers(1, 9))
def test_the_index_gives_what_the_rule_says_as_the_text_grows(text, growth, longest, most):
    index = NgramIndex(longest)
    tokens = list(text)
    assert index.continuation(tokens, most) == by_rule(tokens, longest, most)
    for new in growth:
        tokens += new
        assert index.continuation(tokens, most) == by_rule(tokens, longest, most)


@pytest.mark.parametrize(
    ("text", "longest", "most", "expected"),
    [
        ([5, 1, 2, 6, 1, 2, 7, 1, 2], 2, 2, [7, 1]),  # the latest place wins
        ([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 3, 1, [9]),  # a longer run wins over a later place
        ([4, 1, 2, 1, 2], 2, 5, [1, 2, 1, 2, 1]),  # a repetition goes on
        ([1, 1], 3, 3, [1, 1, 1]),
        ([1, 2, 3], 3, 4, []),
        ([1], 3, 4, []),
    ],
)
def test_examples(text, longest, most, expected):
    assert NgramIndex(longest).continuation(text, most) == expected == by_rule(text, longest, most)


def sequences(model, prompts, limits):
    longest = max(len(p) for p in prompts) + max(limits)
    s = Sequences(model.decoder, longest + 20, len(prompts), history=None, backend="reference")
    s.prefill(prompts, limits)
    return s


LOOKUP = policy_from_mapping({"drafter": {"kind": "lookup", "ngram": 2}, "controller": {"kind": "fixed", "k": 3}})


def test_lanes_draft_as_many_as_they_found_and_signals_are_zero(tiny_model):
    """One lane repeats itself, the other has never seen its last token before."""
    s = sequences(tiny_model("llama"), [[7, 8, 9] * 9, list(range(30))], [5, 5])
    round_ = Decoding(s, LOOKUP, Sampling(), [0, 1]).decode_round()
    assert round_.k.tolist() == [3, 0]
    assert round_.drafts[0].tolist() == [7, 8, 9]
    assert not np.any([round_.signals.entropy_nats, round_.signals.top1_prob, round_.signals.margin])
    assert round_.draft_us == 0.0


def test_signals_of_another_policy_do_not_stay(tiny_model):
    """Policies with drafts of one length share the buffers of a round."""
    s = sequences(tiny_model("llama"), [[7, 8, 9] * 9], [5])
    state = s.state(LOOKUP.k_max)
    state.signals.fill_(3.0)
    round_ = Decoding(s, LOOKUP, Sampling(), [0]).decode_round()
    assert not np.any(round_.signals.top1_prob)


LANES = 1500


def sampled_pairs(model, policy, seed):
    """Counts of the second and third new token over many lanes of one prompt, [V, V]; drafts accepted, and drafted."""
    one = sequences(model, [np.random.default_rng(0).integers(0, 11, 60).tolist()], [3])
    s = one.repeated(LANES)
    s.hold(one.tokens[0], limit=3)
    rounds = list(Decoding(s, policy, Sampling(temperature=0.9, seed=seed), list(range(LANES))).rounds())
    counts = np.zeros((12, 12))
    for tokens in s.tokens:
        counts[tokens[-2], tokens[-1]] += 1
    return counts, sum(int(r.accepted.sum()) for r in rounds), sum(int(r.k.sum()) for r in rounds)


def test_sampled_lookup_has_the_plain_distribution(tiny_model):
    model = tiny_model("llama", vocab_size=12, eos_token_id=11)
    plain, _, _ = sampled_pairs(model, plain_policy(), seed=1)
    ours, accepted, drafted = sampled_pairs(model, LOOKUP, seed=2)
    assert 0 < accepted < drafted
    a, b = plain.ravel(), ours.ravel()
    big = a + b >= 8
    table = np.array([[*x[big], x[~big].sum()] for x in (a, b)])
    assert chi2_contingency(table[:, table.sum(axis=0) > 0]).pvalue > 0.001
