"""The timeline: the format's structure, nothing overlapping in a lane, and not a microsecond gained or lost."""

import dataclasses
import json
import re
import struct
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

from specdial.engine.trace.reader import Trace, read_trace
from specdial.engine.trace.schema import DRAFTS, OUTPUTS, ROUNDS
from specdial.simulator.lanes import read_record
from specdial.simulator.report import entropy
from specdial.simulator.report.tensorboard import masked_crc, write_events
from specdial.simulator.report.timeline import LANES, chrome_trace
from specdial.simulator.verbs import report

RECORDED = Path(__file__).parents[2] / "data" / "traces" / "smollm2-135m-code-512"


def batched():
    """Two documents decoded together, the second shorter, then a third alone; drafts of the first one's first round."""

    def row(doc, number, k, us):
        times = {"draft_us": us if k else 0.0, "verify_us": 2 * us, "select_us": 0.0, "host_us": 1.0}
        counts = {"context_tokens": 10 + number, "batch": 2, "k": k, "accepted": 0, "emitted": 1}
        return {"doc": doc, "round": number, **counts, "mode": "full", "rounds_since_full": 0, **times}

    rounds = [row(0, 0, 2, 10.0), row(0, 1, 2, 20.0), row(1, 0, 2, 10.0), row(7, 0, 0, 5.0)]
    signals = {"top1_prob": 0.5, "margin": 0.1, "match": False, "accept_prob": None, "reached": True}
    drafts = [
        {"doc": 0, "round": 0, "position": 10, "arm": 0, "depth": depth, "entropy_nats": nats, **signals}
        for depth, nats in ((1, 1.0), (2, 2.0), (3, 99.0))
    ]
    meta = {"model": {"name": "m"}, "batch": 2, "documents": [{"doc": 0}, {"doc": 1}, {"doc": 7}]}
    table = pa.Table.from_pylist
    return Trace(Path("x"), meta, table(rounds, ROUNDS), table(drafts, DRAFTS), OUTPUTS.empty_table())


@pytest.mark.parametrize("make", [batched, lambda: read_trace(RECORDED)])
def test_structure_and_time(make):
    trace = make()
    events = json.loads(json.dumps(chrome_trace(trace)))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["ph"] for event in events} == {"X", "M", "C"}
    assert all(event["pid"] > 0 and event.get("tid", 1) > 0 for event in events)  # 0 means idle in Perfetto
    assert all(set(event) >= {"pid", "ts", "name", "args"} for event in events if event["ph"] != "M")
    threads = [(event["tid"], event["args"]["name"]) for event in events if event["name"] == "thread_name"]
    lanes, totals, ends = dict(threads), defaultdict(float), {}
    assert len(lanes) == len(threads) == len(LANES) * len({event["pid"] for event in slices})
    for event in slices:
        assert event["ts"] >= ends.get(event["pid"], 0.0) - 1e-6  # nothing of a document overlaps
        ends[event["pid"]] = event["ts"] + event["dur"]
        totals[lanes[event["tid"]]] += event["dur"]
    for lane in LANES:
        assert totals[lane] == pytest.approx(sum(trace.rounds[f"{lane}_us"].to_pylist()))


def test_a_batch_starts_together_and_counters_tell_the_round():
    events = chrome_trace(batched())["traceEvents"]
    starts = {}
    for event in events:
        if event["ph"] == "X":
            starts.setdefault(event["pid"], event["ts"])
    assert starts == {1: 0.0, 2: 0.0, 8: 92.0}  # (10 + 20 + 1) + (20 + 40 + 1): after the longest of the batch
    counters = [(e["name"], *e["args"].values()) for e in events if e["ph"] == "C" and (e["pid"], e["ts"]) == (1, 0.0)]
    assert counters == [("k", 2), ("accepted", 0), ("context", 10), ("entropy", 1.5)]  # of the two drafts asked for


def test_what_logs_did_not_say_of_drafts_is_not_shown():
    """As nothing, not as 0 nats."""
    trace = read_trace(RECORDED)
    record = read_record(trace)
    assert entropy.section(SimpleNamespace(record=record)).figures
    trace.meta["imported"] = {"signals": False}
    assert not {e["name"] for e in chrome_trace(trace)["traceEvents"]} & {"entropy"}
    assert not entropy.section(SimpleNamespace(record=record)).figures


def test_the_verb_writes_both(tmp_path, capsys):
    pytest.importorskip("plotly")
    found = report.run({"out": str(tmp_path / "r.html"), "trace": str(RECORDED)})
    assert found["sections"] == ["breakdown", "entropy", "provenance"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.html", "r.trace.json"]
    written = json.loads((tmp_path / "r.trace.json").read_text())
    assert written["otherData"]["model"] == "smollm2-135m"
    out = capsys.readouterr().out
    assert "no data for front: specdial tune" in out
    assert dataclasses.fields(report.Settings)[0].name == "out"


def scalars_of(path):
    """{tag: [(step, value), ...]} of an event file, each record's checksums held against CRC-32C."""
    raw, found = path.read_bytes(), defaultdict(list)
    while raw:
        length = struct.unpack("<Q", raw[:8])[0]
        content = raw[12 : 12 + length]
        checks = struct.unpack("<I", raw[8:12]) + struct.unpack("<I", raw[12 + length : 16 + length])
        assert checks == (masked_crc(raw[:8]), masked_crc(content))
        for tag, value in re.findall(rb"\x0a.([a-z_]+)\x15(.{4})", content, re.DOTALL):
            found[tag.decode()].append((content[10] if content[9] == 0x10 else None, struct.unpack("<f", value)[0]))
        raw = raw[16 + length :]
    return found


def test_rounds_as_tensorboards_events(tmp_path):
    crc = masked_crc(b"123456789") - 0xA282EAD8 & 0xFFFFFFFF
    assert (crc << 15 | crc >> 17) & 0xFFFFFFFF == 0xE3069283  # the check value of CRC-32C
    assert write_events(batched(), tmp_path) == 3
    first, second, third = (scalars_of(path) for path in sorted(tmp_path.glob("*/events.out.tfevents.*")))
    assert first["k"] == [(0, 2.0), (1, 2.0)]
    assert first["entropy_nats"] == [(0, 1.5)]
    assert first["context_tokens"] == [(0, 10.0), (1, 11.0)]
    assert first["tokens_per_s"] == [(0, pytest.approx(1e6 / 31.0)), (1, pytest.approx(1e6 / 61.0))]
    assert second["accepted"] == [(0, 0.0)]
    assert third.keys() == {"k", "accepted", "context_tokens", "tokens_per_s"}
