"""Start of an archiver by its pool. Loads neither Arrow nor SQLite, which a pool does without."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec

from stepwell.datapool.config import PoolConfig
from stepwell.datapool.remote.wire import PoolAddress

DAY_S: Final = 86_400.0


class Settings(msgspec.Struct, frozen=True):
    """Arguments of the archiver's process."""

    folder: str
    """Folder of the archive."""
    journal: str
    """Folder of the shard's journal."""
    journal_id: str
    shard: int
    """Number of this shard."""
    keep_s: float
    max_bytes: int
    patience_bytes: int = 1 << 62
    """Bytes of rows that wait until nobody else wants the processor."""
    log_file: str | None = None
    unix: str = ""
    """Address and secret of the pool."""
    secret: bytes = b""

    @classmethod
    def of(
        cls,
        config: PoolConfig,
        journal: Path,
        journal_id: str,
        shard: int,
        log_file: Path | None = None,
    ) -> Settings | None:
        """The settings for a shard of this pool; None if it has no archive."""
        if config.archive_dir is None:
            return None
        days = min(config.archive.keep_days, config.retention_days or config.archive.keep_days)
        return cls(
            folder=str(config.archive_dir.absolute()),
            journal=str(journal),
            journal_id=journal_id[:8],
            shard=shard,
            keep_s=days * DAY_S,
            max_bytes=int(config.archive.max_gb * 1e9) // config.shards,
            patience_bytes=config.backlog_bytes // 4,
            log_file=None if log_file is None else str(log_file.with_name("archive.log")),
        )


def start(settings: Settings, address: PoolAddress) -> subprocess.Popen[bytes]:
    """Start the archiver of a pool; it ends with this process, whose end closes its input.

    Ctrl-C is not for it, hence a process group. Its session is the pool's: where Linux groups
    tasks by session (`sched_autogroup_enabled`), one alone in a session has a full share of the
    processor, whatever its priority.
    """
    settings = msgspec.structs.replace(settings, unix=address.unix, secret=address.secret)
    command = [sys.executable, "-m", "stepwell.datapool.files.archive.archiver"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0)
    if process.stdin is not None:
        data = msgspec.msgpack.encode(settings)
        process.stdin.write(len(data).to_bytes(4, "little") + data)
        process.stdin.flush()
    return process
