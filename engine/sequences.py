"""The sequences being decoded together: their tokens, their cache, the target's recent attention rows, who is done.

Invariant between rounds: a sequence of n committed tokens has keys 0..n-2 cached; its last token is pending and enters
with the next forward pass. The ring of attention rows is a function of the committed tokens alone: it holds the rows
at positions n-1-W .. n-2.

Draft models read along: each is a companion, sequences of its own with the same prompts, which its drafter moves on.
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from specdial.engine.branches import Branches
from specdial.engine.cache import KVCache, round_up
from specdial.engine.graphs import Graphs
from specdial.engine.head_reader import HeadReader, tap_buffers, taps_of
from specdial.engine.history import History, HistorySpec, Rows
from specdial.engine.models.decoder import AttendCached, AttendUnrotated, Decoder, Taps
from specdial.engine.models.eagle import EagleHead
from specdial.engine.offload import HostCache
from specdial.engine.prefill import ROW_MULTIPLE, prefill_one
from specdial.engine.round_state import RoundState, to_device
from specdial.engine.states import Tapper
from specdial.kernels import Backend
from specdial.kernels.full_attention import full_attention
from specdial.kernels.linear import MAX_ROWS
from specdial.policies.errors import UserError
from specdial.policies.placement import Where

CACHES: dict[Where, type[KVCache]] = {"device": KVCache, "host": HostCache}
STOP_SLOTS = 16  # stop tokens a model may have


class Keys(Protocol):
    """Where a pass writes its keys: a cache, or something that stands for one."""

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer by position, [B, Hk, S, D] each, for kernels that write there themselves."""
        ...

    def write_at(self, layer: int, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Put keys [B, T, Hk, D] at positions [B, T]."""
        ...

    def write_behind(self, layer: int, lengths: Tensor, rows: int) -> None:
        """The pass is through with a layer, whose keys at lengths[b] .. lengths[b]+rows-1 it wrote."""
        ...


@dataclass(frozen=True, slots=True)
class Block:
    """Result of one pass over new tokens. logits: [B, T, V]; rows: its attention rows, or None.

    start, first_row: [B] each, where the pass began with rows that were cached already: the position of its first row,
    and the row of the first new token.
    """

    logits: Tensor
    rows: Rows | None
    start: Tensor | None = None
    first_row: Tensor | None = None


class Sequences:
    """B sequences of one model. Build it, then `prefill`, then let the loop decode."""

    def __init__(
        self,
        decoder: Decoder,
        capacity_tokens: int,
        batch: int,
        *,
        history: HistorySpec | None,
        backend: Backend,
        companions: Mapping[str, Decoder] | None = None,
        heads: Mapping[str, EagleHead] | None = None,
        kv_where: Where = "device",
    ) -> None:
        """capacity_tokens: the longest sequence, drafts included. history: what to keep of attention rows.

        companions, heads: the draft models and EAGLE heads that read along, by the name that policies give them.
        kv_where: where the target's keys live; those of draft models and heads live on the device.
        """
        self.decoder = decoder
        self.backend: Backend = backend
        self.kv_where: Where = kv_where
        self.cache = CACHES[kv_where](
            decoder.config, batch, capacity_tokens + ROW_MULTIPLE, device=decoder.device, dtype=decoder.dtype
        )
        self.history: History | None = None
        if history is not None:
            keys = self.cache.capacity_tokens
            self.history = History(decoder.config, batch, keys, history, device=decoder.device, backend=backend)
        self.graphs = Graphs(decoder.device, self._at_rest)
        self.tokens: list[list[int]] = [[] for _ in range(batch)]
        self.prompt_tokens = np.zeros(batch, dtype=np.int64)
        self.limits = np.zeros(batch, dtype=np.int64)  # new tokens allowed
        self.done = np.ones(batch, dtype=np.bool_)
        self.stop_ids: frozenset[int] = frozenset()
        # What a round needs to know and changes, on the device: [B] each
        self.pending, self.before, self.room = torch.zeros(3, batch, dtype=torch.int64, device=decoder.device).unbind()
        self.stops = torch.full((STOP_SLOTS,), -1, device=decoder.device)  # stop tokens, padded with -1
        self._states: dict[int, RoundState] = {}
        self._lasting: dict[Hashable, Any] = {}
        self.companions = {
            name: Sequences(model, capacity_tokens, batch, history=None, backend=backend)
            for name, model in (companions or {}).items()
        }
        self.heads = {name: HeadReader(self, head) for name, head in (heads or {}).items()}
        self._tapping: Collection[Tapper] = ()  # those that see what passes leave, see `tapping`
        # Counts the rounds launched and the starts of decoding. Who took part in the turn before has missed nothing.
        self.turn = 0
        self.rewritten = 0  # cached keys that the passes of the round under way write anew, the last ones
        self.started = 0  # the turn at which decoding last started

    @property
    def batch(self) -> int:
        return len(self.tokens)

    @property
    def committed(self) -> np.ndarray:
        """Committed length of each sequence, [B]."""
        return np.array([len(t) for t in self.tokens], dtype=np.int64)

    @property
    def outputs(self) -> list[list[int]]:
        """The new tokens of each sequence, [B][N]."""
        return [t[p:] for t, p in zip(self.tokens, self.prompt_tokens)]

    @property
    def remaining(self) -> np.ndarray:
        """New tokens each sequence may still emit; 0 when it is done. [B]"""
        left = self.limits - (self.committed - self.prompt_tokens)
        return np.where(self.done, 0, left)

    def state(self, most_drafts: int) -> RoundState:
        """The buffers of rounds with up to so many drafts; the same ones every time, as captured graphs need them."""
        if most_drafts not in self._states:
            self._states[most_drafts] = RoundState(
                self.batch, most_drafts, device=self.decoder.device, backend=self.backend
            )
        return self._states[most_drafts]

    def lasting(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What a drafter keeps, made once: captured graphs hold on to its buffers when the drafter is long gone."""
        if key not in self._lasting:
            self._lasting[key] = make()
        return self._lasting[key]

    def prefill(self, prompts: list[list[int]], limits: list[int], stop_ids: frozenset[int] = frozenset()) -> None:
        """Read the prompts (all but each last token, which stays pending). Raises UserError on an empty prompt."""
        if any(not prompt for prompt in prompts):
            raise UserError("the prompt is empty", "give at least one token of text")
        self.tokens = [list(prompt) for prompt in prompts]
        self.prompt_tokens = self.committed
        self.limits = np.array(limits, dtype=np.int64)
        if len(stop_ids) > STOP_SLOTS:
            raise UserError(f"{len(stop_ids)} stop tokens, more than {STOP_SLOTS}", "name fewer")
        self.stop_ids = stop_ids
        to_device(np.array([*sorted(stop_ids), *[-1] * (STOP_SLOTS - len(stop_ids))]), self.stops)
        if self.history is not None:
            self.history.clear()
        for b, prompt in enumerate(prompts):
            prefill_one(self, b, prompt[:-1])
        self._start()
        if self.history is not None:
            self.history.save()
        for companion in self.companions.values():
            companion.prefill(prompts, limits, stop_ids)

    def rewind(self) -> None:
        """Back to the state right after `prefill`, so that another policy decodes the same prompts."""
        self.tokens = [t[:p] for t, p in zip(self.tokens, self.prompt_tokens)]
        self._start()
        if self.history is not None:
            self.history.restore()
        for companion in self.companions.values():
            companion.rewind()

    def repeated(self, batch: int) -> "Sequences":
        """`batch` copies of a batch of one, each with keys of its own in memory: for measuring cost."""
        copy = Sequences(
            self.decoder,
            self.cache.capacity_tokens - ROW_MULTIPLE,
            batch,
            history=None if self.history is None else self.history.spec,
            backend=self.backend,
            heads={name: reader.head for name, reader in self.heads.items()},
            kv_where=self.kv_where,
        )
        copy.tokens = [list(self.tokens[0]) for _ in range(batch)]
        copy.prompt_tokens = np.repeat(self.prompt_tokens, batch)
        copy.cache.copy_from(self.cache)
        if self.history is not None and copy.history is not None:
            copy.history.copy_from(self.history)
        for name, reader in copy.heads.items():
            reader.copy_from(self.heads[name])
        copy.companions = {name: companion.repeated(batch) for name, companion in self.companions.items()}
        return copy

    def hold(self, tokens: list[int], *, limit: int) -> None:
        """Put every sequence at these tokens, a beginning of what is cached, with `limit` new tokens allowed."""
        self.tokens = [list(tokens) for _ in range(self.batch)]
        self.prompt_tokens = self.committed
        self.limits = np.full(self.batch, limit, dtype=np.int64)
        self._start()
        for companion in self.companions.values():
            companion.hold(tokens, limit=limit)

    @contextmanager
    def tapping(self, readers: Collection[Tapper]) -> Iterator[None]:
        """Meanwhile every pass over rows leaves its hidden states with these."""
        self._tapping = readers
        try:
            yield
        finally:
            self._tapping = ()

    @contextmanager
    def _at_rest(self) -> Iterator[None]:
        """While a pass is practised no sequence may emit: then nothing is committed, and what is left is put back."""
        small = [self.pending, self.before, self.room, *(state.packed for state in self._states.values())]
        saved = [tensor.clone() for tensor in small]
        rows = torch.arange(self.batch, device=self.room.device)[:, None]  # [B, 1]
        back = torch.arange(self.rewritten, device=self.room.device) - self.rewritten
        last = (self.cache.lengths[:, None] + back).clamp(min=0)  # [B, R]
        keys, values = self.cache.k[:, rows, :, last], self.cache.v[:, rows, :, last]  # [B, R, L, Hk, D] each
        self.room.zero_()
        yield
        self.cache.k[:, rows, :, last], self.cache.v[:, rows, :, last] = keys, values
        for tensor, value in zip(small, saved):
            tensor.copy_(value)

    def _start(self) -> None:
        """Tell the device where decoding starts: everything but each last token is cached, that one is pending."""
        self.done = self.limits <= 0
        self.cache.set_lengths(self.prompt_tokens - 1)
        to_device(np.array([t[-1] for t in self.tokens]), self.pending)
        to_device(np.array([t[-2] if len(t) > 1 else 0 for t in self.tokens]), self.before)
        to_device(np.maximum(self.limits, 0), self.room)
        self.turn += 1
        self.started = self.turn

    def forward_block(
        self,
        tokens: Tensor,
        *,
        padded: bool,
        rows: bool,
        start: Tensor | None = None,
        cached_rows: int = 0,
        watch: Callable[[int, Tensor], None] | None = None,
        branches: Branches | None = None,
    ) -> Block:
        """Full attention over everything cached for a block of tokens [B, T], written behind the committed keys.

        padded: on a CPU, round T up to ROW_MULTIPLE inside. rows: also collect the attention rows. Commits nothing.
        start: instead, the positions [B] at which the blocks begin, up to cached_rows before what is committed ends.
        watch: is told every layer's queries [B, T or more, H, D].
        branches: how the rows descend from each other, where they are no chain. They leave no attention rows.
        """
        T = tokens.shape[1]
        if padded and not self.cache.on_gpu:
            tokens = F.pad(tokens, (0, round_up(T, ROW_MULTIPLE) - T))
        width = self.cache.width(tokens.shape[1] - cached_rows)
        lengths = self.cache.lengths if start is None else start
        depths = ancestors = collected = None
        if branches is not None:
            branches = branches.padded(tokens.shape[1])
            depths, ancestors = branches.depths, branches.ancestors
        elif rows and self.history is not None:
            collected = self.history.rows(tokens.shape[1], self.batch)

        def attend(layer: int, q: Tensor) -> Tensor:
            if watch is not None:
                watch(layer, q)
            kv = self.cache.view(layer, width)
            if collected is not None and self.history is not None:
                return self.history.attend(collected, layer, q, kv, lengths)
            return full_attention(q, *kv, lengths, backend=self.backend, ancestors=ancestors)[0]

        return Block(self.forward_rows(tokens, lengths, attend, depths=depths)[:, :T], collected, start)

    def forward_rows(
        self,
        tokens: Tensor,
        lengths: Tensor,
        attend: AttendCached,
        *,
        attend_unrotated: AttendUnrotated | None = None,
        float8: bool = False,
        into: Keys | None = None,
        depths: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, T, V] of tokens [B, T] at positions lengths[b] + t, their keys written to the cache.

        On a GPU through the fused kernels, few rows through the most fused ones; on a CPU through plain operations.
        attend_unrotated: what the most fused ones may call instead of `attend`.
        float8: by float8 copies of the weights, on a GPU and for few rows only. into: instead of to the cache.
        depths: [B, T], positions are lengths[b] + depths[b, t] instead, and keys stay in order.
        """
        keys: Keys = self.cache if into is None else into

        def read(layer: int, q: Tensor) -> Tensor:
            mixed = attend(layer, q)
            keys.write_behind(layer, lengths, tokens.shape[1])
            return mixed

        taps = tap_buffers(self.decoder, tokens.shape, self._tapping)
        if self.cache.on_gpu and tokens.numel() <= MAX_ROWS:
            logits = self.decoder.fused_step(float8=float8).logits(
                tokens, lengths, keys.layer, read, backend=self.backend, taps=taps,
                attend_unrotated=attend_unrotated, depths=depths,
            )  # fmt: skip
        elif float8:
            raise ValueError(f"float8 weights serve up to {MAX_ROWS} rows on a GPU")
        else:
            logits = self._rows(tokens, lengths, read, taps, keys, depths)
        for reader in self._tapping:
            reader.see(taps_of(reader, taps))
        return logits

    def _rows(
        self,
        tokens: Tensor,
        lengths: Tensor,
        attend: AttendCached,
        taps: Taps,
        keys: Keys,
        depths: Tensor | None,
    ) -> Tensor:
        if self.cache.on_gpu:
            hidden = self.decoder.forward_cached(
                tokens, lengths, keys.layer, attend, backend=self.backend, taps=taps, depths=depths
            )
            return self.decoder.logits(hidden)
        positions = lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)  # [B, T]

        def keep(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if keys is self.cache and lengths is self.cache.lengths:
                self.cache.write(layer, k, v)
            else:
                keys.write_at(layer, k, v, positions)
            return attend(layer, q)

        turned = positions if depths is None else lengths[:, None] + depths  # [B, T]
        return self.decoder.logits(self.decoder.forward(tokens, turned, keep, taps))

    def advance(self, block: Block, counts: Tensor) -> None:
        """Take the first counts[b] rows of a block as committed, on the device: into history, then the lengths. [B]"""
        if self.history is not None and block.rows is not None:
            if block.start is None:
                self.history.push(block.rows, self.cache.lengths, counts)
            else:  # the rows in front are committed too; at rest nothing is
                whole = torch.where(counts > 0, self.cache.lengths - block.start + counts, 0)  # [B]
                self.history.push(block.rows, block.start, whole)
        self.cache.advance(counts)

    def commit(self, emitted: list[list[int]], counts: npt.NDArray[np.int64]) -> None:
        """Take note of what `advance` did: append emitted tokens, of which there are counts [B]. Sets `done`."""
        for tokens, new in zip(self.tokens, emitted):
            tokens.extend(new)
        stopped = np.array([bool(new) and new[-1] in self.stop_ids for new in emitted])
        self.done = self.done | stopped | (self.remaining <= 0)
        self.cache.note(counts)
