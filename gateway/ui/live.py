"""This module looks at the run once a second while somebody watches, so that any number of pages
costs the pool as much as one.

    first page ──► task: tick, tick, … ──► every page        one question to the pool per tick
    last page leaves ──► the task ends

A page that is too slow misses ticks; it never holds up another. Does not own what is in a tick
(`dashboard.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from stepwell.gateway.errors import RateLimitedError

log = logging.getLogger(__name__)

TICK_S: Final = 1.0
MAX_PAGES: Final = 64
RETRY_AFTER_S: Final = 10.0


class Watcher:
    """One page that watches; a client's side of a stream (`web.EventStream`)."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self.frame: bytes | None = None
        self.news = asyncio.Event()
        self.is_closed = False

    async def frames(self) -> AsyncIterator[bytes]:
        """Server-sent events until it is closed."""
        while True:
            await self.news.wait()
            self.news.clear()
            if self.is_closed:
                return
            if self.frame is not None:
                yield b"data: " + self.frame + b"\n\n"

    def close(self) -> None:
        self.is_closed = True
        self.news.set()
        self._live.leave(self)


class Live:
    """The pages that watch one gateway.

    Args:
        tick: what is sent to all of them.
    """

    def __init__(self, tick: Callable[[], Awaitable[bytes]]) -> None:
        self._tick = tick
        self._watchers: set[Watcher] = set()
        self._task: asyncio.Task[None] | None = None

    def watch(self) -> Watcher:
        """A page more.

        Raises:
            RateLimitedError: there are `MAX_PAGES`.
        """
        if len(self._watchers) >= MAX_PAGES:
            raise RateLimitedError(
                f"{MAX_PAGES} pages watch this gateway; close some of them", RETRY_AFTER_S
            )
        watcher = Watcher(self)
        self._watchers.add(watcher)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        return watcher

    def leave(self, watcher: Watcher) -> None:
        self._watchers.discard(watcher)

    def close(self) -> None:
        """End every stream: a server that stops waits for them."""
        for watcher in list(self._watchers):
            watcher.close()
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while self._watchers:
            try:
                frame = await self._tick()
            except Exception:  # a bug: the next tick may do better, and pages wait for it
                log.exception("the dashboard's tick failed")
            else:
                for watcher in self._watchers:
                    watcher.frame = frame
                    watcher.news.set()
            await asyncio.sleep(TICK_S)
