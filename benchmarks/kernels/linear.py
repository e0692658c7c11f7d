"""The decoder's matrix products at few rows, norm, bias, gate and residual fused, against torch's own and memory: L1.

    python3 benchmarks/kernels/linear.py [--models 1.5b,8b] [--rows 1,16] [--kinds bf16,fp8] [--sweep] [--out FILE]

Every product runs over so many copies of its weights that none is found in the L2 cache, all in one CUDA graph. The
peer of a product is F.linear in bf16 with the separate kernels that the fused one replaces; a residual's addition is
not counted there, it is part of the next norm. "chain" is a model's qkv, out, gate_up and down over all its layers,
where the peer does everything. Floors are bytes over FLOOR_BYTES_PER_US. --sweep times launch shapes of each product
instead and prints the best, after ways to overlap a chain. Without it the last line is one JSON document.
"""

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from _bench import finish, gate, input_sets, record, relative_error, time_graph

from specdial.kernels.linear import LinearWorkspace, Quantised, linear, quantise
from specdial.kernels.linear.launch import linear_triton
from specdial.kernels.linear.plan import LinearConfig, plan
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
    norm: bool = False
    bias: bool = False
    residual: bool = False
    gated: bool = False
    wide: bool = False  # float32 out

    def bytes_moved(self, rows: int, item_bytes: int) -> int:
        width = self.N // (2 if self.gated else 1)
        return self.N * self.K * item_bytes + rows * (2 * self.K + width * (4 if self.wide or self.residual else 2))

    def plan(self, rows: int, item_bytes: int) -> LinearConfig:
        return plan(
            self.N // (2 if self.gated else 1), self.K, rows, item_bytes=item_bytes, gated=self.gated, normed=self.norm
        )


def products(m: Model) -> dict[str, Product]:
    """By name, in a layer's order; the head last."""
    return {
        "qkv": Product(m.qkv, m.hidden, norm=True, bias=True),
        "out": Product(m.hidden, m.mixed, residual=True),
        "gate_up": Product(2 * m.inner, m.hidden, norm=True, gated=True),
        "down": Product(m.hidden, m.inner, residual=True),
        "head": Product(m.vocabulary, m.hidden, norm=True, wide=True),
    }


class Case:
    """A product's inputs and its calls; weights in `kind`, the peer's in bf16."""

    def __init__(self, product: Product, rows: int, workspace: LinearWorkspace) -> None:
        p = self.product = product
        self.workspace, self.rows = workspace, rows
        self.x = torch.randn(rows, p.K, device="cuda", dtype=BF16)
        self.norm = (1 + 0.1 * torch.randn(p.K, device="cuda")).to(BF16) if p.norm else None
        self.bias = torch.randn(p.N, device="cuda", dtype=BF16) if p.bias else None
        self.residual = torch.randn(rows, p.N, device="cuda", dtype=BF16) if p.residual else None

    def options(self) -> dict[str, object]:
        wide = {"out_dtype": torch.float32} if self.product.wide else {}
        fixed = {"norm": self.norm, "bias": self.bias, "eps": EPS, "gated": self.product.gated}
        return fixed | wide

    def ours(self, weight: torch.Tensor | Quantised, config: LinearConfig | None = None) -> torch.Tensor:
        if config is not None:
            return linear_triton(
                self.x, weight, residual=self.residual, workspace=self.workspace, config=config, **self.options()
            )
        return linear(
            self.x, weight, residual=self.residual, workspace=self.workspace, backend="triton", **self.options()
        )

    def peer(self, weight: torch.Tensor) -> torch.Tensor:
        x = self.x if self.norm is None else add_rms_norm(self.x, None, self.norm, EPS, backend="triton")[0]
        product = F.linear(x, weight, self.bias)
        if self.product.gated:
            return swiglu(product, backend="triton")
        return product.float() if self.product.wide else product

    def error(self, weight: torch.Tensor | Quantised, config: LinearConfig | None = None) -> float:
        """Relative error against float32 arithmetic on the same values."""
        quantised = isinstance(weight, Quantised)
        exact = weight.values.float() * weight.scale[:, None] if quantised else weight.float()
        if self.residual is not None:
            self.residual.normal_()  # timed calls have added to it
        before = None if self.residual is None else self.residual.float()
        wide = {name: t.float() if isinstance(t, torch.Tensor) else t for name, t in self.options().items()}
        want = linear(self.x.float(), exact, residual=before, backend="reference", **wide)
        return relative_error(self.ours(weight, config), want)


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
            weights = in_kind(plain, kind)
            for rows in rows_list:
                case, id = Case(p, rows, workspace), f"L1-{short}-{name}-r{rows}-{kind}"
                gate(id, case.error(weights[0]), LIMIT["product"])
                ours = time_graph([lambda w=w, c=case: c.ours(w) for w in weights]).median_us
                torchs = time_graph([lambda w=w, c=case: c.peer(w) for w in plain]).median_us
                title = f"{name} {p.N}x{p.K}, {rows} rows, {kind}, {MODELS[short].name}"
                records.append(
                    result(id, title, ours, p.bytes_moved(rows, KINDS[kind]), {"torch bf16": round(torchs, 2)})
                )
        torch.cuda.empty_cache()
    return records


