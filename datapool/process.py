"""What a long-running process of ours does once it is up. Imports nothing of ours."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

ALLOCATIONS_BETWEEN_COLLECTIONS = 20_000
"""Python's default of 700 is less than one HTTP request makes: collections took a third of the
gateway's CPU time."""


@contextmanager
def growing_heap() -> Iterator[None]:
    """While millions of objects are made that stay: every collection would walk through all."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def settle_heap() -> None:
    """Take all that is loaded by now out of garbage collection: torch, transformers and Ray are
    hundreds of thousands of objects that no collection need walk through again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(ALLOCATIONS_BETWEEN_COLLECTIONS)
