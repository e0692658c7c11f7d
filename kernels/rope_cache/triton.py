"""Triton kernel of `rope_and_cache`: one program per position and a few heads of one kind, q, k or v."""

import triton
import triton.language as tl

from specdial.kernels.full_attention.plan import await_previous


@triton.jit
def _norm_halves(low, high, norm, d, inside, eps, D: tl.constexpr):
    """RMS norm of heads given as halves [HEADS, D/2], rounded to their dtype before and after the weight."""
    wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide_low * wide_low + wide_high * wide_high, axis=1) / D + eps)[:, None]
    weight_low = tl.load(norm + d, mask=inside, other=0.0).to(tl.float32)[None, :]
    weight_high = tl.load(norm + D // 2 + d, mask=inside, other=0.0).to(tl.float32)[None, :]
    low = (weight_low * (wide_low * inverse).to(low.dtype).to(tl.float32)).to(low.dtype)
    high = (weight_high * (wide_high * inverse).to(high.dtype).to(tl.float32)).to(high.dtype)
    return low, high


@triton.jit(do_not_specialize=["ahead"])  # one kernel for every draft step
def rope_and_cache_kernel(
    qkv, lengths, depths, k_cache, v_cache, cos, sin, q_norm, k_norm, q_out,
    qkv_sb, qkv_st, k_sb, k_sh, k_ss, v_sb, v_sh, v_ss, cos_ss, sin_ss,
    T, H, Hk, S, P, ahead, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, HEADS: tl.constexpr, NORM: tl.constexpr,
    TREE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Axis 0: position b*T + t. Axis 1: blocks of HEADS heads, all of q, then all of k, then all of v.

    Lengths, depths (with TREE) and angles are read ahead of the wait: they are older than the kernel before this one.
    """
    b = (tl.program_id(0) // T).to(tl.int64)
    t = (tl.program_id(0) % T).to(tl.int64)
    position = tl.load(lengths + b).to(tl.int64) + ahead + t
    q_blocks, k_blocks = tl.cdiv(H, HEADS), tl.cdiv(Hk, HEADS)
    block = tl.program_id(1)
    is_q = block < q_blocks
    is_v = block >= q_blocks + k_blocks
    first = tl.where(is_q, block, tl.where(is_v, block - q_blocks - k_blocks, block - q_blocks)) * HEADS
    head = first + tl.arange(0, HEADS)  # [HEADS], among its kind
    kept = head < tl.where(is_q, H, Hk)
    d = tl.arange(0, BLOCK_D)  # [D/2], padded to a power of two
    inside = d < D // 2
    mask = kept[:, None] & inside[None, :]
    column = tl.where(is_q, 0, tl.where(is_v, H + Hk, H)) + head
    turned = position
    if TREE:
        turned = position - t + tl.load(depths + tl.program_id(0))
    angle = tl.minimum(tl.maximum(turned, 0), P - 1)
    c = tl.load(cos + angle * cos_ss + d, mask=inside, other=0.0)[None, :]
    s = tl.load(sin + angle * sin_ss + d, mask=inside, other=0.0)[None, :]
    if PDL:
        await_previous()
    source = qkv + b * qkv_sb + t * qkv_st + column[:, None] * D + d[None, :]
    low = tl.load(source, mask=mask, other=0.0)  # [HEADS, D/2]
    high = tl.load(source + D // 2, mask=mask, other=0.0)
    slot = tl.full([HEADS, 1], 0, tl.int64) + position
    written = mask & (slot >= 0) & (slot < S)
    if is_v:
        target = v_cache + b * v_sb + head.to(tl.int64)[:, None] * v_sh + slot * v_ss + d[None, :]
        tl.store(target, low, mask=written)
        tl.store(target + D // 2, high, mask=written)
    else:
        if NORM:
            norm = q_norm
            if is_q == 0:
                norm = k_norm
            low, high = _norm_halves(low, high, norm, d, inside, eps, D)
        wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
        turned_low = (wide_low * c - wide_high * s).to(low.dtype)  # compiled without fused multiply-add: torch's bits
        turned_high = (wide_high * c + wide_low * s).to(low.dtype)
        if is_q:
            target = q_out + (tl.program_id(0).to(tl.int64) * H + head[:, None]) * D + d[None, :]
            tl.store(target, turned_low, mask=mask)
            tl.store(target + D // 2, turned_high, mask=mask)
        else:
            target = k_cache + b * k_sb + head.to(tl.int64)[:, None] * k_sh + slot * k_ss + d[None, :]
            tl.store(target, turned_low, mask=written)
            tl.store(target + D // 2, turned_high, mask=written)
