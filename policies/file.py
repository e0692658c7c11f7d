"""Policy files: canonical YAML in, canonical YAML out, digests of the decisions.

Loading is strict: unknown, mistyped or out-of-range fields are refused by name and line. A file re-saved is
byte-identical. Leaves out lowering to other engines' formats.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import yaml

from specdial.policies.artifact import write_text_atomic
from specdial.policies.errors import UserError
from specdial.policies.fields import to_plain
from specdial.policies.schema import SCHEMA, Policy, policy_from_mapping

MAX_BYTES = 250_000
MAX_DEPTH = 20
UNUSUAL_BREAKS = "\x85\u2028\u2029"


def load_policy(path: str | Path) -> Policy:
    """Read one policy file. Raises UserError with the field and line at fault."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UserError(f"cannot read policy {path}: {error.strerror}", "check the path") from None
    if len(raw) > MAX_BYTES:
        raise UserError(f"policy {path} is too large", f"a policy file has at most {MAX_BYTES} bytes")
    try:
        return parse_policy(raw.decode("utf-8"))
    except UnicodeDecodeError:
        raise UserError(f"policy {path} is not UTF-8 text", "re-export it") from None
    except UserError as error:
        raise UserError(f"{path}: {error.cause}", error.remedy, field=error.field) from None


def parse_policy(text: str) -> Policy:
    """Read a policy from YAML text. Anchors, aliases, tags and merges are refused; nothing but plain data is built."""
    lines: dict[str, int] = {}
    try:
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:  # PyYAML's time grows with the square of it
                raise UserError(f"policy nests too deeply at line {_line(event)}", "re-export the policy")
            if getattr(event, "anchor", None) is not None or getattr(event, "tag", None) is not None:
                raise UserError(
                    f"policy uses a YAML anchor, alias or tag at line {_line(event)}",
                    "write the value out",
                )
        _find_lines(yaml.compose(text, Loader=yaml.SafeLoader), "", lines)
        content = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        raise UserError(
            f"not valid YAML{f' at line {mark.line + 1}' if mark else ''}", "re-export the policy"
        ) from None
    if not isinstance(content, dict):
        raise UserError("a policy file must be a mapping at line 1", "write key: value pairs")
    found = content.pop("schema", None)
    if found != SCHEMA:
        raise UserError(
            f"policy schema is {found!r} at line {lines.get('schema', 1)}", f"this version reads {SCHEMA!r}"
        )
    claimed = content.pop("lossless", None)
    try:
        policy = policy_from_mapping(content)
    except UserError as error:
        line = _line_of(error.field, lines)
        raise UserError(f"{error.cause} (line {line})", error.remedy, field=error.field) from None
    if claimed is not None and claimed is not policy.lossless:
        raise UserError(
            f"lossless is {claimed!r} at line {lines.get('lossless', 1)} but its settings make it {policy.lossless}",
            "delete that line; it is computed",
        )
    return policy


def dump_policy(policy: Policy) -> str:
    """Canonical YAML of a policy: fields in order, `lossless` computed."""
    plain: dict[str, Any] = {"schema": SCHEMA, **to_plain(policy)}
    ordered = {k: plain[k] for k in plain if k not in ("expected", "measured", "provenance")}
    ordered["lossless"] = policy.lossless
    ordered |= {k: plain[k] for k in ("expected", "measured", "provenance")}
    text = str(yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True, width=120))
    if any(mark in text for mark in UNUSUAL_BREAKS):  # PyYAML writes them as they are, and reads them as spaces
        text = str(yaml.safe_dump(ordered, sort_keys=False, allow_unicode=False, width=120))
    return text


def save_policy(policy: Policy, path: str | Path) -> None:
    """Write a policy file atomically."""
    write_text_atomic(Path(path), dump_policy(policy))


def policy_digest(policy: Policy) -> str:
    """sha256 of the decisions alone: two policies that behave alike share it, whatever they are called."""
    return hashlib.sha256(json.dumps(policy.decisions(), sort_keys=True).encode()).hexdigest()


def _find_lines(node: yaml.Node | None, where: str, found: dict[str, int]) -> None:
    """Enter the line (from 1) of every dotted path. Raises UserError on keys that repeat, merge or are not text."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.tag != "tag:yaml.org,2002:str":
                raise UserError(f"a key that is not text at line {line}", "write the key as text")
            path = f"{where}.{key.value}" if where else str(key.value)
            if path in found:
                raise UserError(f"{path} is given twice, again at line {line}", "keep one of them")
            found[path] = line
            _find_lines(value, path, found)
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            found[f"{where}[{i}]"] = value.start_mark.line + 1
            _find_lines(value, f"{where}[{i}]", found)


def _line_of(path: str | None, lines: dict[str, int]) -> int:
    """The line of a dotted path, of its nearest parent that the file has, or 1."""
    while path:
        if path in lines:
            return lines[path]
        path = path[: max(path.rfind("."), path.rfind("["), 0)]
    return 1


def _line(event: yaml.Event) -> int:
    """Line (from 1) where a YAML event starts."""
    mark = event.start_mark
    return int(mark.line) + 1 if mark is not None else 1
