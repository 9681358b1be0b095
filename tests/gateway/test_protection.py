"""Limits: calls at once in turn, turns and tokens of a trajectory, bodies that stay within time and
size."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import aiohttp
import anthropic
import openai
import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stepwell.gateway.config import GatewayConfig, Tuning
from stepwell.gateway.errors import RateLimitedError, TrajectoryLimitError
from stepwell.gateway.limits import CallLimits
from tests.builders import until

TIMEOUT_S = 10.0


def limits(total: int | None = None, **options: Any) -> CallLimits:
    return CallLimits(
        GatewayConfig(max_concurrent_calls=total, **{"queue_timeout_s": TIMEOUT_S, **options})
    )


class Crowd:
    """Calls on real limits, by number in order of arrival, on a clock that only the test moves."""

    def __init__(self, of: CallLimits) -> None:
        self.limits = of
        self.running: list[int] = []
        self.refused: list[int] = []
        self.tasks: list[asyncio.Task[None]] = []
        self._ends: list[asyncio.Event] = []
        self.now = 1000.0
        asyncio.get_running_loop().time = lambda: self.now  # type: ignore[method-assign]

    def come(self) -> None:
        self._ends.append(asyncio.Event())
        self.tasks.append(asyncio.create_task(self._call(len(self.tasks))))

    def end(self, number: int) -> None:
        self._ends[number].set()

    def leave(self, number: int) -> None:
        self.tasks[number].cancel()

    async def pass_time(self, seconds: float) -> None:
        await self.settle()
        self.now += seconds
        await self.settle()

    def waiting(self) -> list[int]:
        """Numbers of the calls that wait, or have not noticed yet that they no longer do."""
        not_running = [n for n in range(len(self.tasks)) if n not in self.running]
        return [n for n in not_running if not self.tasks[n].done()]

    async def settle(self) -> None:
        for _ in range(8):
            await asyncio.sleep(0)

    async def _call(self, number: int) -> None:
        try:
            if (place := self.limits.enter()) is not None:
                await place
        except RateLimitedError:
            self.refused.append(number)
            return
        self.running.append(number)
        try:
            await self._ends[number].wait()
        finally:
            self.limits.leave()
            self.running.remove(number)


class Rules:
    """The same by the book: after every event the first that may run does."""

    def __init__(self, total: int | None) -> None:
        self.total = total
        self.arrived_at: list[float] = []
        self.running: list[int] = []
        self.waiting: list[int] = []
        self.refused: list[int] = []
        self.now = 0.0

    def come(self) -> None:
        self.waiting.append(len(self.arrived_at))
        self.arrived_at.append(self.now)
        self._admit()

    def remove(self, number: int) -> None:
        for members in (self.running, self.waiting):
            if number in members:
                members.remove(number)
        self._admit()

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        late = [n for n in self.waiting if self.now - self.arrived_at[n] >= TIMEOUT_S]
        self.refused += late
        self.waiting = [n for n in self.waiting if n not in late]

    def _admit(self) -> None:
        while self.waiting and (self.total is None or len(self.running) < self.total):
            self.running.append(self.waiting.pop(0))


Event = tuple[Literal["come", "end", "leave", "wait", "turn"], int]
events = st.lists(
    st.tuples(st.sampled_from(["come", "come", "end", "leave", "wait"]), st.integers(0, 30)),
    max_size=40,
)
bounds = st.none() | st.integers(1, 3)


@given(bounds, events)
@example(1, [("come", 0), ("come", 1), ("come", 2), ("leave", 1), ("end", 0)])
def test_calls_run_first_come_first_served_within_the_limit(
    total: int | None, happened: list[Event]
) -> None:
    async def run() -> None:
        crowd, rules = Crowd(limits(total)), Rules(total)
        for what, n in happened:
            if what == "come":
                crowd.come()
                rules.come()
            elif what == "wait":
                await crowd.pass_time(n % 8)
                rules.pass_time(n % 8)
            elif what == "end" and rules.running:
                number = rules.running[n % len(rules.running)]
                crowd.end(number)
                rules.remove(number)
            elif what == "leave" and crowd.tasks:
                number = n % len(crowd.tasks)
                crowd.leave(number)
                rules.remove(number)
            await crowd.settle()
            assert crowd.running == rules.running
            assert sorted(crowd.refused) == sorted(rules.refused)
            assert crowd.limits.statistics() == {
                "running": len(rules.running),
                "waiting": len(rules.waiting),
                "refused": len(rules.refused),
            }
        await check_nothing_is_lost(crowd)

    asyncio.run(run())


racing = st.lists(
    st.tuples(
        st.sampled_from(["come", "come", "end", "end", "leave", "leave", "wait", "turn", "turn"]),
        st.integers(0, 30),
    ),
    max_size=60,
)


@given(bounds, racing)
# Granted and cancelled in one turn; cancelled, and its turn comes before it has noticed.
@example(1, [("come", 0), ("come", 0), ("turn", 0), ("end", 0), ("turn", 0), ("leave", 0)])
@example(1, [("come", 0), ("come", 0), ("turn", 0), ("end", 0), ("leave", 0)])
@example(2, [("come", 0), ("come", 1), ("come", 2), ("turn", 0), ("end", 0), ("leave", 0)])
def test_no_permit_is_lost_whatever_happens_in_one_turn_of_the_loop(
    total: int | None, happened: list[Event]
) -> None:
    async def run() -> None:
        crowd = Crowd(limits(total))
        for what, n in happened:
            waiting = crowd.waiting()
            if what == "come":
                crowd.come()
            elif what == "turn":
                await asyncio.sleep(0)
            elif what == "wait":
                crowd.now += n % 8
            elif what == "end" and crowd.running:
                crowd.end(crowd.running[n % len(crowd.running)])
            elif what == "leave" and waiting:
                crowd.leave(waiting[n % len(waiting)])
            assert total is None or len(crowd.running) <= total
            assert total is None or crowd.limits.statistics()["running"] <= total
        await check_nothing_is_lost(crowd)

    asyncio.run(run())


async def check_nothing_is_lost(crowd: Crowd) -> None:
    for number in range(len(crowd.tasks)):
        crowd.end(number)
    for _ in range(len(crowd.tasks) + 1):
        await crowd.settle()
    assert all(task.done() for task in crowd.tasks)
    assert not [t for t in crowd.tasks if not t.cancelled() and t.exception()]
    figures = crowd.limits.statistics()
    assert (figures["running"], figures["waiting"]) == (0, 0)
    if crowd.limits._places is not None:
        assert not crowd.limits._places.locked()


async def test_a_call_with_room_is_admitted_without_a_turn_of_the_loop() -> None:
    of = limits(total=1)
    entering = of.enter()
    with pytest.raises(StopIteration):
        entering.send(None)
    assert of.statistics()["running"] == 1
    waiting = of.enter()
    waiting.send(None)  # it yielded: it waits
    waiting.close()
    assert of.statistics() == {"running": 1, "waiting": 0, "refused": 0}


async def test_a_refusal_names_the_limit_that_was_full() -> None:
    of = limits(total=1, queue_timeout_s=0.001)
    await of.enter()
    with pytest.raises(RateLimitedError) as refused:
        await of.enter()
    of.leave()
    assert "max_concurrent_calls)" in str(refused.value)
    assert "queue_timeout_s" in str(refused.value)
    assert refused.value.headers() == {"retry-after": "1"}


def test_a_trajectory_at_its_limit_is_told_which_and_how_many() -> None:
    of = limits(max_turns=3)
    of.check_turns(2, 1)
    with pytest.raises(TrajectoryLimitError, match=r"has 3 turns and may have 3 .*max_turns"):
        of.check_turns(3, 1)
    of.check_turns(3, 0)  # what is answered from memory is none
    limits().check_turns(10**9, 1)
    assert TrajectoryLimitError.status == 400


# -- bodies ----------------------------------------------------------------------------------


async def raw(url: str, head: str, body: bytes) -> tuple[int, dict[str, Any]]:
    """Send so much and no more; the status and JSON of the answer, once the server closes."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(head.encode() + b"\r\n\r\n" + body)
        async with asyncio.timeout(20):
            answer = await reader.read()
    finally:
        writer.close()
    top, _, content = answer.partition(b"\r\n\r\n")
    return int(top.split()[1]), orjson.loads(content)


