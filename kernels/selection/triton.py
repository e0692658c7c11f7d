"""Exact top-k of every row in Triton: a binary search for the threshold, then an ordered compaction. Nothing is sorted.

Short rows take one launch: a program holds the row in registers as order-preserving integers and halves the interval
around the k-th largest until exactly k keys lie above it, or one value, then a tie, is left. Longer rows take a launch
before it, which reads the scores once: every chunk keeps the keys that reach a lower bound of its k-th largest, found
from the maxima of small groups; when too many reach it (ties, huge budgets), the chunk's own exact best. Merging these
lists is the same search. Leaves out NaN scores, and the choice of launch shapes (launch.py).
"""

import triton
import triton.language as tl

from specdial.kernels.selection.search import (
    INVALID,
    best,
    bits_below,
    bound_below,
    count_bits,
    lowest_bit,
    order_key,
    threshold_of,
)


@triton.jit
def _write(chosen, positions, indices, counts, row, batch, length, budget, ROWS: tl.constexpr, PAD: tl.constexpr):
    """Write a row's chosen positions in order, fill up with its last valid index, and write the count once."""
    one = chosen.to(tl.int32)
    tl.store(indices + tl.cumsum(one, axis=0) - one, positions, mask=chosen)
    k = tl.minimum(length, budget)
    slots = tl.arange(0, PAD)
    last = tl.maximum(length - 1, 0)
    for first in range(k, budget, PAD):
        tl.store(indices + first + slots, last + tl.zeros([PAD], tl.int32), mask=first + slots < budget)
    if row == batch * ROWS:  # the first row of this sequence in the first layer
        tl.store(counts + batch, k)


