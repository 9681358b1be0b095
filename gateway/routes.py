"""The gateway's routes: trajectories, the dialects under their URL, white-box, health.

The hot path (`/v1/chat/completions`) takes the bare request and answers bytes; only the small
lifecycle bodies go through pydantic.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import fields, replace
from typing import Annotated, Any, TypeAlias
from urllib.parse import unquote

import numpy as np
from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from stepwell.datapool.errors import (
    ChannelShutDownError,
    GroupClosedError,
    GroupConflictError,
    StepConflictError,
    StepIndexError,
    UnknownTrajectoryError,
)
from stepwell.datapool.errors import TrajectoryClosedError as PoolTrajectoryClosedError
from stepwell.datapool.errors import TrajectoryConflictError as PoolTrajectoryConflictError
from stepwell.datapool.ops import SubmitOutcome, TrajectoryOutcome
from stepwell.datapool.types import MAX_REWARD, Step, VersionSpan
from stepwell.gateway.config import MOST_OF_A_GROUP
from stepwell.gateway.dialects import openai_chat
from stepwell.gateway.dialects.anthropic_messages import AnthropicMessages, CountParams
from stepwell.gateway.dialects.openai_responses import OpenAIResponses
from stepwell.gateway.dialects.registry import PATHS, error_response
from stepwell.gateway.errors import (
    GatewayError,
    PermissionDeniedError,
    RequestError,
    TrajectoryClosedError,
    TrajectoryConflictError,
    UnknownItemError,
)
from stepwell.gateway.keys import Principal
from stepwell.gateway.paths import Uid, quoted, uid_of
from stepwell.gateway.prompt import ChatRequest
from stepwell.gateway.rewards import compute_reward
from stepwell.gateway.serve import refuse_builtin_tools, say_origin, serve
from stepwell.gateway.services import Services, services_of
from stepwell.gateway.trajectory.recording import ask
from stepwell.gateway.web import (
    OrjsonResponse,
    aborts_on_disconnect,
    field,
    parse_object,
    read_body,
    retry_key,
)

router = APIRouter()

_STEP_FIELDS = frozenset(f.name for f in fields(Step))
_UNDER = "/{trajectory_uid}/{prompt_uid}/v1"


Tag: TypeAlias = Annotated[str, Field(min_length=1)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class InitTrajectory(Body):
    prompt_uid: str | None = Field(default=None, min_length=1)
    """Group of the rollout; null: a group of its own."""
    trajectory_uid: str | None = Field(default=None, min_length=1)
    """null: made here. Given, a repeated request is the same trajectory."""
    channel: str | None = Field(default=None, min_length=1)
    metadata: dict[str, Any] = {}
    tags: list[Tag] = []
    """By which it can be deleted (`DataPoolClient.delete`, `stepwell data delete`) and selected."""
    attempt: int = Field(default=0, ge=0, lt=2**31, strict=True)


class DeclareGroup(Body):
    n: int = Field(ge=1, le=MOST_OF_A_GROUP, strict=True)
    """Trajectories, which are opened and handed out."""
    prompt_uid: str | None = Field(default=None, min_length=1)
    """null: made here. Given, a repeated request is the same group."""
    channel: str | None = Field(default=None, min_length=1)
    metadata: dict[str, Any] = {}
    tags: list[Tag] = []
    """As of a trajectory, for the group."""
    deadline_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """After which it is served with what is complete; null: as the pool's channel says."""


class RegisterTrajectory(Body):
    channel: str | None = Field(default=None, min_length=1)
    metadata: dict[str, Any] = {}


class CompleteTrajectory(Body):
    reward: float | None = Field(default=None, allow_inf_nan=False)
    metadata: dict[str, Any] = {}


class CompleteByName(CompleteTrajectory):
    trajectory_uid: str = Field(min_length=1)
    """As a reply's header `x-stepwell-trajectory` says it."""


