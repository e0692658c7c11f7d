"""What was not recorded is not guessed: lossy policies, and traces of them, are refused with the reason."""

from dataclasses import replace

import pyarrow as pa

from specdial.simulator.replay import replay


def test_a_lossy_policy_is_refused(trace, costs, policy):
    partial = {"mode": "partial", "full_period": 4}
    lossy = policy("fixed", name="lossy", verify_kv=partial)
    cell = {"from_context_tokens": 4096, "overrides": {"verify_kv": partial}}
    sometimes = policy("fixed", name="sometimes", cells=[cell])
    always = policy("fixed", name="always", verify_kv={**partial, "full_period": 1})
    outcomes = {o.policy.name: o for o in replay(trace, costs, [lossy, sometimes, always])}
    for name in ("lossy", "sometimes"):
        assert (outcomes[name].level, outcomes[name].lossless) == ("refused", False)
        assert outcomes[name].reason.startswith("it is lossy: what a partial verification accepts was not recorded")
    assert (outcomes["always"].level, outcomes["always"].lossless) == ("exact", True)


def test_a_trace_of_partial_rounds_says_nothing_of_others(trace, costs, policy):
    at = trace.rounds.column_names.index("mode")
    modes = pa.array(["partial"] * trace.rounds.num_rows)
    partial = replace(trace, rounds=trace.rounds.set_column(at, trace.rounds.schema.field("mode"), modes))
    (outcome,) = replay(partial, costs, [policy("fixed")])
    assert outcome.level == "refused"
    assert outcome.reason.startswith("the trace holds partially verified rounds")
