"""The stores that are compared, each behind the same few calls.

A `Store` turns gateway calls into its own form, stores them and hands out 128 steps at a time.
Only `unpack` is outside the measured part: it gives the fetched content back for the exactness
check. TransferQueue is in `transfer_queue.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import pickle
import struct
import tempfile
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import ray
import uvloop

from benchmarks.pool.cluster import RunningPool, pid_of, running_pool
from benchmarks.pool.workload import GROUPS_PER_FETCH, ROLLOUTS, STEPS_PER_FETCH, Call
from benchmarks.system import System
from stepwell.datapool import Step
from stepwell.datapool.config import Durability


class Store(System):
    """A store of steps."""

    max_fetches = 4
    """Most fetches that the system can have under way."""

    @abstractmethod
    async def submit(self, calls: Sequence[Call]) -> None:
        """Store `calls`; returns once the store has acknowledged them."""

    @abstractmethod
    async def fetch(self) -> Any:
        """Wait for the next 128 steps, in the form a consumer gets them. Removes them."""

    @abstractmethod
    def unpack(self, batch: Any) -> list[Call]:
        """The content of a fetched batch."""

    async def drained(self) -> None:  # most stores have nothing left to do
        """Everything submitted was fetched; called outside the measured part."""


class Stepwell(Store):
    """The DataPool through its client, at one level of durability.

    Args:
        options: further keys of the pool.
    """

    def __init__(self, durability: Durability, shards: int = 1, **options: Any) -> None:
        self.name = f"Stepwell ({durability})" + (f", {shards} shards" if shards > 1 else "")
        self.durability = durability
        self._options = {"durability": durability, "shards": shards, **options}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with running_pool(**self._options) as pool:
            self.client, self.pids, self.folder = pool.client, await pool.pids(), pool.folder
            self._submit_steps, self._fetch_batch = self._calls(pool)
            yield

    def _calls(self, pool: RunningPool) -> tuple[Any, Any]:
        return pool.client.submit_steps, pool.client.fetch_batch

    async def submit(self, calls: Sequence[Call]) -> None:
        await self._submit_steps([call.step() for call in calls])

    async def fetch(self) -> list[Step]:
        steps: list[Step] | None = await self._fetch_batch(
            n_rollouts=ROLLOUTS, batch_size=GROUPS_PER_FETCH, timeout_s=None
        )
        if steps is None:
            raise RuntimeError("the pool was shut down under the bench")
        return steps

    def unpack(self, batch: list[Step]) -> list[Call]:
        return [Call.of(step) for step in batch]


class BareHandle(Stepwell):
    """The DataPool through the documented methods of its Ray handle, without a client."""

    def __init__(self) -> None:
        super().__init__("process")
        self.name += ", bare handle"

    def _calls(self, pool: RunningPool) -> tuple[Any, Any]:
        (actor,) = pool.actors
        return actor.submit_steps.remote, actor.fetch_batch.remote


Packed: TypeAlias = tuple[
    npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.int32], list[tuple[Any, ...]]
]
"""(prompt and response ids of each step in turn, log-probs, lengths [n, 2], the rest per step)"""


class _DequeActor:
    """A queue of packed batches and nothing else: no groups, no identity, nothing survives.

    Threaded, with a fetch that waits: measured, that is the fastest form. Async takes 2.5 ms
    where this takes 2.2 for a waited call, a plain actor that is polled is in between.
    """

    def __init__(self) -> None:
        self._batches: deque[Packed] = deque()
        self._steps = 0
        self._changed = threading.Condition()

    def submit(self, batch: Packed) -> None:
        with self._changed:
            self._batches.append(batch)
            self._steps += len(batch[3])
            self._changed.notify_all()

    def fetch(self, n_steps: int) -> list[Packed]:
        with self._changed:
            self._changed.wait_for(lambda: self._steps >= n_steps)
            taken: list[Packed] = []
            while n_steps > 0:
                taken.append(self._batches.popleft())
                n_steps -= len(taken[-1][3])
                self._steps -= len(taken[-1][3])
            return taken


class BareActor(Store):
    """The practical floor: a Ray actor with a deque of NumPy batches."""

    name = "bare Ray actor"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        actor_class: Any = ray.remote(_DequeActor)
        # Threads for the fetches that wait, and some for submits.
        self._actor = actor_class.options(num_cpus=0, max_concurrency=8).remote()
        self.pids = [await pid_of(self._actor)]
        yield
        ray.kill(self._actor)

    async def submit(self, calls: Sequence[Call]) -> None:
        await self._actor.submit.remote(_pack(calls))

    async def fetch(self) -> list[Packed]:
        batches: list[Packed] = await self._actor.fetch.remote(STEPS_PER_FETCH)
        return batches

    def unpack(self, batch: list[Packed]) -> list[Call]:
        return [call for packed in batch for call in _unpack(packed)]


class BareSteps(BareActor):
    """The same actor given Steps, as the pool's handle is: the least that a handle can cost which
    takes and returns them."""

    name = "bare Ray actor of Steps"

    async def submit(self, calls: Sequence[Call]) -> None:
        # As a batch of `_DequeActor`: its last item says how many.
        steps = [call.step() for call in calls]
        await self._actor.submit.remote((None, None, None, steps))

    def unpack(self, batch: list[Any]) -> list[Call]:
        return [Call.of(step) for *_, steps in batch for step in steps]


class BareSocket(Store):
    """A queue as one writes it by hand with asyncio: pickled batches over a Unix socket, a
    connection for each call under way."""

    name = "bare socket"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        with tempfile.TemporaryDirectory(prefix="stepwell-bench-") as folder:
            path = f"{folder}/queue"
            context = multiprocessing.get_context("spawn")
            ready = context.Event()
            process = context.Process(target=_serve_queue, args=(path, ready), daemon=True)
            process.start()
            try:
                if not await asyncio.to_thread(ready.wait, 30):
                    raise RuntimeError("the bare socket's process did not start")
                self.pids, self._path = [process.pid or 0], path
                self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
                yield
                for _, writer in self._free:
                    writer.close()
            finally:
                process.kill()
                process.join()

    async def submit(self, calls: Sequence[Call]) -> None:
        await self._call(_pack(calls))

    async def fetch(self) -> list[Packed]:
        batches: list[Packed] = await self._call(STEPS_PER_FETCH)
        return batches

    async def _call(self, request: Any) -> Any:
        if self._free:
            connection = self._free.pop()
        else:
            connection = await asyncio.open_unix_connection(self._path)
        answer = await _exchange(*connection, request)
        self._free.append(connection)
        return answer

    def unpack(self, batch: list[Packed]) -> list[Call]:
        return [call for packed in batch for call in _unpack(packed)]


_LENGTH = struct.Struct("<I")


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, message: Any
) -> Any:
    """Send a message; the next one that comes."""
    data = pickle.dumps(message, protocol=5)
    writer.write(_LENGTH.pack(len(data)) + data)
    return await _received(reader)


async def _received(reader: asyncio.StreamReader) -> Any:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(length))


def _serve_queue(path: str, ready: Any) -> None:
    batches: deque[Packed] = deque()
    n_steps = 0
    waiting: deque[tuple[int, asyncio.Future[list[Packed]]]] = deque()

    def take(wanted: int) -> list[Packed]:
        nonlocal n_steps
        taken: list[Packed] = []
        while wanted > 0:
            taken.append(batches.popleft())
            wanted -= len(taken[-1][3])
            n_steps -= len(taken[-1][3])
        return taken

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal n_steps
        with contextlib.suppress(asyncio.IncompleteReadError):  # it hung up
            request = await _received(reader)
            while True:
                answer: Any = None
                if isinstance(request, int):
                    future: asyncio.Future[list[Packed]] = asyncio.Future()
                    waiting.append((request, future))
                else:
                    batches.append(request)
                    n_steps += len(request[3])
                while waiting and n_steps >= waiting[0][0]:
                    wanted, first = waiting.popleft()
                    first.set_result(take(wanted))
                if isinstance(request, int):
                    answer = await future
                request = await _exchange(reader, writer, answer)

    async def run() -> None:
        async with await asyncio.start_unix_server(serve, path, limit=1 << 24) as server:
            ready.set()
            await server.serve_forever()

    uvloop.run(run())


def _pack(calls: Sequence[Call]) -> Packed:
    ids = [np.array(ids, np.int32) for call in calls for ids in call[:2]]
    return (
        np.concatenate(ids),
        np.concatenate([np.array(call.log_probs, np.float32) for call in calls]),
        np.array([[len(c.prompt_ids), len(c.response_ids)] for c in calls], np.int32),
        [call[3:] for call in calls],
    )


def _unpack(packed: Packed) -> Iterator[Call]:
    ids, log_probs, lengths, rest = packed
    start = row = 0
    for (prompt, response), fields in zip(lengths.tolist(), rest, strict=True):
        middle, end = start + prompt, start + prompt + response
        yield Call(
            ids[start:middle].tolist(),
            ids[middle:end].tolist(),
            log_probs[row : row + response].tolist(),
            *fields,
        )
        start, row = end, row + response
