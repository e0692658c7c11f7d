"""The cache's arithmetic against a list per sequence: write, commit, roll back, gather, with ragged lengths."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdial.engine.cache import KVCache, round_up
from specdial.engine.models.shapes import SHAPES
from specdial.policies.errors import UserError

CONFIG = SHAPES["smollm2-135m"]


def make(batch, capacity):
    import dataclasses

    small = dataclasses.replace(CONFIG, layers=2, kv_heads=2, heads=2, head_dim=4)
    return KVCache(small, batch, capacity, device="cpu", dtype=torch.float32)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_history_of_writes_and_rollbacks_equals_lists(data):
    batch = data.draw(st.integers(1, 4))
    cache, truth, stamp = make(batch, 100), [[] for _ in range(batch)], 0
    for _ in range(data.draw(st.integers(1, 8))):
        T = data.draw(st.integers(1, 9))
        if max(map(len, truth)) + T > cache.capacity_tokens:
            break
        k = torch.arange(stamp, stamp + batch * T * 8, dtype=torch.float32).view(batch, T, 2, 4)
        stamp += batch * T * 8
        for layer in range(2):
            cache.write(layer, k + layer, -(k + layer))
        rows = np.array([data.draw(st.integers(0, T)) for _ in range(batch)])
        cache.commit(rows)
        for b in range(batch):
            truth[b] += list(k[b, : rows[b]])
        if data.draw(st.booleans()):
            keep = np.array([data.draw(st.integers(0, len(t))) for t in truth])
            cache.set_lengths(keep)
            truth = [t[:n] for t, n in zip(truth, keep)]
    assert cache.host_lengths.tolist() == cache.lengths.tolist() == [len(t) for t in truth]
    for layer in range(2):
        keys, values = cache.view(layer, cache.capacity_tokens)
        for b, rows in enumerate(truth):
            for position, row in enumerate(rows):
                assert torch.equal(keys[b, :, position], row + layer)
                assert torch.equal(values[b, :, position], -(row + layer))


def test_gather_reads_each_sequence_or_many_lanes_of_one():
    cache = make(1, 64)
    k = torch.randn(1, 10, 2, 4)
    cache.write(0, k, 2 * k)
    indices = torch.tensor([[[0, 3], [9, 9]], [[1, 2], [4, 5]], [[7, 8], [0, 1]]])  # [3, 2, 2]
    keys, values = cache.gather(0, indices)
    for n in range(3):
        for h in range(2):
            for c in range(2):
                assert torch.equal(keys[n, h, c], k[0, indices[n, h, c], h])
                assert torch.equal(values[n, h, c], 2 * k[0, indices[n, h, c], h])


def test_lengths_outside_the_capacity_are_refused():
    cache = make(2, 64)
    with pytest.raises(ValueError, match="outside"):
        cache.set_lengths(np.array([0, 65]))
    with pytest.raises(ValueError, match="outside"):
        cache.set_lengths(np.array([-1, 0]))
    cache.set_lengths(np.array([60, 1]))
    with pytest.raises(ValueError, match="past capacity"):
        cache.width(5)
    assert cache.width(4) == 64


def test_memory_that_cannot_be_had_is_a_user_error():
    keys = 2 * CONFIG.layers * CONFIG.kv_heads * CONFIG.head_dim * 4 * 1_000_000 * 1_000_000  # bytes, with the values
    with pytest.raises(UserError, match=f"the KV cache needs {keys / 1e9:.1f} GB; lower context or batch"):
        KVCache(CONFIG, 1_000_000, 1_000_000, device="cpu", dtype=torch.float32)


@given(st.integers(0, 10**6), st.integers(1, 512))
def test_round_up_is_the_least_multiple(value, multiple):
    result = round_up(value, multiple)
    assert result % multiple == 0
    assert 0 <= result - value < multiple


def test_a_captured_block_goes_where_the_device_says(monkeypatch):
    """On a GPU the host's lengths may be behind, and a graph holds no slice of today's; on a CPU slices are enough."""
    cache = make(2, 100)
    cache.set_lengths(np.array([3, 3]))
    cache.lengths.copy_(torch.tensor([5, 7]))
    block = torch.ones(2, 2, 2, 4)

    def written():
        return [torch.nonzero(cache.k[0, b, 0, :, 0])[:, 0].tolist() for b in range(2)]

    cache.write(0, block, block)
    assert written() == [[3, 4], [3, 4]]
    cache.k.zero_()
    monkeypatch.setattr(KVCache, "on_gpu", True)
    cache.write(0, block, block)
    assert written() == [[5, 6], [7, 8]]
    assert cache.width(4) == cache.capacity_tokens == 128
    three = torch.ones(1, 3, 2, 4)
    cache.write_one(0, 1, 20, 2 * three, 3 * three)
    keys, values = cache.view_one(0, 1, 23)
    assert keys.shape == (1, 2, 23, 4)
    assert keys[0, :, 20:].unique().tolist() == [2.0]
    assert values[0, :, 20:].unique().tolist() == [3.0]
    assert keys[0, 0, 19].sum() == 0


def test_lengths_lie_in_the_cache_for_every_sequence():
    cache = make(2, 100)
    assert (cache.batch, cache.capacity_tokens, cache.device_bytes) == (2, 128, 2 * 2 * 2 * 2 * 128 * 4 * 4)
    for refused in ([-1, 5], [5, 129]):
        with pytest.raises(ValueError, match=r"outside 0\.\.128"):
            cache.set_lengths(np.array(refused))
    cache.set_lengths(np.array([0, 128]))
    with pytest.raises(ValueError, match="a block of 1 rows ends at 129, past capacity 128"):
        cache.width(1)
    cache.set_lengths(np.array([60, 3]))
    assert [cache.width(n) for n in (4, 5, 68)] == [64, 128, 128]
    cache.commit(np.array([1, 2]))
    cache.advance(torch.tensor([2, 3]))
    cache.note(np.array([2, 3]))
    assert cache.host_lengths.tolist() == cache.lengths.tolist() == [63, 8]
