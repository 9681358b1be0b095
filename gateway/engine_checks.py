"""Asks engines how they are, in the background.

Of each engine, every `engine_health_interval_s`, and at once when a call broke on it:

    /model_info   it answers, and has this weight version       (older servers: /get_model_info)
    /health       it can generate

The first decides whether the engine is there, because a real SGLang generates a token for `/health`
and so fails it while it is paused. An engine that knows neither form of `/model_info` is judged by
`/health` alone and not held to a version.

With `Wiring.via_router` calls go through an SGLang router. It is then the only engine, well as long
as one of its workers is, and its list of workers (`/workers`) is the version gate
(`backends/engines/router.py`). It has no `/model_info`, and forwards no aborts: what only an engine
knows is asked of the workers.

Owns these tasks. Does not own: what follows from an answer (`fleet.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import orjson

from stepwell.datapool.types import CANARY
from stepwell.gateway.config import GatewayConfig
from stepwell.gateway.errors import EngineError, EngineUnavailableError
from stepwell.gateway.fleet import Engine, Fleet

log = logging.getLogger(__name__)

_RECHECK_S = 1.0
"""Between checks of an engine that is not up."""
_AT_ONCE_S = 0.01
_NOT_FOUND = frozenset({404, 405, 501})


class EngineChecks:
    """The checks of one fleet. Owned by the `EngineClient`; `session` is not closed here."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        config: GatewayConfig,
        fleet: Fleet,
        *,
        via_router: bool,
    ) -> None:
        self._session = session
        self._config = config
        self._fleet = fleet
        self._via_router = via_router
        self._watchers: dict[Engine, asyncio.Task[None]] = {}
        self._wake: dict[Engine, asyncio.Event] = {}
        self.workers: tuple[str, ...] = ()
        """Of the router that calls go through."""
        self._news = asyncio.Event()
        self._running = False
        self._last_why = ""
        """Why no engine said what was asked of all of them, as the log has it."""

    async def start(self) -> None:
        """Begin; a router that answers has been asked once. Idempotent."""
        if self._running:
            return
        self._running = True
        for engine in self._fleet:
            if self._via_router:
                await self._check(engine)
            self._wake[engine] = asyncio.Event()
            self._watchers[engine] = asyncio.create_task(self._watch(engine))

    async def close(self) -> None:
        """Idempotent."""
        self._running = False
        tasks = tuple(self._watchers.values())
        self._watchers.clear()
        self._wake.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def look_at(self, engine: Engine) -> None:
        """Check `engine` now."""
        if engine in self._wake:
            self._wake[engine].set()

    async def wait_for_candidate(self, seconds: float) -> None:
        """Until some engine may be used, at most so long."""
        try:
            async with asyncio.timeout(seconds):
                while not self._fleet.has_candidate(_now()):
                    await self._news.wait()
        except TimeoutError:
            return

    async def first_healthy(self) -> None:
        """Raises EngineUnavailableError unless some engine answers `/health` with 200."""
        await self._first("/health", _is_ok, "no engine is healthy")

    async def context_length(self) -> int:
        """Tokens that fit in prompt and response, as the first engine says that says it."""
        length: int = await self._first(
            "/v1/models",
            _context_length,
            "the context length is unknown",
            "start the engine, or set gateway.context_length",
        )
        return length

    # -- engines ------------------------------------------------------------------------------

    async def _watch(self, engine: Engine) -> None:
        wake = self._wake[engine]
        while True:
            wake.clear()
            try:
                await self._check(engine)
            except Exception:  # a task that ended would leave the engine as it is for good
                log.exception("checking %s failed", engine.url)
            interval = self._config.engine_health_interval_s
            if self._fleet.state(engine) != "up":
                probe_in = max(engine.circuit.probe_in(_now()), _AT_ONCE_S)
                interval = min(interval, _RECHECK_S, probe_in)
            try:
                async with asyncio.timeout(interval):
                    await wake.wait()
            except TimeoutError:
                continue

    async def _check(self, engine: Engine) -> None:
        fleet = self._fleet
        asked, state = engine.asked(), fleet.state(engine)
        try:
            version, canary = await self._version(engine.url)
        except aiohttp.ClientConnectorError as e:
            fleet.check_failed(engine, _now(), _words(e), refused=True)
        except (aiohttp.ClientError, TimeoutError, EngineError) as e:
            fleet.check_failed(engine, _now(), _words(e), refused=False)
        else:
            if not fleet.check_passed(engine, _now(), asked=asked, version=version, canary=canary):
                return
            self._tell()
            well, why = await self._health(engine.url)
            fleet.health(engine, _now(), well=well, why=why)
            self._tell()
        after = fleet.state(engine)
        if after != state:
            why = engine.why if after != "up" else ""
            log.warning("engine %s is %s (was %s) %s", engine.url, after, state, why)

    async def _version(self, url: str) -> tuple[int | None, bool]:
        """And whether it is a canary's."""
        if self._via_router:
            status, body = await self._get(f"{url}/workers")
            if status != 200:
                raise EngineError(f"/workers answered {status}")
            self.workers = _listed_urls(body)
            return None, False  # its workers have versions; it has none
        for path in ("/model_info", "/get_model_info"):
            status, body = await self._get(url + path)
            if status == 200:
                try:
                    version = orjson.loads(body)["weight_version"]
                    return version_number(version), is_canary(version)
                except (ValueError, KeyError, TypeError):
                    return None, False  # the calls' own answers are refused with a clear error
            if status not in _NOT_FOUND:
                raise EngineError(f"{path} answered {status}")
        return None, False

    async def _health(self, url: str) -> tuple[bool, str]:
        path = "/readiness" if self._via_router else "/health"
        try:
            status, _ = await self._get(url + path)
        except (aiohttp.ClientError, TimeoutError) as e:
            return False, f"{path}: {_words(e)}"
        return status == 200, "" if status == 200 else f"{path} answered {status}"

    async def _get(self, url: str) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=self._config.engine_health_timeout_s)
        async with self._session.get(url, timeout=timeout) as response:
            return response.status, await response.read()

    async def _first(
        self, path: str, read: Callable[[int, bytes], Any], what: str, remedy: str = ""
    ) -> Any:
        """The first engine's answer to `path` that `read` accepts, all asked at once."""

        async def ask(url: str) -> Any:
            try:
                return read(*await self._get(url + path))
            except (aiohttp.ClientError, TimeoutError, ValueError) as e:
                raise EngineError(f"{url}: {_words(e)}") from e

        urls = self.workers if self._via_router else [e.url for e in self._fleet]
        answer, failures = await _first_result([ask(url) for url in urls])
        if answer is not None:
            return answer
        why = "; ".join(map(str, failures)) or self._fleet.why_none()
        if why != self._last_why:
            self._last_why = why
            log.warning("%s: %s", what, why)
        raise EngineUnavailableError(f"{what}: see the gateway's log" + (remedy and f", {remedy}"))

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


