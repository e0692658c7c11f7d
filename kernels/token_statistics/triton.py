"""Triton kernels of `logit_statistics`: every row split over programs, then one program per row merges the parts.

A part holds the largest logit m, the second largest, s = sum exp(x - m) and w = sum exp(x - m) (x - m). Then the
probability of the largest is 1 / s and the entropy log s - w / s. A lane of the loop keeps a part of its own.
"""

import triton
import triton.language as tl

from specdial.kernels.full_attention.plan import await_previous

FIELDS = tl.constexpr(4)  # of a part, besides the token


@triton.jit
def _gap(low, high):
    """low - high for exp, where high >= low: of a logit that is or is beside -inf, far enough down to weigh nothing."""
    return tl.where(high == float("-inf"), -1e4, tl.maximum(low - high, -1e4))


@triton.jit
def _shifted(total, weighted, old, new):
    """(s, w) relative to `old` made relative to `new` >= old."""
    gap = _gap(old, new)
    decay = tl.exp(gap)
    return total * decay, (weighted + total * gap) * decay


@triton.jit
def _merged(top, second, total, weighted, token):
    """One part of many: lanes hold disjoint columns, and no two the same token."""
    best = tl.max(top, 0)
    winner = tl.min(tl.where(top == best, token, 2147483647), 0)
    runner_up = tl.max(tl.where(token == winner, second, top), 0)
    total, weighted = _shifted(total, weighted, top, best)
    return best, runner_up, tl.sum(total, 0), tl.sum(weighted, 0), winner


@triton.jit
def split_logits_kernel(
    logits, parts, tokens, row_stride, V, tiles, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Axis 0: row. Axis 1: split of `tiles` tiles of BLOCK columns."""
    if PDL:
        await_previous()
    row = logits + tl.program_id(0).to(tl.int64) * row_stride
    lane = tl.arange(0, BLOCK)
    first = tl.program_id(1) * tiles * BLOCK
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    second = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    token = first + lane
    end = tl.minimum(first + tiles * BLOCK, V)
    following = tl.load(row + token, mask=token < end, other=float("-inf"))
    for start in range(first, end, BLOCK):
        column = start + lane
        x = following.to(tl.float32)
        following = tl.load(row + column + BLOCK, mask=column + BLOCK < end, other=float("-inf"))  # hides its latency
        token = tl.where(x > top, column, token)  # strictly: the lowest of equals stays
        second = tl.maximum(second, tl.minimum(top, x))
        new_top = tl.maximum(top, x)
        total, weighted = _shifted(total, weighted, top, new_top)
        gap = _gap(x, new_top)
        share = tl.exp(gap)
        total += share
        weighted += share * gap
        top = new_top
    top_all, second_all, total_all, weighted_all, token_all = _merged(top, second, total, weighted, token)
    place = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(parts + place * FIELDS, top_all)
    tl.store(parts + place * FIELDS + 1, second_all)
    tl.store(parts + place * FIELDS + 2, total_all)
    tl.store(parts + place * FIELDS + 3, weighted_all)
    tl.store(tokens + place, token_all)


@triton.jit
def merge_logits_kernel(parts, tokens, token, entropy, top1, margin, splits, V, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One row: merge its parts, in an order that shapes alone decide."""
    if PDL:
        await_previous()
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK)
    inside = split < splits
    place = row * splits + split
    at = parts + place * FIELDS
    top = tl.load(at, mask=inside, other=float("-inf"))
    second = tl.load(at + 1, mask=inside, other=float("-inf"))
    total = tl.load(at + 2, mask=inside, other=0.0)
    weighted = tl.load(at + 3, mask=inside, other=0.0)
    chosen = tl.load(tokens + place, mask=inside, other=2147483646)
    best, runner_up, total_all, weighted_all, winner = _merged(top, second, total, weighted, chosen)
    tl.store(token + row, tl.minimum(winner, V - 1).to(tl.int64))
    tl.store(entropy + row, tl.maximum(tl.log(total_all) - weighted_all / total_all, 0.0))
    tl.store(top1 + row, 1.0 / total_all)
    tl.store(margin + row, best - runner_up)
