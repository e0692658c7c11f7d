"""Writes a trace: meta.json first, then one Parquet part per table and finished document.

Every part appears whole or not at all, and a document's `rounds` part comes last, so a killed recording loses at most
the documents in flight and a second call with the same configuration goes on where it stopped.
"""

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from specdial.engine.trace.meta import read_meta
from specdial.engine.trace.schema import COSTS, COSTS_SCHEMA, LATER_COLUMNS, MODEL_MARK, PARTS, TABLES, TRACE_SCHEMA
from specdial.policies.artifact import TEMPORARY, write_bytes_atomic, write_json_atomic
from specdial.policies.errors import UserError

Columns = Mapping[str, "np.ndarray[Any, Any] | list[Any]"]


class TraceWriter:
    """Appends finished documents to a trace directory."""

    def __init__(self, out: Path, meta: dict[str, Any]) -> None:
        """Start a trace or resume one. Raises UserError when the directory holds a trace made otherwise."""
        self.out, self.model_digest = out, meta["model"]["digest"]
        path = out / "meta.json"
        for left in out.glob(f".*{TEMPORARY}"):  # by a killed recording
            left.unlink()
        content = {"schema": TRACE_SCHEMA, **meta}
        if path.exists():
            found = read_meta(out, TRACE_SCHEMA, "trace")
            if _identity(found) != _identity(json.loads(json.dumps(content))):
                raise UserError(f"{out} holds a trace of another recording", "choose another out= or delete it")
        else:
            write_json_atomic(path, content)

    def finished(self) -> set[int]:
        """Documents whose every part is on disk, of the kinds that any document has."""
        parts = [{int(part.stem.split("-")[1]) for part in self.out.glob(f"{name}-*.parquet")} for name in PARTS]
        return set.intersection(*(found for found in parts if found)) if parts[0] else set()

    def write(self, doc: int, tables: Mapping[str, Columns]) -> None:
        """Write one finished document's tables; columns are given by name, in any order."""
        for name in TABLES:
            if name in tables:
                path = self.out / f"{name}-{doc:05d}.parquet"
                write_table(path, tables[name], TABLES[name], of_model=self.model_digest)


def write_costs(out: Path, meta: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Write a cost table: costs.parquet, then meta.json that names it complete."""
    columns = {field.name: [{**LATER_COLUMNS, **row}[field.name] for row in rows] for field in COSTS}
    write_table(out / "costs.parquet", columns, COSTS)
    write_json_atomic(out / "meta.json", {"schema": COSTS_SCHEMA, **meta})


def write_table(path: Path, columns: Columns, schema: pa.Schema, *, of_model: str | None = None) -> None:
    """Write columns as one Parquet file of exactly this schema, atomically. of_model: a digest to mark it with."""
    count = len(next(iter(columns.values())))
    later = {name: [value] * count for name, value in LATER_COLUMNS.items()}
    arrays = [pa.array({**later, **columns}[field.name], type=field.type, from_pandas=False) for field in schema]
    marked = schema if of_model is None else schema.with_metadata({MODEL_MARK: of_model})
    write_parquet(path, pa.Table.from_arrays(arrays, schema=marked))


def write_parquet(path: Path, table: pa.Table) -> None:
    """Write a table atomically, with the page checksums that reading verifies."""
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    write_bytes_atomic(path, sink.getvalue())


def _identity(meta: dict[str, Any]) -> dict[str, Any]:
    """What must agree for a recording to be resumed: everything but when, where and on what it was started."""
    kept = {k: v for k, v in meta.items() if k not in ("provenance", "hardware")}
    return {**kept, "config": {k: v for k, v in (meta.get("config") or {}).items() if k != "out"}}
