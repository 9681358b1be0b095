"""Starts and stops what a run consists of: Ray, the pool, the engines, the gateway, the rollout
workers.

    async with start_cluster(config) as cluster:
        cluster.pool, cluster.engines, cluster.gateway_url, cluster.workers

Owns start order, the wiring of addresses and a shutdown that leaves no process. Placement is Ray's.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import ray

from backends.engines.client import EngineClient
from backends.engines.server import start_engine
from datapool.client import DataPoolClient
from datapool.process import settle_heap
from datapool.shards import client_of, start_shards
from datapool.types import TRAIN
from gateway.config import GatewayConfig
from gateway.replicas import start_replicas
from trainer.config import RunConfig
from trainer.rollout import WorkerHandle, start_workers

log = logging.getLogger(__name__)

POOL_NAME = "data_pool"
WEIGHTS = "weights"
"""Folder of published weights, in the run's folder: what a crashed engine restarts from."""
POOL = "pool"
"""Folder of the pool's journal, in the run's folder: what a resumed run finds its groups in."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The running parts, as the trainer needs them."""

    pool: DataPoolClient
    engines: list[EngineClient]
    gateway_urls: tuple[str, ...]
    """One per replica. `/init_trajectory` at any of them hands out the address of one."""
    workers: list[WorkerHandle]

    @property
    def gateway_url(self) -> str:
        return self.gateway_urls[0]


@asynccontextmanager
async def start_cluster(config: RunConfig) -> AsyncIterator[Cluster]:
    """Start every part; on leaving, by whatever way, stop every part that was started."""
    async with AsyncExitStack() as stack:
        namespace = _start_ray(config, stack)
        train = config.pool.channel(TRAIN).model_copy(
            update={
                "max_queue_size": config.async_training.max_queue_size,
                "max_outstanding_groups": config.rollout.max_outstanding_groups,
            }
        )
        # Absolute: an actor's working directory need not be ours.
        folder = config.run.dir.absolute()
        pool_config = config.pool.model_copy(
            update={
                "channels": {**config.pool.channels, TRAIN: train},
                "journal_dir": config.pool.journal_dir or folder / POOL,
            }
        )
        pool = client_of(await asyncio.to_thread(start_shards, pool_config, POOL_NAME, namespace))
        engine_config = config.engine
        if engine_config.model_path is not None:
            engine_config = engine_config.model_copy(
                update={"model_path": engine_config.model_path.absolute()}
            )
        # Weights of an earlier process are not ours: a resume publishes those of its checkpoint.
        shutil.rmtree(folder / WEIGHTS, ignore_errors=True)
        engine = start_engine(engine_config, log_dir=folder / "logs", weights_dir=folder / WEIGHTS)
        stack.push_async_callback(_stop, engine)
        urls: list[str] = await engine.start.remote()
        engines = [await stack.enter_async_context(EngineClient(url)) for url in urls]
        gateway_urls = await _start_gateways(
            config.gateway.model_copy(update={"engine_urls": tuple(urls)}), stack
        )
        keys = config.gateway.admin_keys
        workers = start_workers(config.rollout, gateway_urls, keys[0] if keys else None)
        settle_heap()
        yield Cluster(pool, engines, gateway_urls, workers)


async def _start_gateways(config: GatewayConfig, stack: AsyncExitStack) -> tuple[str, ...]:
    replicas = start_replicas(config, POOL_NAME)
    for replica in replicas:
        stack.push_async_callback(_stop, replica)
    return tuple(await asyncio.gather(*(replica.start.remote() for replica in replicas)))


def _start_ray(config: RunConfig, stack: AsyncExitStack) -> str:
    namespace = f"stepwell-{config.run.name}"
    ours = config.cluster.address is None
    ray.init(
        address="local" if ours else config.cluster.address,
        namespace=namespace,
        object_store_memory=config.cluster.object_store_mb << 20 if ours else None,
        include_dashboard=False if ours else None,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    stack.callback(ray.shutdown)
    return namespace


async def _stop(actor: Any) -> None:
    try:
        await asyncio.wait_for(actor.stop.remote(), timeout=10)
    except (ray.exceptions.RayError, TimeoutError) as e:
        log.warning("an actor did not stop in time and is killed: %s", e)
    ray.kill(actor)
