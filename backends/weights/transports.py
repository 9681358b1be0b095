"""How a version's weights get to an engine: one class per way, chosen by `engine.weight_transport`.

    disk          the engine reads the version's directory
    disk_delta    it reads only the tensors that changed since the version it has; the whole
                  directory if it has another version than the committed one, or differs afterwards
    tensor        the tensors in the body of a request, by value
    distributed   a broadcast in a process group: NCCL to GPUs, gloo to CPUs; a group per replica,
                  so that one that dies takes no other with it
    lora          only the adapter, which the engine adds to the base model

Each is given a version that is on disk already: from there a crashed engine restarts. What a
rollback restores comes from disk whatever the transport.

Owns what is sent. Does not own order, verification or failure (`transaction.py`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import socket
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from stepwell.backends.config import WeightTransport
from stepwell.backends.engines.client import EngineClient
from stepwell.backends.errors import EngineRequestError
from stepwell.backends.weights.store import Published, WeightStore
from stepwell.datapool.types import CANARY

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

ADAPTER_NAME = "policy"
"""The name of the adapter in the engines; requests carry it as `lora_path`."""
DELTA = "delta.json"
JOIN_TIMEOUT_S = 60.0
"""For a replica to join its process group, and for each broadcast."""


@dataclass(slots=True)
class Target:
    """A replica, and what it was before the publication."""

    engine: EngineClient
    version: str = ""
    path: str = ""
    dtype: str = "auto"
    device: str = "cpu"
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class Update:
    """What is published."""

    path: str
    version: int
    flush: bool = True
    """Drop the prefix cache. Not with requests held in place: a real SGLang cannot and would report
    a failure."""
    canary: bool = False
    """Only some engines get it, and it is not committed."""

    @property
    def name(self) -> str:
        """The version as engines say it."""
        return f"{self.version}{CANARY}" if self.canary else str(self.version)


class Transport(ABC):
    """One publication's way to the engines; made anew for each."""

    adapter = False
    """What is published is an adapter, not a model."""
    partial = False
    """An engine may be sent less than everything: it is worth a second, whole attempt if its bytes
    differ afterwards."""

    def __init__(self, update: Update, store: WeightStore | None) -> None:
        self.update = update
        self.store = store

    @abstractmethod
    async def send(self, target: Target) -> None:
        """Returns when the engine has the weights under the new version.

        Raises:
            EngineError: it has not, or one cannot know.
        """

    async def send_whole(self, target: Target) -> None:
        """`send` that relies on nothing the engine has."""
        await self.send(target)

    async def restore(self, target: Target, to: Published) -> None:
        """Bring a replica to a version that is on disk, whatever it has now."""
        await _from_disk(target.engine, to.path, str(to.version), flush=self.update.flush)


class Disk(Transport):
    async def send(self, target: Target) -> None:
        update = self.update
        await _from_disk(target.engine, update.path, update.name, flush=update.flush)


class DiskDelta(Disk):
    partial = True

    def __init__(self, update: Update, store: WeightStore | None) -> None:
        super().__init__(update, store)
        self._written: asyncio.Task[Path | None] | None = None

    async def send(self, target: Target) -> None:
        delta = await self._delta(target.version)
        if delta is None:
            await super().send(target)
            return
        update = self.update
        await _from_disk(target.engine, str(delta), update.name, flush=update.flush)

    async def send_whole(self, target: Target) -> None:
        await super().send(target)

    async def _delta(self, version: str) -> Path | None:
        """The directory that leads an engine from `version` on; None if it needs the whole one."""
        base = self.store.current() if self.store is not None else None
        if self.store is None or base is None or str(base.version) != version or base.adapter:
            return None
        if self._written is None:
            write = asyncio.to_thread(write_delta, self.store, base, self.update)
            self._written = asyncio.ensure_future(write)
        return await asyncio.shield(self._written)


class TensorBody(Transport):
    def __init__(self, update: Update, store: WeightStore | None) -> None:
        super().__init__(update, store)
        self._payload: asyncio.Task[str] | None = None

    async def send(self, target: Target) -> None:
        if self._payload is None:
            self._payload = asyncio.ensure_future(asyncio.to_thread(_serialised, self.update.path))
        payload = await asyncio.shield(self._payload)
        await _begin(target.engine)
        try:
            await target.engine.update_weights_from_tensor(
                [payload] * target.ranks, self.update.name, flush_cache=self.update.flush
            )
        finally:
            await target.engine.end_weight_update()


class Distributed(Transport):
    def __init__(self, update: Update, store: WeightStore | None) -> None:
        super().__init__(update, store)
        self._read: asyncio.Task[dict[str, Tensor]] | None = None

    async def send(self, target: Target) -> None:
        from stepwell.backends.weights.collective import Group

        engine, update = target.engine, self.update
        if self._read is None:  # once for all replicas
            self._read = asyncio.ensure_future(asyncio.to_thread(_tensors, update.path))
        tensors = await asyncio.shield(self._read)
        backend = "gloo" if target.device == "cpu" else "nccl"
        name = f"stepwell-v{update.version}-{uuid.uuid4().hex[:8]}"
        address, world = address_for(engine.url), 1 + target.ranks
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
        await self._replace(target.engine, self.update.path, self.update.name)

    async def restore(self, target: Target, to: Published) -> None:
        path = to.path if to.adapter else None
        await self._replace(target.engine, path, str(to.version))

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
        "disk_delta": DiskDelta,
        "tensor": TensorBody,
        "distributed": Distributed,
        "lora": Lora,
    }
)


# -- deltas -----------------------------------------------------------------------------------


def write_delta(store: WeightStore, base: Published, update: Update) -> Path | None:
    """Write the tensors of `update` that are not those of `base`; None if all are new.

    Of a version equal to its base it holds one tensor: SGLang refuses a directory without any."""
    from safetensors.torch import save_file

    from stepwell.backends.weights.digest import changed, read_tensors

    new = _tensors(update.path)
    tensors = changed(read_tensors(base.path), new)
    if not tensors:
        smallest = min(new, key=lambda name: new[name].numel())
        tensors = {smallest: new[smallest]}
    if len(tensors) == len(new):
        return None

    def save(folder: Path) -> None:
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        shutil.copyfile(Path(update.path) / "config.json", folder / "config.json")
        about = {"base": str(base.version), "tensors": len(tensors), "of": len(new)}
        (folder / DELTA).write_text(json.dumps(about))

    return store.write_delta(update.version, base.version, save)


def delta_base(path: str | Path) -> str | None:
    """The version that a delta directory leads on from; None: it is a whole one."""
    try:
        return str(json.loads((Path(path) / DELTA).read_text())["base"])
    except FileNotFoundError:
        return None


# -- parts ------------------------------------------------------------------------------------


async def _from_disk(engine: EngineClient, path: str, version: str, *, flush: bool) -> None:
    await engine.update_weights_from_disk(path, version, flush_cache=flush)


async def _begin(engine: EngineClient) -> None:
    """Open a session; one that a former publisher left open is closed first."""
    try:
        await engine.begin_weight_update()
    except EngineRequestError:
        await engine.end_weight_update()
        await engine.begin_weight_update()


def _serialised(path: str) -> str:
    from stepwell.backends.weights.collective import serialise
    from stepwell.backends.weights.digest import read_tensors

    return serialise(read_tensors(path))


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
