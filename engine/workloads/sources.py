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

# Programs and tests that come with the library: used when the library itself is used up.
STDLIB_LATER_DIRS = frozenset({"test", "tests", "idlelib", "idle_test", "lib2to3", "turtledemo", "ensurepip"})
# Generated tables, and what is installed beside the library: never used.
STDLIB_EXCLUDED_DIRS = frozenset(
    {"encodings", "pydoc_data", "site-packages", "dist-packages", "lib-dynload", "__pycache__"}
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


def read_text(name: str) -> tuple[Path, str]:
    """The file that workload.path names, and its text. Raises UserError when it is missing, empty or not UTF-8."""
    path = Path(name).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}", "set workload.path to a readable file") from e
    except UnicodeDecodeError as e:
        raise UserError(f"{path} is not UTF-8 at byte {e.start}", "convert it to UTF-8") from e
    if not text.strip():
        raise UserError(f"{path} is empty", "set workload.path to a file with text")
    return path, text


def stdlib() -> list[Passage]:
    """Every source file of the running Python's standard library, sorted by path, tests and tables left out.

    What is found depends on the Python version. Raises UserError where Python was installed without its sources.
    """
    found = list(_sources(Path(sysconfig.get_paths()["stdlib"]), later=False))
    if not found:
        raise UserError(
            f"Python {sys.version_info.major}.{sys.version_info.minor} has no standard library sources",
            "use workload=book",
        )
    return found


def stdlib_later() -> list[Passage]:
    """The programs and tests that come with the library, sorted by path; some distributions install few of them."""
    return list(_sources(Path(sysconfig.get_paths()["stdlib"]), later=True))


def source_tree(name: str) -> list[Passage]:
    """Every source file of the folder that workload.path names, as `stdlib` gives them. Raises UserError if none."""
    root = Path(name).expanduser()
    found = list(_sources(root, later=False)) if root.is_dir() else []
    if not found:
        raise UserError(f"{root} is not a folder with Python source", "set workload.path to a package's folder")
    return found


def _sources(root: Path, later: bool) -> Iterator[Passage]:
    """Files under root, or those of STDLIB_LATER_DIRS. Files that are not UTF-8 are passed over.

    The text is a header line `# asyncio/events.py` and the file.
    """
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if STDLIB_EXCLUDED_DIRS.intersection(parts[:-1]) or parts[-1].startswith("_sysconfigdata"):
            continue
        if later != bool(STDLIB_LATER_DIRS.intersection(parts[:-1])):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip():
            relative = "/".join(parts)
            yield Passage(relative, 0, len(text), f"# {relative}\n{text}\n")
