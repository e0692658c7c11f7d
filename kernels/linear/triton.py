"""Skinny matrix product: the weights stream through once, everything a decoder does around the product is fused.

Nothing in the loop touches weights or x: they go from memory to shared memory to the tensor cores. What would (a norm,
a change of dtype) is done by the product that writes x, or to the sums after the loop. Float8 weights multiply two
float8 pieces of x: side by side in the right operand, so that shared memory is asked for the weights once, or one after
the other where registers are short.

acc[n, m] = W[n, :] @ x[m, :]. With FOLD > 1 a weight row of a tile is cut into FOLD parts that take up FOLD rows of the
left operand, and the FOLD parts of x as many columns of the right one. The diagonal of the (part, part) blocks is the
product, the rest is computed and dropped: a program keeps a full tensor-core tile with few weight rows, so that small
matrices fill the device without splitting K over programs. Where K is split nonetheless, the last of a tile's programs
to arrive adds the partial sums in a fixed order.
"""

import triton
import triton.language as tl

from specdial.kernels.full_attention.plan import await_previous


@triton.jit
def _prefetch(weight, tile, start, bytes_each, N, K: tl.constexpr, BLOCK_N: tl.constexpr, MATRICES: tl.constexpr,
              THREADS: tl.constexpr):  # fmt: skip
    """Ask the L2 cache for `bytes_each` bytes (a multiple of 16) from byte `start` of each of this tile's weight rows.

    It waits for nothing. Threads share a row: one instruction each, so that none is repeated.
    """
    ROWS: tl.constexpr = BLOCK_N * MATRICES
    LANES: tl.constexpr = THREADS if THREADS > ROWS else ROWS
    A_ROW: tl.constexpr = LANES // ROWS
    lane = tl.arange(0, LANES)
    row = lane // A_ROW
    n = tile * BLOCK_N + row % BLOCK_N
    piece = tl.cdiv(bytes_each, 16 * A_ROW) * 16
    begin = (lane % A_ROW) * piece
    size = tl.where(n < N, tl.minimum(piece, bytes_each - begin), 0)
    SIZE: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
    address = weight.to(tl.int64) + (n + row // BLOCK_N * N).to(tl.int64) * (K * SIZE) + (start + begin)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r", [address, size], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _unfold(acc, same, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, FOLD: tl.constexpr, PIECES: tl.constexpr):
    """[BLOCK_N * FOLD, FOLD * BLOCK_M * PIECES] products of parts -> [BLOCK_N, BLOCK_M] sums over equal parts."""
    if PIECES > 1:
        acc = tl.sum(tl.reshape(acc, [BLOCK_N * FOLD, FOLD * BLOCK_M, PIECES]), axis=2)
    if FOLD == 1:
        return acc
    kept = tl.reshape(tl.where(same, acc, 0.0), [BLOCK_N * FOLD, FOLD, BLOCK_M])
    return tl.sum(tl.reshape(tl.sum(kept, axis=1), [BLOCK_N, FOLD, BLOCK_M]), axis=1)


@triton.jit
def _piece(wide, LARGEST: tl.constexpr):
    """The float8_e5m2 nearest to `wide`, the largest finite one beyond it."""
    return tl.clamp(wide, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e5)


@triton.jit
def _squares(squares, start, m, rows, PARTS: tl.constexpr, CHUNK: tl.constexpr):
    """[CHUNK, BLOCK_M] partial sums of squares from part `start`, zero past the parts and past the rows."""
    t = start + tl.arange(0, CHUNK)[:, None]
    return tl.load(squares + t * rows + m[None, :], mask=(t < PARTS) & (m < rows)[None, :], other=0.0)


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    x, weight, scale, bias, squares, residual, norm, out, squares_out, partials, arrivals, rows, eps, factor,
    N: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, FOLD: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    PREFETCH: tl.constexpr, APART: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr,
    INTO_NORM: tl.constexpr, SHRINK: tl.constexpr, LARGEST: tl.constexpr, PRECISION: tl.constexpr,
    THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Axis 0: (tile of BLOCK_N output columns, split of K). N counts output columns, GATED has 2 * N weight rows.

    BLOCK_K: elements of a weight row in one step, all FOLD parts together. factor: of every sum. PARTS: of squares, 0
    without a norm to finish; CHUNK of them are read at a time. PREFETCH: bytes of weights to ask for ahead of the wait.
    INTO_NORM: h goes over residual, h * norm to out, sums of h^2 to squares_out. SHRINK: of what goes to out. A float8
    x or out is [2, rows, ...], pieces that add up to it; those of x meet the weights side by side, or APART.
    """
    PIECES: tl.constexpr = 2 if x.dtype.element_ty == tl.float8e5 and not APART else 1
    PART: tl.constexpr = BLOCK_K // FOLD
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    EACH: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    EVEN: tl.constexpr = K % BLOCK_K == 0
    EARLY: tl.constexpr = PARTS > 0 and CHUNK >= PARTS
    tile = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    first = split * EACH
    last = tl.minimum(first + EACH, STEPS)
    if PREFETCH > 0:
        size: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
        matrices: tl.constexpr = 2 if GATED else 1
        there = (tl.minimum(last * BLOCK_K, K) - first * BLOCK_K) * size
        least = tl.minimum(there, PREFETCH // (BLOCK_N * matrices * 16) * 16)
        _prefetch(weight, tile, first * BLOCK_K * size, least, N, K, BLOCK_N, matrices, THREADS)

    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)  # [BN]
    n_used = n < N
    m = tl.arange(0, BLOCK_M)
    used = n_used[:, None] & (m < rows)[None, :]
    place = m[None, :] * N + n[:, None]  # [BN, BM]
    r = tl.arange(0, BLOCK_N * FOLD)  # (weight row, part)
    c = tl.arange(0, BLOCK_M * FOLD * PIECES)  # (part, row of x, piece): a thread has both pieces' results
    c_row = c // PIECES % BLOCK_M
    c_part = c // (BLOCK_M * PIECES)
    k = tl.arange(0, PART)
    left = tl.minimum(tile * BLOCK_N + r // FOLD, N - 1).to(tl.int64) * K + r % FOLD * PART  # past N: any row will do
    weights = weight + left[:, None] + k[None, :]
    c_used = (c_row < rows)[None, :]
    inputs = x + ((c % PIECES * rows + c_row) * K + c_part * PART)[None, :] + k[:, None]
    if PDL:
        await_previous()

    # What the sums meet after the loop is asked for before it: the loop hides how long that takes.
    if SCALED:
        row_scale = tl.load(scale + n, mask=n_used, other=0.0)[:, None]
        if GATED:
            up_scale = tl.load(scale + N + n, mask=n_used, other=0.0)[:, None]
    if BIAS:
        row_bias = tl.load(bias + n, mask=n_used, other=0.0)
    if INTO_NORM:
        base = tl.load(residual + place, mask=used, other=0.0)
        row_norm = tl.load(norm + n, mask=n_used, other=0.0)
    if EARLY:
        pieces = _squares(squares, 0, m, rows, PARTS, CHUNK)

    acc = tl.zeros([BLOCK_N * FOLD, BLOCK_M * FOLD * PIECES], tl.float32)
    up = tl.zeros([BLOCK_N * FOLD, BLOCK_M * FOLD * PIECES], tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        at = step * BLOCK_K
        if EVEN:
            w = tl.load(weights + at)  # [BN * FOLD, PART]
            v = tl.load(inputs + at, mask=c_used, other=0.0)  # [PART, BM * FOLD * PIECES]
            if APART:
                low = tl.load(inputs + rows * K + at, mask=c_used, other=0.0)
        else:
            w_inside = (at + r % FOLD * PART)[:, None] + k[None, :] < K
            v_inside = (at + c_part * PART)[None, :] + k[:, None] < K
            w = tl.load(weights + at, mask=w_inside, other=0.0)
            v = tl.load(inputs + at, mask=c_used & v_inside, other=0.0)
            if APART:
                low = tl.load(inputs + rows * K + at, mask=c_used & v_inside, other=0.0)
        if APART:
            acc += tl.dot(w, v, tl.dot(w, low))
        elif PIECES == 2:  # a float8 product's sum has 14 bits in the tensor cores: it leaves them after every step
            acc += tl.dot(w, v)
        else:
            acc = tl.dot(w, v, acc, input_precision=PRECISION)
        if GATED:
            if EVEN:
                w_up = tl.load(weights + at + N * K)
            else:
                w_up = tl.load(weights + at + N * K, mask=w_inside, other=0.0)
            if APART:
                up += tl.dot(w_up, v, tl.dot(w_up, low))
            elif PIECES == 2:
                up += tl.dot(w_up, v)
            else:
                up = tl.dot(w_up, v, up, input_precision=PRECISION)

    same = (r % FOLD)[:, None] == (tl.arange(0, BLOCK_M * FOLD) // BLOCK_M)[None, :]
    acc = _unfold(acc, same, BLOCK_N, BLOCK_M, FOLD, PIECES)  # [BN, BM]
    if GATED:
        up = _unfold(up, same, BLOCK_N, BLOCK_M, FOLD, PIECES)
    finish = True
    if SPLITS > 1:
        area: tl.constexpr = BLOCK_N * BLOCK_M
        width: tl.constexpr = (2 if GATED else 1) * area
        cell = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
        mine = partials + tl.program_id(0) * width
        tl.store(mine + cell, acc)
        if GATED:
            tl.store(mine + area + cell, up)
        tl.debug_barrier()  # every thread's stores come before the one atomic that announces them
        finish = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
        if finish:
            tl.store(arrivals + tile, 0)
            theirs = partials + tile * SPLITS * width
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            if GATED:
                up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            ROUNDS: tl.constexpr = (SPLITS + 4) // 5  # more than five tiles at once do not fit the registers
            GROUP: tl.constexpr = (SPLITS + ROUNDS - 1) // ROUNDS
            for start in range(0, SPLITS, GROUP):  # fixed order: the sum does not depend on who arrived last
                for i in tl.static_range(GROUP):
                    piece = theirs + (start + i) * width
                    acc += tl.load(piece + cell, mask=start + i < SPLITS, other=0.0, cache_modifier=".cg")
                    if GATED:
                        up += tl.load(piece + area + cell, mask=start + i < SPLITS, other=0.0, cache_modifier=".cg")

    if finish:
        if PARTS > 0:
            if EARLY:
                total = tl.sum(pieces, axis=0)  # [BM]
            else:
                total = tl.zeros([BLOCK_M], tl.float32)
                for start in tl.static_range(0, PARTS, CHUNK):
                    total += tl.sum(_squares(squares, start, m, rows, PARTS, CHUNK), axis=0)
            turn = (tl.rsqrt(total / K + eps) * factor)[None, :]
        else:
            turn = factor
        acc *= turn
        if SCALED:
            acc *= row_scale
        if BIAS:
            acc += row_bias.to(tl.float32)[:, None]
        if GATED:
            up *= turn
            if SCALED:
                up *= up_scale
            acc = acc / (1.0 + tl.exp(-acc)) * up
        if INTO_NORM:
            h = (acc.to(base.dtype).to(tl.float32) + base.to(tl.float32)).to(base.dtype)
            tl.store(residual + place, h, mask=used)
            wide = h.to(tl.float32)
            tl.store(squares_out + tile * rows + m, tl.sum(tl.where(used, wide * wide, 0.0), axis=0), mask=m < rows)
            acc = wide * row_norm.to(tl.float32)[:, None]
        if SHRINK != 1.0:
            acc *= SHRINK
        if out.dtype.element_ty == tl.float8e5:
            high = _piece(acc, LARGEST)
            tl.store(out + place, high, mask=used)
            tl.store(out + rows * N + place, _piece(acc - high.to(tl.float32), LARGEST), mask=used)
        else:
            tl.store(out + place, acc.to(out.dtype.element_ty), mask=used)
