"""Part of a trace as a trace of its own: some of its documents, without the paths of the machine that recorded it."""

import json
import shutil

from specdial.engine.trace.reader import read_trace
from specdial.policies.artifact import write_json_atomic


def part_of(trace, out, documents):
    """Copy a trace directory's documents of these numbers to `out`, which must not exist. Returns its bytes.

    The config is left out: it names the model's file and the output folder. Nothing that is read from a trace is in it.
    """
    meta = json.loads((trace / "meta.json").read_text(encoding="utf-8"))
    kept = [d for d in meta["documents"] if d["doc"] in documents]
    out.mkdir(parents=True)
    for number in documents:
        for part in trace.glob(f"*-{number:05d}.parquet"):
            shutil.copy(part, out / part.name)
    write_json_atomic(out / "meta.json", {**meta, "documents": kept, "config": None})
    read_trace(out)
    return sum(path.stat().st_size for path in out.iterdir())
