"""The contract of all dialects: fourteen behaviours that each of them has, in its own words.

What only one dialect has (items, blocks, parts, legacy log-probs) is in the file of that dialect.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import aiohttp
import pytest

from stepwell.gateway.config import ChannelSampling, Tuning
from tests.gateway.conftest import Sampled, World, eos_id

Body = dict[str, Any]

STOP = "\nObservation:"
LONG = "long " * 100
RETRY = {"x-stainless-retry-count": "1"}


class Dialect:
    """Words of a dialect for what all of them say. This one: chat completions."""

    name = "openai_chat"
    path = "chat/completions"
    finishes: ClassVar = {"stop": "stop", "length": "length", "cut": "stop"}
    refused: ClassVar = {"frequency_penalty": 0.5}
    """A field that nobody can honour."""
    closes = True
    """The end of a turn is no text of it: a conversation that is sent back has it all the same."""
    keep_alive = b": keep-alive\n\n"

    def body(
        self,
        *said: str,
        max_tokens: int = 500,
        stop: str | None = None,
        sampling: dict[str, float] | None = None,
    ) -> Body:
        """A request after `said`, in turns of user and model."""
        stops = {} if stop is None else {"stop": [stop]}
        messages = [
            {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)
        ]
        return {"messages": messages, "max_tokens": max_tokens, **stops, **(sampling or {})}

    def streamed(self, path: str, body: Body) -> tuple[str, Body]:
        return path, {**body, "stream": True}

    def text(self, answer: Any) -> str:
        return str(answer["choices"][0]["message"]["content"])

    def finish(self, answer: Any) -> str:
        return str(answer["choices"][0]["finish_reason"])

    def delta(self, event: Any) -> str:
        """Text of an event of a stream."""
        choices = event.get("choices") or [{}]
        return choices[0].get("delta", {}).get("content") or ""

    def finish_of(self, events: Sequence[Any]) -> str:
        return next(f for e in events if (f := e["choices"][0]["finish_reason"]))

    def check_error(self, answer: Any, status: int) -> str:
        """Return the message of an error that has the dialect's shape."""
        kinds = {400: "invalid_request_error", 502: "server_error", 503: "server_error"}
        assert answer["error"]["type"] == kinds[status], answer
        return str(answer["error"]["message"])

    def check_too_long(self, answer: Any) -> None:
        assert answer["error"]["code"] == "context_length_exceeded"
        assert "maximum context length is 50 tokens" in answer["error"]["message"]

    def check_failed(self, events: Sequence[Any]) -> None:
        """The last event of a stream says that it failed."""
        assert events[-1]["error"]["message"]


class Completions(Dialect):
    name = "openai_completions"
    closes = False
    path = "completions"
    refused: ClassVar = {"logit_bias": {"1": 2}}

    def body(self, *said: str, **options: Any) -> Body:
        body = super().body(**options)
        del body["messages"]
        return {"prompt": "".join(said), **body}

    def text(self, answer: Any) -> str:
        return str(answer["choices"][0]["text"])

    def delta(self, event: Any) -> str:
        return str(event["choices"][0]["text"]) if event.get("choices") else ""

    def check_too_long(self, answer: Any) -> None:
        super().check_too_long(answer)
        assert answer["error"]["param"] == "prompt"


class Responses(Dialect):
    name = "openai_responses"
    path = "responses"
    finishes: ClassVar = {"stop": "completed", "length": "incomplete"}
    refused: ClassVar = {"background": True}

    def body(
        self,
        *said: str,
        max_tokens: int = 500,
        stop: str | None = None,
        sampling: dict[str, float] | None = None,
    ) -> Body:
        assert stop is None, "Responses has no stop strings"
        body = super().body(*said, sampling=sampling)
        messages, _ = body.pop("messages"), body.pop("max_tokens")
        return {"input": messages, "max_output_tokens": max_tokens, **body}

    def text(self, answer: Any) -> str:
        (item,) = answer["output"]
        return "".join(part["text"] for part in item["content"])

    def finish(self, answer: Any) -> str:
        return str(answer["status"])

    def delta(self, event: Any) -> str:
        return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""

    def finish_of(self, events: Sequence[Any]) -> str:
        return self.finish(events[-1]["response"])

    def check_too_long(self, answer: Any) -> None:
        super().check_too_long(answer)
        assert answer["error"]["param"] == "input"

    def check_failed(self, events: Sequence[Any]) -> None:
        error, failed = events[-2:]
        assert error["type"] == "error"
        assert error["message"] == error["error"]["message"]
        assert failed["type"] == "response.failed"
        assert failed["response"]["status"] == "failed"
        assert failed["response"]["error"]["code"] == "server_error"
        assert failed["response"]["id"] == events[0]["response"]["id"]


