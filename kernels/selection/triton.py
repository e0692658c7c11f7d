"""Exact top-k of every row in one launch: a binary search for the threshold, then an ordered compaction.

A program holds one chunk of a row in registers as order-preserving integers, halves the interval around the k-th
largest until exactly k keys lie above (or one value, then a tie, is left) and writes the chosen positions in ascending
order. Nothing is sorted and nothing is read twice. Rows longer than a chunk take more launches: every chunk keeps its
own best `budget` keys, and programs merge those lists the same way. Leaves out NaN scores.
"""

import itertools

import torch
import triton
import triton.language as tl

CHUNK_KEYS = 32768  # most keys one program holds in registers
KEYS_PER_THREAD = 32
TILE_KEYS = 128  # keys a warp places at a time: four a thread
INVALID = tl.constexpr(-(2**31))  # below every float's key
PROTECTED = tl.constexpr(2**31 - 1)  # above every float's key


@triton.jit
def _order_key(x):
    """Map float32 to int32 so that integer order is float order; both zeros map to 0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _threshold(keys, valid_keys, k):
    """Return (t, ties): the k best keys are those above t and the first `ties` (or all, if fewer) equal to t.

    The interval [low, high) always has count(keys >= low) >= k > count(keys >= high) = above.
    """
    above = tl.sum((keys == PROTECTED).to(tl.int32), axis=0)
    low = tl.min(tl.where(keys == INVALID, PROTECTED, keys), axis=0).to(tl.int64)
    high = tl.max(tl.where(keys == PROTECTED, INVALID, keys), axis=0).to(tl.int64) + 1
    take_all = valid_keys <= k
    only_protected = above >= k
    low = tl.where(only_protected, tl.full([], 2**31 - 1, tl.int64), low)
    high = tl.where(take_all | only_protected, low + 1, high)
    above = tl.where(take_all | only_protected, 0, above)
    while high - low > 1:
        middle = (low + high) >> 1
        count = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), axis=0)
        exact = count == k
        low = tl.where(count >= k, middle, low)
        above = tl.where(exact, 0, tl.where(count < k, count, above))
        high = tl.where(exact, middle + 1, tl.where(count < k, middle, high))
    return low.to(tl.int32), k - above


@triton.jit
def _place(keys, positions, threshold, ties, over, level, out_keys, out_positions, KEEP_KEYS: tl.constexpr):
    """Write a tile's chosen keys in the order they stand, ties to the first.

    over, level: how many keys before this tile lie above the threshold and on it; returned with this tile's added.
    """
    is_over = keys > threshold  # never an invalid key: the threshold is a valid one, or PROTECTED when there is none
    is_level = keys == threshold
    packed = is_over.to(tl.int32) + (is_level.to(tl.int32) << 16)  # both counts in one scan; a tile has < 2**15 keys
    before = tl.cumsum(packed, axis=0) - packed
    level_before = level + (before >> 16)
    slot = over + (before & 0xFFFF) + tl.minimum(level_before, ties)
    chosen = is_over | (is_level & (level_before < ties))
    tl.store(out_positions + slot, positions, mask=chosen)
    if KEEP_KEYS:
        tl.store(out_keys + slot, keys, mask=chosen)
    total = tl.sum(packed, axis=0)
    return over + (total & 0xFFFF), level + (total >> 16)


@triton.jit
def _finish(row, batch, k, length, budget, indices, counts, ROWS: tl.constexpr, PAD: tl.constexpr):
    """Fill slots k .. budget with the last valid index and write the sequence's count once."""
    slots = tl.arange(0, PAD)
    last = tl.maximum(length - 1, 0)
    for first in range(k, budget, PAD):
        tl.store(indices + first + slots, last + tl.zeros([PAD], tl.int32), mask=first + slots < budget)
    if row == batch * ROWS:  # the first row of this sequence in the first layer
        tl.store(counts + batch, k)


