"""The skinny product on a GPU: bf16 and float8 too, budgets from float64, every call twice, in a graph, in a chain.

The budget of a dtype is a few of its roundings: sums are in float32, so an error does not grow with K.
"""

import pytest
import torch

from specdial.kernels.linear import LinearWorkspace, Quantised, linear, quantise
from specdial.kernels.linear.launch import linear_triton
from specdial.kernels.linear.plan import LinearConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NAN = float("nan")
EPS = 1e-6
BUDGET = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 5e-6}  # relative, in norm
SHAPES = [  # weight rows, K, what is fused
    (2048, 1536, {"norm": True, "bias": True}),
    (1536, 1536, {"residual": True}),
    (17920, 1536, {"norm": True, "gated": True}),
    (1536, 8960, {"residual": True}),
    (151936, 896, {"norm": True, "out_dtype": torch.float32}),
    (6144, 4096, {"norm": True}),
    (28672, 4096, {"norm": True, "gated": True}),
    (4096, 14336, {"residual": True}),
    (960, 576, {"norm": True}),
    (576, 576, {"residual": True}),
    (3072, 576, {"norm": True, "gated": True}),
    (576, 1536, {"residual": True}),
    (1002, 333, {"norm": True, "gated": True}),
    (777, 1001, {"bias": True, "residual": True}),
    (100, 48, {}),
]
ROWS = (1, 2, 5, 16, 33, 64)


def problem(
    N: int, K: int, rows: int, fused: dict[str, object], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, dict[str, object]]:
    """x [rows, K], weight [N, K] and the call's options, with tensors for the flags."""
    torch.manual_seed(N + K + rows)
    x = 3 * torch.randn(rows, K, device="cuda")
    weight = torch.randn(N, K, device="cuda") / K**0.5
    shapes = {"norm": (K,), "bias": (N,), "residual": (rows, N)}
    call = {n: torch.randn(shapes[n], device="cuda").to(dtype) if n in shapes else v for n, v in fused.items()}
    return x.to(dtype), weight.to(dtype), call | {"eps": EPS}


def exact(x: torch.Tensor, weight: torch.Tensor | Quantised, call: dict[str, object]) -> torch.Tensor:
    """The formula in float64."""
    x = x.double()
    if "norm" in call:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * call["norm"].double()
    if isinstance(weight, Quantised):
        product = x @ (weight.values.double() * weight.scale.double()[:, None]).T
    else:
        product = x @ weight.double().T
    if call.get("gated"):
        gate, up = product.chunk(2, -1)
        return gate * torch.sigmoid(gate) * up
    return product + sum(call[name].double() for name in ("bias", "residual") if name in call)


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape
    return ((got.double() - want).norm() / want.norm()).item()


def run(x: torch.Tensor, weight: torch.Tensor | Quantised, call: dict[str, object], **more: object) -> torch.Tensor:
    """One call; the residual is copied first, so that the problem can be run again."""
    if "residual" in call:
        call = call | {"residual": call["residual"].clone()}
    return linear(x, weight, **call, **more, backend="triton")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, "float8"])
@pytest.mark.parametrize(("N", "K", "fused"), SHAPES, ids=str)
def test_error_stays_in_the_dtypes_budget_and_nothing_races(
    N: int, K: int, fused: dict[str, object], dtype: torch.dtype | str
) -> None:
    x_dtype = torch.bfloat16 if isinstance(dtype, str) else dtype
    workspace = LinearWorkspace.allocate("cuda")
    few = dtype in (torch.float16, torch.float32) and N * K > 2**21  # compiling takes most of the time
    for rows in (5, 64) if few else ROWS:
        x, weight, call = problem(N, K, rows, fused, x_dtype)
        stored = quantise(weight) if dtype == "float8" else weight
        torch.full((32 << 20,), NAN, device="cuda")  # poison what buffers will be allocated from
        workspace.partials.fill_(NAN)
        first = run(x, stored, call, workspace=workspace)
        assert torch.equal(first, run(x, stored, call, workspace=workspace))
        assert torch.equal(first, run(x, stored, call))
        assert workspace.arrivals.count_nonzero() == 0
        assert distance(first, exact(x, stored, call)) <= BUDGET[x_dtype], f"{rows} rows"


