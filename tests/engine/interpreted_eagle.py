"""A case for Triton's interpreter: an EAGLE head's drafts through the kernels equal its drafts through the references.

Started by test_eagle_captured. Products stay torch's; attention and token statistics are the kernels'.
"""

import numpy as np
import torch

from specdial.engine.drafters import make_drafter
from specdial.engine.eagle_training import new_head
from specdial.engine.sequences import Sequences
from specdial.policies.schema import policy_from_mapping

POLICY = policy_from_mapping({"drafter": {"kind": "eagle", "model": "head"}, "controller": {"kind": "fixed", "k": 3}})


def drafted(decoder, backend):
    """Tokens, logits and signals of three steps on a ragged batch."""
    head = new_head(decoder, torch.arange(0, 288, 2), seed=0)
    s = Sequences(decoder, 160, 3, history=None, backend=backend, heads={"head": head})
    s.prefill([np.random.default_rng(n).integers(0, 256, n).tolist() for n in (60, 130, 5)], [8, 8, 8])
    drafter = make_drafter(s, POLICY)
    drafter.reader.start(3)
    steps, token, found = drafter.begin(3), s.pending.clone(), []
    for depth in range(3):
        proposal = steps.step(depth, token)
        token = proposal.token
        found.append((token.tolist(), proposal.logits.clone(), proposal.signals.clone()))
    return found


def test_kernels_draft_what_the_references_draft(tiny_model):
    decoder = tiny_model("llama", head_dim=64, num_hidden_layers=2).decoder
    expected, found = (drafted(decoder, backend) for backend in ("reference", "triton"))
    for (tokens, logits, signals), (wanted, reference, sure) in zip(found, expected, strict=True):
        assert tokens == wanted
        assert torch.allclose(logits, reference, atol=1e-4)
        assert torch.allclose(signals, sure, atol=1e-3)
