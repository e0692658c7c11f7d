"""Prefill: reads a prompt into the cache, chunk by chunk, and its last tokens' attention rows into history.

Leaves out lengths and pending tokens, which `Sequences.prefill` sets once every prompt is read. No logits are made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from specdial.engine.cache import round_up
from specdial.engine.history import History
from specdial.engine.models.decoder import Attend

if TYPE_CHECKING:
    from specdial.engine.sequences import Sequences

PREFILL_TOKENS = 512
# Rows of a verified block are padded to this multiple. Measured: CPU matrix products then give each row the same bits
# whatever the block's length, so scores, and the drafts that follow from them, do not depend on how rounds fell.
ROW_MULTIPLE = 4


def prefill_one(s: Sequences, b: int, tokens: list[int]) -> None:
    """Read the tokens of sequence b; its last rows go through the verification path for their attention rows."""
    tail = min(s.history.spec.window, len(tokens)) if s.history is not None else 0
    for start in range(0, len(tokens) - tail, PREFILL_TOKENS):
        _chunk(s, b, tokens[start : min(start + PREFILL_TOKENS, len(tokens) - tail)], start)
    if tail and s.history is not None:
        _tail(s, s.history, b, tokens[-tail:], start=len(tokens) - tail)


def _chunk(s: Sequences, b: int, tokens: list[int], start: int) -> None:
    width = start + len(tokens)
    causal = torch.ones(len(tokens), width, dtype=torch.bool, device=s.decoder.device).tril(start)  # [T, S]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s.cache.write_one(layer, b, start, k, v)
        keys, values = s.cache.view_one(layer, b, width)
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=causal, enable_gqa=True)
        return mixed.transpose(1, 2)

    _forward(s, tokens, start, attend)


def _tail(s: Sequences, history: History, b: int, tokens: list[int], *, start: int) -> None:
    padded = tokens + [0] * (round_up(len(tokens), ROW_MULTIPLE) - len(tokens))
    width = s.cache.capacity_tokens if s.cache.on_gpu else s.cache.rounded(start + len(padded))
    lengths = torch.tensor([start], device=s.decoder.device)
    rows = history.rows(len(padded), 1)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s.cache.write_one(layer, b, start, k, v)
        return history.attend(rows, layer, q, s.cache.view_one(layer, b, width), lengths)

    _forward(s, padded, start, attend)
    history.push(rows, lengths, torch.tensor([len(tokens)], device=s.decoder.device), only=b)


def _forward(s: Sequences, tokens: list[int], start: int, attend: Attend) -> None:
    block = torch.tensor([tokens], device=s.decoder.device)  # [1, T]
    positions = torch.arange(start, start + len(tokens), device=s.decoder.device)[None]  # [1, T]
    s.decoder.forward(block, positions, attend)
