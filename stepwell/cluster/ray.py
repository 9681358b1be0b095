"""This module starts a Ray on this machine or joins one, so that a run has a cluster or one clear
line why not.

    cluster.address null        Ray of our own: on loopback alone, gone with the run however it ends
    cluster.address auto        the one that runs on this machine
    cluster.address host:port   the one whose GCS is there

Ray asks for a token by default, keeps it in `~/.ray/auth_token`, and looks there only for "auto";
here it is looked for with every address whose Ray asks for it. A run's `run.json` names the file.

Owns the connection and its errors. Does not own placement (`cluster/placement.py`) or what runs
on the cluster (`cluster/parts.py`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import ray
from ray._private import ray_constants, utils
from ray._private.authentication.authentication_token_setup import (
    maybe_enable_token_auth_if_token_available,
)

from stepwell.cluster.address import RayPart, find_ray
from stepwell.cluster.guard import VARIABLE, ProcessGuard, runs
from stepwell.cluster.signals import STOPPING, stopping_signals
from stepwell.errors import RunUnavailableError
from stepwell.trainer.errors import INTERRUPTED, ConfigError, RayEndedError
from stepwell.trainer.threads import in_thread

log = logging.getLogger(__name__)

RETRIES = 2
"""Tries of Ray's first question to a GCS, some seconds each; by default it asks 20 times."""
LOOK_S = 0.5
"""A process that the run cannot do without is missed within this."""
ASK_S = 2.0
"""Between two questions to the head of a Ray that was joined, and for an answer."""
LEAVES_S = 40.0
"""Ray misses a node that has died within this."""
HEAD_WAIT_S = 20.0
"""A head that does not answer for so long is gone. Ray ends the driver after 60 s."""
_raylet: Any = ray._raylet
"""Ray's compiled part, whose types do not cover authentication."""
_MODE, _TOKEN, _TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_CLUSTER_SWITCH = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


@contextmanager
def connected(
    address: str | None,
    namespace: str,
    object_store_mb: int,
    more_env: Callable[[], Mapping[str, Any] | None] = lambda: None,
) -> Iterator[None]:
    """Connected to Ray inside the block; one of our own has ended after it, with all it started.

    Args:
        more_env: asked once a Ray is joined; returns the `runtime_env` that the run needs on it.

    Raises:
        ConfigError: there is no Ray at `address`, it wants another token, or the environment
            cannot be made.
    """
    with ExitStack() as stack:
        if address is not None:
            with ExitStack() as first:
                first.enter_context(joined(address, namespace=namespace))
                if (env := more_env()) is None:
                    stack.push(first.pop_all())
            if env is not None:
                again = joined(address, namespace=namespace, runtime_env=dict(env))
                stack.enter_context(again)
        else:
            guard = ProcessGuard()
            stack.callback(guard.close)
            stack.enter_context(_messages_logged())
            marked = environment(**{VARIABLE: guard.mark, _CLUSTER_SWITCH: "0"})
            with marked, _loopback(), _few_processes():
                _start(namespace, object_store_mb)
            stack.callback(ray.shutdown)
        yield


def _start(namespace: str, object_store_mb: int) -> None:
    try:
        with _our_signals(), _ends_at_once():
            _connect(
                address="local",
                namespace=namespace,
                object_store_memory=object_store_mb << 20,
                include_dashboard=False,
                # Else a Python process for each core waits for work that a run does not have.
                _system_config={"prestart_worker_first_driver": False},
            )
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as e:
        raise RayEndedError(
            f"no Ray could be started on this machine ({_line(e)}); its logs are in "
            f"{os.environ.get('RAY_TMPDIR') or '/tmp'}/ray/session_latest/logs"
        ) from e


