"""Selection: which cached keys a sparse pass reads, sink ∪ top-scored ∪ recent."""

import torch

from specdial.kernels import Backend
from specdial.kernels.selection.reference import select_reference


def select(
    scores: torch.Tensor, lengths: torch.Tensor, *, budget: int, sink: int, recent: int, backend: Backend
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose `budget` keys per row: the first `sink`, the last `recent`, and the highest-scored between them.

    scores: [..., B, R, S] float, larger is better, R rows (kv heads) per sequence; lengths: [B] integer, valid keys.
    Ties go to the lowest index. Returns indices [..., B, R, budget] int32, ascending, and counts [B] int32 = min(budget,
    length); entries past the count repeat the last valid index (0 when there is none).
    """
    return select_reference(scores, lengths, budget=budget, sink=sink, recent=recent)
