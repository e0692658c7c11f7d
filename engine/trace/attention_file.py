"""Files of an attention trace: heads.parquet (the ranking of every head), a rows-NNNNN.parquet for each document, and
meta.json, written last, which names the directory complete. The reader refuses damage, one clear error per fault.
"""

import io
import json
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from specdial.engine.trace.attention import (
    ATTENTION_SCHEMA,
    HEADS,
    REMEDY,
    ROWS,
    AttentionMeta,
    AttentionTrace,
    DocumentRows,
    HeadScore,
    KeptRows,
    RowRun,
)
from specdial.engine.trace.reader import read_table
from specdial.engine.trace.writer import write_table
from specdial.policies.artifact import write_bytes_atomic, write_json_atomic
from specdial.policies.errors import UserError
from specdial.policies.fields import parse, to_plain


def write_rows(out: Path, doc: int, kept: dict[tuple[str, int, int], KeptRows], first_position: int) -> None:
    """Write one document's part.

    Keys ascend within a row, so their differences are small, and neither they nor weights repeat enough for a
    dictionary: so encoded, a part takes two thirds of the bytes and of the time to write, and half the time to read.
    """
    parts = list(kept.values())
    counts = [len(part.mass) for part in parts]
    starts = np.cumsum([0, *(len(part.keys) for part in parts)])
    offsets = np.concatenate([*(part.offsets[:-1] + at for part, at in zip(parts, starts)), starts[-1:]])
    lists = {
        "keys": (np.concatenate([part.keys for part in parts]), pa.int32()),
        "weights": (np.concatenate([part.weights for part in parts]), pa.float16()),
    }
    ends = pa.array(offsets, type=pa.int32())
    columns: list[pa.Array] = [
        pa.array([source for (source, _, _), n in zip(kept, counts) for _ in range(n)], type=pa.string()),
        pa.array(np.repeat([layer for _, layer, _ in kept], counts), type=pa.int16()),
        pa.array(np.repeat([head for _, _, head in kept], counts), type=pa.int16()),
        pa.array(np.concatenate([first_position + np.arange(n) for n in counts]), type=pa.int32()),
        pa.array(np.concatenate([part.mass for part in parts]), type=pa.float32()),
        *(pa.ListArray.from_arrays(ends, pa.array(values, type=kind)) for values, kind in lists.values()),
    ]
    sink = io.BytesIO()
    pq.write_table(
        pa.Table.from_arrays(columns, schema=ROWS), sink, compression="zstd", write_page_checksum=True,
        use_dictionary=["source"], column_encoding={"keys.list.element": "DELTA_BINARY_PACKED"},
    )  # fmt: skip
    write_bytes_atomic(out / f"rows-{doc:05d}.parquet", sink.getvalue())


def write_attention(out: Path, meta: AttentionMeta, heads: Iterable[HeadScore]) -> None:
    """Write the ranking, then meta.json; the documents' parts must be there."""
    plain = [to_plain(head) for head in heads]
    write_table(out / "heads.parquet", {field.name: [row[field.name] for row in plain] for field in HEADS}, HEADS)
    write_json_atomic(out / "meta.json", {"schema": ATTENTION_SCHEMA, **to_plain(meta)})


def read_attention(path: str | Path) -> AttentionTrace:
    """Read an attention trace. Raises UserError naming the file and the fault."""
    path = Path(path)
    meta = _read_meta(path)
    heads = [HeadScore(**row) for row in read_table(path / "heads.parquet", HEADS).to_pylist()]
    return AttentionTrace(path, meta, heads, [_read_rows(path, run) for run in meta.documents])


def _read_meta(path: Path) -> AttentionMeta:
    try:
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path} is not an attention trace: it has no meta.json", "check the path") from None
    except (OSError, ValueError, RecursionError):
        raise UserError(f"{path}/meta.json is not readable JSON", REMEDY) from None
    found = meta.pop("schema", None) if isinstance(meta, dict) else None
    if found != ATTENTION_SCHEMA:
        raise UserError(f"{path} has schema {found!r}, this version reads {ATTENTION_SCHEMA!r}", REMEDY)
    try:
        parsed = parse(AttentionMeta, {k: v for k, v in meta.items() if k in {f.name for f in fields(AttentionMeta)}})
    except UserError as error:
        raise UserError(f"{path}/meta.json: {error.cause}", REMEDY) from None
    if not parsed.documents:
        raise UserError(f"{path} has no documents", REMEDY)
    return parsed


def _read_rows(path: Path, run: RowRun) -> DocumentRows:
    """One document's part, held to what meta.json says of it."""
    part = path / f"rows-{run.doc:05d}.parquet"
    table = read_table(part, ROWS).combine_chunks()
    position, mass = table["position"].to_numpy(), table["mass"].to_numpy()
    lists = [table[name].combine_chunks() for name in ("keys", "weights")]
    offsets = lists[0].offsets.to_numpy().astype(np.int64)
    keys, weights = (column.values.to_numpy() for column in lists)
    lengths = np.diff(offsets)
    sound = (
        table.num_rows > 0
        and table.num_rows % run.rows == 0
        and np.array_equal(offsets, lists[1].offsets.to_numpy())
        and np.array_equal(position, np.tile(run.first_position + np.arange(run.rows), table.num_rows // run.rows))
        and len(keys) == len(weights) == offsets[-1]
        and (lengths > 0).all()
        and np.isfinite(mass).all()
        and (mass >= 0).all()
        and np.isfinite(weights).all()
        and (weights >= 0).all()
        and (keys >= 0).all()
        and (keys <= np.repeat(position, lengths)).all()
    )
    if not sound:
        raise UserError(f"{part} does not hold the rows that meta.json tells of", REMEDY)
    every = list(zip(*(table[name].to_pylist() for name in ("source", "layer", "head"))))
    names = every[:: run.rows]
    if len(set(names)) != len(names) or every != [name for name in names for _ in range(run.rows)]:
        raise UserError(f"{part} mixes or repeats the rows of a head", REMEDY)
    kept = {}
    for i, name in enumerate(names):
        rows = slice(i * run.rows, (i + 1) * run.rows)
        at = offsets[rows.start : rows.stop + 1]
        entries = slice(at[0], at[-1])
        kept[name] = KeptRows(keys[entries], weights[entries], at - at[0], mass[rows])
    return DocumentRows(run, kept)
