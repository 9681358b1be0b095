"""The load client, a process of its own and the same for all systems.

    python -P client.py CONVERSATIONS.json    one job a line on standard input, one result a line

Each connection runs one trajectory after the other, turn by turn, as an agent does::

    turn 0   system, user                                ──► answer
    turn 1   system, user, answer, a new user message    ──► answer       … then complete

Conversations are JSON fragments made ahead, so that a request costs one join; answers are not
parsed, only looked through for the text they must hold, and for the id of a tool call, which the
next request names. Rollouts of a prompt start side by side and
differ from their second turn on. Completing a trajectory is part of the load but no request.

A job's fields are those of `Job`, a result's those of `Result`. Imports nothing of ours.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import httptools
import orjson
import uvloop

COMPLETE = '{"reward":1.0}'
CALL_ID = "call_00000000"
"""Stands in fragments for the id that the answer before gave its tool call."""
_CALL_ID = re.compile(rb'"(?:call_)?id": ?"(call_\w+)"')
Pieces: TypeAlias = list[tuple[float, bytes]]
"""A body as it came: when, and what."""


@dataclass(frozen=True, slots=True)
class Conversations:
    """Fragments of JSON arrays of messages: how conversations of one kind begin and go on."""

    heads: list[bytes]
    follow_ups: list[bytes]
    """`,{the answer},{a new message}`"""
    answer: bytes
    """Text that every answer contains."""
    answer_characters: int
    more: bytes = b""
    """Further fields of every request."""
    list_name: str = "messages"
    limit_name: str = "max_tokens"
    calls: bool = False
    """Every answer is a tool call."""

    @classmethod
    def read(cls, file: Path) -> dict[str, Conversations]:
        """Read the conversations of each kind from a bench's file."""
        return {
            kind: cls(
                [head.encode() for head in made["heads"]],
                [follow_up.encode() for follow_up in made["follow_ups"]],
                made["answer"].encode(),
                made["answer_characters"],
                made.get("more", "").encode(),
                **{
                    name: made[name]
                    for name in ("list_name", "limit_name", "calls")
                    if name in made
                },
            )
            for kind, made in orjson.loads(file.read_bytes()).items()
        }

    def body(
        self,
        prompt: int,
        rollout: int,
        turn: int,
        *,
        stream: bool,
        call_ids: Sequence[bytes] = (),
    ) -> bytes:
        """The request of one turn.

        Args:
            call_ids: ids of the tool calls that were answered before, one a turn.
        """
        n = len(self.follow_ups)
        first = 7919 * prompt + 101 * rollout
        parts = [b'{"model":"bench","%b":[' % self.list_name.encode()]
        parts.append(self.heads[prompt % len(self.heads)])
        follow_ups = [self.follow_ups[(first + k) % n] for k in range(turn)]
        if self.calls:
            pairs = zip(follow_ups, call_ids, strict=True)
            follow_ups = [each.replace(CALL_ID.encode(), call_id) for each, call_id in pairs]
        limit = b',"%b":64,"temperature":1.0' % self.limit_name.encode()
        parts += [*follow_ups, b"]", self.more, limit]
        parts.append(b',"stream":true}' if stream else b"}")
        return b"".join(parts)


@dataclass(frozen=True, slots=True)
class Job:
    """Load that the client sends."""

    kind: str
    ports: tuple[int, ...]
    """Connections take turns on them; a trajectory stays on its connection."""
    path: str
    """With {trajectory} and {prompt}."""
    complete_path: str | None
    """None: trajectories stay open."""
    name: str
    """Trajectories and prompts are named after it."""
    connections: int
    prompts: int
    rollouts: int
    turns: int
    first_turn: int = 0
    """Turns before it were sent by a job of the same name, whose trajectories stayed open."""
    stream: bool = False
    cpu_pid: int | None = None
    """Process whose CPU seconds are read around every turn (with one connection)."""
    pause_s: float = 0.0
    """Between two turns."""
    first_prompt: int = 0
    """So that jobs of the same kind send other prompts."""
    complete_body: str = COMPLETE
    stagger_s: float = 0.0
    """Between the beginnings of two connections."""
    duration_s: float | None = None
    """Then connections end after the turn that they are in; None: they run all rollouts."""
    limit_s: float = 240.0
    """No job lasts longer."""


@dataclass(slots=True)
class Result:
    """Outcome of a job. Times are seconds of the monotonic clock."""

    latencies_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    began: float = 0.0
    ended: float = 0.0
    cpu_s: list[list[float]] = field(default_factory=list)
    """CPU seconds of the watched process: by trajectory, by turn."""
    seen: list[list[tuple[float, int]]] = field(default_factory=list)
    """By stream: when how many characters of its text had arrived."""
    sent: list[float] = field(default_factory=list)
    """Times at which the streams were asked for."""


