"""How a round's tokens are chosen: drafts from proposals, the target's from logits, acceptance where it is drawn.

Greedy acceptance (drafts equal to the target's choice) is left to `kernels.settle`. Synthetic acceptance accepts each
depth with a given probability whatever the draft says: it measures the cost of a given acceptance, its text is void,
and everything that such a run writes or prints says so.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdial.engine.drafters.base import Proposal
from specdial.engine.round_state import RoundState, to_device
from specdial.engine.sampling import (
    Sampling,
    accept_leading,
    distribution,
    draw,
    generators,
    uniforms,
    verify_sampled,
)
from specdial.kernels.token_statistics import logit_statistics
from specdial.policies.errors import UserError
from specdial.policies.fields import setting
from specdial.policies.schema import Policy

SAID = " (synthetic acceptance)"  # behind the name of a model, wherever results are shown


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Whether drafts are accepted by chance. synthetic: with which probability at each depth, given the depths before.

    The last of them goes on for deeper drafts. mean: instead, the accepted drafts of a round of the policy's longest
    drafts, on average, from one probability at all depths. Neither: drafts are judged by the target.
    """

    synthetic: tuple[float, ...] = setting((), low=0.0, high=1.0)
    mean: float | None = None

    def __post_init__(self) -> None:
        """Raises UserError where both are given."""
        if self.synthetic and self.mean is not None:
            raise UserError("acceptance.synthetic and acceptance.mean are both given", "give one of them")

    def __bool__(self) -> bool:
        return bool(self.synthetic) or self.mean is not None

    def of(self, policy: Policy) -> tuple[float, ...]:
        """The probability at each depth under a policy; () where drafts are judged, or there are none.

        Raises UserError on a mean that its longest drafts cannot have.
        """
        if not self or policy.k_max == 0:
            return ()
        if self.mean is None:
            return self.synthetic
        if not 0.0 < self.mean < policy.k_max:
            raise UserError(
                f"acceptance.mean is {self.mean:g}, policy {policy.name} drafts up to {policy.k_max} tokens",
                f"give more than 0 and less than {policy.k_max}",
                field="acceptance.mean",
            )
        return (probability_of_mean(self.mean, policy.k_max),)

    def of_one(self, policy: Policy) -> tuple[float, ...]:
        """`of`, where there is no other policy. Raises UserError too if it drafts nothing."""
        if self and policy.k_max == 0:
            raise UserError(
                f"acceptance is given, and policy {policy.name} drafts nothing", "give a policy that drafts"
            )
        return self.of(policy)


JUDGED = Acceptance()


def said_of(synthetic: tuple[float, ...]) -> dict[str, Any]:
    """What files say of a run with these probabilities; nothing where drafts are judged."""
    return {"synthetic_acceptance": list(synthetic)} if synthetic else {}


def probability_of_mean(mean: float, k: int) -> float:
    """The p of which p (1 - p^k) / (1 - p) = mean: of k drafts so many are accepted, each with probability p.

    0 < mean < k. By bisection of the sum p + p^2 + ... + p^k, which grows with p.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**depth for depth in range(1, k + 1)) < mean:
            low = middle
        else:
            high = middle
    return (low + high) / 2


class Judge:
    """The choice of tokens for one batch. Each sequence has random numbers of its own, the same many every round."""

    def __init__(
        self,
        state: RoundState,
        sampling: Sampling,
        numbers: list[int],
        *,
        vocab: int,
        synthetic: tuple[float, ...] = (),
    ) -> None:
        """synthetic: probability of acceptance at each depth, given the depths before; the last one goes on."""
        self.state, self.sampling = state, sampling
        self.key = (sampling, synthetic)
        self._random = generators(sampling, numbers)
        self.synthetic = [synthetic[min(i, len(synthetic) - 1)] for i in range(state.most_drafts)] if synthetic else []
        if not sampling.greedy and state.draft_probs is None:
            state.draft_probs = torch.zeros(state.batch, state.most_drafts, vocab, device=state.block.device)

    def prepare(self) -> None:
        """Fresh random numbers for a round, where it needs any."""
        if self.synthetic or not self.sampling.greedy:
            to_device(uniforms(self._random, self.state.uniforms.shape[1]), self.state.uniforms)
        if self.synthetic:
            to_device(np.array(self.synthetic), self.state.acceptance)

    def pick(self, proposal: Proposal, depth: int) -> Tensor:
        """The draft of one depth, [B]: a pass."""
        if self.state.draft_probs is None or self.sampling.greedy:
            return proposal.token
        probabilities = distribution(proposal.logits, self.sampling)
        self.state.draft_probs[:, depth] = probabilities
        return draw(probabilities, self.state.uniforms[:, depth])

    def take(self, k: int) -> None:
        """Count the first k drafts of the block as certain, wherever they come from: a pass."""
        if self.state.draft_probs is not None and not self.sampling.greedy:
            drafts = self.state.drafts[:, :k, None]  # [B, k, 1]
            self.state.draft_probs[:, :k].zero_().scatter_(2, drafts, 1.0)

    def choices(self, logits: Tensor, k: int) -> tuple[Tensor, bool]:
        """The target's token at every row of logits [B, k+1, V], and whether `state.accepted` is decided: a pass."""
        state = self.state
        B, K = state.batch, state.most_drafts
        accept = state.uniforms[:, K : K + k]
        if self.sampling.greedy:
            best = logit_statistics(logits.flatten(0, 1), backend=state.backend)[0].view(B, k + 1)
            if not self.synthetic:
                return best, False
            state.accepted.copy_(accept_leading(accept < state.acceptance[:k], state.k))
            return best, True
        target = distribution(logits, self.sampling)
        q = target[:, :0] if state.draft_probs is None else state.draft_probs[:, :k]
        u = torch.cat([accept, state.uniforms[:, 2 * K :]], dim=1)  # [B, k+1]
        verdict = verify_sampled(state.drafts[:, :k], state.k, q, target, u)
        if self.synthetic:
            state.accepted.copy_(accept_leading(accept < state.acceptance[:k], state.k))
            state.accept_prob[:, :k] = state.acceptance[:k]
        else:
            state.accepted.copy_(verdict.accepted)
            state.accept_prob[:, :k] = verdict.accept_prob
        return verdict.next_token[:, None].expand(B, k + 1).contiguous(), True
