"""The grid of lossy policies that prediction_lossy.py predicts and measures.

Leaves out what they are worth, and which scoring heads would be good ones.
"""

import itertools
from dataclasses import dataclass

from specdial.engine.trace.sources import heads_used, of_source
from specdial.policies.fields import to_plain
from specdial.policies.file import load_policy
from specdial.policies.schema import Drafter, ScoringHeads, VerifyKV, policy_from_mapping

KV = {"sink": 4, "recent": 64, "window": 16, "scope": "kv_head"}
DRAFT = {"sparse_self": {"draft_kv": {**KV, "budget": 256}}}  # of drafters that read a selection
SOURCES = {"model": ("history", "lookahead", "hybrid"), "eagle": ("page_bound", "recent")}
USUAL = ("history", "page_bound", "recent")


@dataclass(frozen=True, slots=True)
class Heads:
    """The scoring heads of every policy that has some, and hybrid's keys by lookahead."""

    scoring: ScoringHeads
    lookahead_tokens: int

    @classmethod
    def of(cls, a, config):
        """Those of a.policy, else the first heads of the middle layer, and two of the draft model's first layer."""
        if a.policy:
            tuned = load_policy(a.policy)
            return cls(tuned.scoring_heads, tuned.verify_kv.lookahead_tokens)
        target = tuple((config.layers // 2, head) for head in range(min(config.heads, 4)))
        return cls(ScoringHeads(target, ((0, 0), (0, 1))), min(a.budgets) // 4)

    def sources(self, kind):
        """From what a drafter's partial verifications choose keys."""
        return list(SOURCES.get(kind, USUAL))


def drafter_of(kind, a):
    """The drafter of a kind, with the model that the command line names for it."""
    return Drafter(kind=kind, model={"model": a.draft, "eagle": a.head}.get(kind, ""))


def base(kind, heads):
    """The partial verification that a drafter's others are variations of, never lossy itself."""
    if kind == "eagle":  # as in SpecPV: pages kept from one full round to the next
        return VerifyKV(mode="partial", source="page_bound", page=16, refresh="full", sink=32, recent=128)
    if kind == "model":
        return VerifyKV(mode="partial", source="hybrid", scope="model", lookahead_tokens=heads.lookahead_tokens)
    return VerifyKV(mode="partial", source="history", scope="model")


def verification(kind, heads):
    """(verify_kv, scoring_heads) of what is probed and timed, as plain settings: `base`, and its heads."""
    found = base(kind, heads)
    return to_plain(found), heads_used(heads.scoring, found.source)


def grid(a, heads):
    """{drafter: policies}: a.policies in turn over budgets, sources and drafters, while full period and k go round."""
    places = [
        (budget, source, kind)
        for budget, which in itertools.product(a.budgets, range(len(USUAL)))
        for kind in a.drafters
        if which < len(sources := heads.sources(kind))
        for source in [sources[which]]
    ]
    found = {kind: [] for kind in a.drafters}
    for number in range(a.policies):
        budget, source, kind = places[number % len(places)]
        mine = len(found[kind])  # periods and ks go round within a drafter
        period, k = a.periods[mine % len(a.periods)], a.k[(mine + mine // len(a.periods)) % len(a.k)]
        found[kind].append(policy_of(kind, source, budget, period, k=k, a=a, heads=heads))
    return found


def policy_of(kind, source, budget, period, *, k, a, heads):
    """One policy of the grid."""
    kv = {**to_plain(of_source(base(kind, heads), source, budget)), "full_period": period}
    return policy_from_mapping(
        {
            "name": f"{kind}-{source}-c{budget}-p{period}-k{k}",
            "drafter": to_plain(drafter_of(kind, a)),
            "controller": {"kind": "fixed", "k": k},
            "verify_kv": kv,
            "scoring_heads": heads_used(heads.scoring, source),
            **DRAFT.get(kind, {}),
        }
    )
