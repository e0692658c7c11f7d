"""What a workload is asked for, and what it gives: plain data, no torch, no file access.

The builders are elsewhere; this file only says which settings exist and refuses the impossible ones.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from specdial.policies.errors import UserError

SPLITS = ("train", "validation", "test")


class Tokenizer(Protocol):
    """What a workload needs of a tokenizer. add_special puts the model's begin mark, if it has one, before the text."""

    def encode(self, text: str, *, add_special: bool = False) -> list[int]: ...

    def chat(self, messages: list[dict[str, str]]) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """Settings of a workload. Raises UserError for a value no builder could honour.

    context_tokens: length of every prompt, in tokens. documents: how many prompts. new_tokens: tokens to decode after
    each. seed: which documents, their order and their split. ignore_eos: decode new_tokens even past an end mark.
    train_frac + validation_frac + test_frac = 1: shares of documents, not of tokens.
    path: the text or jsonl file of `file`; for `book` and `summary` a text file of your own, for `stdlib` a folder of
    Python source. keep_short: let `file` give prompts shorter than context_tokens as they are.
    stride_tokens: None, or let documents of one split overlap, each starting at least so many tokens after another.
    needles, depth_frac, filler: of `needle`; depth_frac None spreads the documents over all depths.
    """

    kind: str
    context_tokens: int
    documents: int = 8
    new_tokens: int = 64
    seed: int = 0
    ignore_eos: bool = True
    train_frac: float = 0.5
    validation_frac: float = 0.25
    test_frac: float = 0.25
    path: str | None = None
    stride_tokens: int | None = None
    keep_short: bool = False
    needles: int = 1
    depth_frac: float | None = None
    filler: str = "book"

    def __post_init__(self) -> None:
        for name in ("context_tokens", "documents", "new_tokens", "needles"):
            _whole(name, getattr(self, name), least=1)
        _whole("seed", self.seed, least=0)
        if self.stride_tokens is not None:
            _whole("stride_tokens", self.stride_tokens, least=1)
        for name in ("ignore_eos", "keep_short"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"workload.{name} is {getattr(self, name)!r}", "give true or false")
        for name in ("train_frac", "validation_frac", "test_frac"):
            _frac(name, getattr(self, name))
        total = self.train_frac + self.validation_frac + self.test_frac
        if abs(total - 1.0) > 1e-6:
            raise UserError(
                f"workload.train_frac, validation_frac and test_frac add up to {total:g}", "make them add up to 1"
            )
        if self.depth_frac is not None:
            _frac("depth_frac", self.depth_frac)

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> "WorkloadSpec":
        """A spec from plain settings, such as one conf/workload/*.yaml. Raises UserError for an unknown name."""
        known = [f.name for f in fields(cls)]
        for name in settings:
            if name not in known:
                raise UserError(f"unknown setting workload.{name}", f"use one of: {', '.join(known)}")
        for name in ("kind", "context_tokens"):
            if name not in settings:
                raise UserError(f"workload.{name} is missing", f"set workload.{name}")
        return cls(**settings)


@dataclass(frozen=True, slots=True)
class Document:
    """One prompt.

    index: 0-based position in the workload. split: train, validation or test. prompt_ids: token ids.
    new_tokens: tokens to decode. answer: the known answer, or None.
    meta: `source`, a list of [name, start_char, end_char] of the text this document claims (prompt and, for running
    text, the continuation), and what the kind adds. Plain JSON values only.
    """

    index: int
    name: str
    split: str
    prompt_ids: list[int]
    new_tokens: int
    answer: str | None = None
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Draft:
    """A prompt before it has a place in the workload: what a builder returns, in workload order."""

    name: str
    prompt_ids: list[int]
    answer: str | None = None
    meta: dict[str, Any] = field(default_factory=dict)


def _whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"workload.{name} is {value!r}", f"give a whole number of at least {least}")


def _frac(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not 0 <= value <= 1:
        raise UserError(f"workload.{name} is {value!r}", "give a number from 0 to 1")
