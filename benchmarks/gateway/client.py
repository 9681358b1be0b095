"""The load client, a process of its own and the same for all systems.

    python -P client.py CONVERSATIONS.json    one job a line on standard input, one result a line

Each connection runs one trajectory after the other, turn by turn, as an agent does::

    turn 0   system, user                                ──► answer
    turn 1   system, user, answer, a new user message    ──► answer       … then complete

Conversations are JSON fragments made ahead, so that a request costs one join; answers are not
parsed, only looked through for the text they must hold. Rollouts of a prompt start side by side and
differ from their second turn on. Completing a trajectory is part of the load but no request.

A job's fields are those of `Job`, a result's those of `Result.as_json`. Imports nothing of ours.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httptools
import orjson
import uvloop

COMPLETE = '{"reward":1.0}'


@dataclass(frozen=True, slots=True)
class Conversations:
    """Fragments of JSON arrays of messages: how conversations of one kind begin and go on."""

    heads: list[bytes]
    follow_ups: list[bytes]
    """`,{the answer},{a new message}`"""
    answer: bytes
    """What every answer holds."""
    answer_characters: int

    def body(self, prompt: int, rollout: int, turn: int, *, stream: bool) -> bytes:
        """The request of one turn."""
        n = len(self.follow_ups)
        first = 7919 * prompt + 101 * rollout
        parts = [b'{"model":"bench","messages":[', self.heads[prompt % len(self.heads)]]
        parts += [self.follow_ups[(first + k) % n] for k in range(turn)]
        parts.append(b'],"max_tokens":64,"temperature":1.0')
        parts.append(b',"stream":true}' if stream else b"}")
        return b"".join(parts)


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be sent."""

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
    stream: bool = False
    cpu_pid: int | None = None
    """Of the process whose CPU seconds are read around every turn (with one connection)."""
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


class Rollout(NamedTuple):
    prompt: int
    rollout: int


@dataclass(slots=True)
class Result:
    """What happened. Times are seconds of the monotonic clock."""

    latencies_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    began: float = 0.0
    ended: float = 0.0
    cpu_s: list[list[float]] = field(default_factory=list)
    """Of the watched process: by trajectory, by turn."""
    seen: list[list[tuple[float, int]]] = field(default_factory=list)
    """By stream: when how many characters of its text had arrived."""
    sent: list[float] = field(default_factory=list)
    """When each stream was asked for."""

    def as_json(self) -> bytes:
        return orjson.dumps(self)


class Load:
    """The rollouts that no connection has taken yet."""

    def __init__(self, job: Job, conversations: Conversations) -> None:
        self.job = job
        self.conversations = conversations
        self.result = Result()
        self.left: Iterator[Rollout] = itertools.starmap(
            Rollout, itertools.product(range(job.prompts), range(job.rollouts))
        )
        self.running = job.connections
        self.ended = asyncio.get_running_loop().create_future()

    def connection_done(self) -> None:
        self.running -= 1
        if self.running == 0 and not self.ended.done():
            self.ended.set_result(None)

    def fail(self, what: str) -> None:
        self.result.errors.append(what)


