"""Frames between a client and a pool: what travels, who is let in, and what a peer that sends
something else does to others: nothing."""

from __future__ import annotations

import asyncio
import hmac
import io
import os
import pickle
import struct
import threading

import msgspec
import numpy as np
import psutil
import pytest
import uvloop

from stepwell.datapool import DataPoolClient, DataPoolError, Step
from stepwell.datapool.codec import encoder
from stepwell.datapool.errors import (
    InvalidRequestError,
    InvalidStepError,
    StepConflictError,
    UnknownLeaseError,
)
from stepwell.datapool.ops import Ack, LeaseBatch, OpenGroup, Refusal, Resumed
from stepwell.datapool.questions import GetStatistics
from stepwell.datapool.remote import wire
from stepwell.datapool.remote.shard import LocalShard
from stepwell.datapool.remote.wire import Server, connect
from tests.builders import until
from tests.datapool.pools import HERE, FoundShard, groups_of, serving, settle


class RawPeer:
    """A peer that sends what the test says, byte by byte."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    @classmethod
    async def of(cls, address):
        return cls(*await asyncio.open_unix_connection(address.unix))

    async def frame(self):
        (length,) = struct.unpack("<I", await self.reader.readexactly(4))
        return await self.reader.readexactly(length)

    async def greet(self, address):
        challenge = msgspec.msgpack.decode(await self.frame())
        self.writer.write(framed(hmac.digest(address.secret, challenge, "sha256")))
        return await self.frame()

    async def is_hung_up_on(self):
        """True once the pool ends the connection, whatever it says before."""
        try:
            while await self.reader.read(1 << 16):
                pass
        except ConnectionError:
            pass
        return True

    def close(self):
        self.writer.transport.abort()


def framed(content):
    data = encoder.encode(content)
    return struct.pack("<I", len(data)) + data


async def test_a_lease_of_every_size_arrives_as_it_was_submitted(make_step):
    async with serving() as (_, address):
        client = DataPoolClient([FoundShard(address)])
        steps = [
            make_step(
                f"t{n}", f"p{n}", is_last=True, metadata={"blob": b"x" * n, "list": [1, None]}
            )
            for n in (0, 1, 70_000, 5_000_000)
        ]
        answers = await asyncio.gather(*map(client.submit_step, steps))
        assert answers == ["accepted"] * 4
        assert (await client.lease_batch(batch_size=4)).steps == steps
        await client.close()


def test_a_connection_is_up_on_uvloop_which_gateways_and_actors_run_on(make_step):
    async def run():
        async with serving() as (_, address):
            client = DataPoolClient([FoundShard(address)])
            assert await client.submit_step(make_step("t")) == "accepted"
            await client.close()

    uvloop.run(run())


async def exported(client):
    page = await client.read_trajectories()
    return [*page.unpack()], page.cursor


async def test_every_answer_is_the_same_through_a_socket_as_without_one(make_step):
    async with serving() as (service, address):
        far, near = DataPoolClient([FoundShard(address)]), DataPoolClient([LocalShard(service)])
        await far.open_group("p", 2, metadata={"k": [1, {"a": b"b"}]})
        await far.submit_steps([make_step("a", "p", i, metadata={"i": i}) for i in range(2)])
        await far.complete_trajectory("a", 1.0, metadata={"m": 2})
        await far.submit_step(make_step("o", "open"))
        await far.mark("p", tags=["x"], quality=0.5)
        for ask in (
            lambda c: c.get_statistics("val"),
            lambda c: c.describe(),
            lambda c: c.list_groups(),
            lambda c: c.list_trajectories(tag="x"),
            exported,
            lambda c: c.get_events(),
            lambda c: c.get_events(kinds=["ready", "dropped"], limit=1),
            lambda c: c.dry_run(),
            lambda c: c.mark("p", note="seen"),
            lambda c: c.set_reward("a", 0.25),
            lambda c: c.open_group("p", 2, metadata={"k": [1, {"a": b"b"}]}),
            lambda c: c.lease_batch(),
            lambda c: c.delete(tag="nobody's"),
            lambda c: c.release_leases("val"),
        ):
            here, there = await ask(near), await ask(far)
            assert type(here) is type(there)
            assert repr(here) == repr(there)
        resumed = await far.resume_trajectory("o", "open")
        assert (resumed.outcome, resumed.channel, resumed.is_open) == ("duplicate", "train", True)
        assert [s.trajectory_uid for s in resumed.steps] == ["o"]
        behind = await far.append_step(make_step("o", "open", response_ids=[9, 9]))
        assert isinstance(behind, Resumed)
        assert [s.trajectory_uid for s in behind.steps] == ["o"]
        await far.close()


async def test_two_who_ask_for_the_door_at_once_get_the_same_socket():
    async with serving() as (service, _):
        server = Server(service)
        first, second = await asyncio.gather(server.address(), server.address())
        assert first == second
        assert first.tcp is None, "nobody on another machine asked for it"
        server.close()


# -- who is let in -------------------------------------------------------------------------------


@pytest.fixture
async def open_pool():
    async with serving() as (_, address):
        client = DataPoolClient([FoundShard(address)])
        yield client, address
        # Whatever a peer did, the pool holds nothing of it and serves everybody else.
        assert await groups_of(client, "submitted") == [0]
        assert await client.open_group("fine", 1) == "accepted"
        await client.close()


OPERATION = framed((1, OpenGroup("stolen", 1), 0.0))


async def test_a_peer_without_the_secret_is_not_heard(open_pool):
    _, address = open_pool
    for hello in (
        b"",
        framed(b""),
        framed(b"\0" * 32),
        framed(hmac.digest(b"a guess", b"", "sha256")),
    ):
        peer = await RawPeer.of(address)
        await peer.frame()
        peer.writer.write(hello + OPERATION)
        assert await peer.is_hung_up_on()
        peer.close()


async def test_an_answer_to_another_challenge_lets_nobody_in(open_pool):
    _, address = open_pool
    listener, thief = await RawPeer.of(address), await RawPeer.of(address)
    heard = msgspec.msgpack.decode(await listener.frame())
    await thief.frame()
    thief.writer.write(framed(hmac.digest(address.secret, heard, "sha256")) + OPERATION)
    assert await thief.is_hung_up_on()
    for peer in (listener, thief):
        peer.close()


async def test_a_client_with_a_wrong_secret_is_told_that_the_pool_cannot_be_reached(
    open_pool, monkeypatch
):
    _, address = open_pool
    monkeypatch.setattr("stepwell.datapool.remote.shard.RESTART_S", 0.2)
    stranger = DataPoolClient([FoundShard(address._replace(secret=b"wrong"))])
    with pytest.raises(ConnectionError, match="the pool hung up"):
        await stranger.open_group("stolen", 1)
    await stranger.close()


async def test_a_peer_that_says_nothing_or_too_little_is_hung_up_on(open_pool, monkeypatch):
    monkeypatch.setattr(wire, "HELLO_S", 0.05)
    _, address = open_pool
    for said in (b"", framed(b"\0" * 32)[:-1]):
        peer = await RawPeer.of(address)
        await peer.frame()
        peer.writer.write(said)
        assert await peer.is_hung_up_on()
        peer.close()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 64,
        struct.pack("<I", 1 << 30),  # a stranger may not have the pool wait for a gigabyte
        struct.pack("<I", wire.MAX_HELLO + 1),
        struct.pack("<I", 3) + b"\xc1\xc1\xc1",
        struct.pack("<I", 0),
        framed("hello"),
        framed([1, 2, 3]),
        framed({"proof": 1}),
    ],
)
async def test_garbage_before_the_greeting_ends_the_connection_and_nothing_else(open_pool, garbage):
    _, address = open_pool
    peer = await RawPeer.of(address)
    peer.writer.write(garbage + OPERATION)
    if garbage.startswith(b"GET"):
        peer.writer.write(b"x" * 8192)
    assert await peer.is_hung_up_on()
    peer.close()


@pytest.mark.parametrize(
    "garbage",
    [struct.pack("<I", wire.MAX_FRAME + 1), framed("hello"), framed([]), framed(["a", None, 0])],
)
async def test_garbage_after_the_greeting_ends_the_connection_and_nothing_else(open_pool, garbage):
    _, address = open_pool
    peer = await RawPeer.of(address)
    await peer.greet(address)
    peer.writer.write(garbage)
    assert await peer.is_hung_up_on()
    peer.close()


# -- what is said ----------------------------------------------------------------------------------


class Bomb:
    """Ends the process where it is unpickled."""

    def __reduce__(self):
        return (os._exit, (1,))


@pytest.fixture
async def peer():
    """One that knows the secret, and a client of the same pool."""
    async with serving() as (_, address):
        client = DataPoolClient([FoundShard(address)])
        raw = await RawPeer.of(address)
        await raw.greet(address)
        raw.client = client
        yield raw
        raw.close()
        await client.close()


def object_array():
    buffer = io.BytesIO()
    np.save(buffer, np.array([Bomb()], dtype=object), allow_pickle=True)
    return buffer.getvalue()


def archive():
    buffer = io.BytesIO()
    np.savez(buffer, np.zeros(1))
    return buffer.getvalue()


async def test_a_pickle_is_bytes_like_any_others_and_is_never_read(peer):
    bomb = pickle.dumps(Bomb())
    await peer.client.open_group("bytes", 1, metadata={"m": bomb})
    await peer.client.submit_step(
        Step(prompt_ids=[1], response_ids=[2], trajectory_uid="t", prompt_uid="bytes", is_last=True)
    )
    assert (await peer.client.lease_batch()).groups[0].metadata == {"m": bomb}
    for content in (bomb, object_array(), archive()):
        array = msgspec.msgpack.Ext(1, content)
        peer.writer.write(framed((7, ["OpenGroup", "p", 1, 1, None, {"m": array}], 0.0)))
        number, is_value, answer = msgspec.msgpack.decode(await peer.frame())
        assert (number, is_value, answer[0]) == (7, False, "InvalidRequestError")
    peer.writer.write(struct.pack("<I", len(bomb)) + bomb)
    assert await peer.is_hung_up_on()


async def test_an_operation_that_the_pool_does_not_know_is_told_to_its_caller_alone(peer):
    for number, content in enumerate(
        (
            ["Explode", 1],
            ["OpenGroup"],
            ["OpenGroup", 7, 1],
            ["OpenGroup", "", 1],
            ["LeaseBatch", 0],
            {"op": 1},
            17,
        )
    ):
        peer.writer.write(framed((number, content, 0.0)))
    peer.writer.write(framed((99, GetStatistics("train"), 0.0)))
    found = {}
    while 99 not in found:
        answered, is_value, answer = msgspec.msgpack.decode(await peer.frame())
        found[answered] = is_value or answer[0]
    assert found == dict.fromkeys(range(7), "InvalidRequestError") | {99: True}


async def test_a_request_of_a_wrong_type_is_refused_by_name_and_the_others_go_on():
    """It reaches the pool, because only there its type is looked at."""
    async with serving() as (_, address):
        client = DataPoolClient([FoundShard(address)])
        answers = await asyncio.gather(
            client.open_group("a", 1),
            client.ack(17),
            client.nack(17),
            client.open_group("b", 1, metadata={1: 2}),
            client.open_group("c", 1),
            return_exceptions=True,
        )
        assert (answers[0], answers[4]) == ("accepted", "accepted")
        for refused in answers[1:4]:
            assert isinstance(refused, InvalidRequestError)
            assert "Expected `str`, got" in str(refused)
        await client.close()


async def test_submits_that_come_together_are_one_change_and_answered_each(make_step, tmp_path):
    async with serving(folder=tmp_path / "pool") as (_, address):
        client = DataPoolClient([FoundShard(address)])
        await client.open_group("p", 3)
        waiting = asyncio.create_task(client.lease_batch(timeout_s=None))
        await until(lambda: client.shards[0].is_up)

        async def rows():
            return (await client.describe())["journal"]["rows_written"]

        before = await rows()
        one = make_step("a", "p", is_last=True)
        answers = await asyncio.gather(
            client.submit_steps([one, make_step("b", "p", 0)]),
            client.submit_step(make_step("a", "p", response_ids=[7])),
            client.submit_step(make_step("v"), channel="val"),
            client.submit_step(one),
            client.submit_steps([make_step("b", "p", 1, is_last=True)]),
            client.submit_step(make_step("c", "p", is_last=True)),
            return_exceptions=True,
        )
        assert answers[0] == ["accepted", "accepted"]
        assert isinstance(answers[1], StepConflictError)
        assert answers[2:] == ["accepted", "duplicate", ["accepted"], "accepted"]
        served = (await waiting).groups[0].trajectories
        assert [(t.trajectory_uid, len(t.steps)) for t in served] == [("a", 1), ("b", 2), ("c", 1)]
        statistics = await client.get_statistics("train")
        assert (statistics["steps"]["submitted"], statistics["steps"]["accepted"]) == (6, 4)
        # Prompts of the two groups, steps of "p" before and after those of "val", those of "val",
        # the decision on "p", and its lease.
        assert await rows() - before <= 8
        await client.close()


async def test_a_step_that_cannot_travel_is_refused_by_name_and_fails_alone(make_step):
    async with serving() as (_, address):
        client = DataPoolClient([FoundShard(address)])
        answers = await asyncio.gather(
            client.submit_step(make_step("good")),
            client.submit_step(make_step("bad", metadata={"lock": threading.Lock()})),
            client.submit_step(make_step("worse", metadata={"f": lambda: 0})),
            client.submit_step(make_step("array", metadata={"a": np.array([{}])})),
            client.submit_step(make_step("big", metadata={"n": 1 << 70})),
            client.submit_step(make_step("fine")),
            return_exceptions=True,
        )
        assert (answers[0], answers[5]) == ("accepted", "accepted")
        for uid, refused in zip(("bad", "worse", "array", "big"), answers[1:5], strict=True):
            assert isinstance(refused, InvalidStepError)
            assert f"step {uid!r}[0]" in str(refused)
            assert "pass JSON values, bytes or NumPy arrays" in str(refused)
        await client.close()


async def test_metadata_that_cannot_travel_is_refused_and_fails_alone():
    """The error comes where the metadata is given, or when an operation made by hand is sent."""
    deep: dict = {}
    for _ in range(100_000):
        deep = {"d": deep}
    async with serving() as (_, address):
        client = DataPoolClient([FoundShard(address)])
        answers = await asyncio.gather(
            client.open_group("a", 1),
            client.open_group("b", 1, metadata={"lock": threading.Lock()}),
            client.open_group("c", 1, metadata=deep),
            client.call(OpenGroup("d", 1, metadata={"lock": threading.Lock()})),
            client.call(OpenGroup("e", 1, metadata=deep)),
            client.open_group("f", 1),
            return_exceptions=True,
        )
        assert (answers[0], answers[5]) == ("accepted", "accepted")
        for refused in answers[1:5]:
            assert isinstance(refused, InvalidRequestError)
            assert "pass JSON values, bytes or" in str(refused)
        await client.close()


async def test_errors_keep_their_type_and_foreign_ones_are_told_in_words(make_step):
    async with serving() as (_, address):
        client = DataPoolClient([FoundShard(address)])
        with pytest.raises(UnknownLeaseError) as lease:
            await client.ack("nobody's")
        assert "\n" not in str(lease.value)
        await client.close()
    assert type(Refusal("StepConflictError", "x").error()).__name__ == "StepConflictError"
    for kind in ("ZeroDivisionError", "annotations", "__name__", "nothing"):
        error = Refusal(kind, "no copy of me").error()
        assert type(error) is DataPoolError
        assert str(error) == "no copy of me"


async def test_a_lease_that_is_too_long_to_travel_is_not_held(make_step, monkeypatch):
    async with serving() as (_, address):
        client = DataPoolClient([FoundShard(address)])
        await client.submit_step(make_step("t", is_last=True, metadata={"blob": b"x" * 10_000}))
        monkeypatch.setattr(wire, "MAX_FRAME", 5_000)
        with pytest.raises(DataPoolError, match=r"cannot travel: a message of \d+ bytes is longer"):
            await client.lease_batch()
        assert await groups_of(client, "ready", "leased") == [1, 0]
        await client.close()


async def test_a_caller_that_waits_and_leaves_in_one_breath_is_answered(peer):
    for number in (5, 6):
        leave = framed((number, None, 0.0))
        peer.writer.write(framed((number, LeaseBatch(), 60.0)) + leave + leave)
        answered, is_value, _ = msgspec.msgpack.decode(await peer.frame())
        assert (answered, is_value) == (number, False)
    assert (await peer.client.get_statistics("train"))["waiting"]["consumers"] == 0


# -- torn frames -----------------------------------------------------------------------------------


async def test_a_request_that_comes_in_two_pieces_is_read_wherever_it_is_cut(peer):
    requests = framed((1, GetStatistics("train"), 0.0)) + framed((2, Ack("nobody's"), 0.0))
    for cut in range(len(requests) + 1):
        peer.writer.write(requests[:cut])
        await peer.writer.drain()
        await settle()
        peer.writer.write(requests[cut:])
        answers = [msgspec.msgpack.decode(await peer.frame()) for _ in range(2)]
        assert [(number, is_value) for number, is_value, _ in answers] == [(1, True), (2, False)]


async def test_a_request_that_ends_anywhere_before_its_end_was_not_made():
    async with serving() as (_, address):
        client = DataPoolClient([FoundShard(address)])
        for cut in range(len(OPERATION)):
            peer = await RawPeer.of(address)
            await peer.greet(address)
            peer.writer.write(OPERATION[:cut])
            await peer.writer.drain()
            peer.close()
        await settle()
        assert await groups_of(client, "submitted") == [0]
        await client.close()


async def test_a_client_reads_answers_wherever_they_are_cut(monkeypatch):
    """From a pool that says one byte at a time."""
    async with serving() as (_, address):

        async def answer(reader, writer):
            there, back = await asyncio.open_unix_connection(address.unix)

            async def pump(source, sink, size):
                while data := await source.read(size):
                    sink.write(data)
                    await sink.drain()

            await asyncio.wait(
                [
                    asyncio.create_task(pump(reader, back, 1 << 16)),
                    asyncio.create_task(pump(there, writer, 1)),
                ],
                return_when=asyncio.FIRST_COMPLETED,
            )
            back.transport.abort()

        name = f"\0slow-{os.getpid()}"
        slow = await asyncio.start_unix_server(answer, name)
        client = DataPoolClient([FoundShard(address._replace(unix=name))])
        assert await client.open_group("p", 1) == "accepted"
        assert await groups_of(client, "open") == [1]
        await client.close()
        slow.close()


# -- between machines ------------------------------------------------------------------------------


async def test_a_client_on_another_node_comes_by_tcp_with_the_same_secret(make_step):
    async with serving() as (service, _):
        server = Server(service, HERE)
        without = await server.address()
        address = await server.address("127.0.0.1")
        assert address._replace(tcp=None) == without
        assert await server.address("127.0.0.1") == address
        client = DataPoolClient([FoundShard(address, here="another node")])
        assert await client.submit_step(make_step("t", is_last=True)) == "accepted"
        assert (await client.lease_batch()).steps[0].trajectory_uid == "t"

        reader, writer = await asyncio.open_connection(*address.tcp)
        peer = RawPeer(reader, writer)
        await peer.frame()
        writer.write(framed(b"\0" * 32) + OPERATION)
        assert await peer.is_hung_up_on()
        assert await groups_of(client, "submitted") == [1]
        peer.close()
        await client.close()
        server.close()


async def test_a_pool_that_does_not_listen_for_other_machines_says_so():
    async with serving() as (_, address):
        with pytest.raises(ConnectionError, match=f"node {HERE} does not listen"):
            await connect(address, "another node", print, print)


async def test_somebody_else_who_listens_where_a_pool_was_is_not_taken_for_it(monkeypatch):
    monkeypatch.setattr("stepwell.datapool.remote.shard.RESTART_S", 0.1)
    async with serving() as (_, address):
        for said in (b"SSH-2.0-OpenSSH_9.6\r\n", framed({"a": 1}), framed(b"x" * 32) + framed(17)):

            async def speak(_, writer, said=said):
                writer.write(said)

            other = await asyncio.start_server(speak, "127.0.0.1", 0)
            port = other.sockets[0].getsockname()[1]
            link = FoundShard(address._replace(tcp=("127.0.0.1", port)), here="another node")
            with pytest.raises(ConnectionError, match="the DataPool cannot be reached"):
                await DataPoolClient([link]).get_statistics()
            other.close()


# -- ends ------------------------------------------------------------------------------------------


def n_sockets():
    return len(psutil.Process().net_connections("all"))


async def test_connections_that_ended_leave_no_socket_behind(make_step):
    async with serving() as (_, address):
        before = n_sockets()
        for _ in range(5):
            client = DataPoolClient([FoundShard(address)])
            await client.submit_step(make_step("t"))
            peer = await RawPeer.of(address)
            peer.close()
            await client.close()

        async def none_is_left():
            return n_sockets() <= before

        await until(none_is_left)


async def test_a_consumer_whose_connection_ended_leaves_the_queue(make_step):
    async with serving() as (service, address):
        near = DataPoolClient([LocalShard(service)])
        client = DataPoolClient([FoundShard(address)])
        waiting = asyncio.create_task(client.lease_batch(timeout_s=None))

        async def waits(n):
            return (await near.get_statistics("train"))["waiting"]["consumers"] == n

        await until(lambda: waits(1))
        await client.close()
        with pytest.raises(ConnectionError, match="hung up"):
            await waiting
        await until(lambda: waits(0))
        await near.submit_step(make_step("t", is_last=True))
        assert await near.lease_batch() is not None
