"""What can be said of a decoding while it runs: tokens per second, acceptance, the present k; accepted drafts tinted.

Counting a round costs a microsecond or two, and what is shown changes twice a second: rounds are being timed.
"""

import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from specdial.policies.progress import Bar, progress

if TYPE_CHECKING:
    from specdial.engine.round import Round

__all__ = ["Bar", "Pace", "TextView", "progress", "text_view", "watched"]

EVERY_S = 0.5
TINT, UNTINT = "\x1b[36m", "\x1b[39m"
KEEP_TITLE, TITLE, OLD_TITLE = "\x1b[22;2t", "\x1b]2;{}\x07", "\x1b[23;2t"  # of the terminal's window (xterm)


class Pace:
    """Sums over the rounds of one decoding or several; the time is that of the rounds."""

    def __init__(self) -> None:
        self.tokens = 0
        self._drafted = self._accepted = 0
        self._us = self._k = 0.0

    def add(self, round_: "Round") -> None:
        """Count one round of all its sequences."""
        drafted = int(round_.k.sum())
        self.tokens += sum(map(len, round_.emitted))
        self._drafted += drafted
        self._accepted += int(round_.accepted.sum())
        self._us += round_.spent_us
        self._k = drafted / max(int(round_.active.sum()), 1)

    def __str__(self) -> str:
        """41.2 tokens/s, alpha 0.81, k 4."""
        alpha = f", alpha {self._accepted / self._drafted:.2f}" if self._drafted else ""
        return f"{self.tokens / max(self._us, 1.0) * 1e6:.1f} tokens/s{alpha}, k {self._k:.3g}"


def watched(rounds: "Iterable[Round]", bar: Bar, pace: Pace) -> "Iterator[Round]":
    """The rounds as they come; the bar's words follow."""
    said_s = 0.0
    for round_ in rounds:
        yield round_
        pace.add(round_)
        if time.monotonic() - said_s > EVERY_S:
            bar.say(str(pace))
            said_s = time.monotonic()


class TextView:
    """Text as it is written to standard output.

    On a terminal what the drafter wrote has another colour (not with NO_COLOR or TERM=dumb), and the window's title
    says how it goes; elsewhere nothing is added to the text, and a bar on standard error says it.
    """

    def __init__(self, total: int, bar: Bar | None) -> None:
        self._total, self._bar, self._pace = total, bar, Pace()
        self._tints = bar is None and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        self._said_s = self._started_s = time.monotonic()

    def write(self, text: str, *, drafted: bool) -> None:
        """Write and flush."""
        sys.stdout.write(f"{TINT}{text}{UNTINT}" if drafted and text and self._tints else text)
        sys.stdout.flush()

    def count(self, round_: "Round") -> None:
        """Say how it goes, now and then."""
        self._pace.add(round_)
        if self._bar is not None:
            self._bar.advance(sum(map(len, round_.emitted)), str(self._pace))
        elif self._tints and time.monotonic() - self._said_s > EVERY_S:
            self._said_s = time.monotonic()
            left_s = (self._said_s - self._started_s) * (self._total / max(self._pace.tokens, 1) - 1.0)
            words = f"{self._pace.tokens}/{self._total} tokens, {self._pace}, {left_s:.0f} s left"
            sys.stdout.write(TITLE.format(words))


@contextmanager
def text_view(total: int) -> Iterator[TextView]:
    """A view of a text of at most `total` new tokens."""
    if not sys.stdout.isatty():
        with progress("run", total) as bar:
            yield TextView(total, bar)
        return
    view = TextView(total, None)
    sys.stdout.write(KEEP_TITLE if view._tints else "")
    try:
        yield view
    finally:
        sys.stdout.write(OLD_TITLE if view._tints else "")
