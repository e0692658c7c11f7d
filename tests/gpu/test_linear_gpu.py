"""The skinny products on a GPU: bf16 and float8 too, budgets from float64, every call twice, in a graph, in a chain.

The budget of a dtype is a few of its roundings: sums are in float32, so an error grows slowly with K. Float8 products'
sums have 14 bits within a step of K: a part of bf16's budget.
"""

import pytest
import torch

from specdial.kernels.linear import (
    LinearWorkspace,
    Prepared,
    Quantised,
    linear,
    linear_gated,
    linear_into_norm,
    quantise,
)
from specdial.kernels.linear.launch import linear_gated_triton, linear_into_norm_triton, linear_triton
from specdial.kernels.linear.plan import LinearConfig
from specdial.kernels.linear.prepared import PIECE, store
from specdial.kernels.norm import add_rms_norm

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NAN = float("nan")
EPS = 1e-6
BF16 = torch.bfloat16
BUDGET = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 5e-6, PIECE: 5e-3}  # relative, in norm
SHAPES = [  # weight rows, K, use; "after" a norm is anything that finishes it
    (2048, 1536, "after bias"),
    (1536, 1536, "into"),
    (17920, 1536, "after gated"),
    (1536, 8960, "into"),
    (151936, 896, "after wide"),
    (6144, 4096, "after"),
    (28672, 4096, "after gated"),
    (4096, 14336, "into"),
    (960, 576, "after"),
    (576, 576, "into"),
    (3072, 576, "after gated"),
    (576, 1536, "into"),
    (1002, 333, "after gated"),
    (777, 1001, "into"),
    (777, 1001, "bias"),
    (100, 48, ""),
]
ROWS = (1, 2, 5, 16, 33, 64)


