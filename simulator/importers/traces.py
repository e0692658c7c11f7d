"""From requests of another engine to a trace that replay and tune read: its rounds, and drafts without signals.

A round is a speculative step; the first starts behind the token that prefill emitted. Steps that drafted nothing are
not among those an engine counts: where a request has more tokens than its steps emitted, they are put in at even
distances. Drafts say whether they were accepted and nothing of how sure the drafter was, so controllers that look at
signals have nothing to go by here: tune with search=fixed.

The trace is sparse. Its own policy, that engine's fixed k, replays exactly where every step is known, in order and with
all its drafts; every other policy, and all of them where only counts are known, is modelled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specdial.engine.trace.schema import FULL
from specdial.engine.trace.writer import TraceWriter
from specdial.policies.artifact import digest_of, provenance
from specdial.policies.controllers import FixedConfig
from specdial.policies.errors import UserError
from specdial.policies.fields import to_plain
from specdial.policies.file import policy_digest
from specdial.policies.schema import Cell, Drafter, Policy
from specdial.simulator.importers.requests import Request, Requests

SPLITS = ("train", "validation", "train", "test")  # in turn
NO_TOKEN = -1  # texts are not in the logs
SIGNALS = ("entropy_nats", "top1_prob", "margin")


@dataclass(frozen=True, slots=True)
class About:
    """What logs do not say of themselves. batch: sequences that decoded together, about."""

    format: str
    source: str
    model: str
    drafter: Drafter
    batch: int
    kv_bytes_per_token: float
    hardware: str

    def model_block(self) -> dict[str, Any]:
        """meta.model: a trace and a cost table that name the same model belong together."""
        named = {"name": self.model, "digest": digest_of({"imported": self.model}), "origin": "imported"}
        return {**named, "random": False, "kv_bytes_per_token": self.kv_bytes_per_token}


@dataclass(frozen=True, slots=True)
class _Steps:
    """The rounds of one request, lists of one length. sure: they are those that happened, in order."""

    start: int
    context_tokens: list[int]
    k: list[int]
    accepted: list[int]
    emitted: list[int]
    sure: bool


def write_requests(out: Path, requests: Requests, about: About, most: int) -> dict[str, Any]:
    """Write a trace of at most so many requests, evenly taken. Returns its counts. Raises UserError where none drafted.

    A request of a single token, which prefill emitted, has no round and is left out.
    """
    usable = [r for r in requests.found if r.new_tokens > 1]
    kept = [usable[i * len(usable) // most] for i in range(most)] if len(usable) > most else usable
    k_max = max((r.k for r in kept), default=0)
    steps = [_steps(r) for r in kept] if k_max else []
    drafted, accepted = sum(sum(s.k) for s in steps), sum(sum(s.accepted) for s in steps)
    if not drafted:
        raise UserError(
            f"{about.source} holds no speculative step ({requests.skipped} records have no counts)",
            "log a server that speculates and reports it",
        )
    exact = all(s.sure for s in steps) and all(r.k == k_max for r in kept)
    policy = Policy(
        name=f"imported-k{k_max}",
        drafter=about.drafter,
        controller=FixedConfig(k=k_max),
        # Where rounds are not known, no policy may pass for the recorded one: a cell that changes nothing sees to it.
        cells=() if exact else (Cell(overrides={}),),
    )
    counts = {"requests": len(kept), "skipped": requests.skipped, "left_out": len(requests.found) - len(kept)}
    writer = TraceWriter(out, _meta(about, kept, policy, {**counts, "exact": exact}))
    for doc, (request, rounds) in enumerate(zip(kept, steps, strict=True)):
        writer.write(doc, _tables(doc, request, rounds, about.batch))
    rounds_total = sum(len(s.k) for s in steps)
    tokens = sum(sum(s.emitted) for s in steps)
    told = {"exact": exact, "k": k_max, "rounds": rounds_total, "tokens": tokens}
    return {**counts, **told, "alpha": accepted / drafted, "tokens_per_round": tokens / rounds_total}


def _steps(request: Request) -> _Steps:
    """Lay a request's steps along its output. Raises UserError where they emitted more than it has."""
    start, end = request.prompt_tokens + 1, request.prompt_tokens + request.new_tokens
    steps = list(zip(request.drafted, request.accepted, strict=True))
    plain = end - start - sum(accepted + 1 for _, accepted in steps)
    if plain < 0 and not request.ordered:  # the last step was cut short: it is one that accepted enough
        last = next((i for i, (_, accepted) in enumerate(steps) if accepted >= -plain), -1)
        steps.append(steps.pop(last))
    if plain < 0 and -plain > steps[-1][1]:
        raise UserError(
            f"{request.name}: its steps emitted {end - start - plain + 1} tokens, it has {request.new_tokens}",
            "mend or remove that line",
        )
    steps = _with_plain(steps, plain)
    found = _Steps(start, [], [], [], [], request.ordered and plain <= 0)
    position, sure = start, found.sure
    for drafted, accepted in steps:
        k = min(drafted, end - position - 1)  # a draft behind the last token would be for nothing
        sure = sure and k == min(request.k, end - position - 1)
        taken = min(accepted, k)
        for column, value in zip(
            (found.context_tokens, found.k, found.accepted, found.emitted), (position, k, taken, taken + 1), strict=True
        ):
            column.append(value)
        position += taken + 1
    return _Steps(start, found.context_tokens, found.k, found.accepted, found.emitted, sure)


