"""This module serves the dashboard over HTTP: its files, who may look, and one JSON route per
question of a page.

    GET  /ui                     the page; nothing in it is secret
    GET  /ui/FILE                its modules, styles and vendored libraries
    POST /ui/api/login {key}     a cookie for the browser, which scripts cannot read
    GET  /ui/api/…               what `Dashboard` answers
    POST /ui/api/…               marks, rewards, dry runs, deletion

A strict Content-Security-Policy lets no script run but these files. Does not own what is answered
(`dashboard.py`), paths (`endpoints.py`), keys, hosts and origins (`access.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from stepwell.datapool.types import MAX_INT, TRAIN
from stepwell.gateway.access import SESSION_S
from stepwell.gateway.dialects.params import Params, kind
from stepwell.gateway.errors import AuthenticationError, RequestError, UnknownItemError
from stepwell.gateway.lifecycle import forget_trajectory
from stepwell.gateway.services import services_of
from stepwell.gateway.ui.dashboard import Dashboard, as_json
from stepwell.gateway.web import EventStream

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
Text: TypeAlias = Annotated[str | None, kind(str, "a string")]
Object: TypeAlias = Annotated[dict[str, Any] | None, kind(dict, "an object")]
Question: TypeAlias = Callable[..., Awaitable[Any]]
Handler: TypeAlias = Callable[..., Awaitable[Response]]
Reader: TypeAlias = Callable[[Request, str], Any]


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
    if name not in _files():  # a question that there is none of has no file
        raise UnknownItemError(f"/ui/{name:.80} is no file of the dashboard; begin at /ui", None)
    content, media, tag = _files()[name]
    headers = {**HEADERS, "etag": tag, "cache-control": "no-cache"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=media)


# -- who may look --------------------------------------------------------------------------------


class Login(Params):
    key: Annotated[str | None, kind(str, "an admin key")] = None


async def login(request: Request, body: Login) -> Response:
    """Exchange an admin key for a cookie."""
    keys = services_of(request).keys
    session = keys.session(body.key or "")
    if keys.required and session is None:
        raise AuthenticationError(
            "this is no admin key of this gateway (gateway.admin_keys); the run's own is in the "
            "file gateway_key of its folder"
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
        await export_channel(
            services.pool, path, _channel(request), pictures="embedded", **_filters(request)
        )
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
    """Read a listing's filters from the query (`datapool/inspect/listing.py`)."""
    given: dict[str, Any] = {name: _text(request, name) for name in _TEXTS}
    given |= {name: _number(request, name, float) for name in _NUMBERS}
    given |= {name: _number(request, name) for name in _INTEGERS}
    given["state"] = _words(request, "state")
    return {name: value for name, value in given.items() if value is not None}


def _list(request: Request, name: str) -> list[str]:
    return request.query_params.getlist(name)


async def _picture(request: Request) -> Response:
    dashboard, digest = services_of(request).dashboard, _needed(request, "digest")
    png = await dashboard.picture(_channel(request), _needed(request, "trajectory_uid"), digest)
    headers = {**HEADERS, "cache-control": "private, max-age=600"}
    return Response(png, headers=headers, media_type="image/png")


async def _compare_csv(request: Request) -> Response:
    dashboard = services_of(request).dashboard
    text = await dashboard.compare_csv(_list(request, "run"), _list(request, "key"))
    headers = {**HEADERS, "content-disposition": 'attachment; filename="runs.csv"'}
    return Response(text, headers=headers, media_type="text/csv; charset=utf-8")


def _question(question: Question, **readers: Reader) -> Handler:
    """A handler of a question, with its arguments from the query."""

    async def handle(request: Request) -> Response:
        given = {argument: read(request, argument) for argument, read in readers.items()}
        return _json(await question(services_of(request).dashboard, **given))

    return handle


# -- changes -------------------------------------------------------------------------------------


class Named(Params):
    channel: Text = None
    trajectory_uid: Text = None


class Mark(Named):
    prompt_uid: Text = None
    marks: Object = None


class Reward(Named):
    reward: Annotated[float | None, kind((int, float), "a number")] = None


class DryRun(Params):
    channel: Text = None
    batch_size: Annotated[int | None, kind(int, "an integer")] = None
    selection: Object = None


class Delete(Params):
    trajectory_uid: Text = None


def _action(act: Question, *, changes: bool = True) -> Handler:
    """A handler of an action, with its arguments from the body."""

    async def handle(request: Request, body: Params) -> Response:
        board = services_of(request).dashboard
        if changes and board.read_only:
            raise RequestError(
                "this run is over, and its journal is only read; resume the run to mark its data",
                None,
            )
        given = {name: getattr(body, name) for name in type(body).model_fields}
        return _json(await act(board, **given | {"channel": given["channel"] or TRAIN}))

    return handle


async def delete(request: Request, body: Delete) -> Response:
    services = services_of(request)
    if services.dashboard.read_only:
        raise RequestError("this run is over; `stepwell data delete` erases its data", None)
    return _json(await forget_trajectory(services, body.trajectory_uid or "", with_group=True))


# -- all of them ---------------------------------------------------------------------------------


def _json(value: Any) -> Response:
    headers = {**HEADERS, "cache-control": "no-store"}
    return Response(as_json(value), headers=headers, media_type="application/json")


_OF_A_LIST: Final[Mapping[str, Reader]] = {
    "channel": _channel,
    "cursor": _text,
    "search": _text,
    "order": _text,
    "ascending": _text,
    "filters": _filters,
}
"""Arguments of the pool's lists."""
QUESTIONS: Final[Mapping[str, Handler]] = {
    "about": _question(Dashboard.about),
    "metrics": _question(Dashboard.metrics, key=_list),
    "runs": _question(Dashboard.runs),
    "compare": _question(Dashboard.compare, run=_list, key=_list),
    "compare.csv": _compare_csv,
    "batches": _question(Dashboard.batches, cursor=_number, order=_text, ascending=_text),
    "batch": _question(Dashboard.batch, step=_number),
    "groups": _question(Dashboard.groups, **_OF_A_LIST),
    "trajectories": _question(Dashboard.trajectories, **_OF_A_LIST),
    "events": _question(
        Dashboard.events, channel=_text, kinds=_words, reason=_text, order=_text, ascending=_text
    ),
    "group": _question(Dashboard.group, channel=_channel, prompt_uid=_needed, step=_number),
    "trajectory": _question(
        Dashboard.trajectory, channel=_text, trajectory_uid=_needed, step=_number, whole=_text
    ),
    "archive": _question(
        Dashboard.archive, query=_text, search=_text, order=_text, ascending=_text, cursor=_text
    ),
    "prompts": _question(
        Dashboard.prompts, which=_text, order=_text, ascending=_text, cursor=_text
    ),
    "picture": _picture,
    "find": _question(Dashboard.find, uid=_needed),
    "tokens": _question(
        Dashboard.tokens,
        channel=_text,
        trajectory_uid=_needed,
        step=_number,
        index=_number,
        start=_number,
    ),
}
"""By what stands behind `/ui/api/`."""
ACTIONS: Final[Mapping[str, tuple[Handler, type[Params]]]] = {
    "mark": (_action(Dashboard.mark), Mark),
    "reward": (_action(Dashboard.reward), Reward),
    "dry_run": (_action(Dashboard.dry_run, changes=False), DryRun),
}
"""By what stands behind `/ui/api/`, with the model of the body."""
