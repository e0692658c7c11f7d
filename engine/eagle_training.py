"""How an EAGLE-3 head learns: unrolled drafts against the target's distribution, row by row of a text.

Step j of row i stands for draft j + 1 of a round that starts there: its hidden state is the output of step j - 1, its
token the text's (teacher forcing), and it sees the keys of every row up to i, and its own of steps 1 .. j. The loss is
cross-entropy against the target's distribution over the reduced vocabulary; rows where the target's favourite lies
outside it carry none. Weights of steps: decay^j.

A target reads a text once, chunk by chunk; what stays of its logits is their distribution over the reduced vocabulary.
A long text is learned segment by segment, so that memory does not grow with it: rows before a segment enter as keys,
without gradients. Leaves out optimiser, files and text (eagle_trainer, verbs/train_eagle).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specdial.engine.cache import KVCache
from specdial.engine.eagle_attention import unrolled_attention
from specdial.engine.models.config import ModelConfig
from specdial.engine.models.decoder import Decoder, rms_norm
from specdial.engine.models.eagle import EagleHead, HeadConfig, HeadWeights, default_taps, head_shapes
from specdial.engine.prefill import CPU_CHUNK_TOKENS, CUDA_CHUNK_TOKENS, causal_attention
from specdial.engine.round_state import to_device

LOGITS_ROWS = 1024  # rows of a text whose whole logits exist at once
LOSS_ROWS = 4096  # rows whose logits over the reduced vocabulary do


@dataclass(frozen=True, slots=True)
class Text:
    """B texts of n tokens each as their target sees them.

    tokens: [B, n] int64. taps: [len(taps), B, n, target_hidden]; wanted: [B, n, draft_vocab], after each token the
    target's distribution over the reduced vocabulary; drafted: [B, n], does it hold the target's favourite?
    """

    tokens: Tensor
    taps: Tensor
    wanted: Tensor
    drafted: Tensor


@dataclass(frozen=True, slots=True)
class Unrolling:
    """steps: drafts a row learns. decay: weight of each against the one before. segment_tokens: rows of one update."""

    steps: int = 7
    decay: float = 0.8
    segment_tokens: int = 8192


def reduced_vocabulary(texts: Iterable[list[int]], vocab: int, size: int) -> Tensor:
    """Ids of the `size` most frequent tokens, ascending, [min(size, vocab)]; of equally frequent ones the smaller."""
    counts = np.zeros(vocab, dtype=np.int64)
    for text in texts:
        counts += np.bincount(text, minlength=vocab)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size]))


def new_config(target: ModelConfig, draft_vocab: int) -> HeadConfig:
    """A head of the target's own widths."""
    layer = replace(target, layers=1, qkv_bias=False, qk_norm=False, tied_embeddings=False)
    return HeadConfig(layer, target.hidden, draft_vocab, default_taps(target.layers))


def new_head(decoder: Decoder, token_ids: Tensor, seed: int) -> EagleHead:
    """An untrained head in float32: random, but that it drafts by the target's own head.

    Its rows are those of the target's with the final norm in them, shrunk so that random states give logits of about 1:
    a head that is sure of itself before it has learned anything takes long to unlearn it.
    """
    config = new_config(decoder.config, len(token_ids))
    random = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.ones(shape) if name.endswith("norm") else torch.randn(shape, generator=random) * shape[-1] ** -0.5
        for name, shape in head_shapes(config).items()
    }
    ids = token_ids.to(decoder.device)
    rows = decoder.head[ids].float() * decoder.norm.float()  # [draft_vocab, hidden]
    weights["lm_head"] = rows * (decoder.config.hidden**-0.5 / rows.square().mean().sqrt())
    trained = HeadWeights(**weights).to(decoder.device, torch.float32)
    return EagleHead(config, trained, ids, decoder.embedding)


@torch.no_grad()
def read_text(decoder: Decoder, tokens: list[list[int]], head: EagleHead) -> Text:
    """What the target makes of equally long texts, chunk by chunk; on a GPU through the passes that prefill takes."""
    device, dtype, (B, n) = decoder.device, decoder.dtype, (len(tokens), len(tokens[0]))
    ids = torch.empty(B, n, dtype=torch.int64, device=device)
    to_device(np.array(tokens), ids)
    taps = torch.empty(len(head.config.taps), B, n, decoder.config.hidden, device=device, dtype=dtype)
    wanted = torch.empty(B, n, len(head.token_ids), device=device, dtype=dtype)
    drafted = torch.empty(B, n, dtype=torch.bool, device=device)
    is_drafted = torch.zeros(decoder.config.vocab, dtype=torch.bool, device=device).index_fill(0, head.token_ids, True)
    for start, stop, hidden, seen in _passes(decoder, ids, head.config.taps):
        taps[:, :, start:stop] = seen
        for b, rows in enumerate(hidden):
            for at in range(0, stop - start, LOGITS_ROWS):
                logits = decoder.logits(rows[at : at + LOGITS_ROWS])  # [R, V] float32
                part = slice(start + at, start + at + len(logits))
                wanted[b, part] = torch.softmax(logits[:, head.token_ids], -1)
                drafted[b, part] = is_drafted[logits.argmax(-1)]
    return Text(ids, taps, wanted, drafted)


