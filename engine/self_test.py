"""Every kernel once, at a small shape, against its torch reference: what `specdial doctor` runs on a new machine.

Float errors are compared with the largest value of the reference, integers exactly. Leaves out odd shapes, edge cases
and speed: tests and benchmarks have those.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specdial.kernels import Backend
from specdial.kernels.full_attention import full_attention
from specdial.kernels.head_scores import head_scores
from specdial.kernels.history import decay_rows, push_rows
from specdial.kernels.linear import linear, linear_gated, linear_into_norm
from specdial.kernels.norm import add_rms_norm
from specdial.kernels.page_summary import score_pages, update_pages
from specdial.kernels.rope_cache import rope_and_cache
from specdial.kernels.selection import select
from specdial.kernels.settle import settle
from specdial.kernels.sparse_attention import rotate_and_attend, sparse_attention
from specdial.kernels.swiglu import swiglu
from specdial.kernels.timestamp import timestamp
from specdial.kernels.token_statistics import logit_statistics

B, T, H, HK, D, S, C = 2, 2, 4, 2, 64, 128, 32  # sequences, rows, heads, kv heads, head dim, keys, selected keys
HIDDEN, WIDE = 128, 256
TOLERANCE = {torch.float32: 2e-3, torch.float16: 5e-3, torch.bfloat16: 3e-2}  # a GPU's float32 products may be TF32
Found = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Trial:
    """How one kernel did. error: largest difference over the reference's largest value; None where it could not run."""

    kernel: str
    ok: bool
    error: float | None = None
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Random numbers, the same ones in every call for the same arguments."""

    device: torch.device
    dtype: torch.dtype

    def floats(self, *shape: int, seed: int = 0, dtype: torch.dtype | None = None) -> torch.Tensor:
        """[*shape] around 0, of the kernels' dtype."""
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed + len(shape)))
        return values.to(self.device, dtype or self.dtype)

    def integers(self, *values: int) -> torch.Tensor:
        """[n] int64."""
        return torch.tensor(values, device=self.device)

    @property
    def lengths(self) -> torch.Tensor:
        """[B]"""
        return self.integers(70, 33)

    def cache(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, [B, HK, S, D] each."""
        return self.floats(B, HK, S, D, seed=1), self.floats(B, HK, S, D, seed=2)

    def chosen(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Selected keys [B, HK, C] below 32, and how many count [B]."""
        indices = torch.arange(C, device=self.device, dtype=torch.int32).expand(B, HK, C).contiguous()
        return indices, self.integers(C, C - 3)

    def angles(self) -> dict[str, Any]:
        """cos and sin, [S, D/2] float32."""
        turn = torch.outer(torch.arange(S), 10000.0 ** -(torch.arange(D // 2) / (D // 2))).to(self.device)
        return {"cos": turn.cos(), "sin": turn.sin()}

    def summaries(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Smallest and largest keys of pages of 16, [B, HK, S/16, D]."""
        low = self.floats(B, HK, S // 16, D, seed=3)
        return low, low + self.floats(B, HK, S // 16, D, seed=4).abs()


def _full_attention(x: _Inputs, backend: Backend) -> Found:
    out, mass = full_attention(x.floats(B, T, H, D), *x.cache(), x.lengths, backend=backend, mass="page")
    return [out, *([mass] if mass is not None else [])]


def _sparse_attention(x: _Inputs, backend: Backend) -> Found:
    where: dict[str, Any] = {"tail_start": x.lengths - 1, "lengths": x.lengths}
    return [sparse_attention(x.floats(B, T, H, D), *x.cache(), *x.chosen(), **where, backend=backend)]


def _rotate_and_attend(x: _Inputs, backend: Backend) -> Found:
    keys, values = x.cache()
    where: dict[str, Any] = {"tail_start": x.lengths - 1, "lengths": x.lengths, **x.angles()}
    qkv = x.floats(B, 1, (H + 2 * HK) * D)
    return [rotate_and_attend(qkv, keys, values, *x.chosen(), **where, backend=backend), keys, values]


def _rope_cache(x: _Inputs, backend: Backend) -> Found:
    keys, values = x.cache()
    qkv = x.floats(B, T, (H + 2 * HK) * D)
    return [rope_and_cache(qkv, x.lengths, keys, values, **x.angles(), backend=backend), keys, values]


def _selection(x: _Inputs, backend: Backend) -> Found:
    scores = x.floats(B, HK, S, dtype=torch.float32)
    return select(scores, x.lengths, budget=C, sink=4, recent=8, backend=backend)


def _history(x: _Inputs, backend: Backend) -> Found:
    ring = torch.zeros(B, HK, 4, S, device=x.device)
    score, decayed = torch.zeros(B, HK, S, device=x.device), torch.zeros(B, HK, S, device=x.device)
    mass = x.floats(B, HK, T, S, dtype=torch.float32).abs()
    committed = x.integers(2, 1)
    push_rows(ring, mass, x.lengths, committed, score=score, backend=backend)
    decay_rows(decayed, mass, x.lengths, committed, decay=0.9, backend=backend)
    return [ring, score, decayed]


def _head_scores(x: _Inputs, backend: Backend) -> Found:
    return [head_scores(x.floats(B, T, H, D), x.cache()[0], x.lengths, (0, 3), backend=backend)]


def _page_summary(x: _Inputs, backend: Backend) -> Found:
    low, high = x.summaries()
    update_pages(x.cache()[0], low, high, x.lengths, x.integers(3, 1), page=16, max_tokens=4, backend=backend)
    scores = score_pages(x.floats(B, T, H, D), low, high, x.lengths, page=16, rule="quest", backend=backend)
    return [low, high, scores]


def _linear(x: _Inputs, backend: Backend) -> Found:
    rows, residual = x.floats(B, HIDDEN), x.floats(B, WIDE, seed=5)
    weight = x.floats(WIDE, HIDDEN, seed=6) * 0.1
    plain = linear(rows, weight, bias=x.floats(WIDE), backend=backend)
    gated = linear_gated(rows, weight, backend=backend)
    into = linear_into_norm(rows, weight, residual=residual, norm=x.floats(WIDE, seed=7), backend=backend)
    return [plain, gated.wide(), residual, into.wide()]


def _norm(x: _Inputs, backend: Backend) -> Found:
    return add_rms_norm(x.floats(B, HIDDEN), x.floats(B, HIDDEN, seed=5), x.floats(HIDDEN), 1e-5, backend=backend)


def _swiglu(x: _Inputs, backend: Backend) -> Found:
    return [swiglu(x.floats(B, WIDE), backend=backend)]


def _settle(x: _Inputs, backend: Backend) -> Found:
    drafts, choices = x.integers(5, 6, 7, 8).view(B, 2), x.integers(5, 9, 1, 3, 2, 1).view(B, 3)
    kept = {name: torch.zeros(B, dtype=torch.int64, device=x.device) for name in ("accepted", "counts", "pending")}
    k, room, emitted = x.integers(2, 2), x.integers(9, 2), torch.zeros_like(choices)
    before = x.integers(0, 0)
    settle(
        drafts, choices, k, room, stop_ids=x.integers(-1), emitted=emitted, before=before, judged=False,
        backend=backend, **kept,
    )  # fmt: skip
    return [emitted, room, k, before, *kept.values()]


def _token_statistics(x: _Inputs, backend: Backend) -> Found:
    return logit_statistics(x.floats(B, 500), backend=backend)


def _timestamp(x: _Inputs, backend: Backend) -> Found:
    clock = torch.zeros(3, dtype=torch.int64, device=x.device)
    timestamp(clock, 0, 0, backend=backend)
    timestamp(clock, 1, 1, backend=backend)
    return [(clock[1] >= clock[0]) & (clock[0] > 0), clock[2]]


CASES: dict[str, Callable[[_Inputs, Backend], Found]] = {
    "full_attention": _full_attention,
    "head_scores": _head_scores,
    "history": _history,
    "linear": _linear,
    "norm": _norm,
    "page_summary": _page_summary,
    "rope_cache": _rope_cache,
    "selection": _selection,
    "settle": _settle,
    "sparse_attention": _sparse_attention,
    "sparse_attention (rotating)": _rotate_and_attend,
    "swiglu": _swiglu,
    "timestamp": _timestamp,
    "token_statistics": _token_statistics,
}


def backend_of(device: torch.device) -> Backend:
    """What the engine runs on a device: the Triton kernels on CUDA (or in their interpreter), else the references."""
    return "triton" if device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1" else "reference"


def run_kernels(device: torch.device, dtype: torch.dtype) -> list[Trial]:
    """Each kernel as the engine runs it on this device, against its reference on the same device."""
    inputs, backend = _Inputs(device, dtype), backend_of(device)
    return [_trial(name, case, inputs, backend) for name, case in CASES.items()]


def _trial(name: str, case: Callable[[_Inputs, Backend], Found], inputs: _Inputs, backend: Backend) -> Trial:
    try:
        found = case(inputs, backend)
        errors = [_error(a, b) for a, b in zip(found, case(inputs, "reference"), strict=True)]
        error = next((e for e in errors if math.isnan(e)), max(errors))  # max alone may pass over one
    except Exception as fault:  # whatever a compiler or a driver raises: that is what is asked
        first = next(iter(str(fault).splitlines()), "")
        return Trial(name, False, fault=f"{type(fault).__name__}: {first}")
    if not error <= TOLERANCE[inputs.dtype]:
        return Trial(name, False, error, f"differs from its reference by {error:.2g} of the largest value")
    return Trial(name, True, error)


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference over the largest value wanted; for integers 0 or infinity. -inf stands for no score."""
    if not wanted.is_floating_point():
        return 0.0 if torch.equal(found, wanted) else float("inf")
    empty = wanted == float("-inf")
    if not torch.equal(found == float("-inf"), empty):
        return float("inf")
    a, b = (t.float().masked_fill(empty, 0.0) for t in (found, wanted))
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-6))
