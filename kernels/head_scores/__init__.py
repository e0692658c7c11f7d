"""Scores over the full context from a handful of query heads: Dustin's estimate of which keys the target will need.

Dustin's history is the attention of the last committed row in a few target heads, its lookahead the attention of every
draft step in a few drafter heads. Reads K of the kv heads concerned once, and no V.
"""

import torch

from specdial.kernels import Backend
from specdial.kernels.checks import (
    FLOATS,
    INTEGERS,
    check_backend,
    check_device,
    check_dtype,
    check_last_stride,
    check_shape,
)
from specdial.kernels.head_scores.reference import head_scores_reference

__all__ = ["head_scores"]


def head_scores(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    lengths: torch.Tensor,
    heads: tuple[int, ...],
    *,
    backend: Backend,
    row_weights: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """score[b, n] = sum over rows r and `heads` h of row_weights[b, r] * softmax attention of q[b, r, h] to key n.

    q: [B, R, H, D], row r being the query at position lengths[b] + r, which sees keys 0 .. lengths[b]+r;
    k_cache: [B, Hk, S, D]; lengths: [B] integer; heads: distinct query heads of this layer, fixed by the policy.
    row_weights: [B, R] float32 on the device, default ones; a row of weight 0 is not read. One-hot at committed-1 gives
    Dustin's history, ones over the drafted rows its lookahead.
    out: [B, S] float32, contiguous: when given, the scores are added to it, so that layers and draft steps accumulate.
    Returns the scores, [B, S] float32, zero past the last visible key. Raises ValueError on a wrong argument.
    The first "triton" call with a given `heads` copies a small table to the device: make it outside graph capture.
    """
    check_shape("q", q, (None, None, None, None))
    B, R, H, D = q.shape
    check_shape("k_cache", k_cache, (B, None, None, D))
    Hk, S = k_cache.shape[1], k_cache.shape[2]
    check_shape("lengths", lengths, (B,))
    if B == 0 or R == 0 or Hk == 0 or H == 0 or H % Hk != 0:
        raise ValueError(f"q {list(q.shape)} does not fit k_cache {list(k_cache.shape)}: need B, R > 0 and H % Hk = 0")
    if not heads or len(set(heads)) != len(heads) or min(heads) < 0 or max(heads) >= H:
        raise ValueError(f"heads {list(heads)} must be distinct heads of q {list(q.shape)}")
    check_dtype("q", q, FLOATS)
    check_dtype("k_cache", k_cache, (q.dtype,))
    check_dtype("lengths", lengths, INTEGERS)
    for name, tensor in (("k_cache", k_cache), ("lengths", lengths)):
        check_device(name, tensor, q.device)
    check_last_stride("q", q)
    check_last_stride("k_cache", k_cache)
    check_backend(backend, q.device)
    for name, given, shape in (("row_weights", row_weights, (B, R)), ("out", out, (B, S))):
        if given is not None:
            check_shape(name, given, shape)
            check_dtype(name, given, (torch.float32,))
            check_device(name, given, q.device)
            if not given.is_contiguous():
                raise ValueError(f"{name} {list(given.shape)} has strides {list(given.stride())}, expected contiguous")
    if backend == "reference":
        return head_scores_reference(q, k_cache, lengths, heads, row_weights=row_weights, out=out)
    if D not in (16, 32, 64, 128, 256):
        raise ValueError(f'q {list(q.shape)} has head dim {D}, backend "triton" takes 16, 32, 64, 128 or 256')
    from specdial.kernels.head_scores import launch

    return launch.head_scores_triton(q, k_cache, lengths, heads, row_weights=row_weights, out=out)
