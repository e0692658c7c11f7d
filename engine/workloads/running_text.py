"""Kinds whose prompt is the start of a long text and whose task is to go on with it: `stdlib` and `book`."""

import random
from collections.abc import Iterator
from itertools import islice

from specdial.engine.workloads.overlap import overlapping
from specdial.engine.workloads.packing import Frame, bare, enough, pack, shuffled
from specdial.engine.workloads.sources import (
    BOOK_NAME,
    Passage,
    book,
    paragraphs,
    read_text,
    source_tree,
    stdlib,
    stdlib_later,
)
from specdial.engine.workloads.spec import Draft, Tokenizer, WorkloadSpec


def build_stdlib(spec: WorkloadSpec, tokenizer: Tokenizer) -> list[Draft]:
    """Whole source files, in the seed's order, until the length is reached; the last one is cut, usually midway.

    A document takes a second file only when the first is shorter than it needs. Files depend on the Python version;
    the library's tests come after everything else. spec.path names another folder of source.
    """
    frame = bare(tokenizer, spec)
    what = "the standard library" if spec.path is None else spec.path
    if spec.stride_tokens is not None:
        return overlapping(list(_files(spec)), what, spec, tokenizer, frame)
    return enough(list(islice(pack(_files(spec), tokenizer, spec, frame), spec.documents)), spec, what)


def _files(spec: WorkloadSpec) -> Iterator[Passage]:
    """Source files in the seed's order; tests of the library are read from disk only when reached."""
    for later in (stdlib, stdlib_later) if spec.path is None else (lambda: source_tree(str(spec.path)),):
        files = later()
        random.Random(f"{spec.seed}:stdlib").shuffle(files)
        yield from files


def build_book(spec: WorkloadSpec, tokenizer: Tokenizer) -> list[Draft]:
    """Runs of whole paragraphs of the shipped excerpt or of spec.path, the last one cut."""
    passages, what = novel(spec)
    return build_text(passages, what, spec, tokenizer)


def novel(spec: WorkloadSpec) -> tuple[list[Passage], str]:
    """The paragraphs of the shipped excerpt or of the text file spec.path, and what to call them."""
    if spec.path is None:
        return book(), f"the book ({BOOK_NAME})"
    path, text = read_text(spec.path)
    return paragraphs(path.name, text), str(path)


def build_text(
    passages: list[Passage], what: str, spec: WorkloadSpec, tokenizer: Tokenizer, frame: Frame | None = None
) -> list[Draft]:
    """Prompts from running text; the seed picks among all runs that fit. what: the text's name in errors."""
    frame = frame or bare(tokenizer, spec)
    if spec.stride_tokens is not None:
        return overlapping(passages, what, spec, tokenizer, frame)
    return enough(shuffled(list(pack(passages, tokenizer, spec, frame)), spec), spec, what)