class Reward(Body):
    trajectory_uid: str = Field(min_length=1)
    """As a reply's header `x-stepwell-trajectory` says it."""
    reward: float = Field(allow_inf_nan=False, ge=-MAX_REWARD, le=MAX_REWARD)


class AbortTrajectory(Body):
    reason: str = Field(min_length=1)
    will_retry: bool = False


def _principal(request: Request) -> Principal:
    principal: Principal = request.state.principal
    return principal


def _uid(request: Request) -> str | None:
    """Of the trajectory in the request's URL, if that names one."""
    segment: str | None = request.path_params.get("trajectory_uid")
    return None if segment is None else uid_of(segment)


# -- trajectories ----------------------------------------------------------------------------


@router.post("/init_trajectory")
async def init_trajectory(request: Request, body: InitTrajectory | None = None) -> Response:
    services = services_of(request)
    body = body or InitTrajectory()
    uid = body.trajectory_uid or uuid.uuid4().hex
    prompt_uid = body.prompt_uid or f"prompt-{uid}"
    _check_names(trajectory_uid=uid, prompt_uid=prompt_uid)
    opening = {"channel": body.channel, "attempt": body.attempt, "metadata": body.metadata}
    replica = await services.addresses.place(body.trajectory_uid)
    address = await _hand_out(request, replica, uid, prompt_uid, body.tags, **opening)
    return OrjsonResponse({**address, "prompt_uid": prompt_uid})


@router.post("/v1/groups")
async def declare_group(request: Request, body: DeclareGroup) -> Response:
    """Declare a group and open its trajectories."""
    services, principal = services_of(request), _principal(request)
    if principal.is_bound:
        raise PermissionDeniedError(
            "this API key is for one trajectory; declare groups with an agent or admin key"
        )
    principal.check_channel(body.channel)
    prompt_uid = body.prompt_uid or f"group-{uuid.uuid4().hex}"
    _check_names(prompt_uid=prompt_uid)
    channel = body.channel or services.groups.channel(prompt_uid, principal.channel)
    room_s = services.config.queue_timeout_s
    try:
        await ask(
            services.pool.open_group(
                prompt_uid,
                body.n,
                body.deadline_s,
                metadata=body.metadata,
                channel=channel,
                timeout_s=room_s,
            ),
            services.config.pool_timeout_s + room_s,
        )
        if body.tags:
            mark = services.pool.mark(prompt_uid, channel=channel, tags=body.tags)
            await ask(mark, services.config.pool_timeout_s)
    except GroupClosedError as e:
        raise TrajectoryClosedError(str(e)) from e
    except (GroupConflictError, ChannelShutDownError) as e:
        raise TrajectoryConflictError(str(e)) from e
    uids = [f"{prompt_uid}-{i}" for i in range(body.n)]
    replicas = [await services.addresses.place(uid) for uid in uids]
    addresses = await asyncio.gather(
        *(
            _hand_out(request, replica, uid, prompt_uid, (), channel=channel, metadata={})
            for replica, uid in zip(replicas, uids, strict=True)
        )
    )
    return OrjsonResponse({"prompt_uid": prompt_uid, "trajectories": addresses})


def _check_names(**names: str) -> None:
    for name, value in names.items():
        if value in (".", ".."):
            raise RequestError(
                f"{name} is {value!r}; it is part of a URL, so use no bare dots", name
            )


