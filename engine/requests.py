"""What one run decodes, one prompt after another: a text, or the lines of a file in their order.

A file has one JSON object a line with `messages` (a chat, through the model's template), `prompt` or `text`, as files
of the `file` workload have, and maybe `new_tokens`. Leaves out cutting to a length and splits: these are requests, not
documents to tune on.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdial.engine.workloads import Document, Tokenizer
from specdial.engine.workloads.file import FIELDS
from specdial.policies.errors import UserError

SPLIT = "live"


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt. content: a text, or a chat's messages. new_tokens: None for what the run says."""

    name: str
    content: str | list[dict[str, str]]
    new_tokens: int | None = None


def read_requests(prompt: str | None, prompts: str | None) -> list[Request]:
    """The requests of `prompt` (a text or @FILE) or of the file `prompts`. Raises UserError naming file and line."""
    if (prompt is None) == (prompts is None):
        what = "prompt is missing" if prompt is None else "prompt and prompts are both given"
        raise UserError(what, "give prompt=TEXT, prompt=@FILE or prompts=FILE.jsonl")
    if prompts is not None:
        return _lines(Path(prompts), _read(Path(prompts), "prompts=FILE.jsonl"))
    text = str(prompt)
    if text.startswith("@"):
        text = _read(Path(text[1:]), "prompt=@FILE")
    if not text.strip():
        raise UserError("the prompt is empty", "give prompt=TEXT or prompt=@FILE")
    return [Request("prompt", text)]


def documents(requests: list[Request], tokenizer: Tokenizer, *, chat: bool, new_tokens: int) -> list[Document]:
    """Requests as documents of split `live`, in order. chat: put texts into the model's chat template."""
    found = []
    for i, request in enumerate(requests):
        content: Any = [{"role": "user", "content": request.content}] if chat else request.content
        if isinstance(request.content, list):
            content = request.content
        ids = tokenizer.encode(content) if isinstance(content, str) else tokenizer.chat(content)
        if not ids:
            raise UserError(f"{request.name} is empty", "give at least one token of text")
        found.append(Document(i, request.name, SPLIT, ids, request.new_tokens or new_tokens))
    return found


def _read(path: Path, usage: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the prompt {path}: {error}", f"give {usage} of UTF-8 text") from None


def _lines(path: Path, text: str) -> list[Request]:
    found = []
    for line, raw in enumerate(text.split("\n"), start=1):
        if not raw.strip():
            continue
        try:
            row = json.loads(raw)
        except (ValueError, RecursionError):
            raise UserError(f"{path} line {line} is not JSON", "mend or remove that line") from None
        name = next((name for name in FIELDS if name in row), None) if isinstance(row, dict) else None
        if name is None:
            raise UserError(f"{path} line {line} has no messages, prompt or text", "give each line one of these fields")
        content, new_tokens = row[name], row.get("new_tokens")
        if not (_is_chat(content) if name == "messages" else isinstance(content, str) and content.strip()):
            wanted = "a list of {role, content}" if name == "messages" else "text that is not empty"
            raise UserError(f"{path} line {line}: {name} is not {wanted}", "mend or remove that line")
        if new_tokens is not None and (
            isinstance(new_tokens, bool) or not isinstance(new_tokens, int) or new_tokens < 1
        ):
            raise UserError(f"{path} line {line}: new_tokens is {new_tokens!r}", "give a whole number of at least 1")
        found.append(Request(f"{path.name}:{line}", content, new_tokens))
    if not found:
        raise UserError(f"{path} holds no prompt", "give one JSON object a line")
    return found


def _is_chat(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value)
        and all(isinstance(m["role"], str) and isinstance(m["content"], str) for m in value)
    )