@triton.jit
def _score_keys(scores, positions, length, sink, recent):
    """Order keys of the scores at `positions`: protected ones highest, those past the length lowest."""
    valid = positions < length
    x = tl.load(scores + positions, mask=valid, other=0.0).to(tl.float32)
    protected = (positions < sink) | (positions >= length - recent)
    return tl.where(valid, tl.where(protected, PROTECTED, _order_key(x)), INVALID)


@triton.jit
def _select_chunk(
    scores, lengths, indices, counts, list_keys, list_positions, row_stride, keys_per_row, budget, sink, recent,
    batches, ROWS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """First launch: one program per (row, chunk) of the scores."""
    row = tl.program_id(0) // CHUNKS
    chunk = tl.program_id(0) % CHUNKS
    batch = (row // ROWS) % batches
    length = tl.minimum(tl.load(lengths + batch).to(tl.int32), keys_per_row)
    scores += row.to(tl.int64) * row_stride
    start = chunk * CHUNK
    valid_keys = tl.minimum(tl.maximum(length - start, 0), CHUNK)
    k = tl.minimum(valid_keys, budget)
    keys = _score_keys(scores, start + tl.arange(0, CHUNK), length, sink, recent)
    threshold, ties = _threshold(keys, valid_keys, k)
    if CHUNKS == 1:
        out_keys = list_keys
        out = indices + row.to(tl.int64) * budget
    else:
        offset = (row.to(tl.int64) * CHUNKS + chunk) * budget
        out_keys = list_keys + offset
        out = list_positions + offset
    over = tl.full([], 0, tl.int32)
    level = tl.full([], 0, tl.int32)
    tile_at = start + tl.arange(0, TILE)
    tile_keys = _score_keys(scores, tile_at, length, sink, recent)  # read again, from cache: a scan of all needs too
    for _ in range(0, valid_keys, TILE):  # many registers; the next tile is under way while this one is placed
        next_keys = _score_keys(scores, tile_at + TILE, length, sink, recent)
        over, level = _place(tile_keys, tile_at, threshold, ties, over, level, out_keys, out, KEEP_KEYS=CHUNKS > 1)
        tile_at += TILE
        tile_keys = next_keys
    if CHUNKS == 1:
        _finish(row, batch, k, length, budget, out, counts, ROWS, PAD)


@triton.jit
def _list_valid(item, length, span, budget, first_list, FAN: tl.constexpr):
    """Whether an item of FAN lists is filled: list i holds the best of keys i*span .. (i+1)*span."""
    which = first_list + item // budget
    filled = tl.minimum(tl.maximum(length - which * span, 0), tl.minimum(span, budget))
    return (item // budget < FAN) & (item % budget < filled)


@triton.jit
def _merge_lists(
    in_keys, in_positions, lengths, indices, counts, out_keys, out_positions, keys_per_row, budget, span, batches,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, FAN: tl.constexpr, LISTS: tl.constexpr, GROUPS: tl.constexpr,
    TILE: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Later launches: one program per (row, group of FAN lists), each list being the best `budget` of `span` keys."""
    row = tl.program_id(0) // GROUPS
    group = tl.program_id(0) % GROUPS
    batch = (row // ROWS) % batches
    length = tl.minimum(tl.load(lengths + batch).to(tl.int32), keys_per_row)
    first_list = group * FAN
    offset = row.to(tl.int64) * LISTS * budget + first_list * budget
    in_keys += offset
    in_positions += offset
    item = tl.arange(0, BLOCK)
    valid = _list_valid(item, length, span, budget, first_list, FAN)
    keys = tl.load(in_keys + item, mask=valid, other=INVALID)
    valid_keys = tl.sum(valid.to(tl.int32), axis=0)
    k = tl.minimum(valid_keys, budget)
    threshold, ties = _threshold(keys, valid_keys, k)
    if GROUPS == 1:
        out = indices + row.to(tl.int64) * budget
    else:
        target = (row.to(tl.int64) * GROUPS + group) * budget
        out_keys += target
        out = out_positions + target
    over = tl.full([], 0, tl.int32)
    level = tl.full([], 0, tl.int32)
    for first in range(0, FAN * budget, TILE):
        item = first + tl.arange(0, TILE)
        valid = _list_valid(item, length, span, budget, first_list, FAN)
        tile_keys = tl.load(in_keys + item, mask=valid, other=INVALID)
        positions = tl.load(in_positions + item, mask=valid, other=0)
        over, level = _place(tile_keys, positions, threshold, ties, over, level, out_keys, out, KEEP_KEYS=GROUPS > 1)
    if GROUPS == 1:
        _finish(row, batch, k, length, budget, out, counts, ROWS, PAD)


def select_triton(
    scores: torch.Tensor,
    lengths: torch.Tensor,
    *,
    budget: int,
    sink: int,
    recent: int,
    chunk_keys: int = 0,
    chunk_warps: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `select`. scores [..., B, R, S] with evenly strided rows; the chunk follows from the shape unless
    `chunk_keys` and `chunk_warps` set it, for sweeps."""
    *outer, B, R, S = scores.shape
    rows = scores[..., 0].numel()
    device = scores.device
    indices = torch.empty(*outer, B, R, budget, dtype=torch.int32, device=device)
    counts = torch.empty(B, dtype=torch.int32, device=device)
    chunk = chunk_keys or best_chunk(S, budget, rows)
    chunks = triton.cdiv(S, chunk)
    first_warps = chunk_warps or warps(chunk)
    pad = min(1024, triton.next_power_of_2(budget))
    keys, positions = _lists(rows, chunks, budget, device)
    _select_chunk[(rows * chunks,)](
        scores, lengths, indices, counts, keys, positions, row_stride(scores), S, budget, sink, recent, B,
        ROWS=R, CHUNK=chunk, CHUNKS=chunks, TILE=min(chunk, first_warps * TILE_KEYS), PAD=pad, num_warps=first_warps,
    )  # fmt: skip
    span = chunk
    while chunks > 1:
        fan = min(chunks, max(2, CHUNK_KEYS // budget))
        groups = triton.cdiv(chunks, fan)
        block = triton.next_power_of_2(fan * budget)
        merged_keys, merged_positions = _lists(rows, groups, budget, device)
        _merge_lists[(rows * groups,)](
            keys, positions, lengths, indices, counts, merged_keys, merged_positions, S, budget, span, B,
            ROWS=R, BLOCK=block, FAN=fan, LISTS=chunks, GROUPS=groups, TILE=min(block, warps(block) * TILE_KEYS),
            PAD=pad, num_warps=warps(block),
        )  # fmt: skip
        keys, positions, chunks, span = merged_keys, merged_positions, groups, span * fan
    return indices, counts


def best_chunk(keys_per_row: int, budget: int, rows: int) -> int:
    """Keys a program holds: the whole row up to CHUNK_KEYS, less only when a chunk is far larger than the budget and
    the rows alone leave most of the chip idle."""
    whole = min(CHUNK_KEYS, triton.next_power_of_2(max(keys_per_row, 32)))
    while rows * triton.cdiv(keys_per_row, whole) < 128 and whole >= 8 * budget and whole > 4096:
        whole //= 2
    return whole


def warps(keys: int) -> int:
    """One warp per 1,024 keys: 32 registers a thread hold the keys."""
    return min(32, max(1, keys // (32 * KEYS_PER_THREAD)))


def row_stride(scores: torch.Tensor) -> int:
    """The even distance between rows of [..., S], in elements; ValueError when there is none."""
    rows = scores.shape[:-1]
    kept = [(size, stride) for size, stride in zip(rows, scores.stride()[:-1]) if size > 1]
    for (_, outer), (size, inner) in itertools.pairwise(kept):
        if outer != size * inner:
            raise ValueError(
                f"scores {list(scores.shape)} has strides {list(scores.stride())}, rows must be evenly spaced"
            )
    return kept[-1][1] if kept else scores.shape[-1]


def _lists(rows: int, lists: int, budget: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for the lists between two launches (one element when none follows)."""
    size = rows * lists * budget if lists > 1 else 1
    return torch.empty(size, dtype=torch.int32, device=device), torch.empty(size, dtype=torch.int32, device=device)
