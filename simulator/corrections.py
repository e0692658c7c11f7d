"""Costs corrected by what the engine measured: one factor per drafter and term of a round, fitted to a validation.

A round's measured time is taken as the sum of its predicted terms, each times its factor; drafting counts in proportion
to the drafts really made. Factors minimise the squared relative error plus `PULL` times their squared distance from 1:
what the policies measured cannot tell apart stays as it was calibrated. What was accepted does not enter, so acceptance
that was predicted wrongly is not blamed on costs. Batches are compared as if they were kept full: whole runs end with
other sequences, and with smaller last batches, here and there.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specdial.policies.errors import UserError
from specdial.policies.file import load_policy
from specdial.policies.schema import Policy
from specdial.simulator.costs import USUAL, CostModel
from specdial.simulator.physics import fit_physics

Factors = dict[tuple[str, str], float]  # (drafter, term); plain decoding has no drafter
PULL = 0.01
LOWEST, HIGHEST = 0.2, 5.0


def read_corrections(folder: str) -> Factors:
    """Factors from what `validate` wrote. Raises UserError when it measured no policy that was predicted."""
    path = Path(folder)
    try:
        content = json.loads((path / "validation.json").read_text())
        plain_us = float(content["plain_us_per_token"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{folder} holds no validation", "give the out= of specdial validate") from None
    policies = [load_policy(file) for file in sorted((path / "policies").glob("*.yaml"))]
    batch = content.get("batch", 1)
    told = [p for p in policies if p.expected and p.measured and p.expected.get("batch", batch) == batch]
    return fit_corrections(told, plain_us)


def fit_corrections(policies: list[Policy], plain_us: float) -> Factors:
    """policies: with `expected` and `measured`; plain_us: measured time of a token of plain decoding, in whole runs."""
    rounds: dict[str, list[dict[str, float]]] = {}
    baselines = []  # how much longer plain decoding took
    for policy in policies:
        expected, measured = policy.expected or {}, policy.measured or {}
        predicted, took = _full_batches(expected, measured)
        if took and predicted.get("speedup"):
            ours, theirs = (float(found["us_per_token"]) * float(found["speedup"]) for found in (took, predicted))
            baselines.append(ours / theirs)
        elif expected.get("baseline_us_per_token"):
            baselines.append(plain_us / float(expected["baseline_us_per_token"]))
        if policy.k_max and expected.get("breakdown") and expected.get("tokens_per_round"):
            rounds.setdefault(policy.drafter.label, []).append(_relative_terms(expected, measured))
    if not baselines:
        raise UserError("no policy with a predicted time was measured", "validate the policies that tune wrote")
    found: Factors = {("none", "plain"): _clipped(float(np.median(baselines)))}
    for drafter, shares in rounds.items():
        terms = sorted({term for share in shares for term, value in share.items() if value > 0.0})
        matrix = np.array([[share.get(term, 0.0) for term in terms] for share in shares])  # [policies, terms]
        left = matrix.T @ matrix + PULL * np.eye(len(terms))
        right = matrix.sum(axis=0) + PULL
        found |= {
            (drafter, term): _clipped(factor) for term, factor in zip(terms, np.linalg.solve(left, right), strict=True)
        }
    return found


def corrected(costs: CostModel, factors: Factors) -> CostModel:
    """The same costs, each measurement times the factor of its drafter and term."""
    measured = {}
    for name, found in costs.measured.items():
        factor = factors.get((_drafter_of(name, found.op), _term_of(found.op)), 1.0)
        values: npt.NDArray[np.float64] = found.values_us * factor
        measured[name] = replace(found, values_us=values, physics=fit_physics(found.op, found.points, values))
    return CostModel(measured, costs.meta, f"{costs.source}, corrected", costs.own_rounds, costs.plain_gbps)


def _full_batches(expected: Mapping[str, Any], measured: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was predicted and measured of batches as if they were kept full; nothing where either is missing."""
    predicted, took = expected.get("full_batch"), measured.get("full_batch")
    return (predicted, took) if predicted and took else ({}, {})


def _relative_terms(expected: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, float]:
    """Predicted microseconds of a round by term, over what a round was measured to take."""
    breakdown = {term: float(us) for term, us in expected["breakdown"].items()}
    predicted, took = _full_batches(expected, measured)
    scale = float(predicted["us_per_token"]) / sum(breakdown.values()) if predicted else 1.0
    per_round = scale * float((predicted or expected)["tokens_per_round"])
    took_us = float((took or measured)["us_per_token"]) * float((took or measured)["tokens_per_round"])
    drafted = float(measured["k"]) / float(expected["k"]) if expected.get("k") else 1.0
    terms = {term: us * per_round / took_us for term, us in breakdown.items()}
    return {term: value * drafted if term == "draft" else value for term, value in terms.items()}


def _term_of(op: str) -> str:
    """The term of a round that an operation's time is counted in."""
    return op if op == "verify_partial" else op.removesuffix("_partial")


def _drafter_of(name: str, op: str) -> str:
    """The drafter in the name of an operation, as simulator.costs makes it."""
    if op == "plain":
        return "none"
    rest = name.removeprefix(op)
    return rest[2 : rest.rindex(")")] if rest.startswith(" (") else USUAL


def _clipped(factor: float) -> float:
    return float(np.clip(factor, LOWEST, HIGHEST))