async def _hand_out(
    request: Request,
    replica: int | None,
    uid: str,
    prompt_uid: str,
    tags: Sequence[str],
    **opening: Any,
) -> dict[str, str]:
    """Open a trajectory and tag it; what its agent needs to know.

    Args:
        replica: that is to serve it; None: there is only this one.
    """
    services = services_of(request)
    addresses, trajectories = services.addresses, services.trajectories
    if replica is not None and trajectories.known(uid) is not None:
        replica = addresses.index
    if replica in (None, addresses.index):
        trajectory = trajectories.get(uid, prompt_uid)
    else:
        trajectory = trajectories.elsewhere(uid, prompt_uid)
    await trajectory.open(**opening)
    if tags and trajectory.unrecorded is None:
        mark = services.pool.mark(trajectory_uid=uid, channel=trajectory.channel, tags=list(tags))
        await ask(mark, services.config.pool_timeout_s)
    if replica is None:
        origin = services.config.public_url or services.hosts.origin(request.scope)
    else:
        origin = addresses.origin(replica)
    return {
        "trajectory_uid": uid,
        "base_url": f"{origin.rstrip('/')}/{quoted(uid)}/{quoted(prompt_uid)}",
        "api_key": services.keys.issue(uid, prompt_uid),
    }


@router.post(f"{_UNDER}/register_trajectory")
async def register_trajectory(
    request: Request,
    trajectory_uid: Uid,
    prompt_uid: Uid,
    body: RegisterTrajectory | None = None,
) -> Response:
    body = body or RegisterTrajectory()
    principal = _principal(request)
    principal.check_channel(body.channel)
    trajectories = services_of(request).trajectories
    trajectory = trajectories.get(trajectory_uid, prompt_uid, principal.channel)
    await trajectory.open(channel=body.channel, metadata=body.metadata)
    return OrjsonResponse(
        {
            "trajectory_uid": trajectory_uid,
            "prompt_uid": prompt_uid,
            "channel": trajectory.channel,
        }
    )


@router.post(f"{_UNDER}/complete_trajectory")
async def complete_trajectory(
    request: Request,
    trajectory_uid: Uid,
    prompt_uid: Uid,
    body: CompleteTrajectory | None = None,
) -> Response:
    services = services_of(request)
    return await complete(services, trajectory_uid, prompt_uid, body or CompleteTrajectory())


async def complete(
    services: Services, trajectory_uid: str, prompt_uid: str, body: CompleteTrajectory
) -> Response:
    trajectory = services.trajectories.find(trajectory_uid, prompt_uid)
    outcome = await trajectory.complete(body.reward, body.metadata)
    return OrjsonResponse({"trajectory_uid": trajectory_uid, "outcome": outcome})


@router.post("/v1/complete_trajectory")
async def complete_by_name(request: Request, body: CompleteByName) -> Response:
    """For agents that know a trajectory by the header of a reply."""
    outcomes, channel = services_of(request).outcomes, _principal(request).channel
    return await _by_name(
        request,
        body.trajectory_uid,
        lambda uid: outcomes.complete(uid, body.reward, body.metadata, channel),
    )


@router.post("/v1/rewards")
async def late_reward(request: Request, body: Reward) -> Response:
    """The reward of a trajectory, open or complete, until its group is leased."""
    outcomes, channel = services_of(request).outcomes, _principal(request).channel
    return await _by_name(
        request, body.trajectory_uid, lambda uid: outcomes.score(uid, body.reward, channel)
    )


async def _by_name(
    request: Request, name: str, do: Callable[[str], Awaitable[TrajectoryOutcome | SubmitOutcome]]
) -> Response:
    """Do it to the trajectory of this name, which may be percent-encoded as headers are."""
    principal = _principal(request)
    uids = tuple(dict.fromkeys((name, unquote(name))))
    if principal.is_bound and principal.trajectory is not None:
        uids = tuple(uid for uid in uids if uid == principal.trajectory[0])
        if not uids:
            principal.check_trajectory(name)
    for uid in uids:
        try:
            outcome = await do(uid)
        except UnknownTrajectoryError:
            continue
        except (PoolTrajectoryClosedError, PoolTrajectoryConflictError) as e:
            raise TrajectoryConflictError(str(e)) from e
        return OrjsonResponse({"trajectory_uid": uid, "outcome": outcome})
    raise UnknownItemError(
        f"trajectory_uid is {name!r:.200}, which no channel knows; send what a reply's header "
        "x-stepwell-trajectory says",
        "trajectory_uid",
    )


