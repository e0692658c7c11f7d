"""The round: ask the controller for k, draft, verify, accept, commit, score, and say what happened.

One call of `decode_round` is one round for every sequence of the batch. Sequences that stop drafting early wait for the
longest one; their padding drafts are never accepted. Leaves out everything around it: prefill (sequences), recording
(recorder), which documents and which policy (the verbs).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdial.engine.clock import Clock
from specdial.engine.drafters.sparse_self import Proposal, begin_draft
from specdial.engine.sampling import Sampling, Verdict, choose, distribution, generators, verify_greedy, verify_sampled
from specdial.engine.sequences import Sequences
from specdial.policies.controllers import Controller, Signals, draft_limit, longest_draft, make_controller
from specdial.policies.schema import Policy


@dataclass(frozen=True, slots=True)
class Round:
    """One round of a batch. Arrays are [B]; sequences outside `active` took no part.

    context_tokens: committed length at the start. Times are for the whole batch, in microseconds.
    drafts: [B, K] token ids; signals: [B, K]; accept_prob: [B, K] in sampled decoding, else None.
    """

    active: np.ndarray
    context_tokens: np.ndarray
    k: np.ndarray
    accepted: np.ndarray
    emitted: list[list[int]]
    plain: bool
    draft_us: float
    verify_us: float
    select_us: float
    host_us: float
    drafts: np.ndarray
    signals: Signals
    accept_prob: np.ndarray | None


@dataclass(frozen=True, slots=True)
class Draft:
    """What was proposed: tokens [B, K], their distributions [B, K, V] when sampled, signals [B, K], k [B]."""

    tokens: Tensor
    probabilities: Tensor | None
    signals: Signals
    k: np.ndarray


class Decoding:
    """A policy at work on a batch of sequences."""

    def __init__(self, sequences: Sequences, policy: Policy, sampling: Sampling, numbers: list[int]) -> None:
        """numbers: one per sequence, seeds its random numbers. `sequences` must be prefilled."""
        self.s = sequences
        self.policy = policy
        self.variants = policy.variants()
        self.controllers: list[Controller] = [make_controller([v.controller] * sequences.batch) for v in self.variants]
        self.drafts_at_all = any(longest_draft(v.controller) > 0 for v in self.variants)
        self.sampling = sampling
        self.random = generators(sampling, numbers)
        self.clock = Clock(sequences.decoder.device, sequences.graphs)

    def rounds(self) -> Iterator[Round]:
        """Decode until every sequence is done."""
        while not self.s.done.all():
            yield self.decode_round()

    @torch.inference_mode()
    def decode_round(self) -> Round:
        """One round. See the module's first lines."""
        s = self.s
        self.clock.restart()
        active, context, room = ~s.done, s.committed, s.remaining
        index = self.policy.variant_index(int(context[active].max()), s.batch)
        variant, controller = self.variants[index], self.controllers[index]
        limit = np.where(active, draft_limit(controller, room), 0)
        host_us = self.clock.lap_us()

        draft, select_us, draft_us = self._draft(variant, controller, limit)
        block = torch.cat([s.pending()[:, None], draft.tokens], dim=1)  # [B, K+1]
        host_us += self.clock.lap_us()
        result = s.forward_block(block, padded=self.drafts_at_all, rows=self.drafts_at_all)
        verify_us = self.clock.lap_us()

        verdict = self._judge(draft, result.logits)
        accepted, emitted = self._settle(draft, verdict, active, room)
        s.push_history(result, np.array([len(e) for e in emitted], dtype=np.int64))
        s.commit(emitted)
        controller.observe(draft.k, accepted, draft.signals, active)
        host_us += self.clock.lap_us()
        return Round(
            active=active,
            context_tokens=context,
            k=draft.k,
            accepted=accepted,
            emitted=emitted,
            plain=not self.drafts_at_all,
            draft_us=draft_us,
            verify_us=verify_us,
            select_us=select_us,
            host_us=host_us,
            drafts=draft.tokens.cpu().numpy(),
            signals=draft.signals,
            accept_prob=None if verdict.accept_prob is None else verdict.accept_prob.cpu().numpy(),
        )

    def _draft(self, variant: Policy, controller: Controller, limit: np.ndarray) -> tuple[Draft, float, float]:
        """Draft until every lane's controller stops. Returns the draft and the select and draft times."""
        s = self.s
        widest = int(limit.max())
        signals = Signals.empty(s.batch, max(widest, 1))
        k = np.zeros(s.batch, dtype=np.int64)
        drafting = controller.draft_more(0, signals) & (limit > 0)
        tokens: list[Tensor] = []
        probabilities: list[Tensor] = []
        known: list[Tensor] = []  # signals of each step, [3, B]
        select_us = draft_us = 0.0
        if drafting.any():
            drafter = begin_draft(s, variant.draft_kv, steps=widest)
            select_us = self.clock.lap_us()
            token = s.pending()
            while drafting.any():
                proposal = drafter.step(token)
                token, q = self._pick(proposal)
                tokens.append(token)
                if q is not None:
                    probabilities.append(q)
                known.append(proposal.signals.clone())
                if controller.adaptive:
                    write_signals(signals, len(tokens) - 1, known[-1:])
                k += drafting
                drafting = drafting & (k < limit) & controller.draft_more(len(tokens), signals)
            if not controller.adaptive:
                write_signals(signals, 0, known)
            draft_us = self.clock.lap_us()
        drafted = torch.stack(tokens, dim=1) if tokens else s.pending().new_zeros(s.batch, 0)
        return Draft(drafted, torch.stack(probabilities, 1) if probabilities else None, signals, k), select_us, draft_us

    def _pick(self, proposal: Proposal) -> tuple[Tensor, Tensor | None]:
        """The drafted tokens [B], and the distribution they were drawn from unless greedy."""
        if self.sampling.greedy:
            return proposal.token.clone(), None
        return choose(proposal.logits, self.sampling, self.random)

    def _judge(self, draft: Draft, logits: Tensor) -> Verdict:
        """Apply the acceptance rule to the target's logits [B, K+1, V]."""
        k = torch.from_numpy(draft.k).to(logits.device)
        if self.sampling.greedy:
            return verify_greedy(draft.tokens, k, logits)
        target = distribution(logits, self.sampling)
        q = target[:, :0] if draft.probabilities is None else draft.probabilities
        return verify_sampled(draft.tokens, k, q, target, self.random)

    def _settle(
        self, draft: Draft, verdict: Verdict, active: np.ndarray, room: np.ndarray
    ) -> tuple[np.ndarray, list[list[int]]]:
        """Accepted counts and emitted tokens: accepted drafts and the next token, cut at a stop token or the limit."""
        accepted = np.where(active, verdict.accepted.cpu().numpy(), 0)
        drafts, following = draft.tokens.tolist(), verdict.next_token.tolist()
        emitted: list[list[int]] = []
        for b in range(self.s.batch):
            new = [*drafts[b][: accepted[b]], following[b]][: room[b]] if active[b] else []
            stop = next((i for i, token in enumerate(new) if token in self.s.stop_ids), None)
            new = new if stop is None else new[: stop + 1]
            accepted[b] = min(accepted[b], len(new))
            emitted.append(new)
        return accepted, emitted


def write_signals(signals: Signals, first: int, steps: list[Tensor]) -> None:
    """Copy the signals of draft steps, [3, B] float32 each, into columns `first` and following: one read-back."""
    if steps:
        values = torch.stack(steps, dim=-1).cpu().numpy()  # [3, B, steps]
        columns = slice(first, first + len(steps))
        signals.entropy_nats[:, columns], signals.top1_prob[:, columns], signals.margin[:, columns] = values
