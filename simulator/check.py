"""How far the acceptance models can be trusted on this trace, measured on what they have not seen."""

from dataclasses import dataclass

from specdial.simulator.acceptance import Calibration, calibration, fit_hazard, judged_drafts
from specdial.simulator.lanes import Record
from specdial.simulator.mixing import with_budgets
from specdial.simulator.support import neighbours_of


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A recorded budget predicted from the budgets below and above: mean leading accepted drafts over all positions."""

    budget: int
    recorded: float
    modelled: float


@dataclass(frozen=True, slots=True)
class AcceptanceCheck:
    """hazard: the model fitted on one split, scored on another, None without drafts in both. left_out: per budget."""

    fitted_on: str
    scored_on: str
    hazard: Calibration | None
    left_out: tuple[LeftOut, ...]


def check_acceptance(record: Record, fit_split: str, held_split: str, seed: int = 0) -> AcceptanceCheck:
    """Score the hazard model on held-out documents and the budget model on left-out budgets."""
    if not record.arms:
        return AcceptanceCheck(fit_split, held_split, None, ())
    fitted, held = judged_drafts(record, fit_split), judged_drafts(record, held_split)
    score = None
    if len(fitted.label) and len(held.label) and fit_split != held_split:
        score = calibration(fit_hazard(fitted).probability(held.features), held.label)
    width = len(record.arms)
    left_out = []
    for arm in range(width):
        between = neighbours_of(record, arm)
        if between is None:
            continue
        budget = record.budget(arm)
        mixed = with_budgets(record, [(*between, budget)], seed)
        recorded, modelled = record.run[arm::width].mean(), mixed.run[width :: width + 1].mean()
        left_out.append(LeftOut(budget, float(recorded), float(modelled)))
    return AcceptanceCheck(fit_split, held_split, score, tuple(left_out))