def _passes(decoder: Decoder, ids: Tensor, layers: tuple[int, ...]) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Chunks of texts [B, n]: where each starts and stops, its last hidden states [B, T, hidden], taps of layers."""
    B, n = ids.shape
    cache = KVCache(decoder.config, B, n, device=decoder.device, dtype=decoder.dtype)
    step = max(CUDA_CHUNK_TOKENS // B, 1) if cache.on_gpu else CPU_CHUNK_TOKENS
    for start in range(0, n, step):
        stop = min(start + step, n)

        def attend(layer: int, q: Tensor, stop: int = stop) -> Tensor:
            return causal_attention(q, *cache.view(layer, stop))

        def keep(layer: int, q: Tensor, k: Tensor, v: Tensor, start: int = start, stop: int = stop) -> Tensor:
            for b in range(B):
                cache.write_one(layer, b, start, k[b : b + 1], v[b : b + 1])
            keys, values = (x.transpose(1, 2) for x in cache.view(layer, stop))
            return unrolled_attention(q, keys, values, [])

        if cache.on_gpu:
            taps = decoder.tap_buffers(ids[:, start:stop].shape, layers)
            lengths = torch.full((B,), start, device=ids.device)
            hidden = decoder.forward_cached(
                ids[:, start:stop].contiguous(), lengths, cache.layer, attend, backend="triton", taps=taps
            )
            seen = torch.stack([taps[layer] for layer in layers])
        else:
            positions = torch.arange(start, stop)[None]  # [1, T]
            hidden, seen = decoder.forward_with_taps(ids[:, start:stop], positions, keep, layers)
        yield start, stop, hidden, seen


def segments(rows: int, unrolling: Unrolling) -> list[tuple[int, int]]:
    """Where the segments of so many rows begin and end."""
    size = unrolling.segment_tokens
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]


def segment_loss(head: EagleHead, text: Text, segment: tuple[int, int], u: Unrolling) -> Tensor:
    """The weighted loss of a segment of a text's rows, a scalar: of each step the mean over rows that carry loss."""
    first, stop = segment
    n, device = text.tokens.shape[1], text.tokens.device
    at = torch.arange(first, stop, device=device)  # [R]
    hidden = head.project(text.taps[:, :, first:stop])  # [B, R, hidden]
    keys, values = _before(head, text, first)
    own: list[tuple[Tensor, Tensor]] = []
    loss = hidden.new_zeros((), dtype=torch.float32)
    for step in range(u.steps):
        into = text.tokens[:, (at + 1 + step).clamp(max=n - 1)]  # [B, R]
        q, k, v = head.qkv(into, hidden, (at + step)[None])
        if step:
            own.append((k, v))
        else:
            keys, values = torch.cat([keys, k], 1), torch.cat([values, v], 1)
        hidden = head.output(hidden, unrolled_attention(q, keys, values, own))
        after = slice(first + 1 + step, min(stop + 1 + step, n))  # the tokens that went in, which the text has
        rows = max(after.stop - after.start, 0)
        states = rms_norm(hidden[:, :rows], head.weights.norm, head.config.layer.norm_eps)
        counted = text.drafted[:, after]
        total = _CrossEntropy.apply(states, head.weights.lm_head, text.wanted[:, after], counted)
        loss = loss + u.decay**step * total / counted.sum().clamp(min=1)
    return loss


def _before(head: EagleHead, text: Text, rows: int) -> tuple[Tensor, Tensor]:
    """Keys and values [B, rows, Hk, D] of a text's first rows, without gradients."""
    c = head.config.layer
    keys = [text.taps.new_zeros(len(text.tokens), 0, c.kv_heads, c.head_dim)]
    values = list(keys)
    with torch.no_grad():
        for start in range(0, rows, CUDA_CHUNK_TOKENS):
            part = slice(start, min(start + CUDA_CHUNK_TOKENS, rows))
            projected = head.project(text.taps[:, :, part])  # [B, T, hidden]
            positions = torch.arange(part.start, part.stop, device=text.tokens.device)[None]
            _, k, v = head.qkv(text.tokens[:, part.start + 1 : part.stop + 1], projected, positions)
            keys.append(k)
            values.append(v)
    return torch.cat(keys, 1), torch.cat(values, 1)


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy of the rows that count, summed: states [B, R, hidden] by matrix [V, hidden] against wanted.

    wanted: [B, R, V] distributions; counted: [B, R]. The gradients are made at once, part by part, so that the logits
    of few rows exist at any time, and once.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, matrix: Tensor, wanted: Tensor, counted: Tensor) -> Tensor:
        d_states, d_matrix = torch.zeros_like(states), torch.zeros_like(matrix, dtype=torch.float32)
        total = d_matrix.new_zeros(())
        for b in range(len(states)):
            for start in range(0, states.shape[1], LOSS_ROWS):
                part = (b, slice(start, start + LOSS_ROWS))
                counts = counted[part][:, None]  # [R, 1]
                goal = wanted[part].float() * counts  # [R, V]
                logs = torch.log_softmax(F.linear(states[part], matrix).float(), -1)  # [R, V]
                total -= (goal * logs).sum()
                error = (logs.exp() * counts - goal).to(states.dtype)  # [R, V]
                d_states[part] = error @ matrix
                d_matrix += error.t() @ states[part]
        ctx.save_for_backward(d_states, d_matrix.to(matrix.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_states, d_matrix = ctx.saved_tensors
        return d_states * grads[0], d_matrix * grads[0], None, None
