"""How operations reach the pool's actor: together, in order, as bytes, and again if it restarts.

    send ──► waiting ──► one call for many (at most two calls under way) ──► answers
                          │
                          ├─ steps go relative to those sent before them (`payload.py`),
                          │  and once more, whole, if the pool does not know those
                          └─ a call that died with the actor is made again

Owns the way there. What an operation means, and which ones there are, is the client's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from stepwell.datapool.codec import PackedStep, as_bytes, pack
from stepwell.datapool.errors import DataPoolError, UnknownBaseError
from stepwell.datapool.remote.actor import APPLY_STEPS, CUT_OFF_S, Operation, unavailable
from stepwell.datapool.remote.incarnation import KnownPool
from stepwell.datapool.remote.line import Line, LineCall
from stepwell.datapool.types import Step

log = logging.getLogger(__name__)

STEPS_PER_CALL = 256
STEPS_FOR_A_SECOND_CALL = 128
"""A second call leaves before the first is back only if it carries that much."""
MAX_CALLS = 2
PART_BYTES = 94_000
"""Of one argument: below the 100 kB that Ray sends along with a call."""
STEP_OVERHEAD_BYTES = 160
RESTART_S = CUT_OFF_S + 90.0
"""How long a pool that restarts is waited for: until it may take its journal over, and has read it.
A journal of a million steps takes a minute."""
RETRY_S = 0.05
TIP_BYTES = 64 << 20
"""Tokens of recent steps that are kept, to send the next ones relative to them."""

ENDS = frozenset({"complete_trajectory", "abort_trajectory"})
"""Operations after which a trajectory gets no more steps: (trajectory_uid, …, channel)."""


@dataclass(frozen=True, eq=False, slots=True)
class _Letter:
    """An operation on its way, and who waits for its result."""

    operation: Operation
    subjects: frozenset[str]
    """Trajectories or leases that it is about."""
    n_steps: int
    answer: asyncio.Future[Any]


class _Tips:
    """Tokens of the steps sent last, so that what follows them is sent relative to them."""

    def __init__(self) -> None:
        self._tokens: OrderedDict[tuple[str, str, int], tuple[bytes, bytes]] = OrderedDict()
        """(channel, trajectory_uid, step_index) -> prompt ids, response ids"""
        self._indices: dict[tuple[str, str], set[int]] = {}
        """Of each trajectory with tokens here."""
        self._n_bytes = 0

    def pack(self, step: Step, channel: str) -> PackedStep:
        uid, index = step.trajectory_uid, step.step_index
        base = index - 1 if step.parent_index is None else step.parent_index
        packed = pack(step, base, *self._tokens.get((channel, uid, base), _NO_TOKENS))
        if not step.is_last:
            key = (channel, uid, index)
            if key in self._tokens:
                self._discard(key)
            self._tokens[key] = tokens = as_bytes(step.prompt_ids), as_bytes(step.response_ids)
            self._indices.setdefault((channel, uid), set()).add(index)
            self._n_bytes += len(tokens[0]) + len(tokens[1])
            while self._n_bytes > TIP_BYTES:
                self._discard(next(iter(self._tokens)))
        return packed

    def forget(self, step: Step, channel: str) -> None:
        """The pool does not hold this step, or not as it was sent."""
        key = (channel, step.trajectory_uid, step.step_index)
        if key in self._tokens:
            self._discard(key)

    def end(self, trajectory_uid: str, channel: str) -> None:
        """The trajectory gets no more steps."""
        for index in tuple(self._indices.get((channel, trajectory_uid), ())):
            self._discard((channel, trajectory_uid, index))

    def clear(self) -> None:
        self._tokens.clear()
        self._indices.clear()
        self._n_bytes = 0

    def _discard(self, key: tuple[str, str, int]) -> None:
        self._n_bytes -= sum(map(len, self._tokens.pop(key)))
        channel, uid, index = key
        left = self._indices[channel, uid]
        left.discard(index)
        if not left:
            del self._indices[channel, uid]


_NO_TOKENS: tuple[bytes, ...] = ()


class _Parcel:
    """An operation with its steps packed, and its result in the making."""

    def __init__(self, operation: Operation) -> None:
        self._operation = operation
        self.result: Any = None
        self.unknown: list[int] = []
        """Steps that were sent relative to one that the pool does not know."""
        self._sent: list[int] = []

    def pack(self, tips: _Tips | None) -> Operation:
        """What travels; without tips, the `unknown` steps once more and whole."""
        name, arguments = self._operation
        if name in ENDS and tips is not None:
            tips.end(arguments[0], arguments[-1])
        if name != APPLY_STEPS:
            return self._operation
        steps, channel = arguments
        if tips is not None:
            self.result = [None] * len(steps)
        packed: list[tuple[Any, ...]] = []
        self._sent = []
        for i in range(len(steps)) if tips is not None else self.unknown:
            try:
                packed.append(
                    tuple(pack(steps[i]) if tips is None else tips.pack(steps[i], channel))
                )
                self._sent.append(i)
            except DataPoolError as e:
                self.result[i] = e
        return name, (packed, channel)

    def put(self, answer: Any, tips: _Tips) -> None:
        """The pool's answer to what was packed last."""
        name, arguments = self._operation
        if name != APPLY_STEPS or isinstance(answer, DataPoolError):
            self.result = answer
            return
        self.unknown = []
        for i, result in zip(self._sent, answer, strict=True):
            self.result[i] = result
            if isinstance(result, DataPoolError):
                tips.forget(arguments[0][i], arguments[1])
                if isinstance(result, UnknownBaseError):
                    self.unknown.append(i)


