"""A selection that several passes read: its keys where they lie, or, where those lie in host memory, gathered beside.

`PartialCache` (SpecPV) holds per layer and kv head the selected keys, then a tail: the unfinished page behind them and
what is committed later. A key's place there is not its position; so a pass writes its keys by position into the cache's
scratch room, and attention takes them from there.

Leaves out what is selected and when (verification, drafters/sparse_self).
"""

from typing import Protocol

import torch
from torch import Tensor

from specdial.engine.cache import WIDTH_MULTIPLE, KVCache, round_up
from specdial.engine.offload import HostCache
from specdial.kernels import Backend
from specdial.kernels.sparse_attention import SparseWorkspace, sparse_attention, workspace_for


class KeptKeys(Protocol):
    """The keys of one selection of every sequence, in buffers that stay: captured passes hold on to them."""

    def take(self, counts: Tensor, tail_start: Tensor) -> None:
        """Begin another selection: keys or pages of it, and the position behind it, [B] each."""
        ...

    def fill(self, layer: int, indices: Tensor) -> None:
        """Select keys or pages of a layer, [B, Hk, C] int32, and read from now on what lies there now."""
        ...

    def begin(self, lengths: Tensor, rows: int, ancestors: Tensor | None = None) -> None:
        """A pass over `rows` rows at positions lengths[b] + t begins. [B] integer.

        ancestors: [B, T, T], the rows that each of them sees, where they are no chain.
        """
        ...

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Attention of the pass's rows over the selection, all that follows it, and each other. q: [B, T, H, D]."""
        ...


class KeptInPlace:
    """See KeptKeys: of a cache on the device."""

    def __init__(self, cache: KVCache, chosen: int, *, page: int, backend: Backend) -> None:
        """chosen: keys, or pages of them, that a selection has per kv head at most."""
        L, B, Hk = cache.k.shape[:3]
        device = cache.k.device
        self.cache, self.backend, self.page = cache, backend, page
        self.indices = torch.zeros(L, B, Hk, chosen, dtype=torch.int32, device=device)  # [L, B, Hk, C]
        self.counts = torch.zeros(B, dtype=torch.int32, device=device)  # [B]
        self.tail_start = torch.zeros(B, dtype=torch.int64, device=device)  # [B]
        self._lengths = self.tail_start  # [B] of the pass under way
        self._fresh = False  # does it select?
        self._ancestors: Tensor | None = None
        self._workspace: SparseWorkspace | None = None

    def take(self, counts: Tensor, tail_start: Tensor) -> None:
        """See KeptKeys."""
        self.counts.copy_(counts)
        self.tail_start.copy_(tail_start)

    def fill(self, layer: int, indices: Tensor) -> None:
        """See KeptKeys."""
        self.indices[layer] = indices
        self._fresh = True

    def begin(self, lengths: Tensor, rows: int, ancestors: Tensor | None = None) -> None:
        """See KeptKeys."""
        self._lengths, self._workspace, self._fresh, self._ancestors = lengths, None, False, ancestors

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """See KeptKeys."""
        k, v = self.cache.layer(layer)
        if self._workspace is None and self.backend == "triton":
            self._workspace = workspace_for(q.shape, k, self.indices[layer], page=self.page)
        return sparse_attention(
            q, k, v, self.indices[layer], self.counts, tail_start=self.tail_start, lengths=self._lengths,
            backend=self.backend, page=self.page, workspace=self._workspace, fresh=self._fresh,
            ancestors=self._ancestors,
        )  # fmt: skip


