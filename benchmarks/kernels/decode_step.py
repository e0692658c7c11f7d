"""The small operations of a decode step against the same arithmetic in eager torch, in graph replays: G1 to G5.

    python3 benchmarks/kernels/decode_step.py [--out FILE]

G1 residual add + RMS norm, G2 norm + rotation + cache write, G3 gated activation, G4 statistics of logits, G5 all that
one layer needs besides matrix products and attention. The decode cases rerun on one small input set, which stays in
the L2 cache as the output of the matrix product before it would; the many-row cases do not fit there and are held
against copy bandwidth. "one tiny kernel" is what a graph node costs that does nothing. Last line is one JSON document.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from _bench import copy_gbps, finish, gate, record, relative_error, time_graph

from specdial.kernels.norm import add_rms_norm
from specdial.kernels.norm.reference import rms_norm_reference
from specdial.kernels.rope_cache import rope_and_cache
from specdial.kernels.swiglu import swiglu
from specdial.kernels.token_statistics import logit_statistics
from specdial.kernels.token_statistics.reference import logit_statistics_reference

EPS = 1e-6
CALLS = 50  # per replay: a call is shorter than a replay's own start


@dataclass(frozen=True, slots=True)
class Model:
    """What the small operations see of a model."""

    name: str
    hidden: int
    H: int
    Hk: int
    D: int
    inner: int
    V: int
    layers: int
    qk_norm: bool


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Measured in the same run."""

    gbps: float
    tiny_us: float


MODELS = {
    "1.5b": Model("Qwen2.5-1.5B shape", 1536, 12, 2, 128, 8960, 151936, 28, False),
    "8b": Model("Qwen3-8B shape", 4096, 32, 8, 128, 12288, 151936, 36, True),
}
BATCHES = ((1, 1), (16, 1), (16, 5))  # B, T
CAPACITY = 4096
MANY_ROWS = 16384


def timed(
    id: str, case: str, calls: dict[str, Callable[[], object]], bytes_moved: int, ceiling: Ceiling, **more: object
) -> dict[str, object]:
    """The record of `calls["ours"]`, the other calls beside it."""
    repeats = CALLS if bytes_moved < 32 << 20 else 4
    times = {name: time_graph([call], calls_per_replay=repeats) for name, call in calls.items()}
    ours = times.pop("ours")
    peers = {name: round(time.median_us, 2) for name, time in times.items()} | {
        "one tiny kernel": round(ceiling.tiny_us, 2)
    }
    floor = round(bytes_moved / ceiling.gbps / 1000.0, 3)
    return record(
        id, case, ours.median_us, "us", spread=ours.spread, bytes=bytes_moved, floor=floor, peers=peers, **more
    )


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def norm_case(id: str, where: str, rows: int, hidden: int, ceiling: Ceiling) -> dict[str, object]:
    """Residual add and norm of `rows` rows."""
    x, residual, weight = randn(rows, hidden), randn(rows, hidden), randn(hidden)
    want, want_h = add_rms_norm(x, residual.clone(), weight, EPS, backend="reference")
    normed, h = add_rms_norm(x, residual.clone(), weight, EPS, backend="triton")
    gate(id, relative_error(normed, want), 1e-3)
    gate(f"{id} sum", float((h != want_h).sum()), 0.0)
    calls: dict[str, Callable[[], object]] = {
        "ours": lambda: add_rms_norm(x, residual, weight, EPS, backend="triton"),
        "eager": lambda: rms_norm_reference(residual + x, weight, EPS),
        "add + F.rms_norm": lambda: F.rms_norm(residual + x, (hidden,), weight, EPS),
    }
    return timed(id, f"add + RMS norm, {where}, bf16", calls, 8 * rows * hidden, ceiling)


