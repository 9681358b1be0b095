"""The engine and the client of the bench, as processes of their own."""

from __future__ import annotations

from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import orjson
import psutil

from benchmarks.gateway.client import Job, Result
from benchmarks.gateway.workload import Workload
from benchmarks.processes import ask, python


def program(name: str, argument: object) -> AbstractAsyncContextManager[Process]:
    """A file of this folder as a process that imports nothing of ours."""
    return python("-P", str(Path(__file__).with_name(name)), str(argument), output=PIPE)


@dataclass(frozen=True, slots=True)
class Engine:
    """`engine.py`; its origin is `url`."""

    process: Process
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def control(
        self,
        *,
        delay_s: float = 0.0,
        interval_s: float = 0.0,
        n_events: int = 0,
        answer: Literal["text", "call"] = "text",
    ) -> list[list[float]]:
        """Set the time before an answer and between events of a stream, how many events that has
        (0: one a token), and which answer is given. Return, for each stream asked for since the
        last call, when its events were written."""
        settings = {
            "delay_s": delay_s,
            "interval_s": interval_s,
            "n_events": n_events,
            "answer": answer,
        }
        emitted: list[list[float]] = orjson.loads(await ask(self.process, orjson.dumps(settings)))
        return emitted


@asynccontextmanager
async def running_engine(workload: Workload) -> AsyncIterator[Engine]:
    async with program("engine.py", workload.answer_file) as process:
        yield Engine(process, int(await ask(process)))


@dataclass(frozen=True, slots=True)
class Client:
    """`client.py`."""

    process: Process

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
        """Send a job's load as `run` does, but return errors in the result."""
        return Result(**orjson.loads(await ask(self.process, orjson.dumps(job))))


@asynccontextmanager
async def running_client(workload: Workload) -> AsyncIterator[Client]:
    async with program("client.py", workload.conversations_file) as process:
        yield Client(process)


def resident_bytes(pid: int) -> int:
    rss: int = psutil.Process(pid).memory_info().rss
    return rss
