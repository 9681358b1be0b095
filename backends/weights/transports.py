"""Ways of a version's weights to an engine: one class each, chosen by `engine.weight_transport`.

    disk          the engine reads the version's directory
    distributed   a broadcast in a process group: NCCL to GPUs, gloo to CPUs; a group per replica,
                  so that one that dies takes no other with it
    lora          only the adapter, which the engine adds to the base model

Each is given a version that is on disk already: from there a crashed engine restarts. What a
rollback restores comes from disk whatever the transport.

Owns what is sent. Does not own order, verification or failure (`transaction.py`).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Thread
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from stepwell.backends.config import WeightTransport
from stepwell.backends.engines.api import Engine, EngineState
from stepwell.backends.engines.client import EngineClient
from stepwell.backends.errors import EngineRequestError
from stepwell.backends.weights.store import Published
from stepwell.datapool.types import CANARY

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

ADAPTER_NAME = "policy"
"""The name of the adapter in the engines; requests carry it as `lora_path`."""
JOIN_TIMEOUT_S = 60.0
"""Seconds for a replica to join its process group, and for each broadcast."""


@dataclass(slots=True)
class Target:
    """A replica, and what it was before the publication."""

    engine: Engine
    before: EngineState = field(default_factory=EngineState)


@dataclass(frozen=True, slots=True)
class Update:
    """A version on its way to engines."""

    path: str
    version: int
    flush: bool = True
    """Drop the prefix cache. Not with requests held in place: a real SGLang cannot and would report
    a failure."""
    canary: bool = False
    """True: some engines get it, and it is not committed."""

    @property
    def name(self) -> str:
        """The version as engines say it."""
        return f"{self.version}{CANARY}" if self.canary else str(self.version)


class Transport(ABC):
    """One publication's way to the engines; made anew for each."""

    adapter = False
    """True: an adapter is published, not a model."""

    def __init__(self, update: Update) -> None:
        self.update = update

    @abstractmethod
    async def send(self, target: Target) -> None:
        """Returns when the engine has the weights under the new version.

        Raises:
            EngineError: it has not, or one cannot know.
        """

    async def restore(self, target: Target, to: Published) -> None:
        """Bring a replica to a version that is on disk, whatever it has now."""
        await target.engine.update_weights_from_disk(
            to.path, str(to.version), flush_cache=self.update.flush
        )


class Disk(Transport):
    async def send(self, target: Target) -> None:
        await target.engine.update_weights_from_disk(
            self.update.path, self.update.name, flush_cache=self.update.flush
        )


class Distributed(Transport):
    def __init__(self, update: Update) -> None:
        super().__init__(update)
        self._read: asyncio.Task[dict[str, Tensor]] | None = None

    async def send(self, target: Target) -> None:
        from stepwell.backends.weights.collective import Group

        engine, update = _sglang(target.engine), self.update
        if self._read is None:  # once for all replicas
            self._read = asyncio.ensure_future(asyncio.to_thread(_tensors, update.path))
        tensors = await asyncio.shield(self._read)
        backend = "gloo" if target.before.device == "cpu" else "nccl"
        name = f"stepwell-v{update.version}-{uuid.uuid4().hex[:8]}"
        address, world = address_for(engine.url), 1 + target.before.ranks
        store = Group.listen(address, world, JOIN_TIMEOUT_S)
        led = _in_thread(
            lambda: Group.lead(
                store, world_size=world, name=name, backend=backend, timeout_s=JOIN_TIMEOUT_S
            )
        )
        try:
            await engine.init_weights_update_group(
                address,
                store.port,
                rank_offset=1,
                world_size=world,
                group_name=name,
                backend=backend,
                timeout_s=JOIN_TIMEOUT_S,
            )
        except BaseException:  # a cancellation, too: the group would stay open for good
            led.add_done_callback(_leave)  # the engine may have joined, and only said nothing
            raise
        group = await asyncio.wrap_future(led)
        try:
            await _begin(engine)
            try:
                sent = _in_thread(lambda: group.send(tensors.values()))
                await engine.update_weights_from_distributed(
                    list(tensors),
                    [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
                    [list(t.shape) for t in tensors.values()],
                    update.name,
                    group_name=name,
                    flush_cache=update.flush,
                )
                await asyncio.wrap_future(sent)
            finally:
                await engine.end_weight_update()
        finally:
            # Leaving may wait for a peer that is gone; nobody waits for it.
            _in_thread(group.close)
            await engine.destroy_weights_update_group(name)


class Lora(Transport):
    adapter = True

    async def send(self, target: Target) -> None:
        await self._replace(_sglang(target.engine), self.update.path, self.update.name)

    async def restore(self, target: Target, to: Published) -> None:
        path = to.path if to.adapter else None
        await self._replace(_sglang(target.engine), path, str(to.version))

    async def _replace(self, engine: EngineClient, path: str | None, version: str) -> None:
        try:
            await engine.unload_lora_adapter(ADAPTER_NAME)
        except EngineRequestError as e:
            log.debug("%s has no adapter to replace: %s", engine.url, e)
        if path is not None:
            loaded = await engine.load_lora_adapter(ADAPTER_NAME, path)
            if loaded.get(ADAPTER_NAME) != path:
                raise EngineRequestError(f"{engine.url} has adapters {loaded} after loading {path}")
        await engine.update_weight_version(version)


TRANSPORTS: Mapping[WeightTransport, type[Transport]] = MappingProxyType(
    {
        "disk": Disk,
        "distributed": Distributed,
        "lora": Lora,
    }
)


# -- parts ------------------------------------------------------------------------------------


def _sglang(engine: Engine) -> EngineClient:
    """The engine, by whose API there are process groups and adapters.

    Raises:
        EngineRequestError: it speaks another API.
    """
    if not isinstance(engine, EngineClient):
        raise EngineRequestError(f"{engine} takes weights from disk only: engine.weight_transport")
    return engine


async def _begin(engine: EngineClient) -> None:
    """Open a session; one that a former publisher left open is closed first."""
    try:
        await engine.begin_weight_update()
    except EngineRequestError:
        await engine.end_weight_update()
        await engine.begin_weight_update()


def _tensors(path: str) -> dict[str, Tensor]:
    from stepwell.backends.weights.digest import read_tensors

    return dict(read_tensors(path))


def _leave(led: Future[Any]) -> None:
    """Close a group that was joined after its publication had given it up."""
    if led.exception() is None:
        led.result().close()


def _in_thread(work: Any) -> Future[Any]:
    """`work()` on a thread that keeps no process alive: a collective call may hang."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as e:  # noqa: BLE001 - handed to whoever waits
            future.set_exception(e)

    Thread(target=run, name="weight-transport", daemon=True).start()
    return future


def address_for(url: str) -> str:
    """The address of this machine at which the engine at `url` reaches it."""
    host = urlsplit(url).hostname or "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return str(probe.getsockname()[0])