@contextmanager
def _few_processes() -> Iterator[None]:
    """Ray starts no monitor of its autoscaler, none of its logs, and no server of its dashboard,
    which `include_dashboard` only makes smaller. Nobody asks them on a Ray of our own; they cost
    1.5 s of CPU and 280 MB, and the driver waits for the server some seconds."""
    node: Any = ray._private.node.Node  # Ray has an option of `ray.init` for none of them
    names = ("start_monitor", "start_log_monitor", "start_api_server")
    before = {name: getattr(node, name) for name in names}
    for name in names:
        setattr(node, name, lambda self, **options: None)
    try:
        yield
    finally:
        for name, start in before.items():
            setattr(node, name, start)


@contextmanager
def _our_signals() -> Iterator[None]:
    """Handlers stay ours. Ray puts its own in the place of SIGTERM's: in Python one that ends the
    process before anything is stopped or saved, in C++ one that prints a stack and aborts. Ray's
    processes never see the SIGHUP of a terminal that closes: this one stops them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in STOPPING}
    theirs, utils.set_sigterm_handler = utils.set_sigterm_handler, lambda handler: None
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # which they inherit
    try:
        yield
    finally:
        utils.set_sigterm_handler = theirs
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # last: one that waited is handled now


@contextmanager
def _ends_at_once() -> Iterator[None]:
    """Cancel the body as soon as a signal is handled that a handler of ours waits for: Ray's own
    processes may have had the same signal, and `ray.init` waits for a dead GCS for a minute.

    Raises:
        CancelledError: one of `stopping_signals` came.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        before[signal.Signals(number)](number, frame)
        raise asyncio.CancelledError(INTERRUPTED)

    found = {number: signal.getsignal(number) for number in stopping_signals()}
    before = {number: handler for number, handler in found.items() if callable(handler)}
    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@asynccontextmanager
async def while_raylet_lives() -> AsyncIterator[None]:
    """Cancels the body if the raylet or GCS that this process has started ends: no actor can be
    started again then, and what waits for one would wait for ever.

    Raises:
        RayEndedError: it has.
    """
    parts = [c for c in psutil.Process().children() if c.name() in ("raylet", "gcs_server")]
    ended = RayEndedError(
        "the raylet or GCS of this run's Ray has ended (killed, or out of memory: see `dmesg`); "
        "run the same command again, it goes on from the last checkpoint"
    )
    async with while_lives(lambda: all(runs(part) for part in parts), lambda: ended):
        yield


@asynccontextmanager
async def while_head_lives() -> AsyncIterator[None]:
    """Cancels the body if the Ray that this process has joined ends: its GCS does not answer for
    HEAD_WAIT_S, or the raylet of this node is gone.

    Raises:
        RayEndedError: it has.
    """
    head = _Head(ray.get_runtime_context().gcs_address)
    ended = RayEndedError(
        f"the Ray at {head.address} has ended: its head does not answer, or this node's raylet is "
        "gone (killed, out of memory, or the machine is down); start it again (`ray start --head`) "
        "and run the same command again, it goes on from the last checkpoint"
    )
    try:
        async with while_lives(head.lives, lambda: ended):
            yield
    except RayEndedError:
        raise
    except Exception as e:  # whatever a call met first
        if await asyncio.to_thread(head.is_up):
            raise
        log.warning("%s", ended)
        raise ended from e


def head_answers() -> bool:
    """Return whether the GCS of this process's Ray answers; nothing can be killed without it."""
    return _answers(ray.get_runtime_context().gcs_address)


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ASK_S).close()
    except OSError:
        return False
    return True


