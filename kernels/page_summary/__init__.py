"""Page summaries: elementwise min and max of the keys of each page, and the page scores computed from them."""

from typing import Literal

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
from specdial.kernels.page_summary.reference import score_pages_reference, update_pages_reference

Rule = Literal["specpv", "quest"]
RowPool = Literal["mean", "max", "last"]
HEAD_DIMS = (64, 128)
PAGES = (4, 8, 16, 32, 64, 128)


def update_pages(
    k_cache: torch.Tensor,
    page_min: torch.Tensor,
    page_max: torch.Tensor,
    lengths: torch.Tensor,
    committed: torch.Tensor,
    *,
    page: int,
    max_tokens: int,
    backend: Backend,
) -> None:
    """Bring the summaries up to date after `committed[b]` tokens were appended at lengths[b] ..., in place.

    k_cache: [B, Hk, S, D]; page_min, page_max: [B, Hk, ceil(S/page), D] in its dtype; lengths: [B] keys summarised
    before; committed: [B] keys added, at most `max_tokens`, which fixes the grid. The pages that hold new keys are
    recomputed from the cache: a page that drafting or a rollback overwrote comes out right, and the result is a
    function of the committed keys alone. Other pages keep their content. Raises ValueError at the boundary.
    """
    _check_summaries(page_min, page_max, page)
    B, Hk, pages, D = page_min.shape
    check_shape("k_cache", k_cache, (B, Hk, None, D))
    if -(-k_cache.shape[2] // page) != pages:
        raise ValueError(
            f"page_min {list(page_min.shape)} does not cover k_cache {list(k_cache.shape)} in pages of {page}"
        )
    check_dtype("k_cache", k_cache, (page_min.dtype,))
    check_device("k_cache", k_cache, page_min.device)
    check_last_stride("k_cache", k_cache)
    for name, tensor in (("lengths", lengths), ("committed", committed)):
        check_shape(name, tensor, (B,))
        check_dtype(name, tensor, INTEGERS)
        check_device(name, tensor, page_min.device)
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}, expected at least 1")
    check_backend(backend, page_min.device)
    if backend == "reference":
        update_pages_reference(k_cache, page_min, page_max, lengths, committed, page=page)
        return
    from specdial.kernels.page_summary.triton import update_pages_triton

    update_pages_triton(k_cache, page_min, page_max, lengths, committed, page=page, max_tokens=max_tokens)


def score_pages(
    q: torch.Tensor,
    page_min: torch.Tensor,
    page_max: torch.Tensor,
    lengths: torch.Tensor,
    *,
    page: int,
    rule: Rule,
    backend: Backend,
    pool: RowPool = "mean",
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Score every page of each kv head for T query rows: [B, Hk, pages] float32, -inf past the last page.

    q: [B, T, H, D]; page_min, page_max: [B, Hk, pages, D]; lengths: [B] keys summarised, so that ceil(lengths/page)
    pages count; rows: [B] integer in 1 .. T, only the first rows[b] query positions count (the committed ones; default
    all T). rule, per query head: "specpv" is max(q·max, q·min), SpecPV's block score; "quest" is Quest's upper bound
    Σ_d max(q_d max_d, q_d min_d). Neither is scaled. The group's heads are averaged; `pool` reduces the query
    positions: their mean, their maximum, or the last counted one. Raises ValueError at the boundary.
    """
    _check_summaries(page_min, page_max, page)
    B, Hk, _, D = page_min.shape
    check_shape("q", q, (B, None, None, D))
    check_dtype("q", q, (page_min.dtype,))
    check_device("q", q, page_min.device)
    check_last_stride("q", q)
    if q.shape[1] < 1 or q.shape[2] % Hk:
        raise ValueError(f"q {list(q.shape)} needs T >= 1 and a multiple of the summaries' {Hk} kv heads")
    check_shape("lengths", lengths, (B,))
    check_dtype("lengths", lengths, INTEGERS)
    check_device("lengths", lengths, page_min.device)
    if rows is None:
        rows = torch.full_like(lengths, q.shape[1])
    check_shape("rows", rows, (B,))
    check_dtype("rows", rows, INTEGERS)
    check_device("rows", rows, page_min.device)
    if rule not in ("specpv", "quest"):
        raise ValueError(f'rule is {rule!r}, expected "specpv" or "quest"')
    if pool not in ("mean", "max", "last"):
        raise ValueError(f'pool is {pool!r}, expected "mean", "max" or "last"')
    check_backend(backend, page_min.device)
    if backend == "reference":
        return score_pages_reference(q, page_min, page_max, lengths, rows, page=page, rule=rule, pool=pool)
    from specdial.kernels.page_summary.triton import score_pages_triton

    return score_pages_triton(q, page_min, page_max, lengths, rows, page=page, rule=rule, pool=pool)


def _check_summaries(page_min: torch.Tensor, page_max: torch.Tensor, page: int) -> None:
    """Raise unless both summaries are alike, contiguous in memory and of a supported width."""
    check_shape("page_min", page_min, (None, None, None, None))
    check_shape("page_max", page_max, tuple(page_min.shape))
    check_dtype("page_min", page_min, FLOATS)
    check_dtype("page_max", page_max, (page_min.dtype,))
    check_device("page_max", page_max, page_min.device)
    if page not in PAGES:
        raise ValueError(f"page is {page}, expected one of {list(PAGES)}")
    if page_min.shape[3] not in HEAD_DIMS:
        raise ValueError(
            f"page_min {list(page_min.shape)} has head dim {page_min.shape[3]}, expected {list(HEAD_DIMS)}"
        )
    for name, tensor in (("page_min", page_min), ("page_max", page_max)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} {list(tensor.shape)} has strides {list(tensor.stride())}, expected contiguous")
