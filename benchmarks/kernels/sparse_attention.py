"""Times sparse attention (K6, K7) beside library calls, full attention and a compact copy of the selected keys.

Run: `python3 benchmarks/kernels/sparse_attention.py [--out FILE] [--only ID ...]`. Selections are random over a 32k
cache and change with every call, so that the rows come from memory and not from the L2 cache: a gather's worst case.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from _bench import finish, gate, input_sets, read_gbps, record, relative_error, time_graph
from _compact import copy_rows
from torch.nn.attention import SDPBackend, sdpa_kernel

from specdial.kernels.full_attention import full_attention
from specdial.kernels.sparse_attention import SparseWorkspace
from specdial.kernels.sparse_attention.reference import sparse_attention_reference
from specdial.kernels.sparse_attention.triton import SparseConfig, plan, sizes, sparse_attention_triton

S = 32768
D = 128
FULL_RATIO = 27.85


@dataclass(frozen=True, slots=True)
class Case:
    """One shape; `bar_us` is the time it must reach, where the plan names one."""

    B: int
    H: int
    Hk: int
    T: int
    keys: int
    page: int = 1
    bar_us: float | None = None


CASES = {
    "K6": Case(16, 64, 8, 5, 512, bar_us=17.5),
    "K7": Case(16, 12, 2, 1, 512, bar_us=12.0),
    "K6-T1": Case(16, 64, 8, 1, 512),
    "K6-page16": Case(16, 64, 8, 5, 512, page=16),
    "K7-T5": Case(16, 12, 2, 5, 512),
    "K6-8b-b1": Case(1, 32, 8, 5, 512),
    "K6-8b-b1-4096": Case(1, 32, 8, 5, 4096),
}


@dataclass(frozen=True, slots=True)
class Inputs:
    """What one call reads; the caches are shared between calls, the selected rows are not."""

    q: torch.Tensor  # [B, T, H, D]
    indices: torch.Tensor  # [B, Hk, keys/page]


class Bench:
    """Tensors of one case and the calls to time on them."""

    def __init__(self, case: Case) -> None:
        c = self.case = case
        room = c.T + 16
        self.k = torch.randn(c.B, c.Hk, S + room, D, device="cuda", dtype=torch.bfloat16)
        self.v = torch.randn(c.B, c.Hk, S + room, D, device="cuda", dtype=torch.bfloat16)
        self.lengths = torch.full((c.B,), S, device="cuda", dtype=torch.int32)
        self.counts = torch.full((c.B,), c.keys // c.page, device="cuda", dtype=torch.int32)
        self.bytes = (
            2 * (2 * c.B * c.Hk * (c.keys + c.T) * D + 2 * c.B * c.T * c.H * D) + 4 * c.B * c.Hk * c.keys // c.page
        )
        self.sets = [self._inputs() for _ in range(min(48, input_sets(self.bytes)))]
        self.config = plan(c.B * c.Hk, c.T * c.H // c.Hk, c.keys + c.T, torch.bfloat16)

    def _inputs(self) -> Inputs:
        c = self.case
        q = torch.randn(c.B, c.T, c.H, D, device="cuda", dtype=torch.bfloat16)
        order = torch.rand(c.B, c.Hk, S // c.page, device="cuda").topk(c.keys // c.page, dim=-1).indices
        return Inputs(q, order.sort(dim=-1).values.to(torch.int32))

    def workspace(self, config: SparseConfig) -> SparseWorkspace:
        c = self.case
        return SparseWorkspace.allocate(*sizes(c.B * c.Hk, c.T * c.H // c.Hk, D, config), "cuda")

    def gather(self, config: SparseConfig) -> Callable[[Inputs], torch.Tensor]:
        """Our kernel on the full cache."""
        workspace = self.workspace(config)
        return lambda x: sparse_attention_triton(
            x.q, self.k, self.v, x.indices, self.counts, tail_start=self.lengths, lengths=self.lengths,
            page=self.case.page, workspace=workspace, config=config,
        )  # fmt: skip

    def packed(self, q: torch.Tensor) -> torch.Tensor:
        """q [B, T, H, D] -> [B, Hk, T*G, D]: the group as rows, so that a library reads K and V once."""
        c = self.case
        return q.view(c.B, c.T, c.Hk, -1, D).permute(0, 2, 1, 3, 4).reshape(c.B, c.Hk, -1, D)

    def gather_sdpa(self, x: Inputs) -> torch.Tensor:
        """The library way: gather rows, then SDPA (the few tail keys are left out, to its advantage)."""
        rows = x.indices.long()
        if self.case.page > 1:
            rows = (rows[..., None] * self.case.page + torch.arange(self.case.page, device="cuda")).flatten(2)
        rows = rows[..., None].expand(-1, -1, -1, D)
        return F.scaled_dot_product_attention(self.packed(x.q), self.k.gather(2, rows), self.v.gather(2, rows))

    def full_sdpa(self, x: Inputs) -> torch.Tensor:
        return F.scaled_dot_product_attention(self.packed(x.q), self.k[:, :, :S], self.v[:, :, :S])

    def full_ours(self, x: Inputs) -> torch.Tensor:
        return full_attention(x.q, self.k, self.v, self.lengths, backend="triton")[0]

    def time(self, call: Callable[[Inputs], object], replays: int = 30):
        return time_graph([lambda x=x: call(x) for x in self.sets], replays=replays, calls_per_replay=32)


def check(bench: Bench, config: SparseConfig) -> float:
    """Error against float64 on two sequences, equal bits on a second run."""
    x = bench.sets[0]
    out = bench.gather(config)(x)
    again = bench.gather(config)(x)
    gate("second run differs", float((out != again).sum()), 0.0)
    first = slice(0, min(2, bench.case.B))
    want = sparse_attention_reference(
        x.q[first].double(), bench.k[first].double(), bench.v[first].double(), x.indices[first], bench.counts[first],
        tail_start=bench.lengths[first], lengths=bench.lengths[first], page=bench.case.page,
    )  # fmt: skip
    error = relative_error(out[first], want)
    gate(f"{config}", error, 6e-3)
    return error


def compact(bench: Bench) -> dict[str, float]:
    """The alternative to a gather: copy the selected rows once a round, then read them densely every draft step."""
    c = bench.case
    copies = [
        tuple(torch.empty(c.B, c.Hk, c.keys + c.T + 16, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        for _ in bench.sets
    ]
    pairs = list(zip(bench.sets, copies))
    copied = time_graph(
        [lambda x=x, kv=kv: copy_rows(bench.k, bench.v, x.indices, *kv) for x, kv in pairs], calls_per_replay=32
    )
    for x, (k, v) in pairs:
        copy_rows(bench.k, bench.v, x.indices, k, v)
        k[:, :, c.keys :].normal_()
        v[:, :, c.keys :].normal_()
    want = bench.k.gather(2, pairs[0][0].indices.long()[..., None].expand(-1, -1, -1, D))
    gate("compact copy", float((pairs[0][1][0][:, :, : c.keys] != want).sum()), 0.0)
    lengths = torch.full_like(bench.lengths, c.keys)
    dense = torch.arange(c.keys, device="cuda", dtype=torch.int32).expand(c.B, c.Hk, -1)
    workspace = bench.workspace(bench.config)
    read = time_graph(
        [
            lambda x=x, kv=kv: sparse_attention_triton(
                x.q, *kv, dense, bench.counts, tail_start=lengths, lengths=lengths, config=bench.config,
                workspace=workspace,
            )
            for x, kv in pairs
        ],
        calls_per_replay=32,
    )  # fmt: skip
    found = {"compact copy, once a round": copied.median_us, "same kernel on the compact copy": read.median_us}
    try:
        full = [lambda x=x, kv=kv: full_attention(x.q, *kv, lengths, backend="triton") for x, kv in pairs]
        found["full_attention on the compact copy"] = time_graph(full, calls_per_replay=32).median_us
    except Exception as error:
        print(f"  full_attention on the compact copy failed: {str(error)[:200]}", flush=True)
    return found


def measure(name: str, case: Case, gbps: float) -> dict[str, object]:
    """Gate, time and peers of one case."""
    bench = Bench(case)
    error = check(bench, bench.config)
    time = bench.time(bench.gather(bench.config))
    peers = {"gather + SDPA": bench.time(bench.gather_sdpa, 10).median_us}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        with sdpa_kernel(backend):
            try:
                peers[f"full, SDPA packed {backend.name.split('_')[0].lower()}"] = bench.time(
                    bench.full_sdpa, 5
                ).median_us
            except RuntimeError as failed:
                print(f"  {name} full SDPA {backend.name}: {str(failed)[:80]}", flush=True)
    try:
        peers["full_attention (ours)"] = bench.time(bench.full_ours, 5).median_us
    except Exception as failed:
        print(f"  {name} full_attention failed: {str(failed)[:200]}", flush=True)
    full_us = min(us for peer, us in peers.items() if peer.startswith("full"))
    if case.page == 1:
        peers |= compact(bench)
    copied, read = peers.get("compact copy, once a round"), peers.get("same kernel on the compact copy")
    if copied and read:  # draft steps a round after which the copy would have paid for itself
        steps = copied / (time.median_us - read) if time.median_us > read else float("inf")
        print(f"  {name}: a compact copy pays from {steps:.0f} draft steps a round", flush=True)
    if name == "K6":
        print(f"  K6 is {full_us / time.median_us:.2f}x faster than the best full call (bar {FULL_RATIO}x)", flush=True)
    return record(
        name,
        f"sparse, {case.keys} keys per kv head (page {case.page}), H {case.H}, Hk {case.Hk}, D {D}, B {case.B}, "
        f"T {case.T}, 32k cache, bf16",
        time.median_us,
        "us",
        spread=time.spread,
        bytes=bench.bytes,
        floor=round(bench.bytes / gbps / 1000.0, 2),
        peers={peer: round(us, 2) for peer, us in peers.items()},
        full_over_sparse=round(full_us / time.median_us, 2),
        relative_error=float(f"{error:.2e}"),
        config=str(bench.config),
        **({"bar": case.bar_us} if case.bar_us else {}),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="results file to update")
    parser.add_argument("--only", nargs="*", default=list(CASES), help="ids to run")
    options = parser.parse_args()
    torch.manual_seed(0)
    gbps = read_gbps()
    finish([measure(name, CASES[name], gbps) for name in options.only], options.out)


if __name__ == "__main__":
    main()
