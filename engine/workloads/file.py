"""The `file` kind: prompts from a text file or from JSON lines of the user's own.

A text file is running text, cut like the book. In a .jsonl file each line is one document, an object with `messages`
(a chat, through the tokenizer's template), `prompt` or `text`, looked for in that order, and maybe an `answer`.
A line longer than context_tokens is cut in token space: `text` at its end, `prompt` and `messages` in their middle,
because their task stands at the beginning or at the end. A shorter line is passed over, or kept as it is with
keep_short. Directories, compressed files and tool calls are left out.
"""

import json
import random
from pathlib import Path
from typing import Any

from specdial.engine.workloads.packing import enough
from specdial.engine.workloads.running_text import build_text
from specdial.engine.workloads.sources import paragraphs, read_text
from specdial.engine.workloads.spec import Draft, Tokenizer, WorkloadSpec
from specdial.policies.errors import UserError

FIELDS = ("messages", "prompt", "text")


def build_file(spec: WorkloadSpec, tokenizer: Tokenizer) -> list[Draft]:
    """Prompts from spec.path. Raises UserError for a file that is missing, damaged, empty, or too small."""
    if not spec.path:
        raise UserError("workload=file has no file", "set workload.path to a .txt or .jsonl file")
    path, text = read_text(spec.path)
    return (_from_lines if path.suffix == ".jsonl" else _from_text)(path, text, spec, tokenizer)


def _from_text(path: Path, text: str, spec: WorkloadSpec, tokenizer: Tokenizer) -> list[Draft]:
    if spec.keep_short:
        ids = tokenizer.encode(text, add_special=True)
        if len(ids) < spec.context_tokens + spec.new_tokens:
            source = [[path.name, 0, len(text)]]
            return enough([Draft(path.name, ids[: spec.context_tokens], meta={"source": source})], spec, str(path))
    return build_text(paragraphs(path.name, text), str(path), spec, tokenizer)


def _from_lines(path: Path, text: str, spec: WorkloadSpec, tokenizer: Tokenizer) -> list[Draft]:
    if spec.stride_tokens is not None:
        raise UserError("lines of a .jsonl file have no workload.stride_tokens", "leave it out or give a .txt file")
    rows = _rows(path, text)
    order = random.Random(f"{spec.seed}:lines").sample(range(len(rows)), len(rows))
    drafts: list[Draft] = []
    longest_tokens = 0
    for i in order:
        if len(drafts) == spec.documents:
            break
        line, row = rows[i]
        field = next(name for name in FIELDS if name in row)
        ids = tokenizer.chat(row[field]) if field == "messages" else tokenizer.encode(row[field], add_special=True)
        longest_tokens = max(longest_tokens, len(ids))
        if len(ids) < spec.context_tokens and not spec.keep_short:
            continue
        kept, cut = _cut(ids, spec.context_tokens, middle=field != "text")
        name = f"{path.name}:{line}"
        answer = None if row.get("answer") is None else str(row["answer"])
        drafts.append(
            Draft(name, kept, answer, {"source": [[name, 0, len(str(row[field]))]], "field": field, "cut": cut})
        )
    if len(drafts) < spec.documents:
        if len(rows) < spec.documents:
            raise UserError(
                f"{path} holds {len(rows)} lines, {spec.documents} documents asked for",
                f"set workload.documents to at most {len(rows)}",
            )
        raise UserError(
            f"{len(drafts)} lines of {path} reach {spec.context_tokens} tokens (the longest has {longest_tokens}), "
            f"{spec.documents} documents asked for",
            "lower the context or workload.documents, or set workload.keep_short=true",
        )
    return drafts


def _cut(ids: list[int], length: int, middle: bool) -> tuple[list[int], str]:
    """ids cut to length, and where: none, tail or middle."""
    if len(ids) <= length:
        return ids, "none"
    if not middle:
        return ids[:length], "tail"
    tail = length // 2
    return ids[: length - tail] + ids[len(ids) - tail :], "middle"


def _rows(path: Path, text: str) -> list[tuple[int, dict[str, Any]]]:
    """(line number, object) of each line that is not blank. Raises UserError naming the first bad line."""
    rows: list[tuple[int, dict[str, Any]]] = []
    seen: dict[str, int] = {}
    # Only \n ends a line: a JSON string may hold other line separators as they are.
    for line, raw in enumerate(text.split("\n"), start=1):
        if not raw.strip():
            continue
        try:
            row = json.loads(raw)
        except (ValueError, RecursionError) as e:
            raise UserError(f"{path} line {line} is not JSON ({e})", "mend or remove that line") from e
        field = next((name for name in FIELDS if name in row), None) if isinstance(row, dict) else None
        if field is None:
            raise UserError(f"{path} line {line} has no text, prompt or messages", "give each line one of these fields")
        if not (_is_chat(row[field]) if field == "messages" else isinstance(row[field], str) and row[field].strip()):
            wanted = "a list of {role, content}" if field == "messages" else "text that is not empty"
            raise UserError(f"{path} line {line}: {field} is not {wanted}", "mend or remove that line")
        key = json.dumps(row[field], sort_keys=True)
        if key in seen:
            raise UserError(f"{path} lines {seen[key]} and {line} hold the same {field}", "remove one of them")
        seen[key] = line
        rows.append((line, row))
    return rows


def _is_chat(messages: object) -> bool:
    return (
        isinstance(messages, list)
        and len(messages) > 0
        and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
            for m in messages
        )
    )
