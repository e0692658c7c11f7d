"""Cases for Triton's interpreter: partial and recomputing verifications through the kernels equal the references'.

Started by test_partial_interpreted. On a CPU the products stay torch's; attention, statistics, scores of heads and
pages, selection and history are the kernels'. Leaves out capture, and whole rounds.
"""

import numpy as np
import pytest
import torch

from specdial.engine.cache import KVCache
from specdial.engine.drafters import make_drafter
from specdial.engine.job import history_spec
from specdial.engine.sequences import Sequences
from specdial.engine.verification import Plan, verifications
from specdial.policies.schema import policy_from_mapping

PROMPTS = [np.random.default_rng(n).integers(0, 256, n).tolist() for n in (40, 72, 5)]
PARTIAL = {"mode": "partial", "full_period": 3, "budget": 24, "sink": 2, "recent": 8}
MODEL = {"drafter": {"kind": "model", "model": "draft"}}
HEADS = {"target": [[0, 1], [1, 0], [1, 3]], "draft": [[0, 1], [0, 2]]}
HYBRID = {**PARTIAL, "source": "hybrid", "scope": "model", "lookahead_tokens": 6}
SOURCES = {
    "recent": {"verify_kv": {"mode": "partial", "full_period": 3, "source": "recent"}},
    "history": {"verify_kv": PARTIAL},
    "hybrid": {"verify_kv": HYBRID, "scoring_heads": HEADS, **MODEL},
    "hybrid-window": {"verify_kv": HYBRID, "scoring_heads": {"draft": HEADS["draft"]}, **MODEL},
    "page_bound": {"verify_kv": {**PARTIAL, "source": "page_bound", "budget": 48, "page": 16, "recent": 16}},
}


@pytest.fixture(scope="module")
def decoders(tiny_model):
    target = tiny_model("llama", head_dim=64, num_hidden_layers=2)
    draft = tiny_model("llama", head_dim=64, num_hidden_layers=1, seed=2)
    return target.decoder, draft.decoder


def verified(decoders, policy, backend):
    """Logits of a partial block, then of a full one that recomputes five rows, and what history says after it."""
    target, draft = decoders
    s = Sequences(target, 96, 3, history=history_spec([policy]), backend=backend, companions={"draft": draft})
    s.prefill(PROMPTS, [12, 12, 12])
    lookup = policy.drafter.kind == "lookup"
    drafter = make_drafter(s, policy)
    queries, (verification,) = verifications(s, policy, [drafter])
    if queries is not None:
        queries.start()
    s.turn += 1
    block = torch.tensor([[5, 9, 11], [7, 7, 200], [1, 2, 3]])
    if not lookup:
        drafter.prepare(np.array([2, 2, 2]))
        steps = drafter.begin(2)
        for depth in range(2):
            steps.step(depth, block[:, depth])
    k = torch.tensor([2, 1, 0])
    found = []
    for plan in (Plan(partial=True, since_full=1), Plan(recomputed=5)):
        verification.prepare(plan)
        result = verification.block(block, plan, k=k, padded=True, rows=True)
        found.append(result.logits.clone())
        counts = torch.tensor([3, 2, 1])
        verification.settled(result, counts)
        s.advance(result, counts)
        s.commit([row[:n].tolist() for row, n in zip(block, counts.tolist())], counts.numpy())
    if s.history is not None:
        found.append(s.history.scores().clone())
    if queries is not None:
        found.append(queries.scores().clone())
    return found


@pytest.mark.parametrize("name", SOURCES)
def test_kernels_verify_what_the_references_verify(decoders, name, monkeypatch):
    monkeypatch.setattr(KVCache, "rounded", lambda cache, width: cache.capacity_tokens)  # as on a GPU
    whole = {"drafter": {"kind": "lookup"}, "controller": {"kind": "fixed", "k": 2}, **SOURCES[name]}
    policy = policy_from_mapping(whole)
    expected, found = (verified(decoders, policy, backend) for backend in ("reference", "triton"))
    for one, wanted in zip(found, expected, strict=True):
        assert torch.allclose(one, wanted, atol=2e-3 if one.dim() == 4 else 1e-4)
