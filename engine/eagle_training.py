"""How an EAGLE-3 head learns: unrolled drafts against the target's distribution, row by row of a text.

Step j of row i stands for draft j + 1 of a round that starts there: its hidden state is the output of step j - 1, its
token the text's (teacher forcing), and it sees the keys of every row up to i, and its own of steps 1 .. j. The loss is
cross-entropy against the target's distribution over the reduced vocabulary; rows where the target's favourite lies
outside it carry none. Weights of steps: decay^j.

A long text is learned segment by segment, so that memory does not grow with it: rows before a segment enter as keys,
without gradients. Leaves out optimiser, files and text (eagle_trainer, verbs/train_eagle).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from specdial.engine.cache import KVCache
from specdial.engine.models.decoder import Decoder
from specdial.engine.models.eagle import EagleHead, HeadConfig, HeadWeights, default_taps, head_shapes
from specdial.engine.prefill import CPU_CHUNK_TOKENS, CUDA_CHUNK_TOKENS, causal_attention

LOSS_ROWS = 1024  # rows whose logits exist at once


@dataclass(frozen=True, slots=True)
class Text:
    """A text of n tokens as its target sees it.

    tokens: [n] int64. taps: [len(taps), n, target_hidden]; last: [n, target_hidden], after the final norm. drafted:
    [n], is the target's favourite after each token in the reduced vocabulary?
    """

    tokens: Tensor
    taps: Tensor
    last: Tensor
    drafted: Tensor


@dataclass(frozen=True, slots=True)
class Unrolling:
    """steps: drafts a row learns. decay: weight of each against the one before. segment_tokens: rows of one update."""

    steps: int = 7
    decay: float = 0.8
    segment_tokens: int = 1024


def reduced_vocabulary(texts: Iterable[list[int]], vocab: int, size: int) -> Tensor:
    """Ids of the `size` most frequent tokens, ascending, [min(size, vocab)]; of equally frequent ones the smaller."""
    counts = np.zeros(vocab, dtype=np.int64)
    for text in texts:
        counts += np.bincount(text, minlength=vocab)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size]))


def new_head(decoder: Decoder, token_ids: Tensor, seed: int) -> EagleHead:
    """An untrained head in float32: random, but that it drafts by the target's own head.

    Its rows are those of the target's with the final norm in them, shrunk so that random states give logits of about 1:
    a head that is sure of itself before it has learned anything takes long to unlearn it.
    """
    c = decoder.config
    layer = replace(c, layers=1, qkv_bias=False, qk_norm=False, tied_embeddings=False)
    config = HeadConfig(layer, c.hidden, len(token_ids), default_taps(c.layers))
    random = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.ones(shape) if name.endswith("norm") else torch.randn(shape, generator=random) * shape[-1] ** -0.5
        for name, shape in head_shapes(config).items()
    }
    ids = token_ids.to(decoder.device)
    rows = decoder.head[ids].float() * decoder.norm.float()  # [draft_vocab, hidden]
    weights["lm_head"] = rows * (c.hidden**-0.5 / rows.square().mean().sqrt())
    trained = HeadWeights(**weights).to(decoder.device, torch.float32)
    return EagleHead(config, trained, ids, decoder.embedding)


def read_text(decoder: Decoder, tokens: list[int], head: EagleHead) -> Text:
    """What the target makes of a text, chunk by chunk."""
    device, n = decoder.device, len(tokens)
    cache = KVCache(decoder.config, 1, n, device=device, dtype=decoder.dtype)
    step = CUDA_CHUNK_TOKENS if cache.on_gpu else CPU_CHUNK_TOKENS
    ids = torch.tensor(tokens, device=device)  # [n]
    is_drafted = torch.zeros(decoder.config.vocab, dtype=torch.bool, device=device).index_fill(0, head.token_ids, True)
    taps, last, drafted = [], [], []
    for start in range(0, n, step):
        stop = min(start + step, n)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, start: int = start, stop: int = stop) -> Tensor:
            cache.write_one(layer, 0, start, k, v)
            keys, values = cache.view_one(layer, 0, stop)
            if cache.on_gpu:
                return causal_attention(q, keys, values)
            mask = torch.ones(stop - start, stop, dtype=torch.bool).tril(start)  # [T, S]
            return _attention(q, keys.transpose(1, 2), values.transpose(1, 2), mask)

        positions = torch.arange(start, stop, device=device)[None]  # [1, T]
        hidden, seen = decoder.forward_with_taps(ids[None, start:stop], positions, attend, head.config.taps)
        favourites = [decoder.logits(rows).argmax(-1) for rows in hidden[0].split(LOSS_ROWS)]
        taps.append(seen[:, 0])
        last.append(hidden[0])
        drafted.append(is_drafted[torch.cat(favourites)])
    # Copies: what inference made cannot be differentiated through.
    return Text(ids, torch.cat(taps, 1).clone(), torch.cat(last).clone(), torch.cat(drafted).clone())


def segments(rows: int, unrolling: Unrolling) -> list[tuple[int, int]]:
    """Where the segments of so many rows begin and end."""
    size = unrolling.segment_tokens
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]


def segment_loss(head: EagleHead, target_rows: Tensor, text: Text, segment: tuple[int, int], u: Unrolling) -> Tensor:
    """The weighted loss of a segment of a text's rows, a scalar: of each step the mean over rows that carry loss.

    target_rows: [draft_vocab, target_hidden], the target's own head for the tokens that this one drafts.
    """
    first, stop = segment
    rows, n, device = stop - first, len(text.tokens), text.tokens.device
    at = torch.arange(first, stop, device=device)  # [R]
    keys, values = ([part] for part in _before(head, text, first))
    hidden = head.project(text.taps[:, None, first:stop])  # [1, R, hidden]
    seen = torch.ones(rows, stop, dtype=torch.bool, device=device).tril(first)  # [R, S]
    own = torch.eye(rows, dtype=torch.bool, device=device)  # [R, R]
    loss = hidden.new_zeros((), dtype=torch.float32)
    for step in range(u.steps):
        follows = at + 1 + step  # [R] position of the token that goes in
        q, k, v = head.qkv(text.tokens[follows.clamp(max=n - 1)][None], hidden, (at + step)[None])
        keys.append(k)
        values.append(v)
        if step:
            seen = torch.cat([seen, own], 1)  # [R, S + step R]
        hidden = head.output(hidden, _attention(q, torch.cat(keys, 1), torch.cat(values, 1), seen))
        counted = (follows < n) & text.drafted[follows.clamp(max=n - 1)]  # [R]
        states = text.last[follows.clamp(max=n - 1)]  # [R, target_hidden]
        total = loss.new_zeros(())
        for part in torch.arange(rows, device=device).split(LOSS_ROWS):
            loss_of = (head, target_rows, hidden[0, part], states[part], counted[part])
            total = total + checkpoint(_cross_entropy, *loss_of, use_reentrant=False)
        loss = loss + u.decay**step * total / counted.sum().clamp(min=1)
    return loss


def _before(head: EagleHead, text: Text, rows: int) -> tuple[Tensor, Tensor]:
    """Keys and values [1, rows, Hk, D] of a text's first rows, without gradients."""
    c = head.config.layer
    keys = [text.taps.new_zeros(1, 0, c.kv_heads, c.head_dim)]
    values = list(keys)
    with torch.no_grad():
        for part in torch.arange(rows, device=text.tokens.device).split(CUDA_CHUNK_TOKENS):
            projected = head.project(text.taps[:, None, part])  # [1, T, hidden]
            _, k, v = head.qkv(text.tokens[part + 1][None], projected, part[None])
            keys.append(k)
            values.append(v)
    return torch.cat(keys, 1), torch.cat(values, 1)


def _cross_entropy(head: EagleHead, target_rows: Tensor, output: Tensor, states: Tensor, counted: Tensor) -> Tensor:
    """Summed over the rows that count: output [R, hidden] against the target's states [R, target_hidden]."""
    wanted = torch.softmax(F.linear(states, target_rows).float(), -1)  # [R, draft_vocab]
    each = -(wanted * torch.log_softmax(head.logits(output), -1)).sum(-1)  # [R]
    return torch.where(counted, each, 0.0).sum()


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention [1, T, H, D] of q [1, T, H, D] over k, v [1, S, Hk, D] where mask [T, S] says so."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
