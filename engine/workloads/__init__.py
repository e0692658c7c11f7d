"""Workloads: the prompts a run decodes, of an exact length, with no text in common, each in one split.

Nothing here knows a model or torch; a tokenizer comes in as an argument.
"""

import re

from specdial.engine.workloads.file import build_file
from specdial.engine.workloads.needle import build_needle
from specdial.engine.workloads.packing import place
from specdial.engine.workloads.running_text import build_book, build_stdlib
from specdial.engine.workloads.spec import SPLITS, Document, Draft, Tokenizer, WorkloadSpec
from specdial.engine.workloads.summary import build_summary
from specdial.policies.errors import UserError

__all__ = ["KINDS", "SPLITS", "Document", "Draft", "Tokenizer", "WorkloadSpec", "build", "check_answer", "of_split"]

KINDS = {
    "stdlib": build_stdlib,
    "book": build_book,
    "file": build_file,
    "needle": build_needle,
    "summary": build_summary,
}


def build(spec: WorkloadSpec, tokenizer: Tokenizer) -> list[Document]:
    """The documents of a workload: the same ones for the same spec, tokenizer and source text.

    Every prompt has exactly spec.context_tokens ids, `file` with keep_short excepted. Documents share no source text
    (`needle` may, and says so in meta; with spec.stride_tokens, those of one split may). Raises UserError for an
    unknown kind and for a source that is too small.
    """
    if spec.kind not in KINDS:
        raise UserError(f"unknown workload kind {spec.kind!r}", f"use one of: {', '.join(KINDS)}")
    return place(KINDS[spec.kind](spec, tokenizer), spec)


def of_split(documents: list[Document], split: str) -> list[Document]:
    """The documents of one split, or of `all`. Raises UserError if there are none."""
    if split not in (*SPLITS, "all"):
        raise UserError(f"unknown split {split!r}", f"use one of: {', '.join(SPLITS)}, all")
    found = [d for d in documents if split in (d.split, "all")]
    if not found:
        raise UserError(
            f"no document of {len(documents)} is in split {split}", f"raise workload.documents or workload.{split}_frac"
        )
    return found


def check_answer(document: Document, text: str) -> bool:
    """Whether decoded text gives the document's known answer, as a word of its own and in any letter case."""
    if document.answer is None:
        raise UserError(f"document {document.name} has no known answer", "use workload=needle, or a file with answers")
    return re.search(rf"(?<!\w){re.escape(document.answer)}(?!\w)", text, re.IGNORECASE) is not None