class Problem:
    """One product's arguments, its calls, and the formula in float64."""

    def __init__(self, N: int, K: int, use: str, rows: int, dtype: torch.dtype | str, parts: int = 0) -> None:
        """dtype "float8": a bf16 decoder's product, x and what is left for others in pieces. parts: of squares."""
        torch.manual_seed(N + K + rows)
        eight, self.use = dtype == "float8", use
        self.dtype = BF16 if isinstance(dtype, str) else dtype  # of everything but x
        x_dtype = PIECE if eight else self.dtype
        weight = (torch.randn(N, K, device="cuda") / K**0.5).to(self.dtype)
        self.weight: torch.Tensor | Quantised = quantise(weight) if eight else weight
        h = 3 * torch.randn(rows, K, device="cuda")
        self.x = store(h, x_dtype)
        if use.startswith("after"):
            parts = parts or max(1, min(K // 16, 256))
            around = torch.full((parts + 2, rows), NAN, device="cuda")  # nothing outside the parts may count
            share = torch.rand(parts, rows, device="cuda")
            around[1:-1] = share / share.sum(0) * h.square().sum(-1)
            self.x = store(h * torch.rand(K, device="cuda").add(0.5), x_dtype, around[1:-1])
        self.bias = torch.randn(N, device="cuda").to(self.dtype) if "bias" in use else None
        self.norm = torch.rand(N, device="cuda").add(0.5).to(self.dtype)
        self.residual = torch.randn(rows, N, device="cuda").to(self.dtype)
        self.pieces = eight
        self.out_dtype = torch.float32 if "wide" in use else self.dtype

    def exact(self) -> tuple[torch.Tensor, ...]:
        """The product, or for "into" h, h * norm and its squares."""
        x = self.x.wide().double()  # exact: pieces are a few bits each
        if self.x.squares is not None:
            x = x * torch.rsqrt(self.x.squares.double().sum(0) / x.shape[-1] + EPS)[:, None]
        quantised = isinstance(self.weight, Quantised)
        values = self.weight.values if quantised else self.weight
        product = x @ values.double().T * (self.weight.scale.double() if quantised else 1)
        if "gated" in self.use:
            gate, up = product.chunk(2, -1)
            return (gate * torch.sigmoid(gate) * up,)
        if self.use == "into":
            h = self.residual.double() + product
            return h, h * self.norm.double(), h.square().sum(-1)
        return (product + (0 if self.bias is None else self.bias.double()),)

    def run(
        self, *, config: LinearConfig | None = None, workspace: LinearWorkspace | None = None
    ) -> tuple[torch.Tensor, ...]:
        """What `exact` gives, unshrunk and added up; the residual is copied first: the problem can be run again."""
        shared: dict[str, object] = {"workspace": workspace}
        if config is None:
            shared["backend"] = "triton"
        else:
            shared["config"] = config
        if "gated" in self.use:
            got = (linear_gated_triton if config else linear_gated)(self.x, self.weight, eps=EPS, **shared)
            return (got.wide(),)
        if self.use == "into":
            h = self.residual.clone()
            shared |= {"residual": h, "norm": self.norm}
            if config is None:
                got = linear_into_norm(self.x, self.weight, pieces=self.pieces, **shared)
            else:
                dtype = PIECE if self.pieces else self.dtype
                got = linear_into_norm_triton(self.x, self.weight, dtype=dtype, **shared)
            assert got.squares is not None
            if self.pieces:  # exactly those of what was added up
                assert torch.equal(
                    got.values.view(torch.uint8), store(h.float() * self.norm.float(), PIECE).values.view(torch.uint8)
                )
            return h, got.wide(), got.squares.sum(0)
        shared |= {"bias": self.bias, "eps": EPS, "out_dtype": self.out_dtype}
        return ((linear_triton if config else linear)(self.x, self.weight, **shared),)

    def check(self, got: tuple[torch.Tensor, ...]) -> None:
        budget = BUDGET[self.x.values.dtype]
        for mine, want in zip(got, self.exact(), strict=True):
            assert distance(mine, want) <= budget, f"{self.use}, {self.x.shape[0]} rows"


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def same(first: tuple[torch.Tensor, ...], second: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, "float8"])
@pytest.mark.parametrize(("N", "K", "use"), SHAPES, ids=str)
def test_error_stays_in_the_dtypes_budget_and_nothing_races(N: int, K: int, use: str, dtype: torch.dtype | str) -> None:
    workspace = LinearWorkspace.allocate("cuda")
    few = dtype in (torch.float16, torch.float32) and N * K > 2**21  # compiling takes most of the time
    for rows in (5, 64) if few else ROWS:
        problem = Problem(N, K, use, rows, dtype)
        torch.full((32 << 20,), NAN, device="cuda")  # poison what buffers will be allocated from
        workspace.partials.fill_(NAN)
        first = problem.run(workspace=workspace)
        assert same(first, problem.run(workspace=workspace))
        assert same(first, problem.run())
        assert workspace.arrivals.count_nonzero() == 0
        problem.check(first)


@pytest.mark.parametrize(("parts", "rows"), [(1, 1), (3, 64), (96, 16), (257, 16), (600, 33)])
def test_squares_in_any_number_of_parts(parts: int, rows: int) -> None:
    for use in ("after", "after gated"):
        problem = Problem(1536, 1536, use, rows, BF16, parts=parts)
        problem.check(problem.run())


@pytest.mark.parametrize("fold", [1, 2, 4, 8])
@pytest.mark.parametrize("splits", [1, 3, 8])
def test_any_launch_shape_is_the_same_product(fold: int, splits: int) -> None:
    for use in ("after gated", "after bias", "into"):
        problem = Problem(1664, 1600, use, 9, BF16)
        for prefetch_bytes in (0, 3000, 1 << 20):
            config = LinearConfig(64 // fold, 16, 64 * fold, fold, splits, 4, 3, prefetch_bytes)
            problem.check(problem.run(config=config))


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("fold", "rows"), [(1, 9), (4, 9), (1, 64)])
def test_pieces_side_by_side_or_apart(fold: int, rows: int, apart: bool) -> None:
    for use in ("after gated", "after bias", "into"):
        problem = Problem(1664, 1600, use, rows, "float8")
        for splits in (1, 3):
            config = LinearConfig(64 // fold, 16 if rows < 16 else 64, 128 * fold, fold, splits, 4, 3, 0, apart)
            problem.check(problem.run(config=config))


def test_sums_of_float8_stay_exact_over_a_long_row() -> None:
    """Products of one sign: sums that never left the tensor cores would lose a few per cent."""
    problem = Problem(512, 14336, "", 16, "float8")
    problem.x = store(problem.x.wide().abs(), PIECE)
    problem.weight = quantise(torch.rand(512, 14336, device="cuda"))
    problem.check(problem.run())


def test_a_large_stream_passes_through_pieces() -> None:
    """h * norm is far beyond float8's own range."""
    problem = Problem(1536, 1536, "into", 5, "float8")
    problem.residual[:, 3] = 1e5
    head = quantise(torch.randn(2048, 1536, device="cuda", dtype=BF16))
    h = problem.residual.clone()
    x = linear_into_norm(
        problem.x, problem.weight, residual=h, norm=problem.norm, pieces=True, backend="triton"
    )  # [5, 1536]
    assert x.wide().isfinite().all()
    got = linear(x, head, eps=EPS, out_dtype=torch.float32, backend="triton")
    normed = h.double() * torch.rsqrt(h.double().square().mean(-1, keepdim=True) + EPS) * problem.norm.double()
    assert distance(got, normed @ (head.values.double() * head.scale.double()[:, None]).T) <= BUDGET[PIECE]


class Layers:
    """A small decoder's products without attention, and one step over them."""

    def __init__(self, rows: int, *, eight: bool) -> None:
        torch.manual_seed(rows)
        hidden, inner, self.eight = 896, 4864, eight  # eight: all but out, and the first qkv
        shapes = {
            "qkv": (1152, hidden), "out": (hidden, hidden), "gate_up": (2 * inner, hidden), "down": (hidden, inner),
        }  # fmt: skip
        self.layers = [
            {name: (torch.randn(s, device="cuda") * s[1] ** -0.5).to(BF16) for name, s in shapes.items()}
            for _ in range(3)
        ]
        self.head = torch.randn(5000, hidden, device="cuda").to(BF16)
        if eight:
            for index, layer in enumerate(self.layers):
                for name in ("qkv", "gate_up", "down") if index else ("gate_up", "down"):
                    layer[name] = quantise(layer[name])
            self.head = quantise(self.head)
        self.norm = torch.rand(hidden, device="cuda").add_(0.5).to(BF16)
        self.workspace = LinearWorkspace.allocate("cuda")
        self.start = torch.randn(rows, hidden, device="cuda").to(BF16)

    def step(self, backend: str, *, apart: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream at the end, and logits. apart: the device rests after every call."""

        def call(product, *args, **options):
            result = product(*args, **options, backend=backend, workspace=self.workspace)
            if apart:
                torch.cuda.synchronize()
            return result

        h, into = self.start.clone(), {"norm": self.norm, "pieces": self.eight}
        x: torch.Tensor | Prepared = add_rms_norm(h, None, self.norm, EPS, backend=backend)[0]
        for w in self.layers:
            mixed = call(linear, x, w["qkv"], eps=EPS, out_dtype=BF16)[:, : h.shape[1]].contiguous()
            x = call(linear_into_norm, mixed, w["out"], residual=h, **into)
            inside = call(linear_gated, x, w["gate_up"], eps=EPS)
            x = call(linear_into_norm, inside, w["down"], residual=h, **into)
        return h, call(linear, x, self.head, eps=EPS, out_dtype=torch.float32)


@pytest.mark.parametrize("eight", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 16, 64])
def test_a_chain_of_layers_in_a_graph_follows_its_inputs(rows: int, eight: bool) -> None:
    """qkv, out, gate_up, down, head with early launch, one workspace, the residual in place; replays are alike."""
    layers = Layers(rows, eight=eight)
    layers.step("triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = layers.step("triton")
    for _ in range(3):
        layers.start.copy_(torch.randn_like(layers.start))
        graph.replay()
        first = tuple(t.clone() for t in result)
        graph.replay()
        assert same(first, result)
        assert layers.workspace.arrivals.count_nonzero() == 0
        want, want_logits = layers.step("reference")
        assert distance(first[0], want) <= 1e-2
        assert distance(first[1], want_logits) <= (2e-2 if eight else 1.5e-2)


@pytest.mark.parametrize("eight", [False, True])
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_early_launch_equals_calls_apart(rows: int, eight: bool) -> None:
    """Every product reads what the one before it wrote: the stream, its squares, partial sums."""
    layers = Layers(rows, eight=eight)
    apart = layers.step("triton", apart=True)
    for _ in range(10):
        assert same(layers.step("triton"), apart)


def test_squares_of_another_backend_are_finished() -> None:
    problem = Problem(1536, 1536, "into", 5, BF16)
    head = torch.randn(64, 1536, device="cuda", dtype=BF16)
    shared = {"norm": problem.norm, "residual": problem.residual}
    x = linear_into_norm(problem.x, problem.weight, **shared, backend="reference")
    got = linear(x, head, eps=EPS, out_dtype=torch.float32, backend="triton")
    want = linear(x, head, eps=EPS, out_dtype=torch.float32, backend="reference")
    assert distance(got, want) <= 1e-4  # the same values in, sums in another order
