"""Where text comes from, cut into passages that keep their place in the source. No tokens here.

A passage is the smallest piece a document may claim: a paragraph of running text, or a whole source file.
"""

import re
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from specdial.policies.errors import UserError

BOOK_NAME = "frankenstein"
BOOK_PATH = Path(__file__).parent / "data" / "frankenstein.txt"

# Not prose by a programmer: tests, fixtures, generated tables, and what is installed beside the library.
STDLIB_EXCLUDED_DIRS = frozenset(
    {
        "test",
        "tests",
        "idlelib",
        "idle_test",
        "lib2to3",
        "turtledemo",
        "encodings",
        "pydoc_data",
        "ensurepip",
        "site-packages",
        "dist-packages",
        "lib-dynload",
        "__pycache__",
    }
)


@dataclass(frozen=True, slots=True)
class Passage:
    """text = characters start_char to end_char of source; a file passage's text also has a one-line header."""

    source: str
    start_char: int
    end_char: int
    text: str


def paragraphs(source: str, text: str) -> list[Passage]:
    """Cuts running text at blank lines. The passages joined give the text back; each starts where a paragraph does."""
    starts = [0, *(m.end() for m in re.finditer(r"\n[ \t]*\n+", text) if m.end() < len(text))]
    ends = [*starts[1:], len(text)]
    return [Passage(source, a, b, text[a:b]) for a, b in zip(starts, ends, strict=True) if text[a:b].strip()]


@cache
def book() -> list[Passage]:
    """The paragraphs of the shipped excerpt: see the .about.txt file beside it for title, author and rights."""
    return paragraphs(BOOK_NAME, BOOK_PATH.read_text(encoding="utf-8"))


def stdlib() -> Iterator[Passage]:
    """Every source file of the running Python's standard library, sorted by path, tests and tables left out.

    The text is a header line `# asyncio/events.py` and the file. Files that are not UTF-8 are passed over. What is
    found depends on the Python version. Raises UserError where Python was installed without its sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found = False
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if STDLIB_EXCLUDED_DIRS.intersection(parts[:-1]) or parts[-1].startswith("_sysconfigdata"):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip():
            found = True
            name = "/".join(parts)
            yield Passage(name, 0, len(text), f"# {name}\n{text}\n")
    if not found:
        raise UserError(
            f"Python {sys.version_info.major}.{sys.version_info.minor} has no standard library sources",
            "use workload=book",
        )