class Chain:
    """A model's layers without attention, and their calls: one residual stream x, in place."""

    def __init__(self, short: str, workspace: LinearWorkspace) -> None:
        self.model, self.workspace = MODELS[short], workspace
        self.parts = {name: p for name, p in products(self.model).items() if name != "head"}
        self.plain = [
            {n: torch.randn(p.N, p.K, device="cuda", dtype=BF16).mul_(0.5 * p.K**-0.5) for n, p in self.parts.items()}
            for _ in range(self.model.layers)
        ]
        self.layers: list[dict[str, torch.Tensor | Quantised]] = []

    def start(self, rows: int, kind: str) -> None:
        """New inputs for `rows` rows, weights in `kind`."""
        self.layers = [{n: in_kind([w], kind)[0] for n, w in layer.items()} for layer in self.plain]
        self.x = torch.randn(rows, self.model.hidden, device="cuda", dtype=BF16)
        self.mixed = torch.randn(rows, self.model.mixed, device="cuda", dtype=BF16)
        self.norms = [(1 + 0.1 * torch.randn(self.model.hidden, device="cuda")).to(BF16) for _ in range(2)]
        self.bias = torch.randn(self.model.qkv, device="cuda", dtype=BF16)

    def ours(self, call: Callable[..., torch.Tensor]) -> None:
        """Every layer's products; `call` is `linear` with its backend chosen, told the product's name as well."""
        x = self.x
        for w in self.layers:
            call("qkv", x, w["qkv"], bias=self.bias, norm=self.norms[0], eps=EPS)
            call("out", self.mixed, w["out"], residual=x)
            inner = call("gate_up", x, w["gate_up"], norm=self.norms[1], eps=EPS, gated=True)
            call("down", inner, w["down"], residual=x)

    def peer(self) -> None:
        branch = torch.zeros_like(self.x)
        for w in self.plain:
            F.linear(add_rms_norm(branch, self.x, self.norms[0], EPS, backend="triton")[0], w["qkv"], self.bias)
            branch = F.linear(self.mixed, w["out"])
            normed, _ = add_rms_norm(branch, self.x, self.norms[1], EPS, backend="triton")
            branch = F.linear(swiglu(F.linear(normed, w["gate_up"]), backend="triton"), w["down"])

    def fused(self, name: str, x: torch.Tensor, weight: torch.Tensor | Quantised, **options: object) -> torch.Tensor:
        return linear(x, weight, **options, backend="triton", workspace=self.workspace)

    def error(self) -> float:
        """Relative error of the stream after all layers, against the reference."""
        before = self.x.clone()
        self.ours(lambda name, x, w, **options: linear(x, w, **options, backend="reference"))
        want = self.x.clone()
        self.x.copy_(before)
        self.ours(self.fused)
        return relative_error(self.x, want)


def time_chain(short: str, rows_list: list[int], kinds: list[str], workspace: LinearWorkspace) -> list[dict]:
    """All layers' products in one graph, ours and torch's."""
    chain, records = Chain(short, workspace), []
    for kind, rows in itertools.product(kinds, rows_list):
        chain.start(rows, kind)
        id = f"L1-{short}-chain-r{rows}-{kind}"
        gate(id, chain.error(), LIMIT["chain"])
        ours_us = time_graph([lambda: chain.ours(chain.fused)]).median_us
        peers = {"torch bf16": round(time_graph([chain.peer]).median_us, 1)}
        moved = chain.model.layers * sum(p.bytes_moved(rows, KINDS[kind]) for p in chain.parts.values())
        title = f"{chain.model.layers} layers' products, {rows} rows, {kind}, {chain.model.name}"
        records.append(result(id, title, ours_us, moved, peers))
    return records


