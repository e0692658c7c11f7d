"""Timing helpers shared by the kernel benchmarks: graph replays, ceilings, correctness gate, result records.

A benchmark is a list of closures, one per input set, together larger than the L2 cache. Leaves out profiling and plots.
"""

import datetime
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import triton

ROOT = Path(__file__).resolve().parents[2]
L2_BYTES = 60 << 20  # H200


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds for one call: the median and the 10th and 90th percentile of `n` graph replays."""

    median_us: float
    p10_us: float
    p90_us: float
    n: int

    @property
    def spread(self) -> list[float]:
        return [round(self.p10_us, 3), round(self.p90_us, 3)]


def input_sets(set_bytes: int, least: int = 1) -> int:
    """How many input sets to rotate so that a call never finds its inputs in the L2 cache."""
    return max(least, -(-3 * L2_BYTES // max(set_bytes, 1)))


def time_graph(calls: Sequence[Callable[[], object]], *, replays: int = 30, calls_per_replay: int = 0) -> Timing:
    """Time one call: all `calls` captured in one CUDA graph (repeated up to `calls_per_replay`), replayed and divided.

    Launch overhead of the host is excluded, the gap between kernels inside a graph is included.
    """
    repeats = max(1, -(-calls_per_replay // len(calls)))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:3]:  # compile, create handles
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    return _time_repeats(graph.replay, calls=repeats * len(calls), replays=replays)


def _time_repeats(once: Callable[[], object], *, calls: int, replays: int) -> Timing:
    for _ in range(3):
        once()
    torch.cuda.synchronize()
    starts = [torch.cuda.Event(enable_timing=True) for _ in range(replays)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(replays)]
    for start, end in zip(starts, ends):
        start.record()
        once()
        end.record()
    torch.cuda.synchronize()
    times_us = sorted(start.elapsed_time(end) * 1000.0 / calls for start, end in zip(starts, ends))
    last = len(times_us) - 1
    return Timing(times_us[last // 2], times_us[last // 10], times_us[last * 9 // 10], len(times_us))


def read_gbps(total_bytes: int = 4 << 30) -> float:
    """Measured read bandwidth: a sum over a large buffer."""
    buffer = torch.empty(total_bytes // 4, dtype=torch.float32, device="cuda").normal_()
    return total_bytes / time_graph([buffer.sum], replays=10).median_us / 1000.0


def copy_gbps(total_bytes: int = 4 << 30) -> float:
    """Measured copy bandwidth, bytes read plus bytes written."""
    source = torch.empty(total_bytes // 8, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    # A kernel of its own: memcpy nodes of a graph are slower.
    copy = time_graph([lambda: torch.mul(source, 1.0, out=target)], replays=10)
    return total_bytes / copy.median_us / 1000.0


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """‖got - want‖ / ‖want‖ in float64; NaN or a wrong shape never passes."""
    if got.shape != want.shape:
        return float("inf")
    error = ((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-300)).item()
    return error if error == error else float("inf")


def gate(name: str, error: float, limit: float) -> None:
    """Stop the benchmark when a result is wrong: a wrong kernel has no time."""
    print(f"  gate {name}: error {error:.2e} (limit {limit:.0e})", flush=True)
    if not error <= limit:
        sys.exit(f"{name}: relative error {error:.3e} exceeds {limit:.0e}")


def commit() -> str:
    """The commit the code was run on: SPECDIAL_COMMIT where the checkout travels without its history, else git."""
    named = os.environ.get("SPECDIAL_COMMIT")
    if named:
        return named
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else "unknown"


def record(id: str, case: str, value: float, unit: str, **more: object) -> dict[str, object]:
    """One result record; `more` may hold spread, bytes, floor, peers, bar and notes."""
    return {
        "id": id,
        "case": case,
        "value": round(value, 4),
        "unit": unit,
        **more,
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0]},
        "command": "python3 " + " ".join([_relative(sys.argv[0]), *sys.argv[1:]]),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }


def _relative(script: str) -> str:
    path = Path(script).resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def finish(records: list[dict[str, object]], path: Path | None) -> None:
    """Print the table, replace records of the same id in `path` (if given), and end with one JSON line."""
    print(f"{'id':<14}{'value':>12} {'unit':<6}{'floor':>10}  peers")
    for row in records:
        print(f"{row['id']:<14}{row['value']:>12} {row['unit']:<6}{row.get('floor') or '':>10}  {row.get('peers', {})}")
    if path is not None:
        kept = json.loads(path.read_text()) if path.exists() else []
        fresh = {row["id"] for row in records}
        merged = [row for row in kept if row["id"] not in fresh] + records
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(merged, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(records, ensure_ascii=False))
