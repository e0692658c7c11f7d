"""Exactness of the acceptance rule on its own, against known distributions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from specdial.engine.sampling import (
    Sampling,
    Verdict,
    choose,
    distribution,
    draw,
    generators,
    verify_greedy,
    verify_sampled,
)

V, LANES = 7, 20_000
GREEDY, WARM = Sampling(), Sampling(temperature=1.0, seed=3)


def probabilities(seed):
    return torch.softmax(2.0 * torch.randn(3, V, generator=torch.Generator().manual_seed(seed)), dim=-1)


def no_residual(drafts, k, draft_probs, target_probs, random):
    """Rejects rightly, but replaces from the target's own distribution."""
    verdict = verify_sampled(drafts, k, draft_probs, target_probs, random)
    return Verdict(verdict.accepted, draw(target_probs[torch.arange(len(k)), verdict.accepted], random), None)


def accept_if_likely(drafts, k, draft_probs, target_probs, random):
    """Accepts a draft whenever the target thinks it more likely than not: wrong."""
    p = target_probs[:, :-1].gather(2, drafts[..., None])[..., 0]
    accepted = (p > 0.3).long().cumprod(1).sum(1)
    return Verdict(accepted, draw(target_probs[torch.arange(len(k)), accepted], random), None)


def first_token_p_value(rule, ks):
    """Chi-square of the first emitted token against the target's distribution, drafts drawn from another one."""
    p, q = probabilities(1), probabilities(2)
    random = generators(WARM, list(range(LANES)))
    k = torch.tensor(ks).repeat(LANES // len(ks))
    drafts = torch.stack([draw(q[i].expand(LANES, V), random) for i in range(2)], dim=1)
    verdict = rule(drafts, k, q[:2].expand(LANES, 2, V), p.expand(LANES, 3, V), random)
    first = torch.where(verdict.accepted > 0, drafts[:, 0], verdict.next_token)
    expected = p[0].double().numpy()
    return chisquare(np.bincount(first.numpy(), minlength=V), LANES * expected / expected.sum()).pvalue


@pytest.mark.parametrize("ks", [[2], [1], [0], [0, 1, 2, 2]])
def test_first_token_follows_the_target(ks):
    assert first_token_p_value(verify_sampled, ks) > 0.001


@pytest.mark.parametrize("rule", [no_residual, accept_if_likely])
def test_broken_rules_are_caught(rule):
    assert first_token_p_value(rule, [2]) < 1e-6


def test_accepted_is_limited_by_k_and_certain_when_distributions_agree():
    p = probabilities(5).expand(4, 3, V)
    random = generators(WARM, [0, 1, 2, 3])
    drafts = torch.stack([draw(p[:, i], random) for i in range(2)], dim=1)
    verdict = verify_sampled(drafts, torch.tensor([0, 1, 2, 2]), p[:, :2], p, random)
    assert verdict.accepted.tolist() == [0, 1, 2, 2]
    assert torch.allclose(verdict.accept_prob, torch.ones(4, 2))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 4), st.integers(0, 5), st.integers(0, 10**6))
def test_greedy_acceptance_is_the_leading_run_of_matches(lanes, drafts_count, seed):
    generator = torch.Generator().manual_seed(seed)
    drafts = torch.randint(0, 3, (lanes, drafts_count), generator=generator)
    logits = torch.randn(lanes, drafts_count + 1, 3, generator=generator)
    k = torch.randint(0, drafts_count + 1, (lanes,), generator=generator)
    verdict = verify_greedy(drafts, k, logits)
    for b in range(lanes):
        best = logits[b].argmax(-1).tolist()
        run = 0
        while run < k[b] and drafts[b, run] == best[run]:
            run += 1
        assert verdict.accepted[b] == run
        assert verdict.next_token[b] == best[run]


def test_top_k_and_top_p_keep_the_right_tokens():
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))
    kept = distribution(logits, Sampling(temperature=1.0, top_k=2))
    assert torch.allclose(kept, torch.tensor([[4 / 7, 3 / 7, 0.0, 0.0]]))
    kept = distribution(logits, Sampling(temperature=1.0, top_p=0.65))
    assert torch.allclose(kept, torch.tensor([[4 / 7, 3 / 7, 0.0, 0.0]]))
    kept = distribution(logits, Sampling(temperature=1.0, top_p=0.71))
    assert torch.allclose(kept, torch.tensor([[4 / 9, 3 / 9, 2 / 9, 0.0]]))
    assert distribution(logits, Sampling(temperature=1.0, top_p=0.0)).argmax() == 0


def test_a_tiny_temperature_is_greedy_not_nan():
    p = distribution(torch.tensor([[1.0, 3.0, 2.9]]), Sampling(temperature=1e-40))
    assert p.tolist() == [[0.0, 1.0, 0.0]]


def test_draw_never_gives_a_token_of_probability_zero():
    p = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).expand(4000, 5)
    tokens = draw(p, generators(WARM, list(range(4000))))
    assert set(tokens.tolist()) == {1, 3}


def test_greedy_choice_uses_no_random_numbers():
    tokens, q = choose(torch.tensor([[0.0, 2.0, 1.0]]), GREEDY, [])
    assert tokens.tolist() == [1]
    assert q is None
