"""What a long-running process of ours does once it is up, and asks of its machine. Imports nothing
of ours."""

from __future__ import annotations

import ctypes
import gc
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BETWEEN_COLLECTIONS = (25_000, 5, 20)
"""Allocations, less what was freed, before the youngest objects are looked through; and how many
times before older ones are. Reference counting frees the objects of a call, so collections find
nothing, but each walks through the objects of all calls in flight: with Python's 700 they took a
third of the gateway's CPU time. A walk through 50,000 young objects takes 12 to 19 ms, in which no
call goes on."""

M_MMAP_THRESHOLD = -3
"""mallopt(3)."""

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> bytes | None:
    """16 bytes that change when the machine restarts; None where the kernel does not say."""
    try:
        return uuid.UUID(BOOT_ID.read_text().strip()).bytes
    except (OSError, ValueError):
        return None


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
