"""What one round of a batch leaves on the device, and how the host learns of it: one packed copy a round.

Leaves out what lasts from round to round (sequences) and what any of it means (loop).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specdial.kernels import Backend
from specdial.kernels.timestamp import timestamp

START, SELECTED, DRAFTED, VERIFIED, SETTLED = range(5)  # the moments of a round, in order


@dataclass(frozen=True, slots=True)
class Seen:
    """A round as the host sees it, in NumPy.

    drafts: [B, K]; emitted: [B, K+1], of which counts [B] are tokens; k, accepted: [B]; signals: [3, B, K] float32;
    accept_prob: [B, K] float32; moments_ns: [5].
    """

    drafts: npt.NDArray[np.int64]
    emitted: npt.NDArray[np.int64]
    k: npt.NDArray[np.int64]
    accepted: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    moments_ns: npt.NDArray[np.int64]
    signals: npt.NDArray[np.float32]
    accept_prob: npt.NDArray[np.float32]


class RoundState:
    """Device buffers of a round with up to K drafts. Every tensor is a view of one packed buffer."""

    def __init__(self, batch: int, most_drafts: int, *, device: torch.device, backend: Backend) -> None:
        self.batch, self.most_drafts, self.backend = batch, most_drafts, backend
        B, K = batch, most_drafts
        self._shapes = {
            "block": ((B, K + 1), torch.int64),  # the pending token, then the drafts
            "emitted": ((B, K + 1), torch.int64),
            "k": ((B,), torch.int64),
            "accepted": ((B,), torch.int64),
            "counts": ((B,), torch.int64),
            "moments_ns": ((5,), torch.int64),
            "signals": ((K, 3, B), torch.float32),
            "accept_prob": ((B, K), torch.float32),
        }
        size = sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in self._shapes.values())
        self.packed = torch.zeros(size, dtype=torch.uint8, device=device)
        views = self._unpacked(self.packed)
        self.block, self.emitted, self.moments_ns = views["block"], views["emitted"], views["moments_ns"]
        self.k, self.accepted, self.counts = views["k"], views["accepted"], views["counts"]
        self.signals, self.accept_prob = views["signals"], views["accept_prob"]
        self.uniforms = torch.zeros(B, 2 * K + 1, dtype=torch.float64, device=device)  # drafts, acceptance, last token
        self.acceptance = torch.zeros(K, dtype=torch.float64, device=device)  # of each depth, where it is synthetic
        self.draft_probs: Tensor | None = None  # [B, K, V], in sampled decoding
        self._logits: Tensor | None = None

    @property
    def drafts(self) -> Tensor:
        """[B, K]"""
        return self.block[:, 1:]

    def kept_logits(self, vocab: int) -> Tensor:
        """Room for the logits of a round, [B, K+1, V] float32; made when first asked for."""
        if self._logits is None:
            B, T = self.block.shape
            self._logits = torch.zeros(B, T, vocab, device=self.block.device)
        return self._logits

    def mark(self, moment: int, last: int | None = None) -> None:
        """Note the time of a moment, or of all from it to `last`, when the device gets there."""
        timestamp(self.moments_ns, moment, moment if last is None else last, backend=self.backend)

    def read_back(self) -> "ReadBack":
        """Start copying everything to the host."""
        return ReadBack(self, self.packed)

    def seen(self, host: Tensor) -> Seen:
        """The packed buffer as arrays of their own. host: a copy of it in host memory."""
        arrays = {name: view.numpy().copy() for name, view in self._unpacked(host).items()}
        return Seen(
            drafts=arrays["block"][:, 1:],
            emitted=arrays["emitted"],
            k=arrays["k"],
            accepted=arrays["accepted"],
            counts=arrays["counts"],
            moments_ns=arrays["moments_ns"],
            signals=arrays["signals"].transpose(1, 2, 0),
            accept_prob=arrays["accept_prob"],
        )

    def _unpacked(self, packed: Tensor) -> dict[str, Tensor]:
        views, start = {}, 0
        for name, (shape, dtype) in self._shapes.items():
            end = start + int(np.prod(shape)) * dtype.itemsize
            views[name] = packed[start:end].view(dtype).view(shape)
            start = end
        return views


class ReadBack:
    """A copy on its way to the host."""

    def __init__(self, state: RoundState, packed: Tensor) -> None:
        self._state = state
        self._host = to_host(packed)
        self._arrived = arrival(packed)

    def wait(self) -> Seen:
        """The round, once it has arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._state.seen(self._host)


def to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, without waiting for it on a GPU (see `arrival`)."""
    if not tensor.is_cuda:
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def arrival(tensor: Tensor) -> torch.cuda.Event | None:
    """What to wait for until everything issued so far on the tensor's device has happened; None on a CPU."""
    if not tensor.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def to_device(values: npt.NDArray[np.generic] | Tensor, into: Tensor) -> None:
    """Copy host values into a device tensor without waiting. `into` decides the dtype."""
    host = torch.as_tensor(values)
    into.copy_(host.pin_memory() if into.is_cuda else host, non_blocking=True)