class Connection(asyncio.Protocol):
    """Sends one request at a time. One costs this process 35 µs; by the engines' client it would be
    some 20 more."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: Pieces = []
        self._answered: asyncio.Future[None] | None = None

    async def post(self, path: str, body: bytes) -> Pieces:
        """The body of its answer.

        Raises:
            ConnectionError: the connection is lost.
            ValueError: the answer is no HTTP, or has another status than 200.
        """
        head = (
            f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        ).encode()
        if self._transport.is_closing():
            raise ConnectionError("connection lost")
        self._pieces = []
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(head + body)
        await self._answered
        if (status := self._parser.get_status_code()) != 200:
            raise ValueError(f"{status}: {whole(self._pieces)[:300]!r}")
        return self._pieces

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(ConnectionError(f"connection lost ({exc})"))

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as e:
            self._fail(ValueError(f"no HTTP: {e}"))

    def on_body(self, body: bytes) -> None:
        self._pieces.append((time.perf_counter(), body))

    def on_message_complete(self) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    def _fail(self, error: Exception) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(error)


def whole(pieces: Pieces) -> bytes:
    return b"".join(data for _, data in pieces)


def arrivals(pieces: Pieces) -> list[tuple[float, int]]:
    """Return (time, characters of a stream's text that had arrived) pairs."""
    seen: list[tuple[float, int]] = []
    n, buffer = 0, b""
    for at, data in pieces:
        *events, buffer = (buffer + data).split(b"\n\n")
        before = n
        for event in events:
            if event.startswith(b"data: {"):
                for choice in orjson.loads(event[6:])["choices"]:
                    n += len(choice["delta"].get("content") or "")
        if n > before:
            seen.append((at, n))
    return seen


def cpu_seconds(pid: int | None) -> float:
    """User and system time of all threads of a process; Linux counts it in nanoseconds."""
    # CPUCLOCK_SCHED of clock_getcpuclockid(3)
    return 0.0 if pid is None else time.clock_gettime((~pid << 3) | 2)


class Load:
    """A job, and the rollouts of it that no connection has taken yet."""

    def __init__(self, job: Job, conversations: Conversations) -> None:
        self.result = Result(began=time.perf_counter())
        self._job = job
        self._conversations = conversations
        self._left = itertools.product(range(job.prompts), range(job.rollouts))
        self._until = self.result.began + (job.duration_s or math.inf)

    async def run(self) -> None:
        """All trajectories, to the last one's end."""
        job, result = self._job, self.result
        agents = [asyncio.create_task(self._agent(number)) for number in range(job.connections)]
        done, waiting = await asyncio.wait(agents, timeout=job.limit_s)
        result.ended = time.perf_counter()
        result.errors += [str(error) for agent in done if (error := agent.exception())]
        if waiting:
            still = f"{len(waiting)} connections were still waiting after {job.limit_s:g} s"
            result.errors.append(still)

    async def _agent(self, number: int) -> None:
        """One connection, and trajectory after trajectory on it."""
        job, loop = self._job, asyncio.get_running_loop()
        await asyncio.sleep(number * job.stagger_s)
        port = job.ports[number % len(job.ports)]
        try:
            _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
        except OSError as e:
            raise ConnectionError(f"no connection: {e}") from e
        try:
            for prompt, rollout in self._left:
                if self._is_late():
                    return
                await self._converse(connection, prompt, rollout)
        finally:
            connection.close()

    async def _converse(self, connection: Connection, prompt: int, rollout: int) -> None:
        """One trajectory."""
        job, result = self._job, self.result
        uids = {"trajectory": f"{job.name}-{prompt}-{rollout}", "prompt": f"{job.name}-{prompt}"}
        path, cpu_s, call_ids = job.path.format(**uids), list[float](), list[bytes]()
        cpu = cpu_seconds(job.cpu_pid)
        for turn in range(job.first_turn, job.turns):
            if turn > job.first_turn and self._is_late():
                break
            await self._turn(connection, path, prompt, rollout, turn, call_ids)
            if job.pause_s:
                await asyncio.sleep(job.pause_s)
            before, cpu = cpu, cpu_seconds(job.cpu_pid)
            cpu_s.append(cpu - before)
        result.cpu_s += [cpu_s] if job.cpu_pid is not None else []
        if job.complete_path is not None:
            await connection.post(job.complete_path.format(**uids), job.complete_body.encode())

    async def _turn(
        self,
        connection: Connection,
        path: str,
        prompt: int,
        rollout: int,
        turn: int,
        call_ids: list[bytes],
    ) -> None:
        """One request. The id of the tool call that answers it goes to the end of `call_ids`."""
        job, result, expected = self._job, self.result, self._conversations
        first, stream = job.first_prompt + prompt, job.stream
        body = expected.body(first, rollout, turn, stream=stream, call_ids=call_ids)
        sent = time.perf_counter()
        answer = await connection.post(path, body)
        result.latencies_s.append(time.perf_counter() - sent)
        if job.stream:
            seen = arrivals(answer)
            result.sent.append(sent)
            result.seen.append(seen)
            is_answer = bool(seen) and seen[-1][1] == expected.answer_characters
        else:
            is_answer = expected.answer in whole(answer)
        if expected.calls and is_answer:
            found = _CALL_ID.search(whole(answer))
            call_ids.append(b"" if found is None else found[1])
            is_answer = found is not None
        if not is_answer:
            result.errors.append(f"another answer: {whole(answer)[:300]!r}")

    def _is_late(self) -> bool:
        return time.perf_counter() > self._until


def main(conversations: Path) -> None:
    kinds = Conversations.read(conversations)
    gc.collect()
    gc.freeze()
    gc.disable()  # nothing here is cyclic but connections
    for line in sys.stdin:
        job = Job(**orjson.loads(line))
        load = Load(job, kinds[job.kind])
        uvloop.run(load.run())
        sys.stdout.buffer.write(orjson.dumps(load.result) + b"\n")
        sys.stdout.buffer.flush()
        gc.collect()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
