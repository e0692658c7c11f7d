"""Prefill: reads a prompt into the cache, chunk by chunk, and its last tokens' attention rows into history.

On a GPU chunks are large and go through the fused kernels that verification uses. Attention is the library's flash
kernel, causal with the chunk's last row against the last key (`CausalBias`, bottom right): no mask of [T, S] exists
anywhere, and no key is copied, so memory does not grow with the context. Query heads that share a kv head become one
batch entry over a view of its keys, since the library takes grouped heads in flash attention but not in its float32
kernel. float32 is what tests run in, and flash attention takes only 16-bit floats: they get the memory-efficient
kernel; anything slower is refused, not fallen back to.

On a CPU chunks are small and carry an explicit mask; which rows share a product decides its bits, so neither the size
of the chunks nor the mask may change without dense replay being checked again.

Leaves out lengths and pending tokens, which `Sequences.prefill` sets once every prompt is read. No logits are made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, CausalVariant

from specdial.engine.cache import round_up
from specdial.engine.head_reader import tap_buffers, taps_of
from specdial.engine.history import History
from specdial.engine.models.decoder import AttendCached

if TYPE_CHECKING:
    from specdial.engine.sequences import Sequences

CPU_CHUNK_TOKENS = 512
CUDA_CHUNK_TOKENS = 4096  # fills the matrix products; activations of a 70B model then take about 1.5 GB
LIBRARY_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]  # neither makes a matrix [T, S]
# Rows of a verified block are padded to this multiple. Measured: CPU matrix products then give each row the same bits
# whatever the block's length, so scores, and the drafts that follow from them, do not depend on how rounds fell.
ROW_MULTIPLE = 4


@torch.inference_mode()
def prefill_one(s: Sequences, b: int, tokens: list[int]) -> None:
    """Write the keys and values of all `tokens` of sequence b, and push its last rows into history, if it is kept.

    The last rows, one window of them, go through the verification path for their attention rows.
    """
    tail = min(s.history.spec.window, len(tokens)) if s.history is not None else 0
    body = len(tokens) - tail
    step = CUDA_CHUNK_TOKENS if s.cache.on_gpu else CPU_CHUNK_TOKENS
    prompt = torch.tensor([tokens], device=s.decoder.device)  # [1, n], sent once: a copy waits for the device
    for start in range(0, body, step):
        _chunk(s, b, prompt[:, start : min(start + step, body)], start)
    if tail and s.history is not None:
        _tail(s, s.history, b, prompt[:, body:], start=body)


def _chunk(s: Sequences, b: int, tokens: Tensor, start: int) -> None:
    """Tokens [1, T] at positions start .. start+T-1 of sequence b."""
    T = tokens.shape[1]
    on_gpu = s.cache.on_gpu
    mask = None if on_gpu else torch.ones(T, start + T, dtype=torch.bool).tril(start)  # [T, S]

    def attend(layer: int, q: Tensor) -> Tensor:
        keys, values = s.cache.view_one(layer, b, start + T)
        if mask is None:
            return causal_attention(q, keys, values)
        return F.scaled_dot_product_attention(
            q.transpose(1, 2), keys, values, attn_mask=mask, enable_gqa=True
        ).transpose(1, 2)

    _forward(s, b, tokens, start, attend)


def _tail(s: Sequences, history: History, b: int, tokens: Tensor, *, start: int) -> None:
    """The prompt's last tokens [1, window or fewer], as a verified block of one sequence."""
    T = tokens.shape[1]
    padded = F.pad(tokens, (0, round_up(T, ROW_MULTIPLE) - T))
    width = s.cache.capacity_tokens if s.cache.on_gpu else s.cache.rounded(start + padded.shape[1])
    lengths = torch.full((1,), start, device=tokens.device)
    rows = history.rows(padded.shape[1], 1)

    def attend(layer: int, q: Tensor) -> Tensor:
        return history.attend(rows, layer, q, s.cache.view_one(layer, b, width), lengths)

    _forward(s, b, padded, start, attend)
    history.push(rows, lengths, torch.full((1,), T, device=tokens.device), only=b)


def _forward(s: Sequences, b: int, tokens: Tensor, start: int, attend: AttendCached) -> None:
    """Run the decoder over tokens [1, T] of sequence b, their keys written before `attend` reads them.

    Heads that read along get the hidden states of their layers.
    """
    readers = s.heads.values()
    taps = tap_buffers(s.decoder, tokens.shape, readers)

    def read(layer: int, q: Tensor) -> Tensor:
        mixed = attend(layer, q)
        s.cache.write_behind_one(layer, b, start, tokens.shape[1])
        return mixed

    def keep(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s.cache.write_one(layer, b, start, k, v)
        return read(layer, q)

    with s.cache.reading(b, start):
        if s.cache.on_gpu:
            lengths = torch.full((1,), start, device=tokens.device)
            whole = s.cache.capacity_tokens
            s.decoder.forward_cached(
                tokens, lengths, lambda layer: s.cache.view_one(layer, b, whole), read, backend=s.backend, taps=taps
            )
        else:
            positions = torch.arange(start, start + tokens.shape[1])[None]  # [1, T]
            s.decoder.forward(tokens, positions, keep, taps)
    for reader in readers:
        reader.prefill(b, start, taps_of(reader, taps))


def causal_attention(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of the last T of S positions of each sequence: row t sees keys 0 .. S-T+t.

    q: [B, T, H, D]; keys, values: [B, Hk, S, D], of a cache's strides; returns [B, T, H, D]. On a GPU without a
    copy of keys or a mask. Raises RuntimeError where the library has neither kernel for the dtype and head dim.
    """
    B, T, heads, _ = q.shape
    kv_heads, S = keys.shape[1:3]
    group = heads // kv_heads
    grouped = q.unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4).flatten(0, 1)  # [B Hk, G, T, D]
    k, v = (x.flatten(0, 1)[:, None].expand(-1, group, -1, -1) for x in (keys, values))  # [B Hk, G, S, D] each
    with sdpa_kernel(LIBRARY_ATTENTION):
        mixed = F.scaled_dot_product_attention(grouped, k, v, attn_mask=_bottom_right(T, S))  # [B Hk, G, T, D]
    return mixed.unflatten(0, (B, kv_heads)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _bottom_right(T: int, S: int) -> CausalBias:
    """`torch.nn.attention.bias.causal_lower_right(T, S)` without its storage.

    That one reserves 2 * T * S float32 on the host, which nothing reads: 4 GB for 4,096 rows of 131,072 keys.
    """
    bias = torch.empty(0).as_subclass(CausalBias)
    bias.variant, bias.seq_len_q, bias.seq_len_kv = CausalVariant.LOWER_RIGHT, T, S
    return bias
