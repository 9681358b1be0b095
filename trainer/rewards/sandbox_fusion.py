"""This module runs programs on a SandboxFusion server, for the reward `code` where
`rollout.reward.sandbox_fusion` names one.

    POST {url}/run_code   {code, stdin, language, compile_timeout, run_timeout, memory_limit_MB, …}
    200   {status: Success | Failed | SandboxError, message,
           run_result: {status: Finished | TimeLimitExceeded | Error, return_code, stdout,
                        execution_time}}

      Success, Finished, 0                       ──► ended well, with its stdout
      Failed (another code, TimeLimitExceeded)   ──► a program that failed
      SandboxError, an answer of another form    ──► RewardCrashError: no score, not 0

Sources: bytedance/SandboxFusion, `sandbox/server/sandbox_api.py`, `sandbox/runners/types.py` at
469de08; volcengine/verl 0.9, `verl/utils/reward_score/sandbox_fusion`, of which a failed server is
a failed program. Does not own what a program's output is worth (`code.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from stepwell.trainer.errors import RewardCrashError
from stepwell.trainer.rewards.server import RewardServer
from stepwell.trainer.sandbox import Ended, SandboxConfig

PATH = "/run_code"


class SandboxFusion:
    """One server.

    Args:
        url: of the server, or of its `/run_code`.
        max_concurrent: programs that run there at once, of all answers.
        timeout_s: of one try; keep it above what a program is given.

    Raises:
        ValueError: `url` is none.
    """

    def __init__(self, url: str, max_concurrent: int = 64, timeout_s: float = 60.0) -> None:
        whole = url if urlsplit(url).path.strip("/") else url.rstrip("/") + PATH
        self._name = f"the sandbox {whole}"
        self._server = RewardServer(self._name, whole, timeout_s=timeout_s)
        self.places = asyncio.Semaphore(max_concurrent)
        """Places of answers, whose programs run one after the other. Whoever scores one takes a
        place before its time begins."""

    async def run(self, program: str, limits: SandboxConfig, stdin: str) -> Ended:
        """Run a Python program. A server that cannot be reached or is busy is asked again.

        Raises:
            RewardCrashError: the server refuses the request, or could not run the program.
        """
        body = {
            "code": program,
            "stdin": stdin,
            "language": "python",
            "compile_timeout": limits.wall_s,
            "run_timeout": limits.wall_s,
            "memory_limit_MB": limits.memory_mb,
            "files": {},
            "fetch_files": [],
        }
        return self._read(await self._server.post(body))

    async def aclose(self) -> None:
        """Close the connections."""
        await self._server.aclose()

    def _read(self, answer: Any) -> Ended:
        fields = answer if isinstance(answer, Mapping) else {}
        status, result = fields.get("status"), fields.get("run_result")
        if not isinstance(result, Mapping) or status not in ("Success", "Failed"):
            why = fields.get("message") or answer
            raise RewardCrashError(
                f"{self._name} ran no program: {status or 'no status'}: {why!s:.200}"
            )
        output = str(result.get("stdout") or "")
        took = result.get("execution_time")
        seconds = float(took) if isinstance(took, int | float) else 0.0
        if status == "Success" and result.get("status") == "Finished":
            return Ended(output, "", seconds)
        why = f"{result.get('status')}, exit status {result.get('return_code')}"
        return Ended(output, why, seconds)
