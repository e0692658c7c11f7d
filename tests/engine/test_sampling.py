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
from specdial.policies.errors import UserError
from specdial.policies.fields import parse

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


@pytest.mark.parametrize("temperature", [1e-40, 1e-46, 1e-300])
def test_a_tiny_temperature_is_greedy_not_nan(temperature):
    p = distribution(torch.tensor([[1.0, 3.0, 2.9]]), Sampling(temperature=temperature))
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


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("temperature", 0.0, 100.0), ("top_p", 0.0, 1.0), ("top_k", 0, None), ("seed", 0, 2**32 - 1)],
)
def test_settings_of_sampling_are_bounded(name, low, high):
    beyond = 1e-6 if isinstance(low, float) else 1
    assert Sampling() == Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0)
    for bound, way in ((low, -beyond), (high, beyond)):
        if bound is not None:
            assert getattr(parse(Sampling, {name: bound}), name) == bound
            with pytest.raises(UserError, match=name):
                parse(Sampling, {name: bound + way})


def test_every_sequence_of_every_seed_has_random_numbers_of_its_own():
    """The numbers that outputs of earlier versions were drawn with."""
    first = [g.initial_seed() for g in generators(Sampling(seed=3), [0, 5])]
    assert first == [3_000_009, 3_000_014]
    u = uniforms(generators(WARM, [4, 7]), 3)
    assert (u.shape, u.dtype) == ((2, 3), torch.float64)
    assert torch.equal(u[1:], uniforms(generators(WARM, [7]), 3))
    assert not torch.equal(u[0], u[1])


def test_restricting_to_all_tokens_restricts_nothing():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    plain = distribution(logits, Sampling(temperature=2.0))
    assert torch.allclose(plain, torch.softmax(logits / 2.0, dim=-1))
    for top_k in (0, 3, 4):
        assert torch.equal(distribution(logits, Sampling(temperature=2.0, top_k=top_k)), plain)
    assert distribution(logits, Sampling(temperature=2.0, top_k=1)).tolist() == [[1.0, 0.0, 0.0]]
    tied = torch.tensor([[1.0, 1.0, 0.0]])
    assert distribution(tied, Sampling(temperature=1.0, top_k=1)).tolist() == [[0.5, 0.5, 0.0]]


def test_acceptance_by_hand():
    """p of 0.2 against q of 0.8: accepted below a quarter, else replaced by what the target has more of."""
    target = torch.tensor([[[0.2, 0.5, 0.3], [0.1, 0.1, 0.8]]]).expand(4, 2, 3)
    draft = torch.tensor([[[0.8, 0.1, 0.1]]]).expand(4, 1, 3)
    u = torch.tensor([[0.2, 0.05], [0.3, 0.1], [0.3, 0.9], [0.3, 0.1]], dtype=torch.float64)
    verdict = verify_sampled(torch.zeros(4, 1, dtype=torch.int64), torch.tensor([1, 1, 1, 0]), draft, target, u)
    assert verdict.accept_prob.tolist() == [[pytest.approx(0.25)]] * 4
    assert verdict.accepted.tolist() == [1, 0, 0, 0]
    # Row 1 of the target; twice the residual 0, 0.4, 0.2; the target itself where nothing was drafted.
    assert verdict.next_token.tolist() == [0, 1, 2, 0]
    same = verify_sampled(
        torch.zeros(1, 1, dtype=torch.int64), torch.ones(1), target[:1, :1], target[:1], u[1:2] * 0 + 0.999
    )
    assert same.accepted.tolist() == [1]
    none = verify_sampled(
        torch.zeros(1, 0, dtype=torch.int64), torch.zeros(1), draft[:1, :0], target[:1, :1], u[:1, :1]
    )
    assert (none.accepted.tolist(), none.next_token.tolist()) == ([0], [1])


def test_a_second_draft_is_replaced_by_what_its_own_row_lacks():
    target = torch.tensor([[[0.9, 0.1, 0.0], [0.1, 0.4, 0.5], [1.0, 0.0, 0.0]]])
    draft = torch.tensor([[[0.9, 0.0, 0.1], [0.9, 0.0, 0.1]]])
    u = torch.tensor([[0.5, 0.5, 0.3]], dtype=torch.float64)  # 0 is kept, 0 again is not: residual 0, 0.4, 0.4
    verdict = verify_sampled(torch.zeros(1, 2, dtype=torch.int64), torch.tensor([2]), draft, target, u)
    assert (verdict.accepted.tolist(), verdict.next_token.tolist()) == ([1], [1])
    draft = torch.tensor([[[0.9, 0.1, 0.0], [0.6, 0.4, 0.0]]])  # residual 0, 0, 0.5: no 1, which the first row lacks
    verdict = verify_sampled(torch.zeros(1, 2, dtype=torch.int64), torch.tensor([2]), draft, target, u)
    assert (verdict.accepted.tolist(), verdict.next_token.tolist()) == ([1], [2])
