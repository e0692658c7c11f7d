"""An EAGLE-3 head as a drafter: a chain of tokens, each step fed its own last output (see engine/head_reader).

Leaves out trees of drafts (drafters/tree). The distribution of a draft is zero outside the head's reduced vocabulary.
"""

from collections.abc import Hashable

import numpy as np
from torch import Tensor

from specdial.engine.drafters.base import Draft, Proposal, propose
from specdial.engine.head_reader import HeadReader
from specdial.engine.sequences import Sequences
from specdial.policies.errors import UserError


class Eagle:
    """Drafts of the sequences by one of the heads that read along."""

    def __init__(self, sequences: Sequences, name: str) -> None:
        """Raises ValueError without such a head, UserError on prompts of one token."""
        if name not in sequences.heads:
            raise ValueError(f"no head {name!r} reads along with these sequences")
        if int(sequences.prompt_tokens.min()) < 2:
            raise UserError("an EAGLE head starts from two tokens, a prompt has one", "give a longer prompt")
        self.reader = sequences.heads[name]
        self.key: Hashable = ("eagle", name)

    def prepare(self, limit: np.ndarray) -> None:
        """See Drafter: there is nothing to do, every verification left what the next draft needs."""

    def begin(self, steps: int) -> Draft:
        """See Drafter."""
        return EagleDraft(self.reader)


class EagleDraft:
    """Lanes are the sequences of a batch."""

    def __init__(self, reader: HeadReader) -> None:
        self.reader = reader

    def step(self, depth: int, tokens: Tensor) -> Proposal:
        """See Draft. Step 0 reads what the last rounds committed; its token is known to the reader."""
        if depth == 0:
            self.reader.read()
        else:
            self.reader.go_on(depth, tokens)
        return propose(self.reader.head.target_logits(self.reader.waiting.outputs[depth]), self.reader.s.backend)
