"""History in plain torch: the specification of `push_rows` and `decay_rows`."""

import torch


def push_rows_reference(ring: torch.Tensor, mass: torch.Tensor, lengths: torch.Tensor, committed: torch.Tensor) -> None:
    """See `push_rows`. Only the last W committed rows of each sequence are written, so no slot is written twice."""
    W, width = ring.shape[2], mass.shape[3]
    for b, (length, rows) in enumerate(zip(lengths.tolist(), committed.tolist())):
        first = max(0, rows - W)
        if first == rows:
            continue
        slots = [(length + t) % W for t in range(first, rows)]
        ring[b, :, slots, :width] = mass[b, :, first:rows].to(ring.dtype)
        ring[b, :, slots, width:] = 0.0


def window_score_reference(ring: torch.Tensor, score: torch.Tensor) -> None:
    """Sum over the ring slot by slot, so that the order, and with it the bits, follow from positions alone."""
    score.zero_()
    for slot in range(ring.shape[2]):
        score += ring[:, :, slot]


def decay_rows_reference(score: torch.Tensor, mass: torch.Tensor, committed: torch.Tensor, decay: float) -> None:
    """See `decay_rows`."""
    width = mass.shape[3]
    for b, rows in enumerate(committed.tolist()):
        for t in range(rows):
            score[b] *= decay
            score[b, :, :width] += mass[b, :, t]