@pytest.mark.parametrize("fold", [1, 2, 4, 8])
@pytest.mark.parametrize("splits", [1, 3, 8])
def test_any_launch_shape_is_the_same_product(fold: int, splits: int) -> None:
    for fused in ({"norm": True, "gated": True}, {"norm": True, "bias": True}, {"residual": True}):
        x, weight, call = problem(1664, 1600, 9, fused, torch.bfloat16)
        for prefetch_bytes, keep, late in ((0, True, False), (3000, False, True), (1 << 20, True, True)):
            config = LinearConfig(64 // fold, 16, 64 * fold, fold, splits, 4, 3, prefetch_bytes, keep, late)
            mine = call | {"residual": call["residual"].clone()} if "residual" in call else call
            got = linear_triton(x, weight, **mine, config=config)
            assert distance(got, exact(x, weight, call)) <= BUDGET[torch.bfloat16]


def test_activations_beyond_half_precision_meet_float8_weights() -> None:
    x, weight, _ = problem(1536, 8960, 3, {}, torch.bfloat16)
    x[:, 7] = 2e5
    stored = quantise(weight)
    assert distance(run(x, stored, {}), exact(x, stored, {})) <= BUDGET[torch.bfloat16]


@pytest.mark.parametrize("eight", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_a_chain_of_layers_in_a_graph_follows_its_inputs(rows: int, eight: bool) -> None:
    """qkv, out, gate_up, down, head with early launch, one workspace, the residual in place; replays are alike."""
    torch.manual_seed(rows)
    hidden, inner, layers, dtype = 896, 4864, 3, torch.bfloat16
    shapes = {"qkv": (1152, hidden), "out": (hidden, hidden), "gate_up": (2 * inner, hidden), "down": (hidden, inner)}
    weights = [
        {name: torch.randn(shape, device="cuda").mul_(shape[1] ** -0.5).to(dtype) for name, shape in shapes.items()}
        for _ in range(layers)
    ]
    head = torch.randn(5000, hidden, device="cuda").to(dtype)
    norm = torch.rand(hidden, device="cuda").add_(0.5).to(dtype)
    stored = [{n: quantise(w) if eight else w for n, w in layer.items()} for layer in weights]
    workspace = LinearWorkspace.allocate("cuda")
    start = torch.zeros(rows, hidden, device="cuda", dtype=dtype)

    def step(backend: str) -> tuple[torch.Tensor, torch.Tensor]:
        x = start.clone()
        shared = {"eps": EPS, "backend": backend, "workspace": workspace}
        for w in stored:
            mixed = linear(x, w["qkv"], norm=norm, **shared)[:, :hidden].contiguous()
            linear(mixed, w["out"], residual=x, **shared)
            inside = linear(x, w["gate_up"], norm=norm, gated=True, **shared)
            linear(inside, w["down"], residual=x, **shared)
        return x, linear(x, head, norm=norm, out_dtype=torch.float32, **shared)

    step("triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x, logits = step("triton")
    for _ in range(3):
        start.copy_(torch.randn(rows, hidden, device="cuda"))
        graph.replay()
        first = x.clone(), logits.clone()
        graph.replay()
        assert torch.equal(first[0], x)
        assert torch.equal(first[1], logits)
        assert workspace.arrivals.count_nonzero() == 0
        want, want_logits = step("reference")
        assert distance(x, want.double()) <= 1e-2
        assert distance(logits, want_logits.double()) <= 1.5e-2


def test_early_launch_in_place_chain_equals_calls_apart() -> None:
    """Two calls back to back on one residual: the second reads what the first wrote."""
    x, weight, call = problem(1536, 8960, 4, {"residual": True}, torch.bfloat16)
    _, gate_up, _ = problem(17920, 1536, 4, {}, torch.bfloat16)
    norm = torch.ones(1536, device="cuda", dtype=torch.bfloat16)
    together, apart = call["residual"].clone(), call["residual"].clone()
    for _ in range(20):
        linear(x, weight, residual=together, backend="triton")
        inside = linear(together, gate_up, norm=norm, eps=EPS, gated=True, backend="triton")
    for _ in range(20):
        linear(x, weight, residual=apart, backend="triton")
        torch.cuda.synchronize()
        after = linear(apart, gate_up, norm=norm, eps=EPS, gated=True, backend="triton")
        torch.cuda.synchronize()
    assert torch.equal(together, apart)
    assert torch.equal(inside, after)
