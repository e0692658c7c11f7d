"""Scoring-head estimates against full attention over all layers: K9.

    python3 benchmarks/kernels/head_scores.py [--out FILE]

Dustin's history: 4 query heads of one layer, the last committed of 5 verified rows, B 16, 32k keys. The bar is 1 % of
full attention over all layers of the same model, measured in the same run. Last line is one JSON document.

By bytes, K of n kv heads is n / (2 Hk) of a layer: 0.3 % of the 72B shape for four of them, but 1.8 % of the 1.5B
shape for both of its two, over the bar before any overhead.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from _bench import finish, gate, input_sets, read_gbps, record, relative_error, time_graph

from specdial.kernels.full_attention import full_attention
from specdial.kernels.head_scores import head_scores


@dataclass(frozen=True, slots=True)
class Case:
    """A model shape and the scoring heads of one of its layers."""

    id: str
    model: str
    H: int
    Hk: int
    layers: int
    heads: tuple[int, ...]


CASES = (
    Case("K9", "72B shape, heads of 4 kv heads", 64, 8, 80, (3, 12, 33, 60)),
    Case("K9-one-kv", "72B shape, heads of 1 kv head", 64, 8, 80, (8, 10, 13, 15)),
    Case("K9-1.5B", "1.5B shape, heads of 2 kv heads", 12, 2, 28, (1, 4, 7, 10)),
    Case("K9-1.5B-one-kv", "1.5B shape, heads of 1 kv head", 12, 2, 28, (1, 2, 4, 5)),
)
B, S, T, D = 16, 32768, 5, 128


def run_case(case: Case, gbps: float) -> dict[str, object]:
    """Gate against float64, then time the estimate and one layer's full attention."""
    sets = []
    for _ in range(input_sets(B * case.Hk * S * D * 2 // 4)):
        q = torch.randn(B, T, case.H, D, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(B, case.Hk, S, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        sets.append((q, k, v, torch.full((B,), S - T, device="cuda", dtype=torch.int32)))
    weights = torch.zeros(B, T, device="cuda")
    weights[:, 3] = 1.0  # four of five rows committed
    q, k, _, lengths = sets[0]
    got = head_scores(q, k, lengths, case.heads, backend="triton", row_weights=weights)
    G = case.H // case.Hk
    visible = S - T + 4
    for b in (0, B - 1):
        rows = torch.stack([k[b, h // G, :visible].double() @ q[b, 3, h].double() for h in case.heads]) * D**-0.5
        want = torch.nn.functional.pad(torch.softmax(rows, dim=-1).sum(0), (0, S - visible))
        gate(case.id, relative_error(got[b], want), 1e-5)

    def estimate(x: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return head_scores(x[0], x[1], x[3], case.heads, backend="triton", row_weights=weights)

    ours = time_graph([lambda x=x: estimate(x) for x in sets], calls_per_replay=4)
    full = time_graph([lambda x=x: full_attention(*x, backend="triton") for x in sets], calls_per_replay=4)
    kv_heads = len({h // G for h in case.heads})
    read = B * kv_heads * S * D * 2
    share = ours.median_us / (full.median_us * case.layers)
    where = f"{case.model}, {len(case.heads)} heads, B {B} context {S} T {T} bf16"
    return record(
        case.id, where, ours.median_us, "us", spread=ours.spread, bytes=read, floor=round(read / gbps / 1000.0, 1),
        share_frac=round(share, 5), bar_frac=0.01, layers=case.layers,
        peers={"full attention, one layer": round(full.median_us, 2)},
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="result file, records of the same id are replaced")
    options = parser.parse_args()
    torch.manual_seed(0)
    gbps = read_gbps(2 << 30)
    records = []
    for case in CASES:
        records.append(run_case(case, gbps))
        torch.cuda.empty_cache()
    finish(records, options.out)


if __name__ == "__main__":
    main()
