"""This module starts and finds the pool's actors so that a user names a pool and nothing else.

    crc32(prompt_uid) % N ──► shard k ──► actor `name`, `name/1`, …   journal_dir/shard-k

A shard is a `DataPoolActor` like any other and knows nothing of the rest. So a shard that dies
takes its own groups out of reach until Ray has restarted it, and nothing else. `client.py` makes
one pool of them; with one shard all of this is the plain actor.
"""

from __future__ import annotations

import asyncio
import atexit
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeAlias

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from stepwell.datapool.config import ChannelConfig, PoolConfig
from stepwell.datapool.errors import (
    DataPoolError,
    InvalidRequestError,
    JournalError,
    PoolUnavailableError,
)
from stepwell.datapool.log_files import numbered_log
from stepwell.datapool.nodes import live_nodes
from stepwell.datapool.remote.actor import FINDING, N_WAITING, SHARDS_FILE, WAITING, DataPoolActor
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.remote.incarnation import Known
from stepwell.datapool.remote.shard import CONNECT_S, RESTART_S, RemoteShard
from stepwell.datapool.remote.wire import PoolAddress
from stepwell.datapool.sealed import read_sealed, write_sealed
from stepwell.datapool.store.folder import journal_exists

DEFAULT_NAME = "data_pool"
DOWN_S: Final = 0.1
"""Seconds between two tries to reach a shard that is down."""
ASK_AGAIN_S: Final = 0.2
"""Seconds after which a shard that does not say where it is is asked once more. What Ray was given
for an actor that restarts waits for up to two seconds and then fails, though the actor is back."""

DataPoolHandle: TypeAlias = Any
"""A Ray handle of `DataPoolActor`. Any, because Ray types a handle's methods as Never."""