class Outbox:
    """Operations on their way. What is about the same trajectory goes in order, one after the
    other; of the rest, two calls may be under way, so that the next one is packed meanwhile."""

    def __init__(self, pool: KnownPool, line: Line) -> None:
        self._pool = pool
        self._line = line
        self._tips = _Tips()
        self._waiting: deque[_Letter] = deque()
        self._n_waiting_steps = 0
        self._away: dict[_Batch, set[str]] = {}
        """Calls under way, and what they are about."""
        self._posted: set[asyncio.Task[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def send(
        self, name: str, *arguments: Any, subjects: Iterable[str], n_steps: int = 1
    ) -> Any:
        """The result of operation `name`; its refusal is raised. Cancelled before it left, it is
        not sent."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._follow(loop)
        answer: asyncio.Future[Any] = loop.create_future()
        self._waiting.append(_Letter((name, arguments), frozenset(subjects), n_steps, answer))
        self._n_waiting_steps += n_steps
        if len(self._waiting) == 1:
            # Behind those who are about to send something, too.
            loop.call_soon(self._dispatch)
        elif self._n_waiting_steps >= STEPS_FOR_A_SECOND_CALL:
            self._dispatch()
        return await answer

    def post(self, name: str, *arguments: Any, subjects: Iterable[str]) -> None:
        """`send` without waiting; `settled` waits. A failure is logged."""
        task = asyncio.ensure_future(self.send(name, *arguments, subjects=subjects))
        self._posted.add(task)
        task.add_done_callback(self._report)

    def _report(self, task: asyncio.Task[Any]) -> None:
        self._posted.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("what was sent to the DataPool without waiting failed: %s", error)

    async def settled(self) -> None:
        """Return once everything posted has its answer."""
        while self._posted:
            await asyncio.wait(self._posted)

    def _follow(self, loop: asyncio.AbstractEventLoop) -> None:
        """What a closed event loop left behind gets no answer, and must hold up nobody."""
        if self._loop is not None and self._loop.is_closed():
            self._waiting.clear()
            self._n_waiting_steps = 0
            self._away.clear()
            self._posted.clear()
        self._loop = loop

    def _dispatch(self) -> None:
        """Start the calls that can start now."""
        while self._waiting and len(self._away) < MAX_CALLS:
            if self._away and self._n_waiting_steps < STEPS_FOR_A_SECOND_CALL:
                return
            letters, subjects = self._collect()
            if not letters:
                return
            batch = _Batch(letters, self._pool, self._line, self._tips)
            self._away[batch] = subjects
            batch.delivery = asyncio.create_task(self._deliver(batch))

    def _collect(self) -> tuple[list[_Letter], set[str]]:
        """The next call's letters: the first ones that no call under way, and no letter left
        behind, has a subject in common with."""
        barred: set[str] = set().union(*self._away.values())
        letters: list[_Letter] = []
        left: list[_Letter] = []
        subjects: set[str] = set()
        n_steps = 0
        while self._waiting and n_steps < STEPS_PER_CALL:
            letter = self._waiting.popleft()
            if letter.answer.cancelled():
                self._n_waiting_steps -= letter.n_steps
            elif barred.isdisjoint(letter.subjects):
                letters.append(letter)
                subjects |= letter.subjects
                n_steps += letter.n_steps
            else:
                left.append(letter)
                barred |= letter.subjects
        self._waiting.extendleft(reversed(left))
        self._n_waiting_steps -= n_steps
        return letters, subjects

    async def _deliver(self, batch: _Batch) -> None:
        try:
            await self._hand_out(batch)
        finally:
            self._away.pop(batch, None)
        self._dispatch()  # unless cancelled: an event loop that ends runs no further call

    async def _hand_out(self, batch: _Batch) -> None:
        """Each letter's result to whoever waits for it. An error that is all theirs, too."""
        try:
            results = await batch.results()
        except Exception as e:  # noqa: BLE001 - whatever went wrong, its producers wait for it
            self._tips.clear()
            if len(batch.letters) > 1 and not isinstance(e, DataPoolError):
                # One producer's operation did not travel (a metadata value that cannot be
                # pickled, say). It must not take the others down; what was applied is a
                # duplicate now.
                for letter in batch.letters:
                    await self._hand_out(_Batch([letter], self._pool, self._line, self._tips))
                return
            results = [e] * len(batch.letters)
        for letter, result in zip(batch.letters, results, strict=True):
            _answer(letter, result)


class _Batch:
    """Letters that travel together: packed and sent when this is made, so that not even one turn
    of a busy event loop is lost."""

    def __init__(self, letters: list[_Letter], pool: KnownPool, line: Line, tips: _Tips) -> None:
        self.letters = letters
        self.delivery: asyncio.Task[None] | None = None
        self._pool = pool
        self._line = line
        self._tips = tips
        self._parcels = [_Parcel(letter.operation) for letter in letters]
        self._n_pieces: list[int] = []
        self._sent: Call | LineCall | Exception
        try:
            self._sent = self._send([parcel.pack(tips) for parcel in self._parcels])
        except Exception as e:  # noqa: BLE001 - raised where it can be answered: `results`
            self._sent = e

    async def results(self) -> list[Any]:
        """Each letter's result. Steps went relative to those before them; once more, whole, if
        the pool does not know those."""
        await self._receive(self._parcels)
        again = [parcel for parcel in self._parcels if parcel.unknown]
        if again:
            self._sent = self._send([parcel.pack(None) for parcel in again])
            await self._receive(again)
        return [parcel.result for parcel in self._parcels]

    def _send(self, operations: list[Operation]) -> Call | LineCall:
        parts, self._n_pieces = _in_parts(operations)
        return begin(self._line, self._pool, "apply", *parts)

    async def _receive(self, parcels: list[_Parcel]) -> None:
        if isinstance(self._sent, Exception):
            raise self._sent
        pieces = iter(await self._sent.answer())
        for parcel, n in zip(parcels, self._n_pieces, strict=True):
            parcel.put(_joined(list(islice(pieces, n))), self._tips)


def _in_parts(operations: list[Operation]) -> tuple[list[list[Operation]], list[int]]:
    """The operations as arguments that Ray sends along with the call (`DataPoolActor.apply`), and
    in how many pieces each of them goes."""
    parts: list[list[Operation]] = [[]]
    n_pieces: list[int] = []
    room = PART_BYTES
    for name, arguments in operations:
        if name != APPLY_STEPS:
            parts[-1].append((name, arguments))
            n_pieces.append(1)
            continue
        tuples, channel = arguments
        piece: list[tuple[Any, ...]] = []
        n = 1
        for packed in tuples:
            n_bytes = len(packed[-1]) + len(packed[-2] or b"") + STEP_OVERHEAD_BYTES
            if n_bytes > room and room < PART_BYTES:
                if piece:
                    parts[-1].append((name, (piece, channel)))
                    piece = []
                    n += 1
                parts.append([])
                room = PART_BYTES
            piece.append(packed)
            room -= n_bytes
        parts[-1].append((name, (piece, channel)))
        n_pieces.append(n)
    return parts, n_pieces


def _joined(pieces: list[Any]) -> Any:
    """The result of an operation from those of its pieces."""
    if len(pieces) == 1:
        return pieces[0]
    refusal = next((piece for piece in pieces if isinstance(piece, DataPoolError)), None)
    return refusal or [result for piece in pieces for result in piece]


def _answer(letter: _Letter, result: Any) -> None:
    if letter.answer.done():  # its producer left
        return
    if isinstance(result, BaseException):
        letter.answer.set_exception(result)
    else:
        letter.answer.set_result(result)


class Call:
    """A call of the actor: under way when this is made, made again while the actor restarts."""

    def __init__(self, method: Any, *arguments: Any) -> None:
        self._method = method
        self._arguments = arguments
        self._give_up = time.monotonic() + RESTART_S
        self._reference = method.remote(*arguments)

    async def answer(self) -> Any:
        """What it returns; its error as itself. A list, if the method has several values.

        Raises:
            PoolUnavailableError: the actor is gone, or does not come back in time.
        """
        while True:
            try:
                return await received(self._reference)
            except asyncio.CancelledError:
                # The caller leaves; so must its waiter in the actor, or it would be served.
                many = isinstance(self._reference, list)
                ray.cancel(self._reference[0] if many else self._reference)
                raise
            except ActorUnavailableError as e:
                if time.monotonic() > self._give_up:
                    raise unavailable(e) from e
                await asyncio.sleep(RETRY_S)
                self._method.pool.greet_later()
                self._reference = self._method.remote(*self._arguments)


async def received(reference: Any) -> Any:
    """The value of one call, or a list of its values; its error as itself.

    Raises:
        ActorUnavailableError: the actor restarts; the call may have been applied.
        PoolUnavailableError: the actor is gone.
    """
    try:
        if isinstance(reference, list):
            return await _all(reference)
        return (await _all([reference]))[0]
    except RayTaskError as e:
        if isinstance(e.cause, DataPoolError):
            raise e.cause from None
        raise
    except ActorUnavailableError:
        raise
    except RayActorError as e:
        raise unavailable(e) from e


def begin(line: Line, pool: KnownPool, name: str, *arguments: Any) -> Call | LineCall:
    """A call on its way, by the line if it is up. It may be made twice."""
    connection = line.connection()
    if connection is None:
        return Call(getattr(pool, name), *arguments)
    return LineCall(connection, name, arguments, lambda: Call(getattr(pool, name), *arguments))


async def call(method: Any, *arguments: Any) -> Any:
    """`Call`, awaited."""
    return await Call(method, *arguments).answer()


async def _all(references: Sequence[Any]) -> list[Any]:
    """The values of all, in as many turns of the event loop as one takes: a turn is long where
    producers work, and awaiting one after the other takes two each."""
    loop = asyncio.get_running_loop()
    here: asyncio.Future[None] = loop.create_future()
    futures = [reference.future() for reference in references]

    def arrived(_: object) -> None:  # in a thread of Ray's
        if all(future.done() for future in futures) and not loop.is_closed():
            loop.call_soon_threadsafe(wake)

    def wake() -> None:
        if not here.done():
            here.set_result(None)

    for future in futures:
        future.add_done_callback(arrived)
    await here
    return [future.result() for future in futures]
