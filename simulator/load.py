"""Opens what a verb names: cost tables that belong to a trace; and says which trace it was."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from specdial.engine.trace.reader import Trace, read_costs
from specdial.policies.artifact import digest_of
from specdial.policies.errors import UserError
from specdial.simulator.costs import CostModel

REPEATED = "documents repeated, intervals too narrow"


def load_costs(path: str | None, trace: Trace) -> CostModel:
    """The cost table at `path`, or the trace's own rounds. Raises UserError when it times another model."""
    if path is None:
        return CostModel.from_rounds(trace)
    table = read_costs(path)
    theirs, ours = table.meta.get("model", {}), trace.meta["model"]
    if theirs.get("digest") != ours["digest"]:
        raise UserError(
            f"costs of another model: {path} timed {theirs.get('name')}, {trace.path} recorded {ours['name']}",
            "calibrate that model or give its trace",
        )
    return CostModel.from_table(table)


def caveats(trace: Trace, costs: CostModel) -> list[str]:
    """What any result of these must say: random weights, acceptance that was set instead of found, another machine."""
    return [*trace_caveats(trace), *cost_caveats(trace, costs)]


def trace_caveats(trace: Trace) -> list[str]:
    """What any use of a trace must say."""
    known = {
        "random weights": trace.meta["model"].get("random"),
        "synthetic acceptance": trace.meta.get("synthetic_acceptance"),
        REPEATED: repeats(trace.meta),
    }
    return [words for words, holds in known.items() if holds]


def repeats(meta: Mapping[str, Any]) -> bool:
    """Is a trace mixed of documents that come more than once? Where it does not say how many differ, they may."""
    return "mixed" in meta and meta["mixed"].get("distinct", 0) < len(meta["documents"])


def cost_caveats(trace: Trace, costs: CostModel) -> list[str]:
    """What costs add to what their trace says."""
    random = costs.meta.get("model", {}).get("random") and not trace.meta["model"].get("random")
    known = {"random weights": random, "costs under synthetic acceptance": costs.meta.get("acceptance")}
    return [*(words for words, holds in known.items() if holds), *([costs.assumed] if costs.assumed else [])]


def marked(title: str, words: list[str]) -> str:
    """A table's title with its caveats."""
    return f"{title} ({', '.join(words)})" if words else title


def trace_digest(trace: Trace) -> str:
    """sha256 of what was recorded: settings, output tokens, matches. When and where it was started does not count."""
    hashed = hashlib.sha256()
    hashed.update(digest_of({k: v for k, v in trace.meta.items() if k != "provenance"}).encode())
    for column in (trace.outputs["token_id"], trace.drafts["match"], trace.rounds["k"]):
        hashed.update(np.ascontiguousarray(column.to_numpy()).tobytes())
    return hashed.hexdigest()
