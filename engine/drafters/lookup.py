"""Prompt lookup (Saxena 2023): what followed the last tokens when they last stood in the text is proposed again.

Works on the host's token lists and costs the device nothing. The rule, for a text and n from `ngram` down to 1: the
first n whose last n tokens also end earlier in the text decides, and of those earlier places the latest one. What
follows it is copied; a copy that reaches the end of the text goes on through its own first tokens, so that a repetition
shorter than the draft is continued. No earlier place: no draft.

transformers and vLLM take the earliest place and stop at the end of the text.
"""

import numpy as np

from specdial.engine.drafters.base import HostDrafter
from specdial.engine.sequences import Sequences


class Lookup(HostDrafter):
    """Drafts of a batch from each sequence's own tokens."""

    def __init__(self, sequences: Sequences, ngram: int) -> None:
        self.s = sequences
        self._indices = [NgramIndex(ngram) for _ in range(sequences.batch)]
        for index, tokens in zip(self._indices, sequences.tokens):
            index.update(tokens)  # before the clock runs, as a prefill

    def drafts(self, limit: np.ndarray) -> list[list[int]]:
        """See HostDrafter."""
        return [
            index.continuation(tokens, int(most)) if most else []
            for index, tokens, most in zip(self._indices, self.s.tokens, limit)
        ]


class NgramIndex:
    """Where each run of 1 .. `longest` tokens last ended in a growing text, its very end left out."""

    def __init__(self, longest: int) -> None:
        self._ends: list[dict[tuple[int, ...], int]] = [{} for _ in range(longest)]  # of n + 1 tokens each
        self._covered = 0  # ends 0 .. _covered - 1 are in

    def update(self, tokens: list[int]) -> None:
        """Take in every place up to the last token but one."""
        end = max(len(tokens) - 1, self._covered)
        for n, ends in enumerate(self._ends, start=1):
            first = max(self._covered - n + 1, 0)
            stop = max(end - n + 1, first)  # starts first .. stop - 1
            new = [tokens[first + i : stop + i] for i in range(n)]  # columns of the n-grams
            ends.update(zip(zip(*new), range(first + n - 1, end)))  # of equal ones the latest stays
        self._covered = end

    def continuation(self, tokens: list[int], most: int) -> list[int]:
        """Up to `most` tokens, by the rule in the module's first lines."""
        self.update(tokens)
        for n in range(len(self._ends), 0, -1):
            found = self._ends[n - 1].get(tuple(tokens[-n:])) if n < len(tokens) else None
            if found is not None:
                copied = tokens[found + 1 : found + 1 + most]
                period = len(copied)  # less than `most` only where the text ends
                return [copied[i % period] for i in range(most)]
        return []
