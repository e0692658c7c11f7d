"""Replay's schedule of partial rounds is the engine's, whatever the full period, the buffer and the batch."""

from types import SimpleNamespace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from specdial.engine.verification import Schedule as EngineSchedule
from specdial.policies.schema import policy_from_mapping
from specdial.simulator.schedule import Schedule


def lossy(k, period, buffer, budget):
    kv = {"mode": "partial", "full_period": period, "buffer": buffer, "budget": budget}
    return policy_from_mapping({"controller": {"kind": "fixed", "k": k}, "verify_kv": kv})


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9), st.just(0) | st.integers(5, 30)), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 2**32 - 1),
)
def test_rounds_are_partial_where_the_engine_s_are(settings_of, count, batch, seed):
    """Sequences start at 40 tokens, of which a budget of 64 holds all for a while where there is a buffer."""
    policies = [lossy(k, period, buffer, 64) for k, period, buffer in settings_of]
    ours = Schedule(policies, count, batch, None)
    engines = []
    for policy in policies:
        for first in range(0, count, batch):
            size = min(batch, count - first)
            cache = SimpleNamespace(on_gpu=False, host_lengths=np.zeros(size, np.int64))
            s = SimpleNamespace(batch=size, committed=np.full(size, 40), cache=cache)
            engines.append((policy, s, EngineSchedule(s, policy)))
    random = np.random.default_rng(seed)
    committed = np.full(len(policies) * count, 40)
    for _ in range(25):
        verified = ours.next(np.zeros(len(committed), np.int64), committed)
        emitted = random.integers(0, 5, len(committed))
        first = 0
        for policy, s, engine in engines:
            mine = slice(first, first + s.batch)
            first += s.batch
            plan = engine.next(policy.verify_kv)
            assert verified.partial[mine].tolist() == [plan.partial] * s.batch
            assert verified.since_full[mine].tolist() == [plan.since_full] * s.batch
            assert plan.partial or verified.recomputed[mine].max() == plan.recomputed
            emitted[mine] = np.minimum(emitted[mine], policy.k_max + 1)
            engine.note(plan, emitted[mine])
            s.committed = s.committed + emitted[mine]
        ours.note(verified, emitted)
        committed = committed + emitted
