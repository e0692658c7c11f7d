"""The attention trace: attention rows of a run of positions, from which scoring heads are searched without a model.

A row holds its largest entries only, so that its size is bounded at any context: keys ascending, weights in float16,
and the sum the kept ones had before rounding. Where all visible keys are kept, rows sum to 1.
Leaves out files (trace.attention_file), how rows come about (engine.attention_rows) and what is made of them
(simulator).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from specdial.policies.errors import UserError
from specdial.policies.fields import setting

ATTENTION_SCHEMA = "specdial/attention/1"
TARGET, DRAFT = "target", "draft"  # values of `source`
ALL_HEADS = -1  # as `head`: the mean over all heads of the layer, which is what a selection is to recall
REMEDY = "record it again with specdial heads"

HEADS = pa.schema(
    [
        pa.field("source", pa.string(), nullable=False),
        pa.field("layer", pa.int16(), nullable=False),
        pa.field("head", pa.int16(), nullable=False),
        pa.field("needle_mass", pa.float64(), nullable=False),
        pa.field("copy_frac", pa.float64(), nullable=False),
        pa.field("rank_in_layer", pa.int16(), nullable=False),
        pa.field("rank", pa.int32(), nullable=False),
    ]
)
ROWS = pa.schema(
    [
        pa.field("source", pa.string(), nullable=False),
        pa.field("layer", pa.int16(), nullable=False),
        pa.field("head", pa.int16(), nullable=False),
        pa.field("position", pa.int32(), nullable=False),  # of the query; it sees keys 0 .. position
        pa.field("mass", pa.float32(), nullable=False),  # sum of the kept weights; 1 where all visible keys are kept
        pa.field("keys", pa.list_(pa.int32()), nullable=False),
        pa.field("weights", pa.list_(pa.float16()), nullable=False),
    ]
)


@dataclass(frozen=True, slots=True)
class HeadScore:
    """One head's place in the ranking; see engine.head_ranking for the two scores. Ranks start at 1."""

    source: str
    layer: int
    head: int
    needle_mass: float
    copy_frac: float
    rank_in_layer: int
    rank: int


@dataclass(frozen=True, slots=True)
class RowRun:
    """Where one document's rows lie: positions first_position .. first_position+rows-1 of its text."""

    doc: int = setting(low=0)
    split: str = setting()
    prompt_tokens: int = setting(low=1)
    first_position: int = setting(low=0)
    rows: int = setting(low=1)

    @property
    def keys(self) -> int:
        """Keys that the last row sees."""
        return self.first_position + self.rows


@dataclass(frozen=True, slots=True)
class AttentionMeta:
    """meta.json. heads_per_layer: candidates kept of each layer, the best by rank_in_layer.

    candidate_keys, recalled_keys: most entries kept of a candidate's row, and of a mean over heads.
    """

    model: dict[str, Any]
    draft: dict[str, Any] | None
    documents: tuple[RowRun, ...]
    heads_per_layer: int
    candidate_keys: int
    recalled_keys: int
    workload: dict[str, Any]
    ranking: dict[str, Any]
    hardware: dict[str, Any]
    provenance: dict[str, Any]


@dataclass(frozen=True, slots=True)
class KeptRows:
    """The largest entries of rows at consecutive positions; the row of position i has offsets[i]:offsets[i+1]."""

    keys: np.ndarray  # [entries] int32
    weights: np.ndarray  # [entries] float16
    offsets: np.ndarray  # [R + 1] int64
    mass: np.ndarray  # [R] float32

    @classmethod
    def of(cls, keys: np.ndarray, weights: np.ndarray, counts: np.ndarray) -> "KeptRows":
        """The first counts[r] entries of each row: keys, ascending, and weights [R, C], counts [R]."""
        held = np.arange(keys.shape[1]) < counts[:, None]  # [R, C]
        mass = np.where(held, weights, 0.0).sum(-1, dtype=np.float64)
        return cls(
            keys[held].astype(np.int32),
            weights[held].astype(np.float16),
            np.concatenate([[0], np.cumsum(counts)]),
            np.minimum(mass, 1.0).astype(np.float32),
        )

    def dense(self, keys: int) -> np.ndarray:
        """[R, keys] float32, zero where nothing was kept; each row sums to its mass, rounding taken back."""
        weights, starts = self.weights.astype(np.float64), self.offsets[:-1]
        total = np.add.reduceat(weights, starts)  # [R]; no row is empty
        scale = np.divide(self.mass, total, out=np.zeros_like(total), where=total > 0)
        counts = np.diff(self.offsets)
        places = np.repeat(np.arange(len(self.mass)) * keys, counts) + self.keys
        found = np.zeros((len(self.mass), keys), dtype=np.float32)
        found.ravel()[places] = weights * np.repeat(scale, counts)
        return found


@dataclass(frozen=True, slots=True)
class DocumentRows:
    """One document's rows, by (source, layer, head)."""

    run: RowRun
    kept: dict[tuple[str, int, int], KeptRows]

    def rows(self, source: str, layer: int, head: int) -> np.ndarray:
        """[R, S] float32, S = run.keys. Raises UserError for a head that was not a candidate."""
        if (source, layer, head) not in self.kept:
            raise UserError(f"the attention trace holds no rows of {source} layer {layer} head {head}", REMEDY)
        return self.kept[source, layer, head].dense(self.run.keys)

    def layers(self, source: str) -> list[int]:
        """Layers with candidates of this source, ascending."""
        return sorted({layer for of, layer, head in self.kept if of == source and head != ALL_HEADS})

    def recalled(self) -> np.ndarray:
        """The target's attention, mean over all layers and heads: [R, S] float32."""
        layers = sorted({layer for of, layer, head in self.kept if head == ALL_HEADS})
        total = np.zeros((self.run.rows, self.run.keys), dtype=np.float32)
        for layer in layers:
            total += self.rows(TARGET, layer, ALL_HEADS)
        return total / np.float32(len(layers))


@dataclass(frozen=True, slots=True)
class AttentionTrace:
    """An attention trace in memory, rows as they were kept."""

    path: Path
    meta: AttentionMeta
    heads: list[HeadScore]
    documents: list[DocumentRows]

    def best_heads(self, source: str, layer: int, count: int) -> tuple[int, ...]:
        """The `count` best heads of a layer, best first."""
        found = [h for h in self.heads if (h.source, h.layer) == (source, layer) and h.rank_in_layer <= count]
        return tuple(h.head for h in sorted(found, key=lambda h: h.rank_in_layer))
