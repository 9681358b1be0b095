"""The gateway's handlers of calls: the dialects and white-box agents; and of health.

A dialect's call, from bytes to answer (`serve`)::

    read ──► parse ──► identify ──► start the calls ──► JSON, or events as they come
               │ dialect   │ trajectory/identity.py   │ call.py      │ dialect

What is spoken below a trajectory's URL is spoken without one, too. Does not own: trajectories and
groups (`lifecycle.py`), wire formats (`dialects/`), paths and who may call (`endpoints.py`).
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from typing import Annotated, Any

import msgspec
import orjson
from pydantic import ConfigDict, Field, WithJsonSchema
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from stepwell.datapool.errors import InvalidStepError
from stepwell.datapool.types import Step
from stepwell.gateway import known_bodies
from stepwell.gateway.access import Principal, caller_of, named, quoted, take_body, uid_of
from stepwell.gateway.bodies import BIG
from stepwell.gateway.dialects.anthropic_messages import AnthropicMessages, CountParams
from stepwell.gateway.dialects.base import (
    NOTHING,
    Dialect,
    Exchange,
    Known,
    Parsed,
    StreamWriter,
)
from stepwell.gateway.dialects.gemini import prompt_tokens
from stepwell.gateway.dialects.openai_chat import OpenAIChat
from stepwell.gateway.dialects.openai_completions import token_ids
from stepwell.gateway.dialects.params import Params, kind, wrong
from stepwell.gateway.dialects.token_generate import TokenGenerate
from stepwell.gateway.errors import (
    UNAVAILABLE,
    PictureFoundError,
    RequestError,
    UnknownItemError,
)
from stepwell.gateway.http_protocol import DirectCall
from stepwell.gateway.lifecycle import RECORDED_HEADER
from stepwell.gateway.metrics import exposition
from stepwell.gateway.openapi import STEP, TOKEN_IDS
from stepwell.gateway.pictures import RequestPictures
from stepwell.gateway.prompt import ChatRequest
from stepwell.gateway.services import Services, services_of
from stepwell.gateway.tokens.graph import TurnGraph
from stepwell.gateway.tokens.messages import KnownMessages, dumps
from stepwell.gateway.trajectory.calls import LiveCall
from stepwell.gateway.trajectory.identity import Origin
from stepwell.gateway.trajectory.trajectory import LiveTrajectory
from stepwell.gateway.web import (
    JSON_HEADERS,
    OrjsonResponse,
    RequestHeaders,
    body_digest,
    connection_of,
    parse_object,
    retry_key,
)

IGNORED_HEADER = "x-stepwell-ignored"
TRAJECTORY_HEADER = "x-stepwell-trajectory"
VERSION_HEADER = "x-stepwell-version"
ANSWER_HEADERS = (IGNORED_HEADER, RECORDED_HEADER, TRAJECTORY_HEADER, VERSION_HEADER)
"""Headers of our own that answers carry; pages of other sites may read them, too."""
MAX_TOLD = 32
SCRAPE_S = 5.0
"""The pool's time to answer a scrape, which Prometheus gives ten seconds by default."""
_TOKENS = TokenGenerate()
_STEP_FIELDS = frozenset(f.name for f in fields(Step)) - {"pictures"}  # takes no digest


# -- a dialect's calls -----------------------------------------------------------------------


def chat_completions(services: Services, call: DirectCall) -> Awaitable[None]:
    """A call of OpenAI's Chat Completions API."""
    return serve(services, services.dialects["chat/completions"], call)


def completions(services: Services, call: DirectCall) -> Awaitable[None]:
    """A call of OpenAI's Completions API."""
    return serve(services, services.dialects["completions"], call)


def responses(services: Services, call: DirectCall) -> Awaitable[None]:
    """A call of OpenAI's Responses API."""
    return serve(services, services.dialects["responses"], call)


def compact(services: Services, call: DirectCall) -> Awaitable[None]:
    """A compaction of OpenAI's Responses API."""
    return serve(services, services.dialects["responses/compact"], call)


def messages(services: Services, call: DirectCall) -> Awaitable[None]:
    """A call of Anthropic's Messages API."""
    return serve(services, services.dialects["messages"], call)


def token_generate(services: Services, call: DirectCall) -> Awaitable[None]:
    """A call of vLLM's `/inference/v1/generate`: token ids in, token ids and log-probs out."""
    return serve(services, _TOKENS, call)


