"""Where the groups of a pool of several actors live, and how those are started and found.

    crc32(prompt_uid) % N ──► shard k ──► actor `name`, `name/1`, …   journal_dir/shard-k

`sharded.py` makes one client of them. With one shard all of this is the plain actor.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar
from zlib import crc32

import ray
from ray.exceptions import ActorUnavailableError, RayActorError

from stepwell.datapool.config import ChannelConfig, PoolConfig
from stepwell.datapool.errors import (
    PoolUnavailableError,
)
from stepwell.datapool.process import numbered_log
from stepwell.datapool.remote.actor import (
    DEFAULT_NAME,
    DataPoolHandle,
    create_actor,
    have_started,
    journal_folder,
    note_started,
    unavailable,
)
from stepwell.datapool.remote.outbox import RESTART_S

log = logging.getLogger(__name__)

T = TypeVar("T")

DOWN_S: Final = 0.1
"""Between two tries to reach a shard that is down."""


def shard_of(prompt_uid: object, n_shards: int) -> int:
    """The shard of a group. Anything but a string is for the first one to refuse."""
    if not isinstance(prompt_uid, str):
        return 0
    return crc32(prompt_uid.encode(errors="surrogatepass")) % n_shards


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

    Once all shards were up, a later start refuses a shard whose journal is gone.
    """
    config = config or PoolConfig()
    n = config.shards
    root = journal_folder(config)
    has_journals = n > 1 and root is not None and have_started(root)
    if n > 1:
        config = share(config)
        if root is None:
            options.setdefault("scheduling_strategy", "SPREAD")
    handles: dict[int, DataPoolHandle] = {}
    try:
        # The first one last: who finds it finds the others.
        for k in reversed(range(n)):
            folder, actor_name = _folder(root, k, n), _actor_name(name, k)
            log_file = numbered_log(log_dir, "pool", k, n)
            handles[k] = create_actor(
                config, folder, k, actor_name, namespace, has_journals, log_file, **options
            )
        for k in range(n):
            try:
                ray.get(handles[k].get_statistics.remote())
            except RayActorError as e:
                gone = unavailable(e)
                raise (PoolUnavailableError(f"shard {k} of {n}: {gone}") if n > 1 else gone) from e
        if n > 1 and root is not None:
            with suppress(OSError):  # a full disk: the next start notes it
                note_started(root, n)
    except BaseException:  # whatever it was: no shard is left running
        for handle in handles.values():
            ray.kill(handle)
        raise
    return [handles[k] for k in range(n)]


def find_shards(name: str, namespace: str | None) -> list[DataPoolHandle]:
    """The actors of the pool that was started under this name. Blocks for a call.

    Raises:
        PoolUnavailableError: there is none, or one of them is gone.
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
    return handles


def _number_of_shards(first: DataPoolHandle) -> int:
    give_up = time.monotonic() + RESTART_S
    while True:
        try:
            n: int = ray.get(first.describe.remote())["n_shards"]
            return n
        except ActorUnavailableError as e:
            if time.monotonic() > give_up:
                raise unavailable(e) from e
            time.sleep(DOWN_S)
        except RayActorError as e:
            raise unavailable(e) from e


def _actor_name(name: str, k: int) -> str:
    return f"{name}/{k}" if k else name


def _folder(root: Path | None, k: int, n: int) -> Path | None:
    return root if root is None or n == 1 else root / f"shard-{k}"
