"""Choosing among what a search tried: tuned on one split, selected on another, plain decoding always in the running.

Finalists are the front and the best in the first objective of the tuning split, every fixed k, and plain. The winner is
the best of them in the first objective on the selection split, within the bounds; where that is speed and even its
interval's lower end (of a full batch, which has none, itself) does not exceed 1, plain decoding is the answer. It also
stands in where no lossless policy, or no fixed k, has a price.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from specdial.policies.errors import UserError
from specdial.policies.schema import Policy, policy_from_mapping
from specdial.simulator.analytic import crossover_alpha, crossover_gamma
from specdial.simulator.inversion import verify_ratio
from specdial.simulator.lanes import Record
from specdial.simulator.objectives import METRICS, SPEEDS, Goal, front, measured_metrics
from specdial.simulator.outcome import Outcome
from specdial.simulator.search import Evaluate, Found, Tried, fixed_points
from specdial.simulator.space import Space

BEST = 16
FRONT = 12
CALIBRATE = "calibrate for this trace, at its contexts and batches, and give costs="


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
    """Outcomes on the selection split. front: the tuning split's, best in the first objective there first.

    best_lossless: equal to best where that is lossless. pays: drafting beats plain decoding. feasible: best keeps
    within the bounds.
    """

    best: Outcome
    best_lossless: Outcome
    best_fixed: Outcome
    plain: Outcome
    front: tuple[Outcome, ...]
    finalists: tuple[Outcome, ...]
    pays: bool
    feasible: bool
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


def candidates(found: Found, goal: Goal, batch: int) -> tuple[list[Tried], list[Tried]]:
    """(front, best in the first objective) of what was tried at this batch."""
    known = [t for t in found.tried if goal.values(t.metrics) is not None and t.batch == batch]
    priced = [t for t in known if goal.feasible(t.metrics)] or known
    costs = [goal.costs(t.metrics) for t in priced]
    places = front(costs)
    if len(places) > FRONT:
        places = [places[round(i * (len(places) - 1) / (FRONT - 1))] for i in range(FRONT)]
    best = sorted(range(len(priced)), key=lambda i: costs[i][0])[:BEST]
    return [priced[i] for i in places], [priced[i] for i in best]


def choose(space: Space, found: Found, evaluate: Evaluate, goal: Goal, batch: int) -> Choice:
    """Pick winners at one batch. evaluate: replay on the selection split, with intervals.

    Raises UserError where no drafting policy has a price there.
    """
    ahead, best_tried = candidates(found, goal, batch)
    fixed = [space.policy(point) for point in fixed_points(space)]
    policies = [plain_policy(space), *fixed, *(space.policy(t.point) for t in (*ahead, *best_tried))]
    outcomes = evaluate(policies, batch)
    plain, drafting = outcomes[0], [o for o in outcomes[1:] if o.speedup is not None]
    first = 1 + len(fixed)

    def speed(outcome: Outcome) -> float:
        return METRICS[goal.speed].of(outcome, space.record) or 0.0

    best_fixed = max((o for o in outcomes[1:first] if o.speedup is not None), key=speed, default=plain)
    best, feasible = _best(drafting, goal, space)
    if best is None:
        cause = f"no drafting policy has a price at batch {batch}: {lacks(outcomes[1], goal, space.record)}"
        raise UserError(cause, CALIBRATE)
    lossless, _ = _best([o for o in drafting if o.lossless], goal, space)
    least = best.low if goal.speed == "speedup" and best.low is not None else speed(best)
    pays = least > 1.0
    slower = goal.objectives[0] in SPEEDS and not pays
    return Choice(
        best=plain if slower else best,
        best_lossless=plain if slower or lossless is None or speed(lossless) <= 1.0 else lossless,
        best_fixed=best_fixed,
        plain=plain,
        front=tuple(outcomes[first : first + len(ahead)]),
        finalists=tuple(outcomes),
        pays=pays,
        feasible=feasible,
        crossover=_crossover(best),
    )


def lacks(outcome: Outcome, goal: Goal, record: Record) -> str | None:
    """Why a policy has no speedup, or no value of an objective; None where it has them."""
    if outcome.level == "refused":
        return outcome.reason
    metrics = measured_metrics(outcome, record)
    if metrics["speedup"] is None:
        return "plain decoding has no measured cost"
    unknown = [name for name in goal.objectives if metrics[name] is None]
    return f"replay does not know its {unknown[0]}" if unknown else None


def _best(outcomes: Sequence[Outcome], goal: Goal, space: Space) -> tuple[Outcome | None, bool]:
    """The best in the first objective of those within the bounds, or of all where none is; and which it was.

    None where no objective of any is known.
    """
    judged = [(measured_metrics(outcome, space.record), outcome) for outcome in outcomes]
    judged = [(metrics, outcome) for metrics, outcome in judged if goal.values(metrics) is not None]
    if not judged:
        return None, False
    within = [(metrics, outcome) for metrics, outcome in judged if goal.feasible(metrics)]
    _, best = min(within or judged, key=lambda pair: goal.costs(pair[0])[0])
    return best, bool(within)


def _crossover(outcome: Outcome) -> Crossover | None:
    ratio, speedup = verify_ratio(outcome), outcome.speedup
    if ratio is None or speedup is None or not outcome.k or outcome.alpha is None or outcome.gamma is None:
        return None
    return Crossover(
        policy=outcome.policy.name,
        speedup=speedup,
        low=outcome.low,
        high=outcome.high,
        k=outcome.k,
        alpha=outcome.alpha,
        gamma=outcome.gamma,
        verify_ratio=ratio,
        alpha_needed=crossover_alpha(outcome.k, outcome.gamma, ratio),
        gamma_needed=crossover_gamma(outcome.k, outcome.alpha, ratio),
    )
