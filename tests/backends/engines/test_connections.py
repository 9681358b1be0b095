"""Requests over kept connections, over real sockets."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from stepwell.backends.engines import connections as module
from stepwell.backends.engines.connections import ConnectionPool, LateWrites

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
async def serving(answer: Answering, tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    server = Server(answer)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls)
    scheme = "http" if tls is None else "https"
    server.url = f"{scheme}://127.0.0.1:{listening.sockets[0].getsockname()[1]}/generate?x=1"
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
async def connections() -> AsyncIterator[ConnectionPool]:
    made = ConnectionPool()
    yield made
    made.close()


async def test_requests_after_one_another_share_a_connection(connections: ConnectionPool) -> None:
    async with serving(writes(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")) as server:
        for _ in range(3):
            assert await connections.request("POST", server.url, [b"{}"]) == (200, b"hi")
    assert server.connections == 1
    assert server.requests[0].startswith(b"POST /generate?x=1 HTTP/1.1\r\nhost: 127.0.0.1:")
    assert server.requests[0].endswith(b"content-length: 2\r\n\r\n{}")


async def test_requests_at_once_have_a_connection_each(connections: ConnectionPool) -> None:
    async def ask() -> bytes:
        return (await connections.request("POST", server.url, [b"{}"]))[1]

    async with serving(writes(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n", b"a")) as server:
        assert await asyncio.gather(*(ask() for _ in range(5))) == [b"a"] * 5
        assert server.connections == 5
        assert await ask() == b"a"
    assert server.connections == 5


async def test_chunks_come_as_they_are_written(connections: ConnectionPool) -> None:
    more = asyncio.Event()

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n")
        await more.wait()
        writer.write(b"3\r\ntwo\r\n0\r\n\r\n")

    seen = []

    def on_data(data: bytes) -> bool:
        seen.append(data)
        more.set()
        return False

    async with serving(answer) as server:
        response = await connections.request("POST", server.url, [b"{}"], on_data=on_data)
    assert seen == [b"one", b"two"]
    assert response == (200, b"")


async def test_the_body_of_a_refusal_is_whole(connections: ConnectionPool) -> None:
    answer = writes(b"HTTP/1.1 400 No\r\ncontent-length: 6\r\n\r\nbe", b"cause")
    async with serving(answer) as server:
        response = await connections.request("POST", server.url, [b"{}"], on_data=refuses)
    assert response == (400, b"because"[:6])


def refuses(data: bytes) -> bool:
    raise AssertionError(data)


async def test_a_body_without_a_length_ends_with_its_connection(
    connections: ConnectionPool,
) -> None:
    async with serving(writes(b"HTTP/1.1 200 OK\r\n\r\nall", b" of it", close=True)) as server:
        assert (await connections.request("POST", server.url, [b"{}"]))[1] == b"all of it"
        assert (await connections.request("POST", server.url, [b"{}"]))[1] == b"all of it"
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
    connections: ConnectionPool, pieces: tuple[bytes, ...]
) -> None:
    async with serving(writes(*pieces, close=True)) as server:
        with pytest.raises(ConnectionError):
            await connections.request("POST", server.url, [b"{}"])


async def test_nobody_listening_is_a_connection_error(connections: ConnectionPool) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionRefusedError, match="cannot connect to"):
            await connections.request(
                "POST", f"http://127.0.0.1:{taken.getsockname()[1]}/", [b"{}"]
            )


async def test_a_name_that_does_not_resolve_is_no_refusal(connections: ConnectionPool) -> None:
    with pytest.raises(ConnectionError, match="cannot connect to") as e:
        await connections.request("GET", "http://nowhere.invalid/")
    assert not isinstance(e.value, ConnectionRefusedError)


async def test_tls_is_spoken_with_servers_whose_certificate_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate(tmp_path))
    answers = writes(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")
    for is_trusted in (False, True):
        if is_trusted:
            monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "server.pem"))
        connections = ConnectionPool()
        async with serving(answers, tls) as server:
            if not is_trusted:
                with pytest.raises(ConnectionError, match="certificate"):
                    await connections.request("POST", server.url, [b"{}"])
                continue
            for _ in range(2):
                assert (await connections.request("POST", server.url, [b"{}"]))[1] == b"hi"
            assert server.connections == 1
        connections.close()


def certificate(folder: Path) -> Path:
    """A key and a certificate of 127.0.0.1 that it signs itself, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "engine")])
    now = datetime.now(UTC)
    address = x509.IPAddress(ip_address("127.0.0.1"))
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    file = folder / "server.pem"
    file.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        + signed.public_bytes(Encoding.PEM)
    )
    return file


