"""Reads traces and cost tables, and refuses what is damaged: one clear error per fault, naming the file.

Leaves out interpretation: the simulator turns the tables into arrays.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from specdial.engine.trace.meta import REMEDY, read_meta
from specdial.engine.trace.schema import (
    COSTS,
    COSTS_SCHEMA,
    KEYS,
    LATER_COLUMNS,
    MODEL_MARK,
    NON_NEGATIVE,
    OPS,
    PARTS,
    PROBES,
    TABLES,
    TRACE_SCHEMA,
)
from specdial.policies.errors import UserError


@dataclass(frozen=True, slots=True)
class Trace:
    """A recording in memory. `meta` is meta.json; tables hold finished documents only, sorted by their keys."""

    path: Path
    meta: dict[str, Any]
    rounds: pa.Table
    drafts: pa.Table
    outputs: pa.Table
    probes: pa.Table = dataclasses.field(default_factory=PROBES.empty_table)


@dataclass(frozen=True, slots=True)
class CostTable:
    """Measured costs in memory: `rows` has the columns of schema.COSTS."""

    path: Path
    meta: dict[str, Any]
    rows: pa.Table


def read_trace(path: str | Path) -> Trace:
    """Read a trace directory. Raises UserError naming the part and the fault."""
    path = Path(path)
    meta = read_meta(path, TRACE_SCHEMA, "trace")
    finished = sorted(path.glob("rounds-*.parquet"))
    if not finished:
        raise UserError(f"trace {path} has no finished document", "let record finish at least one")
    tables = {}
    for name, schema in TABLES.items():
        parts = [path / part.name.replace("rounds", name, 1) for part in finished]
        there = [part for part in parts if part.exists()]
        if there and len(there) < len(parts) and name in PARTS:
            raise UserError(f"{next(part for part in parts if part not in there)} is missing", REMEDY)
        found = [read_table(part, schema, of_model=meta["model"]["digest"]) for part in there]
        tables[name] = pa.concat_tables(found) if found else schema.empty_table()
        check_table(tables[name], name, path)
    known = {int(d["doc"]) for d in meta["documents"]}
    strangers = set(pc.unique(tables["rounds"]["doc"]).to_pylist()) - known
    if strangers:
        raise UserError(f"trace {path} holds rounds of unknown documents {sorted(strangers)}", "do not mix traces")
    return Trace(path, meta, tables["rounds"], tables["drafts"], tables["outputs"], tables["probes"])


def read_costs(path: str | Path) -> CostTable:
    """Read a cost table directory. Raises UserError naming the fault."""
    path = Path(path)
    meta = read_meta(path, COSTS_SCHEMA, "cost table")
    rows = read_table(path / "costs.parquet", COSTS)
    check_table(rows, "costs", path)
    unknown = set(pc.unique(rows["op"]).to_pylist()) - set(OPS)
    if unknown:
        raise UserError(f"cost table {path} has unknown operations {sorted(unknown)}", "calibrate again")
    return CostTable(path, meta, rows)


def read_table(path: Path, schema: pa.Schema, *, of_model: str | None = None) -> pa.Table:
    """Read one Parquet part and hold it to its schema. Extra columns are dropped, missing ones are an error.

    of_model: the digest that its mark must be; a part from before there were marks has none.

    A column younger than the table gets the value that held before there was one (schema.LATER_COLUMNS).
    """
    try:
        table = pq.read_table(path, page_checksum_verification=True)
        table.validate(full=True)  # text that is not UTF-8, lists that end before they start
    except FileNotFoundError:
        raise UserError(f"{path} is missing", REMEDY) from None
    except (OSError, ValueError, pa.ArrowException):  # ValueError: names of columns that are not UTF-8
        raise UserError(f"{path} is damaged", f"delete that part and {REMEDY}") from None
    mark = (table.schema.metadata or {}).get(MODEL_MARK)
    if of_model is not None and mark is not None and mark != of_model.encode():
        raise UserError(f"{path} was recorded with another model than meta.json names", "do not mix traces")
    columns = []
    for field in schema:
        if field.name not in table.column_names and field.name in LATER_COLUMNS:
            columns.append(pa.array([LATER_COLUMNS[field.name]] * table.num_rows, type=field.type))
            continue
        if field.name not in table.column_names:
            raise UserError(f"{path} lacks the column {field.name}", REMEDY)
        column = table[field.name]
        if column.type != field.type:
            raise UserError(f"{path} column {field.name} is {column.type}, not {field.type}", REMEDY)
        if not field.nullable and column.null_count:
            raise UserError(f"{path} column {field.name} has empty values", REMEDY)
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=schema)


def check_table(table: pa.Table, name: str, path: Path) -> None:
    """Refuse NaN, negative times and duplicate keys."""
    for field in table.schema:
        if not pa.types.is_floating(field.type) or field.name == "accept_prob":
            continue
        values = table[field.name].drop_null().to_numpy()
        if not np.isfinite(values).all():
            raise UserError(f"{path} {name}.{field.name} holds NaN or infinity", REMEDY)
        if field.name in NON_NEGATIVE and (values < 0).any():
            raise UserError(f"{path} {name}.{field.name} holds a negative value", REMEDY)
    keys = list(KEYS[name])
    distinct = table.select(keys).group_by(keys).aggregate([]).num_rows
    if distinct != table.num_rows:
        raise UserError(f"{path} {name} repeats a row of ({', '.join(keys)})", REMEDY)
