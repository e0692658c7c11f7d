"""Statistics of logits in plain torch: the specification of `logit_statistics`."""

import torch


def logit_statistics_reference(
    logits: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `logit_statistics`."""
    wide = logits.float()  # [N, V]
    log_p = torch.log_softmax(wide, dim=-1)
    p = log_p.exp()
    entropy = -(p * log_p.masked_fill(p == 0, 0.0)).sum(dim=-1)
    top2 = wide.topk(2, dim=-1).values
    return wide.argmax(dim=-1), entropy.clamp(min=0.0), p.amax(dim=-1), top2[:, 0] - top2[:, 1]