class PartialCache:
    """See KeptKeys: of a cache in host memory, which only `fill` reads. Passes write into it as into a cache."""

    def __init__(self, cache: HostCache, chosen: int, *, page: int, tail_tokens: int, backend: Backend) -> None:
        """chosen: see KeptInPlace. tail_tokens: most keys behind a selection and its unfinished page."""
        B, Hk = cache.k.shape[1:3]
        device = cache.k.device
        self.cache, self.backend, self.page = cache, backend, page
        shape = (*cache.k.shape[:3], places(chosen * page, page, tail_tokens), cache.k.shape[4])
        self.k = torch.zeros(shape, device=device, dtype=cache.k.dtype)  # [L, B, Hk, places, D]
        self.v = torch.zeros_like(self.k)
        self.counts = torch.zeros(B, dtype=torch.int32, device=device)  # [B]
        self.tail_start = torch.zeros(B, dtype=torch.int64, device=device)  # [B] position of the tail's first key
        self._tail_place = torch.full((B,), chosen * page, device=device)  # [B] and its place
        self._pages = torch.arange(chosen, dtype=torch.int32, device=device).expand(B, Hk, chosen)
        self._lanes = torch.arange(B, device=device)[:, None]  # [B, 1]
        # Of the pass under way: positions [B, T] of its rows, their places, and places used before it [B]
        self._positions, self._rows, self._used = self._lanes, self._lanes, self._tail_place
        self._workspace: SparseWorkspace | None = None

    def take(self, counts: Tensor, tail_start: Tensor) -> None:
        """See KeptKeys."""
        self.counts.copy_(counts)
        self.tail_start.copy_(tail_start)

    def fill(self, layer: int, indices: Tensor) -> None:
        """See KeptKeys: gathers the selected keys, and the unfinished page."""
        page, device = self.page, indices.device
        chosen = (indices[..., None].long() * page + torch.arange(page, device=device)).flatten(-2)  # [B, Hk, C * page]
        rest = self.tail_start[:, None] + torch.arange(page - 1, device=device)  # [B, page - 1]
        whole = torch.cat([chosen, rest[:, None].expand(-1, chosen.shape[1], -1)], dim=-1)
        keys, values = self.cache.gather(layer, whole.clamp(max=self.cache.capacity_tokens - 1))
        self.k[layer, :, :, : whole.shape[-1]] = keys
        self.v[layer, :, :, : whole.shape[-1]] = values

    def begin(self, lengths: Tensor, rows: int, ancestors: Tensor | None = None) -> None:
        """See KeptKeys. Raises ValueError on a tree, whose accepted path would have to be moved here too."""
        if ancestors is not None:
            raise ValueError("keys in host memory serve no trees")
        shift = self._tail_place - self.tail_start  # [B]
        self._positions = lengths[:, None] + torch.arange(rows, device=lengths.device)  # [B, T]
        self._rows, self._used = self._positions + shift[:, None], lengths + shift
        self._workspace = None

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Where to write a layer's keys by position, [B, Hk, S, D] each, until it is attended to."""
        return self.cache.scratch()

    def write_at(self, layer: int, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Put keys [B, T, Hk, D] at positions [B, T], until the layer is attended to."""
        for there, new in zip(self.cache.scratch(), (k, v)):
            there.transpose(1, 2)[self._lanes, positions] = new

    def write_behind(self, layer: int, lengths: Tensor, rows: int) -> None:
        """Nothing: what was written is where it belongs."""

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """See KeptKeys."""
        for ours, new in zip((self.k[layer], self.v[layer]), self.cache.scratch()):
            ours.transpose(1, 2)[self._lanes, self._rows] = new.transpose(1, 2)[self._lanes, self._positions]
        if self._workspace is None and self.backend == "triton":
            self._workspace = workspace_for(q.shape, self.k[layer], self._pages, page=self.page)
        return sparse_attention(
            q, self.k[layer], self.v[layer], self._pages, self.counts, tail_start=self._tail_place, lengths=self._used,
            backend=self.backend, page=self.page, workspace=self._workspace,
        )  # fmt: skip


def places(chosen_tokens: int, page: int, tail_tokens: int) -> int:
    """Keys that a partial cache has room for, per kv head."""
    return round_up(chosen_tokens + page - 1 + tail_tokens, WIDTH_MULTIPLE)
