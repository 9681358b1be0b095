"""The stores that are compared, each behind the same few calls.

A `System` turns gateway calls into its own form, stores them and hands out 128 steps at a time.
Only `unpack` is outside the measured part: it gives the fetched content back for the exactness
check.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import ray

from benchmarks.pool.workload import GROUPS_PER_FETCH, ROLLOUTS, STEPS_PER_FETCH, Call
from stepwell.datapool import PoolConfig, Step, connect, start_shards
from stepwell.datapool.config import Durability


class System(ABC):
    """A running store. `start` before anything else; `stop` ends every process of it."""

    name: str

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    async def submit(self, calls: Sequence[Call]) -> None:
        """Store `calls`; returns once the store has acknowledged them."""

    @abstractmethod
    async def fetch(self) -> Any:
        """Wait for the next 128 steps, in the form a consumer gets them. Removes them."""

    @abstractmethod
    def unpack(self, batch: Any) -> list[Call]:
        """The content of a fetched batch."""

    @abstractmethod
    async def pids(self) -> list[int]:
        """Processes that hold the stored steps."""

    @abstractmethod
    async def stop(self) -> None: ...


async def pid_of(actor: Any) -> int:
    """Process id of a Ray actor."""
    pid: int = await actor.__ray_call__.remote(lambda _: os.getpid())
    return pid


class Stepwell(System):
    """The DataPool through its client, at one level of durability."""

    def __init__(self, durability: Durability, shards: int = 1) -> None:
        self.name = f"Stepwell ({durability})" + (f", {shards} shards" if shards > 1 else "")
        self.durability = durability
        self._shards = shards

    async def start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="stepwell-bench-")
        folder = None if self.durability == "none" else Path(self._folder.name)
        config = PoolConfig(durability=self.durability, journal_dir=folder, shards=self._shards)
        name = f"bench-{os.urandom(4).hex()}"
        self._actors: list[Any] = await asyncio.to_thread(start_shards, config, name)
        self.client = await asyncio.to_thread(connect, name)
        self._submit_steps: Any = self.client.submit_steps
        self._fetch_batch: Any = self.client.fetch_batch

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

    async def pids(self) -> list[int]:
        return [await pid_of(actor) for actor in self._actors]

    async def stop(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        self._folder.cleanup()


class BareHandle(Stepwell):
    """The DataPool through the documented methods of its Ray handle, without a client."""

    def __init__(self) -> None:
        super().__init__("process")
        self.name += ", bare handle"

    async def start(self) -> None:
        await super().start()
        (actor,) = self._actors
        self._submit_steps = actor.submit_steps.remote
        self._fetch_batch = actor.fetch_batch.remote


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


class BareActor(System):
    """The practical floor: a Ray actor with a deque of NumPy batches."""

    name = "bare Ray actor"

    async def start(self) -> None:
        actor_class: Any = ray.remote(_DequeActor)
        # Threads for the fetches that wait, and some for submits.
        self._actor = actor_class.options(num_cpus=0, max_concurrency=8).remote()
        await pid_of(self._actor)

    async def submit(self, calls: Sequence[Call]) -> None:
        await self._actor.submit.remote(_pack(calls))

    async def fetch(self) -> list[Packed]:
        batches: list[Packed] = await self._actor.fetch.remote(STEPS_PER_FETCH)
        return batches

    def unpack(self, batch: list[Packed]) -> list[Call]:
        return [call for packed in batch for call in _unpack(packed)]

    async def pids(self) -> list[int]:
        return [await pid_of(self._actor)]

    async def stop(self) -> None:
        ray.kill(self._actor)


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
