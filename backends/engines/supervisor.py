"""Runs one engine process and keeps it running, at the current weights.

    starting ──healthy──► up ──dies, hangs──► restarting ──healthy, at current.json, lock held──► up
       │                   │                      ▲  └──more than max_restarts in a row──► failed
       └─dies, too slow──► failed    go_on(port) ─┘        stop() ──► stopped, from any state

One thread starts the process, waits for its end and restarts it. When the supervisor's process
dies, by whatever cause, so does the engine with all its processes (`backends/processes.py`). A
restart reads the committed version (`backends/weights/store.py`), before launch and again when
healthy, then under the store's lock: a publication may have committed meanwhile, or be about to.
Until then it is paused: it serves nothing that was replaced. The embedded engine starts paused;
another is paused as soon as it is healthy. A process that ends because publications pruned the
version that it was loading is no crash: the next one starts at `engine.model_path`, which nobody
prunes, and loads what is committed under the lock.

A process that hangs (stopped, deadlocked) does not end by itself. While it is up it is asked every
`PROBE_EVERY_S`::

    GET /model_info         its HTTP side answers, whatever the engine does
    GET /health_generate    it generates: any token of any request will do. Not asked while a
                            publication holds the store's lock or its memory is lent (it may be
                            paused, and new requests then wait); a question that a publication met
                            does not count

One that gave no answer to one of the two for `engine.hang_timeout_s` is killed and restarted. Only
time spent asking counts, so a machine that was suspended kills nothing when it wakes up.

Synchronous, no Ray; `server.py` is the Ray actor around it. Does not publish weights or route
requests.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

from stepwell.backends.config import EngineConfig
from stepwell.backends.engines.api import (
    CONTROL_TIMEOUT_S,
    LOAD_TIMEOUT_S,
    Engine,
    is_missing,
)
from stepwell.backends.engines.client import EngineClient
from stepwell.backends.engines.commands import Launch
from stepwell.backends.engines.kinds import command_line, connect
from stepwell.backends.errors import EngineError, EngineStartError
from stepwell.backends.processes import Child, last_lines, start_logged
from stepwell.backends.weights import Published, StoreLock, check_version, read_current
from stepwell.backends.weights.transports import ADAPTER_NAME
from stepwell.datapool.errors import DamagedFileError

log = logging.getLogger(__name__)
T = TypeVar("T")

State = Literal["new", "starting", "up", "restarting", "failed", "stopped"]

PROBE_INTERVAL_S = 0.05
"""Between two looks at a process that starts."""
PROBE_EVERY_S = 5.0
"""Between two looks at one that is up."""
PROBE_TIMEOUT_S = 25.0
"""Seconds a probe may take; the servers give themselves 20 s to generate a token for theirs."""
HEALTHY_FOR_S = 60.0
"""After this long up, earlier crashes no longer count against `max_restarts`."""
PORT_PATIENCE_S = 1.0
"""A port that was given up just now is free within this."""
STOP_TIMEOUT_S = 5.0
"""From SIGTERM to SIGKILL."""
LOCK_RETRY_S = 0.01


class Supervisor:
    """One engine process. Thread-safe; `start` and `stop` block."""

    def __init__(
        self,
        config: EngineConfig,
        log_dir: str | os.PathLike[str],
        weights_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        """`weights_dir`: the `WeightStore` whose committed version a restart serves; None always
        serves `config.model_path` as version 0."""
        if config.is_attached:
            raise ValueError("the engines are running already; there is nothing to launch")
        self.config = config
        self.log_file = Path(log_dir).absolute() / "engine.log"
        self.state: State = "new"
        self.restarts = 0
        self.port = config.port
        self.pid: int | None = None
        self._weights_dir = weights_dir
        self._error: EngineStartError | None = None
        self._crashes_in_a_row = 0
        self._goes_on = False
        self._stop = threading.Event()
        self._settled = threading.Event()
        """Set at the first time up, failed or stopped."""
        self._lock = threading.Lock()
        self._child: Child[subprocess.Popen[bytes]] | None = None
        self._base = Published(0, str(config.model_path))
        self._launched = self._base
        self._thread = threading.Thread(target=self._run, name="engine-supervisor", daemon=True)

    @property
    def url(self) -> str:
        host = self.config.host
        return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{self.port}"

    def start(self) -> str:
        """Launch the engine and wait until it is healthy; returns its url. Idempotent.

        Raises:
            EngineStartError: it did not come up; the message names the cause, the remedy where it
                is known, and ends with the engine's last log lines.
        """
        with self._lock:
            if self.state == "new":
                self._check()
                self.state = "starting"
                self._thread.start()
        self._settled.wait()
        if self._error is not None:
            raise self._error
        return self.url

    def go_on(self, port: int) -> None:
        """Run the engine of a supervisor that died, at its port; does not wait for it. Idempotent.
        A failure of this first start is one of a restart."""
        with self._lock:
            if self.state == "new":
                self.port, self.state, self._goes_on = port, "restarting", True
                self._thread.start()

    def stop(self) -> None:
        """Stop the engine: SIGTERM, after STOP_TIMEOUT_S SIGKILL. Idempotent."""
        with self._lock:
            self._stop.set()
            child = self._child
            if self.state == "new":
                self.state, self._error = "stopped", EngineStartError("the engine was stopped")
                self._settled.set()
        if child is not None:
            child.signal(signal.SIGTERM)
        if self._thread.is_alive():
            self._thread.join(STOP_TIMEOUT_S)
            if self._thread.is_alive() and child is not None:
                child.signal(signal.SIGKILL)
            self._thread.join()

    def status(self) -> dict[str, Any]:
        return {
            "state": self.state,
            "url": self.url,
            "pid": self.pid,
            "restarts": self.restarts,
            "error": None if self._error is None else str(self._error),
            "log_file": str(self.log_file),
        }

    # -- checks before launch -----------------------------------------------------------------

    def _check(self) -> None:
        config = self.config
        if config.model_path is None or not (config.model_path / "config.json").is_file():
            raise EngineStartError(
                f"engine.model_path is '{config.model_path}', which has no config.json; "
                "point it at a Hugging Face model directory"
            )
        # A process that is about to begin a program has what its parent held, for a moment.
        patience = time.monotonic() + PORT_PATIENCE_S
        while config.port and _in_use(config.host, config.port):
            if time.monotonic() > patience:
                raise EngineStartError(
                    f"engine.port is {config.port}, but something already listens on "
                    f"{config.host}:{config.port}; stop it, or set engine.port=0 to take a free "
                    "port"
                )
            time.sleep(PROBE_INTERVAL_S)

    def _committed(self) -> Published:
        found = read_current(self._weights_dir) if self._weights_dir is not None else None
        return found or self._base

    def _to_launch(self) -> Published:
        """Return the committed version, its files held against their checksums; what was there
        before any if publications prune it meanwhile: `_catch_up` loads what is committed then."""
        current = self._committed()
        try:
            if self._weights_dir is not None:
                check_version(self._weights_dir, current.path)
        except (DamagedFileError, OSError):
            if not self._is_pruned(current):
                raise
            return self._base
        return current

    def _is_pruned(self, version: Published) -> bool:
        """Return true if publications have replaced `version` and removed its files."""
        return not Path(version.path).is_dir() and self._committed() != version

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            version: Published | None = None
            while not self._stop.is_set():
                started = time.monotonic()
                self._launch(version or self._to_launch())
                version = None
                lived_s = 0.0
                try:
                    self._wait_healthy(started + self.config.startup_timeout_s)
                except EngineStartError:
                    if self._is_pruned(self._launched):
                        log.info("version %d was pruned as it was loaded", self._launched.version)
                        self._kill()
                        version = self._base
                        continue
                    is_first = not self._settled.is_set() and not self._goes_on
                    if is_first and not self._port_was_taken():
                        raise  # a configuration that cannot work
                else:
                    if self._stop.is_set():
                        break
                    if self._catch_up():
                        self.state = "up"
                        self._settled.set()
                    up_since = time.monotonic()
                    self._await_end()
                    lived_s = time.monotonic() - up_since
                if not self._stop.is_set():
                    self._note_crash(lived_s)
        except EngineStartError as e:
            self._error, self.state = e, "failed"
            log.error("%s", e)
        except Exception as e:  # of a plug-in's code it may be any
            why = str(e) if isinstance(e, OSError | ValueError) else f"{type(e).__name__}: {e}"
            self._error, self.state = EngineStartError(f"the engine cannot run: {why}"), "failed"
            log.exception("the engine cannot run")
        finally:
            self._kill()
            if self._stop.is_set():
                self.state = "stopped"
                self._error = self._error or EngineStartError("the engine was stopped")
            self._settled.set()

    def _launch(self, version: Published) -> None:
        if not self.config.port and not self.port:
            self.port = _free_port(self.config.host)
        self._launched = version
        line = command_line(self.config, self._fenced_launch(version))
        argv, threads = line.argv, str(self.config.threads)
        env = {
            **os.environ,
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            **line.env,
            **self.config.env,
        }
        if "PYTHONPATH" in line.env:  # none of the three replaces another
            paths = [source.get("PYTHONPATH") for source in (line.env, self.config.env, os.environ)]
            env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        with self._lock:
            if self._stop.is_set():
                return
            self._child = start_logged(argv, self.log_file, env)
            self.pid = self._child.pid

    def _fenced_launch(self, current: Published) -> Launch:
        """At `current`, and where an engine can, paused: `_catch_up` continues it."""
        extra: tuple[str, ...] = ()
        model = current.path
        if self._weights_dir is not None and self._starts_paused:
            extra = ("--start-paused",)
        if current.adapter:
            model = str(self.config.model_path)
            extra += ("--lora-paths", f"{ADAPTER_NAME}={current.path}")
        return Launch(self.port, model, str(current.version), extra)

    def _wait_healthy(self, deadline: float) -> None:
        while not self._stop.is_set():
            child = self._child
            if child is None:
                return
            code = child.process.poll()
            if code is not None:
                raise self._failed(f"ended with exit code {code} before it was healthy")
            if self._does(lambda engine: engine.check(), 2.0):
                return
            if time.monotonic() >= deadline:
                raise self._failed(
                    f"was not healthy within engine.startup_timeout_s="
                    f"{self.config.startup_timeout_s:g}; raise it if the model is just slow to load"
                )
            self._stop.wait(PROBE_INTERVAL_S)

    def _catch_up(self) -> bool:
        """Bring a process that serves nothing yet to the committed version, and let it serve: not
        while a publication is under way, which would commit without it. False: it ended."""
        if self._weights_dir is None:
            return True
        if not self._starts_paused:
            self._does(lambda engine: engine.pause("retract"), CONTROL_TIMEOUT_S)
        lock = StoreLock(self._weights_dir)
        while not self._stop.is_set() and self._is_running():
            with lock.tried() as mine:
                if mine:
                    return self._admit()
            self._stop.wait(LOCK_RETRY_S)
        return False

    def _admit(self) -> bool:
        current = self._committed()
        try:
            served = self._ask(lambda engine: engine.state(), 30.0)
        except EngineError as e:
            if is_missing(e):  # `check_routes` tells the user
                return self._is_running()
            if self._is_running():  # paused: it would serve nothing
                log.error("%s does not say its version; it is restarted: %s", self.url, e)
                self._signal_kill()
            return False
        if served.version is None:  # a part of a server over several nodes: the first one says it
            return self._is_running()
        is_current = served.version == current.version and not served.is_canary
        if not is_current and not self._load(current):
            log.error("%s could not load version %d; it is restarted", self.url, current.version)
            self._signal_kill()
        elif not self._does(lambda engine: engine.continue_(), CONTROL_TIMEOUT_S):
            log.error("%s does not continue; it is restarted", self.url)
            self._signal_kill()
        else:
            return True
        return False

    def _is_running(self) -> bool:
        child = self._child
        return child is not None and child.process.poll() is None

    def _load(self, current: Published) -> bool:
        if self._weights_dir is not None:
            check_version(self._weights_dir, current.path)

        async def load(engine: Engine) -> None:
            if not current.adapter or not isinstance(engine, EngineClient):
                await engine.update_weights_from_disk(current.path, current.version)
                return
            with suppress(EngineError):  # none was loaded
                await engine.unload_lora_adapter(ADAPTER_NAME)
            await engine.load_lora_adapter(ADAPTER_NAME, current.path)
            await engine.update_weight_version(current.version)

        return self._does(load, LOAD_TIMEOUT_S)

    async def _asking(self, ask: Callable[[Engine], Awaitable[T]], timeout_s: float) -> T:
        async with connect(self.config, self.url, timeout_s=timeout_s) as engine:
            return await ask(engine)

    def _ask(self, ask: Callable[[Engine], Awaitable[T]], timeout_s: float) -> T:
        return asyncio.run(self._asking(ask, timeout_s))

    def _does(self, ask: Callable[[Engine], Awaitable[object]], timeout_s: float) -> bool:
        try:
            self._ask(ask, timeout_s)
        except EngineError:
            return False
        return True

    def _failure(
        self, ask: Callable[[Engine], Awaitable[object]], timeout_s: float
    ) -> EngineError | None:
        try:
            self._ask(ask, timeout_s)
        except EngineError as e:
            return e
        return None

    @property
    def _starts_paused(self) -> bool:
        return self.config.kind == "embedded"

    def _port_was_taken(self) -> bool:
        """Somebody else took the free port between its choice and the launch: choose again."""
        found = "address already in use" in last_lines(self.log_file).lower()
        taken = found and self.config.port == 0
        if taken:
            self.port = 0
        return taken

    def _await_end(self) -> None:
        """Returns when the process has ended; one that hangs is killed."""
        if self._child is None:
            return
        process = self._child.process
        limit_s = min(PROBE_TIMEOUT_S, self.config.hang_timeout_s)
        silent_s = ailing_s = 0.0
        while True:
            try:
                process.wait(PROBE_EVERY_S)
                return
            except subprocess.TimeoutExpired:
                pass
            asked = time.monotonic()
            failure = self._failure(lambda engine: engine.state(), limit_s)
            answered = failure is None or hasattr(failure, "status")
            generates = answered and self._generates(limit_s)
            took_s = PROBE_EVERY_S + min(time.monotonic() - asked, 2 * limit_s)
            silent_s = 0.0 if answered else silent_s + took_s
            ailing_s = 0.0 if generates else ailing_s + took_s
            if max(silent_s, ailing_s) > self.config.hang_timeout_s and process.poll() is None:
                log.error(
                    "%s hangs: no %s for engine.hang_timeout_s=%g; it is restarted",
                    self.url,
                    "token" if answered else "answer",
                    self.config.hang_timeout_s,
                )
                self._signal_kill()

    def _generates(self, limit_s: float) -> bool:
        """It generated a token, or need not: it may be paused, or have no such endpoint."""
        if self.config.release_memory and self.config.kind != "embedded":
            return True  # SGLang may be asked for no token while its memory is lent
        if self._publishes():
            return True
        before = self._committed()
        if self._failure(lambda engine: engine.check_generates(), limit_s) is None:
            return True
        return self._publishes() or self._committed() != before  # paused while it was asked

    def _publishes(self) -> bool:
        """A publication is under way."""
        if self._weights_dir is None:
            return False
        with StoreLock(self._weights_dir).tried() as mine:
            return not mine

    def _note_crash(self, lived_s: float) -> None:
        code = self._child.process.returncode if self._child is not None else None
        self._crashes_in_a_row = 1 if lived_s > HEALTHY_FOR_S else self._crashes_in_a_row + 1
        if self._crashes_in_a_row > self.config.max_restarts:
            raise self._failed(
                f"crashed {self._crashes_in_a_row} times in a row (engine.max_restarts="
                f"{self.config.max_restarts}), last with exit code {code}"
            )
        self._kill()  # what is left of its process group
        self.state = "restarting"
        self.restarts += 1
        log.warning("the engine ended with exit code %s; restart %d", code, self.restarts)
        self._stop.wait(min(5.0, 0.1 * 2**self._crashes_in_a_row))

    def _failed(self, what: str) -> EngineStartError:
        return EngineStartError(
            f"the {self.config.kind} engine {what}. Last lines of {self.log_file}:\n"
            f"{last_lines(self.log_file)}"
        )

    def _signal_kill(self) -> None:
        child = self._child
        if child is not None:
            child.signal(signal.SIGKILL)

    def _kill(self) -> None:
        child, self._child = self._child, None
        self.pid = None
        if child is not None:
            child.kill()
            child.process.wait()


def _free_port(host: str) -> int:
    with socket.socket() as sock:
        try:
            sock.bind((host, 0))
        except OSError as e:
            raise _unusable(host, 0, e) from e
        return int(sock.getsockname()[1])


def _in_use(host: str, port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as e:
            if e.errno == errno.EADDRINUSE:
                return True
            raise _unusable(host, port, e) from e
    return False


def _unusable(host: str, port: int, error: OSError) -> EngineStartError:
    return EngineStartError(
        f"engine.host is {host!r} and engine.port {port}: cannot listen there "
        f"({error.strerror}); use an address of this machine and a port you may open"
    )
