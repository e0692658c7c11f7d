"""Efficiency inversion (SparseSpec-L, Fig. 2): speedup and acceptance against a fixed k, for every recorded arm.

Inverted: the last draft's acceptance fell below gamma, so it costs more than it saves. Leaves out adaptive policies.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specdial.policies.schema import policy_from_mapping
from specdial.simulator.analytic import crossover_alpha, crossover_gamma
from specdial.simulator.costs import CostModel
from specdial.simulator.lanes import Record
from specdial.simulator.outcome import Outcome
from specdial.simulator.replay import replay
from specdial.simulator.support import Level

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Inversion:
    """One (arm, k). tail: share of recorded positions whose first k drafts would all be accepted.

    level, low, high: of the speedup, see Outcome; documents: how many carried it. crossover_alpha, crossover_gamma:
    the value of the one that breaks even with plain decoding, the other as measured.
    """

    arm: int
    drafter: str  # its label in cost tables
    budget: int
    k: int
    speedup: float | None
    accepted: float
    alpha: float
    tail: float
    gamma: float
    inverted: bool
    best: bool
    crossover_alpha: float | None
    crossover_gamma: float | None
    level: Level
    low: float | None
    high: float | None
    documents: int


def inversion_table(
    record: Record,
    costs: CostModel,
    split: str | None = None,
    batch: int = 1,
    *,
    bootstrap: int = 0,
    seed: int = 0,
) -> list[Inversion]:
    """Replay fixed k = 1..k_max on every arm; arms whose costs are unknown are left out."""
    rows: list[Inversion] = []
    for place, arm in enumerate(record.arms):
        policies = [
            policy_from_mapping(
                {
                    "name": f"fixed-{k}",
                    "controller": {"kind": "fixed", "k": k},
                    "drafter": dict(arm["drafter"]),
                    "draft_kv": dict(arm["draft_kv"]),
                }
            )
            for k in range(1, record.k_max + 1)
        ]
        outcomes = replay(record, costs, policies, split, batch, bootstrap=bootstrap, seed=seed)
        if all(outcome.level != "refused" for outcome in outcomes):
            rows += _rows(int(arm["arm"]), outcomes, tail_acceptance(record, place, split))
    return rows


def verify_ratio(outcome: Outcome) -> float | None:
    """Time of a round without its drafts over the plain time of one token, or None without a plain cost."""
    if outcome.breakdown is None or outcome.baseline_us_per_token is None or outcome.tokens_per_round is None:
        return None
    rest = sum(us for term, us in outcome.breakdown.items() if term != "draft")
    return rest * outcome.tokens_per_round / outcome.baseline_us_per_token


def tail_acceptance(record: Record, arm: int, split: str | None = None) -> Floats:
    """[K] share of positions at which draft k = 1..K would be accepted, among those where it was recorded."""
    rows = record.documents.rows(split)
    cells = rows * len(record.arms) + arm
    run, depths = record.run[cells], np.minimum(record.depths[cells], record.documents.left(rows))
    ks = np.arange(1, record.k_max + 1)[:, None]
    return np.asarray((run >= ks).sum(axis=1) / np.maximum((depths >= ks).sum(axis=1), 1))


def _rows(arm: int, outcomes: list[Outcome], tail: Floats) -> list[Inversion]:
    speedups = [outcome.speedup or 0.0 for outcome in outcomes]
    best = speedups.index(max(speedups))
    rows = []
    for i, outcome in enumerate(outcomes):
        k, gamma = i + 1, outcome.gamma or 0.0
        accepted = (outcome.tokens_per_round or 1.0) - 1.0
        ratio = verify_ratio(outcome)
        alpha = outcome.alpha or 0.0
        rows.append(
            Inversion(
                arm=arm,
                drafter=outcome.policy.drafter.label,
                budget=outcome.budget,
                k=k,
                speedup=outcome.speedup,
                accepted=accepted,
                alpha=alpha,
                tail=float(tail[i]),
                gamma=gamma,
                inverted=bool(tail[i] < gamma),
                best=i == best,
                crossover_alpha=None if ratio is None else crossover_alpha(k, gamma, ratio),
                crossover_gamma=None if ratio is None else crossover_gamma(k, alpha, ratio),
                level=outcome.level,
                low=outcome.low,
                high=outcome.high,
                documents=len(outcome.documents),
            )
        )
    return rows
