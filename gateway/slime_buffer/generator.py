"""This module runs the generator that `gateway.rollout_generator` names, so that agents of slime's
Rollout Buffer start with its trainer.

    /start_rollout ──► running ──► finished | failed (why)      again with another payload: anew

A generator may block for days, so it is called in a daemon thread; one that is async is awaited on
the event loop, where it ends with the gateway. Does not own: what generators write (`writes.py`).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from concurrent.futures import Future
from threading import Thread
from typing import Any

from stepwell.gateway.functions import Function

log = logging.getLogger(__name__)


class RolloutGenerator:
    def __init__(self, function: Function | None) -> None:
        self._function = function
        self._payload: dict[str, Any] | None = None
        self._run: asyncio.Task[None] | None = None
        self.state = "none" if function is None else "not started"

    @property
    def is_configured(self) -> bool:
        return self._function is not None

    def start(self, payload: dict[str, Any]) -> None:
        """Run it, unless it runs with this very payload already."""
        if self._function is None:
            return
        if self._run is not None and not self._run.done():
            if payload == self._payload:
                return
            log.warning("the rollout generator was still running; it is started anew")
            # A thread cannot be stopped: its generator goes on beside the new one, as in slime.
            self._run.cancel()
        self._payload, self.state = payload, "running"
        self._run = asyncio.create_task(self._generate(self._function, payload))

    async def close(self) -> None:
        if self._run is not None:
            self._run.cancel()
            await asyncio.wait([self._run])

    async def _generate(self, function: Function, payload: dict[str, Any]) -> None:
        try:
            result = await _in_daemon_thread(function, payload)
            if inspect.isawaitable(result):
                await result
            state = "finished"
        except Exception as e:  # foreign code: the buffer serves on, and says what happened
            log.exception("the rollout generator failed")
            state = f"failed ({type(e).__name__}: {e!s:.200})"
        if self._run is asyncio.current_task():
            self.state = state


def _in_daemon_thread(function: Function, payload: dict[str, Any]) -> asyncio.Future[Any]:
    done: Future[Any] = Future()
    done.set_running_or_notify_cancel()  # whoever waits may leave; the thread goes on

    def work() -> None:
        try:
            done.set_result(function(payload))
        except SystemExit as e:
            done.set_exception(RuntimeError(f"it called sys.exit({e})"))
        except Exception as e:  # noqa: BLE001 - foreign code; raised where it is awaited
            done.set_exception(e)

    Thread(target=work, name="rollout-generator", daemon=True).start()
    return asyncio.wrap_future(done)
