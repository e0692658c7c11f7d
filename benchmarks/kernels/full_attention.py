"""Full attention and its statistics against library attention: K1 to K5.

    python3 benchmarks/kernels/full_attention.py [--only K2,K3] [--out FILE]

Random data, bf16, a correctness gate against float64 first, then medians of CUDA graph replays, every contender in the
same run. The last line is one JSON document. `floor` is the time to read K and V once at the measured read bandwidth.

Statistics by bytes, beside the 4*D of a key's K and V: page masses of 64 keys write 4*M/64, under 1 %; token masses
write 2*M, 16 % for M = T*G = 40 rows and 2 % for 4, so they cannot stay under 5 % for wide verifications.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import _peers
import torch
from _bench import Timing, copy_gbps, finish, gate, input_sets, read_gbps, record, relative_error, time_graph

from specdial.kernels.full_attention import Statistics, full_attention, full_attention_raw
from specdial.kernels.history import push_rows


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table; `bar_us` None means: no slower than the best peer of the run."""

    id: str
    model: str
    H: int
    Hk: int
    B: int
    context_tokens: int
    T: int
    bar_us: float | None


CASES = (
    Case("K1-T5", "72B shape", 64, 8, 16, 32768, 5, None),
    Case("K1-T1", "72B shape", 64, 8, 16, 32768, 1, None),
    Case("K2-T1", "8B shape", 32, 8, 1, 32768, 1, 45.0),
    Case("K2-T5", "8B shape", 32, 8, 1, 32768, 5, 45.0),
    Case("K3-T5", "8B shape", 32, 8, 1, 131072, 5, 140.0),
    Case("K4-T5", "1.5B shape", 12, 2, 16, 32768, 5, 140.0),
)
D = 128
WINDOW = 16
LAYERS = 8  # pushed together where their statistics are small
OUT_LIMIT = 4e-3  # bf16 rounds P and the output: 2 * 2^-9, against float64
MASS_LIMIT = 2e-3  # float16 scores relative to their tile's largest

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def make_inputs(case: Case) -> list[Inputs]:
    """Enough input sets to exceed the L2 cache; the block's keys end the context, as after a verification's write."""
    S = case.context_tokens
    kv_bytes = 2 * case.B * case.Hk * S * D * 2
    sets = []
    for _ in range(input_sets(kv_bytes)):
        q = torch.randn(case.B, case.T, case.H, D, device="cuda", dtype=torch.bfloat16)
        k = torch.randn(case.B, case.Hk, S, D, device="cuda", dtype=torch.bfloat16)
        v = torch.randn(case.B, case.Hk, S, D, device="cuda", dtype=torch.bfloat16)
        lengths = torch.full((case.B,), S - case.T, device="cuda", dtype=torch.int32)
        sets.append((q, k, v, lengths))
    return sets


