"""Python for the model, in a process of its own with limits (`stepwell.trainer.sandbox`).

One folder per rollout: files last from call to call and are deleted with the instance.
"""

from __future__ import annotations

import asyncio
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from stepwell.trainer.rollout.folders import remove
from stepwell.trainer.sandbox import SandboxConfig, run
from stepwell.trainer.tools import Tool, ToolError, ToolUnavailableError


class PythonSandbox(Tool):
    """See the module's docstring; `config` is a `SandboxConfig`."""

    name = "python"

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        tool_schema: Mapping[str, Any] | None = None,
    ) -> None:
        self.limits = SandboxConfig.model_validate(config or {})
        super().__init__(config, tool_schema)
        self._folders: dict[str, Path] = {}

    async def create(
        self, instance_id: str | None = None, files: Mapping[str, str] | None = None, **kwargs: Any
    ) -> str:
        """`files`: name -> text, put into the rollout's folder."""
        instance_id = instance_id or uuid.uuid4().hex
        folder = Path(tempfile.mkdtemp(prefix="stepwell-python-"))
        try:
            for name, text in (files or {}).items():
                (folder / Path(name).name).write_text(text, encoding="utf-8")
        except BaseException:  # whatever stops it, nobody else knows the folder
            remove(folder)
            raise
        self._folders[instance_id] = folder
        return instance_id

    async def call(
        self, instance_id: str, code: Annotated[str, Field(description="a Python program")]
    ) -> str:
        """Run Python code. Returns what it prints and the value of its last expression. Files in
        the current folder are kept for the next call; variables are not."""
        if not await self.limits.is_met():
            raise ToolUnavailableError(
                "python: this system permits no user namespaces (unshare --map-root-user --net "
                "--pid fails); permit them, or set require_isolation to false"
            )
        try:
            ended = await run(code, self._folders[instance_id], self.limits)
        except OSError as e:  # no fault of the policy's
            raise ToolUnavailableError(f"python: {e}") from e
        if ended.failure:
            raise ToolError(f"{ended.failure}\n{ended.output}".rstrip())
        return ended.output or "(no output)"

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        await asyncio.to_thread(remove, self._folders.pop(instance_id))