def gemini(services: Services, call: DirectCall) -> Awaitable[None]:
    """A call of Gemini's API, whatever model it names. `alt=sse`: the stream comes as server-sent
    events, otherwise as a JSON array that grows."""
    method = call.target.path.rpartition(":")[2]
    alt = QueryParams(call.target.query).get("alt", "json")
    if alt not in ("json", "sse"):
        raise wrong("alt", alt, "send sse, or leave it out")
    form = "?alt=sse" if alt == "sse" and method == "streamGenerateContent" else ""
    return serve(services, services.gemini[method + form], call)


async def serve(services: Services, dialect: Dialect, request: DirectCall) -> None:
    """Answer one LLM call.

    Raises:
        GatewayError: answered by the application in the dialect's shape.
    """
    connection = request.connection
    body, request.content = request.content, b""
    began_at = time.perf_counter()
    principal, url, path = request.caller, request.url, request.target.path
    headers = request.headers
    parsed: Parsed | None = None
    is_big = len(body) > BIG
    if is_big and services.pictures is not None:
        parsed, is_big = await _without_pictures(services, dialect, request, body)
    else:
        try:
            if not known_bodies.is_worth_comparing(body):
                parsed = dialect.parse_plain(body)
            elif is_big or dialect.list_name is None:
                await services.access.check_holdings(path, body)
            else:
                known, asked = services.known_bodies, (dialect, body, path, principal, url)
                if (parsed := known.read(*asked)) is None:
                    await services.access.check_holdings(path, body)
                    parsed = known.read_new(*asked)
            if parsed is None:
                parsed = dialect.parse(parse_object(body), principal)
            if not parsed.digest:
                if is_big:
                    loop = asyncio.get_running_loop()
                    parsed.digest = await loop.run_in_executor(services.threads, body_digest, body)
                else:
                    parsed.digest = body_digest(body)
        except PictureFoundError:
            if services.pictures is None:
                raise
            parsed, is_big = await _without_pictures(services, dialect, request, body)
    del body  # as large as all that is parsed of it, and the call may take minutes
    retry = retry_key(headers, parsed.digest, dialect.name)
    if is_big:
        await asyncio.sleep(0)  # others go on between what is done for it
    prompts, identities = services.calls.prompts, services.identities
    asker = Origin(headers, url, request.client, principal, retry, parsed.trajectory_uid, parsed.n)
    calls: list[ChatRequest] = []
    for call in (parsed.call, *parsed.more):
        call = prompts.normalised(call)
        call.began_at = began_at
        if is_big:
            prompts.refuse_too_long(call, await services.engine.context_length())
            call.is_big = True
            await asyncio.sleep(0)
        calls.append(call)
    trajectories: list[LiveTrajectory] = []
    for i, call in enumerate(calls):
        trajectories.append(identities.identify(asker, call, i))
    if parsed.remember is not None:
        if trajectories[0].unrecorded != "asked":
            parsed.remember(calls[0])
        parsed.remember = None
    begun = await services.calls.start(
        calls,
        trajectories,
        retry,
        dialect.name,
        n=parsed.n,
        caller=principal,
        begin_again=partial(identities.begin_again, asker),
    )
    exchange = _exchange(services, parsed, trajectories, begun)
    connection.listeners.add(exchange)  # a client that goes away reads no more
    if connection.is_lost:
        exchange.close()
    try:
        if parsed.call.stream:
            begin = partial(_begin_stream, services, dialect, request, exchange)
            request.end_stream(await exchange.write(begin, connection))
        else:
            replies = await exchange.results()
            if (turn := services.engine.pace.turn()) is not None:
                await turn  # the pool answers for many at once
            body = orjson.dumps(dialect.answer(exchange, replies))
            if request.flow.write_paused:
                await connection.drain()
            request.answer(body, {**JSON_HEADERS, **origin(services, exchange)})
            exchange.delivered()
    finally:
        connection.listeners.discard(exchange)
        exchange.close()
    if parsed.call.sources is not None:  # the connection may be idle for minutes
        parsed.call.sources = calls[0].sources = None
    connection.handed = exchange
    if connection.is_lost:
        exchange.lose()


