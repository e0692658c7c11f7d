"""Timed work without pauses for Python's garbage.

A full collection walks every object of the process, a tokenizer's and the libraries' among them. It takes as long as
many rounds and comes when it likes.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collected() -> Iterator[None]:
    """Collect now; what is left is walked no more until the end, what is made meanwhile still is."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
