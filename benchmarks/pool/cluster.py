"""The Ray that a bench of the pool runs in, and its pools: its own, and gone with it."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from stepwell.datapool import DataPoolClient, PoolConfig, client_of, start_shards

OBJECT_STORE_BYTES = 512 << 20


@contextmanager
def bench_cluster(**options: Any) -> Iterator[None]:
    """A local Ray for the body. Garbage collection, which benches turn down, is put back.

    Args:
        options: further arguments of `ray.init`.
    """
    threshold = gc.get_threshold()
    ray.init(
        address="local",
        # Logical ones: TransferQueue's actors reserve one each, all systems run at once.
        num_cpus=16,
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        **options,
    )
    try:
        yield
    finally:
        ray.shutdown()
        gc.unfreeze()
        gc.set_threshold(*threshold)


@dataclass(frozen=True, slots=True)
class RunningPool:
    """A pool, its actors and a client of it."""

    name: str
    actors: list[Any]
    client: DataPoolClient
    folder: Path
    """Folder of its journal, if it has one."""

    async def pids(self) -> list[int]:
        return [await pid_of(actor) for actor in self.actors]


@asynccontextmanager
async def running_pool(**options: Any) -> AsyncIterator[RunningPool]:
    """A pool with these keys, and a journal of its own unless its durability is "none"."""
    with tempfile.TemporaryDirectory(prefix="stepwell-bench-") as folder:
        journal = None if options.get("durability") == "none" else Path(folder)
        config, name = PoolConfig(journal_dir=journal, **options), f"bench-{os.urandom(4).hex()}"
        actors = await asyncio.to_thread(start_shards, config, name)
        try:
            yield RunningPool(name, actors, client_of(actors), Path(folder))
        finally:
            for actor in actors:
                ray.kill(actor)


async def pid_of(actor: Any) -> int:
    """Process id of a Ray actor."""
    pid: int = await actor.__ray_call__.remote(lambda _: os.getpid())
    return pid