class _Head:
    """The Ray that this process has joined, as far as it can be seen from here."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._answered = self._asked = time.monotonic()
        node: Any = ray._private.worker._global_node  # Ray says it nowhere else
        # Nodes in containers of one machine may have sockets of one path.
        mine = node and {
            f"--raylet_socket_name={node.raylet_socket_name}",
            f"--node_ip_address={node.node_ip_address}",
        }
        raylets = (p for p in psutil.process_iter(["name"]) if p.info["name"] == "raylet")
        self._raylets = [p for p in raylets if mine and mine <= {*_command(p)}]

    def is_up(self) -> bool:
        """The raylet of this node runs, and the GCS answers."""
        return self._has_raylet() and _answers(self.address)

    def lives(self) -> bool:
        """True if `is_up`, or the GCS may come back: Ray itself waits for it for a minute."""
        now = time.monotonic()
        if now - self._asked >= ASK_S:
            self._asked = now
            if _answers(self.address):
                self._answered = now
        return self._has_raylet() and now - self._answered < HEAD_WAIT_S

    def _has_raylet(self) -> bool:
        return all(runs(raylet) for raylet in self._raylets)


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:  # it has ended, or is another user's
        return []


@asynccontextmanager
async def while_lives(
    lives: Callable[[], bool], ended: Callable[[], Exception]
) -> AsyncIterator[None]:
    """Cancels the body once `lives` says no, and raises what `ended` returns in its place."""
    body = asyncio.current_task()
    has_ended = False

    async def watch() -> None:
        nonlocal has_ended
        # A thread that nobody joins: Ray's answer on its nodes is waited for until there is a head.
        while await in_thread(lives):  # noqa: ASYNC110 - a process that dies tells nobody
            await asyncio.sleep(LOOK_S)
        has_ended = True
        log.warning(
            "%s", ended()
        )  # at once: Ray ends a driver whose raylet is gone, within seconds
        if body is not None:
            body.cancel()

    watching = asyncio.create_task(watch(), name="watch")
    try:
        yield
    except asyncio.CancelledError:
        if not has_ended or body is None or body.uncancel():
            raise
        raise ended() from None
    finally:
        watching.cancel()


@asynccontextmanager
async def while_nodes_live(parts: Mapping[str, str]) -> AsyncIterator[None]:
    """Says which node leaves the Ray that this process has joined, and cancels the body if it had
    what cannot be started elsewhere.

    Args:
        parts: names of the ranks and engines on each node, by its id.

    Raises:
        RayEndedError: such a node has left; or any has, and Ray failed a call of the body for it.
    """
    nodes = _Nodes(parts)
    try:
        async with while_lives(nodes.live, nodes.error):
            yield
    except ray.exceptions.RayError as e:
        # A Ray that has ended tells nothing of its nodes, and ends this process within a minute.
        if await in_thread(head_answers) and await in_thread(nodes.have_lost_one):
            raise nodes.error() from e
        raise


class _Nodes:
    """The other nodes of the Ray that this process has joined."""

    def __init__(self, parts: Mapping[str, str]) -> None:
        self._parts = parts
        self._here = ray.get_runtime_context().get_node_id()
        self._address = ray.get_runtime_context().gcs_address
        self._there = self._alive()
        self._left: dict[str, str] = {}
        """Addresses of those that have left, by id, in that order."""
        self._asked = time.monotonic()

    def live(self) -> bool:
        """None that has a rank or an engine has left; each that leaves is told."""
        if time.monotonic() - self._asked < ASK_S:
            return True
        self._look()
        return not any(node in self._parts for node in self._left)

    def have_lost_one(self) -> bool:
        """One has left. Ray fails calls of its actors first, and misses it some seconds later."""
        give_up = time.monotonic() + LEAVES_S
        while not self._left and time.monotonic() < give_up:
            time.sleep(LOOK_S)
            self._look()
        return bool(self._left)

    def error(self) -> Exception:
        node = next((n for n in self._left if n in self._parts), [*self._left][-1])
        had = f", which had {self._parts[node]}," if node in self._parts else ""
        return RayEndedError(
            f"node {self._left[node]}{had} has left the Ray at {self._address} (killed, out of "
            "memory, or the machine is down or cut off); run the same command again, with or "
            "without that node: it goes on from the last checkpoint"
        )

    def _look(self) -> None:
        self._asked = time.monotonic()
        now = self._alive()
        for node in [node for node in self._there if node not in now]:
            self._left[node] = self._there.pop(node)
            if node not in self._parts:
                log.warning(
                    "node %s has left the Ray at %s; rollout workers and gateways that were there "
                    "are started again on the nodes that are left",
                    self._left[node],
                    self._address,
                )
        self._there |= now  # one may have come

    def _alive(self) -> dict[str, str]:
        return {
            node["NodeID"]: node["NodeManagerAddress"]
            for node in ray.nodes()  # type: ignore[no-untyped-call]  # theirs
            if node["Alive"] and node["NodeID"] != self._here
        }


@contextmanager
def visited(address: str) -> Iterator[None]:
    """Connected to the Ray at `address` inside the block, as before if this process already was.

    Raises:
        RunUnavailableError: there is none, or it wants another token.
    """
    if ray.is_initialized() and ray.get_runtime_context().gcs_address == address:
        yield
        return
    try:
        find_ray(address)
    except ConfigError as e:
        raise RunUnavailableError(
            f"{_of_a_run(e).partition(';')[0]}; the run has ended, or has another: its first lines "
            "name it, and so does run.json in its folder"
        ) from e
    try:
        with ExitStack() as stack:
            if address.startswith("127."):
                stack.enter_context(_loopback())
            stack.enter_context(joined(address))
            yield
    except ConfigError as e:
        raise RunUnavailableError(_of_a_run(e)) from e


def _of_a_run(error: ConfigError) -> str:
    return str(error).replace("cluster.address is", "the address of a run's Ray is")


def ray_here(namespace: str) -> RayPart:
    """Describe the Ray that this process is connected to, for other processes to join it."""
    wants_token = _raylet.get_authentication_mode() == _raylet.AuthenticationMode.TOKEN
    node = ray._private.worker._global_node  # Ray says it nowhere else
    return RayPart(
        address=ray.get_runtime_context().gcs_address,
        namespace=namespace,
        auth_mode="token" if wants_token else "disabled",
        token_file=_token_file() if wants_token else None,
        session_dir=None if node is None else Path(node.get_session_dir_path()),
    )


def _token_file() -> Path | None:
    """Return the file of Ray's token, found as Ray looks for it; None: RAY_AUTH_TOKEN has it."""
    if os.environ.get(_TOKEN):
        return None
    if path := os.environ.get(_TOKEN_PATH):
        return Path(path).absolute()
    return Path.home() / ".ray" / "auth_token"