class Anthropic(Dialect):
    name = "anthropic_messages"
    path = "messages"
    finishes: ClassVar = {"stop": "end_turn", "length": "max_tokens", "cut": "stop_sequence"}
    refused: ClassVar = {"container": "x"}
    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def body(self, *said: str, **options: Any) -> Body:
        body = super().body(*said, **options)
        if "stop" in body:
            body["stop_sequences"] = ["END", *body.pop("stop")]
        return body

    def text(self, answer: Any) -> str:
        return "".join(block["text"] for block in answer["content"])

    def finish(self, answer: Any) -> str:
        was_cut = answer["stop_reason"] == "stop_sequence"
        assert answer["stop_sequence"] == (STOP if was_cut else None)
        return str(answer["stop_reason"])

    def delta(self, event: Any) -> str:
        return str(event.get("delta", {}).get("text", ""))

    def finish_of(self, events: Sequence[Any]) -> str:
        assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
        return self.finish(events[-2]["delta"])

    def check_error(self, answer: Any, status: int) -> str:
        kinds = {400: "invalid_request_error", 502: "api_error", 503: "overloaded_error"}
        assert (answer["type"], answer["error"]["type"]) == ("error", kinds[status])
        assert answer["request_id"].startswith("req_")
        return str(answer["error"]["message"])

    def check_too_long(self, answer: Any) -> None:
        message = answer["error"]["message"]
        assert message.startswith("prompt is too long: ")
        assert message.endswith(" tokens > 50 maximum")

    def check_failed(self, events: Sequence[Any]) -> None:
        assert (events[0]["type"], events[-1]["type"]) == ("message_start", "error")
        assert events[-1]["error"]["type"] in ("overloaded_error", "api_error")


class Google(Dialect):
    name = "gemini"
    path = "models/m:generateContent"
    keep_alive = b"\n"  # Google's SDK takes a comment for JSON
    finishes: ClassVar = {"stop": "STOP", "length": "MAX_TOKENS", "cut": "STOP"}
    refused: ClassVar = {"cachedContent": "x"}

    def body(self, *said: str, **options: Any) -> Body:
        body = super().body(*said, **options)
        names = {
            "max_tokens": "maxOutputTokens",
            "stop": "stopSequences",
            "temperature": "temperature",
            "top_p": "topP",
        }
        contents = [
            {"role": ("user", "model")[i % 2], "parts": [{"text": text}]}
            for i, text in enumerate(said)
        ]
        config = {names[name]: value for name, value in body.items() if name != "messages"}
        return {"contents": contents, "generationConfig": config}

    def streamed(self, path: str, body: Body) -> tuple[str, Body]:
        return path.replace(":generate", ":streamGenerate") + "?alt=sse", body

    def text(self, answer: Any) -> str:
        return self.delta(answer)

    def finish(self, answer: Any) -> str:
        return str(answer["candidates"][0].get("finishReason", ""))

    def delta(self, event: Any) -> str:
        candidates = event.get("candidates") or [{}]
        parts = candidates[0].get("content", {}).get("parts", [])
        return "".join(part["text"] for part in parts)

    def finish_of(self, events: Sequence[Any]) -> str:
        return next(f for e in events if (f := self.finish(e)))

    def check_error(self, answer: Any, status: int) -> str:
        kinds = {400: "INVALID_ARGUMENT", 502: "UNAVAILABLE", 503: "UNAVAILABLE"}
        assert (answer["error"]["code"], answer["error"]["status"]) == (status, kinds[status])
        return str(answer["error"]["message"])

    def check_too_long(self, answer: Any) -> None:
        message = answer["error"]["message"]
        assert message.startswith("The input token count (")
        assert message.endswith("exceeds the maximum number of tokens allowed (50).")

    def check_failed(self, events: Sequence[Any]) -> None:
        assert events[-1]["error"]["status"] == "UNAVAILABLE"


DIALECTS = (Dialect(), Completions(), Responses(), Anthropic(), Google())
WITH_STOPS = [dialect for dialect in DIALECTS if "cut" in dialect.finishes]


def named(dialects: Sequence[Dialect]) -> Any:
    return pytest.mark.parametrize("dialect", dialects, ids=[d.name for d in dialects])


