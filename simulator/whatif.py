"""What if the machine had another memory bandwidth or compute rate: measured costs rescaled by their physical terms.

Each measurement is split in the proportions of its fitted terms. Keys, values and weights move with the bandwidth, rows
and scores with the compute rate, launches and the host with neither. Weight time is what the fitted cost of a byte of
keys and values says the model's weights take, at most the fitted fixed part. All of it counts as extrapolated.
"""

from dataclasses import replace

import numpy as np

from specdial.engine.trace.schema import WATCHED
from specdial.policies.errors import UserError
from specdial.simulator.costs import CostModel
from specdial.simulator.measured import CONTEXT, Measured
from specdial.simulator.physics import TERMS, fit_physics, physical_terms

READS_WEIGHTS = ("plain", "verify", "draft", *(f"draft_{how}" for how in WATCHED), "verify_partial")


def on_other_hardware(costs: CostModel, bandwidth_ratio: float, compute_ratio: float) -> CostModel:
    """Costs on a machine with these multiples of bandwidth and compute.

    Raises ValueError unless both are positive, UserError when the costs do not tell bandwidth from launches or do not
    say how many bytes the model moves.
    """
    if bandwidth_ratio <= 0.0 or compute_ratio <= 0.0:
        raise ValueError(f"ratios must be positive, got {bandwidth_ratio} and {compute_ratio}")
    if bandwidth_ratio == compute_ratio == 1.0:
        return costs
    model = costs.meta.get("model", {})
    missing = [name for name in ("kv_bytes_per_token", "weight_bytes") if not model.get(name)]
    if missing:
        raise UserError(
            f"{costs.source} does not say the {' and '.join(missing)} of its model, which bandwidth moves",
            "give the costs= of specdial calibrate",
        )
    us_per_byte = _us_per_byte(costs)
    if us_per_byte <= 0.0:
        raise UserError(
            f"{costs.source}: plain steps do not rise with context, so bandwidth cannot be told from launches",
            "calibrate at contexts further apart",
        )
    weights_us = us_per_byte * float(model["weight_bytes"])
    measured = {
        name: _scaled(found, weights_us if found.op in READS_WEIGHTS else 0.0, bandwidth_ratio, compute_ratio)
        for name, found in costs.measured.items()
    }
    assumed = f"as if with {bandwidth_ratio:g}x bandwidth and {compute_ratio:g}x compute"
    gbps = costs.plain_gbps
    if gbps is not None:
        longest = costs.measured["plain"].points[:, CONTEXT].argmax()
        gbps *= float(costs.measured["plain"].values_us[longest] / measured["plain"].values_us[longest])
    source = f"{costs.source}, {assumed}"
    return replace(costs, measured=measured, source=source, plain_gbps=gbps, assumed=assumed, _seen={})


def _us_per_byte(costs: CostModel) -> float:
    """Fitted time of a byte of keys and values, the most of plain steps and verifications.

    0 where keys and values make less than a hundredth of the largest measurement: that is noise. Times of a single
    context, such as a trace's own rounds, say nothing of it.
    """
    us_per_key = 0.0
    for op in ("plain", "verify"):
        if op in costs.measured:
            found = costs.measured[op]
            if len(np.unique(found.points[:, CONTEXT])) < 2:
                continue
            kv = physical_terms(op, found.points)[:, TERMS.index("kv")]
            slope = float(found.physics.coefficients[TERMS.index("kv")])
            if slope * float(kv.max()) > 0.01 * float(found.values_us.max()):
                us_per_key = max(us_per_key, slope)
    return us_per_key / float(costs.meta["model"]["kv_bytes_per_token"])


def _scaled(found: Measured, weights_us: float, bandwidth_ratio: float, compute_ratio: float) -> Measured:
    if found.op == "transfer":  # over the link, which stays
        return replace(found, assumed=True)
    parts = physical_terms(found.op, found.points) * found.physics.coefficients  # [n, TERMS]
    fixed, kv, rows, scores = parts.T
    weights = np.minimum(fixed, weights_us)
    compute_ratio = 1.0 if found.op.startswith("host") else compute_ratio
    after = (fixed - weights) + (weights + kv) / bandwidth_ratio + (rows + scores) / compute_ratio
    before = parts.sum(axis=1)
    values = found.values_us * np.where(before > 0.0, after / np.where(before > 0.0, before, 1.0), 1.0)
    physics = fit_physics(found.op, found.points, np.maximum(values, 1e-6))
    return replace(found, values_us=values, physics=physics, assumed=True)
