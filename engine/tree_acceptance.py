"""A verified tree of drafts in a round: which path is accepted, and how it becomes what a chain's round leaves.

The target chooses a token after each row, greedily or by drawing from its distribution, and the path goes on as long as
a child is that token. Keys, which the pass left in the order of the rows, and hidden states of the path then move to
where a chain has them.

Drawing is exact whatever the drafts are, which are not random. It is recursive rejection sampling (Miao et al. 2024,
SpecInfer; EAGLE-2) with certain proposals: that accepts sibling after sibling x with probability p(x) / (1 - p of those
rejected), hence child x with p(x) in all, and otherwise draws from p without the children, which is a draw from p.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from specdial.engine.acceptance import Judge
from specdial.engine.drafters.tree import DraftTree
from specdial.engine.sampling import distribution, draw
from specdial.engine.sequences import Block, Sequences
from specdial.engine.states import Tapper
from specdial.kernels.token_statistics import logit_statistics


def follow(judge: Judge, tree: DraftTree, logits: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Walk down verified trees with logits [B, T, V]: a pass.

    Returns the rows of the path and the target's choice after each, [B, K+1] both, the last row again where the path
    has ended, and whether `state.accepted` is decided. The path's drafts are put into the round's block as a chain's
    are, then -1, which is no choice. Synthetic acceptance looks at no draft: the first K rows stand for a path.
    """
    state, K = judge.state, tree.depth
    lanes = torch.arange(state.batch, device=logits.device)
    if judge.synthetic:
        state.block[:, 1 : K + 1] = tree.tokens[:, 1 : K + 1]
        judge.take(K)
        choices, judged = judge.choices(logits[:, : K + 1], K)
        return torch.arange(K + 1, device=logits.device).expand_as(choices), choices, judged
    tokens, row = tree.tokens[:, 1:], torch.zeros_like(lanes)  # [B, N], [B]
    going = torch.ones_like(lanes, dtype=torch.bool)  # [B]
    rows, chosen = [row], []
    greedy = judge.sampling.greedy
    best = logit_statistics(logits.flatten(0, 1), backend=state.backend)[0].view(logits.shape[:2]) if greedy else None
    for depth in range(K + 1):
        children = (tree.parents[:, 1:] == row[:, None]) & going[:, None]  # [B, N]
        if best is not None:
            choice = best[lanes, row]  # [B]
        else:
            p = distribution(logits[lanes, row], judge.sampling)  # [B, V]
            choice = draw(p, state.uniforms[:, state.most_drafts + depth])
            if depth < K:
                state.accept_prob[:, depth] = (p.gather(1, tokens) * children).sum(dim=1)
        chosen.append(choice)
        if depth == K:
            break
        children &= tokens == choice[:, None]
        going = children.any(dim=1)
        node = children.to(torch.int8).argmax(dim=1)  # [B]
        row = torch.where(going, node + 1, row)
        state.block[:, depth + 1] = torch.where(going, tokens[lanes, node], -1)
        rows.append(row)
    return torch.stack(rows, dim=1), torch.stack(chosen, dim=1), False


def straighten(s: Sequences, block: Block, rows: Tensor, readers: Collection[Tapper]) -> Block:
    """Let the rows [B, K+1] of a verified tree stand where a chain's do, in keys and in what readers saw: a pass.

    Returns the block that they make, logits [B, K+1, V]. No row of a path stands before its place in it, and all are
    read before one is written.
    """
    lanes = torch.arange(s.batch, device=rows.device)[:, None]  # [B, 1]
    start = s.cache.lengths[:, None]  # [B, 1]
    found, places = start + rows, start + torch.arange(rows.shape[1], device=rows.device)  # [B, K+1] each
    for kept in (s.cache.k, s.cache.v):  # [L, B, Hk, S, D]
        kept[:, lanes, :, places] = kept[:, lanes, :, found]
    first = 0 if block.first_row is None else block.first_row[:, None]  # [B, 1] of the new rows
    for reader in readers:
        reader.follow(rows + first)
    return Block(block.logits[lanes, rows], None)
