"""Launches of the selection kernels: how rows are cut into chunks, and the lists between two launches."""

import itertools
from dataclasses import dataclass

import torch
import triton

from specdial.kernels.selection.triton import _filter_chunks, _merge_lists, _select_rows

DIRECT_KEYS = 4096  # rows up to this take one launch
CHUNK_KEYS = 32768  # most keys a program holds
KEYS_PER_THREAD = 32
FEW_PROGRAMS = 66  # half an H200's multiprocessors


@dataclass(frozen=True, slots=True)
class SelectConfig:
    """Launch shape: keys per program of the first launch and its warps; a row that fits `direct` takes one launch."""

    chunk: int
    warps: int
    direct: int = DIRECT_KEYS


@dataclass(frozen=True, slots=True)
class _Lists:
    """Candidates between two launches: `width` slots for each of `lists` lists a row."""

    keys: torch.Tensor  # [rows, lists, width] int32
    positions: torch.Tensor  # [rows, lists, width] int32
    counts: torch.Tensor  # [rows, lists] int32
    width: int

    @classmethod
    def allocate(cls, rows: int, lists: int, width: int, device: torch.device) -> "_Lists":
        keys, positions = torch.empty(2, rows, lists, width, dtype=torch.int32, device=device)
        return cls(keys, positions, torch.empty(rows, lists, dtype=torch.int32, device=device), width)


def select_triton(
    scores: torch.Tensor,
    lengths: torch.Tensor,
    *,
    budget: int,
    sink: int,
    recent: int,
    config: SelectConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `select`. scores [..., B, R, S] with evenly strided rows; `config` overrides the launch shape, for sweeps."""
    *outer, B, R, S = scores.shape
    rows = scores[..., 0].numel()
    device = scores.device
    config = config or plan(S, budget, rows)
    indices = torch.empty(*outer, B, R, budget, dtype=torch.int32, device=device)
    counts = torch.empty(B, dtype=torch.int32, device=device)
    pad = min(1024, triton.next_power_of_2(budget))
    if config.direct >= S:
        block = max(32, triton.next_power_of_2(S))
        _select_rows[(rows,)](
            scores, lengths, indices, counts, row_stride(scores), S, budget, sink, recent, B,
            ROWS=R, BLOCK=block, PAD=pad, num_warps=warps(block, KEYS_PER_THREAD // 2),
        )  # fmt: skip
        return indices, counts
    chunks = triton.cdiv(S, config.chunk)
    lists = _Lists.allocate(rows, chunks, max(triton.next_power_of_2(2 * budget), 64, config.chunk // 32), device)
    _filter_chunks[(rows * chunks,)](
        scores, lengths, lists.keys, lists.positions, lists.counts, row_stride(scores), S, budget, sink, recent, B,
        ROWS=R, CHUNK=config.chunk, CHUNKS=chunks, COLUMNS=min(config.chunk, config.warps * 128), WIDTH=lists.width,
        VECTOR=4 if S % 4 == 0 else 1, num_warps=config.warps,
    )  # fmt: skip
    while True:
        fan = min(chunks, max(2, CHUNK_KEYS // lists.width))
        groups = triton.cdiv(chunks, fan)
        merged = _Lists.allocate(rows, groups if groups > 1 else 0, triton.cdiv(budget, 32) * 32, device)
        block = triton.next_power_of_2(fan * lists.width)
        _merge_lists[(rows * groups,)](
            lists.keys, lists.positions, lists.counts, lengths, indices, counts,
            merged.keys, merged.positions, merged.counts, S, budget, B,
            ROWS=R, BLOCK=block, FAN=fan, LISTS=chunks, GROUPS=groups, WIDTH=lists.width, OUT_WIDTH=merged.width,
            PAD=pad, num_warps=warps(block, KEYS_PER_THREAD // 4),
        )  # fmt: skip
        if groups == 1:
            return indices, counts
        lists, chunks = merged, groups


def plan(keys_per_row: int, budget: int, rows: int) -> SelectConfig:
    """Launch shape: chunks well above the budget, so that little is left to merge; smaller when rows are few."""
    least = max(16 * budget, DIRECT_KEYS)
    chunk = min(CHUNK_KEYS, triton.next_power_of_2(max(keys_per_row, least)))
    while chunk // 2 >= least and rows * triton.cdiv(keys_per_row, chunk) <= FEW_PROGRAMS:
        chunk //= 2
    return SelectConfig(chunk=chunk, warps=warps(chunk, KEYS_PER_THREAD))


def warps(keys: int, keys_per_thread: int) -> int:
    """Warps that hold `keys` at `keys_per_thread` each, from 1 to 32."""
    return min(32, max(1, keys // (32 * keys_per_thread)))


def row_stride(scores: torch.Tensor) -> int:
    """The even distance between rows of [..., S], in elements; ValueError when there is none."""
    rows = scores.shape[:-1]
    kept = [(size, stride) for size, stride in zip(rows, scores.stride()[:-1]) if size > 1]
    for (_, outer), (size, inner) in itertools.pairwise(kept):
        if outer != size * inner:
            raise ValueError(
                f"scores {list(scores.shape)} has strides {list(scores.stride())}, rows must be evenly spaced"
            )
    return kept[-1][1] if kept else scores.shape[-1]
