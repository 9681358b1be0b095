"""Runs a gateway in this process: uvicorn in a thread with an event loop of its own.

    bind ──► start ──► serving ──► stop

The socket is bound before anything else starts, so that a taken port is one clear line and port 0
is known. Does not own: the application (`app.py`), a connection (`http_protocol.py`), the Ray actor
around it (`replicas.py`).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn
import uvloop

from stepwell.datapool.remote.client import DataPoolClient
from stepwell.gateway.config import TUNING, GatewayConfig, Tuning
from stepwell.gateway.errors import GatewayError
from stepwell.gateway.http_protocol import ConnectionLimits, HttpProtocol
from stepwell.gateway.listening import bind
from stepwell.gateway.wiring import Wiring

if TYPE_CHECKING:
    from fastapi import FastAPI

log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0


def http_protocol(config: GatewayConfig, tuning: Tuning = TUNING) -> Any:
    """What uvicorn is to make of each connection: `Config(http=…)`."""
    return partial(HttpProtocol, limits=ConnectionLimits(config, tuning))


class _Server(uvicorn.Server):
    """Tells when it serves; uvicorn has no hook for that."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.settled = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets=sockets)
        finally:
            self.settled.set()


class HttpServer:
    """One gateway on its own event loop in a thread. `start` and `stop` are called once each."""

    def __init__(self, config: GatewayConfig, wiring: Wiring, pool: DataPoolClient) -> None:
        self._config = config
        self._wiring = wiring
        self._pool = pool
        self._app: FastAPI | None = None
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: BaseException | None = None

    def start(self) -> str:
        """Serve; returns the origin, e.g. `http://127.0.0.1:8100`.

        Raises:
            PortInUseError, GatewayConfigError, GatewayError
        """
        # Loads FastAPI and the tokenizer, which importing this module does not.
        from stepwell.gateway.app import create_app

        config = self._config
        listening = bind(config.host, config.port)
        try:
            self._app = create_app(config, self._wiring, self._pool)
        except BaseException:  # an interruption, too: the port must be free again
            listening.close()
            raise
        port = listening.getsockname()[1]
        self._server = server = _Server(
            uvicorn.Config(
                self._app,
                log_level=self._wiring.tuning.log_level,
                log_config=None,  # as the rest of the process
                access_log=False,
                http=http_protocol(config, self._wiring.tuning),
                ws="none",
                lifespan="on",
                timeout_keep_alive=75,
                timeout_graceful_shutdown=5,
                server_header=False,
                date_header=False,
            )
        )
        self._thread = threading.Thread(
            target=self._serve, args=(server, listening), name="gateway", daemon=True
        )
        self._thread.start()
        if not server.settled.wait(START_TIMEOUT_S) or not server.started:
            raise GatewayError(f"the gateway did not start: {self._failure or 'see its log'}")
        host = f"[{config.host}]" if ":" in config.host else config.host
        return f"http://{host}:{port}"

    def stop(self) -> None:
        """Abort generations, let commits finish, stop serving, end the thread."""
        if self._app is None or self._server is None or self._thread is None:
            return
        if self._server.started and self._loop is not None and self._thread.is_alive():
            # uvicorn waits for open answers before it tells the application to shut down.
            closing = asyncio.run_coroutine_threadsafe(self._app.state.services.close(), self._loop)
            try:
                closing.result(STOP_TIMEOUT_S)
            except TimeoutError:  # a pool that does not answer keeps no server alive
                log.warning("calls were still being committed when the gateway stopped")
        self._server.should_exit = True
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            self._server.force_exit = True
            self._thread.join(STOP_TIMEOUT_S)

    def _serve(self, server: _Server, listening: socket.socket) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                self._loop = runner.get_loop()
                runner.run(server.serve(sockets=[listening]))
        except BaseException as e:  # noqa: BLE001 - a thread has nobody else to tell
            self._failure = e
            server.settled.set()
        finally:
            listening.close()
