"""Timed work without pauses for Python's garbage.

A full collection walks every object of the process. With a tokenizer and the libraries loaded that takes .2 s on a CPU,
as long as a hundred rounds on a GPU take, and comes when it likes.
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
