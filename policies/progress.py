"""Progress of long verbs: a live bar on a terminal, a plain line now and then elsewhere. On standard error alone."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

LINE_INTERVAL_S = 15.0


class Bar:
    """Counts steps of a known total, and shows words beside them. A total of 0 is not known yet."""

    def __init__(self, title: str, total: int, live: Progress | None) -> None:
        self._title, self._total, self._live = title, total, live
        self._done, self._note = 0, ""
        self._task = live.add_task(title, total=total or None, note="") if live else None
        self._last_line_s = self._started_s = time.monotonic()

    def expect(self, total: int) -> None:
        """The total, now that it is known; the time of its steps starts here."""
        self._total, self._started_s = total, time.monotonic()
        if self._live is not None and self._task is not None:
            self._live.update(self._task, total=total)

    def advance(self, steps: int = 1, note: str = "") -> None:
        """Move on by some steps. note: shown beside the count from now on."""
        self._done += steps
        self.say(note)

    def say(self, note: str, *, now: bool = False) -> None:
        """Change the words; a line is due only now and then, or `now`, where something long begins."""
        self._note = note or self._note
        if self._live is not None and self._task is not None:
            self._live.update(self._task, completed=self._done, note=escape(f"{self._note}{self._time_left()}"))
        elif now or time.monotonic() - self._last_line_s > LINE_INTERVAL_S:
            self._last_line_s = time.monotonic()
            count = f" {self._done}/{self._total}" if self._total else ""
            words = f"{self._title}{count} {self._note}".strip()
            print(f"{words}{self._time_left()}", file=sys.stderr, flush=True)

    def _time_left(self) -> str:
        """What is left at the speed so far, once there is one; one step is enough to tell."""
        if not 0 < self._done < self._total:
            return ""
        left_s = (time.monotonic() - self._started_s) / self._done * (self._total - self._done)
        return f", about {left_s / 60:.0f} min left" if left_s >= 90 else f", about {left_s:.0f} s left"


@contextmanager
def progress(title: str, total: int) -> Iterator[Bar]:
    """A bar over `total` steps, 0 where that is not known yet; live only on a terminal, and gone when done."""
    if not sys.stderr.isatty():
        yield Bar(title, total, None)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as live:
        yield Bar(title, total, live)
