"""Programs that a bench starts beside itself, which end with it."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

LINE_BYTES = 1 << 30
STOP_S = 10.0
_BUFFERED = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
"""Environment of the programs. Unbuffered, Python's stdout drops what a pipe does not take at once,
and `write` takes a part where libuv's io_uring has work to tell of."""


@asynccontextmanager
async def python(
    *arguments: str, output: Path | int = DEVNULL, **env: str
) -> AsyncIterator[Process]:
    """`python ARGUMENTS` beside this process; it ends with the block.

    Args:
        output: where it goes: a file, a descriptor, nowhere, or PIPE: `ask` talks to it.
    """
    with output.open("ab") if isinstance(output, Path) else nullcontext(output) as out:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *arguments,
            stdin=PIPE if out == PIPE else DEVNULL,
            stdout=out,
            stderr=None if out == PIPE else STDOUT,
            env=_BUFFERED | env,
            limit=LINE_BYTES,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), STOP_S)
            except TimeoutError:
                process.kill()
                await process.wait()


async def ask(process: Process, line: bytes = b"") -> bytes:
    """The line that it answers to `line`, or prints by itself.

    Raises:
        RuntimeError: it ended.
    """
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the process was not started to talk")
    if line:
        process.stdin.write(line + b"\n")
        await process.stdin.drain()
    if not (answer := await process.stdout.readline()):
        raise RuntimeError(f"process {process.pid} ended with {await process.wait()}")
    return answer


def free_port() -> int:
    """For programs that do not tell which one they took."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
