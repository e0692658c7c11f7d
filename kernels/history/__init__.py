"""History: a running score per key from the target's last committed attention rows."""

import torch

from specdial.kernels import Backend
from specdial.kernels.history.reference import push_rows_reference


def push_rows(
    ring: torch.Tensor, mass: torch.Tensor, lengths: torch.Tensor, committed: torch.Tensor, *, backend: Backend
) -> None:
    """Store the committed rows of a verification in the ring of the last W rows, in place.

    ring: [B, Hk, W, S] float32; mass: [B, Hk, T, S'] with S' <= S, row t being the query at position lengths[b]+t;
    committed: [B] integer, only rows t < committed[b] are stored, at slot (lengths[b]+t) % W. The slot depends on the
    position alone, so the ring's content, and the order of any sum over it, are functions of the committed sequence.
    """
    push_rows_reference(ring, mass, lengths, committed)
