"""The gated activation in plain torch: the specification of `swiglu`."""

import torch


def swiglu_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """See `swiglu`."""
    gate, up = gate_up.chunk(2, -1)  # [..., intermediate] each
    return torch.nn.functional.silu(gate) * up
