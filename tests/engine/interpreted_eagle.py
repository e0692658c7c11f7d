"""Cases for Triton's interpreter: an EAGLE head's chains and trees through the kernels equal those of the references.

Started by test_eagle_captured. Products stay torch's; attention and token statistics are the kernels'.
"""

import numpy as np
import torch

from specdial.engine.drafters import make_drafter
from specdial.engine.eagle_training import new_head
from specdial.engine.sequences import Sequences
from specdial.policies.schema import policy_from_mapping

DRAFTER, FIXED = {"kind": "eagle", "model": "head"}, {"kind": "fixed", "k": 3}
CHAIN = policy_from_mapping({"drafter": DRAFTER, "controller": FIXED})
TREE = policy_from_mapping(
    {"drafter": {**DRAFTER, "tree": {"width": 2, "nodes": 4}}, "controller": {"kind": "fixed", "k": 2}}
)


def ready(decoder, backend, policy):
    """A ragged batch, and the drafter of its next round."""
    head = new_head(decoder, torch.arange(0, 288, 2), seed=0)
    s = Sequences(decoder, 160, 3, history=None, backend=backend, heads={"head": head})
    s.prefill([np.random.default_rng(n).integers(0, 256, n).tolist() for n in (60, 130, 5)], [8, 8, 8])
    drafter = make_drafter(s, policy)
    drafter.reader.start(3)
    return s, drafter


def drafted(decoder, backend):
    """Tokens, logits and signals of three steps."""
    s, drafter = ready(decoder, backend, CHAIN)
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


def test_kernels_grow_and_verify_the_tree_that_the_references_do(tiny_model):
    decoder = tiny_model("llama", head_dim=64, num_hidden_layers=2).decoder
    found = []
    for backend in ("reference", "triton"):
        s, drafter = ready(decoder, backend, TREE)
        signals = torch.zeros(2, 3, s.batch)
        tree = drafter.grow(2, signals)
        found.append(
            (tree, signals, s.forward_block(tree.tokens, padded=True, rows=False, branches=tree.branches()).logits)
        )
    (tree, signals, logits), (wanted, sure, reference) = found[1], found[0]
    for name in ("tokens", "parents", "depths"):
        assert torch.equal(getattr(tree, name), getattr(wanted, name))
    assert torch.allclose(signals, sure, atol=1e-3)
    assert torch.allclose(logits, reference, atol=1e-3)
