"""Python for the model, in a process of its own with limits.

::

    call ──► unshare (no network, own process ids; where the system permits it)
               └─► python -I -c LIMITED ──► rlimits, then the code, in the rollout's own folder
                        │
                        └── ends, or wall_s: the whole process group is killed

One folder per rollout: files last from call to call and are deleted with the instance. Limits: CPU
and wall time, memory, size and number of files, output, network. It stops what goes wrong by
itself, endless loops, forks and floods; it is no wall against an attacker, who can still read what
its user can read and write where its user can write. For code you do not trust, run the worker in a
container.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from stepwell.trainer.tools import Tool, ToolError, ToolUnavailableError

NAMESPACES = ("unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child")
"""An own network (none) and process ids: the first process that dies takes all others along, even
those that left the process group."""

LIMITED = """\
import ast, os, resource, sys
if os.getpid() == 1:  # signals that are not handled do not end the first of a namespace
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(code if code >= 0 else 128 - code)
cpu_s, memory, file_size, files, processes = map(int, sys.argv[1:6])
def limit(what, soft, hard=None):
    most = resource.getrlimit(what)[1]
    hard = soft if hard is None else hard
    hard = hard if most < 0 else min(hard, most)
    resource.setrlimit(what, (min(soft, hard), hard))
limit(resource.RLIMIT_CPU, cpu_s, cpu_s + 1)
limit(resource.RLIMIT_AS, memory)
limit(resource.RLIMIT_FSIZE, file_size)
limit(resource.RLIMIT_NOFILE, files)
limit(resource.RLIMIT_CORE, 0)
if processes:
    limit(resource.RLIMIT_NPROC, processes)
source = sys.stdin.read()
sys.argv[1:] = []
scope = {"__name__": "__main__"}
tree = ast.parse(source, "<code>")
last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
exec(compile(tree, "<code>", "exec"), scope)
if last is not None:
    value = eval(compile(ast.Expression(last.value), "<code>", "eval"), scope)
    if value is not None:
        print(repr(value))
"""


class SandboxConfig(BaseModel):
    """The limits of one call."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cpu_s: int = Field(default=5, ge=1)
    """CPU time of the process, seconds."""
    wall_s: float = Field(default=10.0, gt=0)
    """After this long everything is killed. Keep it below the tool's `timeout_s`."""
    memory_mb: int = Field(default=512, ge=64)
    """Address space."""
    file_mb: int = Field(default=16, ge=0)
    """Size of each file written."""
    files: int = Field(default=64, ge=8)
    """Open files."""
    processes: int = Field(default=64, ge=1)
    """Processes and threads. Counted only where namespaces are to be had, and not for root."""
    output_chars: int = Field(default=16_384, ge=1)
    """Output beyond it is not read: the process is killed."""
    network: bool = False
    """false: no network, if the system lets us have a network namespace."""
    require_isolation: bool = False
    """true: without namespaces the tool is unavailable, and the rollout aborted."""


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
        self._folders[instance_id] = folder
        for name, text in (files or {}).items():
            (folder / Path(name).name).write_text(text)
        return instance_id

    async def call(
        self, instance_id: str, code: Annotated[str, Field(description="a Python program")]
    ) -> str:
        """Run Python code. Returns what it prints and the value of its last expression. Files in
        the current folder are kept for the next call; variables are not."""
        output, ended = await self._run(code, self._folders[instance_id])
        if ended:
            raise ToolError(f"{ended}\n{output}".rstrip())
        return output or "(no output)"

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        await asyncio.to_thread(shutil.rmtree, self._folders.pop(instance_id), True)

    async def _run(self, code: str, folder: Path) -> tuple[str, str]:
        """What it wrote, and why it ended unless it was well."""
        limits = self.limits
        isolated = await asyncio.to_thread(namespaces_work)
        if limits.require_isolation and not isolated:
            raise ToolUnavailableError(
                "python: this system permits no user namespaces (unshare --map-root-user --net "
                "--pid fails); permit them, or set require_isolation to false"
            )
        numbers = [limits.cpu_s, limits.memory_mb << 20, limits.file_mb << 20, limits.files]
        numbers.append(limits.processes if isolated else 0)  # else it counts all that its user runs
        wrapper = [n for n in NAMESPACES if not (limits.network and n == "--net")]
        process = await asyncio.create_subprocess_exec(
            *(wrapper if isolated else ()),
            *(sys.executable, "-I", "-c", LIMITED),
            *map(str, numbers),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": str(folder), "LANG": "C.UTF-8"},  # no keys of ours
            start_new_session=True,
        )
        output, ended = b"", ""
        try:
            async with asyncio.timeout(limits.wall_s):
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    process.stdin.write(code.encode())
                    await process.stdin.drain()
                process.stdin.close()
                output = await _read(process, limits.output_chars)
                if len(output) > limits.output_chars:
                    ended = f"more than {limits.output_chars} characters of output; killed"
                else:
                    await process.wait()
        except TimeoutError:
            ended = f"not finished within {limits.wall_s:g} s; killed"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what it has left running
            # asyncio waits for the end of the pipe, and a full one is not read by itself.
            while process.stdout is not None and await process.stdout.read(1 << 16):
                pass
            await process.wait()
        text = output[: limits.output_chars].decode(errors="replace")
        return text, ended or _how(process.returncode or 0, limits)


async def _read(process: asyncio.subprocess.Process, most: int) -> bytes:
    assert process.stdout is not None
    output = b""
    while len(output) <= most:
        chunk = await process.stdout.read(most + 1 - len(output))
        if not chunk:
            break
        output += chunk
    return output


def _how(status: int, limits: SandboxConfig) -> str:
    # The first process of a namespace passes a signal on as 128 + number.
    number = -status if status < 0 else status - 128
    if status == 0:
        return ""
    if number == signal.SIGXCPU:
        return f"more than {limits.cpu_s} s of CPU time; killed"
    if number == signal.SIGXFSZ:
        return f"a file larger than {limits.file_mb} MB; killed"
    if number > 0:
        return f"killed by signal {number}"
    return f"exit status {status}"


@functools.cache
def namespaces_work() -> bool:
    """Whether this system lets us run a process without a network and with its own process ids."""
    try:
        done = subprocess.run([*NAMESPACES, "true"], capture_output=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
