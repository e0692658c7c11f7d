"""Page summaries and page scores in Triton: one program per few pages of a kv head, one launch each.

Both score rules are two small matrix products per page tile: SpecPV takes the larger of q·max and q·min, Quest adds
max(q, 0)·max and min(q, 0)·min. Group mean and row pooling happen in registers, so that no per-row score is written.
"""

import torch
import triton
import triton.language as tl

KEYS_PER_PROGRAM = 128


@triton.jit
def _update_pages(
    k_cache, page_min, page_max, lengths, committed, stride_kb, stride_kh, stride_ks, Hk, pages,
    D: tl.constexpr, PAGE: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    b = (pair // Hk).to(tl.int64)
    h = (pair % Hk).to(tl.int64)
    length = tl.load(lengths + b).to(tl.int32)
    added = tl.load(committed + b).to(tl.int32)
    end = length + added
    first = length // PAGE + tl.program_id(0) * PAGES
    if (added > 0) & (first * PAGE < end):
        number = first + tl.arange(0, PAGES)
        position = number[:, None] * PAGE + tl.arange(0, PAGE)[None, :]  # [PAGES, PAGE]
        d = tl.arange(0, D)
        at = k_cache + b * stride_kb + h * stride_kh + position.to(tl.int64)[:, :, None] * stride_ks + d[None, None, :]
        used = (position < end)[:, :, None]
        low = tl.min(tl.load(at, mask=used, other=float("inf")).to(tl.float32), axis=1)  # [PAGES, D]
        high = tl.max(tl.load(at, mask=used, other=float("-inf")).to(tl.float32), axis=1)
        to = (pair.to(tl.int64) * pages + number)[:, None] * D + d[None, :]
        written = (number * PAGE < end)[:, None]
        tl.store(page_min + to, low.to(page_min.dtype.element_ty), mask=written)
        tl.store(page_max + to, high.to(page_max.dtype.element_ty), mask=written)


@triton.jit
def _score_pages(
    q, page_min, page_max, lengths, rows, out, stride_qb, stride_qt, stride_qh, Hk, pages,
    T: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_P: tl.constexpr, QUEST: tl.constexpr, POOL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    b = (pair // Hk).to(tl.int64)
    h = (pair % Hk).to(tl.int64)
    number = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    length = tl.load(lengths + b).to(tl.int32)
    counted = tl.load(rows + b).to(tl.int32)
    inside = number * PAGE < length
    d = tl.arange(0, D)
    at = (pair.to(tl.int64) * pages + number)[:, None] * D + d[None, :]
    high = tl.trans(tl.load(page_max + at, mask=inside[:, None], other=0.0))  # [D, P]
    low = tl.trans(tl.load(page_min + at, mask=inside[:, None], other=0.0))
    pooled = tl.full([BLOCK_P], float("-inf") if POOL == "max" else 0.0, tl.float32)
    row = tl.arange(0, BLOCK_T * BLOCK_G)
    g = row % BLOCK_G
    for first in range(0, T, BLOCK_T):
        t = first + row // BLOCK_G
        used = (g < G) & (t < counted)
        rows_at = q + b * stride_qb + t * stride_qt + (h * G + g) * stride_qh
        queries = tl.load(rows_at[:, None] + d[None, :], mask=used[:, None], other=0.0)  # [BT*BG, D]
        if QUEST:
            positive = tl.where(queries > 0.0, queries, tl.zeros_like(queries))
            score = tl.dot(positive, high, input_precision=PRECISION)
            score = tl.dot(queries - positive, low, score, input_precision=PRECISION)
        else:
            score = tl.maximum(
                tl.dot(queries, high, input_precision=PRECISION), tl.dot(queries, low, input_precision=PRECISION)
            )
        if POOL == "max":
            by_row = tl.sum(tl.reshape(score, [BLOCK_T, BLOCK_G, BLOCK_P]), axis=1) / G  # [BT, P]
            positions = first + tl.arange(0, BLOCK_T)
            by_row = tl.where((positions < counted)[:, None], by_row, float("-inf"))
            pooled = tl.maximum(pooled, tl.max(by_row, axis=0))
        elif POOL == "last":
            pooled += tl.sum(tl.where((t == counted - 1)[:, None], score, 0.0), axis=0) / G
        else:  # rows not counted were loaded as zeros and score zero
            pooled += tl.sum(score, axis=0) / (G * counted)
    pooled = tl.where(inside, pooled, float("-inf"))
    tl.store(out + pair.to(tl.int64) * pages + number, pooled, mask=number < pages)


def update_pages_triton(
    k_cache: torch.Tensor,
    page_min: torch.Tensor,
    page_max: torch.Tensor,
    lengths: torch.Tensor,
    committed: torch.Tensor,
    *,
    page: int,
    max_tokens: int,
) -> None:
    """See `update_pages`."""
    B, Hk, pages, D = page_min.shape
    touched = min(pages, (max_tokens + 2 * page - 2) // page)  # most pages that max_tokens new keys can reach
    per_program = max(1, KEYS_PER_PROGRAM // page) if touched > 2 else 1
    _update_pages[(triton.cdiv(touched, per_program), B * Hk)](
        k_cache, page_min, page_max, lengths, committed, *k_cache.stride()[:3], Hk, pages,
        D=D, PAGE=page, PAGES=per_program, num_warps=4,
    )  # fmt: skip


def score_pages_triton(
    q: torch.Tensor,
    page_min: torch.Tensor,
    page_max: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor,
    *,
    page: int,
    rule: str,
    pool: str,
) -> torch.Tensor:
    """See `score_pages`."""
    B, T, H, D = q.shape
    Hk, pages = page_min.shape[1], page_min.shape[2]
    G = H // Hk
    block_g = triton.next_power_of_2(G)
    block_t = max(1, 16 // block_g) if T * block_g <= 16 else max(1, 32 // block_g)
    block_p = 32 if q.dtype == torch.float32 else 64
    out = torch.empty(B, Hk, pages, dtype=torch.float32, device=q.device)
    _score_pages[(triton.cdiv(pages, block_p), B * Hk)](
        q, page_min, page_max, lengths, rows, out, *q.stride()[:3], Hk, pages,
        T=T, G=G, D=D, PAGE=page, BLOCK_T=block_t, BLOCK_G=block_g, BLOCK_P=block_p, QUEST=rule == "quest",
        POOL=pool, PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=4,
    )  # fmt: skip
    return out
