"""The grid of policies that the prediction benchmark predicts and measures: all lossless, all self-drafting.

Rate controllers start from what `tune` would fit on the train documents. Leaves out what they are worth.
"""

from dataclasses import replace

from specdial.policies.schema import policy_from_mapping
from specdial.simulator.space import Search, Space

KS = (1, 2, 3, 4, 6, 8)
K_MAX = 8
ENTROPY = (0.2, 0.4, 0.6)
CONFIDENCE = (0.3, 0.6)
FP8_KS = (2, 4, 8)


def fixed_points(arms):
    """Points of fixed k in every arm: what gamma is taken from, too."""
    return [{"controller": "fixed", "k": k, "arm": arm} for arm in arms for k in KS]


def fixed(record):
    """The policies of fixed k, by arm and k, of a dense record."""
    arms = range(len(record.arms))
    return _policies(Space.of(Search(), record, gamma=0.3), fixed_points(arms))


def adaptive(record, gammas):
    """Policies whose controllers look at signals. gammas: [arms] draft over verification cost, for `rate`."""
    arms = range(len(record.arms))
    start = {"rate.form": "calibrated", "rate.beta": 0.9, "rate.learning_rate": 0.02, "rate.shift": 0.0}
    points = []
    for arm in arms:
        at = {"k": K_MAX, "arm": arm}
        points += [{"controller": "entropy", **at, "entropy.threshold": t} for t in ENTROPY]
        points += [{"controller": "confidence", **at, "confidence.threshold": t} for t in CONFIDENCE]
        points.append({"controller": "rate", **at, **start, "rate.gamma": gammas[arm]})
    return _policies(Space.of(Search(), record, gamma=0.3), points)


def fp8(draft_kv):
    """The policies of fixed k that draft with float8 copies of the weights over one selection; the last is recorded."""
    drafter = {"kind": "sparse_self", "weights": "fp8"}
    return [
        policy_from_mapping(
            {
                "name": f"fp8-fixed-{k}-b{draft_kv['budget']}",
                "drafter": drafter,
                "controller": {"kind": "fixed", "k": k},
                "draft_kv": draft_kv,
            }
        )
        for k in FP8_KS
    ]


def _policies(space, points):
    """Policies under names that tell thresholds apart."""
    found = []
    for point in points:
        policy = space.policy(point)
        kind = point["controller"]
        what = {"fixed": point["k"], "rate": "fitted"}.get(kind, point.get(f"{kind}.threshold"))
        found.append(replace(policy, name=f"{kind}-{what}-b{policy.draft_kv.budget}"))
    return found
