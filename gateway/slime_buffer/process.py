"""This module runs a rollout generator in a process of its own, so that its code, its processes and
its failures are not the gateway's.

    /start_rollout ──► running ──► finished | failed (why)
                          └── started with another payload, or the gateway ends ──► stopped

One at a time. With its end, or the gateway's (even a kill), all processes that the generator
started end, too (`backends/processes.py`). Owns: that process. Does not own: what is run
(`generators.py`), what it writes (`writes.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

import orjson

from stepwell.backends.processes import Child, spawn
from stepwell.gateway.slime_buffer.generators import KEY, Generator, load_generator

log = logging.getLogger(__name__)

STOP_S = 5.0
"""Seconds after which a generator that was asked to end is killed."""
WORDS = 2000
"""Bytes that are kept of why a generator failed."""


class RolloutProcess:
    """The generator that runs, or ran last. Used in the event loop only."""

    def __init__(self) -> None:
        self.state = "none"
        """`none` (never started), `running`, `finished`, `stopped` or `failed (why)`."""
        self._started = b""
        """Path and payload of the generator, as JSON: 1 and true are two payloads."""
        self._child: Child[asyncio.subprocess.Process] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()

    async def start(self, generator: Generator, payload: Mapping[str, Any], key: str) -> None:
        """Run it, unless it runs with this very payload already; what runs otherwise is stopped."""
        async with self._starting:
            await self._start(generator, payload, key)

    async def _start(self, generator: Generator, payload: Mapping[str, Any], key: str) -> None:
        started = orjson.dumps([generator.path, payload], option=orjson.OPT_SORT_KEYS)
        if self.state == "running" and self._started == started:
            return
        await self.stop()
        read, write = os.pipe()
        paths = [path or os.getcwd() for path in sys.path]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), KEY: key}
        try:
            self._child = child = await spawn(
                [sys.executable, "-m", __name__, str(write)],
                stdin=asyncio.subprocess.PIPE,
                pass_fds=(write,),
                env=environment,
            )
        except BaseException:  # cancelled, too: `_watched` is not there to close it
            os.close(read)
            raise
        finally:
            os.close(write)
        self._started, self.state = started, "running"
        self._watch = asyncio.create_task(self._watched(child, read))
        if (stdin := child.process.stdin) is not None:
            stdin.write(started)
            with contextlib.suppress(ConnectionError):  # it died: `_watched` says so
                await stdin.drain()
            stdin.close()

    async def stop(self) -> None:
        """End the generator and all that it started."""
        if self._child is None or self._watch is None or self._watch.done():
            return
        self.state = "stopped"
        self._child.signal(signal.SIGTERM)
        await asyncio.wait([self._watch], timeout=STOP_S)
        self._child.signal(signal.SIGKILL)
        await self._watch

    async def _watched(self, child: Child[asyncio.subprocess.Process], read: int) -> None:
        status = await child.process.wait()
        child.kill()  # what it left behind
        os.set_blocking(read, False)
        try:
            why = os.read(read, WORDS).decode(errors="replace")
        except BlockingIOError:  # held open by what it left behind
            why = ""
        finally:
            os.close(read)
        if self.state == "stopped":
            return
        self.state = "finished"
        if status:
            self.state = f"failed ({why or f'its process ended with status {status}'})"
            log.error("the rollout generator %s", self.state)


# -- in the process itself ------------------------------------------------------------------------


def _main() -> int:
    path, payload = orjson.loads(sys.stdin.buffer.read())
    sys.stdin = open(os.devnull)  # noqa: SIM115 - for as long as the process lives
    try:
        load_generator(path)[1].run_rollout(payload)
    except BaseException as e:  # generators end by SystemExit, and Ctrl-C is told of, too
        if isinstance(e, SystemExit) and not e.code:
            return 0
        os.write(int(sys.argv[1]), f"{type(e).__name__}: {e}".encode()[:WORDS])
        raise
    return 0


if __name__ == "__main__":
    sys.exit(_main())