def _with_plain(steps: list[tuple[int, int]], plain: int) -> list[tuple[int, int]]:
    """The steps, and at even distances so many that drafted nothing."""
    laid: list[tuple[int, int]] = []
    done = 0
    for i in range(plain):
        upto = round((i + 1) * len(steps) / (plain + 1))
        laid += (*steps[done:upto], (0, 0))
        done = upto
    return laid + steps[done:]


def _tables(doc: int, request: Request, steps: _Steps, batch: int) -> dict[str, dict[str, Any]]:
    """The trace's tables of one document. Times, where there is one, are even shares of the whole."""
    n, zero = len(steps.k), np.zeros(len(steps.k))
    number = np.arange(n)
    each_us = np.full(n, request.decode_us / n)
    rounds: dict[str, Any] = {"doc": np.full(n, doc), "round": number, "batch": np.full(n, batch), "mode": [FULL] * n}
    rounds |= {name: np.array(getattr(steps, name)) for name in ("context_tokens", "k", "accepted", "emitted")}
    rounds |= {"rounds_since_full": np.zeros(n, np.int64), "verify_us": each_us}
    rounds |= {"draft_us": zero, "select_us": zero, "host_us": zero}
    of = np.repeat(number, steps.k)  # [drafts] the round of each
    depth = np.arange(len(of)) - np.repeat(np.cumsum(steps.k) - steps.k, steps.k)
    accepted = np.array(steps.accepted)[of]
    drafts: dict[str, Any] = {"doc": np.full(len(of), doc), "round": of, "position": np.array(steps.context_tokens)[of]}
    drafts |= {"arm": np.zeros(len(of), np.int64), "depth": depth + 1, "accept_prob": [None] * len(of)}
    drafts |= {"match": depth < accepted, "reached": depth <= accepted}
    drafts |= {name: np.zeros(len(of)) for name in SIGNALS}
    tokens = sum(steps.emitted)
    outputs = {"doc": np.full(tokens, doc), "position": steps.start + np.arange(tokens)}
    return {"drafts": drafts, "outputs": {**outputs, "token_id": np.full(tokens, NO_TOKEN)}, "rounds": rounds}


def _meta(about: About, kept: Sequence[Request], policy: Policy, counts: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": about.model_block(),
        "tokenizer_digest": "",
        "workload": {"kind": "imported", "format": about.format},
        "documents": [
            {
                "doc": i,
                "name": request.name,
                "split": SPLITS[i % len(SPLITS)],
                "prompt_tokens": request.prompt_tokens + 1,
                "new_tokens": request.new_tokens - 1,
            }
            for i, request in enumerate(kept)
        ],
        "policy": policy.decisions(),
        "policy_digest": policy_digest(policy),
        "arms": [{"arm": 0, "drafter": to_plain(policy.drafter), "draft_kv": to_plain(policy.draft_kv)}],
        "k_max": policy.k_max,
        "dense": False,
        # Acceptance is what happened, however tokens were chosen there: nothing is drawn again.
        "sampling": {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 0},
        "batch": about.batch,
        "hardware": {"device": "unknown", "name": about.hardware},
        "imported": {"format": about.format, "source": about.source, "signals": False, **counts},
        "provenance": provenance(),
        "config": {},
    }
