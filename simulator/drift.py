"""Has a live trace left what a policy was tuned on? A sequential test over documents, with a stated false-alarm rate.

Documents are the units: rounds of one document depend on each other. A live document is ranked among those the policy
was tuned on and the live ones before it, within its range of contexts (a power of two), so a changed mix of lengths is
no drift. Its rank is a conformal p-value: uniform, and independent of the ones before, as long as live documents are
like the tuned ones, whatever their distribution (Vovk, Gammerman, Shafer, Algorithmic Learning in a Random World, 2005,
chapter 7). A capital bets against uniform p-values, and moves slowly between bets so that a late change is found too
(the Simple Jumper of Vovk, Petej, Nouretdinov, Ahlberg, Carlsson, Gammerman, Retrain or not retrain, 2021). By Ville's
inequality it ever reaches 1/alpha with probability at most alpha.

Acceptance: a document's accepted drafts less those expected from the hazard by depth of all it is ranked among, over
the standard deviation (a log-rank score, which k and censoring do not bias). Costs: the log of measured over expected
time at the rounds' own k and contexts, of which a tolerance counts as nothing. Leaves out reading files (the verb).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specdial.simulator.tuned_on import DocumentCounts

Floats = npt.NDArray[np.float64]
Score = Callable[[Sequence[DocumentCounts]], Floats]  # of every document of a pool, from that pool alone
BETS = np.array([-2.0, -1.0, 0.0, 1.0, 2.0])  # slopes: a p-value p multiplies a bet's capital by 1 + slope (p - 1/2)
JUMP = 0.01  # share of the capital that is dealt anew among the bets before every document


@dataclass(frozen=True, slots=True)
class Verdict:
    """alarm_at: place of the live document at which the capital reached 1/alpha, None if it never did.

    capital: after each live document; 1 before the first.
    """

    alpha: float
    capital: tuple[float, ...]
    alarm_at: int | None

    @property
    def highest(self) -> float:
        return max(self.capital, default=1.0)


def judge(
    tuned: Sequence[DocumentCounts], live: Sequence[DocumentCounts], score: Score, alpha: float, seed: int
) -> Verdict:
    """Test live documents, in the order they were decoded, against the tuned ones."""
    capital = jumper(p_values(tuned, live, score, seed))
    over = np.flatnonzero(capital >= 1.0 / alpha)
    return Verdict(alpha, tuple(capital.tolist()), int(over[0]) if len(over) else None)


def p_values(tuned: Sequence[DocumentCounts], live: Sequence[DocumentCounts], score: Score, seed: int) -> Floats:
    """[live] share of the pool that scores higher, ties broken at random."""
    generator = np.random.default_rng(seed)
    pools: dict[int, list[DocumentCounts]] = {}
    for document in tuned:
        pools.setdefault(stratum(document), []).append(document)
    found = []
    for document in live:
        pool = pools.setdefault(stratum(document), [])
        pool.append(document)
        scores = np.round(score(pool), 9)
        higher, equal = (scores > scores[-1]).sum(), (scores == scores[-1]).sum()
        found.append((higher + generator.random() * equal) / len(pool))
    return np.array(found, np.float64)


def jumper(p: Floats) -> Floats:
    """[n] the capital after each p-value: a martingale that starts at 1 where p-values are uniform and independent."""
    parts = np.full(len(BETS), 1.0 / len(BETS))
    found = np.empty(len(p))
    for i, value in enumerate(p):
        parts = (1.0 - JUMP) * parts + JUMP * parts.mean()
        parts = parts * (1.0 + BETS * (value - 0.5))
        found[i] = parts.sum()
    return found


def acceptance_scores(pool: Sequence[DocumentCounts]) -> Floats:
    """[pool] standardised accepted drafts beyond the hazard by depth of the whole pool."""
    width = max(len(d.judged) for d in pool)
    judged, accepted = np.zeros((len(pool), width)), np.zeros((len(pool), width))
    for i, document in enumerate(pool):
        judged[i, : len(document.judged)] = document.judged
        accepted[i, : len(document.accepted)] = document.accepted
    hazard = accepted.sum(axis=0) / np.maximum(judged.sum(axis=0), 1.0)
    variance = judged @ (hazard * (1.0 - hazard))
    beyond = accepted.sum(axis=1) - judged @ hazard
    return np.asarray(np.where(variance > 0.0, beyond / np.sqrt(np.maximum(variance, 1e-12)), 0.0))


def cost_scores(tolerance_frac: float) -> Score:
    """[pool] log time beyond what is expected, less the tolerance either way."""
    free = float(np.log1p(tolerance_frac))

    def scores(pool: Sequence[DocumentCounts]) -> Floats:
        excess = np.array([document.excess_log for document in pool])
        return np.asarray(np.sign(excess) * np.maximum(np.abs(excess) - free, 0.0))

    return scores


def stratum(document: DocumentCounts) -> int:
    """Its range of contexts: from 2^i to just below 2^(i+1)."""
    return document.context_tokens.bit_length() - 1