class Rotation:
    """Inputs of `rope_and_cache`, and the decoder's own sequence of torch operations on them."""

    def __init__(self, model: Model, B: int, T: int) -> None:
        m = self.model = model
        self.qkv = randn(B, T, (m.H + 2 * m.Hk) * m.D)
        self.caches = torch.zeros(2, B, m.Hk, CAPACITY, m.D, device="cuda", dtype=torch.bfloat16)
        self.lengths = torch.randint(0, CAPACITY - T, (B,), device="cuda")
        self.norms = (randn(m.D), randn(m.D)) if m.qk_norm else None
        inverse = 1e6 ** (-torch.arange(0, m.D, 2, device="cuda", dtype=torch.float32) / m.D)
        angle = torch.arange(CAPACITY, device="cuda", dtype=torch.float32)[:, None] * inverse
        self.cos, self.sin = angle.cos(), angle.sin()  # [S, D/2] each
        self.positions = self.lengths[:, None] + torch.arange(T, device="cuda")  # [B, T]
        self.wide = tuple(t[self.positions][:, :, None].repeat(1, 1, 1, 2) for t in (self.cos, self.sin))
        self.rows = torch.arange(B, device="cuda")[:, None]

    def run(self, backend: str, caches: torch.Tensor | None = None) -> torch.Tensor:
        norms = {} if self.norms is None else {"q_norm": self.norms[0], "k_norm": self.norms[1], "eps": EPS}
        k, v = self.caches if caches is None else caches
        return rope_and_cache(self.qkv, self.lengths, k, v, cos=self.cos, sin=self.sin, backend=backend, **norms)

    def eager(self) -> torch.Tensor:
        """cos and sin of the positions are given: a decoder makes them once a step."""
        m = self.model
        q, k, v = (x.unflatten(-1, (-1, m.D)) for x in self.qkv.split((m.H * m.D, m.Hk * m.D, m.Hk * m.D), -1))
        if self.norms is not None:
            q, k = rms_norm_reference(q, self.norms[0], EPS), rms_norm_reference(k, self.norms[1], EPS)
        q, k = (self._rotate(x) for x in (q, k))
        self.caches[0].transpose(1, 2)[self.rows, self.positions] = k
        self.caches[1].transpose(1, 2)[self.rows, self.positions] = v
        return q

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        swapped = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return (x * self.wide[0] + swapped * self.wide[1]).to(x.dtype)


def rotation_case(id: str, where: str, model: Model, B: int, T: int, ceiling: Ceiling) -> dict[str, object]:
    """Norm, rotation and cache write of B sequences at lengths of their own."""
    problem = Rotation(model, B, T)
    want_caches, got_caches = torch.zeros_like(problem.caches), torch.zeros_like(problem.caches)
    want, got = problem.run("reference", want_caches), problem.run("triton", got_caches)
    gate(f"{id} q", relative_error(got, want), 1e-3)
    gate(f"{id} caches", relative_error(got_caches, want_caches), 1e-3)
    gate(f"{id} peer", relative_error(problem.eager(), want), 1e-3)
    calls: dict[str, Callable[[], object]] = {"ours": lambda: problem.run("triton"), "eager": problem.eager}
    norm = "norm + " if model.qk_norm else ""
    return timed(id, f"{norm}rotation + cache write, {where}, bf16", calls, 4 * problem.qkv.numel(), ceiling)


def activation_case(id: str, where: str, rows: int, inner: int, ceiling: Ceiling) -> dict[str, object]:
    """silu(gate) * up of `rows` rows."""
    gate_up = randn(rows, 2 * inner)
    gate(id, relative_error(swiglu(gate_up, backend="triton"), swiglu(gate_up, backend="reference")), 1e-3)
    calls: dict[str, Callable[[], object]] = {
        "ours": lambda: swiglu(gate_up, backend="triton"),
        "eager": lambda: swiglu(gate_up, backend="reference"),
    }
    return timed(id, f"silu(gate) * up, {where}, bf16", calls, 6 * rows * inner, ceiling)


