"""Attention of T new query positions per sequence over the whole cache, for decode (T = 1) and verification (T = k+1).

Two entry points: `full_attention` returns normalised masses, `full_attention_raw` returns them unnormalised, for
`history.push_rows`, which normalises only the rows that turn out to be committed.
"""

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
from specdial.kernels.full_attention.reference import full_attention_raw_reference, full_attention_reference, pool_pages
from specdial.kernels.full_attention.statistics import TILE_TOKENS, Granularity, Statistics

__all__ = ["TILE_TOKENS", "Granularity", "Statistics", "full_attention", "full_attention_raw"]


def full_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    *,
    backend: Backend,
    mass: bool | Literal["token", "page"] = False,
    page_tokens: int = TILE_TOKENS,
    splits: int | None = None,
    ancestors: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Softmax attention over cached keys and the new block itself, causal inside the block or along a tree.

    q: [B, T, H, D]; k_cache, v_cache: [B, Hk, S, D], the block's own keys already written at lengths[b] ..
    lengths[b]+T-1; lengths: [B] integer, keys cached before the block. Row t of sequence b sees keys 0 .. lengths[b]+t.
    ancestors: [B, T, N] bool, instead of causal: of N keys written at lengths[b] .. lengths[b]+N-1, row t sees those
    that ancestors[b, t] says, one at least, besides keys 0 .. lengths[b]-1. It goes without mass.
    Strides are free except the last, which is 1. lengths[b] + T <= S (N for T) is the caller's contract: it is not
    read here.
    On a device with early launch, lengths are read and keys before them asked for while the kernel just before may
    still run: they must be older than it.
    Returns out [B, T, H, D] and, with `mass`, the softmax weight every key received from each row, summed over the
    query heads of its kv head, float32, each row summing to G: [B, Hk, T, S] for True or "token", [B, Hk, T,
    ceil(S / page_tokens)] summed over pages for "page"; else None. `splits` overrides the number of splits per kv head.
    Raises ValueError on a wrong shape, dtype, device, stride or backend.
    """
    _check(q, k_cache, v_cache, lengths, backend=backend, page_tokens=page_tokens)
    if mass not in (False, True, "token", "page"):
        raise ValueError(f'mass is {mass!r}, expected False, True, "token" or "page"')
    if ancestors is not None:
        _check_ancestors(ancestors, q, k_cache, mass=bool(mass))
    granularity: Granularity | None = None if not mass else "token" if mass is True else mass
    if backend == "reference":
        out, weights = full_attention_reference(q, k_cache, v_cache, lengths, mass=bool(mass), ancestors=ancestors)
        if weights is not None and granularity == "page":
            weights = pool_pages(weights, page_tokens)
        return out, weights
    from specdial.kernels.full_attention import launch

    out, raw = launch.full_attention_triton(
        q, k_cache, v_cache, lengths, granularity=granularity, page_tokens=page_tokens, splits=splits,
        ancestors=ancestors,
    )  # fmt: skip
    return out, None if raw is None else launch.normalise_triton(raw, lengths)


def full_attention_raw(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    *,
    backend: Backend,
    granularity: Granularity = "page",
    page_tokens: int = TILE_TOKENS,
    splits: int | None = None,
    into: Statistics | None = None,
) -> tuple[torch.Tensor, Statistics]:
    """As `full_attention`, with the attention mass left as `Statistics`: raw, per query head, rows not yet chosen.

    Which rows count is known only after acceptance; `history.push_rows` and `decay_rows` take the statistics then.
    into: buffers to write (`Statistics.empty`, or one layer of them), which then fix granularity and page size.
    """
    if into is not None:
        granularity, page_tokens = into.granularity, into.page_tokens
    _check(q, k_cache, v_cache, lengths, backend=backend, page_tokens=page_tokens)
    if granularity not in ("token", "page"):
        raise ValueError(f'granularity is {granularity!r}, expected "token" or "page"')
    if into is not None:
        _check_into(into, q, k_cache)
    if backend == "reference":
        out, raw = full_attention_raw_reference(
            q, k_cache, v_cache, lengths, granularity=granularity, page_tokens=page_tokens
        )
        if into is None:
            return out, raw
        into.log_mass.copy_(raw.log_mass)
        into.lse.copy_(raw.lse)
        if into.tile_max is not None and raw.tile_max is not None:
            into.tile_max.copy_(raw.tile_max)
        return out, into
    from specdial.kernels.full_attention import launch

    out, written = launch.full_attention_triton(
        q, k_cache, v_cache, lengths, granularity=granularity, page_tokens=page_tokens, splits=splits, into=into
    )
    assert written is not None  # a granularity was given
    return out, written


def _check_ancestors(ancestors: torch.Tensor, q: torch.Tensor, k_cache: torch.Tensor, *, mass: bool) -> None:
    if mass:
        raise ValueError("mass is asked for with ancestors: rows of a tree have none")
    check_shape("ancestors", ancestors, (q.shape[0], q.shape[1], None))
    check_dtype("ancestors", ancestors, (torch.bool,))
    check_device("ancestors", ancestors, q.device)
    if not ancestors.is_contiguous():
        raise ValueError(f"ancestors has strides {list(ancestors.stride())}, expected contiguous")
    if not 0 < ancestors.shape[2] <= k_cache.shape[2]:
        raise ValueError(f"ancestors {list(ancestors.shape)} does not fit k_cache {list(k_cache.shape)}: 0 < N <= S")


def _check_into(into: Statistics, q: torch.Tensor, k_cache: torch.Tensor) -> None:
    B, T, H, _ = q.shape
    Hk, S = k_cache.shape[1], k_cache.shape[2]
    M = H // Hk * T
    if into.group != H // Hk:
        raise ValueError(f"into is for groups of {into.group} query heads, q {list(q.shape)} has {H // Hk}")
    parts: list[tuple[str, torch.Tensor, tuple[int, ...]]] = [("into.lse", into.lse, (B, Hk, M))]
    if into.granularity == "page":
        parts.append(("into.log_mass", into.log_mass, (B, Hk, -(-S // into.page_tokens), M)))
    else:
        assert into.tile_max is not None  # token statistics carry it
        parts.append(("into.log_mass", into.log_mass, (B, Hk, M, S)))
        parts.append(("into.tile_max", into.tile_max, (B, Hk, -(-S // TILE_TOKENS), M)))
    for name, tensor, shape in parts:
        check_shape(name, tensor, shape)
        check_device(name, tensor, q.device)
        if not tensor.is_contiguous():
            raise ValueError(f"{name} {list(tensor.shape)} has strides {list(tensor.stride())}, expected contiguous")


def _check(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    *,
    backend: str,
    page_tokens: int,
) -> None:
    check_shape("q", q, (None, None, None, None))
    B, T, H, D = q.shape
    check_shape("k_cache", k_cache, (B, None, None, D))
    Hk, S = k_cache.shape[1], k_cache.shape[2]
    check_shape("v_cache", v_cache, (B, Hk, S, D))
    check_shape("lengths", lengths, (B,))
    if B == 0 or T == 0 or Hk == 0 or H % Hk != 0 or H == 0:
        raise ValueError(f"q {list(q.shape)} does not fit k_cache {list(k_cache.shape)}: need B, T > 0 and H % Hk = 0")
    if T > S:
        raise ValueError(f"q {list(q.shape)} has more positions than k_cache {list(k_cache.shape)} has keys")
    check_dtype("q", q, FLOATS)
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_dtype(name, tensor, (q.dtype,))
        check_device(name, tensor, q.device)
        check_last_stride(name, tensor)
    check_last_stride("q", q)
    check_dtype("lengths", lengths, INTEGERS)
    check_device("lengths", lengths, q.device)
    check_backend(backend, q.device)
    if page_tokens not in (16, 32, 64):
        raise ValueError(f"page_tokens is {page_tokens}, expected 16, 32 or 64")
    if backend == "triton" and D not in (16, 32, 64, 128, 256):
        raise ValueError(f'q {list(q.shape)} has head dim {D}, backend "triton" takes 16, 32, 64, 128 or 256')
