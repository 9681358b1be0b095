"""Memory of a long-running process: how often Python looks for garbage, how glibc gives free memory
back to the system, and on which pages the rest lies (nothing is done elsewhere than on glibc).
Imports nothing of ours."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BETWEEN_COLLECTIONS = (25_000, 5, 20)
"""Allocations, less what was freed, before the youngest objects are looked through; and how many
times before older ones are. Reference counting frees the objects of a call, so collections find
nothing, but each walks through the objects of all calls in flight: with Python's 700 they took a
third of the gateway's CPU time. A walk through 50,000 young objects takes 12 to 19 ms, in which no
call goes on."""

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
"""mallopt(3)."""
MADV_COLLAPSE = 25
"""madvise(2), since Linux 6.1."""
HUGE_PAGE_BYTES = 2**21
TRIM_S = 10.0
"""A trim takes 5 to 10 ms in a heap of 400 MB, while which allocations wait; rarer ones longer."""


@contextmanager
def growing_heap() -> Iterator[None]:
    """While millions of objects are made that stay: every collection would walk through all."""
    was_on = gc.isenabled()  # a program that opens a pool may have turned it off
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def settle_heap(between_collections: tuple[int, int, int] = BETWEEN_COLLECTIONS) -> None:
    """Take all that is loaded by now out of garbage collection: torch, transformers and Ray are
    hundreds of thousands of objects that no collection need walk through again.

    Args:
        between_collections: thresholds of `gc.set_threshold`.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*between_collections)


def use_one_heap() -> None:
    """One heap for all threads that are started from now on: with one for each, what one thread
    takes and another gives back leaves holes in all of them."""
    if (libc := _glibc()) is not None:
        libc.mallopt(M_ARENA_MAX, 1)


def return_large_blocks(n_bytes: int) -> None:
    """Give memory blocks of `n_bytes` and more back to the system as soon as they are free, as
    glibc does with 128 kB until the first of them is freed. For a process that passes messages on:
    what it received them in is freed in another order, and the holes would stay."""
    if (libc := _glibc()) is not None:
        libc.mallopt(M_MMAP_THRESHOLD, n_bytes)


def return_free_pages() -> None:
    """Give free pages between smaller blocks back now and every `TRIM_S` seconds: a heap keeps the
    size of its busiest moment, and the longer a process runs the busier that was.

    Those at its end, too, wait for that: once a block's size for `return_large_blocks` is set,
    glibc gives all but 128 kB of them back at each free, and the next body or prompt of that size
    takes them again, page by page (3 µs each on a virtual machine).
    """
    libc = _glibc()
    if libc is not None:
        libc.mallopt(M_TRIM_THRESHOLD, -1)

    def trim() -> None:
        while libc is not None:
            libc.malloc_trim(0)  # without the interpreter's lock
            time.sleep(TRIM_S)

    threading.Thread(target=trim, name="trim", daemon=True).start()


def use_huge_pages() -> None:
    """Move what is loaded by now to pages of 2 MB, where Linux can (6.1). What a call needs lies
    all over the heap: after a pause, each small page of it is looked up in the page table again, on
    a virtual machine twice. It takes 0.3 s for 180 MB, in which other threads go on."""
    if (libc := _glibc()) is None:
        return
    libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for start, end in _heaps():
        libc.madvise(start, end - start, MADV_COLLAPSE)  # fails where nothing is in memory


def _heaps() -> list[tuple[int, int]]:
    """Addresses of writable memory that is no file's, whole huge pages of it."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, inode, *name = line.split(maxsplit=5)
        if access.startswith("rw") and inode == "0" and name in ([], ["[heap]"]):
            start, end = (int(each, 16) for each in addresses.split("-"))
            start = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
            end = end // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
            if start < end:
                found.append((start, end))
    return found


def _glibc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:
        return None
    return libc if hasattr(libc, "malloc_trim") else None
