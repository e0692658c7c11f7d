"""Teacher-forced attention: how much every query head gives to every key, for a run of positions of a known text.

Three steps, so that nothing of size [layers, heads, keys] exists: `read_queries` feeds the text's last tokens through a
model whose cache holds what came before and keeps their queries; `attention_rows` makes the rows of one layer from
them; `largest` cuts the rows to what is kept, so that little leaves the device. Rows are plain torch in float32 on any
device. Leaves out what rows are for (head_ranking, verbs.heads).
"""

import numpy as np
import torch
from torch import Tensor

from specdial.engine.prefill import CUDA_CHUNK_TOKENS, causal_attention
from specdial.engine.sequences import Sequences
from specdial.engine.trace.attention import KeptRows
from specdial.kernels.full_attention import full_attention
from specdial.kernels.selection import select

BLOCK_ROWS = 16  # rows of one pass on a CPU: what dense recording feeds too


@torch.inference_mode()
def read_queries(s: Sequences, tokens: list[int], start: int) -> Tensor:
    """Queries of the tokens at positions start .. len(tokens)-1, RoPE in them: [L, T, H, D] in the model's dtype.

    s: one sequence whose cache holds the keys of tokens[:start]; the keys of the others are written (again). Afterwards
    every key of `tokens` is cached. On a GPU rows pass as those of a prompt do: the kernels for few rows are compiled
    for each count of rows and each matrix, half a second apiece, which a few hundred rows do not pay back.
    Raises ValueError on more sequences than one, or on a start outside the text.
    """
    if s.batch != 1:
        raise ValueError(f"rows are read of one sequence, not of {s.batch}")
    if not 0 <= start < len(tokens):
        raise ValueError(f"start {start} is outside a text of {len(tokens)} tokens")
    c, device, on_gpu = s.decoder.config, s.decoder.device, s.cache.on_gpu
    shape = (c.layers, len(tokens) - start, c.heads, c.head_dim)
    queries = torch.empty(shape, device=device, dtype=s.decoder.dtype)  # [L, T, H, D]
    s.hold(tokens[: start + 1], limit=0)
    step = CUDA_CHUNK_TOKENS if on_gpu else BLOCK_ROWS
    for at in range(start, len(tokens), step):
        block = torch.tensor([tokens[at : at + step]], device=device)  # [1, rows]
        rows = block.shape[1]
        width = at + rows if on_gpu else s.cache.width(rows)
        kept = queries[:, at - start : at - start + rows]

        def attend(layer: int, q: Tensor, kept: Tensor = kept, width: int = width) -> Tensor:
            kept[layer] = q[0]
            if on_gpu:
                return causal_attention(q, *s.cache.view(layer, width))
            return full_attention(q, *s.cache.view(layer, width), s.cache.lengths, backend=s.backend)[0]

        if on_gpu:
            s.decoder.forward_cached(block, s.cache.lengths, s.cache.layer, attend, backend=s.backend)
        else:
            s.forward_rows(block, s.cache.lengths, attend)
        s.cache.commit(np.array([rows]))
    return queries


@torch.inference_mode()
def attention_rows(queries: Tensor, keys: Tensor, start: int) -> Tensor:
    """Softmax attention of one layer: [T, H, S] float32, each row summing to 1, zero past its own position.

    queries: [T, H, D], of positions start .. start+T-1; keys: [Hk, S, D], S >= start + T. One kv head at a time, so the
    result, 4·T·H·S bytes, and a few times its share of one kv head are all the memory it takes.
    """
    T, H, D = queries.shape
    Hk, S, _ = keys.shape
    if start + T > S:
        raise ValueError(f"rows {start}..{start + T - 1} need as many keys, there are {S}")
    group = H // Hk
    rows = torch.empty(T, H, S, device=queries.device)
    hidden = torch.arange(S, device=keys.device) > start + torch.arange(T, device=keys.device)[:, None]  # [T, S]
    for kv_head in range(Hk):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        # float32 before the product: logits rounded to bfloat16 would be off by up to 0.06 near 16
        logits = queries[:, heads].float() @ keys[kv_head].float().T * D**-0.5  # [T, G, S]
        rows[:, heads] = torch.softmax(logits.masked_fill(hidden[:, None], float("-inf")), dim=-1)
    return rows


@torch.inference_mode()
def largest(rows: Tensor, start: int, most_keys: int) -> list[KeptRows]:
    """Of rows [T, N, S] at positions start .. start+T-1 the `most_keys` largest visible entries, by N.

    Ties: lower index first. Heads share the work and the copies to the host.
    """
    visible = start + 1 + torch.arange(len(rows), device=rows.device)  # [T]
    budget = min(most_keys, rows.shape[-1])
    # Not the compiled kernel: a budget of thousands makes it large, and plain operations take a millisecond.
    keys, counts = select(rows, visible, budget=budget, sink=0, recent=0, backend="reference")  # [T, N, budget], [T]
    weights = rows.gather(-1, keys.to(torch.int64))  # [T, N, budget]
    indices, values, most = (part.cpu().numpy() for part in (keys, weights, counts))
    return [KeptRows.of(indices[:, n], values[:, n], most) for n in range(rows.shape[1])]
