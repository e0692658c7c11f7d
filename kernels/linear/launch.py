"""Host side of `linear`: buffers and the launch. Everything follows from shapes, so a CUDA graph can hold it."""

import torch
import triton

from specdial.kernels.full_attention.launch import launch_options, multiprocessors
from specdial.kernels.linear.plan import LinearConfig, plan
from specdial.kernels.linear.quantised import Quantised
from specdial.kernels.linear.triton import linear_kernel
from specdial.kernels.linear.workspace import LinearWorkspace

SHRINK = 2.0**-6  # x * norm up to 4e6 fits float16, and loses at most 2e-6


def linear_triton(
    x: torch.Tensor,
    weight: torch.Tensor | Quantised,
    *,
    bias: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
    workspace: LinearWorkspace | None = None,
    config: LinearConfig | None = None,
) -> torch.Tensor:
    """See `linear`; arguments are validated by the caller. `config` overrides the launch shape, for sweeps."""
    quantised = isinstance(weight, Quantised)
    values = weight.values if isinstance(weight, Quantised) else weight
    K = x.shape[-1]
    rows = x.numel() // K
    N = values.shape[0] // (2 if gated else 1)
    config = config or plan(
        N, K, rows, item_bytes=values.element_size() if x.element_size() < 4 else 4, gated=gated,
        normed=norm is not None, processors=multiprocessors(x.device),
    )  # fmt: skip
    tiles = triton.cdiv(N, config.block_n)
    partials = arrivals = x  # never touched without a split
    if config.splits > 1:
        needed = tiles * config.splits * config.block_m * (config.block_n * (2 if gated else 1) + 1)
        workspace = workspace or LinearWorkspace.allocate(x.device, partials=needed, arrivals=tiles)
        partials, arrivals = workspace.partials, workspace.arrivals
        if partials.numel() < needed or arrivals.numel() < tiles:
            raise ValueError(
                f"workspace holds {partials.numel()} partials and {arrivals.numel()} counters, "
                f"weight {list(values.shape)} with {rows} rows needs {needed} and {tiles}"
            )
    out = residual
    if out is None:
        out = torch.empty(*x.shape[:-1], N, dtype=out_dtype or x.dtype, device=x.device)
    half = quantised and x.dtype == torch.bfloat16  # float8 becomes float16 in one instruction, bfloat16 takes five
    in_half = half or (x.dtype == torch.float16 and norm is not None)
    options = launch_options(x.device)
    aligned = K * values.element_size() % 16 == 0 and values.data_ptr() % 16 == 0
    linear_kernel[(tiles * config.splits,)](
        x, values, weight.scale if isinstance(weight, Quantised) else values, values if bias is None else bias,
        values if norm is None else norm, x if residual is None else residual, out, partials, arrivals, rows,
        config.prefetch_bytes, float(eps), N=N, K=K, BLOCK_N=config.block_n, BLOCK_M=config.block_m,
        BLOCK_K=config.block_k, FOLD=config.fold, SPLITS=config.splits, STAGES=config.stages, GATED=gated,
        NORM=norm is not None, BIAS=bias is not None, SCALED=quantised, RESIDUAL=residual is not None, HALF=half,
        SHRINK=SHRINK if in_half else 1.0, PREFETCH=options["PDL"] and aligned, KEEP=config.keep, LATE=config.late,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", THREADS=32 * config.warps,
        num_warps=config.warps, **options,
    )  # fmt: skip
    return out
