"""ShareGPT conversations: a JSON array, or JSON lines, of {id, conversations: [{from, value}]}.

from is human or user, gpt, chatgpt or assistant, or system. A prompt is a conversation up to its last human turn, as
messages for the model's chat template. Conversations without a human turn are passed over.

Sources: axolotl docs/dataset-formats/conversation (sharegpt); vLLM benchmarks' ShareGPT dataset; the dataset card of
ShareGPT90K.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from specdial.policies.errors import UserError
from specdial.simulator.importers.lines import Line, json_lines, text_lines
from specdial.simulator.importers.prompts import Prompt

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}


def read(path: Path) -> list[Prompt]:
    """A prompt of every conversation. Raises UserError naming the first bad one by line, or by place in the array."""
    found = []
    for line in _conversations(path):
        turns = line.get("conversations")
        if not isinstance(turns, list):
            raise line.error("conversations is not a list")
        messages = []
        for turn in turns:
            role = ROLES.get(str(turn.get("from"))) if isinstance(turn, dict) else None
            if role is None or not isinstance(turn.get("value"), str):
                raise line.error(f"a turn is not {{from: {', '.join(ROLES)}, value: text}}")
            messages.append({"role": role, "content": turn["value"]})
        while messages and messages[-1]["role"] != "user":
            messages.pop()
        if messages:
            found.append(Prompt({"messages": messages}))
    return found


def _conversations(path: Path) -> Iterator[Line]:
    """Objects of JSON lines, or of one array, whose items are numbered from 1."""
    first = next((text for _, text in text_lines(path) if text.strip()), "")
    if not first.lstrip().startswith("["):
        yield from json_lines(path)
        return
    try:
        items = json.loads("".join(text for _, text in text_lines(path)))
    except json.JSONDecodeError as error:
        raise UserError(f"{path} line {error.lineno} is not JSON", "mend that line") from None
    except RecursionError:
        raise UserError(f"{path} nests too deeply", "give conversations alone") from None
    for number, item in enumerate(items, start=1):
        if not isinstance(item, dict):
            raise Line(path, number, {}).error("no object")
        yield Line(path, number, item)
