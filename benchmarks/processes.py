"""Programs that a bench starts beside itself, which end with it."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path


@asynccontextmanager
async def python(log: Path, *command: str, **env: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A module that runs beside this process, and ends with the block; its output goes to `log`."""
    with log.open("ab") as out:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", *command),
            stdout=out,
            stderr=asyncio.subprocess.STDOUT,
            env=os.environ | env,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def free_port() -> int:
    """For programs that do not tell which one they took."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
