"""YAML as plain data, and the line of every value.

Only mappings with text for keys, lists, text, numbers, booleans and null are built. Everything else that YAML has
(anchors, aliases, tags, merges, dates), repeated keys, deep nesting and endless numbers are refused by field and line
before anything is built. Leaves out how long the text may be: its reader bounds that.
"""

from dataclasses import dataclass, field
from typing import Any

import yaml

from specdial.policies.errors import UserError

MAX_DEPTH = 20  # PyYAML's time grows with the square of it
MAX_NUMBER = 1000  # characters
STANDARD = "tag:yaml.org,2002:"
PLAIN = {STANDARD + kind for kind in ("str", "int", "float", "bool", "null")}


@dataclass(slots=True)
class _Open:
    """A collection being read. key: of the value that comes next, None where a key does; count: items so far."""

    path: str
    mapping: bool
    key: str | None = None
    seen: set[str] = field(default_factory=set)
    count: int = 0

    def next_path(self) -> str:
        """The dotted path of the value that comes next, which is then taken."""
        if not self.mapping:
            self.count += 1
            return f"{self.path}[{self.count - 1}]"
        key, self.key = self.key, None
        return f"{self.path}.{key}" if self.path else str(key)


def read_plain(text: str) -> tuple[Any, dict[str, int]]:
    """The data, and the line (from 1) of every dotted path in it. Raises UserError naming line and field."""
    try:
        lines = _survey(text)
        return yaml.safe_load(text), lines
    except yaml.reader.ReaderError as error:  # NUL and its like
        line = text.count("\n", 0, error.position) + 1
        raise UserError(f"not valid YAML: a character that is not text at line {line}", "re-export it") from None
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        raise UserError(f"not valid YAML{f' at line {mark.line + 1}' if mark else ''}", "re-export it") from None


def _survey(text: str) -> dict[str, int]:
    """The line of every dotted path. Raises UserError on what is not plain, yaml.YAMLError on what is not YAML."""
    loader: Any = yaml.SafeLoader(text)
    lines: dict[str, int] = {}
    opened: list[_Open] = []
    while loader.check_event():
        event: Any = loader.get_event()
        line = event.start_mark.line + 1
        if isinstance(event, yaml.CollectionEndEvent):
            opened.pop()
        if not isinstance(event, yaml.NodeEvent):
            continue
        around = opened[-1] if opened else None
        if around is not None and around.mapping and around.key is None:
            lines |= _key(loader, event, around, line)
            continue
        path = around.next_path() if around is not None else ""
        if around is None or not around.mapping:
            lines[path] = line
        _check_marks(event, path, line)
        if isinstance(event, yaml.ScalarEvent):
            _check_scalar(loader, event, path, line)
            continue
        if len(opened) == MAX_DEPTH:
            raise UserError(f"{path} nests too deeply at line {line}", "re-export it", field=path)
        opened.append(_Open(path, isinstance(event, yaml.MappingStartEvent)))
    lines.pop("", None)  # the whole has no path
    return lines


def _key(loader: Any, event: Any, around: _Open, line: int) -> dict[str, int]:
    """Make a key the one whose value comes next; its path and line."""
    where = around.path
    _check_marks(event, where, line)
    if not isinstance(event, yaml.ScalarEvent) or _tag(loader, event) != STANDARD + "str":
        cause = f"a key that is not text at line {line}" + (f", in {where}" if where else "")
        raise UserError(cause, "write the key as text", field=where)
    path = f"{where}.{event.value}" if where else event.value
    if event.value in around.seen:
        raise UserError(f"{path} is given twice, again at line {line}", "keep one of them", field=path)
    around.seen.add(event.value)
    around.key = event.value
    return {path: line}


def _check_marks(event: Any, path: str, line: int) -> None:
    if event.anchor is not None or getattr(event, "tag", None) is not None:
        cause = f"{path or 'the file'} uses a YAML anchor, alias or tag at line {line}"
        raise UserError(cause, "write the value out", field=path)


def _check_scalar(loader: Any, event: Any, path: str, line: int) -> None:
    tag = _tag(loader, event)
    if tag not in PLAIN:
        kind = "date" if tag == STANDARD + "timestamp" else "value of YAML's own"
        raise UserError(f"{path} is a {kind} at line {line}", "put it in quotes", field=path)
    if tag == STANDARD + "str":
        return
    if len(event.value) > MAX_NUMBER:
        raise UserError(f"{path} has {len(event.value)} digits at line {line}", "give a shorter number", field=path)
    try:
        loader.construct_object(yaml.ScalarNode(tag, event.value))
    except ValueError:
        raise UserError(f"{path} is not a number at line {line}", "put it in quotes", field=path) from None


def _tag(loader: Any, event: Any) -> str:
    return str(loader.resolve(yaml.ScalarNode, event.value, event.implicit))
