"""How the rows of a block descend from each other where they are no chain: what passes over trees of drafts go by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Branches:
    """Of T rows of each of B sequences. depths: [B, T], a row's position behind where the block begins; its key's slot
    follows the rows' order all the same. ancestors: [B, T, T] bool, the rows each row sees, itself included."""

    depths: Tensor
    ancestors: Tensor

    def padded(self, rows: int) -> Branches:
        """With rows behind, up to so many, that see everything and are seen by none but themselves."""
        more = rows - self.depths.shape[1]
        if more == 0:
            return self
        seen = F.pad(F.pad(self.ancestors, (0, more)), (0, 0, 0, more), value=True)  # [B, rows, rows]
        return Branches(F.pad(self.depths, (0, more)), seen)

    def behind(self, first: Tensor, rows: int) -> Branches:
        """As rows first[b] and following of a block of `rows` rows, [B] integer, the others being a chain."""
        B, T = self.depths.shape
        own = first[:, None] + torch.arange(T, device=first.device)  # [B, T]
        depths = torch.arange(rows, device=first.device).repeat(B, 1)  # [B, rows]
        seen = torch.ones(rows, rows, dtype=torch.bool, device=first.device).tril().repeat(B, 1, 1)  # [B, rows, rows]
        lanes = torch.arange(B, device=first.device)[:, None, None]
        seen[lanes, own[:, :, None], own[:, None, :]] = self.ancestors
        return Branches(depths.scatter(1, own, first[:, None] + self.depths), seen)