@router.post(f"{_UNDER}/abort_trajectory")
async def abort_trajectory(
    request: Request, trajectory_uid: Uid, prompt_uid: Uid, body: AbortTrajectory
) -> Response:
    trajectory = services_of(request).trajectories.find(trajectory_uid, prompt_uid)
    outcome = await trajectory.abort(body.reason, will_retry=body.will_retry)
    return OrjsonResponse({"trajectory_uid": trajectory_uid, "outcome": outcome})


@router.delete("/v1/trajectories/{trajectory_uid}")
async def delete_trajectory(request: Request, trajectory_uid: Uid) -> Response:
    """Forget what this gateway has of it, and delete it from the pool with its group."""
    services = services_of(request)
    principal = request.state.principal
    named = principal.trajectory
    if named[0] != trajectory_uid if named is not None else principal.access != "admin":
        raise PermissionDeniedError(
            "this API key does not delete this trajectory; use an admin key "
            "(gateway.admin_keys), or the trajectory's own"
        )
    if (trajectory := services.trajectories.known(trajectory_uid)) is not None:
        trajectory.forget()
    services.responses.store.forget(trajectory_uid)
    services.calls.prompts.renderer.forget()
    deleted = await ask(services.pool.delete(trajectory_uid), services.config.pool_timeout_s)
    return OrjsonResponse({"deleted": deleted.trajectories, "leased": deleted.leased})


# -- LLM calls -------------------------------------------------------------------------------


def _speak(path: str) -> None:
    """Serve a dialect below trajectory URLs and without one."""

    @router.post(f"{_UNDER}/{path}", name=path)
    async def call(request: Request, trajectory_uid: Uid, prompt_uid: Uid) -> Response:
        services = services_of(request)
        url = trajectory_uid, prompt_uid
        return await serve(services, services.dialects[path], request, url)

    @router.post(f"/v1/{path}", name=f"{path} without a trajectory")
    async def call_without(request: Request) -> Response:
        services = services_of(request)
        return await serve(services, services.dialects[path], request)


for _path in PATHS:
    _speak(_path)


@router.post("/v1/messages/count_tokens")
@router.post(f"{_UNDER}/messages/count_tokens")
async def count_tokens(request: Request) -> Response:
    """Tokens of the prompt that this request would have as a call; nothing is stored or opened."""
    services = services_of(request)
    body = parse_object(await read_body(request))
    parsed = AnthropicMessages().parse(body, CountParams)
    refuse_builtin_tools(services, parsed)
    call = services.calls.prompts.normalised(parsed.call)
    uid = _uid(request)
    if uid is None:
        channel = _principal(request).channel
        trajectory = services.identities.known(request.headers, call, channel)
    else:
        trajectory = services.trajectories.known(uid)
    n = await services.calls.prompts.count_tokens(trajectory.graph if trajectory else None, call)
    return OrjsonResponse({"input_tokens": n})


@router.get("/v1/responses/{response_id}")
async def stored_response(request: Request, response_id: str) -> Response:
    if request.query_params.get("stream") == "true":
        raise RequestError("stream is true; a stored response comes whole, leave it out", "stream")
    _, stored = _stored(request, response_id)
    return OrjsonResponse(stored)


@router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: str) -> Response:
    responses, _ = _stored(request, response_id)
    responses.store.delete(response_id)
    return OrjsonResponse({"id": response_id, "object": "response", "deleted": True})


@router.get(f"{_UNDER}/responses/{{response_id}}")
async def trajectory_stored_response(
    request: Request, trajectory_uid: Uid, prompt_uid: Uid, response_id: str
) -> Response:
    return await stored_response(request, response_id)


@router.delete(f"{_UNDER}/responses/{{response_id}}")
async def trajectory_delete_response(
    request: Request, trajectory_uid: Uid, prompt_uid: Uid, response_id: str
) -> Response:
    return await delete_response(request, response_id)


