"""A KV cache in host memory (SpecPV's offloading): whole layers come to the device when a pass asks for them.

The device holds two layers. While a pass works on one, the next one moves into the other's place by a stream of its
own. What a pass writes it writes there, for its own attention, and `write_behind` takes it home. Chosen keys are
gathered from where they live: page-locked memory is the device's to read, row by row. On a CPU host and device are the
same memory, layers move when they are asked for, and everything else is as on a GPU.

A pass that asks for layers waits for streams outside it, so it is not captured (`graphs.UNCAPTURED`). Leaves out what
rounds read that may not wait for the host (partial_cache), and lengths, which are the base's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdial.engine.cache import KVCache, gathered
from specdial.engine.models.config import ModelConfig
from specdial.engine.pinned_memory import PinnedMemory
from specdial.kernels.timestamp import timestamp
from specdial.policies.errors import UserError

UNREAD_TOKENS = 65  # that a round whose end the host has yet to learn may have committed: 64 drafts and one more
NONE = -1  # no layer
MOVING, WANTED, MOVED, GIVEN = range(4)  # when a layer began to move, was asked for, was there, was let be used


@dataclass(slots=True)
class Buffer:
    """Room on the device for one layer. k, v: [B, Hk, S, D]; arrived: to be waited for before it is used."""

    k: Tensor
    v: Tensor
    layer: int = NONE
    arrived: torch.cuda.Event | None = None


class HostCache(KVCache):
    """Keys and values of B sequences in host memory. `k` and `v` are read and written over the link."""

    in_host = True

    def __init__(
        self, config: ModelConfig, batch: int, capacity_tokens: int, *, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        """See KVCache."""
        super().__init__(config, batch, capacity_tokens, device=device, dtype=dtype)
        self.moments_ns = torch.zeros(config.layers, 4, dtype=torch.int64, device=device)  # of each layer's last move
        self._only: tuple[int, int] | None = None  # a sequence, and its keys that are read
        if self.on_gpu:
            self._inward, self._outward = torch.cuda.Stream(), torch.cuda.Stream()

    def _allocate(self, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Host memory for all, and the device's two layers. Raises UserError where memory cannot be locked."""
        two = [super(HostCache, self)._allocate(shape[1:], device, dtype) for _ in range(2)]
        self._buffers = [Buffer(k, v) for k, v in two]  # the one that was asked for last stands last
        self._home: tuple[Tensor, Tensor]  # [L, B, Hk, S, D] each, as the host's
        if device.type != "cuda":
            self._home = super()._allocate(shape, device, dtype)
            return self._home
        size_bytes = torch.Size(shape).numel() * dtype.itemsize
        try:
            keys, values = (PinnedMemory(size_bytes, pieces=shape[0]) for _ in range(2))
        except (RuntimeError, OSError) as error:
            raise UserError(
                f"{2 * size_bytes / 1e9:.1f} GB of host memory cannot be locked: {error}", "lower context or batch"
            ) from None
        self._home = keys.host.view(dtype).view(shape), values.host.view(dtype).view(shape)
        return keys.on_device().view(dtype).view(shape), values.on_device().view(dtype).view(shape)

    @property
    def device_bytes(self) -> int:
        """Of two layers."""
        return sum(buffer.k.nbytes + buffer.v.nbytes for buffer in self._buffers)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer on the device, [B, Hk, S, D] each; keys past those that count are scratch. The next one follows."""
        held = self._holding(layer)
        if held is None:
            held = self._buffers[0]
            self._fetch(layer, held)
        if held.arrived is not None:
            self._mark(layer, WANTED, WANTED)
            torch.cuda.current_stream().wait_event(held.arrived)
            self._mark(layer, GIVEN, GIVEN)
            held.arrived = None
        if self._buffers[0] is held:
            self._buffers.reverse()
        if layer + 1 < self.k.shape[0] and self._holding(layer + 1) is None:
            self._fetch(layer + 1, self._buffers[0])
        return held.k, held.v

    def scratch(self) -> tuple[Tensor, Tensor]:
        """Room on the device that has a place for every position, [B, Hk, S, D] each, between passes over layers.

        What is written there past a sequence's committed keys harms nothing.
        """
        return self._buffers[0].k, self._buffers[0].v

    @contextmanager
    def reading(self, b: int, keys: int) -> Iterator[None]:
        """See KVCache."""
        self._only = b, keys
        self._forget()
        yield
        self._only = None
        self._forget()
        if self.on_gpu:
            torch.cuda.current_stream().wait_stream(self._outward)

    def write_behind(self, layer: int, lengths: Tensor, rows: int) -> None:
        """Take the rows home, by a kernel that finds them on the device."""
        held = self._held(layer)
        positions = lengths[:, None] + torch.arange(rows, device=lengths.device)  # [B, T]
        lanes = torch.arange(self.batch, device=lengths.device)[:, None]  # [B, 1]
        for home, buffer in ((self.k, held.k), (self.v, held.v)):
            new = wide(buffer).transpose(1, 2)[lanes, positions]  # [B, T, Hk, D / 4]
            wide(home[layer]).transpose(1, 2)[lanes, positions] = new

    def write_behind_one(self, layer: int, b: int, start: int, rows: int) -> None:
        """Take the rows home while the pass goes on."""
        held = self._held(layer)
        stop = start + rows
        if not self.on_gpu:
            self._copy_rows(layer, b, held, slice(start, stop), inward=False)
            return
        self._outward.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._outward):
            self._copy_rows(layer, b, held, slice(start, stop), inward=False)

    def gather(self, layer: int, indices: Tensor) -> tuple[Tensor, Tensor]:
        """See KVCache: from host memory."""
        k, v = (gathered(wide(home[layer]), indices).view(home.dtype) for home in (self.k, self.v))
        return k, v

    def copy_from(self, one: KVCache) -> None:
        """See KVCache: by the host."""
        if self.on_gpu:
            torch.cuda.synchronize()
        sources = one._home if isinstance(one, HostCache) else (one.k, one.v)
        for home, source in zip(self._home, sources):
            home.copy_(source)
        self._forget()

    def transfer_us(self) -> tuple[float, float]:
        """Microseconds in which the last pass's layers moved, and for which it waited for them. It waits for the pass.

        On a CPU a pass waits for every move.
        """
        moments = self.moments_ns.cpu().numpy()
        moved, waited = moments[:, MOVED] - moments[:, MOVING], moments[:, GIVEN] - moments[:, WANTED]
        return float(moved.sum()) / 1e3, float(waited.sum()) / 1e3

    def _holding(self, layer: int) -> Buffer | None:
        return next((buffer for buffer in self._buffers if buffer.layer == layer), None)

    def _held(self, layer: int) -> Buffer:
        held = self._holding(layer)
        if held is None:
            raise ValueError(f"layer {layer} is not on the device")
        return held

    def _forget(self) -> None:
        """Every layer must come anew."""
        for buffer in self._buffers:
            buffer.layer, buffer.arrived = NONE, None

    def _fetch(self, layer: int, into: Buffer) -> None:
        """Start to move a layer into a buffer that the pass is through with."""
        into.layer = layer
        if not self.on_gpu:
            self._mark(layer, MOVING, WANTED)
            self._copy_layer(layer, into)
            self._mark(layer, MOVED, GIVEN)
            return
        self._inward.wait_stream(torch.cuda.current_stream())
        self._inward.wait_stream(self._outward)
        with torch.cuda.stream(self._inward):
            self._mark(layer, MOVING, MOVING)
            self._copy_layer(layer, into)
            self._mark(layer, MOVED, MOVED)
            into.arrived = self._inward.record_event()

    def _copy_layer(self, layer: int, into: Buffer) -> None:
        """The keys that a pass may read: all that are cached, or those of one sequence."""
        if self._only is not None:
            b, keys = self._only
            self._copy_rows(layer, b, into, slice(0, keys), inward=True)
            return
        for b, keys in enumerate(np.minimum(self.host_lengths + UNREAD_TOKENS, self.capacity_tokens)):
            self._copy_rows(layer, b, into, slice(0, int(keys)), inward=True)

    def _copy_rows(self, layer: int, b: int, buffer: Buffer, rows: slice, *, inward: bool) -> None:
        """Copy rows of one sequence, head by head: each is one range of memory, as copies beside kernels need."""
        for home, there in zip(self._home, (buffer.k, buffer.v)):
            for at_home, on_device in zip(home[layer, b, :, rows], there[b, :, rows]):  # [rows, D] each
                to, source = (on_device, at_home) if inward else (at_home, on_device)
                to.copy_(source, non_blocking=True)

    def _mark(self, layer: int, first: int, last: int) -> None:
        """Note the time of some moments of a layer, when the stream gets there."""
        timestamp(self.moments_ns[layer], first, last, backend="triton" if self.on_gpu else "reference")


def wide(keys: Tensor) -> Tensor:
    """Keys [..., D] as words of 8 bytes, which cross the link in fewer pieces."""
    return keys.view(torch.int64)