EACH = named(DIALECTS)
BOTH_FORMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@dataclass
class Agent:
    """Client of one dialect without an SDK: what it sends is what the gateway reads."""

    world: World
    dialect: Dialect
    session: aiohttp.ClientSession

    @asynccontextmanager
    async def sent(
        self, body: Body, stream: bool = False, **headers: str
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        path = self.dialect.path
        if stream:
            path, body = self.dialect.streamed(path, body)
        url = f"{self.world.base_url()}/v1/{path}"
        sent = {"model": "m", **body}
        async with (
            asyncio.timeout(20),
            self.session.post(url, json=sent, headers=headers) as answer,
        ):
            yield answer

    async def post(self, body: Body, stream: bool = False, **headers: str) -> tuple[int, Any]:
        """Status and JSON of an answer; of a stream that began its events."""
        async with self.sent(body, stream, **headers) as answer:
            text = await answer.text()
            if answer.content_type == "text/event-stream":
                return answer.status, events_of(text)
            return answer.status, json.loads(text)

    async def ask(self, body: Body, stream: bool = False, **headers: str) -> tuple[str, str]:
        """Text and finish reason of an answer."""
        status, answer = await self.post(body, stream, **headers)
        assert status == 200, answer
        if stream:
            text = "".join(map(self.dialect.delta, answer))
            return text, self.dialect.finish_of(answer)
        return self.dialect.text(answer), self.dialect.finish(answer)


def events_of(text: str) -> list[Any]:
    data = [
        line.removeprefix("data:").strip() for line in text.splitlines() if line.startswith("data:")
    ]
    return [json.loads(each) for each in data if each != "[DONE]"]


async def agent_of(world: World, dialect: Dialect) -> Agent:
    session = await world.clients.enter_async_context(aiohttp.ClientSession())
    return Agent(world, dialect, session)


@BOTH_FORMS
@EACH
async def test_the_answer_is_what_was_sampled_and_its_step_is_stored(
    world: Any, dialect: Dialect, stream: bool
) -> None:
    said = world.say("naïve 東京 🦊")
    text, finish = await (await agent_of(world, dialect)).ask(dialect.body("hi"), stream)
    assert (text, finish) == ("naïve 東京 🦊", dialect.finishes["stop"])
    (step,) = world.stored("t1")
    assert step.response_ids.tolist() == said.ids
    assert (step.prompt_uid, step.step_index, step.parent_index) == ("p1", 0, None)
    assert step.metadata["dialect"] == dialect.name
    world.check_exact()


@EACH
async def test_text_is_streamed_while_the_engine_still_samples(
    world: Any, dialect: Dialect
) -> None:
    gate = asyncio.Event()
    world.say("one two three", gate=gate)
    agent, seen = await agent_of(world, dialect), b""
    async with agent.sent(dialect.body("hi"), stream=True) as answer:
        async for chunk in answer.content.iter_any():
            seen += chunk
            complete = seen.decode().rpartition("\n\n")[0]
            if not gate.is_set() and any(map(dialect.delta, events_of(complete))):
                assert not world.port.steps
                gate.set()
    assert "".join(map(dialect.delta, events_of(seen.decode()))) == "one two three"
    assert len(world.stored()) == 1


@EACH
async def test_a_conversation_sent_back_extends_its_turns(world: Any, dialect: Dialect) -> None:
    agent = await agent_of(world, dialect)
    said = ["hi"]
    for k in range(3):
        world.say(f"reply {k}", close=dialect.closes)
        text, _ = await agent.ask(dialect.body(*said), stream=k == 1)
        said += [text, f" and {k}?"]
    assert [s.parent_index for s in world.stored()] == [None, 0, 1]
    world.check_exact()


@BOTH_FORMS
@EACH
async def test_a_truncated_answer_says_so_and_goes_on(
    world: Any, dialect: Dialect, stream: bool
) -> None:
    agent = await agent_of(world, dialect)
    world.say("one two three four five six", close=False)
    text, finish = await agent.ask(dialect.body("count", max_tokens=3), stream)
    assert finish == dialect.finishes["length"]
    await agent.ask(dialect.body("count", text, " go on"))
    first, second = world.stored()
    assert (first.finish_reason, len(first.response_ids)) == ("length", 3)
    assert second.parent_index == 0
    if dialect.closes:
        assert second.prompt_ids[first.n_tokens] == eos_id(world.tokenizer)
    world.check_exact()


@BOTH_FORMS
@named(WITH_STOPS)
async def test_a_stop_string_is_cut_from_the_text_and_not_from_the_tokens(
    world: Any, dialect: Dialect, stream: bool
) -> None:
    said = world.say(f"think{STOP}", close=False, matched=STOP)
    agent = await agent_of(world, dialect)
    text, finish = await agent.ask(dialect.body("hi", stop=STOP), stream)
    assert (text, finish) == ("think", dialect.finishes["cut"])
    assert world.engine.requests[-1]["sampling_params"]["stop"][-1] == STOP
    assert world.stored()[-1].response_ids.tolist() == said.ids


@BOTH_FORMS
@EACH
async def test_a_stop_string_of_the_channel_ends_the_text_as_the_models_own_end_does(
    worlds: Any, dialect: Dialect, stream: bool
) -> None:
    world = await worlds(sampling={"train": ChannelSampling(stop=(STOP,))})
    agent = await agent_of(world, dialect)
    said = world.say(f"one{STOP}", close=False, matched=STOP)
    assert await agent.ask(dialect.body("hi"), stream) == ("one", dialect.finishes["stop"])
    assert world.stored()[0].response_ids.tolist() == said.ids


@EACH
async def test_sampling_parameters_reach_the_engine_and_the_step(
    world: Any, dialect: Dialect
) -> None:
    wanted = {"temperature": 0.5, "top_p": 0.9}
    await (await agent_of(world, dialect)).ask(
        dialect.body("hi", max_tokens=7, sampling=wanted),
    )
    sent = world.engine.requests[-1]["sampling_params"]
    assert {name: sent[name] for name in wanted} == wanted
    assert sent["max_new_tokens"] == 7
    assert world.stored()[0].metadata["sampling_params"] == {**wanted, "top_k": -1}


@EACH
async def test_more_tokens_than_fit_are_as_many_as_fit(worlds: Any, dialect: Dialect) -> None:
    world = await worlds(context_length=100)
    await (await agent_of(world, dialect)).ask(dialect.body("hi", max_tokens=32_000))
    (request,) = world.engine.requests
    assert len(request["input_ids"]) + request["sampling_params"]["max_new_tokens"] == 99


@BOTH_FORMS
@EACH
async def test_what_cannot_be_honoured_is_refused_by_name(
    world: Any, dialect: Dialect, stream: bool
) -> None:
    agent = await agent_of(world, dialect)
    status, answer = await agent.post({**dialect.body("hi"), **dialect.refused}, stream)
    assert status == 400
    (field,) = dialect.refused
    assert field in dialect.check_error(answer, status)
    assert world.engine.requests == []


@BOTH_FORMS
@EACH
async def test_a_prompt_that_does_not_fit_is_refused_in_the_words_that_agents_look_for(
    worlds: Any, dialect: Dialect, stream: bool
) -> None:
    world = await worlds(context_length=50)
    status, answer = await (await agent_of(world, dialect)).post(dialect.body(LONG), stream)
    assert status == 400
    dialect.check_error(answer, status)
    dialect.check_too_long(answer)
    assert (world.engine.requests, world.stored()) == ([], [])


@BOTH_FORMS
@EACH
async def test_a_failure_before_the_first_token_is_a_status(
    worlds: Any, dialect: Dialect, stream: bool
) -> None:
    world = await worlds(engine_retries=0)
    world.engine.script.append(Sampled([], status=500))
    status, answer = await (await agent_of(world, dialect)).post(dialect.body("hi"), stream)
    assert status == 502
    dialect.check_error(answer, status)
    assert not world.stored()


@EACH
async def test_a_failure_inside_a_stream_is_its_last_event(worlds: Any, dialect: Dialect) -> None:
    world = await worlds(engine_retries=0)
    world.say("a few words that come", drop_after=3)
    status, events = await (await agent_of(world, dialect)).post(dialect.body("hi"), stream=True)
    assert status == 200
    assert any(map(dialect.delta, events))
    dialect.check_failed(events)
    assert not world.stored()


@EACH
async def test_an_idle_stream_is_kept_alive(worlds: Any, dialect: Dialect) -> None:
    world = await worlds(tuning=Tuning(keepalive_s=0.02))
    gate = asyncio.Event()
    world.say("slow", gate=gate)
    agent, seen = await agent_of(world, dialect), b""
    async with agent.sent(dialect.body("hi"), stream=True) as answer:
        async for chunk in answer.content.iter_any():
            seen += chunk
            if seen.count(dialect.keep_alive) >= 2:
                gate.set()  # so two came while nothing was said
    assert gate.is_set()
    assert "".join(map(dialect.delta, events_of(seen.decode()))) == "slow"


@BOTH_FORMS
@EACH
async def test_a_retry_is_answered_with_the_same_step(
    world: Any, dialect: Dialect, stream: bool
) -> None:
    agent = await agent_of(world, dialect)
    world.say("once")
    answers = [await agent.ask(dialect.body("hi"), stream, **extra) for extra in ({}, RETRY)]
    assert answers[0] == answers[1] == ("once", dialect.finishes["stop"])
    assert (len(world.engine.requests), len(world.stored())) == (1, 1)


@EACH
async def test_a_reply_that_was_not_stored_is_refused_and_its_retry_samples_nothing_again(
    world: Any, dialect: Dialect
) -> None:
    agent = await agent_of(world, dialect)
    said = world.say("once")
    world.port.failures.append("before")
    status, answer = await agent.post(dialect.body("hi"))
    assert status == 503
    dialect.check_error(answer, status)
    assert await agent.ask(dialect.body("hi"), **RETRY) == ("once", dialect.finishes["stop"])
    assert len(world.engine.requests) == 1
    (step,) = world.stored()
    assert step.response_ids.tolist() == said.ids
