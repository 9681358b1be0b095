"""Kept connections, the pace of an event loop and the short way to calls, over real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import httpx
import pytest

from stepwell.gateway import kept
from stepwell.gateway.kept import KeptConnections
from stepwell.gateway.pace import FIRST, MOST, Pace
from stepwell.gateway.routes import router

Answering = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Server:
    """Answers each request with what `answer` writes; counts connections."""

    def __init__(self, answer: Answering) -> None:
        self.answer = answer
        self.connections = 0
        self.requests: list[bytes] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                await self.answer(reader, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


@asynccontextmanager
async def serving(answer: Answering) -> AsyncIterator[Server]:
    server = Server(answer)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/generate?x=1"
    try:
        yield server
    finally:
        listening.close()


def writes(*pieces: bytes, close: bool = False) -> Answering:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.001)
        if close:
            writer.close()

    return answer


@pytest.fixture
async def connections() -> AsyncIterator[KeptConnections]:
    made = KeptConnections(connect_timeout_s=5)
    yield made
    made.close()


async def test_requests_after_one_another_share_a_connection(connections: KeptConnections) -> None:
    async with serving(writes(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")) as server:
        for _ in range(3):
            async with connections.post(server.url, b"{}") as answer:
                assert (answer.status, await answer.read()) == (200, b"hi")
    assert server.connections == 1
    assert server.requests[0].startswith(b"POST /generate?x=1 HTTP/1.1\r\nhost: 127.0.0.1:")
    assert server.requests[0].endswith(b"content-length: 2\r\n\r\n{}")


async def test_requests_at_once_have_a_connection_each(connections: KeptConnections) -> None:
    async def ask() -> bytes:
        async with connections.post(server.url, b"{}") as answer:
            return await answer.read()

    async with serving(writes(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n", b"a")) as server:
        assert await asyncio.gather(*(ask() for _ in range(5))) == [b"a"] * 5
        assert server.connections == 5
        assert await ask() == b"a"
    assert server.connections == 5


async def test_chunks_come_as_they_are_written(connections: KeptConnections) -> None:
    more = asyncio.Event()

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n")
        await more.wait()
        writer.write(b"3\r\ntwo\r\n0\r\n\r\n")

    async with serving(answer) as server, connections.post(server.url, b"{}") as reply:
        seen = []
        async for chunk in reply.chunks():
            seen.append(chunk)
            more.set()
    assert seen == [b"one", b"two"]


async def test_a_body_without_a_length_ends_with_its_connection(
    connections: KeptConnections,
) -> None:
    async with serving(writes(b"HTTP/1.1 200 OK\r\n\r\nall", b" of it", close=True)) as server:
        async with connections.post(server.url, b"{}") as answer:
            assert await answer.read() == b"all of it"
        async with connections.post(server.url, b"{}") as answer:
            assert await answer.read() == b"all of it"
    assert server.connections == 2


@pytest.mark.parametrize(
    "pieces",
    [
        (),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf",),
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 10\r\n\r\nhalf",),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n",),
        (b"what?\r\n\r\n",),
    ],
    ids=["nothing", "half", "half of the last", "no last chunk", "no HTTP"],
)
async def test_an_answer_that_breaks_off_is_a_connection_error(
    connections: KeptConnections, pieces: tuple[bytes, ...]
) -> None:
    async with serving(writes(*pieces, close=True)) as server:
        with pytest.raises(ConnectionError):
            async with connections.post(server.url, b"{}") as answer:
                await answer.read()


async def test_nobody_listening_is_a_connection_error(connections: KeptConnections) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionError, match="cannot connect to"):
            async with connections.post(f"http://127.0.0.1:{taken.getsockname()[1]}/", b"{}"):
                pass


async def test_a_caller_that_fails_closes_its_connection(connections: KeptConnections) -> None:
    async with serving(writes(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")) as server:
        with pytest.raises(KeyError):
            async with connections.post(server.url, b"{}"):
                raise KeyError
        async with connections.post(server.url, b"{}") as answer:
            assert await answer.read() == b"hi"
    assert server.connections == 2


async def test_the_rest_of_an_answer_that_nobody_reads_keeps_its_connection(
    connections: KeptConnections,
) -> None:
    rest = asyncio.Event()

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nfirst")
        await rest.wait()
        writer.write(b".")

    async with serving(answer) as server:
        async with connections.post(server.url, b"{}") as left:
            assert await anext(left.chunks()) == b"first"
        rest.set()
        assert await left.read() == b""  # it is complete
        async with connections.post(server.url, b"{}") as again:
            assert await again.read() == b"first."
    assert server.connections == 1


async def test_a_connection_that_idled_long_is_not_used_again(
    connections: KeptConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "IDLE_S", 0.0)
    async with serving(writes(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")) as server:
        for _ in range(2):
            async with connections.post(server.url, b"{}") as answer:
                await answer.read()
    assert server.connections == 2


# -- pace ------------------------------------------------------------------------------------


async def test_hundreds_go_on_in_several_turns_and_in_their_order() -> None:
    pace = Pace(turn_s=0)  # every turn took too long: fewer and fewer
    went: list[int] = []

    async def go(i: int) -> None:
        await pace.keep()
        went.append(i)

    tasks = [asyncio.create_task(go(i)) for i in range(50)]
    counts = [0]
    while len(went) < 50:
        await asyncio.sleep(0)
        counts.append(len(went))
    assert went == list(range(50))
    passed = [after - before for before, after in pairwise(counts)]
    assert max(passed) == FIRST
    assert passed[-1] == 1
    await asyncio.gather(*tasks)


async def test_more_go_on_together_while_turns_are_short() -> None:
    pace = Pace(turn_s=60)
    went: list[int] = []

    async def go(i: int) -> None:
        await pace.keep()
        went.append(i)

    tasks = [asyncio.create_task(go(i)) for i in range(400)]
    counts = [0]
    while len(went) < 400:
        await asyncio.sleep(0)
        counts.append(len(went))
    assert max(after - before for before, after in pairwise(counts)) == MOST
    await asyncio.gather(*tasks)


async def test_calls_under_way_go_before_new_ones() -> None:
    pace = Pace(turn_s=0)
    went: list[str] = []

    async def go(name: str) -> None:
        await (pace.enter() if name.startswith("new") else pace.keep())
        went.append(name)

    names = [*(f"new {i}" for i in range(FIRST + 2)), *(f"begun {i}" for i in range(3))]
    await asyncio.gather(*(go(name) for name in names))
    assert went == [*names[:FIRST], *names[-3:], *names[FIRST:-3]]


async def test_who_waits_and_leaves_holds_nobody_up() -> None:
    pace = Pace(turn_s=0)
    tasks = [asyncio.create_task(pace.keep()) for _ in range(FIRST + 2)]
    await asyncio.sleep(0)
    assert not tasks[-2].done()
    tasks[-2].cancel()
    await asyncio.wait_for(tasks[-1], 5)
    await asyncio.wait_for(pace.keep(), 5)


# -- the short way ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/t1/p1/v1/chat/completions"])
async def test_calls_do_not_pass_the_router(
    world: Any, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("routed")

    monkeypatch.setattr(type(router), "__call__", never)
    monkeypatch.setattr(type(world.app.router), "__call__", never)
    world.say("fine")
    body = {"messages": [{"role": "user", "content": "hi"}]}
    async with httpx.AsyncClient(base_url=world.url) as http:
        answer = await http.post(path, json=body)
        refused = await http.post(path, json={"messages": []})
    assert answer.json()["choices"][0]["message"]["content"] == "fine"
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "messages"


@pytest.mark.parametrize("path", ["/a/v1/chat/completions", "/a//v1/chat/completions", "/v1/chat"])
async def test_other_paths_are_the_routers(world: Any, path: str) -> None:
    async with httpx.AsyncClient(base_url=world.url) as http:
        assert (await http.post(path, json={})).status_code in (404, 405)
        assert (await http.get("/v1/chat/completions")).status_code == 405
    assert world.stored() == []


async def test_rollouts_that_begin_together_render_their_prompt_once(
    worlds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await worlds(offload_chars=10)
    renderer = world.gateway.calls.renderer
    rendered: list[Any] = []
    whole = renderer.whole
    monkeypatch.setattr(renderer, "whole", lambda *a: (rendered.append(a), whole(*a))[1])
    body = {"messages": [{"role": "user", "content": "a long story " * 50}]}
    async with httpx.AsyncClient(base_url=world.url) as http:
        answers = await asyncio.gather(
            *(http.post(f"/t{i}/p1/v1/chat/completions", json=body) for i in range(8))
        )
    assert {answer.status_code for answer in answers} == {200}
    assert len(rendered) == 1
    world.check_exact()
