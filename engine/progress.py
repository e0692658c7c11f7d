"""A progress bar on a terminal, a plain line now and then elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_INTERVAL_S = 15.0


class Bar:
    """Counts steps of a known total."""

    def __init__(self, title: str, total: int, live: Progress | None) -> None:
        self._title, self._total, self._live = title, total, live
        self._done = 0
        self._task = live.add_task(title, total=total) if live else None
        self._last_line_s = time.monotonic()

    def advance(self, steps: int = 1, note: str = "") -> None:
        """Move on by some steps; `note` is shown behind the count."""
        self._done += steps
        if self._live is not None and self._task is not None:
            self._live.update(self._task, advance=steps, description=f"{self._title} {note}".strip())
        elif time.monotonic() - self._last_line_s > LINE_INTERVAL_S:
            self._last_line_s = time.monotonic()
            print(f"{self._title} {self._done}/{self._total} {note}".strip(), file=sys.stderr, flush=True)


@contextmanager
def progress(title: str, total: int) -> Iterator[Bar]:
    """A bar over `total` steps, on stderr; live only on a terminal."""
    if not sys.stderr.isatty():
        yield Bar(title, total, None)
        return
    from rich.console import Console

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as live:
        yield Bar(title, total, live)
