"""Attention recall: how much of a row's attention falls on the keys that a selection read. Source: Dustin.

    ARR_i(K) = sum over j in K of A[i, j]            window ARR: its mean over the w rows that follow

All rows of one anchor are judged by one selection, made when the anchor's row was the last one known. Of the keys it
saw, `budget` are read: sink, recent, and chosen ones. Keys after it are the verified block's own; they are always read
and count towards ARR, not towards the budget. Ties go to the lowest key. Sums over w rows are linear, so the rows of a
window are averaged once and selections are judged on the mean row.

Arrays: A attention rows [R, S], row r at position first_position + r; N anchors. Leaves out which heads make the
scores (simulator.heads) and files.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specdial.policies.errors import UserError

Floats = npt.NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class Frame:
    """What a selection may hold. budget: keys in all; sink and recent: first and last keys that are always among them.

    Raises UserError when sink and recent alone exceed the budget.
    """

    budget: int
    sink: int = 4
    recent: int = 16

    def __post_init__(self) -> None:
        if min(self.sink, self.recent) < 0 or self.sink + self.recent > self.budget:
            raise UserError(
                f"budget {self.budget} cannot hold {self.sink} sink and {self.recent} recent keys", "raise the budget"
            )

    @property
    def free(self) -> int:
        """Keys left for scores to choose."""
        return self.budget - self.sink - self.recent


@dataclass(frozen=True, slots=True)
class Order:
    """Of each anchor the best-scored keys among those that scores may choose: all that were seen but sink and recent.

    keys: [N, C], by falling score, ties lowest first; past the last one, S. gain: [N, C] what reading each recalls;
    rest: [N] what is recalled besides, by sink and recent keys and by those after the seen ones.
    """

    keys: npt.NDArray[np.int64]
    gain: Floats
    rest: Floats


@dataclass(frozen=True, slots=True)
class Windows:
    """What is to be recalled at each anchor. future: [N, S] the mean of the w rows after it.

    index: [N] the anchor's row; seen: [N] keys its row sees, which are the ones a selection chooses from.
    """

    future: Floats
    index: npt.NDArray[np.int64]
    seen: npt.NDArray[np.int64]


def windows(recalled: Floats, first_position: int, *, window: int = 4, lead: int = 0, after: int = 0) -> Windows:
    """Every anchor of `recalled` [R, S] that has `lead` rows before it, and `window` rows and `after` rows behind it.

    Raises UserError when there is none.
    """
    index = np.arange(lead, len(recalled) - max(window, after))
    if window < 1 or not len(index):
        raise UserError(f"{len(recalled)} rows hold no window of {window} after {lead} rows", "record more rows")
    future = np.mean([recalled[index + step] for step in range(1, window + 1)], axis=0)  # [N, S]
    return Windows(future, index, first_position + index + 1)


def history_scores(rows: Floats, at: Windows, delta: int = 1) -> Floats:
    """Scores [N, S] from the row `delta` positions before the first row to recall; 1: the anchor's own row."""
    if delta < 1 or at.index[0] < delta - 1:
        raise UserError(f"no row lies {delta} positions before every window", "raise the lead or lower delta")
    return rows[at.index - (delta - 1)]


def lookahead_scores(rows: Floats, at: Windows, steps: int) -> Floats:
    """Scores [N, S]: the drafter's rows [R, S] after the anchor, `steps` of them summed, teacher-forced."""
    if steps < 1 or at.index[-1] + steps >= len(rows):
        raise UserError(f"no {steps} drafter rows follow every anchor", "lower the steps or record more rows")
    total = rows[at.index + 1]  # [N, S]
    for step in range(2, steps + 1):
        total += rows[at.index + step]
    return total


def falling(at: Windows, scores: Floats, frame: Frame, depth: int | None = None) -> Order:
    """The first `depth` keys by falling scores [N, S] >= 0, as many as the frame has free by default. C = depth."""
    N, S = scores.shape
    depth = frame.free if depth is None else depth
    keys = np.full((N, depth), S)
    gain, rest = np.zeros((N, depth)), np.zeros(N)
    for n, (row, future, seen) in enumerate(zip(scores, at.future, at.seen)):
        first, last = min(frame.sink, seen), max(min(frame.sink, seen), seen - frame.recent)
        choice = row[first:last]
        best = np.flatnonzero(choice > 0)  # of a record most scores are 0
        if len(best) < depth:
            best = np.arange(len(choice))
        elif depth:  # what lies below the last of them is not sorted
            best = best[choice[best] >= np.partition(choice[best], -depth)[-depth]]
        best = first + best[np.argsort(-choice[best], kind="stable")[:depth]]
        keys[n, : len(best)] = best
        gain[n, : len(best)] = future[best]
        rest[n] = future[:first].sum(dtype=np.float64) + future[last:].sum(dtype=np.float64)
    return Order(keys, gain, rest)


def recall(history: Order, free: int, lookahead: Order | None = None, m: int = 0) -> Floats:
    """Window ARR of each anchor, [N], when `free` keys are chosen: the first m by lookahead, the rest by history.

    m >= free is lookahead alone. Both orders are as deep as what is chosen by them, history's by `free`.
    """
    arr: Floats = history.rest.copy()
    if lookahead is None or m == 0:
        arr += history.gain[:, :free].sum(-1)
        return arr
    m = min(m, free)
    first = lookahead.keys[:, :m]
    width = 1 + max(int(keys.max(initial=0)) for keys in (first, history.keys))
    taken = np.zeros((len(first), width), dtype=np.bool_)
    np.put_along_axis(taken, first, True, axis=-1)
    others = ~np.take_along_axis(taken, history.keys, axis=-1)  # [N, C]
    others &= np.cumsum(others, axis=-1) <= free - m
    arr += lookahead.gain[:, :m].sum(-1) + (history.gain * others).sum(-1)
    return arr


def scored_arr(at: Windows, scores: Floats, frame: Frame) -> Floats:
    """Window ARR [N] of the best keys by these scores [N, S]: history ARR or lookahead ARR, by whose they are."""
    return recall(falling(at, scores, frame), frame.free)


def hybrid_arr(at: Windows, lookahead: Floats, history: Floats, m: int, frame: Frame) -> Floats:
    """Window ARR [N] of m keys by lookahead scores and the rest by history scores, [N, S] each."""
    return recall(falling(at, history, frame), frame.free, falling(at, lookahead, frame), m)


def oracle_arr(at: Windows, frame: Frame) -> Floats:
    """Window ARR [N] of the best keys by the mean future row itself: no selection of this frame recalls more."""
    return scored_arr(at, at.future, frame)


def arr_by_delta(
    recalled: Floats, rows: Floats, first_position: int, deltas: Sequence[int], frame: Frame
) -> list[float]:
    """Mean ARR of single rows, keys chosen by the row `delta` before each; every delta over the same rows.

    recalled, rows: [R, S] what is recalled and what scores. Only the scores age: sink, recent and budget are those of
    the recalled row, its own key included, and what its scorer could not see scores 0. Delta 0 is the row itself.
    """
    furthest = max(deltas)
    target = np.arange(furthest, len(recalled))
    if min(deltas) < 0 or not len(target):
        raise UserError(f"{len(recalled)} rows hold none {furthest} after another", "record more rows or lower deltas")
    at = Windows(recalled[target], target, first_position + target + 1)
    return [float(scored_arr(at, rows[target - delta], frame).mean()) for delta in deltas]
