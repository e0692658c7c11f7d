"""Cases for Triton's interpreter: drafts through the kernels equal drafts through the references.

Started by test_drafters_interpreted. On a CPU the products stay torch's; attention, page scores, selection and token
statistics are the kernels'. Leaves out capture, and whole rounds.
"""

import numpy as np
import pytest
import torch

from specdial.engine.drafters import make_drafter
from specdial.engine.sequences import Sequences
from specdial.policies.schema import policy_from_mapping

PROMPTS = [np.random.default_rng(n).integers(0, 256, n).tolist() for n in (60, 130, 5)]
PAGES = {"budget": 64, "sink": 1, "recent": 16, "page": 16}
DRAFTERS = {
    "quest": {"drafter": {"kind": "quest"}, "draft_kv": PAGES},
    "quest-layer": {"drafter": {"kind": "quest"}, "draft_kv": {**PAGES, "scope": "layer"}},
    "model": {"drafter": {"kind": "model", "model": "draft"}},
    "paged": {"drafter": {"kind": "model", "model": "draft", "budget": 96}},
}


@pytest.fixture(scope="module")
def decoders(tiny_model):
    """The draft model's vocabulary is the smaller one: logits padded with -inf reach the kernels."""
    target = tiny_model("llama", head_dim=64, num_hidden_layers=2)
    draft = tiny_model("llama", head_dim=64, num_hidden_layers=1, vocab_size=272, seed=2)
    return target.decoder, draft.decoder


def drafted(decoders, policy, backend):
    """Tokens, logits and signals of three steps."""
    target, draft = decoders
    s = Sequences(target, 160, 3, history=None, backend=backend, companions={"draft": draft})
    s.prefill(PROMPTS, [8, 8, 8])
    drafter = make_drafter(s, policy)
    s.turn += 1
    drafter.prepare(np.array([3, 3, 3]))
    steps, token, found = drafter.begin(3), s.pending.clone(), []
    for depth in range(3):
        proposal = steps.step(depth, token)
        token = proposal.token
        found.append((token.tolist(), proposal.logits.clone(), proposal.signals.clone()))
    return found


@pytest.mark.parametrize("name", DRAFTERS)
def test_kernels_draft_what_the_references_draft(decoders, name):
    policy = policy_from_mapping({"controller": {"kind": "fixed", "k": 3}, **DRAFTERS[name]})
    expected, found = (drafted(decoders, policy, backend) for backend in ("reference", "triton"))
    for (tokens, logits, signals), (wanted, reference, sure) in zip(found, expected, strict=True):
        assert tokens == wanted
        assert torch.allclose(logits, reference, atol=1e-4)
        assert torch.allclose(signals, sure, atol=1e-3)
