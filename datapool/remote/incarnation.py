"""This module names each opening of a pool's journal so that no other pool, and no earlier opening,
is taken for it.

    journal            (pool, generation); each opening counts one generation more
    cluster            the last one of each actor, in Ray's key-value store: an actor that is
                       restarted and finds no journal, another one or an older copy does not start
    every client       the last one that it met; its connections say so, and a pool that is another
                       one, or of a lower generation, refuses them

Pool and actor are apart: a run that is resumed opens the same journal, so the same pool, with
another actor. Without a journal there is nothing to name: that pool begins empty with every start,
as `durability: none` says. Does not keep a previous process from writing; the journal does.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import NamedTuple, TypeAlias

from stepwell.datapool.errors import PoolReplacedError

_NAMESPACE = b"stepwell-pool"

Known: TypeAlias = "Incarnation | None"


class Incarnation(NamedTuple):
    """One opening of one journal."""

    pool: str
    """`Journal.identity`."""
    generation: int
    """`Journal.opening`."""

    def __str__(self) -> str:
        return f"{self.pool} (generation {self.generation})"

    def check_follows(self, met: Incarnation) -> None:
        """
        Raises:
            PoolReplacedError: who met `met` must not go on with this one.
        """
        if self.pool == met.pool and self.generation >= met.generation:
            return
        what = "another journal" if self.pool != met.pool else "an older copy of its journal"
        raise PoolReplacedError(
            f"this is DataPool {self}, but DataPool {met} was here before: the pool was started "
            f"from {what}, and what it acknowledged since is not in there. Put the journal of "
            f"{met.pool} back into pool.journal_dir and start the run again"
        )


class Previous(NamedTuple):
    """The incarnation and process of this actor before Ray started it again."""

    incarnation: Incarnation
    pid: int


def previous_of(folder: Path, has_journal: bool) -> Previous | None:
    """Return the incarnation and process of this actor before it was restarted; None in its first
    start.

    Raises:
        PoolReplacedError: it had a journal, and there is none in `folder`. None is made.
    """
    from ray.experimental.internal_kv import _internal_kv_get

    value: bytes | None = _internal_kv_get(_key(), namespace=_NAMESPACE)
    if value is None:
        return None
    pool, generation, host, pid = json.loads(value)
    before = Incarnation(pool, generation)
    if not has_journal:
        raise PoolReplacedError(
            f"DataPool {before} had its journal in {folder} on {host}, and on "
            f"{socket.gethostname()} there is none: what it acknowledged would be missing. Put the "
            "folder back, or make it reachable from this node, and start the run again"
        )
    return Previous(before, pid)


def record(incarnation: Incarnation) -> None:
    """Let the cluster know what this actor's pool is now."""
    from ray.experimental.internal_kv import _internal_kv_put

    value = json.dumps([*incarnation, socket.gethostname(), os.getpid()]).encode()
    _internal_kv_put(_key(), value, overwrite=True, namespace=_NAMESPACE)


def _key() -> bytes:
    """Key of this actor in Ray's store, whatever process it is in."""
    import ray  # not where a pool is only talked to

    return str(ray.get_runtime_context().get_actor_id()).encode()
