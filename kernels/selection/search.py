"""Device functions of selection: order-preserving keys, the search for the k-th largest, bit words."""

import triton
import triton.language as tl

INVALID = tl.constexpr(-(2**31))  # below every float's key
NONE_ABOVE = tl.constexpr(2**31 - 1)  # above every float's key


@triton.jit
def order_key(x):
    """Map float32 to int32 so that integer order is float order; both zeros map to 0."""
    bits = x.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return key - (key >> 31)  # -0.0 would be -1: move the negatives up by one


@triton.jit
def threshold_of(keys, searched, k):
    """Return (t, ties): the k best keys are those above t and the first `ties` (or all, if fewer) equal to t.

    keys: any shape, INVALID where there is none; searched: how many are valid. The interval [low, high) always has
    count(keys >= low) >= k > count(keys >= high) = above. With k <= 0 nothing is above t or equal to it.
    """
    lowest = tl.min(tl.where(keys == INVALID, NONE_ABOVE, keys))
    low = tl.where(k > 0, lowest, NONE_ABOVE)
    high = tl.where((k <= 0) | (searched <= k), low, tl.max(keys) + 1)
    above = k * 0
    middle = _between(low, high)
    while middle != low:
        count = tl.sum((keys >= middle).to(tl.int32))
        exact = count == k
        low = tl.where(count >= k, middle, low)
        above = tl.where(exact, 0, tl.where(count < k, count, above))
        high = tl.where(exact, middle, tl.where(count < k, middle, high))
        middle = _between(low, high)
    return low, k - above


@triton.jit
def _between(low, high):
    """Their mean, rounded down and without overflow: low itself when nothing lies between."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def best(keys, item, items, searched, k):
    """Mark the k best keys, ties to the lowest item; `item` numbers the keys 0 .. items-1."""
    threshold, ties = threshold_of(keys, searched, k)
    level = keys == threshold
    cut = k * 0 + items
    if tl.sum(level.to(tl.int32)) > ties:  # find where the first `ties` of them end
        low = k * 0
        while cut - low > 1:
            middle = (low + cut) >> 1
            fits = tl.sum((level & (item < middle)).to(tl.int32)) <= ties
            low = tl.where(fits, middle, low)
            cut = tl.where(fits, cut, middle)
        cut = low
    return (keys > threshold) | (level & (item < cut))


@triton.jit
def bound_below(x, k, CHUNK: tl.constexpr, COLUMNS: tl.constexpr):
    """A value that at least k of x reach, -inf if none is found cheaply: the k-th largest of the maxima of COLUMNS
    disjoint sets. x: [CHUNK/32, 32]. Holds 512 of 32,768 random numbers down to about 540 candidates."""
    maxima = tl.max(tl.reshape(x, [CHUNK // COLUMNS, COLUMNS]), axis=0)
    keys = order_key(maxima)
    threshold, _ = threshold_of(keys, COLUMNS, k)
    bound = tl.min(tl.where(keys >= threshold, maxima, float("inf")))
    return tl.where(k > COLUMNS, float("-inf"), bound)


@triton.jit
def count_bits(words):
    """Ones in each int32."""
    pairs = words - ((words >> 1) & 0x55555555)
    nibbles = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    return ((((nibbles + (nibbles >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24) & 0xFF


@triton.jit
def bits_below(n):
    """The lowest n bits set, n clamped to 0 .. 32."""
    return tl.where(n >= 32, -1, (1 << tl.minimum(tl.maximum(n, 0), 31)) - 1)


@triton.jit
def lowest_bit(words):
    """The lowest set bit of each word (0 for none) and its number."""
    lowest = words & -words
    return lowest, (lowest.to(tl.uint32).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
