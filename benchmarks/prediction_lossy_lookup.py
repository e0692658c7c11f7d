"""A dense trace of prompt lookup from a sparse one: what it drafts at any position follows from the text alone."""

import json

from prediction_traces import part_of

from specdial.engine.drafters.lookup import NgramIndex
from specdial.engine.trace.reader import read_trace
from specdial.engine.trace.schema import DRAFTS
from specdial.engine.trace.writer import write_table
from specdial.policies.artifact import write_json_atomic


def with_lookup(trace, out, documents, *, ngram, k_max):
    """Copy a trace whose policy drafts by lookup to `out`, with the drafts of every position of its outputs.

    They are made by the engine's own index. It has no signals: those of a recorded lookup are 0 as well.
    """
    found = read_trace(trace)
    part_of(trace, out, [d["doc"] for d in found.meta["documents"]])
    outputs = found.outputs.to_pylist()
    for document in documents:
        rest = sorted((row["position"], row["token_id"]) for row in outputs if row["doc"] == document.index)
        tokens, start = [*document.prompt_ids, *(token for _, token in rest)], len(document.prompt_ids)
        index = NgramIndex(ngram)
        rows = [row for n in range(start, len(tokens)) for row in _chain(index, tokens, n, k_max)]
        columns = {name: [row[name] for row in rows] for name in DRAFTS.names if name != "doc"}
        drafts = {**columns, "doc": [document.index] * len(rows)}
        write_table(out / f"drafts-{document.index:05d}.parquet", drafts, DRAFTS)
    meta = json.loads((out / "meta.json").read_text(encoding="utf-8"))
    write_json_atomic(out / "meta.json", {**meta, "dense": True, "k_max": k_max})


def _chain(index, tokens, n, k_max):
    """Rows of the drafts at a committed length of n."""
    none = {"round": -1, "arm": 0, "entropy_nats": 0.0, "top1_prob": 0.0, "margin": 0.0, "accept_prob": None}
    right, rows = True, []
    for depth, draft in enumerate(index.continuation(tokens[:n], k_max), start=1):
        place = n + depth - 1
        match = right and place < len(tokens) and tokens[place] == draft
        rows.append({**none, "position": n, "depth": depth, "match": match, "reached": right})
        right = match
    return rows
