"""Timed work without pauses for Python's garbage.

A collection walks what was made since the last one, now and then every object of the process. The tokens of a batch of
long prompts alone are millions of references, and a walk over a few copies of them takes as long as many rounds. It
comes when it likes, so it hits one policy and spares another.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Nothing is collected until the end, unless someone asks; what became garbage meanwhile is found afterwards."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
