"""Room that products split over K reuse between calls: partial sums and one arrival counter per tile."""

from dataclasses import dataclass

import torch

PARTIALS = 2 << 20  # elements: any product that `plan` splits, on a device of up to 192 multiprocessors
ARRIVALS = 1 << 10


@dataclass(frozen=True, slots=True)
class LinearWorkspace:
    """Device buffers for one stream, for products of any shape. The counters start at zero; calls leave them at zero.

    Allocate it before a CUDA graph is captured: every replay then finds the counters as the last one left them.
    """

    partials: torch.Tensor  # [PARTIALS] float32
    arrivals: torch.Tensor  # [ARRIVALS] int32

    @classmethod
    def allocate(
        cls, device: torch.device | str, *, partials: int = PARTIALS, arrivals: int = ARRIVALS
    ) -> "LinearWorkspace":
        """Sizes in elements."""
        return cls(
            partials=torch.empty(partials, dtype=torch.float32, device=device),
            arrivals=torch.zeros(arrivals, dtype=torch.int32, device=device),
        )
