"""The table of endpoints: path, access, handler and body of everything that a gateway serves.

    request ──► find ──► admit (`access.py`) ──► body read ──► handler ──► answer
                 └── no endpoint ──► admit ──► FastAPI's 404, 405 or redirect

Endpoints are FastAPI's routes, which describes them (`/openapi.json`), and are answered without its
dependencies: those cost 110 µs a request, more than all else that is done for most of them. A body
that has a model is read by it, `Params.read`; a dialect reads its own.

Owns: the table, and finding the endpoint of a request. Does not own: what the handlers do.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from stepwell.gateway import lifecycle as life
from stepwell.gateway import routes
from stepwell.gateway.access import GEMINI_BASES, UNDER, Access, Named, take_body, uid_of
from stepwell.gateway.dialects.params import Params
from stepwell.gateway.openapi import GEMINI
from stepwell.gateway.slime_buffer import router as slime
from stepwell.gateway.ui import router as ui
from stepwell.gateway.web import parse_object

Handler: TypeAlias = Callable[..., Awaitable[Any]]
"""Answers `(request)`, or `(request, body)` where the endpoint has a model of its body; that of a
call writes the answer to `(services, call)`."""
Body: TypeAlias = type[Params] | type[dict[str, Any]] | str | None
"""Model that reads the body; `dict`: an object of any fields. A text is the dotted path of the type
that only describes it: the handler takes the body as it came, since retries are found by it."""


class Endpoint(APIRoute):
    """One row of the table."""

    def __init__(
        self,
        method: str,
        path: str,
        access: Access,
        handler: Handler,
        body: Body = None,
        *,
        is_described: bool = True,
        is_call: bool = False,
    ) -> None:
        """
        Args:
            method: GET answers HEAD as well.
            is_described: it stands in `/openapi.json`.
            is_call: it is a call of a dialect, or as frequent; its handler writes the answer
                itself.
        """
        self.method, self.access, self.handler, self.body = method, access, handler, body
        self.is_call = is_call
        super().__init__(
            path, self._described(path), methods=[method], include_in_schema=is_described
        )

    async def answer(self, request: Request) -> Response:
        """The response to an admitted request.

        Raises:
            GatewayError, DataPoolError: answered by the application in the path's shape.
        """
        response: Response
        if self.body is None or isinstance(self.body, str):
            response = await self.handler(request)
        else:
            sent = parse_object(take_body(request))
            read = self.body.read(sent) if issubclass(self.body, Params) else sent
            response = await self.handler(request, read)
        return response

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's own way to an endpoint, which passes nobody: `Finder` found none."""

        async def refuse(request: Request) -> Response:
            raise HTTPException(404)

        return refuse

    def _described(self, path: str) -> Callable[..., Any]:
        """A function that FastAPI reads as one of its own: with the parameters of the path, and the
        body."""

        def endpoint() -> None: ...

        names = [part.partition(":")[0] for part in path.replace("}", "{").split("{")[1::2]]
        kind = inspect.Parameter.KEYWORD_ONLY
        fields = [inspect.Parameter(name, kind, annotation=str) for name in names]
        if isinstance(self.body, type):
            needs = any(f.is_required() for f in getattr(self.body, "model_fields", {}).values())
            default = inspect.Parameter.empty if needs else None
            fields.append(inspect.Parameter("body", kind, annotation=self.body, default=default))
        endpoint.__signature__ = inspect.Signature(fields)  # type: ignore[attr-defined]
        endpoint.__name__ = getattr(self.handler, "__name__", "endpoint")
        endpoint.__doc__ = inspect.getdoc(self.handler)
        return endpoint


# -- finding one -----------------------------------------------------------------------------


Found: TypeAlias = tuple[Endpoint | None, dict[str, str], Access, Named | None]
"""The endpoint that a request's method and path name (None: there is none of this path, or none
with this method), the path's parameters, which `uid_of` decodes, the access that the request needs,
and the trajectory that the URL names. Paths that do not exist need a key as well, so they tell
nothing."""


KEPT_PATHS, KEPT_PATH = 4096, 256
"""Paths whose endpoints are remembered, and the longest one: all calls of a trajectory have one."""


