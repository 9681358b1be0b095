"""This module serves the dashboard over HTTP: its files, who may look, and one JSON route per
question of a page.

    GET  /ui                     the page; nothing in it is secret
    GET  /ui/FILE                its modules, styles and vendored libraries
    POST /ui/api/login {key}     a cookie for the browser, which scripts cannot read
    GET  /ui/api/…               what `Dashboard` answers
    POST /ui/api/…               marks, rewards, dry runs, deletion

A strict Content-Security-Policy lets no script run but these files. Does not own what is answered
(`dashboard.py`), keys (`keys.py`), hosts and origins (`protection.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeAlias

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from stepwell.datapool.types import MAX_INT, TRAIN
from stepwell.gateway.errors import AuthenticationError, RequestError, UnknownItemError
from stepwell.gateway.keys import SESSION_S
from stepwell.gateway.lifecycle import forget_trajectory
from stepwell.gateway.services import services_of
from stepwell.gateway.ui.dashboard import Dashboard, as_json
from stepwell.gateway.web import EventStream, field, parse_object, read_body

STATIC: Final = Path(__file__).parent / "static"
MEDIA: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}
_NUMBERS: Final = ("min_reward", "max_reward", "min_age_s")
_INTEGERS: Final = ("min_version", "max_version")
_TEXTS: Final = ("prompt_uid", "trajectory_uid", "tag", "reason")
STRING, OBJECT = (str, "a string"), (dict, "an object")
NUMBER, INTEGER = ((int, float), "a number"), (int, "an integer")
Question: TypeAlias = Callable[..., Awaitable[Any]]
Reader: TypeAlias = Callable[[Request, str], Any]
Kind: TypeAlias = tuple[type | tuple[type, ...], str]


def cookie_name(request: Request) -> str:
    """Browsers keep one set of cookies for all ports of a host."""
    return f"stepwell_{request.scope['server'][1]}"


# -- files ---------------------------------------------------------------------------------------


@cache
def _files() -> dict[str, tuple[bytes, str, str]]:
    """Content, media type and tag of each file."""
    found = {}
    for path in STATIC.rglob("*"):
        if path.suffix in MEDIA:
            content = path.read_bytes()
            tag = f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"'
            found[path.relative_to(STATIC).as_posix()] = content, MEDIA[path.suffix], tag
    return found


async def page(request: Request) -> Response:
    name = request.path_params.get("file", "index.html")
    if name not in _files():
        raise UnknownItemError(f"/ui/{name:.80} is no file of the dashboard; begin at /ui", None)
    content, media, tag = _files()[name]
    headers = {**HEADERS, "etag": tag, "cache-control": "no-cache"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=media)


# -- who may look --------------------------------------------------------------------------------


async def login(request: Request) -> Response:
    """Exchange an admin key for a cookie."""
    keys = services_of(request).keys
    key = field(parse_object(await read_body(request)), "key", str, "an admin key")
    session = keys.session(key or "")
    if keys.required and session is None:
        raise AuthenticationError(
            "this is no admin key of this gateway (gateway.admin_keys); of a run that made its "
            "own, it is in the file gateway_key of the run's folder"
        )
    answer = _json({"ok": True})
    if session is not None:
        answer.set_cookie(
            cookie_name(request),
            session,
            max_age=SESSION_S,
            path="/ui",
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
    return answer


async def logout(request: Request) -> Response:
    answer = _json({"ok": True})
    answer.delete_cookie(cookie_name(request), path="/ui", httponly=True, samesite="strict")
    return answer


# -- questions -----------------------------------------------------------------------------------


async def live(request: Request) -> Response:
    watcher = services_of(request).dashboard.live.watch()
    answer = EventStream(watcher.frames(), watcher)
    answer.headers.update(HEADERS)
    return answer


def _exporter() -> Callable[..., Awaitable[object]]:
    # Loads pyarrow: 30 MB that a gateway of which nobody exports need not have, and a second.
    from stepwell.datapool.files.transfer import export_channel

    return export_channel


async def export(request: Request) -> Response:
    """The trajectories of a channel, filtered as a listing, as one file."""
    export_channel = await asyncio.to_thread(_exporter)
    services = services_of(request)
    form = request.query_params.get("format", "jsonl")
    if form not in ("jsonl", "parquet"):
        raise RequestError(f"format is {form!r:.80}; send jsonl or parquet", "format")
    folder = tempfile.TemporaryDirectory(prefix="stepwell-export-")
    try:
        path = Path(folder.name) / f"export.{form}"
        await export_channel(services.pool, path, _channel(request), **_filters(request))
    except BaseException:  # the reader may have left in the middle: half a file is of no use
        folder.cleanup()
        raise
    done = BackgroundTask(folder.cleanup)
    name = f"{_channel(request)}.{form}"
    return FileResponse(path, filename=name, headers=HEADERS, background=done)


# What a route takes from the query: a reader of each parameter.


def _text(request: Request, name: str) -> str | None:
    return request.query_params.get(name) or None


def _channel(request: Request, name: str = "channel") -> str:
    return _text(request, name) or TRAIN


def _needed(request: Request, name: str) -> str:
    if (text := _text(request, name)) is None:
        raise RequestError(f"{name} is missing; send it in the query", name)
    return text


def _number(request: Request, name: str, kind: type[int] | type[float] = int) -> Any:
    if (text := _text(request, name)) is None:
        return None
    try:
        value = kind(text)
    except ValueError as e:
        raise RequestError(f"{name} is {text!r:.80}; send a number", name) from e
    if not abs(value) < MAX_INT:  # nor is "nan"
        raise RequestError(f"{name} is {text!r:.80}; send a number below 2**63", name)
    return value


def _words(request: Request, name: str) -> list[str] | None:
    text = _text(request, name)
    return None if text is None else text.split(",")


def _filters(request: Request, _: str = "filters") -> dict[str, Any]:
    """Those of `datapool/inspect/listing.py`."""
    given: dict[str, Any] = {name: _text(request, name) for name in _TEXTS}
    given |= {name: _number(request, name, float) for name in _NUMBERS}
    given |= {name: _number(request, name) for name in _INTEGERS}
    given["state"] = _words(request, "state")
    return {name: value for name, value in given.items() if value is not None}


def _asked(name: str, question: Question, **readers: Reader) -> Route:
    """A route of a question, with its arguments from the query."""

    async def handle(request: Request) -> Response:
        given = {argument: read(request, argument) for argument, read in readers.items()}
        return _json(await question(services_of(request).dashboard, **given))

    return Route(f"/ui/api/{name}", handle, include_in_schema=False)


# -- changes -------------------------------------------------------------------------------------


def _told(name: str, act: Question, *, changes: bool = True, **kinds: Kind) -> Route:
    """A route of an action, with its arguments from the body, by their kinds."""

    async def handle(request: Request) -> Response:
        board = services_of(request).dashboard
        if changes and board.read_only:
            raise RequestError(
                "this run is over, and its journal is only read; resume the run to mark its data",
                None,
            )
        body = parse_object(await read_body(request))
        given = {argument: field(body, argument, *kind) for argument, kind in kinds.items()}
        return _json(await act(board, **given | {"channel": given.get("channel") or TRAIN}))

    return Route(f"/ui/api/{name}", handle, methods=["POST"], include_in_schema=False)


async def delete(request: Request) -> Response:
    services = services_of(request)
    if services.dashboard.read_only:
        raise RequestError("this run is over; `stepwell data delete` erases its data", None)
    uid = field(parse_object(await read_body(request)), "trajectory_uid", *STRING)
    return _json(await forget_trajectory(services, uid or "", with_group=True))


# -- all of them ---------------------------------------------------------------------------------


def _json(value: Any) -> Response:
    headers = {**HEADERS, "cache-control": "no-store"}
    return Response(as_json(value), headers=headers, media_type="application/json")


UI_ROUTES: Final = [
    Route("/ui", page, include_in_schema=False),
    Route("/ui/", page, include_in_schema=False),
    Route("/ui/api/login", login, methods=["POST"], include_in_schema=False),
    Route("/ui/api/logout", logout, methods=["POST"], include_in_schema=False),
    Route("/ui/api/live", live, include_in_schema=False),
    Route("/ui/api/export", export, include_in_schema=False),
    Route("/ui/api/delete", delete, methods=["POST"], include_in_schema=False),
    _asked("about", Dashboard.about),
    _asked(
        "metrics", Dashboard.metrics, key=lambda request, name: request.query_params.getlist(name)
    ),
    _asked("batches", Dashboard.batches, cursor=_number),
    _asked("batch", Dashboard.batch, step=_number),
    _asked("groups", Dashboard.groups, channel=_channel, cursor=_text, filters=_filters),
    _asked(
        "trajectories", Dashboard.trajectories, channel=_channel, cursor=_text, filters=_filters
    ),
    _asked("events", Dashboard.events, channel=_text, kinds=_words, reason=_text),
    _asked("group", Dashboard.group, channel=_channel, prompt_uid=_needed, step=_number),
    _asked("trajectory", Dashboard.trajectory, channel=_text, trajectory_uid=_needed, step=_number),
    _asked(
        *("tokens", Dashboard.tokens),
        channel=_text,
        trajectory_uid=_needed,
        step=_number,
        index=_number,
        start=_number,
    ),
    _told(
        *("mark", Dashboard.mark),
        channel=STRING,
        prompt_uid=STRING,
        trajectory_uid=STRING,
        marks=OBJECT,
    ),
    _told("reward", Dashboard.reward, channel=STRING, trajectory_uid=STRING, reward=NUMBER),
    _told(
        *("dry_run", Dashboard.dry_run),
        changes=False,
        channel=STRING,
        batch_size=INTEGER,
        selection=OBJECT,
    ),
    Route("/ui/{file:path}", page, include_in_schema=False),
]
"""In this order. `/ui/{file:path}` answers GET alone, so a trajectory may be called `ui`."""
