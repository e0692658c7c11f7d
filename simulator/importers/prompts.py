"""Prompts as the `file` workload takes them: an object a line with messages, prompt or text, and maybe an answer."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specdial.policies.artifact import write_text_atomic
from specdial.policies.errors import UserError


@dataclass(frozen=True, slots=True)
class Prompt:
    """One document. content: {messages | prompt | text: ...}."""

    content: dict[str, object]
    answer: str | None = None


def write_prompts(out: Path, prompts: Sequence[Prompt]) -> int:
    """Write a file for workload.path; returns how many. Repeated prompts, which it refuses, are written once.

    Raises UserError where one holds half a character, which JSON can write and UTF-8 cannot.
    """
    lines: dict[str, str] = {}
    for number, prompt in enumerate(prompts, start=1):
        content = json.dumps(prompt.content, ensure_ascii=False, sort_keys=True)
        answer = {} if prompt.answer is None else {"answer": prompt.answer}
        line = json.dumps({**prompt.content, **answer}, ensure_ascii=False)
        try:
            line.encode()
        except UnicodeEncodeError:
            raise UserError(f"prompt {number} is not valid Unicode", "mend or remove that record") from None
        lines.setdefault(content, line)
    write_text_atomic(out, "".join(f"{line}\n" for line in lines.values()))
    return len(lines)
