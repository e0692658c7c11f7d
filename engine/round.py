"""What one round of a batch was: who took part, what was drafted and accepted, and what time it took.

Leaves out how it came about (loop) and how it is kept (recorder).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from specdial.policies.controllers import Signals

PARTS = ("draft", "verify", "select", "host")  # of a round's time


@dataclass(frozen=True, slots=True)
class Round:
    """One round of a batch. Arrays are [B]; sequences outside `active` took no part.

    context_tokens: committed length at the start. Times are for the whole batch, in microseconds; host_us is all the
    round took beyond drafts, verification and selection, the wait since the last round included.
    drafts: [B, K] token ids, of a tree those accepted, then -1; signals: [B, K]; accept_prob: [B, K] in sampled
    decoding, else None.
    mode: over which keys drafts were verified; rounds_since_full: partial rounds since a full one, this included.
    recomputed: rows that a full one put in front of its own. transfer_us: how long a full one's layers moved from host
    memory, and exposed_us: how long it waited for them; None where keys are on the device, and in partial rounds.
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
    mode: Literal["full", "partial"] = "full"
    rounds_since_full: int = 0
    recomputed: int = 0
    transfer_us: float | None = None
    exposed_us: float | None = None

    @property
    def spent_us(self) -> float:
        """All of its time."""
        return self.draft_us + self.verify_us + self.select_us + self.host_us

    @property
    def shared_us(self) -> float:
        """The share of its time that the sequences in it have: others could take the places of those that are done."""
        return self.spent_us * float(self.active.mean())


def kept_full(rounds: Iterable[Round], batch: int) -> list[Round]:
    """Those in which at least half of a whole batch decodes: by their shared times, what a server sees that refills it.

    Nearly all tokens come of them, and with fewer sequences the longest draft gets shorter than in a full batch.
    """
    return [r for r in rounds if len(r.active) == batch and 2 * int(r.active.sum()) >= batch]