@contextmanager
def attached(part: RayPart, run_dir: str, **options: Any) -> Iterator[None]:
    """Connected to the Ray of the run in `run_dir` inside the block.

    Args:
        options: of `ray.init`, where this process is not connected yet.

    Raises:
        RunUnavailableError: it cannot be joined, or this process is connected to another one.
    """
    if ray.is_initialized():
        here = ray.get_runtime_context().gcs_address
        if here != part.address:
            raise RunUnavailableError(
                f"the run in {run_dir} has its Ray at {part.address}, but this process is "
                f"connected to the Ray at {here}, and a process can be connected to one only; "
                "leave that one first (`ray.shutdown()`), or connect from another process"
            )
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(_messages_logged())
        stack.enter_context(_credentials(part))
        if part.address.startswith("127."):
            stack.enter_context(_loopback())
        before, ray_constants.NUM_REDIS_GET_RETRIES = ray_constants.NUM_REDIS_GET_RETRIES, RETRIES
        try:
            with _our_signals():
                _connect(address=part.address, namespace=part.namespace, **options)
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as e:
            why = _line(e)
            if part.auth_mode == "token" and _is_about_a_token(e):
                why = (
                    "its token stands in the run's environment alone; set RAY_AUTH_TOKEN here, too"
                    if part.token_file is None
                    else f"it wants another token than {part.token_file} holds; put that back there"
                )
            raise RunUnavailableError(
                f"the run in {run_dir} is alive, but its Ray at {part.address} cannot be joined: "
                f"{why}"
            ) from e
        finally:
            ray_constants.NUM_REDIS_GET_RETRIES = before
        stack.callback(ray.shutdown)
        yield


