"""Choosing among what a search tried: tuned on one split, selected on another, plain decoding always in the running.

Finalists are the Pareto front and the fastest of the tuning split, every fixed k, and plain. The winner is the fastest
on the selection split; where even its interval's lower end does not exceed 1, plain decoding is the answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from specdial.policies.schema import Policy, policy_from_mapping
from specdial.simulator.analytic import crossover_alpha, crossover_gamma
from specdial.simulator.inversion import verify_ratio
from specdial.simulator.outcome import Outcome
from specdial.simulator.search import Evaluate, Found, Tried, fixed_points, pareto
from specdial.simulator.space import Space

FASTEST = 16
FRONT = 12


@dataclass(frozen=True, slots=True)
class Crossover:
    """What the best drafting policy would need to break even: the alpha at its gamma, the gamma at its alpha.

    verify_ratio: time of a round without its drafts over a plain step.
    """

    policy: str
    speedup: float
    low: float | None
    high: float | None
    k: float
    alpha: float
    gamma: float
    verify_ratio: float
    alpha_needed: float
    gamma_needed: float


@dataclass(frozen=True, slots=True)
class Choice:
    """Outcomes on the selection split. front: the tuning split's Pareto front, fastest there first."""

    best: Outcome
    best_fixed: Outcome
    plain: Outcome
    front: tuple[Outcome, ...]
    finalists: tuple[Outcome, ...]
    pays: bool
    crossover: Crossover | None


def plain_policy(space: Space) -> Policy:
    """Plain decoding, as a policy of this space."""
    arm = space.record.arms[space.arms[0]]
    return policy_from_mapping(
        {
            "name": "plain",
            "controller": {"kind": "none"},
            "drafter": {"kind": "none"},
            "draft_kv": dict(arm["draft_kv"]),
        }
    )


def choose(space: Space, found: Found, evaluate: Evaluate) -> Choice:
    """Pick winners. evaluate: replay on the selection split, with intervals."""
    priced = [tried for tried in found.tried if tried.outcome.speedup is not None]
    front = _front(priced)
    fastest = sorted(priced, key=lambda tried: -(tried.outcome.speedup or 0.0))[:FASTEST]
    fixed = [space.policy(point) for point in fixed_points(space)]
    policies = [plain_policy(space), *fixed, *(t.outcome.policy for t in front), *(t.outcome.policy for t in fastest)]
    outcomes = evaluate(policies)
    plain, drafting = outcomes[0], [o for o in outcomes[1:] if o.speedup is not None]
    best = max(drafting, key=_speed)
    best_fixed = max((o for o in outcomes[1 : 1 + len(fixed)] if o.speedup is not None), key=_speed)
    pays = (best.low if best.low is not None else _speed(best)) > 1.0
    first = 1 + len(fixed)
    return Choice(
        best=best if pays else plain,
        best_fixed=best_fixed,
        plain=plain,
        front=tuple(outcomes[first : first + len(front)]),
        finalists=tuple(outcomes),
        pays=pays,
        crossover=_crossover(best),
    )


def _front(priced: Sequence[Tried]) -> list[Tried]:
    """At most FRONT members of the Pareto front, the fastest and the leanest among them."""
    places = pareto([tried.outcome for tried in priced])
    if len(places) > FRONT:
        places = [places[round(i * (len(places) - 1) / (FRONT - 1))] for i in range(FRONT)]
    return [priced[i] for i in places]


def _crossover(outcome: Outcome) -> Crossover | None:
    ratio = verify_ratio(outcome)
    if ratio is None or not outcome.k or outcome.alpha is None or outcome.gamma is None:
        return None
    return Crossover(
        policy=outcome.policy.name,
        speedup=_speed(outcome),
        low=outcome.low,
        high=outcome.high,
        k=outcome.k,
        alpha=outcome.alpha,
        gamma=outcome.gamma,
        verify_ratio=ratio,
        alpha_needed=crossover_alpha(outcome.k, outcome.gamma, ratio),
        gamma_needed=crossover_gamma(outcome.k, outcome.alpha, ratio),
    )


def _speed(outcome: Outcome) -> float:
    return outcome.speedup if outcome.speedup is not None else float("-inf")
