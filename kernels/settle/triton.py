"""Triton kernel of `settle`: one program per sequence, the round's tokens in one register tile."""

import torch
import triton
import triton.language as tl

from specdial.kernels.full_attention.launch import launch_options
from specdial.kernels.full_attention.plan import await_previous


@triton.jit
def settle_kernel(
    drafts, choices, k, room, stop_ids, emitted, accepted, counts, pending, before,
    draft_stride, choice_stride, emit_stride, K,
    STOPS: tl.constexpr, BLOCK: tl.constexpr, JUDGED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Axis 0: sequence. BLOCK > K."""
    if PDL:
        await_previous()
    b = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    left = tl.load(room + b).to(tl.int32)
    limit = tl.minimum(tl.load(k + b).to(tl.int32), tl.maximum(left - 1, 0))
    draft = tl.load(drafts + b * draft_stride + place, mask=place < K, other=-1)
    choice = tl.load(choices + b * choice_stride + place, mask=place <= K, other=-2)
    if JUDGED:
        agreed = tl.minimum(tl.load(accepted + b).to(tl.int32), limit)
    else:
        agreed = tl.min(tl.where((draft == choice) & (place < limit), BLOCK, place))
    following = tl.sum(tl.where(place == agreed, choice, 0))
    token = tl.where(place < agreed, draft, following)
    stops = place < 0
    for i in tl.static_range(STOPS):
        stops = stops | (token == tl.load(stop_ids + i))
    stop_at = tl.min(tl.where(stops & (place <= agreed), place, BLOCK))
    count = tl.minimum(tl.minimum(agreed, stop_at) + 1, left)
    tl.store(emitted + b * emit_stride + place, tl.where(place < count, token, -1), mask=place <= K)
    tl.store(k + b, limit.to(tl.int64))
    tl.store(accepted + b, tl.minimum(agreed, count).to(tl.int64))
    tl.store(counts + b, count.to(tl.int64))
    tl.store(room + b, tl.where(stop_at < count, 0, left - count).to(tl.int64))
    ahead = tl.where(count > 1, tl.sum(tl.where(place == count - 2, token, 0)), tl.load(pending + b))
    tl.store(before + b, ahead, mask=count > 0)
    last = tl.sum(tl.where(place == count - 1, token, 0))
    tl.store(pending + b, last, mask=count > 0)


def settle_triton(
    drafts: torch.Tensor,
    choices: torch.Tensor,
    k: torch.Tensor,
    room: torch.Tensor,
    *,
    stop_ids: torch.Tensor,
    emitted: torch.Tensor,
    accepted: torch.Tensor,
    counts: torch.Tensor,
    pending: torch.Tensor,
    before: torch.Tensor,
    judged: bool,
) -> None:
    """See `settle`; arguments are validated by the caller."""
    B, K = drafts.shape
    settle_kernel[(B,)](
        drafts, choices, k, room, stop_ids, emitted, accepted, counts, pending, before,
        drafts.stride(0), choices.stride(0), emitted.stride(0), K,
        STOPS=stop_ids.shape[0], BLOCK=triton.next_power_of_2(K + 1), JUDGED=judged, num_warps=1,
        **launch_options(drafts.device),
    )  # fmt: skip
