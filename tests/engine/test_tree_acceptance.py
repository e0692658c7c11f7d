"""What a verified tree emits: in sampled decoding the target's own distribution, by the rule that SpecInfer states."""

import numpy as np
import pytest
import torch
from scipy.stats import chi2_contingency, chisquare

from specdial.engine.acceptance import Judge
from specdial.engine.drafters.tree import DraftTree
from specdial.engine.round_state import RoundState
from specdial.engine.sampling import Sampling, distribution
from specdial.engine.tree_acceptance import follow
from specdial.kernels.settle import settle

LANES, V, DEPTH = 12_000, 6, 2
WARM = Sampling(temperature=0.7)
TOKENS, PARENTS, DEPTHS = [3, 0, 4, 1, 5, 2, 0], [0, 0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 2, 2, 2]


def drafted_tree(lanes):
    """The pending token 3; after it 0, 4 or 1; after 0 again 5 or 2, after 4 again 0."""
    return DraftTree(*(torch.tensor(x).repeat(lanes, 1) for x in (TOKENS, PARENTS, DEPTHS)), DEPTH)


def target_logits():
    return 1.5 * torch.randn(len(TOKENS), V, generator=torch.Generator().manual_seed(3))  # [T, V]


def settled(sampling, *, room, synthetic=(), lanes=LANES):
    """The state of a round that verified the tree, and its rows of the path. room: [B] tokens that may be emitted."""
    state = RoundState(lanes, DEPTH, device=torch.device("cpu"), backend="reference")
    judge = Judge(state, sampling, [], vocab=V, synthetic=synthetic)
    state.uniforms.copy_(torch.rand(state.uniforms.shape, generator=torch.Generator().manual_seed(1)))
    state.acceptance.copy_(torch.tensor(judge.synthetic or [0.0] * DEPTH))
    state.k.fill_(DEPTH)
    rows, choices, judged = follow(judge, drafted_tree(lanes), target_logits().expand(lanes, -1, -1))
    none = torch.zeros(lanes, dtype=torch.int64)
    settle(
        state.drafts, choices, state.k, room.clone(), stop_ids=torch.tensor([-1]), emitted=state.emitted,
        accepted=state.accepted, counts=state.counts, pending=none.clone(), before=none.clone(), judged=judged,
        backend="reference",
    )  # fmt: skip
    return state, rows


def recursive_rejection(*, renormalise=True):
    """Tokens [LANES, 3] of the rule as SpecInfer states it, lane by lane: sibling after sibling, -1 past the end."""
    random, p = np.random.default_rng(2), distribution(target_logits(), WARM).numpy().astype(np.float64)
    emitted = np.full((LANES, DEPTH + 1), -1)
    for tokens in emitted:
        row, place = 0, 0
        while place <= DEPTH:
            left, found = p[row].copy(), None
            for child in (i for i in range(1, len(TOKENS)) if PARENTS[i] == row):
                if random.random() < left[TOKENS[child]]:
                    found = child
                    break
                left[TOKENS[child]] = 0.0
                left /= left.sum() if renormalise else 1.0
            tokens[place] = TOKENS[found] if found else random.choice(V, p=left / left.sum())
            if found is None:
                break
            row, place = found, place + 1
    return emitted


def counted(emitted):
    """How often each sequence of tokens was emitted, [(V + 1) ** 3]."""
    places = (np.asarray(emitted) + 1) @ (V + 1) ** np.arange(DEPTH + 1)
    return np.bincount(places, minlength=(V + 1) ** (DEPTH + 1))


def test_sampled_tokens_follow_the_target_as_recursive_rejection_has_them():
    state, _ = settled(WARM, room=torch.tensor([9, 9, 9, 1, 2, 9]).repeat(LANES // 6))
    p = distribution(target_logits(), WARM).double()  # [T, V]
    whole = p / p.sum(1, keepdim=True)
    assert chisquare(np.bincount(state.emitted[:, 0], minlength=V), LANES * whole[0].numpy()).pvalue > 0.001
    for node, token in ((1, 0), (2, 4), (3, 1)):  # after a child that was accepted, be it a leaf
        second = state.emitted[(state.emitted[:, 0] == token) & (state.emitted[:, 1] >= 0), 1]
        assert chisquare(np.bincount(second, minlength=V), len(second) * whole[node].numpy()).pvalue > 0.001
    free, _ = settled(WARM, room=torch.full((LANES,), 9))
    table = np.stack([counted(free.emitted), counted(recursive_rejection())])
    assert chi2_contingency(table[:, table.sum(0) >= 10]).pvalue > 0.001
    broken = np.stack([table[0], counted(recursive_rejection(renormalise=False))])
    assert chi2_contingency(broken[:, broken.sum(0) >= 10]).pvalue < 1e-6, "the test tells rules apart"
    assert torch.allclose(free.accept_prob[:, 0].double(), p[0, [0, 4, 1]].sum(), atol=1e-6)
    after = torch.where(free.emitted[:, 0] == 0, p[1, [5, 2]].sum(), torch.where(free.emitted[:, 0] == 4, p[2, 0], 0.0))
    assert torch.allclose(free.accept_prob[:, 1].double(), after, atol=1e-6)


def test_the_path_is_the_rows_of_what_was_accepted():
    state, rows = settled(WARM, room=torch.full((LANES,), 9))
    for depth in range(1, DEPTH + 1):
        on = state.accepted >= depth
        assert 0 < int(on.sum()) < LANES
        assert torch.equal(torch.tensor(TOKENS)[rows[on, depth]], state.emitted[on, depth - 1])
        assert torch.equal(torch.tensor(PARENTS)[rows[on, depth]], rows[on, depth - 1])
        assert (state.drafts[~on, depth - 1] == -1).all()


@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["greedy", "sampled"])
def test_synthetic_acceptance_looks_at_no_draft(sampling):
    state, rows = settled(sampling, room=torch.full((LANES,), 9), synthetic=(0.6, 0.5))
    counts = np.bincount(state.accepted, minlength=3)
    assert chisquare(counts, LANES * np.array([0.4, 0.3, 0.3])).pvalue > 0.001
    assert rows.unique(dim=0).tolist() == [[0, 1, 2]]
    assert (state.emitted[state.accepted == 2, :2] == torch.tensor(TOKENS[1:3])).all()
