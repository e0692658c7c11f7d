"""What every drafter is to the round: something that gets ready once a round and then proposes token after token.

`prepare` runs on the host before the round. `begin` and the draft's `step` are passes: functions of device buffers that
stay where they are, so that they can be captured as CUDA graphs; on a CPU they are simply called. A `HostDrafter` knows
its drafts before the round and has no steps.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from specdial.kernels import Backend
from specdial.kernels.token_statistics import logit_statistics


@dataclass(frozen=True, slots=True)
class Proposal:
    """What one draft step says of N lanes.

    logits: [N, V]. token: [N], the likeliest. signals: [3, N] float32, its entropy in nats, top-1 probability, margin.
    """

    logits: Tensor
    token: Tensor
    signals: Tensor


class Draft(Protocol):
    """The draft of one round, on N lanes."""

    def step(self, depth: int, tokens: Tensor) -> Proposal:
        """The next draft after tokens [N], each lane's last one; `depth` of them were drafted before."""
        ...


class Drafter(Protocol):
    """Something that proposes tokens for a batch of sequences, round after round."""

    @property
    def key(self) -> Hashable:
        """What tells its passes from those of other drafters."""
        ...

    def prepare(self, limit: np.ndarray) -> None:
        """Host work before a round in which sequence b may draft limit[b] tokens, [B]; all 0: it will not draft."""
        ...

    def begin(self, steps: int) -> Draft:
        """The draft of this round, of up to `steps` tokens."""
        ...


class HostDrafter(ABC):
    """Something that knows its drafts on the host before a round, once it has seen the last one. It gives no signals.

    Each draft is certain: in sampled decoding its distribution has probability 1 on the draft.
    """

    @abstractmethod
    def drafts(self, limit: np.ndarray) -> list[list[int]]:
        """The drafts of every sequence, at most limit[b] for sequence b; it may have fewer, or none."""


def propose(logits: Tensor, backend: Backend) -> Proposal:
    """The proposal that logits [N, V] make."""
    token, *signals = logit_statistics(logits, backend=backend)
    return Proposal(logits, token, torch.stack(signals))
