"""Edits that bytes describe: of a file's bytes, or of one value in its JSON. Any bytes are some edits.

So one driver serves Hypothesis, which shrinks them, atheris, which is guided by what they reach, and plain chance.
"""

import contextlib
import copy
import json
from io import BytesIO
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

ODD_NUMBERS = [0, 1, -1, 3, 2**31 - 1, 2**31, 2**32 - 1, 2**60, 2**63 - 1, -(2**63), 2**64, 10**40, 1e308, 5e-324, 0.1]
ODD_VALUES: list[Any] = [
    *ODD_NUMBERS, None, True, False, "", "x", "../../../outside", "/outside", "\x00", "é" * 300, "\ud800", [], {}, [[]],
    [0] * 40, {"": None}, [{}], ["x"], [1, "x", None], float("nan"), float("inf"), "NaN", "1e999", "llama", "default",
    [[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]], {"kind": "fixed"}, {"a": {"b": {"c": [None]}}},
]  # fmt: skip
TEXTS = [
    b"null", b"true", b"-1", b"1e999", b"NaN", b"[]", b"{}", b'""', b"\x00", b"\xff", b"../../", b"/", b"&a ", b"*a",
    b"!!python/object/apply:os.system ['true']", b"!!binary ", b"<<: ", b"? ", b"- ", b"  ", b"\n", b":", b'"', b"'",
    b"[" * 400, b"{" * 400, b'{"":' * 400, b"99999999999999999999", b"\xf0\x9f\x92\xa9", b"---\n", b"%YAML 1.1\n",
    *(number.to_bytes(8, "little") for number in (0, 1, 2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 1)),
    *(number.to_bytes(4, "little") for number in (0, 1, 8, 9, 255, 2**31, 2**32 - 1)),
]  # fmt: skip


def edited(seed: bytes, data: bytes) -> bytes:
    """`seed` after the edits that `data` describes, four bytes each: what, where (two), with what."""
    out = bytearray(seed)
    for at in range(0, len(data) - 3, 4):
        what, place, which = data[at] % 8, int.from_bytes(data[at + 1 : at + 3]) * len(out) >> 16, data[at + 3]
        text = TEXTS[which % len(TEXTS)]
        if what == 0 and out:
            out[place] ^= which or 1
        elif what == 1:
            del out[place : place + 1 + which % 32]
        elif what == 2:
            out[place:place] = text
        elif what == 3:
            out[place : place + len(text)] = text
        elif what == 4:
            out[place:place] = out[place : place + 1 + which]
        elif what == 5:
            del out[place:]
        elif what == 6 and out:
            start = which * len(out) >> 8
            out[place : place + 16] = out[start : start + 16]
        elif out:
            out[place] = which
    return bytes(out)


def reshaped(seed: bytes, data: bytes) -> bytes:
    """JSON with some of its values changed or gone, three bytes each; the last odd byte means an edit of the text."""
    value = json.loads(seed)
    for at in range(0, len(data) - 2, 3):
        places = [*_places(value, ())]
        if not places:
            break
        *way, last = places[int.from_bytes(data[at : at + 2]) * len(places) >> 16]
        parent = value
        for step in way:
            parent = parent[step]
        odd = copy.deepcopy(ODD_VALUES[data[at + 2] % len(ODD_VALUES)])
        if data[at + 2] < 16:
            del parent[last]
        elif data[at + 2] < 32 and isinstance(parent, dict):
            parent[f"{last}x"] = odd
        elif data[at + 2] < 48 and isinstance(parent, list):
            parent.append(odd)
        else:
            parent[last] = odd
    return json.dumps(value).encode()


def table_edited(seed: bytes, data: bytes) -> bytes:
    """A Parquet file with some values changed and its checksums right, four bytes each: row (two), column, value.

    What a column's type cannot hold is left as it was.
    """
    table = pq.read_table(BytesIO(seed))
    rows = table.to_pylist()
    for at in range(0, len(data) - 3, 4):
        field = table.schema.field(data[at + 2] % table.num_columns)
        with contextlib.suppress(pa.ArrowException, TypeError, ValueError, OverflowError):
            fitting = pa.scalar(ODD_VALUES[data[at + 3] % len(ODD_VALUES)], field.type).as_py()
            if fitting is not None or field.nullable:
                rows[int.from_bytes(data[at : at + 2]) * len(rows) >> 16][field.name] = fitting
    out = BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, table.schema), out, write_page_checksum=True)
    return out.getvalue()


def _places(value: Any, way: tuple[Any, ...]) -> Any:
    """The way to every value below this one."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:50]) if isinstance(value, list) else ()
    for name, inner in items:
        yield (*way, name)
        yield from _places(inner, (*way, name))
