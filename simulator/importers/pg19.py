"""PG-19 books: JSON lines of {short_book_title, publication_date, url, text}, or a folder of one .txt file a book.

A document is a book; the `file` workload cuts it to its context. Other fields are not read.

Sources: the dataset card of deepmind/pg19 (fields), and github.com/deepmind/pg19 (Rae et al., Compressive Transformers,
ICLR 2020) for the folders train/, validation/, test/ of text files.
"""

from pathlib import Path

from specdial.policies.errors import UserError
from specdial.simulator.importers.lines import json_lines, text_lines
from specdial.simulator.importers.prompts import Prompt


def read(path: Path) -> list[Prompt]:
    """A prompt of every book. Raises UserError naming file and line."""
    if not path.is_dir():
        return [Prompt({"text": line.text("text")}) for line in json_lines(path)]
    books = sorted(path.glob("*.txt"))
    if not books:
        raise UserError(f"{path} holds no .txt file", "give a folder of books, or JSON lines")
    found = [Prompt({"text": "".join(text for _, text in text_lines(book))}) for book in books]
    return [prompt for prompt in found if str(prompt.content["text"]).strip()]
