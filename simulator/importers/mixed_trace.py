"""A recorded trace whose documents follow another mix of context lengths: what replay and tune then weigh.

Documents of the recording are taken over and over, so many from each range of contexts as the mix gives it generated
tokens. Ranges without a recorded document are left out, and their share is told. Intervals over repeated documents are
too narrow by what is repeated.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from specdial.engine.trace.reader import Trace
from specdial.engine.trace.schema import TABLES
from specdial.engine.trace.writer import TraceWriter
from specdial.policies.errors import UserError


def write_mixed(out: Path, trace: Trace, mix: Sequence[dict[str, Any]], documents: int) -> dict[str, Any]:
    """Write so many documents of a trace; returns what share of the mix they cover. Raises UserError where none do."""
    finished = set(pc.unique(trace.rounds["doc"]).to_pylist())
    by_range: dict[int, list[dict[str, Any]]] = {}
    for entry in trace.meta["documents"]:
        if entry["doc"] in finished:
            by_range.setdefault(2 ** (int(entry["prompt_tokens"]).bit_length() - 1), []).append(entry)
    covered = [row for row in mix if row["from_context_tokens"] in by_range]
    share = sum(row["tokens_frac"] for row in covered)
    if not covered:
        have = ", ".join(f"{low}..{2 * low - 1}" for low in sorted(by_range))
        raise UserError(f"trace {trace.path} has contexts of {have}, the requests have others", "record such contexts")
    wanted = np.array([row["tokens_frac"] for row in covered]) / share * documents
    counts = np.floor(wanted).astype(int)
    for place in np.argsort(counts - wanted, kind="stable")[: documents - counts.sum()]:
        counts[place] += 1
    chosen: list[dict[str, Any]] = []
    for row, count in zip(covered, counts.tolist(), strict=True):
        pool = by_range[row["from_context_tokens"]]
        chosen += [pool[i % len(pool)] for i in range(count)]
    entries = [
        {**entry, "doc": i, "name": f"{entry.get('name', entry['doc'])} as {i}"} for i, entry in enumerate(chosen)
    ]
    distinct = len({e["doc"] for e in chosen})
    mixed = {"mix": list(mix), "covered_frac": share, "source": trace.path.name, "distinct": distinct}
    writer = TraceWriter(out, {**trace.meta, "documents": entries, "mixed": mixed})
    for number, entry in enumerate(chosen):
        writer.write(number, {name: _rows(getattr(trace, name), entry["doc"], number) for name in TABLES})
    return {"documents": documents, "distinct": distinct, "covered_frac": share}


def _rows(table: pa.Table, doc: int, number: int) -> dict[str, Any]:
    mine = table.filter(pc.equal(table["doc"], doc))
    columns = {name: mine[name].combine_chunks() for name in mine.column_names}
    return {**columns, "doc": np.full(mine.num_rows, number)}