def _begin_stream(
    services: Services, dialect: Dialect, request: DirectCall, exchange: Exchange
) -> StreamWriter:
    request.begin_stream({**dialect.stream_headers, **origin(services, exchange)})
    return dialect.writer(exchange)


async def _without_pictures(
    services: Services, dialect: Dialect, request: DirectCall, body: bytes
) -> tuple[Parsed, bool]:
    """Parse a body whose pictures are taken out first; true: what is left of it is big.

    Raises:
        GatewayError: as `serve`.
    """

    def parse(text: bytes, pictures: RequestPictures) -> Parsed:
        parsed = None
        if known_bodies.LEAST_BYTES <= len(text) <= BIG:
            known = services.known_bodies
            asked = dialect, text, path, request.caller, request.url, pictures
            parsed = known.read(*asked) or known.read_new(*asked)
        return parsed or dialect.parse(parse_object(text), request.caller, Known(pictures=pictures))

    context = await services.engine.context_length()
    path = request.target.path
    text, parsed = await parse_text(services, body, request.caller, path, context, parse)
    if not parsed.digest:
        loop = asyncio.get_running_loop()
        parsed.digest = await loop.run_in_executor(services.threads, body_digest, text)
    return parsed, len(text) > BIG


async def parse_text(
    services: Services,
    body: bytes,
    caller: Principal,
    path: str,
    context: float,
    parse: Callable[[bytes, RequestPictures], Parsed],
) -> tuple[bytes, Parsed]:
    """Take the pictures out of a body and parse the text that is left, which is bounded as any
    other. What looks like a picture and stands where none can be is put back, and the rest read
    again.

    Args:
        context: as `PictureReader.take`.

    Raises:
        GatewayError
    """
    if services.pictures is None:
        raise RuntimeError("the served model takes no pictures")
    texts: set[str] = set()
    while True:
        text, pictures = await services.pictures.take(body, caller.owner, context, texts)
        await services.access.check_text(path, text)
        parsed = parse(text, pictures)
        found = pictures.named_in(_said(parsed.call)) if pictures.names else ()
        if not found:
            break
        texts.update(found)
    parsed.call.sources = pictures
    parsed.ignored += tuple(dict.fromkeys(pictures.ignored))
    return text, parsed


def _said(call: ChatRequest) -> str:
    """All text of a request that was read."""
    said = call.messages
    if isinstance(said, KnownMessages):
        said = [*said.begin, *said.new]
    shape = [call.tools, call.template_args, call.constraint, call.stop, call.prefill]
    return dumps([[*said], *shape]).decode()


def _exchange(
    services: Services,
    parsed: Parsed,
    trajectories: Sequence[LiveTrajectory],
    calls: Sequence[LiveCall],
) -> Exchange:
    return Exchange(
        services.calls,
        parsed,
        trajectories,
        calls,
        model=services.config.served_model_name,
        tokenizer=services.tokenizer,
        keepalive_s=services.tuning.keepalive_s,
    )


def origin(services: Services, exchange: Exchange) -> dict[str, str]:
    """Headers that say whose call it is, which policy version answers it, and what was left aside
    of the request. Of a stream that has no token yet, that is the newest version that an engine
    has. Several prompts may have trajectories of their own: they stand in the order of the prompts,
    with commas between them."""
    headers: dict[str, str] = {}
    version, is_recorded = exchange.outcome()
    version = services.engine.version if version is None else version
    if version is not None:
        headers[VERSION_HEADER] = str(version)
    uids = [each.uid for each in exchange.trajectories if not each.is_for_one_request]
    if len(uids) > 1 and len(set(uids)) > 1:
        headers[TRAJECTORY_HEADER] = ",".join(quoted(uid).replace(",", "%2C") for uid in uids)
    elif uids:
        headers[TRAJECTORY_HEADER] = quoted(uids[0])
    if exchange.parsed.call.stores_step and not is_recorded:
        headers[RECORDED_HEADER] = "false"
    if ignored := exchange.parsed.ignored:
        services.calls.counts["ignored_fields"] += len(ignored)
        shown, more = ignored[:MAX_TOLD], len(ignored) - MAX_TOLD
        headers[IGNORED_HEADER] = ", ".join(shown) + (f", {more} more" * (more > 0))
    return headers


# -- what belongs to them ---------------------------------------------------------------------


