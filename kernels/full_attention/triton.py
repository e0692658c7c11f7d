"""Triton kernels of full attention: one pass over K and V in splits, then a merge; statistics ride along.

The grid is fixed by the host from shapes alone; every program reads `lengths` on the device and works out which keys
are its own, so one captured graph serves all lengths. Program y < B of the split kernel takes the masked end of
sequence y (its last partial tile and the new block); the others share all full tiles evenly, whatever the lengths.
"""

import triton
import triton.language as tl

from specdial.kernels.full_attention.plan import await_previous, prefetch_lines, split_plan

AHEAD_TILES = tl.constexpr(2)  # of K and V: what memory delivers while the kernel before finishes


@triton.jit
def _attend(
    acc, total, top, q_tile, k_tile, v_tile, scale_log2, visible,
    mass_ptr, max_ptr, page_stride, row_ok, key_ok,
    MASKED: tl.constexpr, MASS: tl.constexpr, PAGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of online softmax in base 2; MASS 1 stores the page log-mass, 2 the scores relative to tile_max."""
    BLOCK_M: tl.constexpr = q_tile.shape[0]
    BLOCK_N: tl.constexpr = k_tile.shape[1]
    scores = tl.dot(q_tile, k_tile, input_precision=PRECISION) * scale_log2  # [BLOCK_M, BLOCK_N]
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    tile_top = tl.max(scores, 1)
    new_top = tl.maximum(top, tile_top)
    weights = tl.exp2(scores - new_top[:, None])
    rescale = tl.exp2(top - new_top)
    tile_total = tl.sum(weights, 1)
    total = total * rescale + tile_total
    acc = acc * rescale[:, None]
    acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
    if MASS == 1:
        if PAGE == BLOCK_N:
            tl.store(mass_ptr, new_top + tl.log2(tile_total), mask=row_ok)
        else:
            PAGES: tl.constexpr = BLOCK_N // PAGE
            page_total = tl.sum(tl.reshape(weights, (BLOCK_M, PAGES, PAGE)), 2)  # [BLOCK_M, PAGES]
            offsets = tl.arange(0, PAGES)[None, :] * page_stride
            page_ok = row_ok[:, None]
            if MASKED:
                page_ok = page_ok & (tl.arange(0, PAGES)[None, :] < key_ok)
            tl.store(mass_ptr[:, None] + offsets, new_top[:, None] + tl.log2(page_total), mask=page_ok)
    if MASS == 2:
        floor = tile_top
        if MASKED:
            floor = tl.maximum(tile_top, -1e38)  # a tile hidden from a row has no largest score
        relative = (scores - floor[:, None]).to(mass_ptr.dtype.element_ty)
        offsets = tl.arange(0, BLOCK_N)[None, :]
        if MASKED:
            tl.store(mass_ptr[:, None] + offsets, relative, mask=row_ok[:, None] & (offsets < key_ok))
        else:
            tl.store(mass_ptr[:, None] + offsets, relative, mask=row_ok[:, None])
        tl.store(max_ptr, floor, mask=row_ok)
    return acc, total, new_top


@triton.jit
def split_kernel(
    q, k, v, k_desc, v_desc, lengths, part_out, part_lse, log_mass, tile_max, ancestors,
    q_sb, q_st, q_sh, k_sb, k_sh, k_ss, v_sb, v_sh, v_ss,
    B, S, T, M, N, slots, m_tiles, scale_log2,
    G: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr,
    MASS: tl.constexpr, PAGE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, TREE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Attention of one row tile over one chunk of keys: partial output and log-sum-exp (base 2).

    With TMA, k_desc and v_desc describe the caches as rows [., D] in tiles of BLOCK_N rows; else they are not read.
    The new block has N keys; with TREE, row t of it sees those that ancestors [B, T, N] says.
    What is older than the kernel before this one comes ahead of the wait: lengths, and the first full tiles' lines.
    """
    kv_head = tl.program_id(0) // m_tiles
    kv_heads = tl.num_programs(0) // m_tiles
    part = tl.program_id(1)  # 0 .. B-1: masked end of a sequence; B .. B+slots-1: full tiles
    is_end = part < B
    if is_end:
        b = part
        begin = tl.minimum(tl.load(lengths + b).to(tl.int32), S) // BLOCK_N
        stop = begin
    else:
        tiles, chunks, chunk = split_plan(lengths, B, 0, S // BLOCK_N, slots, BLOCK_N, BLOCK_B)
        slot = part - B
        ends = tl.cumsum(chunks, 0)  # [BLOCK_B]
        b = tl.sum((ends <= slot).to(tl.int32))  # B when no chunk is left for this slot
        own = tl.arange(0, BLOCK_B) == b
        begin = (slot - tl.sum(tl.where(own, ends - chunks, 0))) * chunk
        stop = tl.minimum(begin + chunk, tl.sum(tl.where(own, tiles, 0)))
    d = tl.arange(0, D)
    keys = tl.arange(0, BLOCK_N)
    b64 = b.to(tl.int64)
    k_head = b64 * k_sb + kv_head.to(tl.int64) * k_sh
    v_head = b64 * v_sb + kv_head.to(tl.int64) * v_sh
    if PDL:
        LINE: tl.constexpr = 1024 // k.dtype.element_ty.primitive_bitwidth  # elements
        line = tl.arange(0, D // LINE) * LINE
        for ahead in tl.static_range(AHEAD_TILES):
            rows_ahead = (begin + ahead) * BLOCK_N + keys[:, None].to(tl.int64)
            wanted = (keys[:, None] >= 0) & (line[None, :] >= 0) & (begin + ahead < stop)
            prefetch_lines(k + k_head + rows_ahead * k_ss + line[None, :], wanted)
            prefetch_lines(v + v_head + rows_ahead * v_ss + line[None, :], wanted)
        await_previous()
    if (begin >= stop) & (part >= B):
        return

    rows = (tl.program_id(0) % m_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    row_ok = rows < M
    t = rows // G
    g = rows % G
    q_rows = q + b64 * q_sb + t.to(tl.int64) * q_st + (kv_head * G + g).to(tl.int64) * q_sh
    q_tile = tl.load(q_rows[:, None] + d[None, :], mask=row_ok[:, None], other=0.0)  # [BLOCK_M, D]
    k_ptrs = k + k_head + keys[None, :].to(tl.int64) * k_ss + d[:, None]
    v_ptrs = v + v_head + keys[:, None].to(tl.int64) * v_ss + d[None, :]
    head = b64 * kv_heads + kv_head
    mass_ptr, max_ptr = log_mass + rows, tile_max + rows
    mass_step, max_step = 0, 0
    if MASS == 1:
        mass_ptr = log_mass + head * tl.cdiv(S, PAGE) * M + rows
        mass_step = (BLOCK_N // PAGE) * M
    if MASS == 2:
        mass_ptr = log_mass + (head * M + rows) * S
        mass_step = BLOCK_N
        max_ptr = tile_max + head * tl.cdiv(S, BLOCK_N) * M + rows
        max_step = M

    acc = tl.zeros([BLOCK_M, D], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    tile = begin
    if is_end:
        length = tl.load(lengths + b).to(tl.int32)
        key_count = tl.minimum(length + N, S)
        row_t = tl.minimum(t, T - 1)
        if TREE:
            top = tl.full([BLOCK_M], -1e38, dtype=tl.float32)  # a row may see nothing of a tile, even of the first
        for _ in tl.range(begin, tl.cdiv(key_count, BLOCK_N), num_stages=1):
            left = key_count - tile * BLOCK_N
            key = tile.to(tl.int64) * BLOCK_N
            k_tile = tl.load(k_ptrs + key * k_ss, mask=keys[None, :] < left, other=0.0)
            v_tile = tl.load(v_ptrs + key * v_ss, mask=keys[:, None] < left, other=0.0)
            if TREE:
                own = tile * BLOCK_N + keys - length  # [BLOCK_N], in the block
                in_block = row_ok[:, None] & ((own >= 0) & (keys < left))[None, :]
                seen = tl.load(ancestors + b64 * T * N + (row_t * N)[:, None] + own[None, :], mask=in_block, other=0)
                visible = (own < 0)[None, :] | (seen != 0)
            else:
                last = length + row_t - tile * BLOCK_N  # [BLOCK_M], in this tile
                visible = keys[None, :] <= tl.minimum(last, left - 1)[:, None]
            pages_left = tl.cdiv(S, PAGE) - tile * (BLOCK_N // PAGE)
            key_ok = pages_left if MASS == 1 else S - tile * BLOCK_N
            acc, total, top = _attend(
                acc, total, top, q_tile, k_tile, v_tile, scale_log2, visible,
                mass_ptr + tile * mass_step, max_ptr + tile * max_step, M, row_ok, key_ok,
                True, MASS, PAGE, PRECISION,
            )  # fmt: skip
            tile += 1
    else:
        k_row = (k_head // k_ss).to(tl.int32)
        v_row = (v_head // v_ss).to(tl.int32)
        for _ in tl.range(begin, stop):
            key = tile * BLOCK_N
            if TMA:
                k_tile = tl.trans(k_desc.load([k_row + key, 0]))  # [D, BLOCK_N]
                v_tile = v_desc.load([v_row + key, 0])  # [BLOCK_N, D]
            else:
                k_tile = tl.load(k_ptrs + key.to(tl.int64) * k_ss)
                v_tile = tl.load(v_ptrs + key.to(tl.int64) * v_ss)
            acc, total, top = _attend(
                acc, total, top, q_tile, k_tile, v_tile, scale_log2, True,
                mass_ptr + tile * mass_step, max_ptr + tile * max_step, M, row_ok, BLOCK_N,
                False, MASS, PAGE, PRECISION,
            )  # fmt: skip
            tile += 1
    place = (kv_head.to(tl.int64) * (B + slots) + part) * M + rows  # [BLOCK_M]
    tl.store(part_out + place[:, None] * D + d[None, :], acc / total[:, None], mask=row_ok[:, None])
    tl.store(part_lse + place, top + tl.log2(total), mask=row_ok)


@triton.jit
def merge_kernel(
    part_out, part_lse, lengths, out, lse, o_sb, o_st, o_sh, B, S, M, slots,
    G: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_PARTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, WITH_LSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Combine the parts of packed rows: out = sum 2^(lse_i - lse) out_i. Parts nobody wrote are never read."""
    kv_heads = tl.num_programs(1) // B
    b = tl.program_id(1) // kv_heads
    kv_head = tl.program_id(1) % kv_heads
    _, chunks, _ = split_plan(lengths, B, 0, S // BLOCK_N, slots, BLOCK_N, BLOCK_B)
    own = tl.arange(0, BLOCK_B) == b
    count = tl.sum(tl.where(own, chunks, 0)) + 1  # the end part first
    first = B + tl.sum(tl.where(own, tl.cumsum(chunks, 0) - chunks, 0))
    d = tl.arange(0, D)
    base = kv_head.to(tl.int64) * (B + slots)
    if PDL:
        await_previous()  # lengths were final before the split kernel started
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # [BLOCK_ROWS]
    row_ok = row < M
    acc = tl.zeros([BLOCK_ROWS, D], dtype=tl.float32)
    total = tl.zeros([BLOCK_ROWS], dtype=tl.float32)
    top = tl.full([BLOCK_ROWS], -1e38, dtype=tl.float32)
    for start in range(0, count, BLOCK_PARTS):
        i = start + tl.arange(0, BLOCK_PARTS)
        place = (base + tl.where(i == 0, b, first + i - 1))[:, None] * M + row[None, :]  # [BLOCK_PARTS, BLOCK_ROWS]
        wanted = (i < count)[:, None] & row_ok[None, :]
        part = tl.load(part_lse + place, mask=wanted, other=float("-inf"))
        values = tl.load(part_out + place[:, :, None] * D + d[None, None, :], mask=wanted[:, :, None], other=0.0)
        new_top = tl.maximum(top, tl.max(part, 0))
        weights = tl.exp2(part - new_top[None, :])
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.sum(weights, 0)
        acc = acc * rescale[:, None] + tl.sum(values * weights[:, :, None], 0)
        top = new_top
    head = kv_head * G + row % G
    target = out + b.to(tl.int64) * o_sb + (row // G).to(tl.int64) * o_st + head.to(tl.int64) * o_sh  # [BLOCK_ROWS]
    tl.store(target[:, None] + d[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=row_ok[:, None])
    if WITH_LSE:
        tl.store(lse + tl.program_id(1).to(tl.int64) * M + row, top + tl.log2(total), mask=row_ok)
