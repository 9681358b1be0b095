"""Pools without Ray: of this process, behind a socket or not, or in one that can be killed; and a
line to them that breaks where a test says."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import psutil

from stepwell.datapool import DataPoolClient, PoolConfig
from stepwell.datapool.ops import LeaseBatch
from stepwell.datapool.remote.incarnation import Known
from stepwell.datapool.remote.service import PoolService
from stepwell.datapool.remote.shard import LocalShard, RemoteShard
from stepwell.datapool.remote.wire import PoolAddress, Server, read_answer
from tests.builders import until

HERE = "this node"


def pool_here(
    config: PoolConfig | None = None, folder: Path | None = None, **how
) -> DataPoolClient:
    """A pool of this process, as `DataPoolClient.local`, until `service_of(it).close()`."""
    return DataPoolClient([LocalShard(PoolService(config, folder, **how))])


def service_of(client: DataPoolClient) -> PoolService:
    return client.shards[0].service


async def settle() -> None:
    """Let the loop run until it has nothing to do but to wait."""
    for _ in range(50):
        await asyncio.sleep(0)


async def n_waiting(client: DataPoolClient, who: str = "consumers") -> int:
    return (await client.get_statistics("train"))["waiting"][who]


async def groups_of(client: DataPoolClient, *states: str) -> list[int]:
    groups = (await client.get_statistics("train"))["groups"]
    return [groups[state] for state in states]


def answers_lease(link: RemoteShard, frame: bytes) -> bool:
    """True if a frame answers a call of the link for a lease."""
    number, *_ = read_answer(frame)
    return isinstance(link._unanswered[number].op, LeaseBatch)


class FoundShard(RemoteShard):
    """The way to whatever `address` says now; None: it is starting."""

    def __init__(self, address: PoolAddress | None, met: Known = None, here: str = HERE) -> None:
        super().__init__(met)
        self.address = address
        self.here = here
        self.n_found = 0

    async def find(self) -> tuple[PoolAddress, str]:
        self.n_found += 1
        if self.address is None:
            raise ConnectionError("it is starting")
        return self.address, self.here


@asynccontextmanager
async def serving(config: PoolConfig | None = None, folder: Path | None = None, shard: int = 0):
    """A pool of this loop, and the address of its socket."""
    service = PoolService(config or PoolConfig(durability="none"), folder, shard)
    server = Server(service, HERE)
    yield service, await server.address()
    server.close()
    service.close()


class Proxy:
    """Passes on what two peers say, and cuts the line after so many bytes of one of them."""

    def __init__(self, address: PoolAddress, path: Path) -> None:
        self._behind = address
        self.address = address._replace(unix=str(path))
        self.n_connections = 0
        self.n_bytes = {"up": 0, "down": 0}
        """Bytes of the last connection: to the pool, and to the client."""
        self.cut: dict[str, int] = {}
        """After how many bytes the next connection breaks."""
        self.open = asyncio.Event()
        """Set while the client gets what the pool sends."""
        self.open.set()
        self._writers: list[asyncio.StreamWriter] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Proxy]:
        server = await asyncio.start_unix_server(self._serve, self.address.unix)
        yield self
        server.close()
        self.break_()

    def break_(self) -> None:
        """Cut all lines now."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.n_connections += 1
        self.n_bytes = {"up": 0, "down": 0}
        cut, self.cut = self.cut, {}
        there, back = await asyncio.open_unix_connection(self._behind.unix)
        self._writers += [writer, back]
        pumps = [
            asyncio.create_task(self._pump("up", reader, back, cut.get("up"))),
            asyncio.create_task(self._pump("down", there, writer, cut.get("down"))),
        ]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for end in (writer, back):
            end.transport.abort()
        await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(
        self,
        way: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        left: int | None,
    ) -> None:
        while data := await reader.read(1 << 16):
            if way == "down":
                await self.open.wait()
            passed = data if left is None else data[:left]
            writer.write(passed)
            self.n_bytes[way] += len(passed)
            if left is not None:
                left -= len(passed)
                if left == 0:
                    await writer.drain()
                    await asyncio.sleep(0)
                    return


class PoolProcess:
    """A pool in a process of its own, over the journal of `folder`, that can be killed.

    Args:
        archive: folder of its archive; None: it has none.
    """

    def __init__(
        self, folder: Path, shard: int = 0, n_shards: int = 1, archive: Path | None = None
    ) -> None:
        self.link = FoundShard(None)
        self._arguments = [str(folder), shard, n_shards, str(archive or "")]
        self._pid = 0
        self._n_starts = 0

    async def start(self) -> None:
        self._n_starts += 1
        said = await asyncio.to_thread(_forked, [*self._arguments, self._n_starts > 1])
        self._pid = said["pid"]
        self.link.address = PoolAddress(
            HERE, said["n"], said["unix"], None, bytes.fromhex(said["secret"])
        )

    async def kill(self) -> None:
        """`kill -9`; returns once the process is gone."""
        self.link.address = None
        os.kill(self._pid, signal.SIGKILL)
        await until(lambda: not psutil.pid_exists(self._pid))

    def pause(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self._pid, signal.SIGCONT)


def _forked(arguments: list) -> dict:
    """Start a process of a pool; what it says once it serves."""
    with _FORKING:
        parent = _parent()
        parent.stdin.write(json.dumps(arguments) + "\n")
        parent.stdin.flush()
        return json.loads(parent.stdout.readline())


_FORKING = threading.Lock()


@cache
def _parent() -> subprocess.Popen:
    """The parent of all processes of pools: to import the pool takes each a third of a second."""
    argv = [sys.executable, "-c", _PARENT]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(argv, text=True, **pipes)


_PARENT = """
import asyncio, json, os, signal, sys
from pathlib import Path
import uvloop
from stepwell.datapool import PoolConfig
from stepwell.datapool.config import ArchiveConfig
from stepwell.datapool.remote.service import PoolService
from stepwell.datapool.remote.wire import Server

async def run(folder, shard, n_shards, archive, restarted):
    archived = ArchiveConfig(dir=Path(archive)) if archive else ArchiveConfig()
    config = PoolConfig(shards=n_shards, archive=archived)
    service = PoolService(config, Path(folder), shard, restarted=restarted)
    address = await Server(service, "this node").address()
    said = {"n": address.n_shards, "unix": address.unix, "secret": address.secret.hex()}
    print(json.dumps({"pid": os.getpid(), **said}), flush=True)
    await asyncio.Event().wait()

signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that are killed
for line in sys.stdin:
    if os.fork() == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        try:
            uvloop.run(run(*json.loads(line)))
        finally:
            print(flush=True)  # whoever started it reads no JSON
            os._exit(1)
"""


@asynccontextmanager
async def processes(folder: Path, n: int = 1) -> AsyncIterator[tuple[DataPoolClient, list]]:
    """A client of a pool of `n` processes, and these."""
    shards = [PoolProcess(folder / f"shard-{k}", k, n) for k in range(n)]
    await asyncio.gather(*(shard.start() for shard in shards))
    client = DataPoolClient([shard.link for shard in shards])
    yield client, shards
    await client.close()
    for shard in shards:
        if shard.link.address is not None:
            await shard.kill()