def _stored(request: Request, response_id: str) -> tuple[OpenAIResponses, dict[str, Any]]:
    """A remembered answer; below a trajectory's URL, or with its key, one of its own."""
    responses = services_of(request).responses
    uid = _uid(request)
    if uid is None and (named := _principal(request).trajectory) is not None:
        uid = named[0]
    return responses, responses.stored(response_id, uid)


@router.get(f"{_UNDER}/models")
async def trajectory_models(request: Request, trajectory_uid: Uid, prompt_uid: Uid) -> Response:
    return await models(request)


@router.get("/v1/models")
async def models(request: Request) -> Response:
    services = services_of(request)
    model = {
        "id": services.config.served_model_name,
        "object": "model",
        "created": 0,
        "owned_by": "stepwell",
        "max_model_len": await services.engine.context_length(),
    }
    return OrjsonResponse({"object": "list", "data": [model]})


# -- white-box -------------------------------------------------------------------------------


@router.post("/generate")
async def generate(request: Request) -> Response:
    """Sample without storing a Step; the agent sends its own to `/submit_steps`."""
    services = services_of(request)
    raw = await read_body(request)
    body = parse_object(raw)
    uid = field(body, "trajectory_uid", str, "a string") or uuid.uuid4().hex
    prompt_uid = field(body, "prompt_uid", str, "a string") or f"prompt-{uid}"
    chat = _white_box(body)
    trajectory = services.trajectories.get(uid, prompt_uid)
    retry = retry_key(request.headers, raw, "generate")
    (listener,) = await services.calls.start(
        trajectory, services.calls.prompts.normalised(chat), retry, "generate"
    )
    try:
        with aborts_on_disconnect(request.scope, request.receive, listener):
            reply = await listener.result()
    finally:
        listener.close()
    generation = reply.generation
    answer = OrjsonResponse(
        {
            "trajectory_uid": uid,
            "prompt_uid": prompt_uid,
            "response_text": services.tokenizer.decode(generation.response_ids.tolist()),
            "message": reply.text.message(),
            "response_ids": generation.response_ids.tolist(),
            "prompt_ids": reply.prompt.ids.tolist(),
            "rollout_log_probs": generation.log_probs.tolist(),
            "policy_version": generation.policy_version,
            "version_spans": [
                {"version": s.version, "start": s.start, "end": s.end} for s in generation.spans
            ],
            "finish_reason": generation.finish_reason,
            "sampling_params": {
                "temperature": reply.sampling.temperature,
                "top_p": reply.sampling.top_p,
                "top_k": reply.sampling.top_k,
            },
        }
    )
    say_origin(answer, services, trajectory, listener.call.version)
    return answer


def _white_box(body: dict[str, Any]) -> ChatRequest:
    ids = body.pop("prompt_ids", None)
    other_ids = body.pop("input_ids", None)
    ids = other_ids if ids is None else ids
    asked = {k: v for k, v in body.items() if k not in ("trajectory_uid", "prompt_uid")}
    if ids is None:
        parsed = openai_chat.OpenAIChat().parse(asked)
    else:
        if "messages" in asked:
            raise RequestError("messages and prompt_ids exclude each other; send one", "messages")
        # The messages stand in for what the parser requires; the prompt is the ids.
        asked["messages"] = [{"role": "user", "content": ""}]
        parsed = openai_chat.OpenAIChat().parse(asked)
    chat, options = parsed.call, parsed.options
    if options.stream:
        raise RequestError("/generate does not stream; leave stream out", "stream")
    if options.n > 1:
        raise RequestError(f"n is {options.n}; /generate samples once, leave it out", "n")
    prompt_ids = None
    if ids is not None:
        if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
            raise RequestError(f"prompt_ids is {ids!r:.80}; send a list of token ids", "prompt_ids")
        if min(ids) < 0 or max(ids) >= 2**31:
            raise RequestError("prompt_ids holds ids outside [0, 2**31)", "prompt_ids")
        prompt_ids = np.asarray(ids, np.int32)
        prompt_ids.flags.writeable = False
        if chat.forced_tool is not None:
            raise RequestError("tool_choice prescribes a call; send messages", "tool_choice")
    messages = chat.messages if prompt_ids is None else []
    return replace(chat, messages=messages, prompt_ids=prompt_ids, stores_step=False)


