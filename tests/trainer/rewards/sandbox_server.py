"""A server of SandboxFusion's HTTP form (bytedance/SandboxFusion, `sandbox/server/sandbox_api.py`),
which runs Python programs in processes and keeps the requests."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from tests.helpers import serving_posts

FIELDS = {
    "compile_timeout",
    "run_timeout",
    "memory_limit_MB",
    "code",
    "stdin",
    "language",
    "files",
    "fetch_files",
}


class SandboxServer:
    """Args:
    first: answers of the first requests, instead of running them: a status, or a body.
    """

    def __init__(self, *first: Any) -> None:
        self.first = [*first]
        self.bodies: list[dict[str, Any]] = []
        self.running = self.most_running = 0
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        if unknown := body.keys() ^ FIELDS:
            return web.json_response({"detail": sorted(unknown)}, status=422)
        self.bodies.append(body)
        if self.first:
            said = self.first.pop(0)
            if isinstance(said, int):
                return web.json_response({}, status=said)
            return web.json_response(said)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return web.json_response(await self._run(body))
        finally:
            self.running -= 1

    async def _run(self, body: dict[str, Any]) -> dict[str, Any]:
        pipe = asyncio.subprocess.PIPE
        program = await asyncio.create_subprocess_exec(
            sys.executable, "-c", body["code"], stdin=pipe, stdout=pipe, stderr=pipe
        )
        status = "Finished"
        try:
            out, err = await asyncio.wait_for(
                program.communicate(body["stdin"].encode()), body["run_timeout"]
            )
        except TimeoutError:
            program.kill()
            out, err = await program.communicate()
            status = "TimeLimitExceeded"
        code = program.returncode
        return {
            "status": "Success" if status == "Finished" and code == 0 else "Failed",
            "message": "",
            "compile_result": None,
            "run_result": {
                "status": status,
                "execution_time": 0.1,
                "return_code": None if status != "Finished" else code,
                "stdout": out.decode(),
                "stderr": err.decode(),
            },
            "executor_pod_name": None,
            "files": {},
        }


@asynccontextmanager
async def sandbox(*first: Any) -> AsyncIterator[SandboxServer]:
    server = SandboxServer(*first)
    async with serving_posts("/run_code", server.answer) as address:
        server.url = address
        yield server