def share(config: PoolConfig) -> PoolConfig:
    """The configuration of one shard of this pool.

    It gets its part, rounded up, of what bounds memory or drops groups; of what makes producers
    wait it gets the whole, which the client holds all shards to together.
    """

    def part(limit: int | None) -> int | None:
        return None if limit is None else -(-limit // config.shards)

    def channel(limits: ChannelConfig) -> ChannelConfig:
        if limits.overflow == "block":
            return limits
        parts = {name: part(getattr(limits, name)) for name in ("max_queue_size", "max_bytes")}
        return limits.model_copy(update=parts)

    return config.model_copy(
        update={
            "default": channel(config.default),
            "channels": {name: channel(limits) for name, limits in config.channels.items()},
            "memory_limit_bytes": part(config.memory_limit_bytes),
        }
    )


def start_data_pool(
    config: PoolConfig | None = None,
    name: str = DEFAULT_NAME,
    namespace: str | None = None,
    **options: Any,
) -> DataPoolHandle:
    """`start_shards` of a pool of one shard; its actor.

    Raises:
        PoolUnavailableError: it cannot start; the message says why (a journal that is damaged, or
            that another pool has open, …).
    """
    config = config or PoolConfig()
    if config.shards > 1:
        raise InvalidRequestError(
            f"pool.shards is {config.shards}, and start_data_pool starts one actor; use "
            "start_shards, and connect(name)"
        )
    (handle,) = start_shards(config, name, namespace, **options)
    return handle


def start_shards(
    config: PoolConfig | None = None,
    name: str = DEFAULT_NAME,
    namespace: str | None = None,
    log_dir: Path | None = None,
    **options: Any,
) -> list[DataPoolHandle]:
    """Start `config.shards` actors and wait until they answer. Needs an initialised Ray.

    They live as long as somebody holds these handles, or a client made of them (`client_of`).

    Args:
        name, namespace: `connect` finds all of them by this name. The actors are
            `name`, `name/1`, `name/2`, ….
        log_dir: what the actors log goes to `pool.log`, or `pool_0.log`, …, there, too.
        options: further Ray actor options. By default several shards are spread over the nodes,
            and each stays on its node. `journal_dir` must then be storage that every node sees, or
            the nodes must be the same ones whenever a pool is started from it.

    Raises:
        PoolUnavailableError: one cannot start; the message says why. None is left running.
        JournalError: `journal_dir` holds what another number of shards wrote.
        OSError: the number of shards cannot be noted there.

    Once all shards were up, a later start refuses a shard whose journal is gone.
    """
    config = config or PoolConfig()
    n = config.shards
    root = _journal_folder(config)
    had_journals = root is not None and _was_started(root, n)
    part = share(config) if n > 1 else config
    if n > 1 and root is None:
        options.setdefault("scheduling_strategy", "SPREAD")
    handles: dict[int, DataPoolHandle] = {}
    try:
        # The first one last: who finds it finds the others.
        for k in reversed(range(n)):
            folder = root / f"shard-{k}" if root is not None and n > 1 else root
            arguments = part, folder, k, had_journals, numbered_log(log_dir, "pool", k, n)
            handles[k] = _create_actor(arguments, _actor_name(name, k), namespace, **options)
        for k in range(n):
            try:
                ray.get(handles[k].__ray_ready__.remote())
            except RayActorError as e:
                gone = unavailable(e)
                raise (PoolUnavailableError(f"shard {k} of {n}: {gone}") if n > 1 else gone) from e
        if n > 1 and root is not None and not had_journals:
            _note_started(root, n)
    except BaseException:  # whatever it was: no shard is left running
        for handle in handles.values():
            ray.kill(handle)
        raise
    return [handles[k] for k in range(n)]


def client_of(actors: Sequence[DataPoolHandle]) -> DataPoolClient:
    """A client of the pool that `start_shards` started."""
    return DataPoolClient([RayShard(actor) for actor in actors])


def connect(name: str = DEFAULT_NAME, namespace: str | None = None) -> DataPoolClient:
    """A client of the pool that was started under this name, whatever its number of shards.
    Blocks for a call.

    Raises:
        PoolUnavailableError: there is none, or one of its shards is gone.
    """
    where = "this namespace" if namespace is None else f"namespace {namespace!r}"
    try:
        first = ray.get_actor(name, namespace)
    except ValueError as e:
        raise PoolUnavailableError(
            f"no DataPool named {name!r} in {where}; start one with start_data_pool(name=…)"
        ) from e
    # Asked, and not found out by looking for names: a shard that is missing must be missed.
    n = _number_of_shards(first)
    handles = [first]
    for k in range(1, n):
        try:
            handles.append(ray.get_actor(_actor_name(name, k), namespace))
        except ValueError as e:
            raise PoolUnavailableError(
                f"shard {k} of {n} of the DataPool {name!r} is gone from {where}; "
                "end the others and start the pool again"
            ) from e
    return client_of(handles)


class RayShard(RemoteShard):
    """The way to one shard. Pickles as its handle and the pool that it met."""

    def __init__(self, handle: DataPoolHandle, met: Known = None) -> None:
        super().__init__(met)
        self.handle = handle

    def __reduce__(self) -> tuple[type[RayShard], tuple[DataPoolHandle, Known]]:
        return (type(self), (self.handle, self.met))

    async def find(self) -> tuple[PoolAddress, str]:
        here = _here()
        try:
            return await _address(self.handle, here), here
        except ActorUnavailableError as e:
            raise ConnectionError(str(e).strip().splitlines()[0]) from e
        except RayActorError as e:
            raise unavailable(e) from e
        except RayTaskError as e:
            if isinstance(e.cause, DataPoolError):
                raise e.cause from None
            raise


async def _address(handle: DataPoolHandle, here: str) -> PoolAddress:
    """Ask a shard for its address, on behalf of this node, until there is an answer."""
    asked = set[asyncio.Future[PoolAddress]]()
    try:
        while True:
            asked.add(asyncio.wrap_future(handle.address.remote(here).future()))
            done, _ = await asyncio.wait(
                asked, timeout=ASK_AGAIN_S, return_when=asyncio.FIRST_COMPLETED
            )
            if done:
                return done.pop().result()
    finally:
        for answer in asked:
            if not answer.cancel():
                answer.exception()  # asyncio logs one that nobody looked at


def unavailable(error: RayActorError) -> PoolUnavailableError:
    """Ray's error as ours, in one line."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if "creation task" in lines[0]:
        # It says why in the last line of a traceback. Names of our own exceptions say no more.
        reason = re.sub(r"^stepwell\.\S+: ", "", lines[-1])
        return PoolUnavailableError(f"the DataPool did not start: {reason}")
    return PoolUnavailableError(
        f"the DataPool cannot be reached ({lines[0]}); "
        "what was not acknowledged may be submitted again"
    )


def _number_of_shards(first: DataPoolHandle) -> int:
    here, give_up = _here(), time.monotonic() + RESTART_S
    with ThreadPoolExecutor(1) as thread:  # the caller's own may run a loop
        while True:
            # For a while at a time: an interrupt waits for the thread.
            asking = asyncio.wait_for(_address(first, here), CONNECT_S)
            try:
                return thread.submit(asyncio.run, asking).result().n_shards
            except TimeoutError:
                continue  # it is still starting
            except RayActorError as e:
                if not isinstance(e, ActorUnavailableError) or time.monotonic() > give_up:
                    raise unavailable(e) from e
                time.sleep(DOWN_S)


def _actor_name(name: str, k: int) -> str:
    return f"{name}/{k}" if k else name


def _create_actor(
    arguments: tuple[PoolConfig, Path | None, int, bool, Path | None],
    name: str,
    namespace: str | None,
    **options: Any,
) -> DataPoolHandle:
    """The handle of a new actor, which need not be up yet.

    With a journal it stays on one node, because a restart elsewhere would not find its journal:
    the first shard here, the others on the next nodes. Only if the node is gone Ray tries others,
    which may see the folder, too.
    """
    _, folder, shard, *_ = arguments
    if folder is not None and "scheduling_strategy" not in options:
        nodes = live_nodes()
        node, _ = nodes[shard % len(nodes)]
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=True)
        # Ray puts an actor that needs nothing on a random node, whatever its affinity.
        options.setdefault("memory", 1)
    settings: dict[str, Any] = {
        "name": name,
        "namespace": namespace,
        "max_restarts": -1,
        "num_cpus": 0,
        **options,
    }
    remote: Any = ray.remote  # whose types leave concurrency groups out, and `.options`
    actor_class = remote(concurrency_groups={WAITING: N_WAITING, FINDING: 1})(DataPoolActor)
    return actor_class.options(**settings).remote(*arguments)


def _here() -> str:
    node: str = ray.get_runtime_context().get_node_id()
    return node


# -- journals ----------------------------------------------------------------------------------


def _journal_folder(config: PoolConfig) -> Path | None:
    """Return the folder of the journal, the same for every restart of the actor; None without a
    journal."""
    if config.durability == "none":
        return None
    if config.journal_dir is not None:
        return config.journal_dir.absolute()
    folder = Path(tempfile.mkdtemp(prefix="stepwell-pool-"))
    # The pool goes with this process, unless it is detached; then so does its memory.
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _was_started(folder: Path, n: int) -> bool:
    """True if all of `n` shards had their journals there; from then on one without has lost it.

    Raises:
        JournalError: another number of shards had. A group lives in the shard that its prompt_uid
            and the number of shards name: with another number it would be looked for elsewhere.
    """
    note = folder / SHARDS_FILE
    before = str(n)
    if note.exists():
        remedy = "put it back, or delete it if the pool has one shard alone"
        before = str(read_sealed(note, remedy)["shards"])
    elif journal_exists(folder):
        before = "1"
    if before != str(n):
        raise JournalError(
            f"pool.shards is {n}, but {folder} was written by {before} "
            f"shard(s); start with pool.shards={before}, or export, and import into a pool "
            "with another journal_dir"
        )
    return note.exists()


def _note_started(folder: Path, n: int) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # all journals may be on other nodes
    note = folder / SHARDS_FILE
    write_sealed(note, {"shards": n})
