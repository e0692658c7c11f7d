"""LongBench tasks: JSON lines of {input, context, answers, length, dataset, language, all_classes, _id}.

A prompt is the context, a blank line and the input; LongBench's own templates for each task, and its truncation in the
middle, are left out. The first answer is kept where there is one.

Sources: THUDM/LongBench README, "Data format", and LongBench.py (Bai et al., LongBench, ACL 2024).
"""

from pathlib import Path

from specdial.simulator.importers.lines import json_lines
from specdial.simulator.importers.prompts import Prompt


def read(path: Path) -> list[Prompt]:
    """A prompt of every record. Raises UserError naming the first bad line."""
    found = []
    for line in json_lines(path):
        context, question, answers = line.text("context"), line.get("input"), line.get("answers")
        if question is not None and not isinstance(question, str):
            raise line.error("input is not text")
        if answers is not None and not (isinstance(answers, list) and all(isinstance(a, str) for a in answers)):
            raise line.error("answers is not a list of texts")
        text = f"{context}\n\n{question}" if question else context
        found.append(Prompt({"prompt": text}, answers[0] if answers else None))
    return found
