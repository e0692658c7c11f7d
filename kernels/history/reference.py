"""The ring of attention rows in plain torch: the specification of `push_rows`."""

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
