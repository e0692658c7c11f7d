"""S5: simulated rounds per second on one core, memory against the number of policies, loading time of a large trace.
S4: how far the closed form is from the speeds that SparseSpec-L and Dustin print, from their other printed numbers.

Synthetic traces (simulator.synthetic), real replay with prices and sums, no bootstrap. Rates and loading are medians
of five runs, memory is one. The last line of output is one JSON document; --save merges it into
benchmarks/results/simulator.json.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from specdial.engine.trace.reader import read_costs, read_trace
from specdial.policies.schema import Policy, policy_from_mapping
from specdial.simulator.costs import CostModel
from specdial.simulator.lanes import Record, read_record
from specdial.simulator.printed import dustin, sparsespec_l
from specdial.simulator.replay import replay
from specdial.simulator.synthetic import Shape, draft_kv, write_synthetic_costs, write_trace

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "simulator.json"
REPEATS = 5
BAR = {"fixed": 1_000_000, "entropy": 200_000, "confidence": 200_000, "rate": 200_000}  # rounds a second


def policies(kind: str, count: int) -> list[Policy]:
    """`count` distinct policies of one kind."""
    settings: dict[str, Callable[[int], dict[str, Any]]] = {
        "fixed": lambda i: {"k": 1 + i % 8},
        "entropy": lambda i: {"k_max": 1 + i % 8, "threshold": -0.2 + i / count},
        "confidence": lambda i: {"k_max": 1 + i % 8, "threshold": i / count},
        "rate": lambda i: {"k_max": 1 + i % 8, "gamma": 0.05 + i / count},
    }
    kv = {"budget": 256, "sink": draft_kv(256).sink, "recent": draft_kv(256).recent}
    return [
        policy_from_mapping({"name": f"{kind}-{i}", "controller": {"kind": kind, **settings[kind](i)}, "draft_kv": kv})
        for i in range(count)
    ]


def rounds_per_s(record: Record, costs: CostModel, kind: str) -> tuple[float, list[float]]:
    """Median and range over the repeats; every replay must emit every recorded token."""
    tried = policies(kind, 1000)
    tokens = int((record.documents.end - record.documents.start).sum())
    rates = []
    for _ in range(REPEATS + 1):
        begin = time.process_time()
        outcomes = replay(record, costs, tried, bootstrap=0)
        seconds = time.process_time() - begin
        if any(outcome.tokens != tokens or outcome.level != "exact" for outcome in outcomes):
            sys.exit(f"{kind}: a replay lost tokens")
        rates.append(sum(outcome.rounds for outcome in outcomes) / seconds)
    rates = rates[1:]  # the first warms the caches
    return statistics.median(rates), [min(rates), max(rates)]


def peak_bytes(record: Record, costs: CostModel, count: int) -> int:
    """Peak of what one replay allocates, its own results included."""
    tried = policies("rate", count)
    tracemalloc.start()
    replay(record, costs, tried, bootstrap=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def load_s(path: Path) -> tuple[list[float], int]:
    """Seconds to read and arrange a trace, of every repeat, and how many drafts it holds."""
    seconds, drafts = [], 0
    for _ in range(REPEATS):
        begin = time.perf_counter()
        record = read_record(read_trace(path))
        seconds.append(time.perf_counter() - begin)
        drafts = record.trace.drafts.num_rows
        del record
    return seconds, drafts


def result(id: str, case: str, value: float, unit: str, **more: object) -> dict[str, object]:
    """One record in the results' form."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "id": id,
        "case": case,
        "value": round(value, 3),
        "unit": unit,
        **more,
        "hardware": cpu_name(),
        "versions": {"numpy": np.__version__, "python": platform.python_version()},
        "command": " ".join(["python3 benchmarks/simulator.py", *sys.argv[1:]]),
        "commit": head.stdout.strip() or "unknown",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }


def cpu_name() -> str:
    """The processor's name, one core of it."""
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if (info.exists())
        else []
    )
    return f"{names[0] if names else platform.processor() or platform.machine()}, one core"


def printed_speeds() -> list[dict[str, object]]:
    """S4: the worst relative error of each printed table."""
    cases = {
        "S4-sparsespec-l": (sparsespec_l(), "its fixed-k table from one draft and one verification cost"),
        "S4-dustin": (dustin(), "its 8B row, batch 16, 32k tokens, from what a round costs in plain steps"),
    }
    return [
        result(
            id, f"closed form against printed tokens/s: {case}", 100.0 * found.worst_frac, "%", bar=5.0,
            printed=found.printed.tolist(), recomputed=[round(float(v), 2) for v in found.recomputed],
        )
        for id, (found, case) in cases.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="merge into benchmarks/results/simulator.json")
    parser.add_argument("--printed", action="store_true", help="S4 only")
    options = parser.parse_args()
    records = printed_speeds()
    if not options.printed:
        records += throughput()
    for row in records:
        print(f"{row['id']:<16}{row['value']:>16} {row['unit']:<9}{row['case']}")
    if options.save:
        kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
        fresh = {row["id"] for row in records}
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        merged = [row for row in kept if row["id"] not in fresh] + records
        RESULTS.write_text(json.dumps(merged, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(records, ensure_ascii=False))


def throughput() -> list[dict[str, object]]:
    """S5: rounds a second, memory, loading time."""
    records = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        shape = Shape(documents=24, prompt_tokens=4000, new_tokens=256)
        write_trace(out / "trace", shape)
        write_synthetic_costs(out / "costs", (2000, 4000, 8000), (1, 4), shape)
        record, costs = read_record(read_trace(out / "trace")), CostModel.from_table(read_costs(out / "costs"))
        for kind, bar in BAR.items():
            value, spread = rounds_per_s(record, costs, kind)
            case = f"{kind} controller, 1000 policies x 24 documents x 256 tokens"
            records.append(result(f"S5-{kind}", case, value, "rounds/s", spread=[round(v) for v in spread], bar=bar))
        small, large = peak_bytes(record, costs, 1000), peak_bytes(record, costs, 4000)
        case = "peak memory of a replay, 4000 rate policies over 1000"
        records.append(result("S5-memory", case, large / small, "ratio", bytes=large))
        write_trace(out / "long", Shape(documents=100, prompt_tokens=100_000, new_tokens=1000))
        seconds, drafts = load_s(out / "long")
        case = f"load a trace of 100 documents x 100k tokens, {drafts} drafts"
        spread = [round(min(seconds), 3), round(max(seconds), 3)]
        records.append(result("S5-load", case, statistics.median(seconds), "s", spread=spread))
    return records


if __name__ == "__main__":
    main()