class Finder:
    """Endpoints by method and path: first those with a path of their own, then those below a
    trajectory's URL, then the others, in their order."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self._exact: dict[tuple[str, str], Endpoint] = {}
        self._below: dict[tuple[str, str], Endpoint] = {}
        self._others: list[Endpoint] = []
        self._known = lru_cache(KEPT_PATHS)(self._find)
        for each in endpoints:
            below = each.path.removeprefix(f"{UNDER}/")
            if "{" not in each.path:
                self._exact[each.method, each.path] = each
            elif "{" not in below:
                self._below[each.method, below] = each
            else:
                self._others.append(each)

    def find(self, method: str, path: str) -> Found:
        """
        Args:
            path: as `routing_path` gives it.
        """
        return self._known(method, path) if len(path) <= KEPT_PATH else self._find(method, path)

    def _find(self, method: str, path: str) -> Found:
        if (exact := self._exact.get((method, path))) is not None:
            return exact, {}, exact.access, None
        parts = path.split("/", 4)
        has_url = len(parts) == 5 and parts[3] in _BELOW and parts[1] and parts[2]
        url: Named | None = None
        if has_url:
            url = parts[1], parts[2]
            if "%" in path:
                url = uid_of(parts[1]), uid_of(parts[2])
        if has_url and (below := self._below.get((method, parts[4]))) and parts[3] == "v1":
            params = {"trajectory_uid": parts[1], "prompt_uid": parts[2]}
            return below, params, below.access, url
        is_agents = url is not None or path.startswith(("/v1/", "/v1beta/", "/inference/"))
        for each in self._others:
            if (
                each.method == method
                and (each.access == "agent" or not is_agents)
                and (match := each.path_regex.fullmatch(path))
            ):
                return each, match.groupdict(), each.access, url
        if method == "HEAD":
            return self._find("GET", path)
        return None, {}, "agent" if is_agents else "admin", url


_BELOW = ("v1", "v1beta", "inference")
"""First segments of paths below a trajectory's URL."""

# -- the table -------------------------------------------------------------------------------


def _both(
    method: str, path: str, handler: Handler, body: Body = None, *, is_call: bool = False
) -> list[Endpoint]:
    """Below a trajectory's URL, and without one."""
    return [
        Endpoint(method, f"{base}/{path}", "agent", handler, body, is_call=is_call)
        for base in (UNDER, "/v1")
    ]


def _gemini(method: str, handler: Handler, *, is_call: bool) -> list[Endpoint]:
    path = f"models/{{model:path}}:{method}"
    return [
        Endpoint("POST", f"{base}/{path}", "agent", handler, GEMINI, is_call=is_call)
        for base in GEMINI_BASES
    ]


def _own(method: str, path: str, access: Access, handler: Handler, body: Body = None) -> Endpoint:
    """An endpoint of our own pages and of probes, which no agent needs to know."""
    return Endpoint(method, path, access, handler, body, is_described=False)


_SDK = "CreateParamsNonStreaming"
_CHAT = f"openai.types.chat.completion_create_params:Completion{_SDK}"
_COMPLETIONS = f"openai.types.completion_create_params:Completion{_SDK}"
_RESPONSES = f"openai.types.responses.response_create_params:Response{_SDK}"
_COMPACT = "openai.types.responses.response_compact_params:ResponseCompactParams"
_MESSAGES = f"anthropic.types.message_create_params:Message{_SDK}"
_COUNT = "anthropic.types.message_count_tokens_params:MessageCountTokensParams"
_GENERATE = "stepwell.gateway.routes:Generate"
_TOKENS_IN = "stepwell.gateway.dialects.token_generate:TokenParams"
_TOKENS = "inference/v1/generate"
_AT = (UNDER.removesuffix("/v1"), "")

