"""History: what the target's committed attention rows say about every cached key, or page of keys.

A verification's rows are collected while it runs; once acceptance is known, the committed ones enter a ring of the last
W rows, or an exponentially decayed sum. Row p stands at slot p mod W, and decay goes row by row, so the scores that
rank keys are functions of the committed tokens alone, however rounds fell. On a GPU rows stay unnormalised until then,
and one launch serves every layer.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from specdial.engine.models.config import ModelConfig
from specdial.kernels import Backend
from specdial.kernels.full_attention import Statistics, full_attention, full_attention_raw
from specdial.kernels.history import decay_rows, push_rows


@dataclass(frozen=True, slots=True)
class HistorySpec:
    """window: rows kept per kv head. page: keys that share one score (1: every key has its own).

    decay: below 1, a score is decay * score + row for every committed row, and no rows are kept.
    """

    window: int
    page: int
    decay: float = 1.0


@dataclass(frozen=True, slots=True)
class Rows:
    """Attention rows of one block, all layers: normalised per layer on a CPU, raw and stacked on a GPU."""

    masses: list[Tensor] = field(default_factory=list)  # [B, Hk, T, S / page] each
    raw: Statistics | None = None


class History:
    """Rings of attention rows [L, B, Hk, W, S / page] of a batch."""

    def __init__(
        self, config: ModelConfig, batch: int, keys: int, spec: HistorySpec, *, device: torch.device, backend: Backend
    ) -> None:
        """keys: the cache's capacity, a multiple of the page."""
        self.config, self.batch, self.keys, self.spec, self.backend = config, batch, keys, spec, backend
        self.decayed = spec.decay < 1.0
        shape = (config.layers, batch, config.kv_heads, 0 if self.decayed else spec.window, keys // spec.page)
        self.ring = torch.zeros(shape, device=device)  # [L, B, Hk, W, S / page]; W is 0 with decay
        self._scores = torch.zeros((*shape[:3], shape[4]), device=device)  # [L, B, Hk, S / page]; a ring's: GPU only
        self._saved: tuple[Tensor, Tensor] | None = None

    def scores(self) -> Tensor:
        """Mass per key or page over the window or decayed, [L, B, Hk, S / page]."""
        return self._scores if self.decayed or self.backend == "triton" else self.ring.sum(dim=3)

    def rows(self, tokens: int, batch: int) -> Rows:
        """An empty collection for a block of `tokens` rows of `batch` sequences."""
        if self.backend == "reference":
            return Rows()
        c = self.config
        return Rows(
            raw=Statistics.empty(
                "token" if self.spec.page == 1 else "page",
                batch=c.layers * batch,
                kv_heads=c.kv_heads,
                keys=self.keys,
                rows=tokens,
                group=c.heads // c.kv_heads,
                page_tokens=max(self.spec.page, 16),
                device=self.ring.device,
            )
        )

    def attend(self, rows: Rows, layer: int, q: Tensor, kv: tuple[Tensor, Tensor], lengths: Tensor) -> Tensor:
        """Full attention of a block, its rows added to `rows`. q: [B, T, H, D]; kv: [B, Hk, S, D] each."""
        if rows.raw is not None:
            into = rows.raw.layer(layer, q.shape[0])
            return full_attention_raw(q, *kv, lengths, backend=self.backend, into=into)[0]
        page = self.spec.page
        mass: Literal["token", "page"] = "token" if page == 1 else "page"
        out, found = full_attention(q, *kv, lengths, backend=self.backend, mass=mass, page_tokens=max(page, 16))
        if found is not None:
            rows.masses.append(found)
        return out

    def push(self, rows: Rows, lengths: Tensor, committed: Tensor, *, only: int | None = None) -> None:
        """Take in the first committed[b] rows of a block that began at lengths[b].

        only: the block is of this one sequence.
        """
        if rows.raw is not None and only is None:
            self._take(self.ring.flatten(0, 1), self._scores.flatten(0, 1), rows.raw, lengths, committed)
            return
        part = slice(None) if only is None else slice(only, only + 1)
        for layer in range(self.config.layers):
            mass = rows.masses[layer] if rows.raw is None else rows.raw.layer(layer, lengths.shape[0])
            self._take(self.ring[layer, part], self._scores[layer, part], mass, lengths, committed)

    def _take(
        self, ring: Tensor, scores: Tensor, mass: Tensor | Statistics, lengths: Tensor, committed: Tensor
    ) -> None:
        """The committed rows into ring [N, Hk, W, S / page] or scores [N, Hk, S / page]."""
        if self.decayed:
            decay_rows(scores, mass, lengths, committed, decay=self.spec.decay, backend=self.backend)
        else:
            score = scores if self.backend == "triton" else None
            push_rows(ring, mass, lengths, committed, backend=self.backend, score=score)

    def clear(self) -> None:
        """Forget everything."""
        self.ring.zero_()
        self._scores.zero_()

    def save(self) -> None:
        """Remember the present state for `restore`."""
        if self._saved is None:
            self._saved = (torch.empty_like(self.ring), torch.empty_like(self._scores))
        self._saved[0].copy_(self.ring)
        self._saved[1].copy_(self._scores)

    def restore(self) -> None:
        """Back to the saved state."""
        if self._saved is not None:
            self.ring.copy_(self._saved[0])
            self._scores.copy_(self._saved[1])

    def copy_from(self, one: "History") -> None:
        """Take over the state of a batch of one, a copy for each of our sequences."""
        self.ring.copy_(one.ring)
        self._scores.copy_(one._scores)
