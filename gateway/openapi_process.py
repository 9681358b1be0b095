"""The process that prints `/openapi.json`: `python -m stepwell.gateway.openapi_process`.

To build the schemas of the SDKs' types holds an interpreter for seconds, a thread of the gateway's
too, and nobody would be answered meanwhile.
"""

from __future__ import annotations

import asyncio
import sys

import orjson

from stepwell.gateway.endpoints import ENDPOINTS, SDK_BODIES
from stepwell.gateway.openapi import described


async def read_document() -> bytes:
    """The document, from a process of its own.

    Raises:
        RuntimeError: the process failed; the last line of what it said.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        __name__,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    document, said = await process.communicate()
    if process.returncode:
        lines = said.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise RuntimeError(f"/openapi.json could not be made: {lines[-1]}")
    return document


if __name__ == "__main__":
    sys.stdout.buffer.write(orjson.dumps(described(ENDPOINTS, SDK_BODIES)))
