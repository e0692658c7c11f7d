"""How much memory the training of an EAGLE head takes, known before it is allocated, and what would fit.

Beside the target's weights: the head with its optimiser, one text as the target left it, and the larger of what the
target makes while it reads and what an update keeps for its gradients. Leaves out decoding (engine/memory).
"""

from dataclasses import dataclass, fields, replace

import torch

from specdial.engine.eagle_training import LOGITS_ROWS, LOSS_ROWS
from specdial.engine.memory import Demand, predict
from specdial.engine.models.config import ModelConfig
from specdial.engine.models.eagle import HeadConfig, head_shapes
from specdial.kernels import Backend
from specdial.policies.errors import UserError


@dataclass(frozen=True, slots=True)
class TrainingDemand:
    """What a training is made of.

    target, dtype: the model and what it computes in. text_tokens: of the longest text. segment_tokens: rows of an
    update; steps: drafts that each of them learns.
    """

    target: ModelConfig
    head: HeadConfig
    dtype: torch.dtype
    on_gpu: bool
    text_tokens: int
    segment_tokens: int
    steps: int


@dataclass(frozen=True, slots=True)
class TrainingMemory:
    """Bytes by what they hold.

    optimiser: weights, moments and gradients in float32, and a copy to compute with. text: taps and wanted
    distributions of one. reading: the target's keys, and what it makes of a chunk. update: what the rows of an update
    keep for their gradients, and the logits that exist at once. fixed: a margin.
    """

    optimiser: int
    text: int
    reading: int
    update: int
    fixed: int

    @property
    def total(self) -> int:
        return self.optimiser + self.text + max(self.reading, self.update) + self.fixed


def training_memory(d: TrainingDemand) -> TrainingMemory:
    """Bytes of every part. Grows with text_tokens and segment_tokens."""
    c, size, vocab = d.head.layer, d.dtype.itemsize, d.head.draft_vocab
    weights = sum(torch.Size(shape).numel() for shape in head_shapes(d.head).values())
    rows = max(d.text_tokens, d.segment_tokens)  # short texts are read together, as many as make a segment
    backend: Backend = "triton" if d.on_gpu else "reference"
    read = predict(
        Demand(
            config=d.target, dtype=d.dtype, backend=backend, batch=1, longest_tokens=rows, k_max=0, history=None,
            selected=0,
        )
    )  # fmt: skip
    width, queries = c.hidden, c.heads * c.head_dim
    row = size * (16 * width + 5 * c.intermediate + 9 * queries) + 16 * width  # measured, and a third more
    logits = min(LOSS_ROWS, d.segment_tokens) * vocab * 4 * 5 + vocab * width * (4 + size * d.steps)
    # keys and values of all rows for every query head: a copy a step, and gradients
    before = (2 * d.steps + 4) * rows * queries * size
    return TrainingMemory(
        optimiser=weights * (4 * 6 + 2 * size),  # the optimiser makes two copies more while it steps
        text=rows * (len(d.head.taps) * d.head.target_hidden + vocab) * size,
        reading=read.kv_cache + read.activations + min(LOGITS_ROWS, rows) * (d.target.vocab + 2 * vocab) * 4,
        update=min(d.segment_tokens, rows) * d.steps * row + logits + before,
        fixed=read.fixed,
    )


def require_training(d: TrainingDemand, free_bytes: int) -> TrainingMemory:
    """The prediction, if it fits into `free_bytes`. Raises UserError that says what is needed, and what would fit."""
    memory = training_memory(d)
    if memory.total <= free_bytes:
        return memory

    def largest(names: tuple[str, ...], top: int) -> int:
        """The largest value of these fields that fits, 0 if none does."""
        fits, too_large = 0, top
        while too_large - fits > 1:
            middle = (fits + too_large) // 2
            changed = {name: min(getattr(d, name), middle) for name in names}
            if training_memory(replace(d, **changed)).total <= free_bytes:
                fits = middle
            else:
                too_large = middle
        return fits

    segment = largest(("segment_tokens",), d.segment_tokens)
    text = largest(("segment_tokens", "text_tokens"), max(d.text_tokens, d.segment_tokens))
    ways = [f"segment_tokens to {segment}"] if segment >= 8 else []
    ways += [f"the context so that texts have {text} tokens, and segment_tokens to as many"] if text >= 8 else []
    parts = [f"{f.name} {getattr(memory, f.name) / 1e9:.1f} GB" for f in fields(memory)]
    raise UserError(
        f"training on texts of {d.text_tokens} tokens needs {memory.total / 1e9:.1f} GB beside the target "
        f"({', '.join(parts)}), {max(free_bytes, 0) / 1e9:.1f} GB are free",
        f"lower {' or '.join(ways)}" if ways else "lower draft_vocab, or use a device with more memory",
    )
