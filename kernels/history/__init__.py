"""History: a running score per key (or page) from the target's last committed attention rows.

Two forms, both functions of the committed sequence alone: a window (a ring of the last W rows, and their sum) and an
exponential decay. Every count and length is read on the device; nothing waits for the host.
"""

import torch

from specdial.kernels import Backend
from specdial.kernels.checks import FLOATS, INTEGERS, check_backend, check_device, check_dtype, check_shape
from specdial.kernels.full_attention.statistics import Statistics
from specdial.kernels.history.reference import decay_rows_reference, push_rows_reference, window_score_reference

__all__ = ["decay_rows", "push_rows"]


def push_rows(
    ring: torch.Tensor,
    mass: torch.Tensor | Statistics,
    lengths: torch.Tensor,
    committed: torch.Tensor,
    *,
    backend: Backend,
    score: torch.Tensor | None = None,
) -> None:
    """Store the committed rows of a verification in the ring of the last W rows, in place.

    ring: [B, Hk, W, S] float32; mass: [B, Hk, T, S'] with S' <= S, row t being the query at position lengths[b]+t, or
    the raw `Statistics` of that verification, whose committed rows are normalised here (S then counts keys or pages);
    committed: [B] integer, only rows t < committed[b] are stored, at slot (lengths[b]+t) % W. The slot depends on the
    position alone, so the ring's content, and the order of any sum over it, are functions of the committed sequence.
    ring, mass and score may stack layers in their batch, [layers * B, ...], over lengths and committed [B].
    score: optional [B, Hk, S] float32, set to the ring's sum over slots, in a fixed order (the windowed score).
    Raises ValueError on a wrong shape, dtype, device or backend.
    """
    check_shape("ring", ring, (None, None, None, None))
    check_dtype("ring", ring, (torch.float32,))
    B, Hk, W, S = ring.shape
    if W == 0 or not ring.is_contiguous():
        raise ValueError(f"ring {list(ring.shape)} with strides {list(ring.stride())} must be contiguous with W > 0")
    _check_rows(mass, lengths, committed, batch=B, heads=Hk, width=S, device=ring.device, backend=backend)
    if score is not None:
        _check_score(score, (B, Hk, S), ring.device)
    if backend == "reference":
        layers = B // lengths.shape[0]
        push_rows_reference(ring, _normalised(mass), lengths.repeat(layers), committed.repeat(layers))
        if score is not None:
            window_score_reference(ring, score)
        return
    from specdial.kernels.history import launch

    launch.push_rows_triton(ring, mass, lengths, committed, score=score)


def decay_rows(
    score: torch.Tensor,
    mass: torch.Tensor | Statistics,
    lengths: torch.Tensor,
    committed: torch.Tensor,
    *,
    decay: float,
    backend: Backend,
) -> None:
    """Fold the committed rows into a decayed score, in place: score = decay * score + row, once per row, in order.

    score: [B, Hk, S] float32; mass, lengths, committed as in `push_rows`. Row by row, so that the bits do not depend on
    how many rows a round committed. Raises ValueError on a wrong shape, dtype, device, backend or decay outside [0, 1].
    """
    check_shape("score", score, (None, None, None))
    _check_score(score, tuple(score.shape), score.device)
    B, Hk, S = score.shape
    _check_rows(mass, lengths, committed, batch=B, heads=Hk, width=S, device=score.device, backend=backend)
    if not 0.0 <= decay <= 1.0:
        raise ValueError(f"decay is {decay}, expected a number in [0, 1]")
    if backend == "reference":
        decay_rows_reference(score, _normalised(mass), committed.repeat(B // committed.shape[0]), decay)
        return
    from specdial.kernels.history import launch

    launch.decay_rows_triton(score, mass, lengths, committed, decay=decay)


def _normalised(mass: torch.Tensor | Statistics) -> torch.Tensor:
    if isinstance(mass, torch.Tensor):
        return mass
    from specdial.kernels.full_attention.reference import normalise_reference

    return normalise_reference(mass)


def _check_score(score: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    check_shape("score", score, shape)
    check_dtype("score", score, (torch.float32,))
    check_device("score", score, device)
    if not score.is_contiguous():
        raise ValueError(f"score {list(score.shape)} has strides {list(score.stride())}, expected contiguous")


def _check_rows(
    mass: torch.Tensor | Statistics,
    lengths: torch.Tensor,
    committed: torch.Tensor,
    *,
    batch: int,
    heads: int,
    width: int,
    device: torch.device,
    backend: str,
) -> None:
    if isinstance(mass, Statistics):
        check_shape("mass.lse", mass.lse, (batch, heads, None))
        check_device("mass.lse", mass.lse, device)
        given, shape = mass.width, list(mass.log_mass.shape)
    else:
        check_shape("mass", mass, (batch, heads, None, None))
        check_dtype("mass", mass, FLOATS)
        check_device("mass", mass, device)
        given, shape = mass.shape[3], list(mass.shape)
    if given > width:
        raise ValueError(f"mass {shape} is wider than the history, {given} > {width}")
    for name, tensor in (("lengths", lengths), ("committed", committed)):
        check_shape(name, tensor, (None,))
        if tensor.shape != lengths.shape or tensor.shape[0] == 0 or batch % tensor.shape[0]:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, expected one entry for each of {batch} sequences")
        check_dtype(name, tensor, INTEGERS)
        check_device(name, tensor, device)
    check_backend(backend, device)
