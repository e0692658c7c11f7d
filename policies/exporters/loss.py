"""What lowering is predicted to cost, where the policies' own predictions can tell; else unknown, with the reason.

A prediction is of this project's engine: the loss says what the dropped choices are worth here, not how fast the other
engine is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdial.policies.exporters.rows import Lowered, told
from specdial.policies.schema import Policy

SAME = ("trace_digest", "hardware", "batch", "split", "costs")  # of `expected`, for two predictions to be comparable


@dataclass(frozen=True, slots=True)
class Loss:
    """policy, lowered: predicted speedups. lost: their difference. None is unknown, and reason then says why."""

    policy: float | None = None
    lowered: float | None = None
    lost: float | None = None
    reason: str = ""


def predicted_loss(policy: Policy, lowered: Lowered, alternatives: Sequence[Policy]) -> Loss:
    """Compare the policy's prediction with that of an alternative that acts as the lowered settings do."""
    speedup = told(policy.expected, "speedup")
    if speedup is None:
        return Loss(reason="the policy has no predicted speedup")
    if all(row.fate == "kept" for row in lowered.rows):
        return Loss(speedup, speedup, 0.0)
    if lowered.effective is None:
        return Loss(speedup, reason="no policy of ours acts as the lowered settings do")
    if lowered.effective.k_max == 0:
        return Loss(speedup, 1.0, speedup - 1.0)
    for other in (policy, *alternatives):
        theirs = told(other.expected, "speedup")
        if theirs is not None and _acts(other) == _acts(lowered.effective) and _comparable(policy, other):
            return Loss(speedup, theirs, speedup - theirs)
    controller = lowered.effective.controller
    return Loss(
        speedup,
        reason=f"no alternative with a prediction on the same trace drafts by {lowered.effective.drafter.label} with "
        f"{controller.kind} k {lowered.effective.k_max}",
    )


def _comparable(a: Policy, b: Policy) -> bool:
    return all((a.expected or {}).get(name) == (b.expected or {}).get(name) for name in SAME)


def _acts(policy: Policy) -> dict[str, Any]:
    """Decisions without the selection that nothing reads."""
    decisions = policy.decisions()
    if not any(v.drafter.reads_selection for v in policy.variants()) and policy.lossless:
        decisions.pop("draft_kv")
        decisions.pop("verify_kv")
    return decisions
