"""Policy files: canonical YAML in, canonical YAML out, digests of the content and of the decisions.

Loading is strict: unknown, mistyped or out-of-range fields are refused by name and line, and so is a file that was cut
or changed since it was written. A file re-saved is byte-identical. Leaves out lowering to other engines' formats.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import yaml

from specdial.policies.artifact import write_text_atomic
from specdial.policies.errors import UserError
from specdial.policies.fields import shown, to_plain
from specdial.policies.plain_yaml import read_plain
from specdial.policies.schema import SCHEMA, Policy, policy_from_mapping

MAX_BYTES = 250_000
UNUSUAL_BREAKS = "\x85\u2028\u2029"
SEAL = re.compile(r"^digest:[^\n]*\n", re.MULTILINE)


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
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(f"policy {path} is not UTF-8 text at line {line}", "re-export it") from None
    except UserError as error:
        raise UserError(f"{path}: {error.cause}", error.remedy, field=error.field) from None


def parse_policy(text: str) -> Policy:
    """Read a policy from YAML text. A file may lack `digest` (one written by hand does); one that has it is held to it.

    Raises UserError with the field and line at fault.
    """
    content, lines = read_plain(text)
    if not isinstance(content, dict):
        raise UserError("a policy file must be a mapping at line 1", "write key: value pairs")
    found = content.pop("schema", None)
    if found != SCHEMA:
        cause = f"policy schema is {shown(found)} at line {lines.get('schema', 1)}"
        raise UserError(cause, f"this version reads {SCHEMA!r}", field="schema")
    if "digest" in content:
        _check_seal(content.pop("digest"), text, lines["digest"])
    if not content:
        cause = f"policy ends after its schema at line {lines['schema']}"
        raise UserError(cause, "restore the file, or write its settings", field="schema")
    claimed = content.pop("lossless", None)
    try:
        policy = policy_from_mapping(content)
        _check_stamp(policy)
    except UserError as error:
        line = _line_of(error.field, lines)
        raise UserError(f"{error.cause} (line {line})", error.remedy, field=error.field) from None
    if claimed is not None and claimed is not policy.lossless:
        cause = f"lossless is {shown(claimed)} at line {lines['lossless']} but its settings make it {policy.lossless}"
        raise UserError(cause, "delete that line; it is computed", field="lossless")
    return policy


def dump_policy(policy: Policy) -> str:
    """Canonical YAML of a policy: fields in order, `lossless` computed, and a digest of all that follows it."""
    plain: dict[str, Any] = to_plain(policy)
    ordered = {k: plain[k] for k in plain if k not in ("expected", "measured", "provenance")}
    ordered["lossless"] = policy.lossless
    ordered |= {k: plain[k] for k in ("expected", "measured", "provenance")}
    text = str(yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True, width=120))
    if any(mark in text for mark in UNUSUAL_BREAKS):  # PyYAML writes them as they are, and reads them as spaces
        text = str(yaml.safe_dump(ordered, sort_keys=False, allow_unicode=False, width=120))
    return f"schema: {SCHEMA}\ndigest: {_seal(text)}\n{text}"


def save_policy(policy: Policy, path: str | Path) -> None:
    """Write a policy file atomically."""
    write_text_atomic(Path(path), dump_policy(policy))


def policy_digest(policy: Policy) -> str:
    """sha256 of the decisions alone: two policies that behave alike share it, whatever they are called."""
    return hashlib.sha256(json.dumps(policy.decisions(), sort_keys=True).encode()).hexdigest()


def short_digest(policy: Policy) -> str:
    """The beginning of its digest: what the folder of a policy's live trace is called."""
    return policy_digest(policy)[:12]


def _seal(text: str) -> str:
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _check_seal(claimed: object, text: str, line: int) -> None:
    """Raises UserError where the text after the digest is not the one that was written."""
    match = SEAL.search(text)
    if match is None or claimed != _seal(text[match.end() :]):
        raise UserError(
            f"digest at line {line} is of other content: the file was cut or changed after it was written",
            "restore it, or delete that line to use it as it is",
            field="digest",
        )


def _check_stamp(policy: Policy) -> None:
    """What a file expects is of the decisions it was tuned to. Raises UserError where they are others now."""
    stamped = (policy.provenance or {}).get("policy_digest")
    if stamped is not None and stamped != policy_digest(policy):
        raise UserError(
            "provenance.policy_digest is of other decisions: the policy was changed after it was tuned",
            "tune it again, or delete expected, measured and provenance",
            field="provenance.policy_digest",
        )


def _line_of(path: str | None, lines: dict[str, int]) -> int:
    """The line of a dotted path, of its nearest parent that the file has, or 1."""
    while path:
        if path in lines:
            return lines[path]
        path = path[: max(path.rfind("."), path.rfind("["), 0)]
    return 1