async def count_tokens(request: Request) -> Response:
    """Tokens of the prompt that this request would have as a call; nothing is stored or opened."""
    dialect, body = AnthropicMessages(), take_body(request)
    parsed = await _parsed(
        request,
        body,
        lambda sent, known: dialect.parse(sent, None, known, CountParams),
        is_counted=True,
    )
    return OrjsonResponse({"input_tokens": await _n_prompt(request, parsed)})


async def count_gemini_tokens(request: Request) -> Response:
    """Tokens of the prompt that this request would have as a call of Gemini's API."""
    dialect = services_of(request).gemini["generateContent"]
    parsed = await _parsed(request, take_body(request), dialect.parse_count, is_counted=True)
    n = await _n_prompt(request, parsed)
    details = prompt_tokens(n, sum(p.n_tokens for p in parsed.call.pictures))
    return OrjsonResponse({"totalTokens": n, "promptTokensDetails": details})


async def _parsed(
    request: Request,
    body: bytes,
    parse: Callable[[dict[str, Any], Known], Parsed],
    *,
    is_counted: bool = False,
) -> Parsed:
    """A body as it was parsed, the pictures taken out if it has some.

    Args:
        is_counted: its prompt is only counted, whatever its length.
    """
    services = services_of(request)
    try:
        return parse(parse_object(body), NOTHING)
    except PictureFoundError:
        if services.pictures is None:
            raise
    context = math.inf if is_counted else await services.engine.context_length()
    _, parsed = await parse_text(
        services,
        body,
        caller_of(request),
        request.scope["path"],
        context,
        lambda text, pictures: parse(parse_object(text), Known(pictures=pictures)),
    )
    return parsed


async def _n_prompt(request: Request, parsed: Parsed) -> int:
    services = services_of(request)
    call = services.calls.prompts.normalised(parsed.call)
    caller = caller_of(request)
    if (url := named(request)) is None:
        trajectory = services.identities.known(request.headers, call, caller)
    elif (trajectory := services.trajectories.known(url[0])) is not None:
        trajectory.check_owner(caller)
    graph = TurnGraph() if trajectory is None else trajectory.graph
    await services.calls.prompts.prepare(graph, call)
    parsed.call.pictures = call.pictures
    return len(call.ids)


async def stored_response(request: Request) -> Response:
    """A remembered answer; below a trajectory's URL, or with its key, one of its own."""
    if request.query_params.get("stream") == "true":
        raise RequestError("stream is true; a stored response comes whole, leave it out", "stream")
    return OrjsonResponse(_remembered(request))


async def delete_response(request: Request) -> Response:
    """Forget a remembered answer; below a trajectory's URL, or with its key, one of its own."""
    _remembered(request)
    response_id = request.path_params["response_id"]
    services_of(request).responses.store.pop(response_id, None)
    return OrjsonResponse({"id": response_id, "object": "response", "deleted": True})


def _remembered(request: Request) -> dict[str, Any]:
    reader = caller_of(request)
    if (url := named(request)) is not None:
        reader = reader._replace(trajectory=url)
    responses = services_of(request).responses
    response: dict[str, Any] = responses.stored(request.path_params["response_id"], reader).response
    return response


async def models(request: Request) -> Response:
    """The one model that is served, with its context length in tokens, as OpenAI, Anthropic and
    Google list models: their SDKs ask for them at the same path."""
    served = await _served(request)
    page = {"has_more": False, "first_id": served["id"], "last_id": served["id"]}
    return OrjsonResponse({"object": "list", "data": [served], **page, "models": [served]})


async def model(request: Request) -> Response:
    """The model that is served, by its name; calls may name any model, and are answered by it."""
    asked, served = uid_of(request.path_params["model"]), await _served(request)
    if asked != served["id"]:
        raise UnknownItemError(
            f"model is {asked!r:.200}; this gateway serves {served['id']!r}, "
            "which also answers calls that name another model",
            "model",
        )
    return OrjsonResponse(served)


