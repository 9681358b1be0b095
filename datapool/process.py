"""What a long-running process of ours does once it is up. Imports nothing of ours."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

BETWEEN_COLLECTIONS = (100_000, 5, 20)
"""Allocations, less what was freed, before the youngest objects are looked through; and how many
times before older ones are. What serves a call is freed by its last reference and leaves
collections nothing to find, but each walks through all calls in flight: 20 to 60 ms with 512 of
them. So they are left to what really grows. (With Python's 700 they took a third of the gateway's
CPU time.)"""

M_MMAP_THRESHOLD = -3
"""mallopt(3)."""


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
    gc.set_threshold(*BETWEEN_COLLECTIONS)


def return_large_blocks() -> None:
    """Give memory blocks of 256 kB and more back to the system as soon as they are free, as glibc
    does until the first of them is freed. For a process that passes messages on: what it received
    them in is freed in another order, and the holes would stay. Elsewhere than on glibc: nothing.
    """
    try:
        ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, 1 << 18)
    except (OSError, AttributeError):
        return