@contextmanager
def _credentials(part: RayPart) -> Iterator[None]:
    """Ray's authentication is that of a run inside the block. Ray keeps what it read, so it is told
    to read again."""
    values: dict[str, str | None] = {_MODE: part.auth_mode}
    if part.token_file is not None:
        values |= {_TOKEN: None, _TOKEN_PATH: str(part.token_file)}
    try:
        with environment(**values):
            _read_credentials_again()
            yield
    finally:
        _read_credentials_again()


def _read_credentials_again() -> None:
    _raylet.Config.initialize("")
    _raylet.AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def _messages_logged() -> Iterator[None]:
    """Stdout stays ours (`--json`) while this process is connected: what Ray has to say of lost
    processes, which it would print there, is a warning of our log."""
    worker: Any = ray._private.worker
    # With `log_to_driver` off Ray prints nothing else through it.
    before, worker.print_to_stdstream = worker.print_to_stdstream, _warn
    try:
        yield
    finally:
        worker.print_to_stdstream = before


def _connect(**options: Any) -> None:
    ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)


def _warn(message: Mapping[str, Any], ignore_prefix: bool) -> None:
    log.warning("Ray: %s", " ".join(" ".join(message["lines"]).split()))


@contextmanager
def joined(address: str, **options: Any) -> Iterator[None]:
    """Connected to the Ray at `address` inside the block.

    Args:
        options: of `ray.init`.

    Raises:
        ConfigError: there is none, or it wants another token.
    """
    with _messages_logged():
        _join(find_ray(address), options)
        try:
            yield
        finally:
            ray.shutdown()


def _join(address: str, options: dict[str, Any]) -> None:
    before, ray_constants.NUM_REDIS_GET_RETRIES = ray_constants.NUM_REDIS_GET_RETRIES, RETRIES
    try:
        with _our_signals():
            _init(address, options)
    except ray.exceptions.RuntimeEnvSetupError as e:
        project = options.get("runtime_env", {}).get("working_dir")
        raise ConfigError(
            f"cluster.address is {address!r}: {project}, which a node there does not have, cannot "
            f"be sent to it ({_line(e)}); keep data and weights in another folder, or put the "
            "project on every node"
        ) from e
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as e:
        if _is_about_a_token(e):
            raise ConfigError(
                f"cluster.address is {address!r}: its Ray wants a token that this process does not "
                "have; put the cluster's (`ray get-auth-token` there) into ~/.ray/auth_token or "
                "RAY_AUTH_TOKEN, or start both with RAY_AUTH_MODE=disabled"
            ) from e
        raise ConfigError(
            f"cluster.address is {address!r}: no Ray could be joined there ({_line(e)}); "
            "start one (`ray start --head`) and give its host:port, or set cluster.address=null "
            "for one of this run's own"
        ) from e
    finally:
        ray_constants.NUM_REDIS_GET_RETRIES = before


def _init(address: str, options: dict[str, Any]) -> None:
    """Without a token first: a Ray that wants none would take the driver's calls with one, but its
    workers would refuse the driver."""
    try:
        _connect(address=address, **options)
    except (ConnectionError, RuntimeError, ray.exceptions.RayError) as e:
        if not _is_about_a_token(e) or not maybe_enable_token_auth_if_token_available(False):
            raise
        ray.shutdown()
        _connect(address=address, **options)


def _is_about_a_token(error: BaseException | None) -> bool:
    while error is not None:
        is_ours = isinstance(error, ray.exceptions.AuthenticationError)
        if is_ours or "Unauthenticated" in str(error) or "InvalidAuthToken" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _line(error: BaseException) -> str:
    cause = error.__cause__ or error
    return " ".join(str(cause).split())[:300] or type(cause).__name__


@contextmanager
def environment(**values: str | None) -> Iterator[None]:
    """Set variables for what Ray starts inside the block; None removes one."""
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def _loopback() -> Iterator[None]:
    """Ray's ports listen on 127.0.0.1. `_node_ip_address` does not do that: Ray replaces a loopback
    address by the machine's. What it knows is a machine that is no part of a cluster, its default
    on macOS; its processes read it in the environment, this one when `ray` was imported."""
    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
