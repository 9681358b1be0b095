"""This module gives the pool of a run that is over as a client, so that whoever looks into a run
need not know whether it is alive.

    journals ──StoppedJournal──► restore ──► DataPool ──StoppedShard──► DataPoolClient
                                                 questions only; its clock stands still

Payloads stay on disk until they are asked for. Does not own reading a journal (`store/reading.py`).
"""

from __future__ import annotations

from pathlib import Path

from stepwell.datapool.config import PoolConfig
from stepwell.datapool.core.pool import DataPool
from stepwell.datapool.errors import PoolUnavailableError
from stepwell.datapool.ops import Op, R, ReleaseDeparted
from stepwell.datapool.questions import QUESTIONS, Describe
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.remote.incarnation import Known
from stepwell.datapool.store.picture_folder import PICTURES, PictureFolder
from stepwell.datapool.store.reading import StoppedJournal
from stepwell.datapool.store.replay import UNKNOWN, restore
from stepwell.datapool.store.salvage import journals_in

MEMORY_BYTES = 256 << 20
"""Bytes of payloads kept in memory while a journal is replayed."""


class StoppedShard:
    """A shard of which only its journal is left."""

    met: Known = None

    def __init__(self, folder: Path, config: PoolConfig) -> None:
        self.folder = folder
        """Folder of the journal."""
        self._pool = DataPool(config.model_copy(update={"memory_limit_bytes": MEMORY_BYTES}))
        journal = StoppedJournal(folder)
        self._pool.pictures.store = PictureFolder(folder / PICTURES, power=False)
        self.journal_id = journal.identity
        restore(self._pool, journal)
        self._pool.spill()
        self.now = max(channel.now for channel in self._pool.channels.values())
        """Pool clock, seconds: when the last change was made."""

    async def call(self, op: Op[R], timeout_s: float | None = 0.0) -> R:
        """Answer a question from the journal; nothing comes later, so nobody waits."""
        if not isinstance(op, (*QUESTIONS, ReleaseDeparted)) or isinstance(op, Describe):
            raise PoolUnavailableError(
                f"{type(op).__name__} needs a running pool, and this run has ended; run its "
                "command again (`stepwell train` or `stepwell serve`)"
            )
        return self._pool.apply(op, self.now)

    @property
    def backlog(self) -> dict[str, int]:
        """Counts of what waits to be archived."""
        return self._pool.backlog

    def close(self) -> None: ...


def stopped_pool(path: Path, config: PoolConfig | None = None) -> DataPoolClient:
    """The pool whose journals are in `path`: a journal's folder, that of several shards, or a
    run's. It answers questions; what would change it raises PoolUnavailableError.

    Args:
        config: what it ran with: says which groups are ready and held.

    Raises:
        JournalLockedError: a process runs it.
        JournalError: there is no journal, or it is damaged.
    """
    return DataPoolClient([StoppedShard(f, config or UNKNOWN) for f in journals_in(path)])
