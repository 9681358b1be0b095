"""What tests of all rooms build with and wait by, one of each.

until     the wait for what another task or process does
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def until(condition: Callable[[], T | Awaitable[T]], timeout_s: float = 60.0) -> T:
    """Return what `condition`, a function or coroutine function, says as soon as that is true.

    Raises:
        TimeoutError: it was not within `timeout_s`.
    """
    async with asyncio.timeout(timeout_s):
        while True:
            said = condition()
            found: T = await said if inspect.isawaitable(said) else said
            if found:
                return found
            await asyncio.sleep(0.005)
