"""What real_text.py writes: one record for plain decoding of a cell, one for each policy, and a short line for both.

Speed is given twice: over the whole run (`value`, `speedup`), and while every sequence still decodes (`full_*`), since
in the tail of a fixed batch most of it waits for its slowest member. Over the better of our plain and vLLM's plain
only the second is given: vLLM was measured with a full batch.
"""

import statistics
from dataclasses import dataclass

from _bench import record
from _engine_bench import BANDWIDTH, accounts

from specdial.engine.models.shapes import SHAPES
from specdial.policies.schema import Policy

# vLLM 0.23's plain decode of the 1.5B shape at 31k tokens on one H200, measured elsewhere: {batch: tokens/s}.
VLLM = {1: 1e3 / 2.37, 16: 3103.0, 64: 4139.0}
VLLM_NAME = "vllm-0.23 plain, 1.5B 31k (measured elsewhere)"
BATCH_IDS = {1: "E6", 16: "E4", 64: "E5"}  # of speculative records; plain ones are E3, StreamingLLM's E7


@dataclass(frozen=True, slots=True)
class Entry:
    """A policy to measure: a short name for ids, and the work item it belongs to where the batch does not say."""

    name: str
    policy: Policy
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """What is measured together: workload, context tokens, batch."""

    workload: str
    context: int
    batch: int

    @property
    def suffix(self):
        return f"{self.workload}-{self.context // 1000}k-B{self.batch}"

    def case(self, name, facts):
        return f"{name}, {facts['model']}, {self.workload}, B {self.batch}, context {self.context}"


def speeds(runs):
    """Medians of both speeds over repeats, and the spread of the first."""
    whole, full = [r.tokens_per_s for r in runs], [r.full_tokens_per_s for r in runs]
    return statistics.median(whole), statistics.median(full), [round(min(whole), 1), round(max(whole), 1)]


def plain_record(cell, runs, step_bytes, checks, facts):
    """runs: timed repeats; checks: what the margins and repeats said of themselves; facts: what all records share."""
    whole, full, spread = speeds(runs)
    return record(
        f"{facts['prefix']}E3-{cell.suffix}",
        cell.case("plain", facts),
        whole,
        "tok/s",
        spread=spread,
        full_tokens_per_s=round(full, 1),
        ms_per_step=round(cell.batch / full * 1e3, 4),
        bytes=step_bytes,
        floor_ms=round(step_bytes / BANDWIDTH * 1e3, 3),
        sequences=len(runs[0].outputs),
        **accounts([r for run in runs for r in run.rounds]),
        **checks,
        peers=peers(cell, facts),
        about=facts["about"],
    )


def policy_record(cell, entry, timed, exact, facts):
    """timed: repeats of every policy and of `plain`; exact: what became of losslessness."""
    runs, others = timed[entry.name], peers(cell, facts)
    (whole, full, spread), (plain_whole, plain_full, _) = speeds(runs), speeds(timed["plain"])
    best = max(plain_full, *others.values()) if others else None
    return record(
        f"{facts['prefix']}{entry.id or BATCH_IDS.get(cell.batch, 'E4')}-{cell.suffix}-{entry.name}",
        cell.case(entry.name, facts),
        whole,
        "tok/s",
        spread=spread,
        full_tokens_per_s=round(full, 1),
        speedup=round(whole / plain_whole, 3),
        full_speedup=round(full / plain_full, 3),
        full_speedup_over_best=best and round(full / best, 3),
        lossless=entry.policy.lossless,
        sequences=len(runs[0].outputs),
        **accounts([r for run in runs for r in run.rounds]),
        **exact,
        peers={"plain (ours)": round(plain_whole, 1), **others},
        about=facts["about"],
    )


def is_1_5b(config):
    """Has a model the sizes of the one that vLLM was measured with?"""
    shape = SHAPES["qwen2.5-coder-1.5b"]
    return all(getattr(config, n) == getattr(shape, n) for n in ("layers", "hidden", "kv_heads", "intermediate"))


def peers(cell, facts):
    """vLLM's tokens/s where it was measured on this shape, context and batch; else nothing."""
    known = facts["is_1_5b"] and cell.context == 31000 and cell.batch in VLLM
    return {VLLM_NAME: round(VLLM[cell.batch], 1)} if known else {}


def show(records):
    """One short line a record: speed, speedups (whole, full, over the better plain) or ms a step, then the rest."""
    for r in records:
        line = f"{r['id']:<36}{r['value']:>9.1f} "
        if "speedup" in r:
            over = r["full_speedup_over_best"]
            margin = r["noise"]["margin"]
            line += f"x{r['speedup']:.2f} full x{r['full_speedup']:.2f}" + (f" best x{over:.2f}" if over else "")
            line += f" acc {r['mean_accepted']:.2f}/{r['mean_k']:.1f} differ {r['differing']}"
            line += f" beyond {r['differing_beyond_noise']} noise {margin['p99']:.3f}/{margin['max']:.3f}"
        else:
            line += f"{r['ms_per_step']} ms, floor {r['floor_ms']}"
        print(line, "us", "/".join(f"{us:.0f}" for us in r["parts_us"].values()), flush=True)
