"""This module calls a function of the user's in a thread, with an event loop that it may run, and
says which of what foreign code raises ends its caller, too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, TypeVar

T = TypeVar("T")

ENDS: Final = (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit)
"""Raised in foreign code to end whoever runs it. All else that it raises is its own failure: a
SystemExit, too, and the panic of a package that is written in Rust, which are no `Exception`."""


def with_own_loop(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call `function` while `asyncio.get_event_loop()` is a loop of this thread's own, as functions
    written for verl expect; tasks they leave running there are cancelled. Costs some 0.1 ms.

    Raises:
        RuntimeError: `function` raised what no future can carry (StopIteration), or what would end
            the caller's process: a SystemExit, or the panic of a package that is written in Rust.
    """
    with asyncio.Runner() as runner:
        runner.get_loop()  # it is this thread's from now on
        try:
            return function(*args, **kwargs)
        except BaseException as e:  # foreign code: it may end neither its thread nor its caller
            if isinstance(e, Exception) and not isinstance(e, StopIteration):
                raise
            raise RuntimeError(f"{type(e).__name__}: {e}") from e
