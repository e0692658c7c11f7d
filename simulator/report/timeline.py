"""A trace's rounds as Chrome trace events, for Perfetto or chrome://tracing: a process a document, lanes for the parts.

Only durations are recorded, so the order inside a round is a convention: select, draft, verify, host. Documents that
were decoded as one batch start together; groups follow one another. Dense traces show a round's entropy as the arm
that its policy drafts on had it.
"""

from typing import Any

import numpy as np

from specdial.engine.trace.reader import Trace
from specdial.engine.trace.schema import PLAIN
from specdial.simulator.lanes import has_signals

LANES = ("select", "draft", "verify", "host")  # parts of a round, in order of time
Event = dict[str, Any]


def chrome_trace(trace: Trace) -> dict[str, Any]:
    """The trace as a Chrome trace document; times in microseconds, as the format wants them."""
    rows = sorted(trace.rounds.to_pylist(), key=lambda row: (row["doc"], row["round"]))
    entropy = mean_entropy(trace)
    names = {int(d["doc"]): f"{d['name']} ({d['split']})" for d in trace.meta["documents"] if "name" in d}
    events: list[Event] = []
    start_us = 0.0
    for group in _groups(trace):
        by_doc = {doc: [row for row in rows if row["doc"] == doc] for doc in group}
        ends = [start_us]
        for doc, mine in by_doc.items():
            if mine:
                events += _named(doc, names.get(doc, f"document {doc}"))
                ends.append(_add_document(events, mine, entropy, start_us))
        start_us = max(ends)
    meta = trace.meta
    about = {
        "model": meta["model"]["name"],
        "policy_digest": meta.get("policy_digest"),
        "hardware": (meta.get("hardware") or {}).get("name"),
        "order_inside_a_round": "convention: select, draft, verify, host",
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _groups(trace: Trace) -> list[list[int]]:
    """Documents that were decoded together, in order; only finished ones have rounds."""
    size = int(trace.meta.get("batch") or 1)
    documents = [int(d["doc"]) for d in trace.meta["documents"]]
    return [documents[i : i + size] for i in range(0, len(documents), size)]


def _place(doc: int, lane: str) -> Event:
    """Process and thread of a lane: from 1 on, since 0 means idle in Perfetto, and no thread number twice."""
    return {"pid": doc + 1, "tid": 10 * (doc + 1) + LANES.index(lane)}


def _named(doc: int, name: str) -> list[Event]:
    found = [{"ph": "M", "pid": doc + 1, "name": "process_name", "args": {"name": name}}]
    for i, lane in enumerate(LANES):
        found.append({"ph": "M", **_place(doc, lane), "name": "thread_name", "args": {"name": lane}})
        found.append({"ph": "M", **_place(doc, lane), "name": "thread_sort_index", "args": {"sort_index": i}})
    return found


def _add_document(
    events: list[Event], rows: list[dict[str, Any]], entropy: dict[tuple[int, int], float], start_us: float
) -> float:
    """Append one document's rounds from `start_us` on; returns when the last one ends."""
    at_us = start_us
    for row in rows:
        doc = row["doc"]
        counters = {"k": row["k"], "accepted": row["accepted"], "context": row["context_tokens"]}
        found = entropy.get((doc, row["context_tokens"]))
        if found is not None and row["k"]:
            counters["entropy"] = round(found, 4)
        for name, value in counters.items():
            unit = {"context": "tokens", "entropy": "nats"}.get(name, "drafts")
            events.append({"ph": "C", "pid": doc + 1, "ts": at_us, "name": name, "args": {unit: value}})
        for lane in LANES:
            duration_us = row[f"{lane}_us"]
            if duration_us <= 0.0:
                continue
            name = "plain step" if lane == "verify" and row["mode"] == PLAIN else lane
            arguments = {part: row[part] for part in ("round", "context_tokens", "k", "accepted", "emitted", "mode")}
            slice_ = {"ph": "X", **_place(doc, lane), "ts": at_us, "dur": duration_us, "cat": "round"}
            events.append({**slice_, "name": name, "args": arguments})
            at_us += duration_us
    return at_us


def mean_entropy(trace: Trace) -> dict[tuple[int, int], float]:
    """{(doc, position): mean entropy of the drafts that a round starting there asked for}; {} where none is known."""
    if not has_signals(trace):
        return {}
    drafts, rounds = trace.drafts, trace.rounds
    arm = drafts["arm"].to_numpy()
    column = {name: drafts[name].to_numpy()[arm == 0] for name in ("doc", "position", "depth", "entropy_nats")}
    starts = (rounds[name].to_pylist() for name in ("doc", "context_tokens", "k"))
    k = {(doc, position): asked for doc, position, asked in zip(*starts, strict=True)}
    total: dict[tuple[int, int], list[float]] = {}
    for doc, position, depth, nats in zip(*(column[name].tolist() for name in column), strict=True):
        if depth <= k.get((doc, position), 0):
            total.setdefault((doc, position), []).append(nats)
    return {place: float(np.mean(values)) for place, values in total.items()}
