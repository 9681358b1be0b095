"""Work in threads: foreign code, of which a function that never returns holds up nobody else, and
what has to be computed in one and the same thread."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

from stepwell.datapool.own_loop import with_own_loop

T = TypeVar("T")


async def in_thread(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """`asyncio.to_thread` in a daemon thread of its own, with an event loop of its own: one that
    hangs takes no thread from others and does not keep the process from ending. Costs some 0.2 ms
    more."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: T | None, error: Exception | None) -> None:
        if future.done():
            return  # given up meanwhile
        if error is None:
            future.set_result(cast(T, result))
        else:
            future.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = context.run(with_own_loop, function, *args, **kwargs)
        except Exception as e:  # noqa: BLE001 - raised where it is awaited
            error = e
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            return  # the loop is closed: nobody waits

    threading.Thread(target=run, name=function_name(function), daemon=True).start()
    return await future


class ComputeThread:
    """The one thread that computes with the model: torch keeps a pool of threads for each thread
    that calls it, and the model is not to be shared."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="backend")

    async def __call__(self, work: Callable[..., T], *args: Any) -> T:
        """Run `work` in that thread and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, *args)

    def close(self) -> None:
        """Returns once nothing is computed any more."""
        self._executor.shutdown()


def function_name(function: Any) -> str:
    name: str = getattr(function, "__qualname__", type(function).__qualname__)
    return name
