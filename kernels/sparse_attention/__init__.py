"""Sparse attention: T query positions over a selection of cached keys plus the tokens drafted this round."""

from collections.abc import Sequence

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
from specdial.kernels.rope_cache.reference import rope_and_cache_reference
from specdial.kernels.sparse_attention.reference import sparse_attention_reference
from specdial.kernels.sparse_attention.workspace import SparseWorkspace

__all__ = ["HEAD_DIMS", "SparseWorkspace", "rotate_and_attend", "sparse_attention", "workspace_for"]

HEAD_DIMS = (64, 128)
MAX_SLAB_ELEMENTS = 2**31  # offsets inside one head's keys are int32


def sparse_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    indices: torch.Tensor,
    counts: torch.Tensor,
    *,
    tail_start: torch.Tensor,
    lengths: torch.Tensor,
    backend: Backend,
    page: int = 1,
    workspace: SparseWorkspace | None = None,
    fresh: bool = False,
    ancestors: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention of row t over the selected keys and the tail tail_start[b] .. lengths[b]+t.

    q: [B, T, H, D], D 64 or 128, T query positions that follow lengths[b] cached ones; k_cache, v_cache: [B, Hk, S, D],
    equal strides, the block's own keys already written at lengths[b] .. lengths[b]+T-1; indices: [B, Hk, C] int32, of
    which the first counts ([B] or [B, Hk] integer) are used: token positions, or page numbers when page > 1; it may be
    an expanded view (a selection shared by heads). tail_start, lengths: [B] integer, tail_start <= lengths. The tail
    holds the tokens since the selection, those drafted this round included. Every selected position must lie before
    tail_start, or its key counts twice: with pages, start the tail at a multiple of `page`. A count of 0 leaves the
    tail alone. Slots past the count may hold anything.
    ancestors: [B, T, T] bool, instead of causal: of the block's own keys row t sees those that ancestors[b, t] says.

    Returns [B, T, H, D] in q's dtype. Scores are scaled by D**-0.5, the softmax is in float32.
    workspace: reused between calls of backend "triton" (one stream at a time); without one, a call that splits the
    selection allocates and clears its own.
    fresh: the kernel just before this one made the selection. Otherwise, on a device with early launch, indices,
    counts, tail_start and lengths are read while that kernel may still run: they must be older than it.
    Raises ValueError for wrong shapes, dtypes, devices or strides.
    """
    _check(q, k_cache, v_cache, indices, counts)
    _check_lengths(q, tail_start=tail_start, lengths=lengths)
    check_backend(backend, q.device)
    if page < 1:
        raise ValueError(f"page is {page}, expected at least 1")
    if ancestors is not None:
        check_shape("ancestors", ancestors, (q.shape[0], q.shape[1], q.shape[1]))
        check_dtype("ancestors", ancestors, (torch.bool,))
        check_device("ancestors", ancestors, q.device)
        if not ancestors.is_contiguous():
            raise ValueError(f"ancestors has strides {list(ancestors.stride())}, expected contiguous")
    if backend == "reference":
        return sparse_attention_reference(
            q, k_cache, v_cache, indices, counts, tail_start=tail_start, lengths=lengths, page=page, ancestors=ancestors
        )
    from specdial.kernels.sparse_attention.triton import sparse_attention_triton

    return sparse_attention_triton(
        q, k_cache, v_cache, indices, counts, tail_start=tail_start, lengths=lengths, page=page, workspace=workspace,
        fresh=fresh, ancestors=ancestors,
    )  # fmt: skip


def rotate_and_attend(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    indices: torch.Tensor,
    counts: torch.Tensor,
    *,
    cos: torch.Tensor,
    sin: torch.Tensor,
    tail_start: torch.Tensor,
    lengths: torch.Tensor,
    backend: Backend,
    page: int = 1,
    workspace: SparseWorkspace | None = None,
) -> torch.Tensor:
    """`rope_and_cache`, then `sparse_attention`, for one new token of each sequence: [B, 1, H, D], in one launch.

    qkv: [B, 1, (H + 2 Hk) D], heads of q, then k, then v, contiguous; cos, sin: [P, D/2] float32, P >= S. A token
    whose position lengths[b] is outside the cache is written nowhere, and its result means nothing. The rest, and the
    errors, as there.
    """
    check_shape("qkv", qkv, (None, 1, None))
    check_shape("k_cache", k_cache, (qkv.shape[0], None, None, None))
    Hk, S, D = k_cache.shape[1:]
    if not qkv.is_contiguous() or D == 0 or qkv.shape[2] % D or qkv.shape[2] // D <= 2 * Hk:
        raise ValueError(f"qkv {list(qkv.shape)} does not fit k_cache {list(k_cache.shape)}, or is not contiguous")
    heads = qkv.view(qkv.shape[0], 1, -1, D)
    q = heads[:, :, : -2 * Hk]
    _check(q, k_cache, v_cache, indices, counts)
    _check_lengths(q, tail_start=tail_start, lengths=lengths)
    for name, table in (("cos", cos), ("sin", sin)):
        check_shape(name, table, (cos.shape[0], D // 2))
        check_dtype(name, table, (torch.float32,))
        check_device(name, table, qkv.device)
        check_last_stride(name, table)
        if table.shape[0] < S or table.stride(0) != cos.stride(0):
            raise ValueError(f"{name} {list(table.shape)} has fewer rows than the cache has slots, or another stride")
    check_backend(backend, qkv.device)
    if page < 1:
        raise ValueError(f"page is {page}, expected at least 1")
    if backend == "reference":
        q = rope_and_cache_reference(
            qkv, lengths, k_cache, v_cache, cos=cos, sin=sin, ahead=0, q_norm=None, k_norm=None, eps=0.0
        )
        return sparse_attention_reference(
            q, k_cache, v_cache, indices, counts, tail_start=tail_start, lengths=lengths, page=page
        )
    from specdial.kernels.sparse_attention.triton import sparse_attention_triton

    return sparse_attention_triton(
        heads, k_cache, v_cache, indices, counts, tail_start=tail_start, lengths=lengths, page=page,
        workspace=workspace, angles=(cos, sin),
    )  # fmt: skip


def workspace_for(
    shape: Sequence[int], k_cache: torch.Tensor, indices: torch.Tensor, *, page: int = 1
) -> SparseWorkspace:
    """A workspace for calls of backend "triton" on queries of `shape`, [B, T, H, D], and tensors like these.

    Allocate it before capturing a graph.
    """
    from specdial.kernels.sparse_attention.triton import plan, sizes

    B, T, H, D = shape
    Hk = k_cache.shape[1]
    rows = T * H // Hk
    config = plan(B * Hk, rows, indices.shape[2] * page + T, k_cache.dtype)
    partials, arrivals = sizes(B * Hk, rows, D, config)
    return SparseWorkspace.allocate(partials, arrivals, k_cache.device)


def _check(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, indices: torch.Tensor, counts: torch.Tensor
) -> None:
    """Raise ValueError unless the tensors fit together."""
    check_shape("q", q, (None, None, None, None))
    B, T, H, D = q.shape
    check_shape("k_cache", k_cache, (B, None, None, D))
    check_shape("v_cache", v_cache, tuple(k_cache.shape))
    Hk, S = k_cache.shape[1], k_cache.shape[2]
    check_dtype("q", q, FLOATS)
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_dtype(name, tensor, (q.dtype,))
        check_device(name, tensor, q.device)
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("indices", indices)):
        check_last_stride(name, tensor)
    check_shape("indices", indices, (B, Hk, None))
    check_dtype("indices", indices, (torch.int32,))
    check_shape("counts", counts, (B,) if counts.dim() == 1 else (B, Hk))
    check_dtype("counts", counts, INTEGERS)
    for name, tensor in (("indices", indices), ("counts", counts)):
        check_device(name, tensor, q.device)
    if T < 1 or H % Hk:
        raise ValueError(f"q {list(q.shape)} needs T >= 1 and a multiple of the cache's {Hk} kv heads")
    if D not in HEAD_DIMS:
        raise ValueError(f"q {list(q.shape)} has head dim {D}, expected one of {list(HEAD_DIMS)}")
    if k_cache.stride() != v_cache.stride():
        raise ValueError(
            f"k_cache has strides {list(k_cache.stride())}, v_cache {list(v_cache.stride())}, expected equal"
        )
    if S * k_cache.stride(2) >= MAX_SLAB_ELEMENTS:
        raise ValueError(f"k_cache {list(k_cache.shape)} holds 2**31 or more elements a head")


def _check_lengths(q: torch.Tensor, **lengths: torch.Tensor) -> None:
    for name, tensor in lengths.items():
        check_shape(name, tensor, (q.shape[0],))
        check_dtype(name, tensor, INTEGERS)
        check_device(name, tensor, q.device)
