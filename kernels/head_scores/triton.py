"""Triton kernels of the scoring heads: scores of chosen heads, their normalisers, then the normalised sum.

The scores pass through memory once, 4 bytes per key and row, beside the 2*D bytes of each key.
"""

import triton
import triton.language as tl

from specdial.kernels.full_attention.plan import await_previous, split_plan


@triton.jit
def scores_kernel(
    q, k, lengths, heads, row_weights, scores, part_lse,
    q_sb, q_st, q_sh, k_sb, k_sh, k_ss,
    B, S, R, M, slots, m_tiles, scale_log2,
    G: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Scores (base 2) of one kv head's chosen query heads over one chunk of keys, and their log-sum-exp.

    heads: [groups, WIDTH] query heads by kv head, -1 where a kv head has fewer; packed row = r * WIDTH + column.
    """
    if PDL:
        await_previous()
    group = tl.program_id(0) // m_tiles
    groups = tl.num_programs(0) // m_tiles
    slot = tl.program_id(1)
    tiles, chunks, chunk = split_plan(lengths, B, R + BLOCK_N - 1, tl.cdiv(S, BLOCK_N), slots, BLOCK_N, BLOCK_B)
    ends = tl.cumsum(chunks, 0)  # [BLOCK_B]
    if slot >= tl.sum(chunks):
        return
    b = tl.sum((ends <= slot).to(tl.int32))
    own = tl.arange(0, BLOCK_B) == b
    begin = (slot - tl.sum(tl.where(own, ends - chunks, 0))) * chunk
    stop = tl.minimum(begin + chunk, tl.sum(tl.where(own, tiles, 0)))
    length = tl.load(lengths + b).to(tl.int32)

    rows = (tl.program_id(0) % m_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    r = tl.minimum(rows // WIDTH, R - 1)
    head = tl.load(heads + group * WIDTH + rows % WIDTH)
    weight = tl.load(row_weights + b * R + r)
    row_ok = (rows < M) & (head >= 0) & (weight != 0)
    d = tl.arange(0, D)
    keys = tl.arange(0, BLOCK_N)
    b64 = b.to(tl.int64)
    q_rows = q + b64 * q_sb + r.to(tl.int64) * q_st + head.to(tl.int64) * q_sh
    q_tile = tl.load(q_rows[:, None] + d[None, :], mask=row_ok[:, None], other=0.0)  # [BLOCK_M, D]
    kv_head = tl.load(heads + group * WIDTH).to(tl.int64) // G
    first_key = begin.to(tl.int64) * BLOCK_N
    k_ptrs = k + b64 * k_sb + kv_head * k_sh + (first_key + keys[None, :]) * k_ss + d[:, None]
    out_ptrs = scores + ((b64 * groups + group) * M + rows[:, None]) * S + first_key + keys[None, :]
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    for tile in tl.range(begin, stop):
        inside = keys < tl.minimum(length + R, S) - tile * BLOCK_N
        k_tile = tl.load(k_ptrs, mask=inside[None, :], other=0.0)  # [D, BLOCK_N]
        logits = tl.dot(q_tile, k_tile, input_precision=PRECISION) * scale_log2
        visible = (keys[None, :] <= (length + r - tile * BLOCK_N)[:, None]) & inside[None, :]
        logits = tl.where(visible, logits, float("-inf"))
        tl.store(out_ptrs, logits, mask=row_ok[:, None] & inside[None, :])
        new_top = tl.maximum(top, tl.max(logits, 1))
        floor = tl.maximum(new_top, -1e38)  # a chunk may begin past a row's last key
        total = total * tl.exp2(top - floor) + tl.sum(tl.exp2(logits - floor[:, None]), 1)
        top = new_top
        k_ptrs += BLOCK_N * k_ss
        out_ptrs += BLOCK_N
    place = (group.to(tl.int64) * slots + slot) * M + rows
    tl.store(part_lse + place, tl.where(total > 0, top + tl.log2(total), float("-inf")), mask=row_ok)


@triton.jit
def live_rows_kernel(
    part_lse, lengths, heads, row_weights, live, live_norm, live_weight, live_count,
    B, S, R, M, slots, groups,
    WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_PARTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows of one sequence that count, packed to the front in order, with their log-sum-exp and weight."""
    if PDL:
        await_previous()
    b = tl.program_id(0)
    _, chunks, _ = split_plan(lengths, B, R + BLOCK_N - 1, tl.cdiv(S, BLOCK_N), slots, BLOCK_N, BLOCK_B)
    own = tl.arange(0, BLOCK_B) == b
    count = tl.sum(tl.where(own, chunks, 0))
    first = tl.sum(tl.where(own, tl.cumsum(chunks, 0) - chunks, 0))
    row = tl.arange(0, BLOCK_ROWS)
    group = row // M
    m = row % M
    inside = row < groups * M
    weight = tl.load(row_weights + b * R + m // WIDTH, mask=inside, other=0.0)  # [BLOCK_ROWS]
    head = tl.load(heads + group * WIDTH + m % WIDTH, mask=inside, other=-1)
    counts = inside & (weight != 0) & (head >= 0)
    top = tl.full([BLOCK_ROWS], -1e38, dtype=tl.float32)
    total = tl.zeros([BLOCK_ROWS], dtype=tl.float32)
    for start in range(0, count, BLOCK_PARTS):
        i = start + tl.arange(0, BLOCK_PARTS)[:, None]  # [BLOCK_PARTS, 1]
        place = (group[None, :] * slots + first + i) * M + m[None, :]
        part = tl.load(part_lse + place, mask=(i < count) & counts[None, :], other=float("-inf"))
        new_top = tl.maximum(top, tl.max(part, 0))
        total = total * tl.exp2(top - new_top) + tl.sum(tl.exp2(part - new_top[None, :]), 0)
        top = new_top
    rank = tl.cumsum(counts.to(tl.int32), 0) - 1
    place = b * groups * M + rank
    tl.store(live + place, row, mask=counts)
    tl.store(live_norm + place, top + tl.log2(total), mask=counts)
    tl.store(live_weight + place, weight, mask=counts)
    tl.store(live_count + b, tl.sum(counts.to(tl.int32)))


@triton.jit
def sum_kernel(
    scores, lengths, live, live_norm, live_weight, live_count, out, S, M, rows,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[b, keys] (+)= sum of weight * 2^(score - lse) over the live rows, in order; `rows` per sequence."""
    if PDL:
        await_previous()
    b = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + b).to(tl.int32)
    entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    if ADD:
        acc = tl.load(out + b * S + entries, mask=entries < S, other=0.0)
    for i in range(tl.load(live_count + b)):
        row = tl.load(live + b * rows + i)
        visible = (entries <= length + (row % M) // WIDTH) & (entries < S)
        logits = tl.load(scores + (b * rows + row) * S + entries, mask=visible, other=float("-inf"))
        acc += tl.load(live_weight + b * rows + i) * tl.exp2(logits - tl.load(live_norm + b * rows + i))
    tl.store(out + b * S + entries, acc, mask=entries < S)