def logits_case(id: str, where: str, rows: int, V: int, dtype: torch.dtype, ceiling: Ceiling) -> dict[str, object]:
    """Token, entropy, probability and margin of `rows` rows of logits."""
    logits = (3 * torch.randn(rows, V, device="cuda")).to(dtype)
    got, want = logit_statistics(logits, backend="triton"), logit_statistics_reference(logits)
    top = logits.gather(1, got[0][:, None])[:, 0]
    gate(f"{id} token", float((top != logits.amax(-1)).sum()), 0.0)
    for name, ours, theirs in zip(("entropy", "probability", "margin"), got[1:], want[1:]):
        gate(f"{id} {name}", relative_error(ours, theirs), 1e-5)
    calls: dict[str, Callable[[], object]] = {
        "ours": lambda: logit_statistics(logits, backend="triton"),
        "eager": lambda: logit_statistics_reference(logits),
        "argmax alone": lambda: logits.argmax(-1),
    }
    kind = str(dtype).removeprefix("torch.")
    return timed(id, f"token + entropy + probability + margin, {where}, V {V}, {kind}", calls,
                 logits.numel() * logits.element_size(), ceiling)  # fmt: skip


def layer_case(id: str, where: str, model: Model, B: int, T: int, ceiling: Ceiling) -> dict[str, object]:
    """Everything of one layer but its matrix products and attention."""
    problem = Rotation(model, B, T)
    x, residual, weight = randn(B * T, model.hidden), randn(B * T, model.hidden), randn(model.hidden)
    gate_up = randn(B * T, 2 * model.inner)

    def ours() -> None:
        add_rms_norm(x, residual, weight, EPS, backend="triton")
        problem.run("triton")
        add_rms_norm(x, residual, weight, EPS, backend="triton")
        swiglu(gate_up, backend="triton")

    def eager() -> None:
        rms_norm_reference(residual + x, weight, EPS)
        problem.eager()
        rms_norm_reference(residual + x, weight, EPS)
        swiglu(gate_up, backend="reference")

    moved = 16 * x.numel() + 4 * problem.qkv.numel() + 3 * gate_up.numel()
    calls: dict[str, Callable[[], object]] = {"ours": ours, "eager": eager}
    case = f"one layer without matrix products and attention, {where}, bf16"
    return timed(id, case, calls, moved, ceiling, layers=model.layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="result file, records of the same id are replaced")
    options = parser.parse_args()
    torch.manual_seed(0)
    one = torch.zeros(1, device="cuda")
    tiny = time_graph([lambda: one.add_(1.0)], calls_per_replay=CALLS)
    ceiling = Ceiling(copy_gbps(2 << 30), tiny.median_us)
    records = []
    for short, m in MODELS.items():
        for B, T in BATCHES:
            tail, where = f"{short}-b{B}-t{T}", f"{m.name}, B {B} T {T}"
            records.append(norm_case(f"G1-{tail}", where, B * T, m.hidden, ceiling))
            records.append(rotation_case(f"G2-{tail}", where, m, B, T, ceiling))
            records.append(activation_case(f"G3-{tail}", where, B * T, m.inner, ceiling))
            records.append(layer_case(f"G5-{tail}", where, m, B, T, ceiling))
    for rows in (1, 16, 80):
        for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
            records.append(logits_case(f"G4-n{rows}-{name}", f"N {rows}", rows, MODELS["8b"].V, dtype, ceiling))
    large, where = MODELS["8b"], f"{MODELS['8b'].name}, {MANY_ROWS} rows"
    records.append(norm_case("G1-many", where, MANY_ROWS, large.hidden, ceiling))
    records.append(rotation_case("G2-many", where, large, 16, MANY_ROWS // 16, ceiling))
    records.append(activation_case("G3-many", where, MANY_ROWS, large.inner, ceiling))
    finish(records, options.out)


if __name__ == "__main__":
    main()