@triton.jit
def _select_rows(
    scores, lengths, indices, counts, row_stride, keys_per_row, budget, sink, recent, batches,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """One program per row."""
    row = tl.program_id(0)
    batch = (row // ROWS) % batches
    length = tl.minimum(tl.load(lengths + batch).to(tl.int32), keys_per_row)
    item = tl.arange(0, BLOCK)
    x = tl.load(scores + row.to(tl.int64) * row_stride + item, mask=item < length, other=0.0).to(tl.float32)
    x = tl.where((item < sink) | (item >= length - recent), float("inf"), x)
    keys = tl.where(item < length, order_key(x), INVALID)
    chosen = best(keys, item, BLOCK, length, tl.minimum(length, budget))
    _write(chosen, item, indices + row.to(tl.int64) * budget, counts, row, batch, length, budget, ROWS, PAD)


@triton.jit
def _words(mask, room):
    """Pack mask [W, 32] into W words, each in a thread of its own.

    A row sum leaves eight copies of every word, and eightfold work after it; a trip through `room`, a list nobody fills
    before the last barrier, leaves one.
    """
    word = tl.arange(0, mask.shape[0])
    fours = tl.reshape(mask, [mask.shape[0], 8, 4])  # a thread's own bits first: their places are known when compiling
    nibbles = tl.sum(tl.where(fours, (1 << tl.arange(0, 4))[None, None, :], 0), axis=2)
    tl.debug_barrier()
    tl.store(room + word, tl.sum(nibbles << (4 * tl.arange(0, 8))[None, :], axis=1))
    tl.debug_barrier()
    mine = tl.load(room + word)
    tl.debug_barrier()
    return mine


@triton.jit
def _filter_chunks(
    scores, lengths, list_keys, list_positions, list_counts, row_stride, keys_per_row, budget, sink, recent, batches,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """One program per (row, chunk): list at most WIDTH keys, the chunk's k best among them, in order."""
    row = tl.program_id(0) // CHUNKS
    start = (tl.program_id(0) % CHUNKS) * CHUNK
    batch = (row // ROWS) % batches
    length = tl.minimum(tl.load(lengths + batch).to(tl.int32), keys_per_row)
    scores += row.to(tl.int64) * row_stride + start
    valid_keys = tl.minimum(tl.maximum(length - start, 0), CHUNK)
    search_from = tl.minimum(tl.maximum(sink - start, 0), valid_keys)  # what lies before and after is protected
    search_to = tl.minimum(tl.maximum(length - recent - start, search_from), valid_keys)
    searched = search_to - search_from
    k = tl.minimum(valid_keys, budget) - (valid_keys - searched)
    item = tl.arange(0, CHUNK // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    in_search = (item >= search_from) & (item < search_to)
    readable = tl.cdiv(valid_keys, VECTOR) * VECTOR  # a mask in whole vectors keeps the loads 16 bytes wide
    x = tl.load(scores + item, mask=item < readable, other=0.0).to(tl.float32)  # [CHUNK/32, 32]
    x = tl.where(in_search, x, float("-inf"))
    bound = bound_below(x, k, CHUNK, COLUMNS)
    offset = tl.program_id(0).to(tl.int64) * WIDTH
    list_keys += offset
    list_positions += offset
    words = _words(x >= bound, list_positions)
    # Read again on purpose: what follows from it would otherwise be computed early and held through the search.
    length = tl.minimum(tl.load(lengths + batch).to(tl.int32), keys_per_row)
    search_to = tl.minimum(tl.maximum(length - recent - start, search_from), valid_keys)
    word = tl.arange(0, CHUNK // 32)
    protected = bits_below(valid_keys - word * 32) & ~(
        bits_below(search_to - word * 32) & ~bits_below(search_from - word * 32)
    )
    words |= protected
    bits = count_bits(words)
    if (tl.sum(bits) > WIDTH) | (bound == float("-inf")):
        keys = tl.where(in_search, order_key(x), INVALID)
        threshold, ties = threshold_of(keys, searched, k)
        over = _words(keys > threshold, list_positions)
        level = _words(keys == threshold, list_positions)
        ones = count_bits(level)
        first = tl.cumsum(ones, axis=0) - ones < ties  # whole words of ties, at most 31 keys more than needed
        words = over | tl.where(first, level, 0) | protected
        bits = count_bits(words)
    slot = tl.cumsum(bits, axis=0) - bits
    tl.store(list_counts + tl.program_id(0), tl.sum(bits))
    for _ in range(tl.max(bits)):
        lowest, number = lowest_bit(words)
        left = words != 0
        at = word * 32 + number
        score = tl.load(scores + at, mask=left, other=0.0).to(tl.float32)  # from cache
        score = tl.where((at < search_from) | (at >= search_to), float("inf"), score)
        tl.store(list_positions + slot, start + at, mask=left)
        tl.store(list_keys + slot, order_key(score), mask=left)
        words ^= lowest
        slot += 1


@triton.jit
def _merge_lists(
    in_keys, in_positions, in_counts, lengths, indices, counts, out_keys, out_positions, out_counts, keys_per_row,
    budget, batches, ROWS: tl.constexpr, BLOCK: tl.constexpr, FAN: tl.constexpr, LISTS: tl.constexpr,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, OUT_WIDTH: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """One program per (row, group of FAN lists): the best `budget` of the lists' keys, in order."""
    row = tl.program_id(0) // GROUPS
    first_list = (tl.program_id(0) % GROUPS) * FAN
    batch = (row // ROWS) % batches
    length = tl.minimum(tl.load(lengths + batch).to(tl.int32), keys_per_row)
    item = tl.arange(0, BLOCK)
    which = first_list + item // WIDTH
    filled = tl.load(in_counts + row * LISTS + which, mask=(item < FAN * WIDTH) & (which < LISTS), other=0)
    valid = item % WIDTH < filled
    offset = (row.to(tl.int64) * LISTS + first_list) * WIDTH
    positions = tl.load(in_positions + offset + item, mask=valid, other=0)
    keys = tl.load(in_keys + offset + item, mask=valid, other=INVALID)
    listed = tl.sum(valid.to(tl.int32))
    chosen = best(keys, item, BLOCK, listed, tl.minimum(listed, budget))
    if GROUPS == 1:
        _write(chosen, positions, indices + row.to(tl.int64) * budget, counts, row, batch, length, budget, ROWS, PAD)
    else:
        target = tl.program_id(0).to(tl.int64) * OUT_WIDTH
        one = chosen.to(tl.int32)
        slot = tl.cumsum(one, axis=0) - one
        tl.store(out_positions + target + slot, positions, mask=chosen)
        tl.store(out_keys + target + slot, keys, mask=chosen)
        tl.store(out_counts + tl.program_id(0), tl.minimum(listed, budget))
