"""The generation loop: one thread that owns the scheduler, and the door to it.

Everything that touches the scheduler runs on this thread, between two steps; the event loop only
posts commands and is told, once per step, which requests have news. Weights are loaded here too:
nothing else computes meanwhile, so a request never sees half-replaced weights.

If a step raises, the engine cannot vouch for its state: every request in flight is aborted with
the reason, `failure` is set and `on_failure` runs. The process then exits; its supervisor restarts
it at the current weights.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from stepwell.backends.engines.embedded.request import Request
from stepwell.backends.engines.embedded.scheduler import Scheduler

T = TypeVar("T")
log = logging.getLogger(__name__)


class EngineStoppedError(RuntimeError):
    """The generation loop has ended; nothing can be generated any more."""


class GenerationLoop:
    """Runs a scheduler on its own thread. Requests and commands may come from any thread."""

    def __init__(self, scheduler: Scheduler, *, threads: int = 1) -> None:
        self.scheduler = scheduler
        self.failure: BaseException | None = None
        self._threads = threads
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._updates: list[tuple[Callable[[], None], Future[Any]]] = []
        """Updates that wait for a pause or an idle moment, each with the future of its result."""
        self._stopping = False
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._on_failure: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)

    def start(
        self, event_loop: asyncio.AbstractEventLoop, on_failure: Callable[[], None] = lambda: None
    ) -> None:
        self._event_loop = event_loop
        self._on_failure = on_failure
        self._thread.start()

    def stop(self) -> None:
        """Abort what is in flight and end the thread. Idempotent."""

        def stopping() -> None:
            self.scheduler.abort(None)
            self._stopping = True

        if self._thread.is_alive():
            self._commands.put(stopping)
            self._thread.join()

    @property
    def alive(self) -> bool:
        return self.failure is None and self._thread.is_alive()

    # -- the door -----------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a validated request; its `on_update` is called on the event loop."""
        self._require_alive()
        self._commands.put(lambda: self.scheduler.submit(request))

    def cancel(self, request: Request) -> None:
        """Abort a request whose client has gone; frees its row."""
        self._commands.put(lambda: self.scheduler.cancel(request))

    async def call(
        self, fn: Callable[[Scheduler], T], *, is_update: bool = False, abort_all: bool = False
    ) -> T:
        """`fn(scheduler)` on the generation thread, between two steps. An update, which replaces
        weights, waits until the scheduler is paused or drained; `abort_all` drains it at once.

        Raises:
            WeightLoadError, InvalidRequestError: as `fn` does.
        """
        self._require_alive()
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return  # a step took longer than the caller waited
            try:
                future.set_result(fn(self.scheduler))
            except BaseException as e:  # noqa: BLE001 - handed to the caller
                future.set_exception(e)

        def wait() -> None:
            if abort_all:
                self.scheduler.abort(None)
            self._updates.append((run, future))

        self._commands.put(wait if is_update else run)
        return await asyncio.wrap_future(future)

    def _require_alive(self) -> None:
        if not self.alive:
            raise EngineStoppedError(f"the generation loop has ended ({self.failure!r})")

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            while not self._stopping:
                self._obey()
                if self._can_update:
                    self._updates.pop(0)[0]()
                if self.scheduler.has_work:
                    # Requests that wait while an update is due start under the new weights.
                    self.scheduler.step(admit=not self._updates)
                self._announce()
        except (
            Exception
        ) as e:  # kept for `failure`: the process ends with it, the supervisor restarts
            log.exception("a generation step failed; the engine ends")
            self.failure = e
        finally:
            self._reject_rest()
            if self.failure is not None and self._event_loop is not None:
                self._event_loop.call_soon_threadsafe(self._on_failure)

    @property
    def _can_update(self) -> bool:
        return bool(self._updates) and (self.scheduler.paused or not self.scheduler.running)

    def _obey(self) -> None:
        """Run the queued commands; wait for one if there is nothing else to do."""
        block = not (self.scheduler.has_work or self._can_update or self._stopping)
        while True:
            try:
                command = self._commands.get(block=block)
            except queue.Empty:
                return
            command()
            block = False

    def _announce(self) -> None:
        news = [r for r in self.scheduler.take_changed() if r.due()]
        if not news or self._event_loop is None:
            return
        for request in news:
            request.announced = len(request.output_ids)

        def notify() -> None:
            for request in news:
                if request.on_update is not None:
                    request.on_update()

        try:
            self._event_loop.call_soon_threadsafe(notify)
        except RuntimeError:  # the event loop has closed: nobody is left to tell
            self._stopping = True

    def _reject_rest(self) -> None:
        """Answer everybody who waits on a loop that has ended."""
        message = f"the generation loop has ended ({self.failure!r})"
        error = EngineStoppedError(message)
        while True:
            try:
                command = self._commands.get(block=False)
            except queue.Empty:
                break
            command()  # which may be an update's, and then stands among the others
        for _, future in self._updates:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        self._updates.clear()
        self.scheduler.abort(None, message)
        self._announce()
