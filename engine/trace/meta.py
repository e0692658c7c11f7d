"""Reads meta.json of a trace or a cost table, and holds it to the parts that readers rely on.

Leaves out what those parts mean, and every part that is only carried along.
"""

import json
import math
from pathlib import Path
from typing import Any

from specdial.engine.trace.schema import COSTS_SCHEMA, TRACE_SCHEMA
from specdial.policies.errors import UserError

REMEDY = "record it again"
NUMBER = (int, float)
TOKENS = range(1 << 24)  # whole numbers that readers make room for are held to what can be
# schema: {field: its kind, or what a mapping, or every item of a list, must have}
NEEDED: dict[str, dict[str, Any]] = {
    TRACE_SCHEMA: {
        "model": {"name": str, "digest": str, "kv_bytes_per_token": NUMBER},
        "documents": [{"doc": TOKENS, "split": str, "prompt_tokens": TOKENS, "new_tokens": TOKENS}],
        "arms": [{"arm": range(1 << 15), "draft_kv": {"budget": int}}],
        "policy": {"draft_kv": {"budget": int}},
        "k_max": range(1 << 10),
        "dense": bool,
        "sampling": {"temperature": NUMBER},
    },
    COSTS_SCHEMA: {"model": {"name": str, "digest": str}},
}


def read_meta(path: Path, schema: str, what: str) -> dict[str, Any]:
    """Read meta.json of a directory. Raises UserError on damage, another schema, or a part that readers need."""
    try:
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path} is not a {what}: it has no meta.json", "check the path") from None
    except (OSError, ValueError, RecursionError):
        raise UserError(f"{path}/meta.json is not readable JSON", REMEDY) from None
    found = meta.get("schema") if isinstance(meta, dict) else None
    if not isinstance(meta, dict) or found != schema:
        raise UserError(f"{path} has schema {found!r}", f"this version reads {schema!r}: update specdial or {REMEDY}")
    fault = _fault(meta, NEEDED[schema], "")
    if fault is not None:
        raise UserError(f"{path}/meta.json lacks a usable {fault}", REMEDY)
    return meta


def _fault(value: Any, needed: Any, where: str) -> str | None:
    """The dotted path of the first part that is missing or of another kind."""
    if isinstance(needed, dict):
        if not isinstance(value, dict):
            return where or "mapping"
        faults = (_fault(value.get(name), part, f"{where}.{name}".strip(".")) for name, part in needed.items())
        return next((fault for fault in faults if fault is not None), None)
    if isinstance(needed, list):
        if not isinstance(value, list):
            return where
        faults = (_fault(item, needed[0], f"{where}[{i}]") for i, item in enumerate(value))
        return next((fault for fault in faults if fault is not None), None)
    if isinstance(needed, range):
        return None if type(value) is int and value in needed else where
    fits = isinstance(value, needed) and (needed is bool or not isinstance(value, bool))
    return None if fits and (not isinstance(value, float) or math.isfinite(value)) else where
