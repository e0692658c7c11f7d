"""Room that split sparse attention reuses between calls: partial results and one arrival counter per head."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SparseWorkspace:
    """Device buffers for one stream. The counters start at zero and every call leaves them at zero."""

    partials: torch.Tensor  # [N] float32: unnormalised outputs, row maxima and row sums of every split
    arrivals: torch.Tensor  # [M] int32

    @classmethod
    def allocate(cls, partials: int, arrivals: int, device: torch.device | str) -> "SparseWorkspace":
        """Sizes in elements; `workspace_for` chooses them for a call."""
        return cls(
            partials=torch.empty(max(1, partials), dtype=torch.float32, device=device),
            arrivals=torch.zeros(max(1, arrivals), dtype=torch.int32, device=device),
        )
