"""The EAGLE-3 head (Li et al. 2025): a layer that reads a target's hidden states, drafts over a reduced vocabulary.

Row i stands for the token at position i and the one after it: the target's hidden states of i entering a few layers,
projected to one, beside the embedding of token i + 1. Its output says which token comes at i + 2, and takes the place
of the projected states at the next step of a draft. Keys and values of a row depend on no other row.

Leaves out attention and the cache, as `Decoder` does, and where weights come from (weights/eagle.py). Plain operations,
all of which can be differentiated: training runs the same code.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from specdial.engine.models.config import ModelConfig
from specdial.engine.models.decoder import rms_norm
from specdial.engine.models.rope import cos_sin, inverse_frequencies, rotate

# attend(q [B, T, H, D], k [B, T, Hk, D], v [B, T, Hk, D]) -> [B, T, H, D]; RoPE is already in q and k.
AttendOnce = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Sizes of a head. layer: of its one layer, with the target's vocabulary.

    target_hidden: width of the target's hidden states. draft_vocab: tokens it can draft. taps: the target's layers
    whose inputs it reads, in the order in which they are concatenated.
    """

    layer: ModelConfig
    target_hidden: int
    draft_vocab: int
    taps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """What is trained. q, k, v share a matrix, and so do gate and up, as in `Decoder`."""

    fc: Tensor  # [hidden, len(taps) * target_hidden]
    input_norm: Tensor  # [hidden], of the token's embedding
    hidden_norm: Tensor  # [hidden], of the hidden state
    qkv: Tensor  # [(H + 2 Hk) D, 2 hidden]
    out: Tensor  # [hidden, H D]
    mlp_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 intermediate, hidden]
    down: Tensor  # [hidden, intermediate]
    norm: Tensor  # [hidden]
    lm_head: Tensor  # [draft_vocab, hidden]

    def to(self, device: torch.device | str, dtype: torch.dtype) -> HeadWeights:
        """The same weights elsewhere; gradients flow back."""
        return HeadWeights(**{f.name: getattr(self, f.name).to(device=device, dtype=dtype) for f in fields(self)})


def head_shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every field of HeadWeights."""
    c = config.layer
    return {
        "fc": (c.hidden, len(config.taps) * config.target_hidden),
        "input_norm": (c.hidden,),
        "hidden_norm": (c.hidden,),
        "qkv": ((c.heads + 2 * c.kv_heads) * c.head_dim, 2 * c.hidden),
        "out": (c.hidden, c.heads * c.head_dim),
        "mlp_norm": (c.hidden,),
        "gate_up": (2 * c.intermediate, c.hidden),
        "down": (c.hidden, c.intermediate),
        "norm": (c.hidden,),
        "lm_head": (config.draft_vocab, c.hidden),
    }


def default_taps(layers: int) -> tuple[int, ...]:
    """The layers whose inputs a head reads unless its config says otherwise: 2, L//2, L-3, within the model."""
    return tuple(min(max(layer, 0), layers - 1) for layer in (2, layers // 2, layers - 3))


class EagleHead:
    """A head on one device in one dtype. Build it with `weights.eagle.load_head`, or by training."""

    def __init__(
        self, config: HeadConfig, weights: HeadWeights, token_ids: Tensor, embedding: Tensor, *, digest: str = ""
    ) -> None:
        """token_ids: [draft_vocab] int64, the target's id of each token it drafts, ascending.

        embedding: [V, hidden], the target's unless the head has its own. digest: of the files it came from.
        """
        self.config, self.weights, self.embedding, self.digest = config, weights, embedding, digest
        self.token_ids = token_ids.to(embedding.device)  # [draft_vocab]
        inverse, self._attention_factor = inverse_frequencies(config.layer.rope, config.layer.head_dim)
        self._inverse = inverse.to(embedding.device)  # [D/2]

    def with_weights(self, weights: HeadWeights) -> EagleHead:
        """The same head with other weights. It waits for no device, as training makes one an update."""
        head = copy(self)
        head.weights = weights
        return head

    def project(self, taps: Tensor) -> Tensor:
        """One hidden state a row, [B, T, hidden], of the target's taps [len(taps), B, T, target_hidden]."""
        return F.linear(torch.cat(taps.unbind(0), dim=-1).to(self.weights.fc.dtype), self.weights.fc)

    def qkv(self, tokens: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, T, H, D], keys and values [B, T, Hk, D] of rows, rotated to their positions [B, T].

        tokens: [B, T], each row's next token; one outside the vocabulary, which only padding can be, becomes its edge.
        hidden: [B, T, hidden], projected taps or the output of the step before.
        """
        c, w = self.config.layer, self.weights
        embedded = F.embedding(tokens.clamp(0, len(self.embedding) - 1), self.embedding)  # [B, T, hidden]
        inputs = torch.cat(
            [rms_norm(embedded, w.input_norm, c.norm_eps), rms_norm(hidden, w.hidden_norm, c.norm_eps)], dim=-1
        )  # [B, T, 2 hidden]
        widths = (c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim)
        q, k, v = F.linear(inputs, w.qkv).split(widths, -1)
        cos, sin = cos_sin(positions, self._inverse, self._attention_factor)  # [B, T, 1, D] each
        q = rotate(q.unflatten(-1, (c.heads, c.head_dim)), cos, sin)  # [B, T, H, D]
        k = rotate(k.unflatten(-1, (c.kv_heads, c.head_dim)), cos, sin)  # [B, T, Hk, D]
        return q, k, v.unflatten(-1, (c.kv_heads, c.head_dim))

    def output(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        """The layer's output [B, T, hidden]: hidden [B, T, hidden] plus what attention [B, T, H, D] and MLP add."""
        c, w = self.config.layer, self.weights
        x = hidden + F.linear(mixed.flatten(-2), w.out)
        gate, up = F.linear(rms_norm(x, w.mlp_norm, c.norm_eps), w.gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, w.down)

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: AttendOnce) -> Tensor:
        """The layer's output [B, T, hidden] of rows; see `qkv`."""
        return self.output(hidden, attend(*self.qkv(tokens, hidden, positions)))

    def logits(self, output: Tensor) -> Tensor:
        """Logits [..., draft_vocab] float32 of the layer's output [..., hidden]."""
        w = self.weights
        return F.linear(rms_norm(output, w.norm, self.config.layer.norm_eps), w.lm_head).float()

    def target_logits(self, output: Tensor) -> Tensor:
        """Logits [..., V] over the target's vocabulary, -inf where the head cannot draft."""
        logits = self.logits(output)
        whole = logits.new_full((*logits.shape[:-1], self.config.layer.vocab), -torch.inf)
        return whole.index_copy(-1, self.token_ids, logits)
