"""Host side of the products: buffers and the launch. Everything follows from shapes, so a CUDA graph can hold it."""

import torch
import triton

from specdial.kernels.full_attention.launch import launch_options, multiprocessors
from specdial.kernels.linear.plan import LinearConfig, plan
from specdial.kernels.linear.prepared import LARGEST_PIECE, PIECE, Prepared, shrink_for
from specdial.kernels.linear.quantised import Quantised
from specdial.kernels.linear.triton import linear_kernel
from specdial.kernels.linear.workspace import LinearWorkspace

SQUARES_A_THREAD = 32  # registers that partial sums of squares may wait in


def linear_triton(
    x: Prepared, weight: torch.Tensor | Quantised, *, bias: torch.Tensor | None, eps: float, out_dtype: torch.dtype,
    workspace: LinearWorkspace | None, config: LinearConfig | None = None,
) -> torch.Tensor:  # fmt: skip
    """See `linear`; arguments are validated by the caller. `config` overrides the launch shape, here and below."""
    out = torch.empty(*x.shape[:-1], _columns(weight), dtype=out_dtype, device=x.values.device)  # [..., N]
    _launch(x, weight, out, config or _plan(x, weight), workspace, bias=bias, eps=eps)
    return out


def linear_gated_triton(
    x: Prepared, weight: torch.Tensor | Quantised, *, eps: float, workspace: LinearWorkspace | None,
    config: LinearConfig | None = None,
) -> Prepared:  # fmt: skip
    """See `linear_gated`."""
    out = x.values.new_empty(*x.values.shape[:-1], _columns(weight) // 2)  # [..., N / 2], or [2, ..., N / 2] in pieces
    _launch(x, weight, out, config or _plan(x, weight, gated=True), workspace, eps=eps, gated=True)
    return Prepared(out, shrink_for(out.dtype))


def linear_into_norm_triton(
    x: Prepared, weight: torch.Tensor | Quantised, *, residual: torch.Tensor, norm: torch.Tensor, dtype: torch.dtype,
    workspace: LinearWorkspace | None, config: LinearConfig | None = None,
) -> Prepared:  # fmt: skip
    """See `linear_into_norm`; dtype: of the values."""
    config = config or _plan(x, weight)
    N = residual.shape[-1]
    shape = (2, *residual.shape) if dtype == PIECE else residual.shape
    out = torch.empty(*shape, dtype=dtype, device=residual.device)  # [..., N], or [2, ..., N]
    squares = torch.empty(
        triton.cdiv(N, config.block_n), residual.numel() // N, dtype=torch.float32, device=residual.device
    )  # [parts, rows]
    _launch(x, weight, out, config, workspace, residual=residual, norm=norm, squares_out=squares)
    return Prepared(out, shrink_for(dtype), squares)


def _columns(weight: torch.Tensor | Quantised) -> int:
    return _matrix(weight).shape[0]


def _matrix(weight: torch.Tensor | Quantised) -> torch.Tensor:
    return weight.values if isinstance(weight, Quantised) else weight


def _plan(x: Prepared, weight: torch.Tensor | Quantised, *, gated: bool = False) -> LinearConfig:
    K = x.shape[-1]
    return plan(
        _columns(weight) // (2 if gated else 1), K, x.shape.numel() // K, item_bytes=x.values.element_size(),
        gated=gated, processors=multiprocessors(x.values.device),
    )  # fmt: skip


def _launch(
    x: Prepared, weight: torch.Tensor | Quantised, out: torch.Tensor, config: LinearConfig,
    workspace: LinearWorkspace | None, *, bias: torch.Tensor | None = None, eps: float = 0.0, gated: bool = False,
    residual: torch.Tensor | None = None, norm: torch.Tensor | None = None, squares_out: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Fill `out`, and with residual, norm and squares_out those that are results; the last three come together."""
    matrix = _matrix(weight)
    values = x.values
    K, N = values.shape[-1], out.shape[-1]
    rows = x.shape.numel() // K
    tiles = triton.cdiv(N, config.block_n)
    unused = values  # stands in for pointers that are not followed
    partials = arrivals = unused
    if config.splits > 1:
        needed = tiles * config.splits * config.block_m * config.block_n * (2 if gated else 1)
        workspace = workspace or LinearWorkspace.allocate(values.device, partials=needed, arrivals=tiles)
        partials, arrivals = workspace.partials, workspace.arrivals
        if partials.numel() < needed or arrivals.numel() < tiles:
            raise ValueError(
                f"workspace holds {partials.numel()} partials and {arrivals.numel()} counters, "
                f"weight {list(matrix.shape)} with {rows} rows needs {needed} and {tiles}"
            )
    parts = 0 if x.squares is None else x.squares.shape[0]
    chunk = min(triton.next_power_of_2(max(1, parts)), max(1, SQUARES_A_THREAD * 32 * config.warps // config.block_m))
    options = launch_options(values.device)
    aligned = K * matrix.element_size() % 16 == 0 and matrix.data_ptr() % 16 == 0
    linear_kernel[(tiles * config.splits,)](
        values, matrix, weight.scale if isinstance(weight, Quantised) else unused, unused if bias is None else bias,
        unused if x.squares is None else x.squares, unused if residual is None else residual,
        unused if norm is None else norm, out, unused if squares_out is None else squares_out, partials, arrivals,
        rows, float(eps), 1.0 / x.shrink, N=N, K=K, PARTS=parts, CHUNK=chunk,
        BLOCK_N=config.block_n, BLOCK_M=config.block_m, BLOCK_K=config.block_k, FOLD=config.fold, SPLITS=config.splits,
        STAGES=config.stages, PREFETCH=config.prefetch_bytes if options["PDL"] and aligned else 0,
        APART=config.apart, GATED=gated, BIAS=bias is not None, SCALED=isinstance(weight, Quantised),
        INTO_NORM=residual is not None,
        SHRINK=shrink_for(out.dtype) if gated or residual is not None else 1.0, LARGEST=LARGEST_PIECE,
        PRECISION="ieee" if values.dtype == torch.float32 else "tf32", THREADS=32 * config.warps,
        num_warps=config.warps, **options,
    )  # fmt: skip
