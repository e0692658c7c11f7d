"""Exactness of the acceptance rule on its own, against known distributions."""

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from specdial.engine.sampling import (
    Sampling,
    Verdict,
    distribution,
    draw,
    generators,
    uniforms,
    verify_sampled,
)

V, LANES = 7, 20_000
WARM = Sampling(temperature=1.0, seed=3)


def probabilities(seed):
    return torch.softmax(2.0 * torch.randn(3, V, generator=torch.Generator().manual_seed(seed)), dim=-1)


def no_residual(drafts, k, draft_probs, target_probs, u):
    """Rejects rightly, but replaces from the target's own distribution."""
    verdict = verify_sampled(drafts, k, draft_probs, target_probs, u)
    following = draw(target_probs[torch.arange(len(k)), verdict.accepted], u[:, -1])
    return Verdict(verdict.accepted, following, verdict.accept_prob)


def accept_if_likely(drafts, k, draft_probs, target_probs, u):
    """Accepts a draft whenever the target thinks it more likely than not: wrong."""
    p = target_probs[:, :-1].gather(2, drafts[..., None])[..., 0]
    accepted = (p > 0.3).long().cumprod(1).sum(1)
    return Verdict(accepted, draw(target_probs[torch.arange(len(k)), accepted], u[:, -1]), p)


def first_token_p_value(rule, ks):
    """Chi-square of the first emitted token against the target's distribution, drafts drawn from another one."""
    p, q = probabilities(1), probabilities(2)
    u = uniforms(generators(WARM, list(range(LANES))), 5)
    k = torch.tensor(ks).repeat(LANES // len(ks))
    drafts = torch.stack([draw(q[i].expand(LANES, V), u[:, i]) for i in range(2)], dim=1)
    verdict = rule(drafts, k, q[:2].expand(LANES, 2, V), p.expand(LANES, 3, V), u[:, 2:])
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
    u = uniforms(generators(WARM, [0, 1, 2, 3]), 5)
    drafts = torch.stack([draw(p[:, i], u[:, i]) for i in range(2)], dim=1)
    verdict = verify_sampled(drafts, torch.tensor([0, 1, 2, 2]), p[:, :2], p, u[:, 2:])
    assert verdict.accepted.tolist() == [0, 1, 2, 2]
    assert torch.allclose(verdict.accept_prob, torch.ones(4, 2))


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
    tokens = draw(p, uniforms(generators(WARM, list(range(4000))), 1)[:, 0])
    assert set(tokens.tolist()) == {1, 3}


def test_greedy_is_temperature_zero():
    assert Sampling().greedy
    assert not Sampling(temperature=0.1).greedy


@pytest.mark.parametrize("u", [0.0, 0.3, 1.0 - 1e-17, 1.0])
def test_a_token_without_probability_is_never_drawn(u):
    """Nor one past the vocabulary, where rounding puts a uniform at the very top."""
    rows = torch.tensor([[0.0, 0.25, 0.75, 0.0], [1.0, 0.0, 0.0, 0.0], [0.1, 0.2, 0.3, 0.4], [0.0, 0.0, 0.0, 1.0]])
    drawn = draw(rows, torch.full((4,), u, dtype=torch.float64))
    assert (rows[torch.arange(4), drawn] > 0).all()
    if u == 1.0:
        assert drawn.tolist() == [2, 0, 3, 3]
