"""Replay under controllers that lag, against their rules said in plain Python, one position after another."""

import math

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from specdial.policies.schema import policy_from_mapping
from specdial.simulator.replay import replay, replay_rounds

KV = {"budget": 256, "sink": 4, "recent": 16}
TIE = 1e-9


def sigmoid(x):
    return 1.0 / (1.0 + math.exp(-min(max(x, -60.0), 60.0)))


class Tie(Exception):
    """Rounding decides."""


def beats(a, b):
    if abs(a - b) < TIE:
        raise Tie
    return a > b


class Entropy:
    def __init__(self, c):
        self.c = c

    def goes_on(self, seen):
        return not seen or beats(1.0 - math.sqrt(self.c.coefficient * seen[-1]["entropy_nats"]), self.c.threshold)

    def learn(self, drafts, accepted):
        pass


class Confidence(Entropy):
    def goes_on(self, seen):
        return not seen or beats(seen[-1]["top1_prob"], self.c.threshold)


class Rate:
    """The calibrated form, with its running rate of acceptance and its gradient steps."""

    def __init__(self, c):
        self.c, self.bias, self.slope, self.acceptance = c, c.bias, c.slope, c.acceptance

    def goes_on(self, seen):
        allowed = sorted(set(self.c.k_set)) or list(range(1, self.c.k_max + 1))
        m = len(seen)
        following = next((k for k in allowed if k > m), allowed[-1])
        return m not in allowed or beats(self.rate(seen, following), self.rate(seen, m))

    def rate(self, seen, k):
        ps = [sigmoid(self.bias - self.slope * d["entropy_nats"]) for d in seen]
        ps += [self.acceptance] * (k - len(seen))
        return (1.0 + sum(math.prod(ps[:i]) for i in range(1, len(ps) + 1))) / (k * self.c.gamma + 1.0)

    def learn(self, drafts, accepted):
        for i, draft in enumerate(drafts[: accepted + 1]):
            h, label = draft["entropy_nats"], float(i < accepted)
            self.acceptance = self.c.beta * self.acceptance + (1.0 - self.c.beta) * label
            step = self.c.learning_rate * (label - sigmoid(self.bias - self.slope * h))
            self.bias, self.slope = self.bias + step, max(self.slope - step * h, 0.0)


RULES = {"entropy": Entropy, "confidence": Confidence, "rate": Rate}


def naive_rounds(trace, policy):
    """Rows of (doc, context, k, accepted): after d drafts go on iff the rule would have after d - lag of them."""
    controller = policy.controller
    longest = max(getattr(controller, "k_set", ()), default=controller.k_max)
    drafts = {(r["doc"], r["position"], r["depth"]): r for r in trace.drafts.to_pylist() if r["arm"] == 1}
    rows = []
    for d in trace.meta["documents"]:
        rule, n, end = RULES[controller.kind](controller), d["prompt_tokens"], d["prompt_tokens"] + d["new_tokens"]
        while n < end:
            made = []
            while len(made) < min(longest, end - n - 1) and rule.goes_on(made[: max(len(made) - controller.lag, 0)]):
                made.append(drafts[d["doc"], n, len(made) + 1])
            accepted = next((i for i, draft in enumerate(made) if not draft["match"]), len(made))
            rule.learn(made, accepted)
            rows.append((d["doc"], n, len(made), accepted))
            n += min(accepted + 1, end - n)
    return rows


lags = st.integers(0, 1)
controllers = st.one_of(
    st.builds(
        lambda k, t, lag: {"kind": "entropy", "k_max": k, "threshold": t, "lag": lag},
        st.integers(1, 8),
        st.floats(0.2, 0.9),
        lags,
    ),
    st.builds(
        lambda k, t, lag: {"kind": "confidence", "k_max": k, "threshold": t, "lag": lag},
        st.integers(1, 8),
        st.floats(0.2, 0.9),
        lags,
    ),
    st.builds(
        lambda k, gamma, beta, ks, lag: {
            "kind": "rate",
            "k_max": k,
            "gamma": gamma,
            "beta": beta,
            "lag": lag,
            "k_set": [allowed for allowed in ks if allowed <= k],
        },
        st.integers(1, 8),
        st.floats(0.05, 1.0),
        st.floats(0.5, 1.0),
        st.sampled_from([[], [1, 3, 8], [2, 4]]),
        lags,
    ),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made=st.lists(controllers, min_size=1, max_size=5))
def test_replay_stops_where_the_lagging_rule_said_plainly_does(trace, made):
    """Several policies at once, lags mixed among the lanes of a kind."""
    policies = [policy_from_mapping({"controller": c, "draft_kv": KV}) for c in made]
    for policy, log in zip(policies, replay_rounds(trace, policies), strict=True):
        try:
            expected = naive_rounds(trace, policy)
        except Tie:
            assume(False)
        columns = (log.doc, log.context_tokens, log.k, log.accepted)
        assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected


@pytest.mark.parametrize("kind", ["entropy", "confidence"])
def test_a_lagging_rule_drafts_one_token_more_where_it_may(trace, costs, policy, kind):
    """From the same position: one past the stop, unless that is past k_max or the end."""
    prompt, lag = ([policy(kind, controller={"threshold": 0.6, "lag": lag})] for lag in (0, 1))
    ((now,), (late,)) = (replay_rounds(trace, policies) for policies in (prompt, lag))
    stops = {(d, n): k for d, n, k in zip(now.doc, now.context_tokens, now.k, strict=True)}
    end = {d["doc"]: d["prompt_tokens"] + d["new_tokens"] for d in trace.meta["documents"]}
    shared = 0
    for d, n, k in zip(late.doc, late.context_tokens, late.k, strict=True):
        if (d, n) in stops:
            shared += 1
            assert k == min(stops[d, n] + 1, 8, max(end[d] - n - 1, 0))
    assert shared > 20
    outcomes = replay(trace, costs, [*prompt, *lag])
    assert [o.level for o in outcomes] == ["exact", "exact"]
    assert outcomes[0].k < outcomes[1].k
