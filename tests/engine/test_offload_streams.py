"""Copies beside a pass: whatever order streams run in, every layer finds the keys that should be there.

Streams are played on a CPU: what is issued waits in its stream, and an order that the waits allow is drawn at random.
"""

import random
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from specdial.engine import offload
from specdial.engine.models.shapes import SHAPES
from specdial.engine.offload import HostCache

LAYERS, CAPACITY = 5, 64


class Streams:
    """Operations in the order in which they were issued: what each waits for, and what it does."""

    def __init__(self):
        self.operations = []
        self.compute = Stream(self)
        self.current = self.compute

    def issue(self, action):
        stream = self.current
        self.operations.append((stream.awaited, action))
        stream.awaited = {len(self.operations) - 1}

    @contextmanager
    def using(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def play(self, seed):
        """Everything, in an order drawn among those that are allowed."""
        done, left, chance = set(), dict(enumerate(self.operations)), random.Random(seed)
        while left:
            ready = [i for i, (awaited, _) in left.items() if awaited <= done]
            chosen = chance.choice(ready)
            left.pop(chosen)[1]()
            done.add(chosen)


class Stream:
    """See Streams. awaited: operations that the next one waits for."""

    waits = True

    def __init__(self, streams):
        self.streams, self.awaited = streams, set()

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def record_event(self):
        return set(self.awaited)

    def wait_event(self, event):
        if Stream.waits:
            self.awaited = self.awaited | event


@pytest.fixture
def played(monkeypatch):
    """(cache, streams): a cache that takes itself for one on a GPU."""
    streams = Streams()
    copy = HostCache._copy_rows
    for name, instead in {
        "on_gpu": property(lambda cache: True),
        "_mark": lambda *_: None,
        "_copy_rows": lambda *a, **kw: streams.issue(lambda: copy(*a, **kw)),
    }.items():
        monkeypatch.setattr(HostCache, name, instead)
    monkeypatch.setattr(offload.torch.cuda, "Stream", lambda: Stream(streams))
    monkeypatch.setattr(offload.torch.cuda, "current_stream", lambda: streams.current)
    monkeypatch.setattr(offload.torch.cuda, "stream", streams.using)
    monkeypatch.setattr(Stream, "waits", True)
    small = replace(SHAPES["smollm2-135m"], layers=LAYERS, heads=2, kv_heads=2, head_dim=4)
    return HostCache(small, 2, CAPACITY, device="cpu", dtype=torch.float32), streams


def wrong_keys(cache, streams, seed):
    """How often a layer found other keys than there should be, over two prompts in chunks and passes over both."""
    truth = torch.zeros(LAYERS, 2, CAPACITY)  # what each key is filled with
    lengths, wrong, stamp = [0, 0], [], 0

    def read(keys, values, expected, b, start, stop, new):
        """What a layer of a pass does: look at the keys before its own, after it wrote its own."""
        for x in (keys, values):
            x[b, :, start:stop] = new
            if not (x[b, :, :stop] == expected[:stop, None]).all():
                wrong.append(b)

    def go_home(layer, keys, values, b, start, stop):
        for home, x in zip(cache._home, (keys, values)):
            home[layer, b, :, start:stop] = x[b, :, start:stop]

    def layers(rows):
        """One pass; rows: (b, start, stop) each, None for a chunk's own way home."""
        nonlocal stamp
        for layer in range(LAYERS):
            keys, values = cache.layer(layer)
            for b, start, stop, chunk in rows:
                stamp += 1
                truth[layer, b, start:stop] = stamp
                given = (keys, values, truth[layer, b].clone(), b, start, stop, stamp)
                streams.issue(lambda given=given: read(*given))
                if chunk:
                    cache.write_behind_one(layer, b, start, stop - start)
                else:
                    streams.issue(lambda at=(layer, keys, values, b, start, stop): go_home(*at))

    for b, prompt in enumerate((20, 33)):
        for start in range(0, prompt, 8):
            stop = min(start + 8, prompt)
            with cache.reading(b, start):
                layers([(b, start, stop, True)])
        lengths[b] = prompt
    for _ in range(3):
        cache.host_lengths[:] = lengths
        layers([(b, lengths[b], lengths[b] + 4, False) for b in range(2)])
        lengths = [n + 3 for n in lengths]
    streams.play(seed)
    return len(wrong)


@pytest.mark.parametrize("seed", range(4))
def test_no_order_shows_a_layer_other_keys(played, seed):
    assert wrong_keys(*played, seed) == 0


def test_streams_that_do_not_wait_are_noticed(played, monkeypatch):
    monkeypatch.setattr(Stream, "waits", False)
    assert wrong_keys(*played, 0) > 0
