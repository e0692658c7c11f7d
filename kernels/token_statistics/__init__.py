"""What a decode step wants to know of its logits: the most likely token and how sure the model is, in one pass.

Leaves out sampling: only greedy choice needs nothing but these numbers.
"""

import torch

from specdial.kernels import Backend
from specdial.kernels.checks import FLOATS, check_backend, check_dtype, check_last_stride, check_shape
from specdial.kernels.token_statistics.reference import logit_statistics_reference

__all__ = ["logit_statistics"]


def logit_statistics(
    logits: torch.Tensor, *, backend: Backend
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(token int64, entropy_nats, top1_prob, margin float32), each [N], of logits [N, V], V >= 2.

    token: index of the largest logit, the lowest on ties; entropy and probability of softmax(logits), in float32
    whatever the dtype; margin: largest minus second largest logit, 0 on ties.
    logits: last stride 1; not NaN or inf, -inf in places but not in a whole row (of which only the token is defined,
    some index below V). Raises ValueError on a wrong shape, dtype, stride or backend.
    """
    check_shape("logits", logits, (None, None))
    if logits.shape[0] < 1 or logits.shape[1] < 2:
        raise ValueError(f"logits has shape {list(logits.shape)}, expected [N, V] with N >= 1 and V >= 2")
    check_dtype("logits", logits, FLOATS)
    check_last_stride("logits", logits)
    check_backend(backend, logits.device)
    if backend == "reference":
        return logit_statistics_reference(logits)
    from specdial.kernels.token_statistics import launch

    return launch.logit_statistics_triton(logits)
