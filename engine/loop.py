"""The round: ask the controller for k, draft, verify, accept, commit, score, and say what happened.

A round is device work first (`_launch`) and the host's account of it afterwards (`_finish`), with one read-back between
them, so on a GPU the next round is launched before the last one is read wherever nothing on the host decides it. With
a controller that looks at no signals the whole round is one pass, hence one CUDA graph. Drafts that the host knows
before a round come with it, and their time is the host's. Sequences that stop drafting early wait for the longest one;
their padding drafts are never accepted. Trees of drafts are grown and verified as a whole, and leave the path that was
accepted as a chain does (tree_acceptance). Leaves out everything around the round: prefill (sequences), recording
(recorder), which documents and which policy (the verbs).
"""

from collections.abc import Generator, Hashable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from specdial.engine.acceptance import Judge
from specdial.engine.drafters import make_drafter
from specdial.engine.drafters.base import Draft, Drafter, HostDrafter
from specdial.engine.drafters.eagle import Eagle
from specdial.engine.drafters.sparse_self import SparseSelf
from specdial.engine.drafters.tree import DraftTree, TreeEagle
from specdial.engine.head_reader import HeadReader
from specdial.engine.offload import HostCache
from specdial.engine.round import Round
from specdial.engine.round_state import (
    DRAFTED,
    SELECTED,
    SETTLED,
    START,
    VERIFIED,
    ReadBack,
    arrival,
    to_device,
    to_host,
)
from specdial.engine.sampling import Sampling
from specdial.engine.sequences import Sequences
from specdial.engine.states import LastStates, Tapper
from specdial.engine.tree_acceptance import follow, straighten
from specdial.engine.verification import Plan, Schedule, verifications
from specdial.kernels.settle import settle
from specdial.policies.controllers import Controller, Signals, draft_limit, longest_draft, make_controller
from specdial.policies.schema import Policy


@dataclass(frozen=True, slots=True)
class Launched:
    """A round on its way. captured: a graph was captured for it, so the wait before it is not the round's."""

    controller: Controller
    read_back: ReadBack
    captured: bool
    plan: Plan


