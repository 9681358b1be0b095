"""Helpers for tests of several packages: a server on a free port, a process's end, a full disk."""

from __future__ import annotations

import asyncio
import gc
import resource
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import psutil
import ray
from aiohttp import web
from aiohttp.typedefs import Handler
from ray.cluster_utils import Cluster

T = TypeVar("T")


class PanicError(BaseException):
    """The panic of a package in Rust, as PyO3 raises it."""


@asynccontextmanager
async def serving_posts(path: str, answer: Handler) -> AsyncIterator[str]:
    """The address of a server that answers POSTs at `path`: http://127.0.0.1:PORT."""
    app = web.Application()
    app.router.add_post(path, answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


def reserved_port() -> socket.socket:
    """A port of 127.0.0.1 that nobody else is given until this is closed. It does not listen; a
    server of the test may, as often as it is started again."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


@contextmanager
def ray_nodes(head: Mapping[str, Any], *others: Mapping[str, Any]) -> Iterator[Cluster]:
    """A Ray of these nodes, given by options of `Cluster.add_node`, with no process that a test
    does not ask for: no dashboard, no monitors, no workers that wait for work. This process leaves
    it before it ends."""
    without = {"include_dashboard": False, "no_monitor": True, "include_log_monitor": False}
    started = {"_system_config": {"prestart_worker_first_driver": False}}
    cluster = Cluster(initialize_head=True, head_node_args={**head, **without, **started})
    try:
        for node in others:
            cluster.add_node(**node, include_log_monitor=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def actor_processes(name: str) -> list[psutil.Process]:
    """Processes of the Ray actors of this class, on a cluster that this process started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.cmdline()[:1] and process.cmdline()[0].startswith(f"ray::{name}"):
                found.append(process)
        except psutil.Error:
            continue
    return found


def instances(of: type[T]) -> list[T]:
    """Objects of this class that are alive. (Not of `gc.get_objects()`: it holds the tuples, too,
    that other threads are making, and CPython refuses to end one that somebody else holds.)"""
    return [each for each in gc.get_referrers(of) if isinstance(each, of)]


async def gone(pid: int) -> bool:
    """True if the process ended, by now or within some seconds."""
    for _ in range(1000):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        await asyncio.sleep(0.01)
    return False


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process can be written at all."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