def float64_rows(inputs: Inputs, b: int, h: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Naive attention of one kv head in float64: out [T, G, D] and token mass [T, S]."""
    q, k, v, lengths = inputs
    G, T, S = q.shape[2] // k.shape[1], q.shape[1], k.shape[2]
    rows = q[b].view(T, k.shape[1], G, D)[:, h].double()  # [T, G, D]
    scores = rows @ k[b, h].double().T * D**-0.5  # [T, G, S]
    last = lengths[b] + torch.arange(T, device="cuda")
    scores.masked_fill_(torch.arange(S, device="cuda") > last[:, None, None], float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    return weights @ v[b, h].double(), weights.sum(dim=1)


def check(case: Case, inputs: Inputs) -> None:
    """Gate outputs and both kinds of mass on the first and the last kv head."""
    G = case.H // case.Hk
    out, tokens = full_attention(*inputs, backend="triton", mass="token")
    paged, pages = full_attention(*inputs, backend="triton", mass="page")
    plain, _ = full_attention(*inputs, backend="triton")
    for b, h in ((0, 0), (case.B - 1, case.Hk - 1)):
        want, mass = float64_rows(inputs, b, h)
        for name, got in (("plain", plain), ("page", paged), ("token", out)):
            rows = got[b].view(case.T, case.Hk, G, D)[:, h]
            gate(f"{case.id} {name} out", relative_error(rows, want), OUT_LIMIT)
        gate(f"{case.id} token mass", relative_error(tokens[b, h], mass), MASS_LIMIT)
        gate(f"{case.id} page mass", relative_error(pages[b, h], mass.view(case.T, -1, 64).sum(-1)), MASS_LIMIT)


def time_calls(call: Callable[..., object], sets: list[Inputs]) -> Timing:
    """Every input set in turn inside one graph."""
    return time_graph([lambda inputs=inputs: call(*inputs) for inputs in sets], calls_per_replay=4)


def statistics_calls(case: Case) -> dict[str, Callable[..., object]]:
    """K5: the attention with statistics; what a push of its rows into the window costs is timed apart."""

    def fused(granularity: str, page: int) -> Callable[..., object]:
        return lambda *x: full_attention_raw(*x, backend="triton", granularity=granularity, page_tokens=page)

    return {"page64": fused("page", 64), "page16": fused("page", 16), "token": fused("token", 64)}


def time_push(case: Case, granularity: str, lengths: torch.Tensor) -> Timing:
    """All rows committed, pushed into a window of 16 with its sum, for LAYERS layers in one launch; per layer."""
    S, unit = case.context_tokens, 1 if granularity == "token" else 64
    layers = LAYERS if unit == 64 else 1
    batch = layers * case.B
    group = case.H // case.Hk
    shape = {"batch": batch, "kv_heads": case.Hk, "keys": S, "rows": case.T, "group": group, "device": "cuda"}
    raw = Statistics.empty(granularity, **shape)
    for buffer in (raw.log_mass, raw.lse, *(() if raw.tile_max is None else (raw.tile_max,))):
        buffer.normal_()
    ring = torch.zeros(batch, case.Hk, WINDOW, S // unit, device="cuda")
    score = torch.zeros(batch, case.Hk, S // unit, device="cuda")
    committed = torch.full((case.B,), case.T, device="cuda", dtype=torch.int32)
    whole = time_graph(
        [lambda: push_rows(ring, raw, lengths, committed, backend="triton", score=score)], calls_per_replay=8
    )
    return Timing(whole.median_us / layers, whole.p10_us / layers, whole.p90_us / layers, whole.n)


def run_case(case: Case, gbps: float) -> list[dict[str, object]]:
    """The record of one case and of its statistics."""
    sets = make_inputs(case)
    check(case, sets[0])
    kv_bytes = 2 * case.B * case.Hk * case.context_tokens * D * 2
    floor_us = round(kv_bytes / gbps / 1000.0, 1)
    ours = time_calls(lambda *x: full_attention(*x, backend="triton"), sets)
    want = full_attention(*sets[0], backend="triton")[0]
    peers = _peers.time_peers(sets, lambda peer: time_calls(peer, sets), want, flex=case.id in ("K1-T5", "K2-T5"))
    where = f"{case.model} H {case.H} Hk {case.Hk} D {D} B {case.B} context {case.context_tokens} T {case.T} bf16"
    bar = case.bar_us if case.bar_us is not None else min(v for v in peers.values() if isinstance(v, float))
    common = {"bytes": kv_bytes, "floor": floor_us}
    records = [record(case.id, where, ours.median_us, "us", spread=ours.spread, bar=bar, peers=peers, **common)]
    for name, call in statistics_calls(case).items():
        timing = time_calls(call, sets)
        more = {"extra_frac": round(timing.median_us / ours.median_us - 1.0, 4), "bar_frac": 0.05, **common}
        more["peers"] = {"off": round(ours.median_us, 3)}
        title = f"statistics {name}, {where}"
        records.append(record(f"K5-{case.id}-{name}", title, timing.median_us, "us", spread=timing.spread, **more))
        if name != "page16":
            push = time_push(case, granularity=name.removesuffix("64"), lengths=sets[0][3])
            title = f"rows of {name} pushed into a window of {WINDOW}, per layer, {where}"
            more = {"extra_frac": round((timing.median_us + push.median_us) / ours.median_us - 1.0, 4)}
            records.append(record(f"K5-{case.id}-{name}-push", title, push.median_us, "us", spread=push.spread, **more))
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="comma-separated prefixes of case ids")
    parser.add_argument("--out", type=Path, help="result file, records of the same id are replaced")
    options = parser.parse_args()
    torch.manual_seed(0)
    wanted = tuple(filter(None, options.only.split(","))) or ("K",)
    gbps = read_gbps()
    copied = copy_gbps()
    print(f"read {gbps:.0f} GB/s, copy {copied:.0f} GB/s")
    records = [record("K0-bandwidth", "sum over 4 GiB; copy as peer", gbps, "GB/s", peers={"copy": round(copied, 1)})]
    for case in CASES:
        if case.id.startswith(wanted):
            records += run_case(case, gbps)
            torch.cuda.empty_cache()
    finish(records, options.out)


if __name__ == "__main__":
    main()