async def _served(request: Request) -> dict[str, Any]:
    services = services_of(request)
    name, context = services.config.served_model_name, await services.engine.context_length()
    openai = {"object": "model", "created": 0, "owned_by": "stepwell", "max_model_len": context}
    anthropic = {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
    google = {
        "name": f"models/{name}",
        "version": str(services.engine.version or 0),
        "displayName": name,
        "inputTokenLimit": context,
        "outputTokenLimit": context,
        "supportedGenerationMethods": ["generateContent", "streamGenerateContent", "countTokens"],
    }
    return {"id": name, **openai, **anthropic, "max_input_tokens": context, **google}


# -- white-box -------------------------------------------------------------------------------


def _as(schema: dict[str, Any]) -> WithJsonSchema:
    """The description of a field that the dialect checks."""
    return WithJsonSchema(schema)


class Generate(Params):
    """Fields of `/generate`: those of a chat completion, and `prompt_ids` instead of `messages`."""

    model_config = ConfigDict(extra="allow")
    trajectory_uid: Annotated[str | None, kind(str, "a string")] = None
    prompt_uid: Annotated[str | None, kind(str, "a string")] = None
    messages: Annotated[Any, _as({"type": "array", "items": {"type": "object"}})] = None
    prompt_ids: Annotated[Any, _as(TOKEN_IDS)] = None
    input_ids: Annotated[Any, _as(TOKEN_IDS)] = None
    max_tokens: Annotated[Any, _as({"type": "integer", "minimum": 1})] = None
    temperature: Annotated[Any, _as({"type": "number", "minimum": 0, "maximum": 2})] = None
    stream: Annotated[Any, _as({"const": False})] = None


class SubmitSteps(Params):
    channel: Annotated[str | None, kind(str, "a channel's name")] = None
    steps: Annotated[
        list[Any], kind(list, "a list of steps"), WithJsonSchema({"type": "array", "items": STEP})
    ] = Field(default_factory=list)


async def generate(request: Request) -> Response:
    """Sample without storing a Step; the agent sends its own to `/submit_steps`."""
    services = services_of(request)
    raw = take_body(request)
    body = Generate.read(parse_object(raw))
    uid = body.trajectory_uid or uuid.uuid4().hex
    prompt_uid = body.prompt_uid or f"prompt-{uid}"
    parsed = await _parsed(request, raw, lambda sent, known: _white_box(Generate.read(sent), known))
    caller = caller_of(request)
    trajectory = services.trajectories.get(uid, prompt_uid, caller)
    headers = RequestHeaders(request.scope["headers"])
    retry = retry_key(headers, body_digest(raw), "generate")
    call = services.calls.prompts.normalised(parsed.call)
    begun = await services.calls.start([call], [trajectory], retry, "generate", caller=caller)
    exchange = _exchange(services, parsed, [trajectory], begun)
    connection = connection_of(request.scope)
    connection.listeners.add(exchange)
    if connection.is_lost:
        exchange.close()
    try:
        (reply,) = await exchange.results()
        exchange.delivered()
    finally:
        connection.listeners.discard(exchange)
        exchange.close()
    parsed.call.sources = call.sources = None  # the connection may be idle for minutes
    connection.handed = exchange
    if connection.is_lost:
        exchange.lose()
    generation, sampling = reply.generation, reply.request.sampling
    answer = OrjsonResponse(
        {
            "trajectory_uid": uid,
            "prompt_uid": prompt_uid,
            "response_text": services.tokenizer.decode(generation.response_ids.tolist()),
            "message": reply.text.message(),
            "response_ids": generation.response_ids.tolist(),
            "prompt_ids": reply.prompt_ids.tolist(),
            "rollout_log_probs": generation.log_probs.tolist(),
            "policy_version": generation.policy_version,
            "version_spans": [
                {"version": s.version, "start": s.start, "end": s.end} for s in generation.spans
            ],
            "finish_reason": generation.finish_reason,
            "sampling_params": {
                name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k")
            },
        }
    )
    answer.headers.update(origin(services, exchange))
    return answer


def _white_box(body: Generate, known: Known) -> Parsed:
    own = ("prompt_ids", "input_ids", "trajectory_uid", "prompt_uid")
    asked = {name: value for name, value in body if name not in own and value is not None}
    ids = body.input_ids if body.prompt_ids is None else body.prompt_ids
    if ids is not None:
        if "messages" in asked:
            raise RequestError("messages and prompt_ids exclude each other; send one", "messages")
        # The messages stand in for what the parser requires; the prompt is the ids.
        asked["messages"] = [{"role": "user", "content": ""}]
    parsed = OpenAIChat().parse(asked, None, known)
    if parsed.call.stream:
        raise RequestError("/generate does not stream; leave stream out", "stream")
    if parsed.n > 1:
        raise RequestError(f"n is {parsed.n}; /generate samples once, leave it out", "n")
    if ids is None:
        return msgspec.structs.replace(parsed, call=parsed.call.changed(stores_step=False))
    if parsed.call.forced_tool is not None:
        raise RequestError("tool_choice prescribes a call; send messages", "tool_choice")
    prompt_ids = token_ids("prompt_ids", ids)
    call = parsed.call.changed(messages=[], prompt_ids=prompt_ids, stores_step=False)
    return msgspec.structs.replace(parsed, call=call)


async def submit_steps(request: Request, body: SubmitSteps) -> Response:
    """Store a white-box agent's Steps; counts what became of them."""
    services = services_of(request)
    if not body.steps:
        raise RequestError("steps is empty; send at least one step", "steps")
    channel = body.channel or services.config.channel
    steps = [_step(s, f"steps[{i}]") for i, s in enumerate(body.steps)]
    for i, step in enumerate(steps):
        services.calls.prompts.refuse_other_ids(step.token_ids, f"steps[{i}]")
    pool_access = services.pool_access
    stored = services.pool.submit_steps(steps, channel=channel, timeout_s=pool_access.room_s)
    outcomes = await pool_access.ask(stored, room=True)
    for step in steps:
        services.trajectories.note_step(step.trajectory_uid, step.step_index)
    counts = Counter(outcomes)
    return OrjsonResponse({o: counts[o] for o in ("accepted", "duplicate", "late")})


def _step(raw: Any, where: str) -> Step:
    if not isinstance(raw, dict):
        raise wrong(where, raw, "send an object")
    if unknown := raw.keys() - _STEP_FIELDS:
        name = f"{where}.{min(unknown)}"
        raise RequestError(f"{name} is no field of a Step", name)
    try:
        return Step.from_dict(raw)
    except InvalidStepError as e:
        raise RequestError(f"{where}: {e}", where) from e


async def reward(request: Request, body: dict[str, Any]) -> Response:
    """Call `gateway.reward_fn` with the fields of the body as arguments, and return its answer."""
    scoring = services_of(request).scoring
    if scoring is None:
        raise RequestError(
            "gateway.reward_fn is null; set it to the dotted path of a reward function", None
        )
    return OrjsonResponse(await scoring.score(body))


# -- health ----------------------------------------------------------------------------------


async def health(request: Request) -> Response:
    """The process is alive. `undisturbed_s`: how long it has served without losing engine or
    pool."""
    undisturbed_s = round(services_of(request).undisturbed_s, 3)
    return OrjsonResponse({"status": "ok", "undisturbed_s": undisturbed_s})


async def ready(request: Request) -> Response:
    """The tokenizer is loaded and an engine is healthy."""
    services = services_of(request)
    await services.engine.ready()
    context = await services.engine.context_length()
    state: dict[str, Any] = {"status": "ready", "context_length": context}
    if len(services.replicas.urls) > 1:
        state["replica"] = services.replicas.index
    return OrjsonResponse(state)


async def statistics(request: Request) -> Response:
    """Counts of calls, trajectories, tokens and waits since the start."""
    services = services_of(request)
    await services.replicas.look()
    return OrjsonResponse(services.statistics())


async def metrics(request: Request) -> Response:
    """Counts of this gateway, its engines and the pool, for Prometheus."""
    services = services_of(request)
    pool: dict[str, Any] | None = None
    with suppress(*UNAVAILABLE):  # told as `stepwell_pool_up 0`
        asked = services.pool.get_statistics()
        pool = await services.pool_access.ask(asked, timeout_s=SCRAPE_S)
    await services.replicas.look()
    accept = request.headers.get("accept", "")
    page, content_type = exposition(accept, services.statistics(), pool)
    return Response(page, media_type=content_type)


async def openapi(request: Request) -> Response:
    """The description of all that is meant for agents."""
    return Response(await request.app.document(), media_type="application/json")


async def root(request: Request) -> Response:
    """A browser is led to the dashboard; anybody else is answered as by `/health`."""
    if "text/html" in request.headers.get("accept", ""):
        return RedirectResponse("/ui")
    return await health(request)


async def base_url_probe(request: Request) -> Response:
    """Some agents look whether their base URL answers before they call it. Opens nothing."""
    return await health(request)