ENDPOINTS: tuple[Endpoint, ...] = (
    # LLM calls, in the dialects of their SDKs.
    *_both("POST", "chat/completions", routes.chat_completions, _CHAT, is_call=True),
    *_both("POST", "completions", routes.completions, _COMPLETIONS, is_call=True),
    *_both("POST", "responses", routes.responses, _RESPONSES, is_call=True),
    *_both("POST", "responses/compact", routes.compact, _COMPACT, is_call=True),
    *_both("POST", "messages", routes.messages, _MESSAGES, is_call=True),
    *(
        Endpoint(
            "POST", f"{at}/{_TOKENS}", "agent", routes.token_generate, _TOKENS_IN, is_call=True
        )
        for at in _AT
    ),
    *_both("POST", "messages/count_tokens", routes.count_tokens, _COUNT),
    *_gemini("generateContent", routes.gemini, is_call=True),
    *_gemini("streamGenerateContent", routes.gemini, is_call=True),
    *_gemini("countTokens", routes.count_gemini_tokens, is_call=False),
    *_both("GET", "responses/{response_id}", routes.stored_response),
    *_both("DELETE", "responses/{response_id}", routes.delete_response),
    *(Endpoint("GET", f"{base}/models", "agent", routes.models) for base in GEMINI_BASES),
    *(
        Endpoint("GET", f"{base}/models/{{model:path}}", "agent", routes.model)
        for base in GEMINI_BASES
    ),
    # Trajectories and groups.
    Endpoint("POST", "/init_trajectory", "admin", life.init_trajectory, life.InitTrajectory),
    Endpoint("POST", "/v1/groups", "agent", life.declare_group, life.DeclareGroup),
    Endpoint(
        "POST",
        f"{UNDER}/register_trajectory",
        "agent",
        life.register_trajectory,
        life.RegisterTrajectory,
    ),
    Endpoint(
        "POST",
        f"{UNDER}/complete_trajectory",
        "agent",
        life.complete_trajectory,
        life.CompleteTrajectory,
        is_call=True,
    ),
    Endpoint(
        "POST", f"{UNDER}/abort_trajectory", "agent", life.abort_trajectory, life.AbortTrajectory
    ),
    Endpoint("POST", f"{UNDER}/feedback", "agent", life.feedback, life.Feedback),
    Endpoint(
        "POST", "/v1/complete_trajectory", "agent", life.complete_by_name, life.CompleteByName
    ),
    Endpoint("POST", "/v1/rewards", "agent", life.late_reward, life.Reward),
    Endpoint("POST", "/v1/feedback", "agent", life.feedback_by_name, life.FeedbackByName),
    Endpoint("DELETE", "/v1/trajectories/{trajectory_uid}", "agent", life.delete_trajectory),
    # White-box agents.
    Endpoint("POST", "/generate", "admin", routes.generate, _GENERATE),
    Endpoint("POST", "/submit_steps", "admin", routes.submit_steps, routes.SubmitSteps),
    Endpoint("POST", "/compute_reward", "admin", routes.reward, dict),
    # slime's Rollout Buffer.
    Endpoint("POST", "/start_rollout", "admin", slime.start_rollout, dict),
    Endpoint("POST", "/buffer/write", "admin", slime.write, dict),
    Endpoint("POST", "/get_rollout_data", "admin", slime.get_rollout_data, slime.GetRolloutData),
    Endpoint("POST", "/ack_rollout_data", "admin", slime.ack_rollout_data, slime.AckRolloutData),
    # Health.
    Endpoint("GET", "/health", "open", routes.health),
    Endpoint("GET", "/ready", "agent", routes.ready),
    Endpoint("GET", "/statistics", "admin", routes.statistics),
    Endpoint("GET", "/metrics", "admin", routes.metrics),
    _own("GET", "/openapi.json", "admin", routes.openapi),
    # The dashboard. Its pages tell nothing of anybody; what they ask for does.
    _own("GET", "/ui", "open", ui.page),
    _own("GET", "/ui/", "open", ui.page),
    _own("POST", "/ui/api/login", "open", ui.login, ui.Login),
    _own("POST", "/ui/api/logout", "open", ui.logout),
    _own("GET", "/ui/api/live", "dashboard", ui.live),
    _own("GET", "/ui/api/export", "dashboard", ui.export),
    _own("POST", "/ui/api/delete", "dashboard", ui.delete, ui.Delete),
    *(_own("GET", f"/ui/api/{each}", "dashboard", ask) for each, ask in ui.QUESTIONS.items()),
    *(_own("POST", f"/ui/api/{each}", "dashboard", *act) for each, act in ui.ACTIONS.items()),
    _own("GET", "/ui/api/{question:path}", "dashboard", ui.page),
    _own("GET", "/ui/{file:path}", "open", ui.page),
    # Some clients look whether the base URL can be reached before they send their key. `/` says
    # what `/health` says, and leads browsers to the dashboard.
    _own("GET", "/", "open", routes.root),
    _own("GET", "/{trajectory_uid}/{prompt_uid}", "admin", routes.base_url_probe),
    _own("HEAD", "/{trajectory_uid}/{prompt_uid}", "open", routes.base_url_probe),
)
SDK_BODIES = {each.path_format: each.body for each in ENDPOINTS if isinstance(each.body, str)}
"""By path: the types that describe bodies which dialects read."""
