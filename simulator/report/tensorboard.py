"""A trace's rounds as TensorBoard's event files, a run a document: k, accepted, context, entropy and tokens per second.

Written here byte by byte, so that the tensorboard package is only needed to look at them. An event file is a sequence
of records (length, its checksum, bytes, theirs; TFRecord), each an Event message of tensorflow/core/util/event.proto.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specdial.engine.trace.reader import Trace
from specdial.policies.artifact import write_bytes_atomic
from specdial.simulator.report.timeline import LANES, mean_entropy

VARINT, WIDE, BYTES, NARROW = 0, 1, 2, 5  # wire types of protocol buffers
EVENT_TIME, EVENT_STEP, EVENT_VERSION, EVENT_SUMMARY = 1, 2, 3, 5  # fields of Event
SUMMARY_VALUE, VALUE_TAG, VALUE_SCALAR = 1, 1, 2  # of Summary and Summary.Value
POLYNOMIAL = 0x82F63B78  # CRC-32C, reflected


def write_events(trace: Trace, folder: Path) -> int:
    """One directory a document under `folder`; returns how many. The step is the round, the time that of the rounds."""
    entropy = mean_entropy(trace)
    named = {int(d["doc"]): str(d["name"]) for d in trace.meta["documents"] if "name" in d}
    documents: dict[int, list[dict[str, Any]]] = {}
    for row in trace.rounds.to_pylist():
        documents.setdefault(row["doc"], []).append(row)
    for doc, rows in documents.items():
        rows.sort(key=lambda row: row["round"])
        records, at_s = [_record(_double(EVENT_TIME, 0.0) + _bytes(EVENT_VERSION, b"brain.Event:2"))], 0.0
        for row in rows:
            taken_s = sum(row[f"{lane}_us"] for lane in LANES) / 1e6
            at_s += taken_s
            scalars = {"k": row["k"], "accepted": row["accepted"], "context_tokens": row["context_tokens"]}
            scalars |= {"tokens_per_s": row["emitted"] / taken_s} if taken_s else {}
            nats = entropy.get((doc, row["context_tokens"]))
            scalars |= {"entropy_nats": nats} if nats is not None and row["k"] else {}
            event = _double(EVENT_TIME, at_s) + _varint(EVENT_STEP, int(row["round"]))
            records.append(_record(event + _bytes(EVENT_SUMMARY, b"".join(_values(scalars)))))
        place = folder / f"{doc:05d}-{_file_name(named.get(doc, 'document'))}"
        write_bytes_atomic(place / "events.out.tfevents.0.specdial", b"".join(records))
    return len(documents)


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)[:60]


def _values(scalars: dict[str, float]) -> Iterator[bytes]:
    for tag, value in scalars.items():
        scalar = bytes([VALUE_SCALAR << 3 | NARROW]) + struct.pack("<f", value)
        yield _bytes(SUMMARY_VALUE, _bytes(VALUE_TAG, tag.encode()) + scalar)


def _double(field: int, value: float) -> bytes:
    return bytes([field << 3 | WIDE]) + struct.pack("<d", value)


def _varint(field: int, value: int) -> bytes:
    return bytes([field << 3 | VARINT]) + _length(value)


def _bytes(field: int, content: bytes) -> bytes:
    return bytes([field << 3 | BYTES]) + _length(len(content)) + content


def _length(value: int) -> bytes:
    """A whole number in groups of seven bits, the lowest first."""
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def _record(content: bytes) -> bytes:
    length = struct.pack("<Q", len(content))
    return length + struct.pack("<I", masked_crc(length)) + content + struct.pack("<I", masked_crc(content))


def masked_crc(content: bytes) -> int:
    """CRC-32C of the bytes, turned and shifted as TFRecord has it."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc = TABLE[(crc ^ byte) & 255] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _row(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ POLYNOMIAL * (byte & 1)
    return byte


TABLE = [_row(byte) for byte in range(256)]
