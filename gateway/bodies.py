"""This module bounds what a request's body holds before objects are made of it, so that none takes
the event loop for seconds: a list of a million empty objects has 3 MB and costs 10 s.

    body ── more than SMALL bytes ──► Holdings(strings, containers, numbers) ──► 413 │ parsed

Owns: the bounds and the one scan over the bytes. Does not own: sizes in bytes and the time that a
body takes (`access.py`), whether a body is JSON (`web.py`).
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Executor
from typing import NamedTuple

import numpy as np

from stepwell.gateway.errors import BodyTooLargeError

SMALL = 65_536
"""Bytes of a body that can hold nothing to be bounded."""
BIG = 1_048_576
"""Bytes of a body that is worked on in a thread where that is possible."""
FEW = 16_384
"""Bytes that are counted as fast without NumPy."""
MAX_TEXT = 12 * 1024 * 1024
"""Bytes of a body that is text: some three million tokens. To parse 30 MB holds the event loop for
0.03 s, and for 0.1 s where the machine has to fetch the memory first, or characters outside ASCII
take four bytes each. A longer body is one of pictures, which are taken out before it is parsed, or
of ids and log-probs."""
MAX_STRINGS = 100_000
"""Strings and keys of one body."""
MAX_CONTAINERS = 20_000
"""Objects and lists of one body: a conversation of 5,000 tool calls has as many."""
MAX_NUMBERS = 1_000_000
"""Numbers of a body that may bring ids and log-probs; elsewhere they count as strings do."""
_WITH_LOG_PROBS = ("/submit_steps", "/buffer/write", "/compute_reward")
_WITH_IDS = ("/completions", "/generate", *_WITH_LOG_PROBS)

_QUOTE, _BACKSLASH, _COMMA, _LIST, _OBJECT = b'"\\,[{'


_thread = threading.local()


class Holdings(NamedTuple):
    """Counts of what a JSON text holds; upper bounds of one that is no JSON."""

    strings: int
    containers: int
    values: int
    """Members of containers, but for the first of each."""


class Signs(NamedTuple):
    """Counts of signs in a part of a JSON text, in its texts too. Those of a whole are the sum of
    its parts'."""

    quotes: int = 0
    opened: int = 0
    """Brackets and braces that open."""
    commas: int = 0

    def __add__(self, other: Signs) -> Signs:  # type: ignore[override]
        quotes, opened, commas = other
        return Signs(self.quotes + quotes, self.opened + opened, self.commas + commas)

    def fit(self, path: str) -> bool:
        """True if a body of this path certainly holds no more than one may."""
        most = _most(path)
        return (
            (self.quotes + 1) // 2 <= most.strings
            and self.opened <= most.containers
            and self.commas <= most.values
        )


_MOST = Holdings(MAX_STRINGS, MAX_CONTAINERS, MAX_STRINGS)
_MOST_WITH_IDS = _MOST._replace(values=MAX_NUMBERS)
_NAMES = ("texts and keys", "objects and lists", "values")


def _most(path: str) -> Holdings:
    return _MOST_WITH_IDS if path.endswith(_WITH_IDS) else _MOST


def most_bytes(path: str, most: int) -> int:
    """Bytes that a body of this path may have.

    Args:
        most: that any may have.
    """
    return most if path.endswith(_WITH_LOG_PROBS) else min(most, MAX_TEXT)


async def check_holdings(path: str, body: bytes, threads: Executor) -> None:
    """Check a body of more than `SMALL` bytes.

    Raises:
        BodyTooLargeError: the body holds more than one may.
    """
    bounds = _most(path)
    is_wide = False
    if len(body) <= BIG:
        counted = holdings(body, bounds)
    else:
        run = asyncio.get_running_loop().run_in_executor
        counted = await run(threads, holdings, body, bounds)
        if len(body) > MAX_TEXT:
            is_wide = await run(threads, _has_wide, body)
    if is_wide:
        raise BodyTooLargeError(
            f"the request's body has {len(body)} bytes and text outside ASCII, and may have "
            f"{MAX_TEXT} with such text; send less",
            None,
        )
    for n, most, name in zip(counted, bounds, _NAMES, strict=True):
        if n > most:
            raise BodyTooLargeError(
                f"the request's body holds {n} {name}, and may hold {most}; send fewer", None
            )


def holdings(body: bytes, bounds: Holdings) -> Holdings:
    """Count what a body holds. Texts count as if what they say were JSON, unless that exceeds the
    bounds."""
    signs = signs_in(body)
    counted = Holdings((signs.quotes + 1) // 2, signs.opened, signs.commas)
    if all(n <= most for n, most in zip(counted, bounds, strict=True)):
        return counted
    return _outside_strings(np.frombuffer(body, np.uint8))


def _has_wide(body: bytes) -> bool:
    return not body.isascii() or b"\\u" in body


def signs_in(text: bytes | memoryview) -> Signs:
    """Count the signs of a part of a body."""
    if len(text) < FEW:
        few = bytes(text)
        return Signs(few.count(b'"'), few.count(b"[") + few.count(b"{"), few.count(b","))
    codes = np.frombuffer(text, np.uint8)
    n = dict.fromkeys((_QUOTE, _LIST, _OBJECT, _COMMA), 0)
    is_code: np.ndarray | None = getattr(_thread, "is_code", None)
    if is_code is None:  # one block for all bodies: its pages cost as much as the passes
        is_code = _thread.is_code = np.empty(BIG, bool)
    for start in range(0, len(codes), BIG):
        piece = codes[start : start + BIG]
        for code in n:
            n[code] += int(np.count_nonzero(np.equal(piece, code, out=is_code[: len(piece)])))
    return Signs(n[_QUOTE], n[_LIST] + n[_OBJECT], n[_COMMA])


def _outside_strings(codes: np.ndarray) -> Holdings:
    """Counts of what stands in no string, piece by piece: numpy lets other threads run."""
    strings = containers = values = 0
    is_open, is_escaped = False, False
    for start in range(0, len(codes), BIG):
        piece = codes[start : start + BIG].copy()
        is_escaped = _drop_escaped(piece, is_escaped)
        quotes = piece == _QUOTE
        strings += int(np.count_nonzero(quotes))
        inside = np.bitwise_xor.accumulate(quotes.view(np.uint8)) ^ is_open
        is_open = bool(inside[-1])
        outside = piece[inside == 0]
        containers += int(np.count_nonzero((outside == _LIST) | (outside == _OBJECT)))
        values += int(np.count_nonzero(outside == _COMMA))
    return Holdings((strings + 1) // 2, containers, values)


def _drop_escaped(piece: np.ndarray, is_escaped: bool) -> bool:
    """Zero the bytes behind a backslash that is not escaped itself; true: the next piece's first
    one is one of them.

    Args:
        is_escaped: the first byte is.
    """
    if is_escaped:
        piece[0] = 0
    (at,) = np.nonzero(piece == _BACKSLASH)
    if not len(at):
        return False
    # In a run of backslashes the first, third, … escape what follows them.
    first = np.concatenate(([True], np.diff(at) != 1))
    run = np.flatnonzero(first)[np.cumsum(first) - 1]
    escaped = at[(np.arange(len(at)) - run) % 2 == 0] + 1
    piece[escaped[escaped < len(piece)]] = 0
    return bool(escaped[-1] == len(piece))
