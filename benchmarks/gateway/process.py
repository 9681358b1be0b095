"""Processes of a bench: started, spoken to line by line, and ended with it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil

from benchmarks.gateway.client import Job, Result
from benchmarks.gateway.workload import Workload

START_S = 60.0
STOP_S = 10.0
LINE_BYTES = 1 << 30


class Process:
    """A program of its own. Its output goes nowhere, unless it is read here."""

    def __init__(self, *command: str) -> None:
        self._command = command
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        return self._running.pid

    @property
    def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise RuntimeError("the process was not started")
        return self._process

    async def start(self, *, talks: bool = False) -> None:
        pipe = asyncio.subprocess.PIPE if talks else asyncio.subprocess.DEVNULL
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=pipe,
            stdout=pipe,
            stderr=None if talks else asyncio.subprocess.DEVNULL,
            limit=LINE_BYTES,
        )

    async def ask(self, line: bytes | None) -> bytes:
        """The line that it answers to `line`, or prints by itself.

        Raises:
            RuntimeError: it ended.
        """
        process = self._running
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the process was not started to talk")
        if line is not None:
            process.stdin.write(line + b"\n")
            await process.stdin.drain()
        answer = await process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{Path(self._command[-2]).name} ended with {await process.wait()}")
        return answer

    async def stop(self) -> None:
        """Ask it to end; kill it if it does not."""
        if self._process is None or self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


class Engine(Process):
    """`engine.py`; its origin is `url`."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(*_program("engine.py"), str(workload.answer_file))
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self) -> None:
        await self.start(talks=True)
        self.port = int(await self.ask(None))

    async def control(self, *, delay_s: float = 0.0, interval_s: float = 0.0) -> None:
        """How long answers and events of streams are waited for; forgets the streams so far."""
        async with aiohttp.ClientSession() as session:
            settings = {"delay_s": delay_s, "interval_s": interval_s}
            async with session.post(f"{self.url}/control", json=settings) as response:
                response.raise_for_status()

    async def emitted(self) -> list[list[float]]:
        """When the events of each stream were written, since `control`."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self.url}/emitted") as response,
        ):
            emitted: list[list[float]] = await response.json()
            return emitted


class Client(Process):
    """`client.py`."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(*_program("client.py"), str(workload.conversations_file))

    async def run(self, job: Job) -> Result:
        """Send a job's load.

        Raises:
            RuntimeError: a request failed, or was answered otherwise.
        """
        result = await self.attempt(job)
        if result.errors:
            raise RuntimeError(f"{len(result.errors)} requests failed, e.g. {result.errors[0]}")
        return result

    async def attempt(self, job: Job) -> Result:
        """As `run`, with the errors in the result."""
        return Result(**orjson.loads(await self.ask(orjson.dumps(job))))


def _program(name: str) -> tuple[str, ...]:
    return sys.executable, "-P", str(Path(__file__).with_name(name))


async def wait_until_served(url: str) -> None:
    """Return once `url` answers 200.

    Raises:
        RuntimeError: not within a minute.
    """
    last: Any = None
    async with aiohttp.ClientSession() as session:
        for _ in range(int(START_S / 0.1)):
            try:
                async with session.get(url) as response:
                    if response.status == 200:
                        return
                    last = f"status {response.status}"
            except aiohttp.ClientError as e:
                last = e
            await asyncio.sleep(0.1)
    raise RuntimeError(f"{url} did not answer within {START_S:g} s ({last})")


def resident_bytes(pid: int) -> int:
    rss: int = psutil.Process(pid).memory_info().rss
    return rss
