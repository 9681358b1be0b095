"""One client's request from bytes to answer, the same for all dialects.

    read ──► parse ──► identify ──► start n calls ──► JSON, or events as they come
               │ dialect   │ trajectory/identity.py   │ call.py      │ dialect

Owns: this sequence. Does not own: wire formats (`dialects/`), calls, or who may call (`keys.py`).
"""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from stepwell.gateway.dialects.base import Dialect, Exchange, Parsed
from stepwell.gateway.errors import (
    RequestError,
    TrajectoryClosedError,
    TrajectoryConflictError,
)
from stepwell.gateway.keys import Named, Principal
from stepwell.gateway.paths import quoted
from stepwell.gateway.services import Services
from stepwell.gateway.trajectory.identity import Origin
from stepwell.gateway.trajectory.trajectory import LiveTrajectory
from stepwell.gateway.web import (
    EventStream,
    OrjsonResponse,
    aborts_on_disconnect,
    parse_object,
    read_body,
    retry_key,
)

IGNORED_HEADER = "x-stepwell-ignored"
TRAJECTORY_HEADER = "x-stepwell-trajectory"
VERSION_HEADER = "x-stepwell-version"
MAX_TOLD = 32
MAX_BEGINNINGS = 4
"""Trajectories that a conversation may find closed as it begins, one after the other."""


async def serve(
    services: Services,
    dialect: Dialect,
    request: Request,
    url: Named | None = None,
) -> Response:
    """Answer one LLM call.

    Args:
        url: the trajectory that it names; None: found out by `Services.identities`.

    Raises:
        GatewayError: answered by the application in the dialect's shape.
    """
    config = services.config
    body = await read_body(request)
    began_at = time.perf_counter()
    retry = retry_key(request.headers, body, dialect.name)
    principal: Principal = request.state.principal
    reader = principal.trajectory[0] if principal.trajectory is not None else None
    parsed = dialect.parse(parse_object(body), reader)
    del body  # as large as all that is parsed of it, and the call may take minutes
    refuse_builtin_tools(services, parsed)
    call = services.calls.prompts.normalised(parsed.call)
    call.began_at = began_at
    origin = Origin(request.headers, url, request.scope["client"], principal.channel)
    for attempt in range(MAX_BEGINNINGS):
        trajectory = services.identities.identify(origin, call, retry, parsed.trajectory_uid)
        try:
            listeners = await services.calls.start(trajectory, call, retry, dialect.name, parsed.n)
            break
        except (TrajectoryClosedError, TrajectoryConflictError):
            # A conversation has no address that its agent could be told is over.
            if not trajectory.is_conversation or attempt == MAX_BEGINNINGS - 1:
                raise
            services.identities.let_go(trajectory)
    exchange = Exchange(
        parsed,
        trajectory,
        listeners,
        model=config.served_model_name,
        tokenizer=services.tokenizer,
        keepalive_s=config.keepalive_s,
    )
    if call.stream:
        try:
            with aborts_on_disconnect(request.scope, exchange):
                await exchange.begin()
        except BaseException:  # nobody reads what the other samples say
            exchange.close()
            raise
        return _told(EventStream(dialect.frames(exchange), exchange), services, exchange)
    try:
        with aborts_on_disconnect(request.scope, exchange):
            replies = await exchange.results()
        await services.engine.pace.keep()  # the pool answers for many at once
        answer = OrjsonResponse(dialect.answer(exchange, replies))
        exchange.delivered()
    finally:
        exchange.close()
    return _told(answer, services, exchange)


def refuse_builtin_tools(services: Services, parsed: Parsed) -> None:
    """
    Raises:
        RequestError: there are some, and `gateway.ignore_builtin_tools` is false.
    """
    if parsed.builtin_tools and not services.config.ignore_builtin_tools:
        name, _, kind = parsed.builtin_tools[0].partition("=")
        raise RequestError(
            f"{name}.type is {kind!r:.80}, a built-in tool that this gateway cannot run; define a "
            "function tool instead",
            name,
        )


def _told(answer: Response, services: Services, exchange: Exchange) -> Response:
    """`answer` with headers that say what sampled it, and what was left aside of the request."""
    say_origin(answer, services, exchange.trajectory, exchange.version)
    if ignored := exchange.parsed.ignored:
        services.calls.counts["ignored_fields"] += len(ignored)
        shown, more = ignored[:MAX_TOLD], len(ignored) - MAX_TOLD
        answer.headers[IGNORED_HEADER] = ", ".join(shown) + (f", {more} more" * (more > 0))
    return answer


def say_origin(
    answer: Response, services: Services, trajectory: LiveTrajectory, version: int | None
) -> None:
    """Say in headers whose call it is and which policy version answers it. Of a stream that has no
    token yet, that is the newest one that an engine has."""
    version = services.engine.version if version is None else version
    if version is not None:
        answer.headers[VERSION_HEADER] = str(version)
    if not trajectory.is_for_one_request:
        answer.headers[TRAJECTORY_HEADER] = quoted(trajectory.uid)