async def test_a_reader_that_fails_closes_its_connection(connections: ConnectionPool) -> None:
    def on_data(data: bytes) -> bool:
        raise KeyError(data)

    async with serving(writes(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")) as server:
        with pytest.raises(KeyError, match="hi"):
            await connections.request("POST", server.url, [b"{}"], on_data=on_data)
        assert (await connections.request("POST", server.url, [b"{}"]))[1] == b"hi"
    assert server.connections == 2


async def test_a_cancelled_request_closes_its_connection(connections: ConnectionPool) -> None:
    closed = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        assert await reader.read() == b""
        closed.set()

    async with serving(answer) as server:
        asked = asyncio.create_task(connections.request("POST", server.url, [b"{}"]))
        while not server.requests:  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0.001)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await asyncio.wait_for(closed.wait(), 10)


async def test_whole_answers_are_handed_on_in_turns() -> None:
    turns = []

    async def turn() -> None:
        turns.append(len(server.requests))

    connections = ConnectionPool(turn)
    async with serving(writes(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")) as server:
        for on_data in (None, None, lambda data: False):
            await connections.request("POST", server.url, [b"{}"], on_data=on_data)
    connections.close()
    assert turns == [1, 2]


@pytest.mark.parametrize("ends", [True, False])
async def test_the_rest_of_an_answer_that_nobody_reads_is_waited_for_a_moment(
    connections: ConnectionPool, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    monkeypatch.setattr(module, "REST_S", 60.0 if ends else 0.0)
    rest = asyncio.Event()

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nfirst")
        await rest.wait()
        writer.write(b".")

    async with serving(answer) as server:
        seen = []
        left = await connections.request(
            "POST", server.url, [b"{}"], on_data=lambda data: not seen.append(data)
        )
        assert (left, seen) == ((200, b""), [b"first"])
        if ends:
            rest.set()
        await asyncio.sleep(0.05)
        rest.set()
        assert (await connections.request("POST", server.url, [b"{}"]))[1] == b"first."
    assert server.connections == (1 if ends else 2)


async def test_of_several_connections_each_that_idled_long_is_not_used_again(
    connections: ConnectionPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one beneath another that was used just now and is gone."""
    monkeypatch.setattr(module, "IDLE_S", 0.4)

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_second = server.connections == 2 and len(server.requests) == 2
        if is_second:
            await asyncio.sleep(0.5)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        if is_second:
            writer.close()

    async with serving(answer) as server:
        both = (connections.request("POST", server.url) for _ in range(2))
        await asyncio.gather(*both)
        await asyncio.sleep(0.05)
        await connections.request("POST", server.url)
        assert server.connections == 3


async def test_a_connection_that_idled_long_is_not_used_again(
    connections: ConnectionPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.0)
    async with serving(writes(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")) as server:
        for _ in range(2):
            await connections.request("POST", server.url, [b"{}"])
    assert server.connections == 2


class Written(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.pieces.append(bytes(data))

    def is_closing(self) -> bool:
        return self.is_closed


async def test_what_one_turn_of_the_loop_writes_goes_out_at_its_end_before_new_tasks() -> None:
    late, first, second = LateWrites(), Written(), Written()
    late.add(first, b"1")
    late.add(second, b"2")
    seen: list[list[bytes]] = []

    async def look() -> None:
        seen.append([*first.pieces, *second.pieces])

    task = asyncio.create_task(look())
    assert late.has(first)
    assert (first.pieces, second.pieces) == ([], [])
    await task
    assert seen == [[b"1", b"2"]]
    assert not late.has(first)
    late.add(first, b"3")
    late.flush()
    assert first.pieces == [b"1", b"3"]


async def test_what_a_lost_connection_was_to_carry_is_dropped() -> None:
    late, lost, other = LateWrites(), Written(), Written()
    late.add(lost, b"lost")
    late.add(other, b"kept")
    lost.is_closed = True
    await asyncio.sleep(0)
    assert (lost.pieces, other.pieces) == ([], [b"kept"])