class Connection(asyncio.Protocol):
    """One agent after the other."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._job = load.job
        self._transport: Any = None
        self._parser = httptools.HttpResponseParser(self)
        self._rollout = Rollout(0, 0)
        self._turn = 0
        self._completing = False
        self._sent = 0.0
        self._cpu = 0.0
        self._body: list[bytes] = []
        self._text = ""
        self._buffer = b""
        self._done = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._next_rollout()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done:
            self._load.fail(f"connection lost ({exc})")
            self._finish()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as e:
            self._load.fail(f"no HTTP: {e}")
            self._finish()

    # -- what is sent ------------------------------------------------------------------------

    def _next_rollout(self) -> None:
        rollout = next(self._load.left, None)
        if rollout is None or self._is_late():
            self._finish()
            return
        self._rollout, self._turn = rollout, 0
        if self._job.cpu_pid is not None:
            self._load.result.cpu_s.append([])
            self._cpu = cpu_seconds(self._job.cpu_pid)
        self._send_turn()

    def _send_turn(self) -> None:
        job, (prompt, rollout) = self._job, self._rollout
        body = self._load.conversations.body(
            job.first_prompt + prompt, rollout, self._turn, stream=job.stream
        )
        if job.stream:
            self._load.result.seen.append([])
            self._text = ""
            self._buffer = b""
        self._send(job.path, body)
        if job.stream:
            self._load.result.sent.append(self._sent)

    def _send(self, path: str, body: bytes) -> None:
        uid, prompt_uid = self._uids()
        head = (
            f"POST {path.format(trajectory=uid, prompt=prompt_uid)} HTTP/1.1\r\n"
            f"host: 127.0.0.1\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        ).encode()
        self._sent = time.perf_counter()
        self._transport.write(head + body)

    def _uids(self) -> tuple[str, str]:
        prompt, rollout = self._rollout
        return f"{self._job.name}-{prompt}-{rollout}", f"{self._job.name}-{prompt}"

    def _finish(self) -> None:
        if not self._done:
            self._done = True
            self._transport.close()
            self._load.connection_done()

    # -- what arrives (called by the parser) ---------------------------------------------------

    def on_body(self, body: bytes) -> None:
        if self._job.stream and not self._completing:
            self._read_events(body)
        else:
            self._body.append(body)

    def on_message_complete(self) -> None:
        now = time.perf_counter()
        body = b"".join(self._body)
        self._body.clear()
        status = self._parser.get_status_code()
        if status != 200:
            self._load.fail(f"{status}: {body[:300]!r}")
            self._finish()
            return
        if self._completing:
            self._completing = False
            self._next_rollout()
            return
        self._load.result.latencies_s.append(now - self._sent)
        if not self._is_answer(body):
            self._load.fail(f"another answer: {(self._text or body[:300])!r}")
        if self._job.pause_s:
            asyncio.get_running_loop().call_later(self._job.pause_s, self._go_on)
        else:
            self._go_on()

    def _is_answer(self, body: bytes) -> bool:
        expected = self._load.conversations
        if self._job.stream:
            return len(self._text) == expected.answer_characters
        return expected.answer in body

    def _go_on(self) -> None:
        if self._job.cpu_pid is not None:
            before, self._cpu = self._cpu, cpu_seconds(self._job.cpu_pid)
            self._load.result.cpu_s[-1].append(self._cpu - before)
        self._turn += 1
        if self._turn < self._job.turns and not self._is_late():
            self._send_turn()
        elif self._job.complete_path is not None:
            self._completing = True
            self._send(self._job.complete_path, self._job.complete_body.encode())
        else:
            self._next_rollout()

    def _is_late(self) -> bool:
        duration_s = self._job.duration_s
        return duration_s is not None and time.perf_counter() > self._load.result.began + duration_s

    def _read_events(self, data: bytes) -> None:
        now = time.perf_counter()
        *events, self._buffer = (self._buffer + data).split(b"\n\n")
        before = len(self._text)
        for event in events:
            if event.startswith(b"data: {"):
                for choice in orjson.loads(event[6:])["choices"]:
                    self._text += choice["delta"].get("content") or ""
        if len(self._text) > before:
            self._load.result.seen[-1].append((now, len(self._text)))


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of a process; Linux counts it in nanoseconds."""
    return time.clock_gettime((~pid << 3) | 2)  # CPUCLOCK_SCHED of clock_getcpuclockid(3)


async def run(job: Job, conversations: Conversations) -> Result:
    """All trajectories of a job, to the last one's end."""
    loop = asyncio.get_running_loop()
    load = Load(job, conversations)
    load.result.began = time.perf_counter()

    async def connect(number: int) -> None:
        await asyncio.sleep(number * job.stagger_s)
        port = job.ports[number % len(job.ports)]
        await loop.create_connection(lambda: Connection(load), "127.0.0.1", port)

    opened = await asyncio.gather(*map(connect, range(job.connections)), return_exceptions=True)
    for failure in opened:
        if isinstance(failure, BaseException):
            load.fail(f"no connection: {failure!r}")
            load.connection_done()
    try:
        await asyncio.wait_for(load.ended, job.limit_s)
    except TimeoutError:
        load.fail(f"{load.running} connections were still waiting after {job.limit_s:g} s")
    load.result.ended = time.perf_counter()
    return load.result


def main(conversations: Path) -> None:
    kinds = {
        kind: Conversations(
            [head.encode() for head in made["heads"]],
            [follow_up.encode() for follow_up in made["follow_ups"]],
            made["answer"].encode(),
            made["answer_characters"],
        )
        for kind, made in orjson.loads(conversations.read_bytes()).items()
    }
    gc.collect()
    gc.freeze()
    gc.disable()  # nothing here is cyclic but connections
    for line in sys.stdin:
        job = Job(**orjson.loads(line))
        result = uvloop.run(run(job, kinds[job.kind]))
        sys.stdout.buffer.write(result.as_json() + b"\n")
        sys.stdout.buffer.flush()
        gc.collect()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
