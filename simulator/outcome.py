"""What replaying a policy gives: its numbers, how they came about, and how far to trust them.

Speedups are ratios of sums. Intervals resample documents (whole batches where decoding was batched).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from specdial.policies.fields import to_plain
from specdial.policies.schema import Policy
from specdial.simulator.fidelity import Fidelity
from specdial.simulator.support import Level

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rounds:
    """The rounds of one policy, arrays [n], sorted by (doc, round)."""

    doc: Ints
    round: Ints
    context_tokens: Ints
    k: Ints
    accepted: Ints
    emitted: Ints


@dataclass(frozen=True, slots=True)
class FullBatch:
    """Whole batches as if they were kept full: what a server sees that refills them.

    Of the rounds in which at least half of a batch decodes, each by the share of it that does: the places of sequences
    that are done could be others'. speedup: over plain decoding likewise, a ratio of sums; None without a plain cost.
    """

    speedup: float | None
    us_per_token: float
    tokens_per_round: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """A policy's replay. Numbers are None where refused; speedup and baseline are also None without a plain cost.

    alpha: accepted / drafted. gamma: draft time per token / verification time. k: drafts per round, mean.
    low, high: 95 % bootstrap interval of speedup, None for a single unit. breakdown: microseconds per token by term.
    kv_bytes_per_token: key and value bytes read per emitted token. extrapolated_frac: share of the time that lies
    outside the measured costs. documents: which ones carried it. fidelity: of a lossy policy, where probes say it.
    full_batch: of batches of more than one, where it was asked for.
    """

    policy: Policy
    level: Level
    reason: str | None
    lossless: bool
    documents: tuple[int, ...]
    batch: int
    budget: int
    tokens: int = 0
    rounds: int = 0
    tokens_per_round: float | None = None
    alpha: float | None = None
    gamma: float | None = None
    k: float | None = None
    speedup: float | None = None
    low: float | None = None
    high: float | None = None
    us_per_token: float | None = None
    baseline_us_per_token: float | None = None
    breakdown: dict[str, float] | None = None
    kv_bytes_per_token: float | None = None
    extrapolated_frac: float | None = None
    fidelity: Fidelity | None = None
    full_batch: FullBatch | None = None
    unit_us: Floats | None = None  # [units] time of each document, or batch of documents
    round_log: Rounds | None = None

    def plain(self) -> dict[str, Any]:
        """Everything but the policy and the arrays, as plain data."""
        names = [n for n in self.__slots__ if n not in ("policy", "unit_us", "round_log")]
        return {"name": self.policy.name, **{n: to_plain(getattr(self, n)) for n in names}}


def bootstrap_interval(base_us: Floats, time_us: Floats, resamples: int, seed: int) -> tuple[Floats, Floats]:
    """2.5 and 97.5 percentiles, [policies], of sum(base) / sum(time) over resampled units.

    base_us: [units], time_us: [policies, units]. The same resamples serve every policy, so differences are paired.
    """
    units = len(base_us)
    generator = np.random.default_rng(seed)
    counts = generator.multinomial(units, np.full(units, 1.0 / units), size=resamples).astype(np.float64)  # [R, units]
    ratios = (counts @ base_us)[:, None] / (counts @ time_us.T)  # [R, policies]
    low, high = np.percentile(ratios, [2.5, 97.5], axis=0)
    return low, high
