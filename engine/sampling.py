"""From logits to tokens: greedy or sampled choice, and the acceptance rule that keeps speculation exact.

Greedy: a draft is accepted iff it is the target's argmax. Sampled: accepted with probability min(1, p/q), else replaced
from the normalised max(p - q, 0) (Leviathan et al. 2023, algorithm 1). Random numbers come from one generator per
sequence, so a sequence's output does not depend on its neighbours in the batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdial.policies.fields import setting

COLDEST = 1e-30  # temperatures below choose as this one does: float32 knows no smaller ones


@dataclass(frozen=True, slots=True)
class Sampling:
    """temperature 0 is greedy. top_p and top_k restrict the support of drafter and target alike; 1 and 0 are off."""

    temperature: float = setting(0.0, low=0.0, high=100.0)
    top_p: float = setting(1.0, low=0.0, high=1.0)
    top_k: int = setting(0, low=0)
    seed: int = setting(0, low=0, high=2**32 - 1)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What verification decided. accepted: [B]; next_token: [B], the token after them; accept_prob: [B, K]."""

    accepted: Tensor
    next_token: Tensor
    accept_prob: Tensor


def generators(sampling: Sampling, sequences: list[int]) -> list[torch.Generator]:
    """One CPU generator per sequence, seeded by the run's seed and the sequence's number."""
    return [torch.Generator().manual_seed(sampling.seed * 1_000_003 + number) for number in sequences]


def uniforms(random: list[torch.Generator], count: int) -> Tensor:
    """`count` numbers in [0, 1) from each generator, [B, count] float64 in host memory."""
    return torch.stack([torch.rand(count, generator=g, dtype=torch.float64) for g in random])


def distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities [..., V] that sampled decoding draws from, given logits [..., V]."""
    shifted = logits - logits.amax(dim=-1, keepdim=True)  # so that the largest stays finite
    logits = shifted / max(sampling.temperature, COLDEST)
    if 0 < sampling.top_k < logits.shape[-1]:
        floor = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < floor, float("-inf"))
    if sampling.top_p < 1.0:
        ranked, order = logits.sort(dim=-1, descending=True)
        before = ranked.softmax(dim=-1).cumsum(dim=-1) - ranked.softmax(dim=-1)
        cut = before.ge(sampling.top_p).scatter(-1, order, before.ge(sampling.top_p))
        cut.scatter_(-1, order[..., :1], False)  # the likeliest token always stays
        logits = logits.masked_fill(cut, float("-inf"))
    return logits.softmax(dim=-1)


def draw(probabilities: Tensor, u: Tensor) -> Tensor:
    """One token per sequence from probabilities [B, V] by inverse transform of uniforms u [B]. [B]"""
    cumulative = probabilities.double().cumsum(dim=-1)
    token = torch.searchsorted(cumulative, (u * cumulative[:, -1])[:, None], right=True)[:, 0]
    last = probabilities.shape[-1] - 1 - (probabilities.flip(-1) > 0).to(torch.int8).argmax(dim=-1)
    return torch.minimum(token, last)  # rounding at the top never draws a token of probability 0


def accept_leading(agreed: Tensor, k: Tensor) -> Tensor:
    """How many drafts are accepted, [B]: the leading ones that agreed [B, K], among the k [B] that count."""
    counted = torch.arange(agreed.shape[1], device=agreed.device) < k[:, None]
    return (agreed & counted).to(torch.int64).cumprod(dim=1).sum(dim=1)


def verify_sampled(drafts: Tensor, k: Tensor, draft_probs: Tensor, target_probs: Tensor, u: Tensor) -> Verdict:
    """Exact acceptance of drafts [B, K], of which k [B] count. draft_probs [B, K, V]; target_probs [B, K+1, V].

    u: [B, K+1] uniforms. The output follows target_probs whatever the drafts are.
    """
    B, K = drafts.shape
    p = target_probs[:, :K].gather(2, drafts[..., None])[..., 0]  # [B, K]
    q = draft_probs.gather(2, drafts[..., None])[..., 0]  # [B, K]
    accept_prob = (p / q).clamp(max=1.0)
    accepted = accept_leading(u[:, :K] < accept_prob.double(), k)
    rows = torch.arange(B, device=drafts.device)
    following = target_probs[rows, accepted]  # [B, V]
    if K:
        rejected = accepted < k
        proposed = draft_probs[rows, accepted.clamp(max=K - 1)]
        residual = (following - proposed).clamp(min=0.0)
        usable = rejected & (residual.sum(dim=-1) > 0)
        following = torch.where(usable[:, None], residual, following)
    return Verdict(accepted, draw(following, u[:, K]), accept_prob)