@pytest.mark.parametrize(
    "path", ["/t/p/v1/chat/completions", "/init_trajectory", "/submit_steps", "/buffer/write"]
)
async def test_a_body_that_does_not_arrive_is_answered_408_and_the_connection_closed(
    worlds: Any, path: str
) -> None:
    world = await worlds(tuning=Tuning(body_timeout_s=0.05))
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\n"
        "content-type: application/json\r\ncontent-length: 1000"
    )
    status, got = await raw(world.url, head, b'{"model": ')
    assert status == 408
    assert "did not arrive within 0.05 s" in got["error"]["message"]
    assert not world.engine.requests


async def test_bodies_in_pieces_and_requests_behind_one_another_are_read_whole(worlds: Any) -> None:
    world = await worlds(tuning=Tuning(body_timeout_s=10))
    said = ["one", "two", "three"]
    bodies = [
        orjson.dumps({"model": "m", "messages": [{"role": "user", "content": text}]})
        for text in said
    ]
    bodies[1] += b" " * 300_000
    requests = [
        b"POST /t/p/v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
        b"content-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(body), body)
        for body in bodies
    ]
    whole = b"".join(requests)
    reader, writer = await asyncio.open_connection(*world.url.removeprefix("http://").split(":"))
    try:
        for start in range(0, len(whole), len(whole) // 3):
            writer.write(whole[start : start + len(whole) // 3])
            await writer.drain()
            await asyncio.sleep(0.05)
        async with asyncio.timeout(20):
            for _ in bodies:
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200")
                length = int(head.lower().partition(b"content-length: ")[2].split()[0])
                await reader.readexactly(length)
    finally:
        writer.close()
    prompts = [world.tokenizer.decode(s.prompt_ids.tolist()) for s in world.stored()]
    assert all(f"user\n{text}<" in prompt for text, prompt in zip(said, prompts, strict=True))


async def test_a_client_that_leaves_in_the_middle_of_its_body_begins_no_call(
    worlds: Any, caplog: pytest.LogCaptureFixture
) -> None:
    world = await worlds(tuning=Tuning(body_timeout_s=10))
    _, writer = await asyncio.open_connection(*world.url.removeprefix("http://").split(":"))
    writer.write(
        b"POST /t/p/v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
        b"content-type: application/json\r\n"
        b'content-length: 1000\r\n\r\n{"model": '
    )
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.close()
    await asyncio.sleep(0.1)
    assert not world.engine.requests
    assert not caplog.records


async def test_the_time_for_the_body_does_not_bound_the_call(worlds: Any) -> None:
    world = await worlds(tuning=Tuning(body_timeout_s=1))
    gate = asyncio.Event()
    world.say("at last", gate=gate)
    client = await world.client()
    call = asyncio.create_task(
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    )
    await world.engine.arrived.wait()
    await asyncio.sleep(1.2)
    gate.set()
    assert (await call).choices[0].message.content == "at last"


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("/t/p/v1/chat/completions", {"type": "invalid_request_error"}),
        ("/t/p/v1/messages", {"type": "request_too_large"}),
        ("/init_trajectory", {"type": "invalid_request_error"}),
    ],
)
async def test_every_endpoint_refuses_a_body_beyond_the_limit_in_its_shape(
    worlds: Any, path: str, named: dict[str, str]
) -> None:
    world = await worlds(max_body_bytes=1024)
    async with (
        aiohttp.ClientSession() as session,
        session.post(world.url + path, json={"metadata": {"text": "x" * 2000}}) as response,
    ):
        got = await response.json()
        assert response.status == 413
    assert "gateway.max_body_bytes" in got["error"]["message"]
    assert got["error"].items() >= named.items()


# -- limits over HTTP ------------------------------------------------------------------------


async def chat(client: Any, text: str = "hi", **options: Any) -> str:
    got = await client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": text}], **options
    )
    said: str = got.choices[0].message.content
    return said