@router.post("/submit_steps")
async def submit_steps(request: Request) -> Response:
    """Store a white-box agent's Steps; counts what became of them."""
    services = services_of(request)
    body = parse_object(await read_body(request))
    raw = field(body, "steps", list, "a list of steps")
    if not raw:
        raise RequestError("steps is empty; send at least one step", "steps")
    channel = field(body, "channel", str, "a channel's name") or services.config.channel
    steps = [_step(s, f"steps[{i}]") for i, s in enumerate(raw)]
    room_s = services.config.queue_timeout_s
    try:
        outcomes = await ask(
            services.pool.submit_steps(steps, channel=channel, timeout_s=room_s),
            services.config.pool_timeout_s + room_s,
        )
    except (StepConflictError, StepIndexError, PoolTrajectoryConflictError) as e:
        raise TrajectoryConflictError(str(e)) from e
    for step in steps:
        services.trajectories.note_step(step.trajectory_uid, step.step_index)
    counts = Counter(outcomes)
    return OrjsonResponse({o: counts[o] for o in ("accepted", "duplicate", "late")})


def _step(raw: Any, where: str) -> Step:
    if not isinstance(raw, dict):
        raise RequestError(f"{where} is {raw!r:.80}; send an object", where)
    unknown = raw.keys() - _STEP_FIELDS
    if unknown:
        name = min(unknown)
        raise RequestError(f"{where}.{name} is no field of a Step", f"{where}.{name}")
    values = dict(raw)
    try:
        values["version_spans"] = tuple(VersionSpan(**s) for s in raw.get("version_spans") or ())
        if raw.get("routed_experts") is not None:
            values["routed_experts"] = np.asarray(raw["routed_experts"])
        return Step(**values)
    except (TypeError, ValueError) as e:
        raise RequestError(f"{where}: {e}", where) from e


@router.post("/compute_reward")
async def reward(request: Request) -> Response:
    services = services_of(request)
    body = parse_object(await read_body(request))
    if services.reward is None:
        raise RequestError(
            "gateway.reward_fn is null; set it to the dotted path of a reward function", None
        )
    return OrjsonResponse(await compute_reward(services.reward, body))


# -- health ----------------------------------------------------------------------------------


@router.get("/health")
async def health(request: Request) -> Response:
    """The process is alive. `undisturbed_s`: how long it has served without losing engine or
    pool."""
    undisturbed_s = round(services_of(request).undisturbed_s, 3)
    return OrjsonResponse({"status": "ok", "undisturbed_s": undisturbed_s})


@router.get("/ready")
async def ready(request: Request) -> Response:
    """The tokenizer is loaded and an engine is healthy."""
    services = services_of(request)
    try:
        await services.engine.ready()
        context = await services.engine.context_length()
    except GatewayError as e:
        return error_response(request.url.path, e)
    state: dict[str, Any] = {"status": "ready", "context_length": context}
    if len(services.addresses.urls) > 1:
        state["replica"] = services.addresses.index
    return OrjsonResponse(state)


@router.get("/statistics")
async def statistics(request: Request) -> Response:
    return OrjsonResponse(services_of(request).statistics())


@router.head("/", include_in_schema=False)
@router.get("/", include_in_schema=False)
@router.head("/{trajectory_uid}/{prompt_uid}", include_in_schema=False)
@router.get("/{trajectory_uid}/{prompt_uid}", include_in_schema=False)
async def base_url_probe(request: Request) -> Response:
    """Some agents look whether their base URL answers before they call it. Opens nothing."""
    if request.path_params.get("trajectory_uid") == "v1":
        raise HTTPException(404, "Not Found")
    return await health(request)
