"""Python's garbage collection during a run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def set_aside() -> Iterator[None]:
    """What stands before the first step, most of it modules, is not searched for garbage again: that takes 0.2 s of a
    step every so often. What steps leave behind is then few enough to be found soon, and memory stays level."""
    gc.collect()
    if gc.get_freeze_count():  # by somebody around this run, who will end it
        yield
        return
    gc.freeze()
    gc.collect()  # of nothing: how much there is decides when it is searched again
    try:
        yield
    finally:
        gc.unfreeze()
