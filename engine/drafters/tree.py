"""An EAGLE-3 head that drafts trees: the likeliest continuations, not one (EAGLE-2's dynamic trees, Li et al. 2024).

The root, a sequence's pending token, proposes `width` tokens. At each further depth the `width` best proposals of the
depth before are drafted on and propose `width` tokens each; the best have the largest sum of log-probabilities from
the root. Of all proposals the `nodes` best are verified. None is likelier than its parent, so the parents of those are
among them. Leaves out what happens to the tree then (engine/tree_acceptance).
"""

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from specdial.engine.branches import Branches
from specdial.engine.drafters.eagle import Eagle
from specdial.engine.sequences import Sequences
from specdial.kernels.token_statistics import logit_statistics
from specdial.policies.drafting import Tree
from specdial.policies.errors import UserError


@dataclass(frozen=True, slots=True)
class DraftTree:
    """A tree of drafts for each of B sequences, T rows, parents before children: row 0 is the pending token.

    tokens: [B, T]; parents: [B, T], the row of each one's parent, 0 for row 0; depths: [B, T], 0 for row 0; depth: the
    most there is room for.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    depth: int

    def branches(self) -> Branches:
        """The same for the passes that verify it."""
        B, T = self.tokens.shape
        found = torch.eye(T, dtype=torch.bool, device=self.tokens.device).repeat(B, 1, 1)  # [B, T, T]
        above = self.parents  # [B, T]
        for _ in range(self.depth):
            found.scatter_(2, above[..., None], True)
            above = above.gather(1, above)
        return Branches(self.depths, found)


class TreeEagle(Eagle):
    """Trees of drafts by one of the heads that read along."""

    def __init__(self, sequences: Sequences, name: str, tree: Tree) -> None:
        """Raises ValueError without such a head, UserError on prompts of one token or a tree wider than its words."""
        super().__init__(sequences, name)
        words = self.reader.head.config.draft_vocab
        if tree.width > words:
            raise UserError(
                f"drafter.tree.width is {tree.width}, the head drafts {words} tokens",
                f"use at most {words}",
                field="drafter.tree.width",
            )
        self.s, self.tree = sequences, tree
        self.key: Hashable = ("eagle", name, tree)

    @torch.inference_mode()
    def grow(self, depth: int, signals: Tensor) -> DraftTree:
        """Draft trees `depth` >= 1 deep: a pass. signals: [K, 3, B], set to those of the best draft at each depth."""
        s, head, W = self.s, self.reader.head, self.tree.width
        device, B = s.pending.device, s.batch
        lanes = torch.arange(B, device=device)[:, None]  # [B, 1]
        itself = torch.eye(W, dtype=torch.bool, device=device).expand(B, W, W)
        self.reader.read()
        outputs = self.reader.waiting.outputs[0][:, None]  # [B, R, hidden]: R is 1, then W
        totals = torch.zeros(B, 1, device=device)  # [B, R]
        rooted = torch.zeros(B, 1, dtype=torch.int64, device=device)  # [B, R] place among all proposals; the root is 0
        above = torch.zeros(B, 1, 0, dtype=torch.bool, device=device)  # [B, R, those drafted on]
        tokens, scores, parents, depths = [s.pending[:, None]], [totals], [rooted], [rooted]
        for level in range(depth):
            logits = head.logits(outputs)  # [B, R, draft_vocab]
            signals[level] = torch.stack(logit_statistics(logits[:, 0], backend=s.backend)[1:])
            found, places = torch.log_softmax(logits, dim=-1).topk(W)  # [B, R, W] each
            totals = (totals[..., None] + found).flatten(1)  # [B, R W]
            tokens.append(head.token_ids[places].flatten(1))
            scores.append(totals)
            parents.append(rooted[..., None].expand(places.shape).flatten(1))
            depths.append(torch.full_like(parents[-1], level + 1))
            if level + 1 < depth:
                before = 1 + sum(t.shape[1] for t in scores[1:-1])
                totals, kept = totals.topk(W)  # [B, W] each
                rooted, parent = before + kept, kept // W  # [B, W] each
                above = torch.cat([above[lanes, parent], itself], dim=2)  # [B, W, (level + 1) W]
                hidden = outputs[lanes, parent]  # [B, W, hidden]
                outputs = self.reader.go_wide(level + 1, tokens[-1].gather(1, kept), hidden, above)
        best = torch.cat(scores, 1).sort(dim=1, descending=True, stable=True).indices  # equals: the parent first
        best = best[:, : self.tree.size(depth) + 1].sort(dim=1).values  # [B, T]
        rows = torch.arange(best.shape[1], device=device).expand_as(best)  # [B, T]
        proposals = torch.cat(parents, 1)  # [B, P]
        row_of = torch.zeros_like(proposals).scatter(1, best, rows)  # [B, P]
        return DraftTree(
            tokens=torch.cat(tokens, 1).gather(1, best),
            parents=row_of.gather(1, proposals.gather(1, best)),
            depths=torch.cat(depths, 1).gather(1, best),
            depth=depth,
        )
