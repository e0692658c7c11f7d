"""An exhaustive grid of policies, and the engine's clock over many of them on the same prefilled documents.

All are lossless and draft with the model itself over the selections that a dense trace recorded. Leaves out searching
and what the times say.
"""

import itertools
import sys
import time

import numpy as np

from specdial.engine.batches import Batches
from specdial.engine.sampling import Sampling
from specdial.engine.timed import decode_captured
from specdial.policies.file import policy_digest
from specdial.simulator.search import fixed_points
from specdial.simulator.space import Search, Space

KS = (2, 3, 4, 6, 8)  # longest drafts of controllers that look at signals
ENTROPY = (-0.1, 0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
CONFIDENCE = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9)
RATE = {"gamma": (0.25, 0.5, 1.0, 2.0, 4.0), "k": (4, 8), "rate_of_learning": (0.0, 0.02), "shift": (-1.0, 0.0, 1.0)}


def grid(whole, gamma):
    """The points: every controller on every recorded selection. gamma: of the fastest fixed k, as `tune` takes it."""
    space, points = Space.of(Search(), whole, gamma), []
    for arm in space.arms:
        for kind, values in (("entropy", ENTROPY), ("confidence", CONFIDENCE)):
            pairs = itertools.product(KS, values)
            points += [{"controller": kind, "k": k, "arm": arm, f"{kind}.threshold": value} for k, value in pairs]
        for factor, k in itertools.product(RATE["gamma"], RATE["k"]):
            at = {"controller": "rate", "k": k, "arm": arm, "rate.gamma": factor * space.gamma, "rate.beta": 0.9}
            points.append({**at, "rate.form": "paper"})
            for learned, shift in itertools.product(RATE["rate_of_learning"], RATE["shift"]):
                points.append({**at, "rate.form": "calibrated", "rate.learning_rate": learned, "rate.shift": shift})
    return list({policy_digest(p): p for p in (*fixed(whole), *map(space.policy, points))}.values())


def fixed(whole):
    """Every fixed k on every recorded selection."""
    space = Space.of(Search(), whole, gamma=0.3)
    return [space.policy(point) for point in fixed_points(space)]


def measured(job, groups, policies, repeats, until_s=float("inf")):
    """(us [groups, repeats, policies], outputs unlike plain's [policies]). groups: documents that decode together.

    policies[0] is plain. NaN where time was out.
    """
    times = np.full((len(groups), repeats, len(policies)), np.nan)
    differing = np.zeros(len(policies), int)
    batches = Batches(job, policies)
    for g, group in enumerate(groups):
        s, plain = batches.prefilled(group), None
        for repeat, step in itertools.product(range(repeats), range(len(policies))):
            if time.monotonic() > until_s:
                return times, differing
            p = (step + repeat) % len(policies)
            rounds = decode_captured(s, policies[p], Sampling(), [d.index for d in group])
            times[g, repeat, p] = sum(r.spent_us for r in rounds)
            plain = plain or s.outputs
            if repeat == 0:
                differing[p] += sum(a != b for a, b in zip(s.outputs, plain))
        print(f"  documents {group[0].index}..{group[-1].index}: {len(policies)} policies", file=sys.stderr, flush=True)
    return times, differing
