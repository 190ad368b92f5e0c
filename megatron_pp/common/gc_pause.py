"""The garbage collector, paused while plans are made."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """A plan is hundreds of thousands of tuples without a cycle. The collector would walk over all of them again each
    time their number has grown by a quarter, which takes half of the time that a large plan takes.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
