"""Selection: which cached keys a sparse pass reads, sink ∪ top-scored ∪ recent."""

from typing import Literal

import torch

from specdial.kernels import Backend
from specdial.kernels.checks import (
    FLOATS,
    INTEGERS,
    check_backend,
    check_device,
    check_dtype,
    check_last_stride,
    check_shape,
)
from specdial.kernels.selection.reference import select_reference

Scope = Literal["kv_head", "layer", "model"]
MAX_TRITON_BUDGET = 32768


def select(
    scores: torch.Tensor,
    lengths: torch.Tensor,
    *,
    budget: int,
    sink: int,
    recent: int,
    backend: Backend,
    scope: Scope = "kv_head",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose `budget` keys per row: the first `sink`, the last `recent`, and the highest-scored between them.

    scores: [..., B, R, S] float (no NaN, no +inf), larger is better, R rows (kv heads) per sequence; lengths: [B]
    integer, valid keys; what lies past them is never looked at. A key may be a token or a page; all numbers then count
    pages. Ties go to the lowest index. Returns indices [..., B, R, budget] int32, ascending, and counts [B] int32 =
    min(budget, length); entries past the count repeat the last valid index (0 when there is none).

    scope: "kv_head" selects per row; "layer" adds the scores of a layer's rows and selects once for them; "model" adds
    all leading dimensions too. Shared selections come back as expanded views of the same shape.
    Graph-capturable with backend "triton", which takes budgets up to 32,768 and rows at even distances.
    Raises ValueError for wrong shapes, dtypes, devices or strides, and unless 0 < budget >= sink + recent.
    """
    if scores.dim() < 3:
        raise ValueError(f"scores has shape {list(scores.shape)}, expected [..., B, R, S]")
    check_backend(backend, scores.device)
    check_dtype("scores", scores, FLOATS)
    check_last_stride("scores", scores)
    check_shape("lengths", lengths, (scores.shape[-3],))
    check_dtype("lengths", lengths, INTEGERS)
    check_device("lengths", lengths, scores.device)
    if min(sink, recent) < 0 or budget < max(1, sink + recent):
        raise ValueError(f"budget {budget} must be positive and hold sink {sink} + recent {recent}")
    pooled = pool(scores, scope)
    if backend == "reference":
        indices, counts = select_reference(pooled, lengths, budget=budget, sink=sink, recent=recent)
    else:
        if budget > MAX_TRITON_BUDGET:
            raise ValueError(f'budget {budget} exceeds {MAX_TRITON_BUDGET}, the most that backend "triton" selects')
        from specdial.kernels.selection.launch import select_triton

        indices, counts = select_triton(pooled, lengths, budget=budget, sink=sink, recent=recent)
    return indices.expand(*scores.shape[:-1], budget), counts


def pool(scores: torch.Tensor, scope: Scope) -> torch.Tensor:
    """Scores [..., B, R, S] added up over what shares a selection, the summed dimensions kept with size 1."""
    if scope == "kv_head":
        return scores
    if scope == "layer":
        return scores.sum(dim=-2, keepdim=True)
    if scope == "model":
        return scores.sum(dim=(*range(scores.dim() - 3), -2), keepdim=True)
    raise ValueError(f'scope is {scope!r}, expected "kv_head", "layer" or "model"')
