"""What a verified round commits: accepted drafts and the token after them, cut at a stop token or at the limit.

Everything stays on the device, so that the next round can start before the host has seen this one. Leaves out how the
target chose its tokens, and the acceptance rule of sampled decoding: `accepted` may come from outside.
"""

import torch

from specdial.kernels import Backend
from specdial.kernels.checks import check_backend, check_device, check_dtype, check_last_stride, check_shape
from specdial.kernels.settle.reference import settle_reference

__all__ = ["settle"]


def settle(
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
    backend: Backend,
) -> None:
    """Settle one round of B sequences; all tensors int64, results written in place.

    drafts: [B, K]; choices: [B, K+1], the target's token after the pending one and after each draft. k: [B], drafts
    that count, lowered here to at most room - 1. room: [B], new tokens still allowed; 0 is a finished sequence, which
    emits nothing; lowered here by what is emitted, to 0 at a stop token. stop_ids: [n], padded with -1.
    judged: False accepts leading drafts equal to the choices (greedy); True takes `accepted` as given, cut to k.
    Results: emitted [B, K+1], of which counts [B] are tokens and the rest -1; accepted [B], drafts among them; pending
    [B], the last emitted token, and before [B], the committed one ahead of it (unchanged where nothing was emitted).
    Raises ValueError on a wrong shape, dtype, device or backend.
    """
    check_shape("drafts", drafts, (None, None))
    B, K = drafts.shape
    expected = {"choices": (B, K + 1), "emitted": (B, K + 1), "stop_ids": (None,)}
    expected |= {"drafts": (B, K), **dict.fromkeys(("k", "room", "accepted", "counts", "pending", "before"), (B,))}
    given = {"drafts": drafts, "choices": choices, "emitted": emitted, "stop_ids": stop_ids}
    given |= {"k": k, "room": room, "accepted": accepted, "counts": counts, "pending": pending, "before": before}
    for name, tensor in given.items():
        check_shape(name, tensor, expected[name])
        check_dtype(name, tensor, (torch.int64,))
        check_device(name, tensor, drafts.device)
        check_last_stride(name, tensor)
    check_backend(backend, drafts.device)
    if backend == "reference":
        settle_reference(
            drafts, choices, k, room, stop_ids=stop_ids, emitted=emitted, accepted=accepted, counts=counts,
            pending=pending, before=before, judged=judged,
        )  # fmt: skip
        return
    from specdial.kernels.settle.triton import settle_triton

    settle_triton(
        drafts, choices, k, room, stop_ids=stop_ids, emitted=emitted, accepted=accepted, counts=counts,
        pending=pending, before=before, judged=judged,
    )  # fmt: skip
