"""This module runs a Python program that a model wrote in a process of its own with limits, so that
the program can neither hang, flood nor change the process that asks for it.

::

    run ──► unshare (no network, own process ids; where the system permits it)
              └─► rlimits, then python -I -c PROGRAM ──► the program, in its folder
                       │
                       └── ends, or wall_s: the whole process group is killed

Limits: CPU and wall time, memory, size and number of files, output, network. They stop what goes
wrong by itself, endless loops, forks and floods; they are no wall against an attacker, who can
still read what its user can read and write where its user can write. For code you do not trust, run
the process in a container. Used by the reward `code` and by `examples/tools/sandbox.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from stepwell.backends.processes import Limits, spawn

NAMESPACES = ("unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child")
"""An own network (none) and process ids: the first process that dies takes all others along, even
those that left the process group."""

STARTED = b"\6"
"""First byte of PROGRAM's output: without it the sandbox failed, not the program."""
MOST_BYTES = 4
"""Bytes of a character, at most."""
_CONTINUES = bytes(range(0x80, 0xC0))
"""Bytes within a character."""
_NO_MEMORY = (b"temporarily unavailable", b"Cannot allocate memory")
"""Words of `unshare` on a machine that can start no process. (Without room for namespaces there is
"No space left": so it is where none are permitted.)"""
DRAIN_S = 1.0
"""Seconds for what is left in the pipe of a program that has ended."""

PROGRAM = """\
import ast, os
def read(n):  # not through sys.stdin, whose buffer would take from what is the program's
    data = b""
    while len(data) < n and (chunk := os.read(0, n - len(data))):
        data += chunk
    return data
source, is_heard = read(int(read(16))).decode(), read(1) == b"1"
os.write(1, b"\\6")
if not is_heard:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)
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
    """The limits of one program."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cpu_s: int = Field(default=5, ge=1)
    """CPU time of the process, seconds."""
    wall_s: float = Field(default=10.0, gt=0)
    """After this long everything is killed. Keep it below the `timeout_s` of the tool or reward."""
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
    """true: without namespaces nothing is run: a tool is unavailable, and the rollout aborted; a
    score is missing."""

    async def is_met(self) -> bool:
        """True if the system isolates as `require_isolation` asks."""
        return not self.require_isolation or await asyncio.to_thread(namespaces_work)


class Ended(NamedTuple):
    """The end of a program."""

    output: str
    """Its stdout, and stderr where that was wanted."""
    failure: str
    """Reason why it failed; empty: it ended well."""
    seconds: float = 0.0
    """Time that it took."""


async def run(
    program: str, folder: Path, limits: SandboxConfig, stdin: str = "", *, stderr: bool = True
) -> Ended:
    """Run `program` in `folder`; the value of a last expression is printed, as at a prompt.

    Args:
        stdin: what it may read.
        stderr: its stderr is output, too; else it is lost.

    Raises:
        OSError: no process could be started; that says nothing of the program.
    """
    isolated = await asyncio.to_thread(namespaces_work)
    began = time.monotonic()
    rlimits = Limits(
        cpu_s=limits.cpu_s,
        memory=limits.memory_mb << 20,
        file_size=limits.file_mb << 20,
        files=limits.files,
        processes=limits.processes if isolated else None,  # else it counts all that its user runs
    )
    wrapper = [n for n in NAMESPACES if not (limits.network and n == "--net")]
    child = await spawn(
        [*(wrapper if isolated else ()), *rlimits.command("-c", PROGRAM)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=folder,
        env={"PATH": os.defpath, "HOME": str(folder), "LANG": "C.UTF-8"},  # no keys of ours
    )
    process = child.process
    source = program.encode(errors="surrogatepass")
    rest = stdin.encode(errors="surrogatepass")
    given = b"%016d%b%d%b" % (len(source), source, stderr, rest)
    output, failure = bytearray(), ""
    feeding = asyncio.create_task(_feed(process, given))
    try:
        async with asyncio.timeout(limits.wall_s):
            if not await _read(process, output, limits.output_chars + len(STARTED)):
                failure = f"more than {limits.output_chars} characters of output; killed"
            else:
                await process.wait()
    except TimeoutError:
        failure = f"not finished within {limits.wall_s:g} s; killed"
    finally:
        feeding.cancel()
        child.kill()
        # asyncio waits for the end of the pipe, and a full one is not read by itself. What has left
        # the group (there is no namespace that ends it) may hold it open for ever.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                while process.stdout is not None and await process.stdout.read(1 << 16):
                    pass
        process._transport.close()  # type: ignore[attr-defined]  # nothing public closes the pipe
        await process.wait()
    if not output.startswith(STARTED):
        reason = failure or output[:200].decode(errors="replace").strip()
        raise OSError(
            f"the sandbox did not start ({reason or f'exit status {process.returncode}'})"
        )
    text = output[len(STARTED) :].decode(errors="replace")[: limits.output_chars]
    how = failure or _how(process.returncode or 0, limits)
    return Ended(text, how, time.monotonic() - began)


async def _feed(process: asyncio.subprocess.Process, given: bytes) -> None:
    """Beside the reading: a program need not read its input before it writes."""
    if process.stdin is None:
        return
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(given)
        await process.stdin.drain()
    process.stdin.close()


async def _read(process: asyncio.subprocess.Process, output: bytearray, most: int) -> bool:
    """Into `output`, which has what there was if this is cancelled; False: there are more than
    `most` characters."""
    characters = 0
    while process.stdout is not None:
        chunk = await process.stdout.read(most + 1 - characters)
        if not chunk:
            break
        output += chunk
        characters += len(chunk.translate(None, _CONTINUES))
        if characters > most or len(output) > MOST_BYTES * most:  # what is no text, too
            return False
    return True


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
    """True if a process may run without a network and with its own process ids here.

    Raises:
        OSError: the machine is too busy to tell; to be asked again, as answers are kept.
    """
    try:
        done = subprocess.run(
            [*NAMESPACES, "true"],
            capture_output=True,
            timeout=20,
            env={**os.environ, "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired as e:
        raise OSError("unshare true did not end within 20 s; the machine is too busy") from e
    except (FileNotFoundError, PermissionError):
        return False
    if done.returncode and any(words in done.stderr for words in _NO_MEMORY):
        raise OSError(f"the machine is too busy: {done.stderr.decode(errors='replace').strip()}")
    return done.returncode == 0