class Decoding:
    """A policy at work on a batch of sequences."""

    def __init__(
        self,
        sequences: Sequences,
        policy: Policy,
        sampling: Sampling,
        numbers: list[int],
        *,
        synthetic: tuple[float, ...] = (),
        keep_logits: bool = False,
    ) -> None:
        """numbers: one per sequence, seeds its random numbers. `sequences` must be prefilled.

        synthetic: accept the draft at each depth with this probability instead, whatever it says: to measure cost.
        keep_logits: leave each round's logits in `logits` until the next one, and the hidden states behind them in
        `states`; rounds then wait for the host.
        Raises UserError where policy, model and prompts do not go together.
        """
        self.s = sequences
        self.policy = policy
        self.variants = policy.variants()
        self.controllers: list[Controller] = [make_controller([v.controller] * sequences.batch) for v in self.variants]
        self.drafters: list[Drafter | HostDrafter | None] = [
            make_drafter(sequences, v) if longest_draft(v.controller) > 0 else None for v in self.variants
        ]
        self.readers = tuple(dict.fromkeys(d.reader for d in self.drafters if isinstance(d, Eagle)))
        for reader in self.readers:
            reader.start(policy.k_max)
        self.drafts_at_all = policy.k_max > 0
        self.schedule = Schedule(sequences, policy)
        self.queries, self.verifications = verifications(sequences, policy, self.drafters)
        self.state = sequences.state(policy.k_max)
        vocab = sequences.decoder.config.vocab
        self.judge = Judge(self.state, sampling, numbers, vocab=vocab, synthetic=synthetic)
        self.logits: Tensor | None = self.state.kept_logits(vocab) if keep_logits else None  # [B, K+1, V]
        self.states: LastStates | None = None
        if keep_logits:
            self.states = sequences.lasting(
                ("last states", policy.k_max), lambda: LastStates(sequences.decoder, sequences.batch, policy.k_max)
            )
        self._settled_ns: int | None = None  # when the last round ended
        self._plan, self._verification = Plan(), self.verifications[0]  # of the round being launched
        self._drafting: HeadReader | None = None  # the head that drafts in the round being launched
        self._started = False
        self._opened: Draft | None = None  # of the next round, its first token drafted
        furthest = int((sequences.prompt_tokens + np.maximum(sequences.limits, 0)).max()) + policy.slots
        if furthest > sequences.cache.capacity_tokens:
            raise ValueError(f"sequences may reach {furthest} keys, capacity is {sequences.cache.capacity_tokens}")

    def rounds(self) -> Generator[Round, None, None]:
        """Decode until every sequence is done."""
        waiting: list[Launched] = []
        try:
            while waiting or not self.s.done.all():
                if not waiting:
                    waiting.append(self._launch())
                if self._may_run_ahead():
                    waiting.append(self._launch())
                finished = self._finish(waiting.pop(0))
                if finished.active.any():
                    yield finished
        finally:
            for launched in waiting:  # whoever stops early finds the sequences where the device has them
                self._finish(launched)

    def decode_round(self) -> Round:
        """One round, from launch to account."""
        return self._finish(self._launch())

    @torch.inference_mode()
    def _launch(self) -> Launched:
        """Issue a round's device work. See the module's first lines."""
        s, state = self.s, self.state
        capturing_us = s.graphs.capturing_us
        variant = self._variant()
        controller, drafter = self.controllers[variant], self.drafters[variant]
        self._plan_verification(variant)
        willing = controller.draft_more(0, Signals.empty(s.batch, 1)) & ~s.done
        limit = np.where(willing, draft_limit(controller, s.remaining), 0)
        if self._opened is None:
            self._prepare(None if isinstance(drafter, HostDrafter) else drafter, limit)
        self._verification.prepare(self._plan)
        if isinstance(drafter, HostDrafter):
            self._at_once(drafter.drafts(limit))
        else:
            if isinstance(drafter, TreeEagle) or (s.graphs.enabled and self.variants[variant].drafts_whole):
                k = int(controller.k_max.max())
                key = ("round", state.most_drafts, k, None if drafter is None else drafter.key, *self._verify_key)
                s.graphs.run(key, lambda: self._whole(drafter, k))
            else:
                self._step_by_step(drafter, controller, limit)
        read_back, plan = state.read_back(), self._plan
        if isinstance(drafter, SparseSelf) and self._may_open(controller, drafter):
            self._prepare(drafter, limit)
            name = self._steps_of(drafter)
            self._opened = s.graphs.run((*name, "begin"), lambda: self._begin(drafter, state.most_drafts))
            s.graphs.run((*name, 0), partial(self._step, self._opened, 0))
        return Launched(controller, read_back, s.graphs.capturing_us != capturing_us, plan)

    def _prepare(self, drafter: Drafter | None, limit: np.ndarray) -> None:
        """The host's part before a round's drafts."""
        self.s.turn += 1
        self.judge.prepare()
        if drafter is not None:
            drafter.prepare(limit)

    def _plan_verification(self, variant: int) -> None:
        """Decide over which keys this round verifies."""
        if self.queries is not None and not self._started:
            self.s.graphs.run(("last queries", self.queries.key), self.queries.start)
        self._started = True
        self._verification = self.verifications[variant]
        drafter = self.drafters[variant]
        self._drafting = drafter.reader if isinstance(drafter, Eagle) else None
        self._plan = self.schedule.next(self.variants[variant].verify_kv)

    @property
    def _verify_key(self) -> tuple[Hashable, ...]:
        """What tells this round's verification from others as a pass."""
        plan = self._plan
        return (
            self.judge.key, self._verification.key, plan.partial, plan.recomputed, self.logits is not None,
            self.readers, self._drafting,
        )  # fmt: skip

    def _whole(self, drafter: Drafter | None, k: int) -> None:
        """A round of k drafts for every sequence: a pass."""
        torch.clamp(self.s.room - 1, min=0, max=k, out=self.state.k)
        tree = None
        if isinstance(drafter, TreeEagle):
            self.state.mark(START, SELECTED)
            tree = drafter.grow(k, self.state.signals)
        elif drafter is not None:
            draft = self._begin(drafter, k)
            for depth in range(k):
                self._step(draft, depth)
        self._verify(k, begun=drafter is not None, tree=tree)

    def _at_once(self, drafts: list[list[int]]) -> None:
        """A round whose drafts are known."""
        state = self.state
        k = np.array([len(tokens) for tokens in drafts])
        block = np.zeros(state.block.shape, dtype=np.int64)  # [B, K+1]
        for lane, tokens in enumerate(drafts):
            block[lane, 1 : len(tokens) + 1] = tokens
        to_device(block, state.block)
        to_device(k, state.k)
        widest = int(k.max())
        self.s.graphs.run(("at once", state.most_drafts, widest, *self._verify_key), lambda: self._known(widest))

    def _known(self, k: int) -> None:
        """Verify drafts that came from the host: a pass."""
        self.judge.take(k)
        self.state.signals.zero_()
        self._verify(k, begun=False)

    def _step_by_step(self, drafter: Drafter | None, controller: Controller, limit: np.ndarray) -> None:
        """A round that drafts until every lane's controller stops, one pass a step."""
        state, run = self.state, self.s.graphs.run
        widest = int(limit.max())
        signals = Signals.empty(self.s.batch, max(widest, 1))
        arriving: list[tuple[Tensor, torch.cuda.Event | None]] = []
        k, lag = np.zeros(self.s.batch, dtype=np.int64), int(controller.lag.min())
        going = limit > 0
        name = self._steps_of(drafter)
        opened, self._opened = self._opened, None
        depth = 0
        if drafter is not None and going.any():
            draft = opened or run((*name, "begin"), lambda: self._begin(drafter, widest))
            while going.any():
                if depth or opened is None:
                    run((*name, depth), partial(self._step, draft, depth))
                depth += 1
                k += going
                if controller.adaptive:
                    arriving.append((to_host(state.signals[depth - 1]), arrival(state.signals)))
                    if depth > lag:
                        write_signals(signals, depth - 1 - lag, *arriving[depth - 1 - lag])
                going = going & (k < limit) & controller.draft_more(depth, signals)
        to_device(k, state.k)
        run((*name, "verify", depth, *self._verify_key), lambda: self._verify(depth, begun=depth > 0))

    def _steps_of(self, drafter: Drafter | None) -> tuple[Hashable, ...]:
        """What the passes of a round drafted step by step are called."""
        return ("step by step", self.state.most_drafts, None if drafter is None else drafter.key, self.judge.key)

    def _begin(self, drafter: Drafter, steps: int) -> Draft:
        self.state.mark(START)
        draft = drafter.begin(steps)
        self.state.block[:, 0] = self.s.pending
        self.state.mark(SELECTED)
        return draft

    def _step(self, draft: Draft, depth: int) -> None:
        """Draft the token of one more depth into the block: a pass."""
        proposal = draft.step(depth, self.state.block[:, depth])
        self.state.block[:, depth + 1] = self.judge.pick(proposal, depth)
        self.state.signals[depth] = proposal.signals

    def _verify(self, k: int, *, begun: bool, tree: DraftTree | None = None) -> None:
        """Verify k drafts of every sequence, or a tree k deep, accept, commit and score: a pass."""
        s, state = self.s, self.state
        if not begun:
            state.block[:, 0] = s.pending
        state.mark(DRAFTED if begun else START, DRAFTED)
        rows, plan = self.drafts_at_all, self._plan
        for reader in self.readers:
            if not (begun and reader is self._drafting):
                reader.read()
        tokens, branches = (state.block[:, : k + 1], None) if tree is None else (tree.tokens, tree.branches())
        tapping: tuple[Tapper, ...] = self.readers if self.states is None else (*self.readers, self.states)
        with s.tapping(tapping):
            block = self._verification.block(tokens, plan, k=state.k, padded=rows, rows=rows, branches=branches)
        state.mark(VERIFIED)
        if tree is None:
            choices, judged = self.judge.choices(block.logits, k)
        else:
            path, choices, judged = follow(self.judge, tree, block.logits)
            block = straighten(s, block, path, tapping)
        if self.logits is not None and self.states is not None:
            self.logits[:, : k + 1] = block.logits
            self.states.keep(block.first_row, k + 1)
        settle(
            state.drafts[:, :k], choices, state.k, s.room, stop_ids=s.stops, emitted=state.emitted[:, : k + 1],
            accepted=state.accepted, counts=state.counts, pending=s.pending, before=s.before, judged=judged,
            backend=s.backend,
        )  # fmt: skip
        self._verification.settled(block, state.counts)
        for reader in self.readers:
            reader.take(block, state.emitted[:, : k + 1], state.counts)
        s.advance(block, state.counts)
        state.mark(SETTLED)

    def _finish(self, launched: Launched) -> Round:
        """Read a round back and bring the host up to date."""
        s = self.s
        seen = launched.read_back.wait()
        active, context = ~s.done, s.committed
        emitted = [seen.emitted[b, :n].tolist() for b, n in enumerate(seen.counts)]
        s.commit(emitted, seen.counts)
        self.schedule.note(launched.plan, seen.counts)
        signals = Signals(*seen.signals.astype(np.float64))
        launched.controller.observe(seen.k, seen.accepted, signals, active)
        plan = launched.plan
        moved_us, exposed_us = None, None
        if isinstance(s.cache, HostCache) and not plan.partial:
            moved_us, exposed_us = s.cache.transfer_us()
        start, selected, drafted, verified, settled = seen.moments_ns.tolist()
        since = start if self._settled_ns is None or launched.captured else self._settled_ns
        self._settled_ns = settled
        return Round(
            active=active,
            context_tokens=context,
            k=seen.k,
            accepted=seen.accepted,
            emitted=emitted,
            plain=not self.drafts_at_all,
            draft_us=(drafted - selected) / 1e3,
            verify_us=(verified - drafted) / 1e3,
            select_us=(selected - start) / 1e3,
            host_us=(settled - verified + start - since) / 1e3,
            drafts=seen.drafts,
            signals=signals,
            accept_prob=None if self.judge.sampling.greedy else seen.accept_prob,
            mode="partial" if plan.partial else "full",
            rounds_since_full=plan.since_full,
            recomputed=plan.recomputed,
            transfer_us=moved_us,
            exposed_us=exposed_us,
        )

    def _variant(self) -> int:
        """Which cell of the policy this round falls into, by the longest sequence still decoding."""
        if len(self.variants) == 1:
            return 0
        return self.policy.variant_index(int(self.s.committed[~self.s.done].max()), self.s.batch)

    def _may_open(self, controller: Controller, drafter: SparseSelf) -> bool:
        """Can the next round's first draft start before this round is read? If there surely is one, and it drafts."""
        if not self.s.graphs.enabled or len(self.variants) > 1 or not controller.adaptive or not drafter.every_round:
            return False
        first = controller.draft_more(0, Signals.empty(self.s.batch, 1))
        return bool(first.all() and (self.s.remaining > self.policy.k_max + 2).any())

    def _may_run_ahead(self) -> bool:
        """Can another round start before the one in flight is read? Only if nothing the host learns decides it."""
        if not self.s.graphs.enabled or len(self.variants) > 1:
            return False
        if self.controllers[0].adaptive or isinstance(self.drafters[0], HostDrafter):
            return False
        if self.logits is not None or self.schedule.must_know(self.policy.verify_kv):
            return False
        if isinstance(self.s.cache, HostCache) and not self._plan.partial:  # its transfers are read when it ends
            return False
        return bool((self.s.remaining > self.policy.k_max + 1).any())


def write_signals(signals: Signals, depth: int, values: Tensor, arrived: torch.cuda.Event | None) -> None:
    """Put the signals [3, B] of one draft step into column `depth`, once they have arrived."""
    if arrived is not None:
        arrived.synchronize()
    signals.entropy_nats[:, depth], signals.top1_prob[:, depth], signals.margin[:, depth] = values.numpy()
