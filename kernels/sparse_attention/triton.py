"""Sparse attention in one launch: a gather of selected rows and the tail, split over programs, merged by the last one.

The keys of a row form one virtual list: the selection's counts[b] entries, then the tail. Slot j of it is visible to
query row t exactly when j < selected + lengths - tail_start + t + 1, so that the causal tail costs one comparison.
With TREE row t sees of the last T slots those that ancestors [B, T, T] says.
The next tile's indices are loaded one tile ahead: a load of indices that feeds the same tile's keys would leave K and V
unpipelined, and so would anything but an address that depends on them. When the list is split, a program leaves its
partial result and the last of a head's programs to arrive merges them: no second launch.

ROTATE is a drafted token's whole attention, T 1: its query, key and value come as the product left them, are rotated
here, and the last program of a head writes key and value, and starts its sum with them.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from specdial.kernels.full_attention.launch import launch_options
from specdial.kernels.full_attention.plan import await_previous, prefetch_lines
from specdial.kernels.sparse_attention.workspace import SparseWorkspace

LOG2_E = 1.4426950408889634
PROGRAMS = 132  # one a multiprocessor: a tile pipeline fills most of its shared memory
MAX_SPLITS = 16


@dataclass(frozen=True, slots=True)
class SparseConfig:
    """Launch shape: query rows and keys per tile, programs per head, warps, pipeline stages."""

    block_m: int
    block_n: int
    splits: int
    warps: int
    stages: int


@triton.jit
def _rotated(rows, d, cos, sin, D: tl.constexpr):
    """Heads at pointers `rows` [M, 1], rotated: channel i turns with i + D / 2. [M, D] in their dtype."""
    x = tl.load(rows + d[None, :]).to(tl.float32)
    other = tl.load(rows + ((d + D // 2) % D)[None, :]).to(tl.float32)
    turned = x * cos[None, :] + tl.where(d < D // 2, -1.0, 1.0)[None, :] * other * sin[None, :]
    return turned.to(rows.dtype.element_ty)


@triton.jit
def _sparse_attention(
    q, k, v, indices, counts, tail_start, lengths, out, partials, arrivals, cos, sin, ancestors,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kh, stride_ks, stride_ib, stride_ih, stride_cb, stride_ch,
    stride_angle, scale, Hk, S, P, T: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, ROW_BLOCKS: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, FRESH: tl.constexpr, ROTATE: tl.constexpr, TREE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL and FRESH:
        await_previous()
    pair = tl.program_id(0) // SPLITS  # (sequence, kv head)
    split = tl.program_id(0) % SPLITS
    row_block = tl.program_id(1)
    b = (pair // Hk).to(tl.int64)
    h = (pair % Hk).to(tl.int64)
    start = tl.load(tail_start + b).to(tl.int32)
    length = tl.load(lengths + b).to(tl.int32)
    selected = tl.load(counts + b * stride_cb + h * stride_ch).to(tl.int32) * PAGE
    indices += b * stride_ib + h * stride_ih
    total = selected + length - start + T  # keys of the list
    if ROTATE:
        total -= 1  # the new one is in no cache yet
    tiles = tl.cdiv(tl.cdiv(total, BLOCK_N), SPLITS)
    first = split * tiles * BLOCK_N
    last = tl.minimum(first + tiles * BLOCK_N, total)

    d = tl.arange(0, D)
    k += b * stride_kb + h * stride_kh
    v += b * stride_kb + h * stride_kh
    lane = tl.arange(0, BLOCK_N)
    if ROTATE:
        angle = tl.minimum(tl.maximum(length, 0), P - 1).to(tl.int64) * stride_angle + d % (D // 2)
        turn_cos, turn_sin = tl.load(cos + angle), tl.load(sin + angle)
    ahead = tl.load(indices + (first + lane) // PAGE, mask=first + lane < selected, other=0)
    if PDL and not FRESH:  # the selection and its keys are older than the kernel before this one
        if k.dtype.element_ty.primitive_bitwidth == 16:
            line = tl.arange(0, D // 64) * 64
            place = ((ahead * PAGE + (first + lane) % PAGE) * stride_ks)[:, None] + line[None, :]
            wanted = (first + lane < selected)[:, None] & (line[None, :] >= 0)
            prefetch_lines(k + place, wanted)
            prefetch_lines(v + place, wanted)
        await_previous()

    row = row_block * BLOCK_M + tl.arange(0, BLOCK_M)  # row t*G+g
    row_used = row < T * G
    head = h * G + row % G
    t = row // G
    if ROTATE:  # rows past the group read the token's first head, which is there
        head, t = tl.where(row_used, head, 0), tl.zeros_like(t)
    q_rows = q + b * stride_qb + t * stride_qt + head * stride_qh
    if ROTATE:
        queries = _rotated(q_rows[:, None], d, turn_cos, turn_sin, D)
    else:
        queries = tl.load(q_rows[:, None] + d[None, :], mask=row_used[:, None], other=0.0)  # [M, D]
    limit = total - T + 1 + row // G  # [M]

    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total_mass = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    if ROTATE:  # a sum that starts with the new key, in one of the programs
        own = q + b * stride_qb + (Hk * G + h) * D  # heads of q, then of k, then of v
        key = _rotated((own + tl.zeros([1], tl.int32))[:, None], d, turn_cos, turn_sin, D)  # [1, D]
        value = tl.load(own + Hk * D + d)
        own_slot = tl.zeros([D], tl.int64) + length
        written_here = (own_slot >= 0) & (own_slot < tl.where(split == SPLITS - 1, S, 0))
        tl.store(k + own_slot * stride_ks + d, tl.reshape(key, [D]), mask=written_here)
        tl.store(v + own_slot * stride_ks + d, value, mask=written_here)
        if split == SPLITS - 1:
            maximum = tl.sum(queries.to(tl.float32) * key.to(tl.float32), axis=1) * scale  # [M]
            total_mass += 1.0
            acc += value.to(tl.float32)[None, :]
    for tile in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        slot = tile + lane
        chosen = ahead * PAGE + slot % PAGE
        ahead = tl.load(indices + (slot + BLOCK_N) // PAGE, mask=slot + BLOCK_N < selected, other=0)
        position = tl.where(slot < selected, chosen, start + slot - selected)
        rows = (position * stride_ks)[:, None] + d[None, :]  # int32: one head's keys stay below 2**31 elements
        written = (slot < total)[:, None]
        keys = tl.load(k + rows, mask=written, other=0.0)  # [N, D]
        values = tl.load(v + rows, mask=written, other=0.0)
        logits = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        if TREE:
            in_block = slot - (total - T)  # [N]
            asked = row_used[:, None] & ((in_block >= 0) & (in_block < T))[None, :]
            seen = tl.load(ancestors + b * T * T + (row // G * T)[:, None] + in_block[None, :], mask=asked, other=0)
            logits = tl.where((in_block < 0)[None, :] | (seen != 0), logits, float("-inf"))  # [M, N]
        else:
            logits = tl.where(slot[None, :] < limit[:, None], logits, float("-inf"))  # [M, N]
        new_maximum = tl.maximum(maximum, tl.max(logits, axis=1))
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # no key seen yet: keep -inf - -inf out
        weights = tl.exp2(logits - shift[:, None])
        decay = tl.exp2(maximum - shift)
        total_mass = total_mass * decay + tl.sum(weights, axis=1)
        acc = acc * decay[:, None]
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
        maximum = new_maximum

    out_rows = out + ((b * T + row // G) * Hk * G + head) * D
    if SPLITS == 1:
        acc = acc / total_mass[:, None]
        tl.store(out_rows[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=row_used[:, None])
    else:
        group = pair * ROW_BLOCKS + row_block
        m = tl.arange(0, BLOCK_M)
        width: tl.constexpr = D + 2  # a row's output, maximum and mass
        mine = partials + (group.to(tl.int64) * SPLITS + split) * BLOCK_M * width
        tl.store(mine + m[:, None] * D + d[None, :], acc, mask=row_used[:, None])
        tl.store(mine + BLOCK_M * D + m, maximum, mask=row_used)
        tl.store(mine + BLOCK_M * (D + 1) + m, total_mass, mask=row_used)
        tl.debug_barrier()  # every thread's stores come before the one atomic that announces them
        arrived = tl.atomic_add(arrivals + group, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLITS - 1:
            tl.store(arrivals + group, 0)
            theirs = partials + group.to(tl.int64) * SPLITS * BLOCK_M * width
            top = tl.full([BLOCK_M], float("-inf"), tl.float32)
            for s in tl.static_range(SPLITS):
                at = theirs + s * BLOCK_M * width + BLOCK_M * D
                top = tl.maximum(top, tl.load(at + m, mask=row_used, other=0.0, cache_modifier=".cg"))
            merged = tl.zeros([BLOCK_M, D], tl.float32)
            mass = tl.zeros([BLOCK_M], tl.float32)
            for s in tl.static_range(SPLITS):  # fixed order: the sum does not depend on who arrived last
                at = theirs + s * BLOCK_M * width
                their_maximum = tl.load(at + BLOCK_M * D + m, mask=row_used, other=0.0, cache_modifier=".cg")
                their_mass = tl.load(at + BLOCK_M * (D + 1) + m, mask=row_used, other=1.0, cache_modifier=".cg")
                part = tl.load(
                    at + m[:, None] * D + d[None, :], mask=row_used[:, None], other=0.0, cache_modifier=".cg"
                )
                decay = tl.exp2(their_maximum - top)
                merged += part * decay[:, None]
                mass += their_mass * decay
            merged = merged / mass[:, None]
            tl.store(out_rows[:, None] + d[None, :], merged.to(out.dtype.element_ty), mask=row_used[:, None])


def sparse_attention_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    indices: torch.Tensor,
    counts: torch.Tensor,
    *,
    tail_start: torch.Tensor,
    lengths: torch.Tensor,
    page: int = 1,
    workspace: SparseWorkspace | None = None,
    fresh: bool = False,
    angles: tuple[torch.Tensor, torch.Tensor] | None = None,
    config: SparseConfig | None = None,
    ancestors: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `sparse_attention`. `config` overrides the launch shape, for sweeps.

    angles: cos and sin, for `rotate_and_attend`: q is then its qkv as [B, 1, H + 2 Hk, D].
    """
    B, T, H, D = q.shape
    Hk = k_cache.shape[1]
    if angles is not None:
        H -= 2 * Hk
    G = H // Hk
    config = config or plan(B * Hk, T * G, indices.shape[2] * page + T, q.dtype, tree=ancestors is not None)
    row_blocks = triton.cdiv(T * G, config.block_m)
    if config.splits == 1:
        partials = arrivals = lengths  # never touched
    else:
        partials_size, arrivals_size = sizes(B * Hk, T * G, D, config)
        workspace = workspace or SparseWorkspace.allocate(partials_size, arrivals_size, q.device)
        partials, arrivals = workspace.partials, workspace.arrivals
        if partials.numel() < partials_size or arrivals.numel() < arrivals_size:
            raise ValueError(
                f"workspace holds {partials.numel()} partials and {arrivals.numel()} counters, "
                f"q {list(q.shape)} needs {partials_size} and {arrivals_size}"
            )
    out = torch.empty(B, T, H, D, dtype=q.dtype, device=q.device)
    count_stride = counts.stride() if counts.dim() == 2 else (counts.stride(0), 0)
    cos, sin = (q, q) if angles is None else angles
    _sparse_attention[(B * Hk * config.splits, row_blocks)](
        q, k_cache, v_cache, indices, counts, tail_start, lengths, out, partials, arrivals, cos, sin,
        lengths if ancestors is None else ancestors.view(torch.uint8),
        *q.stride()[:3], *k_cache.stride()[:3], *indices.stride()[:2], *count_stride, cos.stride(0),
        D**-0.5 * LOG2_E, Hk, k_cache.shape[2], cos.shape[0], T=T, G=G, D=D, PAGE=page, BLOCK_M=config.block_m,
        BLOCK_N=config.block_n, SPLITS=config.splits, ROW_BLOCKS=row_blocks, STAGES=config.stages,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", FRESH=fresh,
        ROTATE=angles is not None, TREE=ancestors is not None, num_warps=config.warps, **launch_options(q.device),
    )  # fmt: skip
    return out


