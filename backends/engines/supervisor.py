"""Runs one engine process and keeps it running, at the current weights.

    starting ──healthy──► up ──dies──► restarting ──healthy, at current.json──► up
       │                   │               └──more than max_restarts in a row──► failed
       └─dies, too slow──► failed          stop() ──► stopped, from any state

One thread starts the process, waits for its end and restarts it, so the fork's thread lives as
long as the engine may: when the supervisor's process dies, by whatever cause, so does the engine
(`die_with_parent.py`). A restart reads the committed version (`backends/weights.py`), before launch
and again when healthy: a publication may have committed meanwhile.

Synchronous, no Ray; `server.py` is the Ray actor around it. Does not publish weights or route
requests.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Literal

from backends.config import EngineConfig
from backends.engines.commands import COMMANDS, Launch
from backends.errors import EngineStartError
from backends.weights import Published, read_current

log = logging.getLogger(__name__)

State = Literal["new", "starting", "up", "restarting", "failed", "stopped"]

LOG_TAIL_LINES = 20
PROBE_INTERVAL_S = 0.05
HEALTHY_FOR_S = 60.0
"""After this long up, earlier crashes no longer count against `max_restarts`."""
_WRAPPER = Path(__file__).with_name("die_with_parent.py")
_LOAD_TIMEOUT_S = 600.0


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
        if config.kind not in COMMANDS:
            raise ValueError(f"engine.kind is {config.kind!r}; only {', '.join(COMMANDS)} launch")
        self.config = config
        self.log_file = Path(log_dir).absolute() / "engine.log"
        self.state: State = "new"
        self.restarts = 0
        self.port = config.port
        self.pid: int | None = None
        self._weights_dir = weights_dir
        self._error: EngineStartError | None = None
        self._crashes_in_a_row = 0
        self._stop = threading.Event()
        self._settled = threading.Event()
        """Set at the first time up, failed or stopped."""
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="engine-supervisor", daemon=True)

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.config.host == "0.0.0.0" else self.config.host
        return f"http://{host}:{self.port}"

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

    def stop(self) -> None:
        """Stop the engine: SIGTERM, after `stop_timeout_s` SIGKILL. Idempotent."""
        with self._lock:
            self._stop.set()
            process = self._process
            if self.state == "new":
                self.state = "stopped"
        if process is not None:
            _signal_group(process, signal.SIGTERM)
        if self._thread.is_alive():
            self._thread.join(self.config.stop_timeout_s)
            if self._thread.is_alive() and process is not None:
                _signal_group(process, signal.SIGKILL)
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
        needs_sglang = config.kind == "sglang" and config.python is None
        if needs_sglang and importlib.util.find_spec("sglang") is None:
            raise EngineStartError(
                "engine.kind is 'sglang', but the package sglang is not installed here; "
                "pip install 'stepwell[sglang]', or set engine.python to an interpreter that has it"
            )
        if config.port and _in_use(config.host, config.port):
            raise EngineStartError(
                f"engine.port is {config.port}, but something already listens on "
                f"{config.host}:{config.port}; stop it, or set engine.port=0 to take a free port"
            )

    def _committed(self) -> Published:
        found = read_current(self._weights_dir) if self._weights_dir is not None else None
        return found or Published(0, str(self.config.model_path))

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                started = time.monotonic()
                self._launch()
                try:
                    self._wait_healthy(started + self.config.startup_timeout_s)
                except EngineStartError:
                    if not self._settled.is_set() and not self._port_was_taken():
                        raise  # the first start: a configuration that cannot work
                else:
                    if self._stop.is_set():
                        break
                    self._catch_up()
                    self.state = "up"
                    self._settled.set()
                    self._await_end()
                if not self._stop.is_set():
                    self._note_crash(time.monotonic() - started)
        except EngineStartError as e:
            self._error, self.state = e, "failed"
            log.error("%s", e)
        except (OSError, ValueError) as e:
            self._error, self.state = EngineStartError(f"the engine cannot run: {e}"), "failed"
            log.exception("the engine cannot run")
        finally:
            self._kill()
            if self._stop.is_set():
                self.state = "stopped"
                self._error = self._error or EngineStartError("the engine was stopped")
            self._settled.set()

    def _launch(self) -> None:
        if not self.config.port and not self.port:
            self.port = _free_port(self.config.host)
        current = self._committed()
        launch = Launch(self.port, current.path, str(current.version))
        argv = COMMANDS[self.config.kind](self.config, launch)
        threads = str(self.config.threads)
        env = {
            **os.environ,
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            # The engine's modules must be importable wherever this process was started.
            "PYTHONPATH": os.pathsep.join([str(_package_root()), os.environ.get("PYTHONPATH", "")]),
            **self.config.env,
        }
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self._lock, self.log_file.open("ab") as out:
            if self._stop.is_set():
                return
            out.write(f"--- launch: {' '.join(argv)}\n".encode())
            out.flush()
            # Its own session: Ctrl-C in the terminal goes to the driver, which stops it in order.
            self._process = subprocess.Popen(
                [sys.executable, "-IS", str(_WRAPPER), str(os.getpid()), *argv],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )
            self.pid = self._process.pid

    def _wait_healthy(self, deadline: float) -> None:
        while not self._stop.is_set():
            process = self._process
            if process is None:
                return
            code = process.poll()
            if code is not None:
                raise self._failed(f"ended with exit code {code} before it was healthy")
            if _get(f"{self.url}/health", timeout=2.0) is not None:
                return
            if time.monotonic() >= deadline:
                raise self._failed(
                    f"was not healthy within engine.startup_timeout_s="
                    f"{self.config.startup_timeout_s:g}; raise it if the model is just slow to load"
                )
            self._stop.wait(PROBE_INTERVAL_S)

    def _catch_up(self) -> None:
        """Load what was committed between launch and health."""
        while True:
            current = self._committed()
            answer = _get(f"{self.url}/model_info", timeout=30.0)
            if answer is None:  # it died again; `_await_end` sees it
                return
            if str(json.loads(answer)["weight_version"]) in _names(current.version):
                return
            body = {"model_path": current.path, "weight_version": str(current.version)}
            if _post(f"{self.url}/update_weights_from_disk", body, _LOAD_TIMEOUT_S) is None:
                raise self._failed(f"could not load the committed version {current.version}")

    def _port_was_taken(self) -> bool:
        """Somebody else took the free port between its choice and the launch: choose again."""
        taken = self.config.port == 0 and "address already in use" in self._tail().lower()
        if taken:
            self.port = 0
        return taken

    def _await_end(self) -> None:
        if self._process is not None:
            self._process.wait()

    def _note_crash(self, lived_s: float) -> None:
        code = self._process.returncode if self._process is not None else None
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
            f"the {self.config.kind} engine {what}. Last lines of {self.log_file}:\n{self._tail()}"
        )

    def _tail(self) -> str:
        try:
            with self.log_file.open("rb") as file:
                file.seek(max(0, self.log_file.stat().st_size - 16384))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError as e:
            return f"(unreadable: {e})"
        return "\n".join(lines[-LOG_TAIL_LINES:])

    def _kill(self) -> None:
        process, self._process = self._process, None
        self.pid = None
        if process is not None:
            _signal_group(process, signal.SIGKILL)
            process.wait()


def _names(version: int) -> tuple[str, ...]:
    return (str(version), "default") if version == 0 else (str(version),)


def _package_root() -> Path:
    return Path(__file__).resolve().parents[2]


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal the engine's session: SGLang's scheduler and detokenizer are its children."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return
    except PermissionError:  # macOS: the group leader is a zombie
        return


def _free_port(host: str) -> int:
    with socket.socket() as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])


def _in_use(host: str, port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as e:
            if e.errno == errno.EADDRINUSE:
                return True
            raise EngineStartError(
                f"engine.host is {host!r} and engine.port {port}: cannot listen there "
                f"({e.strerror}); use an address of this machine and a port you may open"
            ) from e
    return False


def _get(url: str, timeout: float) -> bytes | None:
    """The body of a 200 answer, else None."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as response:
            body: bytes = response.read()
            return body if response.status == 200 else None
    except (OSError, urllib.error.URLError):
        return None


def _post(url: str, body: dict[str, str], timeout: float) -> bytes | None:
    request = urllib.request.Request(
        url, data=json.dumps(body).encode(), headers={"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            answer: bytes = response.read()
            return answer
    except (OSError, urllib.error.URLError):
        return None
