"""Bounds on what a connection costs before anybody knows whose it is."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import suppress
from typing import Any

import aiohttp
import pytest

from stepwell.gateway.config import Tuning
from stepwell.gateway.http_protocol import HttpProtocol
from tests.builders import until
from tests.helpers import instances

KEY = "an-admin-key-of-32-characters-00"
AUTHORISED = f"authorization: Bearer {KEY}\r\n"
HEAD = "GET /statistics HTTP/1.1\r\nhost: localhost\r\n"


class Wire:
    """A connection on which anything may be written."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def to(cls, world: Any) -> Wire:
        host, _, port = world.url.removeprefix("http://").partition(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    async def send(self, text: str | bytes, times: int = 1) -> int:
        """Send the text `times` times; return how often it could be sent before the peer closed."""
        data = text.encode() if isinstance(text, str) else text
        for n in range(times):
            try:
                self.writer.write(data)
                await self.writer.drain()
            except ConnectionError:
                return n
            await asyncio.sleep(0)
        return times

    async def answer(self) -> str:
        """Everything up to the end of the connection."""
        async with asyncio.timeout(20):
            try:
                return (await self.reader.read()).decode()
            except ConnectionError:
                return ""

    async def one(self) -> tuple[int, str]:
        """Status and body of one answer on a connection that stays."""
        async with asyncio.timeout(20):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            length = int(head.lower().partition("content-length: ")[2].split()[0])
            return int(head.split()[1]), (await self.reader.readexactly(length)).decode()


@pytest.mark.parametrize(
    "begin",
    [
        HEAD + "x-long: ",
        HEAD,
        "GET /",
        # Trailers are headers, too, and come behind a body that was refused already.
        "POST /generate HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        "1\r\nx\r\n0\r\nx-long: ",
        # The name of a chunk's extension never ends.
        "POST /generate HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n1;x=",
    ],
)
async def test_a_header_without_end_is_cut_off(worlds: Any, begin: str) -> None:
    world = await worlds(admin_keys=[KEY], tuning=Tuning(max_header_bytes=4096))
    wire = await Wire.to(world)
    piece = "x: y\r\n" * 100 if begin == HEAD else "x" * 600
    await wire.send(begin)
    assert await wire.send(piece, 100_000) < 100_000  # 60 MB
    answer = await wire.answer()
    assert "431" in answer or "401" in answer or not answer
    async with aiohttp.ClientSession() as session, session.get(f"{world.url}/health") as response:
        assert response.status == 200


async def test_a_header_is_refused_just_beyond_the_limit(worlds: Any) -> None:
    world = await worlds(tuning=Tuning(max_header_bytes=4096))
    for n, status in ((3900, "200"), (4200, "431")):
        wire = await Wire.to(world)
        await wire.send(f"{HEAD}x: {'y' * n}\r\nconnection: close\r\n\r\n")
        answer = await wire.answer()
        assert answer.split()[1] == status
        assert status == "200" or "headers exceed 4096 bytes" in answer


async def test_long_bodies_and_many_requests_are_no_headers(worlds: Any) -> None:
    world = await worlds(tuning=Tuning(max_header_bytes=1024))
    wire = await Wire.to(world)
    body = b'{"metadata": {"text": "' + b"x" * 300_000 + b'"}}'
    request = (
        b"POST /init_trajectory HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )
    pieces = (
        b"POST /init_trajectory HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    )
    pieces += b"transfer-encoding: chunked\r\n\r\n"
    pieces += b"".join(b"1\r\n%c\r\n" % c for c in b"{" + b" " * 20_000 + b"}") + b"0\r\n\r\n"
    for sent in (request, pieces, request):
        await wire.send(sent)
        assert (await wire.one())[0] == 200
    wire.writer.close()


@pytest.mark.parametrize("begin", ["", "GET /hea", HEAD + "x: y"])
async def test_a_header_that_does_not_arrive_in_time_is_given_up(worlds: Any, begin: str) -> None:
    world = await worlds(tuning=Tuning(header_timeout_s=1))
    wire = await Wire.to(world)
    await wire.send(begin)
    answer = await wire.answer()
    if begin:
        assert answer.startswith("HTTP/1.1 408 Request Timeout")
        assert "did not arrive within 1 s" in answer
    else:
        assert answer == ""


async def test_a_connection_that_was_used_waits_for_the_next_request(worlds: Any) -> None:
    world = await worlds(tuning=Tuning(header_timeout_s=1))
    wire = await Wire.to(world)
    for idle_s in (1.2, 0.0):
        await wire.send(HEAD + "\r\n")
        assert (await wire.one())[0] == 200
        await asyncio.sleep(idle_s)
    await wire.send("GET /hea")
    assert (await wire.answer()).startswith("HTTP/1.1 408")


async def test_the_rest_of_a_refused_body_is_not_waited_for(worlds: Any) -> None:
    world = await worlds(admin_keys=[KEY])
    wire = await Wire.to(world)
    await wire.send("POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9000\r\n\r\n")
    assert (await wire.one())[0] == 401
    assert await wire.send("x", 1) == 1
    assert await wire.answer() == ""


async def test_a_peer_without_a_key_has_so_many_connections_and_one_with_a_key_more(
    worlds: Any,
) -> None:
    world = await worlds(admin_keys=[KEY], tuning=Tuning(max_unauthenticated_connections=2))
    known = []
    for _ in range(5):
        wire = await Wire.to(world)
        await wire.send(HEAD + AUTHORISED + "\r\n")
        assert (await wire.one())[0] == 200
        known.append(wire)
    strangers = [await Wire.to(world) for _ in range(2)]
    for wire in strangers:  # neither an open path nor a refusal makes them known
        await wire.send("GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await wire.one())[0] == 200
        await wire.send(HEAD + "\r\n")
        assert (await wire.one())[0] == 401
    newcomer = await Wire.to(world)  # the oldest stranger makes room for it
    answer = await strangers[0].answer()
    assert answer.startswith("HTTP/1.1 503")
    assert "too many connections without a valid key" in answer
    for wire in (newcomer, known[0]):
        await wire.send(HEAD + AUTHORISED + "\r\n")
        assert (await wire.one())[0] == 200
    again = await Wire.to(world)
    await strangers[1].send("GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert (await strangers[1].one())[0] == 200  # there is room for both
    for wire in (*known, newcomer, strangers[1], again):
        wire.writer.close()


async def test_without_keys_nobody_is_a_stranger(worlds: Any) -> None:
    world = await worlds(tuning=Tuning(max_unauthenticated_connections=2))
    wires = [await Wire.to(world) for _ in range(5)]
    for wire in wires:
        await wire.send(HEAD + "\r\n")
        assert (await wire.one())[0] == 200
        wire.writer.close()


async def test_a_crowd_of_silent_connections_keeps_nobody_with_a_key_out(worlds: Any) -> None:
    world = await worlds(admin_keys=[KEY], tuning=Tuning(max_unauthenticated_connections=8))
    crowd = [await Wire.to(world) for _ in range(20)]
    for _ in range(3):
        wire = await Wire.to(world)
        await wire.send(HEAD + AUTHORISED + "\r\n")
        assert (await wire.one())[0] == 200
        wire.writer.close()
    for wire in crowd:
        wire.writer.close()


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize(
    "offer",
    [
        "connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABk\r\nUpgrade: h2c",
        "connection: upgrade\r\nupgrade: h2c",
        "Connection: Upgrade\r\nUpgrade: TLS/1.0, HTTP/2.0",
        "upgrade:websocket\r\nconnection: keep-alive, Upgrade",
        "UPGRADE: IRC/6.9\r\nCONNECTION: UPGRADE",
    ],
)
async def test_an_upgrade_that_is_not_taken_is_ignored(
    worlds: Any, offer: str, is_chunked: bool
) -> None:
    world = await worlds()
    wire = await Wire.to(world)
    for uid, n_cut in (("a", 0), ("b", 10), ("c", 1), ("d", 10_000)):
        body = f'{{"trajectory_uid": "{uid}"}}'
        framing = f"content-length: {len(body)}"
        if is_chunked:
            body = f"{len(body):x}\r\n{body}\r\n0\r\n\r\n"
            framing = "transfer-encoding: chunked"
        head = (
            "POST /init_trajectory HTTP/1.1\r\nhost: localhost\r\n"
            f"content-type: application/json\r\n{offer}\r\n{framing}\r\n\r\n"
        )
        at = head.lower().index("upgrade: " if "upgrade: " in head.lower() else "upgrade:") + n_cut
        for piece in ((head + body)[:at], (head + body)[at:]):
            if piece:
                await wire.send(piece)
                await asyncio.sleep(0.02)
        status, answer = await wire.one()
        assert (status, f'"trajectory_uid":"{uid}"' in answer) == (200, True), answer
    wire.writer.close()


async def test_no_byte_of_a_body_is_kept_for_a_stranger(worlds: Any) -> None:
    world = await worlds(admin_keys=[KEY], max_body_bytes=10_000_000)
    wire = await Wire.to(world)
    await wire.send("POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9000000\r\n\r\n")
    # The answer comes before the body does.
    assert (await wire.one())[0] == 401
    wire.writer.close()


def call_of(body: dict[str, Any], at: str = "/t1/p1") -> bytes:
    data = json.dumps({"model": "m", **body}).encode()
    head = (
        f"POST {at}/v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def connections() -> list[HttpProtocol]:
    """The server's side of what is connected."""
    found = instances(HttpProtocol)
    return [each for each in found if each.transport is not None and not each.is_lost]


async def test_each_request_on_a_connection_is_answered_at_its_own_address(worlds: Any) -> None:
    world = await worlds()
    wire = await Wire.to(world)
    said = {"messages": [{"role": "user", "content": "hi"}]}
    for uid in ("t1", "t2", "t2", "t1"):
        world.say(f"for {uid}")
        await wire.send(call_of(said, f"/{uid}/p1"))
        status, body = await wire.one()
        assert (status, json.loads(body)["choices"][0]["message"]["content"]) == (200, f"for {uid}")
        for at, found in (("/health", 200), (f"/{uid}/p1/v1/chat/completions", 405)):
            await wire.send(f"GET {at} HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert (await wire.one())[0] == found
    assert [len(world.stored(uid)) for uid in ("t1", "t2")] == [2, 2]
    wire.writer.close()


@pytest.mark.parametrize("n_pieces", [1, 2, 40])
async def test_a_body_in_pieces_is_the_same_call(worlds: Any, n_pieces: int) -> None:
    world = await worlds()
    wire = await Wire.to(world)
    world.say("whole")
    data = call_of({"messages": [{"role": "user", "content": "x" * 4000}]})
    head, _, body = data.partition(b"\r\n\r\n")
    await wire.send(head + b"\r\nexpect: 100-continue\r\n\r\n")
    assert await wire.reader.readexactly(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
    size = len(body) // n_pieces + 1
    for at in range(0, len(body), size):
        await wire.send(body[at : at + size])
        await asyncio.sleep(0.002)
    assert (await wire.one())[0] == 200
    (step,) = world.stored()
    assert step.metadata["messages"][0]["content"] == "x" * 4000
    wire.writer.close()


@pytest.mark.parametrize("n_first", [1, 20_000, 100_000, 200_000])
async def test_a_client_that_leaves_behind_a_long_body_is_noticed(
    worlds: Any, n_first: int
) -> None:
    world = await worlds()
    gate = asyncio.Event()
    world.say("x", gate=gate)
    wire = await Wire.to(world)
    data = call_of({"messages": [{"role": "user", "content": "hi"}], "user": "x" * 300_000})
    await wire.send(data[:n_first])
    await asyncio.sleep(0.05)
    await wire.send(data[n_first:])
    await until(world.engine.arrived.is_set, 20)
    wire.writer.close()
    try:
        await until(lambda: world.gateway.calls.counts["disconnected"] == 1, 20)
    finally:
        gate.set()


async def test_requests_that_come_faster_than_they_are_answered_wait_in_the_socket(
    worlds: Any,
) -> None:
    world = await worlds(admin_keys=[KEY])
    wire = await Wire.to(world)
    refused = call_of({})
    n_at_once = 1 + (1 << 18) // len(refused)
    sending = asyncio.create_task(wire.send(refused * 200, 5 * n_at_once // 200))
    most = 0
    for _ in range(30):
        await asyncio.sleep(0.01)
        most = max(most, *(len(each.pipeline) for each in connections()))
    wire.writer.transport.abort()
    with suppress(ConnectionError):
        await sending
    assert 0 < most < 2 * n_at_once


async def test_errors_that_nobody_reads_are_not_piled_up(worlds: Any) -> None:
    world = await worlds(admin_keys=[KEY])
    wire = await Wire.to(world)
    wire.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    wire.reader._transport.pause_reading()  # type: ignore[attr-defined]  # no public way
    await until(connections)
    (connection,) = connections()
    served = connection.transport.get_extra_info("socket")
    served.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    sending = asyncio.create_task(wire.send(call_of({}) * 100, 60))
    most = 0
    for _ in range(300):
        await asyncio.sleep(0.005)
        most = max(most, connection.transport.get_write_buffer_size())
    wire.writer.transport.abort()
    with suppress(ConnectionError):
        await sending
    assert 0 < most < 100_000


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_stream_is_chunked_where_http_knows_chunks(world: Any, version: str) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True})
    wire = await Wire.to(world)
    await wire.send(
        f"POST /t1/p1/v1/chat/completions HTTP/{version}\r\nhost: localhost\r\n"
        "connection: close\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n{body}"
    )
    head, _, events = (await wire.answer()).partition("\r\n\r\n")
    assert ("transfer-encoding: chunked" in head) is (version == "1.1")
    if version == "1.0":
        assert events.startswith("data: {")
        assert events.endswith("data: [DONE]\n\n")
        assert "\r" not in events
    assert len(world.stored()) == 1