def plan(pairs: int, rows: int, keys: int, dtype: torch.dtype, *, tree: bool = False) -> SparseConfig:
    """Launch shape for `pairs` (sequence, kv head) pairs, `rows` packed query rows and about `keys` keys each.

    The tile sizes are the fastest of a sweep on an H200; a head is split only as far as one wave of programs goes.
    tree: with ancestors, whose mask would spill many rows' registers with 4 warps; the workspace is the same.
    """
    if dtype == torch.float32:  # for checking, not for speed: larger tiles or a merge would spill
        return SparseConfig(block_m=16, block_n=32, splits=1, warps=4, stages=2)
    block_m = min(64, max(16, triton.next_power_of_2(rows)))
    room = max(1, PROGRAMS // (pairs * triton.cdiv(rows, block_m)))
    few_splits = 2 <= room <= 4  # smaller tiles were faster there
    block_n, stages = (64 if block_m > 16 or few_splits else 128), 3
    tiles = triton.cdiv(keys, block_n)
    tiles_each = triton.cdiv(tiles, min(room, tiles, MAX_SPLITS))
    warps = 8 if tree and block_m > 16 else 4
    return SparseConfig(block_m, block_n, splits=triton.cdiv(tiles, tiles_each), warps=warps, stages=stages)


def sizes(pairs: int, rows: int, head_dim: int, config: SparseConfig) -> tuple[int, int]:
    """Elements of (partials, arrivals) that a launch needs; zeros when it does not split."""
    if config.splits == 1:
        return 0, 0
    groups = pairs * triton.cdiv(rows, config.block_m)
    return groups * config.splits * config.block_m * (head_dim + 2), groups
