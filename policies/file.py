"""Policy files: canonical YAML in, canonical YAML out, digests of the decisions.

Loading is strict: unknown, mistyped or out-of-range fields are refused by name and line. A file re-saved is
byte-identical. Leaves out lowering to other engines' formats.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import yaml

from specdial.policies.artifact import write_text_atomic
from specdial.policies.errors import UserError
from specdial.policies.fields import to_plain
from specdial.policies.schema import SCHEMA, Policy, policy_from_mapping

MAX_BYTES = 1_000_000


def load_policy(path: str | Path) -> Policy:
    """Read one policy file. Raises UserError with the field and line at fault."""
    path = Path(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read policy {path}: {error.strerror}", "check the path") from None
    if len(raw) > MAX_BYTES:
        raise UserError(f"policy {path} is {len(raw)} bytes", f"a policy file has at most {MAX_BYTES}")
    try:
        return parse_policy(raw.decode("utf-8"))
    except UnicodeDecodeError:
        raise UserError(f"policy {path} is not UTF-8 text", "re-export it") from None
    except UserError as error:
        raise UserError(f"{path}: {error.cause}", error.remedy) from None


def parse_policy(text: str) -> Policy:
    """Read a policy from YAML text. Aliases and tags are refused; nothing but plain data is built."""
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            raise UserError("policy uses a YAML alias", "write the value out")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        content = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        raise UserError(
            f"not valid YAML{f' at line {mark.line + 1}' if mark else ''}", "re-export the policy"
        ) from None
    lines = _lines(node, "") if node is not None else {}
    if not isinstance(content, dict):
        raise UserError("a policy file must be a mapping", "write key: value pairs")
    found = content.pop("schema", None)
    if found != SCHEMA:
        raise UserError(
            f"policy schema is {found!r} at line {lines.get('schema', 1)}", f"this version reads {SCHEMA!r}"
        )
    claimed = content.pop("lossless", None)
    try:
        policy = policy_from_mapping(content)
    except UserError as error:
        raise UserError(_with_line(error.cause, lines), error.remedy) from None
    if claimed is not None and claimed != policy.lossless:
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
    return str(yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True, width=120))


def save_policy(policy: Policy, path: str | Path) -> None:
    """Write a policy file atomically."""
    write_text_atomic(Path(path), dump_policy(policy))


def policy_digest(policy: Policy) -> str:
    """sha256 of the decisions alone: two policies that behave alike share it, whatever they are called."""
    return hashlib.sha256(json.dumps(policy.decisions(), sort_keys=True).encode()).hexdigest()


def _lines(node: yaml.Node, where: str) -> dict[str, int]:
    """Line (from 1) of every dotted path in the file."""
    found: dict[str, int] = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = f"{where}.{key.value}" if where else str(key.value)
            found[path] = key.start_mark.line + 1
            found |= _lines(value, path)
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            path = f"{where}[{i}]"
            found[path] = value.start_mark.line + 1
            found |= _lines(value, path)
    return found


def _with_line(cause: str, lines: dict[str, int]) -> str:
    """Append the line of the first dotted path that the message names, or of its nearest parent."""
    for word in re.findall(r"[\w.\[\]]+", cause):
        path = word.rstrip(".")
        while path:
            if path in lines and (path == word or "." in word or "[" in word):
                return f"{cause} (line {lines[path]})"
            path = re.sub(r"(\.[^.\[]+|\[\d+\]|^[^.\[]+)$", "", path)
    return cause