async def _first_result(asking: list[Awaitable[Any]]) -> tuple[Any, list[Exception]]:
    failures: list[Exception] = []
    tasks = [asyncio.ensure_future(a) for a in asking]
    try:
        for done in asyncio.as_completed(tasks):
            try:
                return await done, failures
            except EngineError as e:
                failures.append(e)
    finally:
        for task in tasks:
            task.cancel()
    return None, failures


def _is_ok(status: int, body: bytes) -> bool:
    if status != 200:
        raise ValueError(f"/health answered {status}")
    return True


def _context_length(status: int, body: bytes) -> int:
    models = orjson.loads(body).get("data") if status == 200 else None
    length = models[0].get("max_model_len") if models else None
    if not isinstance(length, int) or length < 2:
        raise ValueError(f"/v1/models answered {status} and names no max_model_len")
    return length


def _listed_urls(body: bytes) -> tuple[str, ...]:
    """Of a router's workers."""
    try:
        return tuple(str(w["url"]).rstrip("/") for w in orjson.loads(body)["workers"])
    except (ValueError, KeyError, TypeError) as e:
        raise EngineError(f"/workers is no list of workers: {body!r:.200}") from e


def is_canary(version: Any) -> bool:
    """Whether an engine has a version that is not committed (`publish.canary_share`)."""
    return isinstance(version, str) and version.endswith(CANARY)


def version_number(version: Any) -> int:
    """SGLang's version strings; Stepwell publishes decimal integers, a canary's with a suffix; an
    unpublished engine says "default".

    Raises:
        ValueError: neither.
    """
    if version == "default":
        return 0
    digits = version.removesuffix(CANARY) if isinstance(version, str) else ""
    number = int(digits) if digits.isdecimal() else version
    if type(number) is not int or not 0 <= number < 2**63:
        raise ValueError(f"weight_version is {version!r:.80}; publish decimal integers")
    return number


def _words(e: BaseException) -> str:
    return str(e) or type(e).__name__


def _now() -> float:
    return asyncio.get_running_loop().time()