async def test_calls_beyond_the_limit_wait_their_turn_and_are_answered(worlds: Any) -> None:
    world = await worlds(max_concurrent_calls=1)
    gate = asyncio.Event()
    for text in ("one", "two", "three"):
        world.say(text, gate=gate)
    calls = []
    for n in range(3):
        calls.append(asyncio.create_task(chat(await world.client(f"t{n}"))))
        await until(lambda n=n: world.gateway.calls.limits.statistics()["waiting"] == n)  # type: ignore[misc]
        await world.engine.arrived.wait()
    assert len(world.engine.requests) == 1
    gate.set()
    assert await asyncio.gather(*calls) == ["one", "two", "three"]
    assert world.gateway.calls.limits.statistics() == {"running": 0, "waiting": 0, "refused": 0}


async def test_waiting_too_long_is_a_429_with_retry_after_in_each_shape(worlds: Any) -> None:
    world = await worlds(max_concurrent_calls=1, queue_timeout_s=0.02)
    gate = asyncio.Event()
    world.say("busy", gate=gate)
    busy = asyncio.create_task(chat(await world.client("busy")))
    await world.engine.arrived.wait()
    with pytest.raises(openai.RateLimitError, match="max_concurrent_calls") as refused:
        await chat(await world.client())
    assert refused.value.response.headers["retry-after"] == "1"
    assert refused.value.code == "rate_limit_exceeded"
    with pytest.raises(openai.RateLimitError):
        await chat(await world.client(), stream=True)
    async with anthropic.AsyncAnthropic(
        base_url=world.base_url(), api_key="x", max_retries=0
    ) as claude:
        with pytest.raises(anthropic.RateLimitError):
            await claude.messages.create(
                model="m", max_tokens=9, messages=[{"role": "user", "content": "hi"}]
            )
    assert not world.stored("t1")
    gate.set()
    assert await busy == "busy"
    assert await chat(await world.client()) == "fine"  # the refused ones left nothing behind


async def test_a_client_that_leaves_the_queue_takes_no_place(worlds: Any) -> None:
    world = await worlds(max_concurrent_calls=1)
    gate = asyncio.Event()
    world.say("busy", gate=gate)
    busy = asyncio.create_task(chat(await world.client("busy")))
    await world.engine.arrived.wait()
    leaver = asyncio.create_task(chat(await world.client("leaver")))
    waiting = world.gateway.calls.limits.statistics
    await until(lambda: waiting()["waiting"] == 1)
    leaver.cancel()
    await until(lambda: waiting()["waiting"] == 0)
    gate.set()
    assert await busy == "busy"
    assert not world.stored("leaver")


async def test_a_stream_that_waits_its_turn_is_kept_alive(worlds: Any) -> None:
    world = await worlds(max_concurrent_calls=1, tuning=Tuning(keepalive_s=0.02))
    gate = asyncio.Event()
    world.say("busy", gate=gate)
    busy = asyncio.create_task(chat(await world.client("busy")))
    await world.engine.arrived.wait()
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    url = f"{world.base_url()}/v1/chat/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        assert response.status == 200
        async for line in response.content:
            if line == b": keep-alive\n":
                break
        gate.set()
        assert b'"finish_reason":"stop"' in await response.read()
    await busy
    assert len(world.stored("t1")) == 1


async def test_a_trajectory_has_so_many_turns_and_retries_are_none(worlds: Any) -> None:
    world = await worlds(max_turns=2)
    client = await world.client()
    await chat(client, "one")
    await chat(client, "two")
    with pytest.raises(openai.BadRequestError, match=r"2 turns and may have 2 .gateway.max_turns"):
        await chat(client, "three")
    again = {"x-stainless-retry-count": "1"}
    assert await chat(client, "two", extra_headers=again) == "fine"
    assert len(world.stored()) == 2
    async with aiohttp.ClientSession() as session:
        done = await session.post(f"{world.base_url()}/v1/complete_trajectory", json={})
        assert done.status == 200


async def test_init_hands_out_a_key_that_is_identity_enough(worlds: Any) -> None:
    admin = "the-admin's-key-of-this-test"
    world = await worlds(admin_keys=[admin])
    async with (
        aiohttp.ClientSession(headers={"x-api-key": admin}) as session,
        session.post(f"{world.url}/init_trajectory", json={"prompt_uid": "p"}) as response,
    ):
        got = await response.json()
    async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key=got["api_key"]) as client:
        assert await chat(client) == "fine"
    assert [s.trajectory_uid for s in world.stored()] == [got["trajectory_uid"]]


async def test_samples_beyond_the_turns_are_refused_together(worlds: Any) -> None:
    world = await worlds(max_turns=2)
    client = await world.client()
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], n=3
        )
    assert refused.value.code == "trajectory_limit_exceeded"
    await until(lambda: not any(t.in_flight for t in world.gateway.trajectories))
    assert not world.stored()
