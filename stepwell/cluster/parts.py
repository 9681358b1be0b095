"""Starts and stops what a run consists of: Ray, the pool, the engines, the gateway, the rollout
workers.

    async with start_cluster(config) as cluster:
        cluster.pool, cluster.engines, cluster.gateway_url, cluster.workers

Owns start order, the wiring of addresses and a shutdown that leaves no process. Placement is Ray's.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import ray
from pydantic import SecretStr

from stepwell.backends.config import EngineConfig
from stepwell.backends.engines.api import Engine
from stepwell.backends.engines.kinds import connect
from stepwell.backends.engines.nodes import start_engine_group
from stepwell.backends.engines.routes import check_routes
from stepwell.backends.engines.server import start_engine, wait_started
from stepwell.backends.weights.transports import ADAPTER_NAME
from stepwell.cluster.address import RayPart
from stepwell.cluster.engine_flags import engine_of_run
from stepwell.cluster.nodes import check_nodes, lacks_project, runtime_env
from stepwell.cluster.placement import (
    Node,
    Placement,
    Plan,
    cluster_nodes,
    on_this_node,
    place,
)
from stepwell.cluster.ray import (
    connected,
    environment,
    head_answers,
    ray_here,
    while_head_lives,
    while_nodes_live,
    while_raylet_lives,
)
from stepwell.config.run import RunConfig
from stepwell.datapool.heap import settle_heap
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.remote.start import client_of, start_shards
from stepwell.datapool.types import TRAIN, VAL
from stepwell.gateway.config import ChannelSampling, GatewayConfig, Wiring, is_loopback
from stepwell.gateway.server import start_replicas
from stepwell.layout import GATEWAY_KEY, LOGS, WEIGHTS
from stepwell.trainer.config import RolloutConfig, ValidationConfig
from stepwell.trainer.errors import ConfigError
from stepwell.trainer.rollout.worker import WorkerHandle, start_workers

log = logging.getLogger(__name__)

POOL_NAME = "data_pool"
KEY_BYTES = 32
"""Length of a run's own admin key, before it is text."""
NAME_WAIT_S = 10.0
"""Ray misses a killed run, whose name is free then, within this."""
RETRY_S = 0.25
STOP_S = 10
"""Seconds that gateways are given to stop, and then engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The running parts that a trainer needs."""

    pool: DataPoolClient
    engines: Sequence[Engine]
    workers: Sequence[WorkerHandle] = ()
    """Run agents; none, where agents come by themselves."""
    placement: Placement = field(default_factory=lambda: Placement(Plan("plain")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster(Parts):
    """All running parts."""

    ray: RayPart
    """The Ray that they run on."""
    gateway_urls: tuple[str, ...] = ()
    """One per replica. `/init_trajectory` at any of them hands out the address of one. None where
    nobody is served (`RunConfig.serves`)."""
    key_file: Path | None = None
    """Holds the run's own admin key, if the gateway has keys."""

    @property
    def gateway_url(self) -> str:
        return self.gateway_urls[0]


@asynccontextmanager
async def start_cluster(config: RunConfig, *, trains: bool = True) -> AsyncIterator[Cluster]:
    """Start every part; on leaving, by whatever way, stop every part that was started.

    Args:
        trains: False: a trainer is another process, with GPUs and rollout workers of its own.
    """
    async with AsyncExitStack() as stack:
        namespace = f"stepwell-{config.run.name}"
        own = config.cluster.address is None
        runs_agents = trains and config.rollout.agent is not None

        def more_env() -> Mapping[str, Any] | None:
            project = Path.cwd() if runs_agents and lacks_project(config) else None
            return runtime_env(project, config.cluster.env)

        store_mb = config.cluster.object_store_mb
        # A Ray of our own inherits it, as does a single rank, which is this process.
        stack.enter_context(environment(**config.cluster.env))
        stack.enter_context(connected(config.cluster.address, namespace, store_mb, more_env))
        await stack.enter_async_context(while_raylet_lives() if own else while_head_lives())
        placement = await asyncio.to_thread(place, config, trains=trains, serves=config.serves)
        stack.callback(placement.release)
        if not own:
            used = placement.parts_by_node()
            await stack.enter_async_context(while_nodes_live(used))
            await asyncio.to_thread(check_nodes, config, used)
        # Absolute: an actor's working directory need not be ours.
        folder = config.run.dir.absolute()
        pool = await _start_pool(config, trains, namespace, folder / LOGS)
        engine_config = engine_of_run(config, placement.plan.mode == "colocated")
        if not config.serves:
            settle_heap()
            yield Cluster(pool=pool, engines=(), placement=placement, ray=ray_here(namespace))
            return
        network = Network(await asyncio.to_thread(cluster_nodes))
        gateway_config = network.gateway(config.gateway, _own_key(folder / GATEWAY_KEY))
        here = {"scheduling_strategy": on_this_node()}
        configs = []
        for i in range(1 if engine_config.is_attached else config.cluster.engines):
            its = engine_config.model_copy(
                update={
                    "env": placement.engine_env(i) | engine_config.env,
                    # The same seed would have them draw the same rollouts of a prompt.
                    "seed": engine_config.seed + i,
                }
            )
            configs.append(network.engine(its, gateway_config, placement.engine_ip(i)))
        urls = await _start_engines(config, configs, placement, here, stack, trains)
        engines = [await stack.enter_async_context(connect(engine_config, u)) for u in urls]
        wiring = Wiring(
            engine_urls=tuple(urls),
            engine=engine_config,
            lora_path=ADAPTER_NAME if engine_config.weight_transport == "lora" else None,
            canary_share=config.publish.canary_share or 0.0,
            run_dir=folder,
            archive_dir=config.pool_of_run.archive_dir,
            sampling=channel_sampling(config.rollout, config.validation, config.gateway.channels),
        )
        gateway_urls = await _start_gateways(gateway_config, wiring, folder / LOGS, stack)
        keys = gateway_config.admin_keys
        key_file = folder / GATEWAY_KEY if keys != config.gateway.admin_keys else None
        if key_file is not None:
            _write_key(key_file, keys[-1])
        workers: Sequence[WorkerHandle] = ()
        if trains and config.rollout.agent is not None:
            key = keys[0] if keys else None
            workers = start_workers(
                config.rollout, gateway_urls, key, folder / LOGS, **generate_needs(config)
            )
        settle_heap()
        yield Cluster(
            pool=pool,
            engines=engines,
            workers=workers,
            placement=placement,
            gateway_urls=gateway_urls,
            ray=ray_here(namespace),
            key_file=key_file,
        )


async def _start_pool(
    config: RunConfig, trains: bool, namespace: str, logs: Path
) -> DataPoolClient:
    """
    Raises:
        ConfigError: another run of this name is alive on the same Ray.
    """
    pool = config.pool_of_run if trains else config.pool_of_served
    give_up = time.monotonic() + NAME_WAIT_S
    while True:
        try:
            shards = await asyncio.to_thread(start_shards, pool, POOL_NAME, namespace, logs)
            return client_of(shards)
        except ray.exceptions.ActorAlreadyExistsError as e:
            if time.monotonic() >= give_up:
                raise ConfigError(
                    f"run.name is {config.run.name!r}, and another run of that name is alive on "
                    f"the Ray at {ray.get_runtime_context().gcs_address}; choose another run.name, "
                    "or stop that run first"
                ) from e
        await asyncio.sleep(RETRY_S)


async def _start_engines(
    config: RunConfig,
    engines: Sequence[EngineConfig],
    placement: Placement,
    here: dict[str, Any],
    stack: AsyncExitStack,
    trains: bool,
) -> list[str]:
    """Urls of these engines, or of those that somebody else runs. One without a seat runs here."""
    publishes = trains and not (config.validation.only or config.trainer.debug_rollout_only)

    async def accept(url: str) -> None:
        async with connect(config.engine, url) as engine:
            await check_routes(engine, config.engine, publishes=publishes)

    folder = config.run.dir.absolute()
    count = len(engines)
    logs = [folder / LOGS / (f"engine_{i}" if count > 1 else "") for i in range(count)]
    servers: list[Any] = []
    for i, engine in enumerate(engines):
        own, *others = options = placement.engine_options(i)
        where: dict[str, Any] = {"log_dir": logs[i], "weights_dir": folder / WEIGHTS}
        servers.append(
            start_engine_group(engine, **where, options=options)
            if others
            else start_engine(engine, **where, **(own or here))
        )
    serving: list[Any] = []
    stack.push_async_callback(_stop, servers, serving)
    started = await asyncio.gather(*(wait_started(server, accept) for server in servers))
    serving += [call for _, call in started]
    return [url for urls, _ in started for url in urls]


async def _start_gateways(
    config: GatewayConfig, wiring: Wiring, logs: Path, stack: AsyncExitStack
) -> tuple[str, ...]:
    replicas = start_replicas(config, wiring, POOL_NAME, logs)
    stack.push_async_callback(_stop, replicas, [])
    return tuple(await asyncio.gather(*(replica.start.remote() for replica in replicas)))


def _own_key(path: Path) -> SecretStr:
    """The run's own admin key: that of its last start, as trajectories may go on with keys that it
    signed; a new one where there is none."""
    new = secrets.token_urlsafe(KEY_BYTES)
    try:
        kept = path.read_text()
    except (OSError, UnicodeError):
        return SecretStr(new)
    return SecretStr(kept if len(kept) == len(new) else new)


def _write_key(path: Path, key: SecretStr) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key.get_secret_value())


def channel_sampling(
    rollout: RolloutConfig, validation: ValidationConfig, others: Sequence[str]
) -> dict[str, ChannelSampling]:
    """Sampling of the gateway, by channel; what `validation` leaves open is `rollout`'s.

    Args:
        others: channels of agents that come by themselves (`gateway.channels`).
    """
    names = [field.name for field in fields(ChannelSampling)]
    train = {name: getattr(rollout, name) for name in names}
    own = {name: value for name in names if (value := getattr(validation, name)) is not None}
    rolled_out = ChannelSampling(**train)
    return dict.fromkeys((TRAIN, *others), rolled_out) | {VAL: ChannelSampling(**train | own)}


def generate_needs(config: RunConfig) -> dict[str, Any]:
    """Arguments of rollout workers for generate functions of slime's form."""
    path = Path(config.gateway.tokenizer_path or config.model.path).absolute()
    return {"tokenizer_path": path, "validation": config.validation}


async def _stop(actors: Sequence[Any], serving: list[Any]) -> None:
    """Stop actors, all at once: a Ray that has ended ends this process within a minute, and what
    happened is to be said before.

    Args:
        serving: calls of theirs that end with `stop`; of one whose actor is killed before Ray would
            warn.
    """

    async def stop(actor: Any) -> None:
        try:
            await asyncio.wait_for(actor.stop.remote(), timeout=STOP_S)
        except (ray.exceptions.RayError, TimeoutError) as e:
            log.warning("an actor did not stop: %s", str(e) or f"no answer in {STOP_S} s")

    await asyncio.gather(*map(stop, actors))
    if await asyncio.to_thread(head_answers):  # `kill` would wait for it, and end nothing
        if serving:
            await asyncio.to_thread(ray.wait, serving, num_returns=len(serving), timeout=STOP_S)
        for actor in actors:
            ray.kill(actor)


@dataclass(frozen=True, slots=True)
class Network:
    """Chooses the addresses that gateway and engines listen on, so that every part of a run reaches
    those it needs and nobody else more than that. Pure.

        one node                  loopback, as configured by default
        several nodes, gateway    the address of the driver's node, where it runs: rollout workers
                                  may be on any
        a gateway with keys       those that are configured, and an admin key of the run's own: its
                                  rollouts and commands have it. A gateway that others reach has one
        several nodes, an engine  loopback if it is on the driver's node, as the gateway and the
                                  trainer are; otherwise its own node's address

    A host that is configured and no loopback address stays as it is. Engines know no keys: what
    they listen on beyond loopback must be reached by the run's machines alone.
    """

    nodes: Sequence[Node]

    @property
    def _driver(self) -> Node:
        return next(node for node in self.nodes if node.is_driver)

    def gateway(self, config: GatewayConfig, own_key: SecretStr) -> GatewayConfig:
        """With the address to listen on, and `own_key`, last, if it has keys or others reach it."""
        update: dict[str, object] = {}
        if is_reached := len(self.nodes) > 1 and _is_loopback(config.host):
            update["host"] = self._driver.ip
        if is_reached or config.admin_keys or config.agent_keys:
            update["admin_keys"] = (*config.admin_keys, own_key)
        return config.model_copy(update=update)

    def engine(self, config: EngineConfig, gateway: GatewayConfig, ip: str | None) -> EngineConfig:
        """With the address to listen on.

        Args:
            ip: of its node; None: the driver's.
        """
        elsewhere = ip is not None and ip != self._driver.ip
        if (elsewhere or self._is_spread(gateway)) and _is_loopback(config.host):
            return config.model_copy(update={"host": ip or self._driver.ip})
        return config

    def _is_spread(self, gateway: GatewayConfig) -> bool:
        """Its replicas are on several nodes."""
        everywhere = gateway.host in ("0.0.0.0", "::")
        return len(self.nodes) > 1 and gateway.replicas > 1 and everywhere


def _is_loopback(host: str) -> bool:
    try:
        return is_loopback(host)
    except ValueError:  # a name: somebody chose it
        return False
