"""Documents of an attention trace, ready to be judged: what each anchor should recall, and scores by chosen heads.

Leaves out the choice of heads (simulator.heads) and tables (simulator.arr_report).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from specdial.engine.trace.attention import DRAFT, TARGET, AttentionTrace, DocumentRows
from specdial.policies.errors import UserError
from specdial.simulator.arr import Floats, Windows, history_scores, lookahead_scores, windows

Heads = tuple[tuple[int, int], ...]  # (layer, head), in the order they were chosen


@dataclass(frozen=True, slots=True)
class Case:
    """One document, ready to be judged."""

    document: DocumentRows
    at: Windows
    steps: int

    def history(self, heads: Heads) -> Floats:
        """History scores [N, S]: the anchors' own rows, summed over target heads."""
        return sum_heads(self.document, TARGET, heads, lambda rows: history_scores(rows, self.at))

    def lookahead(self, heads: Heads) -> Floats:
        """Lookahead scores [N, S]: the draft rows after each anchor, summed over steps and draft heads."""
        return sum_heads(self.document, DRAFT, heads, lambda rows: lookahead_scores(rows, self.at, self.steps))


def cases(
    trace: AttentionTrace, split: str | None = None, *, window: int = 4, steps: int = 4, lead: int = 0
) -> list[Case]:
    """The trace's documents of a split, None for all.

    window: rows to recall after an anchor; steps: draft rows summed into lookahead; lead: rows an anchor needs before
    it. Raises UserError when the split is empty or its rows hold no window.
    """
    chosen = [d for d in trace.documents if split in (None, d.run.split)]
    if not chosen:
        raise UserError(f"{trace.path} has no document in split {split}", "record more documents or name another split")
    found = []
    for document in chosen:
        start = document.run.first_position
        at = windows(document.recalled(), start, window=window, lead=lead, after=steps)
        found.append(Case(document, at, steps))
    return found


def best_heads(trace: AttentionTrace, source: str, count: int) -> dict[int, Heads]:
    """The `count` best heads of every layer that has candidates, best first."""
    layers = trace.documents[0].layers(source)
    return {layer: tuple((layer, head) for head in trace.best_heads(source, layer, count)) for layer in layers}


def mean_arr(values: Iterable[Floats]) -> float:
    """The mean over documents of the mean over each one's anchors."""
    return float(np.mean([float(value.mean()) for value in values]))


def sum_heads(document: DocumentRows, source: str, heads: Heads, scores: Callable[[Floats], Floats]) -> Floats:
    """Scores [N, S] summed over heads, in their order."""
    first, *others = (scores(document.rows(source, layer, head)) for layer, head in heads)
    total = first.astype(np.float64)
    for other in others:
        total += other
    return total
