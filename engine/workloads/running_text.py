"""Kinds whose prompt is the start of a long text and whose task is to go on with it: `stdlib` and `book`."""

import random
from itertools import islice

from specdial.engine.workloads.packing import enough, pack, shuffled
from specdial.engine.workloads.sources import BOOK_NAME, book, stdlib
from specdial.engine.workloads.spec import Draft, Tokenizer, WorkloadSpec


def build_stdlib(spec: WorkloadSpec, tokenizer: Tokenizer) -> list[Draft]:
    """Whole source files, in the seed's order, until the length is reached; the last one is cut, usually midway.

    A document takes a second file only when the first is shorter than it needs. Files depend on the Python version.
    """
    files = list(stdlib())
    random.Random(f"{spec.seed}:stdlib").shuffle(files)
    drafts = list(islice(pack(files, tokenizer, spec), spec.documents))
    return enough(drafts, spec, "the standard library")


def build_book(spec: WorkloadSpec, tokenizer: Tokenizer) -> list[Draft]:
    """Runs of whole paragraphs of the shipped excerpt, the last one cut. The seed picks among all runs that fit."""
    return enough(shuffled(list(pack(book(), tokenizer, spec)), spec), spec, f"the book ({BOOK_NAME})")
