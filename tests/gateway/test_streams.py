"""A stream whose client reads slowly: what the gateway holds for it, and what others notice."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest

from stepwell.gateway.dialects.base import PIECE_BYTES, Exchange, Parsed
from stepwell.gateway.errors import EngineError
from stepwell.gateway.http_protocol import HttpProtocol
from stepwell.gateway.prompt import ChatRequest
from stepwell.gateway.reply.parser import ReasoningDelta
from stepwell.gateway.trajectory.calls import Call, LiveCall
from tests.gateway.conftest import Sampled
from tests.gateway.raw import ENDS, Raw, until

N_WORDS = 600
SOCKET_BYTES = 65_536
"""asyncio's high-water mark of a transport: what is there before a writer is told to wait."""


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[HttpProtocol]:
    """Connections of clients, for which the system buffers next to nothing."""
    made: list[HttpProtocol] = []
    begin = HttpProtocol.connection_made

    def connection_made(self: HttpProtocol, transport: Any) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        made.append(self)
        begin(self, transport)

    monkeypatch.setattr(HttpProtocol, "connection_made", connection_made)
    return made


def held_bytes(connections: list[HttpProtocol]) -> int:
    """Bytes that wait in the gateway for some client to read."""
    return max(c.transport.get_write_buffer_size() for c in connections if not c.is_lost)


def texts(path: str, data: bytes) -> str:
    """The text of a stream's answer."""
    text = ""
    for event in data.split(b"\n\n"):
        _, _, payload = event.rpartition(b"data: ")
        if not payload.startswith(b"{"):
            continue
        said = json.loads(payload)
        match path.rpartition("/")[2].rpartition(":")[2]:
            case "completions" if "chat" in path:
                text += "".join(c["delta"].get("content") or "" for c in said["choices"])
            case "completions":
                text += "".join(c["text"] for c in said["choices"])
            case "responses" if said["type"] == "response.output_text.delta":
                text += said["delta"]
            case "messages" if said["type"] == "content_block_delta":
                text += said["delta"]["text"]
            case "generateContent":
                text += "".join(p["text"] for p in said["candidates"][0]["content"]["parts"])
    return text


def body_of(answer: bytes) -> bytes:
    """The pieces of a chunked body, joined."""
    rest, body = answer.partition(b"\r\n\r\n")[2], b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        if not (n := int(size, 16)):
            return body
        body, rest = body + rest[:n], rest[n + 2 :]


@pytest.mark.slow
@pytest.mark.parametrize("path", ENDS)
async def test_a_client_that_does_not_read_holds_up_neither_its_call_nor_others_and_gets_it_all(
    worlds: Callable[..., Any], connections: list[HttpProtocol], path: str
) -> None:
    world = await worlds(served_model_name="m" * 500)  # in every event
    world.engine.incremental = True
    said = "word " * N_WORDS
    world.say(said)
    limits = {"chat/completions": "max_tokens", "responses": "max_output_tokens"}
    most = {limits.get(path, "max_tokens"): 5 * N_WORDS}
    if path.endswith("generateContent"):
        most = {"generationConfig": {"maxOutputTokens": 5 * N_WORDS}}
    raw = await Raw.send(world, path, stream=True, receive_bytes=4096, **most)
    await until(lambda: len(world.stored()) == 1)
    assert 0 < held_bytes(connections) <= SOCKET_BYTES + 2 * PIECE_BYTES
    client = await world.client("t2")
    answer = await client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "hi"}]
    )
    assert answer.choices[0].message.content == "fine"
    # What came meanwhile is not written at once when there is room again.
    while len(raw.seen) < 100_000:
        raw.seen += await asyncio.get_running_loop().sock_recv(raw.connection, 1 << 12)
    await asyncio.sleep(0.05)
    assert held_bytes(connections) <= SOCKET_BYTES + 2 * PIECE_BYTES
    seen = await raw.read_all(True)
    raw.close()
    assert texts(path, body_of(seen)) == said
    assert ENDS[path][1] in seen


async def test_tokens_that_come_together_go_out_in_one_piece(worlds: Callable[..., Any]) -> None:
    world = await worlds()
    world.engine.burst = 8
    world.engine.script.append(Sampled(world.ids("a b c d e f g h i j k l m n o p")))
    raw = await Raw.send(world, stream=True)
    seen = await raw.read_all(True)
    raw.close()
    pieces = [p for p in seen.partition(b"\r\n\r\n")[2].split(b"\r\n") if b"data: " in p]
    assert len(pieces) < 16
    assert texts("chat/completions", body_of(seen)) == "a b c d e f g h i j k l m n o p"


async def test_a_failure_behind_deltas_that_show_nothing_is_told_at_once() -> None:
    # A client without room to write to, and a thought that it did not ask for.
    call = Call(uid="c", created=0, retry=b"", body=None, is_retry=False)
    request = ChatRequest(messages=[], stream=True)
    request.ids = np.array([1], np.int32)
    live = LiveCall(call, request, "test", cast(Any, None))
    live.state, live.deltas, live.error = "failed", [ReasoningDelta("hm")], EngineError("gone")
    exchange = Exchange(
        Mock(), Parsed(request), [Mock()], [live], model="m", tokenizer=Mock(), keepalive_s=60
    )
    writer, connection = Mock(), Mock()
    writer.begin.return_value = writer.delta.return_value = b""
    writer.failed.return_value = b"failed"
    connection.drain = AsyncMock()
    async with asyncio.timeout(5):
        assert await exchange.write(lambda: writer, connection) == b"failed"
    connection.write_piece.assert_not_called()
