"""Times selection and page scores (K8): exact top-k with ties against torch.topk, every row of a model in one call.

Run: `python3 benchmarks/kernels/selection.py [--out FILE]`. Every timed result is first compared with the
reference (a stable sort). Leaves out quality: what a selection is worth is the simulator's business.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from _bench import finish, gate, input_sets, read_gbps, record, relative_error, time_graph

from specdial.kernels.page_summary import score_pages, update_pages
from specdial.kernels.selection import select
from specdial.kernels.selection.reference import select_reference

SINK, RECENT = 4, 16
FULL_VERIFY_US = 4300.0  # the 1.5B model at B 16, 32k, T 5: 28 layers of full attention at .15 ms
CASES = {  # id -> (layers, batch, kv heads, keys per row, budget)
    "K8": (28, 16, 2, 32768, 512),
    "K8-8b-b1": (32, 1, 8, 32768, 512),
    "K8-8b-b1-128k": (32, 1, 8, 131072, 512),
    "K8-pages": (28, 16, 2, 2048, 256),
    "K8-one-row": (1, 1, 1, 32768, 512),
}


def attention_like(shape: tuple[int, ...]) -> torch.Tensor:
    """Scores as a softmax leaves them: positive, heavy-tailed, many tiny."""
    return torch.softmax(torch.randn(shape, device="cuda") * 3.0, dim=-1)


def same(name: str, got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Selections are exact: any differing index stops the benchmark."""
    wrong = sum(int((a != b).sum()) for a, b in zip(got, want))
    gate(name, float(wrong), 0.0)


def check(case: str) -> None:
    """Random, tied and constant scores, full and short lengths, twice for races."""
    layers, batch, heads, keys, budget = CASES[case]
    layers = min(layers, 2)
    for kind in ("attention", "ties", "constant"):
        scores = attention_like((layers, batch, heads, keys))
        if kind == "ties":
            scores = torch.randint(0, 50, scores.shape, device="cuda").float()
        elif kind == "constant":
            scores = torch.zeros_like(scores)
        for shortest in (keys, 1):
            lengths = torch.randint(shortest, keys + 1, (batch,), device="cuda", dtype=torch.int32)
            want = select_reference(scores, lengths, budget=budget, sink=SINK, recent=RECENT)
            hidden = torch.arange(keys, device="cuda") >= lengths[:, None, None]
            poisoned = scores.masked_fill(hidden, float("nan"))
            for _ in range(2):
                got = select(poisoned, lengths, budget=budget, sink=SINK, recent=RECENT, backend="triton")
                same(f"{case} {kind} {shortest}", got, want)


def timed(case: str, gbps: float) -> list[dict[str, object]]:
    """The record of one case, with torch.topk beside it."""
    layers, batch, heads, keys, budget = CASES[case]
    shape = (layers, batch, heads, keys)
    bytes_read = 4 * layers * batch * heads * keys
    sets = [attention_like(shape) for _ in range(min(64, input_sets(bytes_read)))]
    lengths = torch.full((batch,), keys, device="cuda", dtype=torch.int32)

    def ours(scores: torch.Tensor) -> Callable[[], object]:
        return lambda: select(scores, lengths, budget=budget, sink=SINK, recent=RECENT, backend="triton")

    time = time_graph([ours(scores) for scores in sets], calls_per_replay=8)
    tied = [torch.randint(0, 50, shape, device="cuda").float() for _ in range(min(2, len(sets)))]
    tied_time = time_graph([ours(scores) for scores in tied], calls_per_replay=8)
    topk = time_graph([lambda s=s: torch.topk(s, budget, dim=-1, sorted=False) for s in sets], replays=10)
    ordered = time_graph([lambda s=s: torch.topk(s, budget, dim=-1).indices.sort(dim=-1) for s in sets], replays=10)
    bar = {"bar": 0.05 * FULL_VERIFY_US} if case == "K8" else {}
    return [
        record(
            case,
            f"select {budget} of {keys}, {layers} layers x {heads} heads x B {batch}, float32",
            time.median_us,
            "us",
            spread=time.spread,
            bytes=bytes_read,
            floor=round(bytes_read / gbps / 1000.0, 2),
            peers={"torch.topk": round(topk.median_us, 1), "torch.topk + ascending order": round(ordered.median_us, 1)},
            tied_scores_us=round(tied_time.median_us, 1),
            **bar,
        )
    ]


def pages(gbps: float) -> list[dict[str, object]]:
    """Page scores and the incremental summary update, 1.5B shape, one layer."""
    B, T, H, Hk, D, S, page = 16, 5, 12, 2, 128, 32768, 16
    k = torch.randn(B, Hk, S, D, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(B, T, H, D, device="cuda", dtype=torch.bfloat16)
    low = torch.full((B, Hk, S // page, D), float("nan"), device="cuda", dtype=torch.bfloat16)
    high = low.clone()
    empty = torch.zeros(B, device="cuda", dtype=torch.int32)
    lengths = torch.randint(S // 2, S - T, (B,), device="cuda", dtype=torch.int32)
    update_pages(k, low, high, empty, lengths, page=page, max_tokens=S, backend="triton")
    want_low, want_high = torch.full_like(low, float("nan")), torch.full_like(low, float("nan"))
    update_pages(k, want_low, want_high, empty, lengths, page=page, max_tokens=S, backend="reference")
    gate("page minima", float((low.nan_to_num(7.0) != want_low.nan_to_num(7.0)).sum()), 0.0)
    gate("page maxima", float((high.nan_to_num(7.0) != want_high.nan_to_num(7.0)).sum()), 0.0)
    sets = [(q.clone(), low.clone(), high.clone()) for _ in range(input_sets(2 * low.numel() * 2))]
    records = []
    for rule in ("specpv", "quest"):
        args = {"page": page, "rule": rule, "pool": "mean"}
        got = score_pages(q, low, high, lengths, backend="triton", **args)
        want = score_pages(q, low, high, lengths, backend="reference", **args)
        seen = want.isfinite()
        gate(f"page scores {rule}", relative_error(got[seen], want[seen]), 1e-3)
        time = time_graph(
            [lambda s=s, args=args: score_pages(s[0], s[1], s[2], lengths, backend="triton", **args) for s in sets]
        )
        bytes_read = 2 * 2 * Hk * D * int(((lengths + page - 1) // page).sum())
        records.append(
            record(
                f"PAGES-{rule}", "page scores, H 12, Hk 2, D 128, B 16, T 5, pages of 16, 16k to 32k keys, one layer",
                time.median_us, "us", spread=time.spread, bytes=bytes_read, floor=round(bytes_read / gbps / 1000.0, 2),
            )
        )  # fmt: skip
    added = torch.full((B,), T, device="cuda", dtype=torch.int32)
    time = time_graph(
        [
            lambda s=s: update_pages(k, s[1], s[2], lengths, added, page=page, max_tokens=T, backend="triton")
            for s in sets
        ]
    )
    case = "page summaries after 5 committed tokens, H 12, Hk 2, D 128, B 16, pages of 16, one layer"
    return [*records, record("PAGES-update", case, time.median_us, "us", spread=time.spread)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="results file to update")
    options = parser.parse_args()
    torch.manual_seed(0)
    gbps = read_gbps()
    for case in CASES:
        check(case)
    records = [row for case in CASES for row in timed(case, gbps)]
    finish([*records, *pages(gbps)], options.out)


if __name__ == "__main__":
    main()
