"""A policy at work on request after request: its file is read again in between, and its rounds are kept as a trace.

Every policy that was in force gets a trace of its own, TRACE/DIGEST with the first characters of its digest, in the
schema that `record` writes, so that drift, replay and tune read it. A new policy that this model cannot carry out is
told of and left: the one before stays. Leaves out prompts (engine.requests) and what is printed (verbs.run).
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdial.engine.acceptance import Acceptance, said_of
from specdial.engine.job import Job, describe, empty_sequences, hardware
from specdial.engine.loop import Decoding
from specdial.engine.recorder import Recorder
from specdial.engine.round import Round
from specdial.engine.sampling import Sampling
from specdial.engine.sequences import Sequences
from specdial.engine.trace.writer import TraceWriter
from specdial.engine.workloads import Document
from specdial.policies.artifact import provenance
from specdial.policies.errors import UserError
from specdial.policies.fields import to_plain
from specdial.policies.file import policy_digest, short_digest
from specdial.policies.schema import Policy
from specdial.policies.watched import WatchedPolicy


@dataclass(slots=True)
class Deployment:
    """A model that answers requests under the policy in force. trace: where its rounds go, None for nowhere."""

    job: Job
    watched: WatchedPolicy
    sampling: Sampling
    acceptance: Acceptance
    trace: Path | None = None
    policy: Policy = field(init=False)
    _held: Sequences | None = field(init=False, default=None)
    _writer: TraceWriter | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.policy = self.watched.policy

    def prepare(self, document: Document) -> Decoding:
        """Read the policy's file again, and the prompt. Raises UserError where the first policy cannot be carried out.

        A later one that cannot is told of on standard error, and the one before decodes.
        """
        before, complaint = self.policy, self.watched.refresh()
        if complaint is not None:
            _tell(f"{complaint}; policy {before.name} stays")
        if policy_digest(self.watched.policy) == policy_digest(before):
            self.policy = self.watched.policy
            return self._start(document)
        self._adopt(self.watched.policy)
        try:
            decoding = self._start(document)
        except UserError as error:
            _tell(f"policy {self.policy.name} cannot be used: {error}; policy {before.name} stays")
            self._adopt(before)
            return self._start(document)
        lossless = "lossless" if self.policy.lossless else "lossy"
        _tell(f"policy {self.policy.name} ({lossless}) took over from {before.name} at {document.name}")
        return decoding

    def synthetic(self) -> tuple[float, ...]:
        """By which chances drafts are accepted under the policy in force, () where they are judged."""
        return self.acceptance.of(self.policy)

    def keep(self, document: Document, rounds: list[Round], tokens: list[int]) -> None:
        """Write a finished request's rounds, where they are kept. tokens: its whole sequence, prompt included."""
        if self.trace is None:
            return
        if self._writer is None:
            self._writer = TraceWriter(self.trace / short_digest(self.policy), self._meta())
        recorder = Recorder([document])
        for round_ in rounds:
            recorder.add(round_)
        self._writer.write(document.index, recorder.tables(0, tokens))

    def _adopt(self, policy: Policy) -> None:
        """Buffers are as a policy needs them: another one gets others, when the former are gone."""
        self.policy, self._held, self._writer = policy, None, None
        self.watched.policy = policy

    def _start(self, document: Document) -> Decoding:
        if self._held is None:
            longest = max(len(d.prompt_ids) + d.new_tokens for d in self.job.documents)
            self._held = empty_sequences(
                self.job.model,
                longest,
                1,
                [self.policy],
                draft_models=self.job.draft_models,
                heads=self.job.heads,
            )
        self._held.prefill([document.prompt_ids], [document.new_tokens], self.job.stop_ids)
        return Decoding(self._held, self.policy, self.sampling, [document.index], synthetic=self.synthetic())

    def _meta(self) -> dict[str, Any]:
        policy = self.policy
        arm = {"arm": 0, "drafter": to_plain(policy.drafter), "draft_kv": to_plain(policy.draft_kv)}
        return {
            **describe(self.job, self.sampling, [policy]),
            "hardware": hardware(self.job.model.decoder.device),
            "policy": policy.decisions(),
            "policy_digest": policy_digest(policy),
            "arms": [arm],
            "k_max": policy.k_max,
            "dense": False,
            "batch": 1,
            **said_of(self.synthetic()),
            "config": {"verb": "run", "new_tokens": self.job.spec.new_tokens},
            "provenance": provenance(),
        }


def _tell(message: str) -> None:
    print(f"specdial: {message}", file=sys.stderr, flush=True)
