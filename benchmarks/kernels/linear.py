"""The decoder's matrix products at few rows, norm, bias, gate and residual fused, against torch's own and memory: L1.

    python3 benchmarks/kernels/linear.py [--models 1.5b,8b] [--rows 1,16] [--kinds bf16,fp8] [--sweep] [--out FILE]

Every product runs over so many copies of its weights that none is found in the L2 cache, all in one CUDA graph. The
peer of a product is F.linear in bf16 with the separate kernels that the fused one replaces; a norm is counted with the
product before it, which does most of it. "chain" is a model's qkv, out, gate_up and down over all its layers and
the head, as a decoder runs them. fp8 is a decoder with float8 weights: its out and its first qkv are bf16, and pieces
of rows are made by the products before those that take them. Floors are bytes over FLOOR_BYTES_PER_US. Every time is
gated by an error against float32 arithmetic. --sweep times launch shapes of each product instead and prints the best.
Without it the last line is one JSON document.
"""

import argparse
import itertools
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from _bench import finish, gate, input_sets, record, relative_error, time_graph

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
from specdial.kernels.linear.plan import LinearConfig, plan
from specdial.kernels.linear.prepared import PIECE, store
from specdial.kernels.norm import add_rms_norm
from specdial.kernels.swiglu import swiglu

FLOOR_BYTES_PER_US = 4.3e6
LEAST_COPIES = 28
EPS = 1e-6
LIMIT = {"product": 5e-3, "chain": 4e-2}  # relative error against float32 arithmetic
KINDS = {"bf16": 2, "fp8": 1}  # bytes of a weight
BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Model:
    """Widths of a decoder's products."""

    name: str
    hidden: int
    qkv: int
    mixed: int  # heads * head dim
    inner: int
    vocabulary: int
    layers: int


MODELS = {
    "135m": Model("SmolLM2-135M shape", 576, 960, 576, 1536, 49152, 30),
    "0.5b": Model("Qwen2.5-0.5B shape", 896, 1152, 896, 4864, 151936, 24),
    "1b": Model("Llama-3.2-1B shape", 2048, 3072, 2048, 8192, 128256, 16),
    "1.5b": Model("Qwen2.5-1.5B shape", 1536, 2048, 1536, 8960, 151936, 28),
    "8b": Model("Llama-3.1-8B shape", 4096, 6144, 4096, 14336, 128256, 32),
}


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix product of a decoder layer: N weight rows of K, and what is fused to it."""

    N: int
    K: int
    after_norm: bool = False  # x is on its way through one
    bias: bool = False
    into_norm: bool = False
    gated: bool = False
    wide: bool = False  # float32 out

    @property
    def columns(self) -> int:
        return self.N // (2 if self.gated else 1)

    def bytes_moved(self, rows: int, item_bytes: int) -> int:
        out_bytes = 6 if self.into_norm else 4 if self.wide else 2  # of a column: h twice, and h * norm
        return self.N * self.K * item_bytes + rows * (2 * self.K + self.columns * out_bytes)

    def plan(self, rows: int, item_bytes: int) -> LinearConfig:
        return plan(self.columns, self.K, rows, item_bytes=item_bytes, gated=self.gated)


def products(m: Model) -> dict[str, Product]:
    """By name, in a layer's order; the head last."""
    return {
        "qkv": Product(m.qkv, m.hidden, after_norm=True, bias=True),
        "out": Product(m.hidden, m.mixed, into_norm=True),
        "gate_up": Product(2 * m.inner, m.hidden, after_norm=True, gated=True),
        "down": Product(m.hidden, m.inner, into_norm=True),
        "head": Product(m.vocabulary, m.hidden, after_norm=True, wide=True),
    }


