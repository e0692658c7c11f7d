"""The KV cache of a batch. It owns all length arithmetic: what is committed, what may be overwritten, how much fits.

Layout per layer [B, Hk, S, D], so that each head streams contiguously. Keys past `lengths` are scratch: a verification
writes its block there, `commit` (or `advance` and `note`) makes the accepted part count, the next block overwrites the
rest. Passes ask for the layers in order, and say when they have read one (`write_behind`), for caches whose layers are
not all on the device (offload).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from specdial.engine.models.config import ModelConfig
from specdial.policies.errors import UserError

WIDTH_MULTIPLE = 64  # views are this much rounded up: sums over keys then run in one order whatever the block's length


class KVCache:
    """Keys and values of B sequences with ragged progress."""

    in_host = False  # do the keys live where passes cannot read whole layers of them?

    def __init__(
        self, config: ModelConfig, batch: int, capacity_tokens: int, *, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        """Allocate room for `capacity_tokens` keys per sequence. Raises UserError when memory does not suffice."""
        capacity = round_up(capacity_tokens, WIDTH_MULTIPLE)
        shape = (config.layers, batch, config.kv_heads, capacity, config.head_dim)
        try:
            self.k, self.v = self._allocate(shape, torch.device(device), dtype)  # [L, B, Hk, S, D] each
        except (RuntimeError, torch.OutOfMemoryError):
            needed = 2 * int(np.prod(shape)) * dtype.itemsize / 1e9
            raise UserError(f"the KV cache needs {needed:.1f} GB", "lower context or batch") from None
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)  # [B] keys committed; updated in place
        self.host_lengths = np.zeros(batch, dtype=np.int64)  # [B] the same, known without asking the device

    def _allocate(self, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Zeros for keys and values. Raises RuntimeError when memory does not suffice."""
        return torch.zeros(shape, device=device, dtype=dtype), torch.zeros(shape, device=device, dtype=dtype)

    @property
    def batch(self) -> int:
        return self.k.shape[1]

    @property
    def device_bytes(self) -> int:
        """Of keys and values, on the device."""
        return self.k.nbytes + self.v.nbytes

    @property
    def on_gpu(self) -> bool:
        return self.k.is_cuda

    @property
    def capacity_tokens(self) -> int:
        return self.k.shape[3]

    def set_lengths(self, lengths: np.ndarray) -> None:
        """Keep the first lengths[b] keys of each sequence; a smaller number rolls back. [B] integer."""
        if (lengths < 0).any() or (lengths > self.capacity_tokens).any():
            raise ValueError(f"lengths {lengths.tolist()} outside 0..{self.capacity_tokens}")
        self.host_lengths = lengths.astype(np.int64)
        self.lengths.copy_(torch.from_numpy(self.host_lengths))

    def commit(self, rows: np.ndarray) -> None:
        """Count the first rows[b] keys of the last written block as committed. [B] integer."""
        self.set_lengths(self.host_lengths + rows)

    def advance(self, rows: Tensor) -> None:
        """Count the first rows[b] keys of the last written block as committed, on the device. [B] integer."""
        self.lengths.add_(rows)

    def note(self, rows: np.ndarray) -> None:
        """Let the host know what `advance` counted. [B] integer."""
        self.host_lengths = self.host_lengths + rows

    def width(self, block_tokens: int) -> int:
        """Keys to read so that every sequence sees its block of `block_tokens` rows.

        On a CPU rounded up to WIDTH_MULTIPLE; on a GPU the whole capacity, since kernels read the lengths themselves
        and a captured graph must serve every length. Raises ValueError when the block does not fit.
        """
        longest = int(self.host_lengths.max()) + block_tokens
        if longest > self.capacity_tokens:
            raise ValueError(f"a block of {block_tokens} rows ends at {longest}, past capacity {self.capacity_tokens}")
        return self.capacity_tokens if self.on_gpu else self.rounded(longest)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Put a block [B, T, Hk, D] behind the committed keys of each sequence."""
        T = k.shape[1]
        if not self.on_gpu and (self.host_lengths == self.host_lengths[0]).all():
            start = int(self.host_lengths[0])
            keys, values = self.layer(layer)
            keys[:, :, start : start + T] = k.transpose(1, 2)
            values[:, :, start : start + T] = v.transpose(1, 2)
            return
        self.write_at(layer, k, v, self.lengths[:, None] + torch.arange(T, device=k.device))

    def write_at(self, layer: int, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Put keys [B, T, Hk, D] at positions [B, T], which the device knows."""
        rows = torch.arange(self.batch, device=k.device)[:, None]  # [B, 1]
        keys, values = self.layer(layer)
        keys.transpose(1, 2)[rows, positions] = k
        values.transpose(1, 2)[rows, positions] = v

    def write_one(self, layer: int, b: int, start: int, k: Tensor, v: Tensor) -> None:
        """Put keys [1, T, Hk, D] of sequence b at positions start .. start+T-1: prefill, before lengths are set."""
        keys, values = self.layer(layer)
        keys[b, :, start : start + k.shape[1]] = k[0].transpose(0, 1)
        values[b, :, start : start + v.shape[1]] = v[0].transpose(0, 1)

    def view_one(self, layer: int, b: int, width: int) -> tuple[Tensor, Tensor]:
        """The first `width` keys and values of one sequence, [1, Hk, width, D], without a copy."""
        keys, values = self.layer(layer)
        return keys[b : b + 1, :, :width], values[b : b + 1, :, :width]

    @contextmanager
    def reading(self, b: int, keys: int) -> Iterator[None]:
        """Meanwhile a pass reads the first `keys` keys of sequence b and no others: a chunk of a prompt."""
        yield

    def write_behind(self, layer: int, lengths: Tensor, rows: int) -> None:
        """A pass is through with a layer, whose keys at lengths[b] .. lengths[b]+rows-1 it wrote. [B] integer."""

    def write_behind_one(self, layer: int, b: int, start: int, rows: int) -> None:
        """A pass is through with a layer, whose keys of sequence b at start .. start+rows-1 it wrote."""

    def rounded(self, width: int) -> int:
        """`width` rounded up to WIDTH_MULTIPLE, within the capacity."""
        return min(round_up(width, WIDTH_MULTIPLE), self.capacity_tokens)

    def copy_from(self, one: "KVCache") -> None:
        """Take over the keys and values of a cache with one sequence, a copy for each of ours."""
        self.k.copy_(one.k)
        self.v.copy_(one.v)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer, [B, Hk, S, D], scratch included."""
        return self.k[layer], self.v[layer]

    def view(self, layer: int, width: int) -> tuple[Tensor, Tensor]:
        """The first `width` keys and values of a layer, [B, Hk, width, D], without a copy."""
        keys, values = self.layer(layer)
        return keys[:, :, :width], values[:, :, :width]

    def gather(self, layer: int, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of chosen keys and values: indices [N, Hk, C] give [N, Hk, C, D]. N is B, or any N when B is 1."""
        return gathered(self.k[layer], indices), gathered(self.v[layer], indices)


def gathered(keys: Tensor, indices: Tensor) -> Tensor:
    """Rows of keys [B, Hk, S, D] at indices [N, Hk, C], as `KVCache.gather` takes them."""
    expanded = indices.to(torch.int64).unsqueeze(-1).expand(*indices.shape, keys.shape[-1])  # [N, Hk, C, D]
    return keys.expand(indices.shape[0], *keys.shape[1:]).gather(2, expanded)


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple
