"""Replies that no client saw, because it had sent its request again, are superseded: whatever ended
the first try, and whichever gateway the agent goes on at."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from stepwell.datapool.ops import OpenTrajectory
from stepwell.datapool.types import superseded
from stepwell.gateway import call
from tests.builders import until
from tests.gateway.conftest import World
from tests.gateway.raw import BODIES, ENDS, HI, Raw


class Clock:
    """Time of day of the gateway's calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = time.time()
        given = {"perf_counter": time.perf_counter, "monotonic": time.monotonic}
        monkeypatch.setattr(call, "time", SimpleNamespace(time=lambda: self.now, **given))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


async def go_on(world: World, *said: str, client: AsyncOpenAI | None = None) -> None:
    """A call that goes on from a reply to "hi", or from what was said after it."""
    messages: list[Any] = [*HI]
    for text in said:
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": f"on from {text}"},
        ]
    client = client or await world.client()
    await client.chat.completions.create(model="m", messages=messages)


async def again(world: World, stream: bool = False, path: str = "chat/completions") -> bytes:
    """The request from another connection, read to its end, which stays open."""
    return await (await Raw.send(world, path, stream)).read_all(stream)


async def elsewhere(worlds: Callable[..., Any], world: World) -> World:
    """A gateway that begins now, over the same pool and engine, as after a restart."""
    made: World = await worlds(pool=world.pool, engine_urls=(world.engine.url,))
    return made


async def two_tries(
    world: World, clock: Clock, stream: bool, *, wait_s: float = 30
) -> tuple[Raw, asyncio.Event]:
    """A first try that still waits for "lost", and a second one that has got "read"."""
    gate = asyncio.Event()
    world.say("lost", gate=gate)
    world.engine.arrived.clear()
    first = await Raw.send(world, stream=stream)
    await world.engine.arrived.wait()
    clock.now += wait_s
    world.say("read")
    await again(world, stream)
    return first, gate


def texts(world: World) -> list[str]:
    """Replies of the stored Steps."""
    return [world.tokenizer.decode(s.response_ids[:-1].tolist()) for s in world.stored()]


def metadata_told(world: World) -> list[dict[str, Any]]:
    return [op.metadata for op in world.port.asked if isinstance(op, OpenTrajectory)]


STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@STREAMS
@pytest.mark.parametrize("restarted", [False, True], ids=["same", "restarted"])
async def test_a_reply_to_a_client_that_had_sent_its_request_again_is_superseded_whoever_took_it(
    worlds: Callable[..., Any], world: World, clock: Clock, stream: bool, restarted: bool
) -> None:
    first, gate = await two_tries(world, clock, stream)
    gate.set()
    await first.read_all(stream)  # as a proxy does, whose client has left
    read, lost = world.stored()
    here = await elsewhere(worlds, world) if restarted else world
    await go_on(here, "read")
    assert world.stored()[-1].parent_index == read.step_index
    assert superseded(world.stored()) == {lost.step_index}


@STREAMS
async def test_requests_that_are_sent_at_once_are_a_best_of(
    worlds: Callable[..., Any], world: World, clock: Clock, stream: bool
) -> None:
    gates = [asyncio.Event() for _ in range(3)]
    tries = []
    for i, gate in enumerate(gates):
        world.say(f"says {i}", gate=gate)
        world.engine.arrived.clear()
        tries.append(await Raw.send(world, stream=stream))
        await world.engine.arrived.wait()
        clock.now += 0.3
    for i in (2, 0, 1):
        gates[i].set()
        await tries[i].read_all(stream)
    await go_on(world, "says 2")
    await go_on(await elsewhere(worlds, world), "says 2", "fine")
    assert world.stored()[-2].parent_index == 0
    assert len(world.stored()) == 5
    assert superseded(world.stored()) == frozenset()


async def test_a_best_of_that_is_sampled_a_few_at_a_time_is_one(world: World, clock: Clock) -> None:
    gate = asyncio.Event()
    world.say("slow", gate=gate)
    world.engine.arrived.clear()
    slow = await Raw.send(world)
    await world.engine.arrived.wait()
    world.say("quick")
    await again(world)  # at once, and answered at once: so the next one comes
    clock.now += 30
    world.say("third")
    await again(world)
    gate.set()
    await slow.read_all(stream=False)
    await go_on(world, "third")
    assert len(world.stored()) == 4
    assert superseded(world.stored()) == frozenset()


@STREAMS
async def test_a_reply_that_the_agent_did_not_wait_for_is_superseded(
    worlds: Callable[..., Any], world: World, clock: Clock, stream: bool
) -> None:
    first, gate = await two_tries(world, clock, stream, wait_s=0)
    await go_on(world, "read")
    gate.set()
    await first.read_all(stream)
    read, on, lost = world.stored()
    assert (on.parent_index, lost.parent_index) == (read.step_index, None)
    assert superseded(world.stored()) == {lost.step_index}
    await go_on(await elsewhere(worlds, world), "read", "fine")
    assert superseded(world.stored()) == {lost.step_index}


async def test_a_reply_that_the_agent_goes_on_from_after_all_is_not_superseded(
    world: World, clock: Clock
) -> None:
    first, gate = await two_tries(world, clock, stream=False)
    gate.set()
    await first.read_all(stream=False)
    await go_on(world, "read")
    await go_on(world, "lost")
    assert superseded(world.stored()) == frozenset()


async def test_a_reply_is_not_superseded_by_a_try_that_nothing_goes_on_from(
    world: World, clock: Clock
) -> None:
    first, gate = await two_tries(world, clock, stream=False)
    gate.set()
    await first.read_all(stream=False)
    await go_on(world, "lost")
    assert superseded(world.stored()) == frozenset()


@STREAMS
async def test_a_broken_connection_is_remembered_over_a_restart(
    worlds: Callable[..., Any], world: World, clock: Clock, stream: bool
) -> None:
    first, gate = await two_tries(world, clock, stream, wait_s=0)
    gate.set()
    await first.read(ENDS[first.path][stream])
    first.reset()
    _, lost = world.stored()
    key = f"stepwell_unseen:{lost.step_index}"
    await until(lambda: {key: True} in metadata_told(world))
    await go_on(await elsewhere(worlds, world), "read")
    assert superseded(world.stored()) == {lost.step_index}


async def test_a_connection_that_breaks_after_the_agent_went_on_counts_from_the_next_step(
    world: World,
) -> None:
    world.say("lost")
    first = await Raw.send(world)
    await first.unread()
    world.say("read")
    await again(world)
    await go_on(world, "read")
    assert superseded(world.stored()) == frozenset()
    first.close()
    await until(lambda: {"stepwell_unseen:0": True} in metadata_told(world))
    await go_on(world, "read", "fine")
    assert superseded(world.stored()) == {0}


async def test_a_lost_reply_that_the_repetition_got_is_a_sample_as_any_other(
    worlds: Callable[..., Any], world: World
) -> None:
    world.say("the first")
    first = await Raw.send(world)
    await first.unread()
    first.close()
    await until(lambda: metadata_told(world) == [{"stepwell_unseen:0": True}])
    assert b"the first" in await again(world)
    await until(lambda: {"stepwell_unseen:0": False} in metadata_told(world))
    world.say("the second")
    assert b"the second" in await again(world)
    await go_on(await elsewhere(worlds, world), "the second")
    assert len(world.stored()) == 3
    assert superseded(world.stored()) == frozenset()


LEAVES = pytest.mark.parametrize("leave", [Raw.close, Raw.reset, Raw.half_close])


@LEAVES
@pytest.mark.parametrize("when", ["whole", "before a stream", "amid a stream"])
@pytest.mark.parametrize("path", BODIES)
async def test_a_client_that_leaves_before_the_reply_leaves_no_step(
    world: World, path: str, when: str, leave: Callable[[Raw], None]
) -> None:
    gate, stream = asyncio.Event(), "stream" in when
    said = world.say("nobody waits", gate=gate)
    if when == "before a stream":
        del said.ids[1:]  # the engine says nothing before its last token
    world.engine.arrived.clear()
    first = await Raw.send(world, path, stream)
    await world.engine.arrived.wait()
    if when == "amid a stream":
        await first.read(b"data: ")
    leave(first)
    await until(lambda: len(world.engine.aborts) == 1)
    gate.set()
    world.say("got")
    await again(world, stream, path)
    assert texts(world) == ["got"]


@STREAMS
@pytest.mark.parametrize("leave", [Raw.close, Raw.reset])
@pytest.mark.parametrize("path", BODIES)
async def test_a_client_that_leaves_without_reading_the_end_gets_the_reply_when_it_asks_again(
    world: World, path: str, leave: Callable[[Raw], None], stream: bool
) -> None:
    first = await Raw.send(world, path, stream)
    await first.unread()
    await until(lambda: bool(world.gateway.calls.added_s))  # it is stored, and was handed over
    leave(first)
    await until(lambda: {"stepwell_unseen:0": True} in metadata_told(world))
    world.say("another")
    await again(world, stream, path)
    assert texts(world) == ["fine"]


@STREAMS
@pytest.mark.parametrize("path", BODIES)
async def test_a_client_that_has_read_the_end_and_closes_has_it(
    world: World, path: str, stream: bool
) -> None:
    first = await Raw.send(world, path, stream)
    await first.read_all(stream)
    first.close()
    world.say("another")
    await again(world, stream, path)
    assert texts(world) == ["fine", "another"]
    assert metadata_told(world) == []


# -- clients that try again ------------------------------------------------------------------


class Proxy:
    """A TCP proxy before a gateway, which keeps the first answer to itself.

    `ends`: "reset", once the answer is there: RST to both sides; "close", while it is generated:
    FIN to both; "hold", while it is generated: FIN to the client alone, and the rest is read.
    """

    def __init__(self, world: World, ends: str) -> None:
        self.world, self.ends = world, ends
        self.url = ""
        self.n_requests = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self, stack: AsyncExitStack) -> Proxy:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        await stack.enter_async_context(server)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        stack.callback(lambda: [task.cancel() for task in self._tasks])
        return self

    async def _serve(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        url = urlsplit(self.world.url)
        gateway, to_gateway = await asyncio.open_connection(url.hostname, url.port)
        self.n_requests += 1
        if (own := asyncio.current_task()) is not None:
            self._tasks.add(own)  # asyncio does not keep it: a collection would end it
        sent = asyncio.create_task(_pump(client, to_gateway))
        self._tasks.add(sent)
        if self.n_requests > 1:
            await _pump(gateway, to_client)
        elif self.ends == "reset":
            await gateway.read(1)
            await until(lambda: bool(self.world.gateway.calls.added_s))
            for writer in (to_client, to_gateway):
                linger = struct.pack("ii", 1, 0)
                raw = writer.get_extra_info("socket")
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        else:
            await self.world.engine.arrived.wait()
            if self.ends == "hold":
                to_client.close()
                while await gateway.read(1 << 16):
                    pass
        sent.cancel()
        to_client.close()
        to_gateway.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()


UNMARKED = {"x-stainless-retry-count": "0"}
"""Said by the caller, it stays so in all tries: as of a client that does not mark its retries."""


async def talk_openai(url: str, said: list[Any], stream: bool, **more: Any) -> str:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=2) as client:
        answer: Any = await client.chat.completions.create(
            model="m", messages=said, stream=stream, **more
        )
        if not stream:
            return str(answer.choices[0].message.content)
        return "".join([c.choices[0].delta.content or "" async for c in answer if c.choices])


async def talk_anthropic(url: str, said: list[Any], stream: bool, **more: Any) -> str:
    async with AsyncAnthropic(base_url=url, api_key="none", max_retries=2) as client:
        answer: Any = await client.messages.create(
            model="m", messages=said, max_tokens=32, stream=stream, **more
        )
        if not stream:
            return str(answer.content[0].text)
        return "".join([getattr(e.delta, "text", "") async for e in answer if hasattr(e, "delta")])


@STREAMS
@pytest.mark.parametrize("marked", [True, False], ids=["marked", "unmarked"])
@pytest.mark.parametrize("ends", ["reset", "close", "hold"])
@pytest.mark.parametrize("talk", [talk_openai, talk_anthropic])
async def test_of_a_client_that_tries_again_what_it_saw_is_trained(
    world: World, clock: Clock, talk: Callable[..., Any], ends: str, marked: bool, stream: bool
) -> None:
    gate = asyncio.Event()
    if ends != "reset":
        world.say("first", gate=gate)
        world.say("second")
    more = {} if marked else {"extra_headers": UNMARKED}
    async with AsyncExitStack() as stack:
        proxy = await Proxy(world, ends).start(stack)
        url = world.base_url().replace(world.url, proxy.url)
        said: list[Any] = [*HI]
        asked = asyncio.create_task(talk(url, said, stream, **more))
        await world.engine.arrived.wait()
        clock.now += 30
        if ends == "hold" and marked:
            await until(lambda: world.gateway.calls.counts["retries"] == 1)
            gate.set()
        heard = [await asked]
        gate.set()
        n_unseen = int(ends == "hold" and not marked)
        await until(lambda: len(world.stored()) == 1 + n_unseen)
        assert proxy.n_requests == 2
        said += [{"role": "assistant", "content": heard[0]}, {"role": "user", "content": "on"}]
        world.say("third")
        heard.append(await talk(url, said, stream, **more))
    steps = world.stored()
    unseen = superseded(steps)
    assert len(unseen) == n_unseen
    trained = zip(steps, texts(world), strict=True)
    assert [text for step, text in trained if step.step_index not in unseen] == heard