VARIANTS: dict[str, Callable[[LinearConfig], LinearConfig]] = {
    "plan": lambda c: c,
    "no prefetch": lambda c: replace(c, prefetch_bytes=0),
    "prefetch / 4": lambda c: replace(c, prefetch_bytes=c.prefetch_bytes // 4),
    "not kept": lambda c: replace(c, keep=False),
    "late": lambda c: replace(c, late=True),
    "late, no prefetch": lambda c: replace(c, late=True, prefetch_bytes=0),
}


def sweep_chain(short: str, rows_list: list[int], kinds: list[str], workspace: LinearWorkspace) -> None:
    """Print what prefetching and early launch are worth where one product follows another."""
    chain = Chain(short, workspace)
    for kind, rows in itertools.product(kinds, rows_list):
        chain.start(rows, kind)
        moved = chain.model.layers * sum(p.bytes_moved(rows, KINDS[kind]) for p in chain.parts.values())
        times = []
        for name, vary in VARIANTS.items():

            def call(product, x, weight, vary=vary, rows=rows, kind=kind, **options):
                config = vary(chain.parts[product].plan(rows, KINDS[kind]))
                return linear_triton(x, weight, **options, workspace=workspace, config=config)

            times.append(f"{name} {time_graph([lambda c=call: chain.ours(c)]).median_us:.0f}")
        print(f"{short} chain r{rows} {kind}: floor {moved / FLOOR_BYTES_PER_US:.0f}: {' | '.join(times)}", flush=True)


def candidates(p: Product, rows: int, item_bytes: int) -> list[LinearConfig]:
    """The plan and its neighbours, one change each."""
    base = p.plan(rows, item_bytes)
    found = [base, replace(base, prefetch_bytes=0), replace(base, prefetch_bytes=2 * base.prefetch_bytes)]
    found.append(replace(base, block_k=base.block_k // 2, stages=2 * base.stages - 1))
    found.append(replace(base, block_k=2 * base.block_k, stages=base.stages // 2 + 1))
    for block_n in (base.block_n // 2, 2 * base.block_n):
        fold = 64 // block_n
        if block_n in (8, 16, 32, 64) and fold * base.block_m <= 256:
            block_m = max(base.block_m, 16 // fold)
            found.append(replace(base, block_n=block_n, fold=fold, block_m=block_m,
                                 block_k=base.block_k // base.fold * fold))  # fmt: skip
    found.append(replace(base, splits=2 * base.splits))
    if base.fold > 1:  # tall tiles and a split instead of a fold
        tiles, block_k = -(-p.N // (128 if p.gated else 64)), base.block_k // base.fold
        found.append(replace(base, block_n=64, fold=1, block_m=max(16, base.block_m), block_k=block_k,
                             splits=max(1, min(132 // tiles, p.K // block_k // 2, 16))))  # fmt: skip
    return found


def shorten(c: LinearConfig) -> str:
    return f"n{c.block_n} m{c.block_m} k{c.block_k} s{c.splits} st{c.stages} p{c.prefetch_bytes >> 10}K"


def sweep(short: str, rows_list: list[int], kinds: list[str], workspace: LinearWorkspace) -> None:
    """Print the fastest launch shapes of every product; a shape that does not fit the device is named and left out."""
    for (name, p), kind in itertools.product(products(MODELS[short]).items(), kinds):
        weights = in_kind(weight_copies(p, 1), kind)
        for rows in rows_list:
            case, times = Case(p, rows, workspace), []
            for number, config in enumerate(candidates(p, rows, KINDS[kind])):
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
            moved = p.bytes_moved(rows, KINDS[kind])
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
            sweep_chain(short, rows[:1], kinds, workspace)
            sweep(short, rows, kinds, workspace)
        else:
            records += time_chain(short, rows, kinds, workspace) + time_products(short, rows, kinds, workspace)
    if not options.sweep:
        finish(records, options.out)


if __name__ == "__main__":
    main()
