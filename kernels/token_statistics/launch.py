"""Host side of `logit_statistics`: splits, buffers, two launches. It follows from shapes, so a graph can hold it."""

import torch
import triton

from specdial.kernels.full_attention.launch import launch_options, multiprocessors
from specdial.kernels.token_statistics.triton import FIELDS, merge_logits_kernel, split_logits_kernel

BLOCK = 1024  # columns of a tile
WARPS = 4
PER_SM = 6  # programs that run on a multiprocessor at once


def logit_statistics_triton(
    logits: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `logit_statistics`; the argument is validated by the caller."""
    N, V = logits.shape
    tiles, splits = choose_splits(N, V, multiprocessors(logits.device))
    parts = torch.empty(N, splits, FIELDS.value, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(N, splits, dtype=torch.int32, device=logits.device)
    token = torch.empty(N, dtype=torch.int64, device=logits.device)
    entropy, top1, margin = torch.empty(3, N, dtype=torch.float32, device=logits.device).unbind()
    early = launch_options(logits.device)
    split_logits_kernel[(N, splits)](
        logits, parts, tokens, logits.stride(0), V, tiles, BLOCK=BLOCK, num_warps=WARPS, **early
    )
    merge_logits_kernel[(N,)](
        parts, tokens, token, entropy, top1, margin, splits, V,
        BLOCK=triton.next_power_of_2(splits), num_warps=1, **early,
    )  # fmt: skip
    return token, entropy, top1, margin


def choose_splits(rows: int, vocabulary: int, processors: int) -> tuple[int, int]:
    """(tiles of a split, splits of a row): about one wave of programs, none without a tile."""
    tiles = triton.cdiv(vocabulary, BLOCK)
    each = triton.cdiv(tiles, max(1, min(tiles, PER_SM * processors // rows)))
    return each, triton.cdiv(tiles, each)