class Case:
    """A product's inputs as a decoder has them, and its calls; weights in `kind`, the peer's in bf16."""

    def __init__(self, name: str, product: Product, rows: int, kind: str, workspace: LinearWorkspace) -> None:
        p = self.product = product
        self.workspace, self.pieces = workspace, kind == "fp8"
        self.plain = torch.randn(rows, p.K, device="cuda", dtype=BF16)
        norm = 1 + 0.1 * torch.randn(p.N if p.into_norm else p.K, device="cuda")
        self.norm = norm.to(BF16)
        values, squares = self.plain.float(), None
        if p.after_norm:
            values = values * norm
            parts = -(-p.K // 16)  # as many as a product of 16 columns a program leaves
            squares = (self.plain.float().square().sum(-1) / parts).expand(parts, rows).contiguous()  # [parts, rows]
        self.x = store(values, PIECE if weight_kind(name, kind) == "fp8" else BF16, squares)
        self.bias = torch.randn(p.N, device="cuda", dtype=BF16) if p.bias else None
        self.residual = torch.randn(rows, p.N, device="cuda", dtype=BF16) if p.into_norm else None

    def ours(self, weight: torch.Tensor | Quantised, config: LinearConfig | None = None) -> Prepared | torch.Tensor:
        options: dict[str, object] = {"workspace": self.workspace}
        options |= {"backend": "triton"} if config is None else {"config": config}
        if self.product.gated:
            return (linear_gated if config is None else linear_gated_triton)(self.x, weight, eps=EPS, **options)
        if self.product.into_norm:
            options |= {"residual": self.residual, "norm": self.norm}
            if config is None:
                return linear_into_norm(self.x, weight, pieces=self.pieces, **options)
            return linear_into_norm_triton(self.x, weight, dtype=PIECE if self.pieces else BF16, **options)
        options |= {"bias": self.bias, "eps": EPS, "out_dtype": torch.float32 if self.product.wide else BF16}
        return (linear if config is None else linear_triton)(self.x, weight, **options)

    def peer(self, weight: torch.Tensor) -> torch.Tensor:
        if self.residual is not None:
            return add_rms_norm(F.linear(self.plain, weight), self.residual, self.norm, EPS, backend="triton")[0]
        product = F.linear(self.plain, weight, self.bias)
        if self.product.gated:
            return swiglu(product, backend="triton")
        return product.float() if self.product.wide else product

    def error(self, weight: torch.Tensor | Quantised, config: LinearConfig | None = None) -> float:
        """The larger relative error of the results, against float32 arithmetic on the same values."""
        if self.residual is not None:
            self.residual.normal_()  # timed calls have added to it
        x = self.x.wide()
        if self.x.squares is not None:
            x = x * torch.rsqrt(self.x.squares.sum(0) / x.shape[-1] + EPS)[:, None]
        exact = weight.values.float() * weight.scale[:, None] if isinstance(weight, Quantised) else weight.float()
        want = F.linear(x, exact, None if self.bias is None else self.bias.float())
        if self.product.gated:
            gate, up = want.chunk(2, -1)
            want = F.silu(gate) * up
        if self.residual is not None:
            want = want + self.residual.float()
        got = self.ours(weight, config)
        if self.residual is None:
            return relative_error(got.wide() if isinstance(got, Prepared) else got, want)
        return max(
            relative_error(self.residual, want),
            relative_error(got.wide(), want * self.norm.float()),
            relative_error(got.squares.sum(0), want.square().sum(-1)),
        )


def weight_kind(name: str, kind: str, layer: int = 1) -> str:
    """Of a product in a decoder of `kind`: attention and the embedding leave no pieces for float8 weights."""
    return "bf16" if name == "out" or (name == "qkv" and layer == 0) else kind


def weight_copies(p: Product, item_bytes: int) -> list[torch.Tensor]:
    count = max(2 if p.wide else LEAST_COPIES, input_sets(p.N * p.K * item_bytes))
    return [torch.randn(p.N, p.K, device="cuda", dtype=BF16).mul_(p.K**-0.5) for _ in range(count)]


def in_kind(weights: list[torch.Tensor], kind: str) -> list[torch.Tensor | Quantised]:
    return [quantise(w) for w in weights] if kind == "fp8" else list(weights)


def result(id: str, case: str, ours_us: float, bytes_moved: int, peers: dict[str, float]) -> dict[str, object]:
    floor_us = bytes_moved / FLOOR_BYTES_PER_US
    return record(
        id, case, ours_us, "us", bytes=bytes_moved, floor=round(floor_us, 2), peers=peers,
        gbps=round(bytes_moved / ours_us / 1e3), floor_frac=round(floor_us / ours_us, 3),
    )  # fmt: skip


def time_products(short: str, rows_list: list[int], kinds: list[str], workspace: LinearWorkspace) -> list[dict]:
    """Every product of a model alone."""
    records = []
    for name, p in products(MODELS[short]).items():
        plain = weight_copies(p, 1)
        for kind in kinds:
            own = weight_kind(name, kind)
            weights = in_kind(plain, own)
            for rows in rows_list:
                case, id = Case(name, p, rows, kind, workspace), f"L1-{short}-{name}-r{rows}-{kind}"
                gate(id, case.error(weights[0]), LIMIT["product"])
                ours = time_graph([lambda w=w, c=case: c.ours(w) for w in weights]).median_us
                torchs = time_graph([lambda w=w, c=case: c.peer(w) for w in plain]).median_us
                title = f"{name} {p.N}x{p.K}, {rows} rows, {kind}, {MODELS[short].name}"
                records.append(
                    result(id, title, ours, p.bytes_moved(rows, KINDS[own]), {"torch bf16": round(torchs, 2)})
                )
        torch.cuda.empty_cache()
    return records


class Chain:
    """A model's layers without attention, then its head: one step of a decoder."""

    def __init__(self, short: str, workspace: LinearWorkspace) -> None:
        self.model, self.workspace = MODELS[short], workspace
        self.parts = products(self.model)
        head = self.parts["head"]
        self.plain = [
            {
                n: torch.randn(p.N, p.K, device="cuda", dtype=BF16).mul_(0.5 * p.K**-0.5)
                for n, p in self.parts.items()
                if p is not head
            }
            for _ in range(self.model.layers)
        ]
        self.plain_head = torch.randn(head.N, head.K, device="cuda", dtype=BF16)

    def start(self, rows: int, kind: str) -> None:
        """New inputs for `rows` rows, weights in `kind`."""
        self.kind = kind
        self.layers = [
            {n: in_kind([w], weight_kind(n, kind, index))[0] for n, w in layer.items()}
            for index, layer in enumerate(self.plain)
        ]
        self.head = in_kind([self.plain_head], kind)[0]
        self.embedded = torch.randn(rows, self.model.hidden, device="cuda", dtype=BF16)
        self.mixed = torch.randn(rows, self.model.mixed, device="cuda", dtype=BF16)
        self.norms = [(1 + 0.1 * torch.randn(self.model.hidden, device="cuda")).to(BF16) for _ in range(2)]
        self.bias = torch.randn(self.model.qkv, device="cuda", dtype=BF16)

    def bytes_moved(self, rows: int) -> int:
        names = [(name, layer) for layer in range(self.model.layers) for name in self.parts if name != "head"]
        return sum(
            self.parts[name].bytes_moved(rows, KINDS[weight_kind(name, self.kind, layer)])
            for name, layer in (*names, ("head", 1))
        )

    def ours(self, backend: str = "triton") -> torch.Tensor:
        """Logits. Every layer's attention output is `mixed`, so that only the products count."""
        shared = {"backend": backend, "workspace": self.workspace}
        h = self.embedded.clone()
        x: torch.Tensor | Prepared = add_rms_norm(h, None, self.norms[0], EPS, backend=backend)[0]
        for w in self.layers:
            linear(x, w["qkv"], bias=self.bias, eps=EPS, out_dtype=BF16, **shared)
            into = {"residual": h, "pieces": self.kind == "fp8"}
            x = linear_into_norm(self.mixed, w["out"], norm=self.norms[1], **into, **shared)
            inner = linear_gated(x, w["gate_up"], eps=EPS, **shared)
            x = linear_into_norm(inner, w["down"], norm=self.norms[0], **into, **shared)
        return linear(x, self.head, eps=EPS, out_dtype=torch.float32, **shared)

    def peer(self) -> torch.Tensor:
        h = self.embedded.clone()
        normed, _ = add_rms_norm(h, None, self.norms[0], EPS, backend="triton")
        for w in self.plain:
            F.linear(normed, w["qkv"], self.bias)
            normed, _ = add_rms_norm(F.linear(self.mixed, w["out"]), h, self.norms[1], EPS, backend="triton")
            inner = swiglu(F.linear(normed, w["gate_up"]), backend="triton")
            normed, _ = add_rms_norm(F.linear(inner, w["down"]), h, self.norms[0], EPS, backend="triton")
        return torch.mm(normed, self.plain_head.t(), out_dtype=torch.float32)

    def error(self) -> float:
        """Relative error of the logits, against the reference."""
        return relative_error(self.ours(), self.ours("reference"))


def time_chain(short: str, rows_list: list[int], kinds: list[str], workspace: LinearWorkspace) -> list[dict]:
    """All layers' products in one graph, ours and torch's."""
    chain, records = Chain(short, workspace), []
    for kind, rows in itertools.product(kinds, rows_list):
        chain.start(rows, kind)
        id = f"L1-{short}-chain-r{rows}-{kind}"
        gate(id, chain.error(), LIMIT["chain"])
        ours_us = time_graph([chain.ours]).median_us
        peers = {"torch bf16": round(time_graph([chain.peer]).median_us, 1)}
        title = f"{chain.model.layers} layers' products and the head, {rows} rows, {kind}, {chain.model.name}"
        records.append(result(id, title, ours_us, chain.bytes_moved(rows), peers))
    return records


def candidates(p: Product, rows: int, item_bytes: int) -> list[LinearConfig]:
    """The plan first, then its neighbours, one change each; for many rows tiles twice as tall, which no plan has."""
    base, pieces = p.plan(rows, item_bytes), 2 if item_bytes == 1 else 1
    found = [base, replace(base, prefetch_bytes=0 if base.prefetch_bytes else 32 << 10)]
    found.append(replace(base, stages=base.stages - 1))
    found.append(replace(base, stages=base.stages + 1))
    found += [replace(base, block_k=base.block_k // 2, stages=base.stages + more) for more in (0, 2)]
    found.append(replace(base, block_k=2 * base.block_k, stages=max(3, base.stages - 1)))
    for block_n in (base.block_n // 2, 2 * base.block_n):
        fold = 64 // block_n
        if block_n in (8, 16, 32, 64) and pieces * fold * base.block_m <= 256:
            block_m = max(base.block_m, 16 // (pieces * fold))
            other = replace(base, block_n=block_n, fold=fold, block_m=block_m, block_k=base.block_k // base.fold * fold)
            fill = max(1, 132 // -(-p.columns // block_n))  # splits that give every multiprocessor a program
            found += [replace(other, splits=splits) for splits in sorted({base.splits, 2 * base.splits, fill})]
    found.append(replace(base, splits=2 * base.splits))
    if base.splits > 1:
        found.append(replace(base, splits=base.splits // 2))
    if item_bytes == 1:
        found += [replace(base, apart=not base.apart), replace(base, apart=not base.apart, stages=base.stages + 1)]
    if rows > 32 and p.columns >= 128:  # half of x's traffic from the L2 cache, which is as large as the weights'
        tiles, part = -(-p.columns // 128), base.block_k // base.fold
        tall = replace(base, block_n=128, fold=1, warps=8, block_k=part, prefetch_bytes=0)
        for splits in sorted({1, max(1, 132 // tiles), max(1, 264 // tiles)}):
            found += [replace(tall, splits=splits, block_k=k, stages=s) for k, s in ((part, 3), (part // 2, 6))]
    return found


def shorten(c: LinearConfig) -> str:
    pieces = " apart" if c.apart else ""
    return f"n{c.block_n} m{c.block_m} k{c.block_k} s{c.splits} st{c.stages} p{c.prefetch_bytes >> 10}K{pieces}"


def sweep(short: str, rows_list: list[int], kinds: list[str], workspace: LinearWorkspace) -> None:
    """Print the fastest launch shapes of every product; a shape that does not fit the device is named and left out."""
    for (name, p), kind in itertools.product(products(MODELS[short]).items(), kinds):
        own = weight_kind(name, kind)
        weights = in_kind(weight_copies(p, 1), own)
        for rows in rows_list:
            case, times = Case(name, p, rows, kind, workspace), []
            for number, config in enumerate(candidates(p, rows, KINDS[own])):
                try:
                    error = case.error(weights[0], config)
                except Exception as problem:  # out of shared memory, of several kinds
                    print(f"  {name} r{rows} {kind} {shorten(config)}: {type(problem).__name__}")
                    continue
                if not error <= LIMIT["product"]:
                    print(f"  {name} r{rows} {kind} {shorten(config)}: WRONG by {error:.1e}")
                    continue
                took = time_graph([lambda w=w, c=case, g=config: c.ours(w, g) for w in weights], replays=12)
                times.append((took.median_us, number, config))
            default = next((us for us, number, _ in times if number == 0), float("nan"))
            times.sort(key=lambda t: t[0])
            moved = p.bytes_moved(rows, KINDS[own])
            best = " | ".join(f"{us:.2f} {shorten(config)}" for us, _, config in times[:3])
            print(f"{short} {name} r{rows} {kind}: floor {moved / FLOOR_BYTES_PER_US:.2f} plan {default:.2f}: {best}",
                  flush=True)  # fmt: skip
        del weights
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="1.5b", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--rows", help="1,4,16,64 by default, 1,16 for a sweep")
    parser.add_argument("--kinds", help="bf16,fp8 by default, bf16 for a sweep")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--out", type=Path, help="result file, records of the same id are replaced")
    options = parser.parse_args()
    torch.manual_seed(0)
    workspace = LinearWorkspace.allocate("cuda", partials=16 << 20, arrivals=1 << 12)  # for odd splits of a sweep
    rows = [int(r) for r in (options.rows or ("1,16" if options.sweep else "1,4,16,64")).split(",")]
    kinds = (options.kinds or ("bf16" if options.sweep else "bf16,fp8")).split(",")
    records = []
    for short in options.models.split(","):
        if options.sweep:
            sweep(short, rows, kinds, workspace)
        else:
            records += time_chain(short, rows, kinds, workspace)
            records += time_products(short, rows, kinds, workspace)
    if not options.sweep:
        finish(records, options.out)


if __name__ == "__main__":
    main()
