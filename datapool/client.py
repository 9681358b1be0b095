"""The typed async handle of the DataPool: what gateway, rollouts and trainer hold.

Same methods as `DataPoolActor`. It adds to a bare Ray handle: errors arrive as themselves, with a
one-line message; a pool that restarts is waited for, and asked again; and what producers send at
the same time travels together, in order, as bytes::

    open_trajectory ─────┐                        ┌─► its own outcome or error
    submit_step(s) ──────┼─► one call in flight ──┼─► …
    complete_trajectory ─┘   (the next one fills  └─►
                              while it is away)

A step is acknowledged once the pool applied it and its journal has it. Every call may be repeated
without harm (a second submit is a duplicate, a lease request carries an id), so calls that were on
their way when the pool's process died are. Not thread-safe: one client per event loop.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from datapool.actor import (
    APPLY_STEPS,
    DEFAULT_NAME,
    DataPoolHandle,
    Operation,
    unavailable,
)
from datapool.config import SelectionConfig
from datapool.errors import (
    DataPoolError,
    InvalidStepError,
    PoolFullError,
    PoolUnavailableError,
    UnknownBaseError,
)
from datapool.events import Events
from datapool.payload import PackedStep, pack
from datapool.pool import outcomes_or_raise
from datapool.records import SubmitOutcome, TrajectoryOutcome
from datapool.selection import DryRun, Marks
from datapool.types import TRAIN, Lease, Step

STEPS_PER_CALL = 256
SLICE_S = 10.0
RESTART_S = 120.0
"""How long a pool that restarts is waited for: a journal of a million steps takes a minute."""
RETRY_S = 0.05
TIP_BYTES = 64 << 20
"""Tokens of recent steps that a client keeps, to send the next ones relative to them."""

Results: TypeAlias = list[SubmitOutcome | DataPoolError]


class DataPoolClient:
    """Async access to the pool of `start_data_pool`. Cheap to make; pickles as its actor handle.

    Args:
        actor: handle of a `DataPoolActor`.
    """

    def __init__(self, actor: DataPoolHandle) -> None:
        self.actor = actor
        self._outbox = _Outbox(actor)

    @classmethod
    def connect(cls, name: str = DEFAULT_NAME, namespace: str | None = None) -> DataPoolClient:
        """A client of the pool that was started under this name.

        Raises:
            PoolUnavailableError: there is none.
        """
        try:
            return cls(ray.get_actor(name, namespace))
        except ValueError as e:
            where = "this namespace" if namespace is None else f"namespace {namespace!r}"
            raise PoolUnavailableError(
                f"no DataPool named {name!r} in {where}; start one with start_data_pool(name=…)"
            ) from e

    def __reduce__(self) -> tuple[type[DataPoolClient], tuple[Any]]:
        return (type(self), (self.actor,))

    # -- producers ---------------------------------------------------------------------------

    async def open_group(
        self,
        prompt_uid: str,
        n_rollouts: int,
        deadline_s: float | None = None,
        min_rollouts: int = 1,
        metadata: Mapping[str, Any] | None = None,
        channel: str = TRAIN,
        timeout_s: float | None = None,
    ) -> SubmitOutcome:
        """`DataPoolActor.open_group`: waits up to `timeout_s` (None: for ever) for credit."""
        wait = _Wait(timeout_s)
        while True:
            try:
                outcome: SubmitOutcome = await _call(
                    self.actor.open_group,
                    prompt_uid,
                    n_rollouts,
                    deadline_s,
                    min_rollouts,
                    metadata,
                    channel,
                    wait.next_slice(),
                )
                return outcome
            except PoolFullError:
                if wait.is_over():
                    raise

    async def open_trajectory(
        self,
        trajectory_uid: str,
        prompt_uid: str,
        attempt: int = 0,
        metadata: Mapping[str, Any] | None = None,
        channel: str = TRAIN,
    ) -> SubmitOutcome:
        """`DataPool.open_trajectory`."""
        while True:
            try:
                outcome: SubmitOutcome = await self._outbox.send(
                    "open_trajectory", trajectory_uid, prompt_uid, attempt, metadata, channel
                )
                return outcome
            except PoolFullError:
                await self._wait_for_room(channel)

    async def submit_step(self, step: Step, channel: str = TRAIN) -> SubmitOutcome:
        """`DataPool.submit_step`."""
        return (await self.submit_steps([step], channel))[0]

    async def submit_steps(
        self, steps: Sequence[Step], channel: str = TRAIN
    ) -> list[SubmitOutcome]:
        """`DataPool.submit_steps`."""
        for step in steps:
            if not isinstance(step, Step):
                raise InvalidStepError(
                    f"got {step!r:.80} of type {type(step).__name__}; pass datapool.Step"
                )
        if not steps:
            return []
        results = await self._apply_steps(steps, channel)
        while blocked := [i for i, r in enumerate(results) if isinstance(r, PoolFullError)]:
            # The channel blocks: steps of new groups wait here, in their producer.
            await self._wait_for_room(channel)
            answers = await self._apply_steps([steps[i] for i in blocked], channel)
            for i, answer in zip(blocked, answers, strict=True):
                results[i] = answer
        return outcomes_or_raise(results)

    async def _apply_steps(self, steps: Sequence[Step], channel: str) -> Results:
        results: Results = await self._outbox.send(APPLY_STEPS, steps, channel, n_steps=len(steps))
        return results

    async def _wait_for_room(self, channel: str) -> None:
        while True:
            try:
                await _call(self.actor.wait_for_room, channel, SLICE_S)
                return
            except PoolFullError:
                continue

    async def complete_trajectory(
        self,
        trajectory_uid: str,
        reward: float | None = None,
        metadata: Mapping[str, Any] | None = None,
        channel: str = TRAIN,
    ) -> TrajectoryOutcome:
        """`DataPool.complete_trajectory`."""
        outcome: TrajectoryOutcome = await self._outbox.send(
            "complete_trajectory", trajectory_uid, reward, metadata, channel
        )
        return outcome

    async def abort_trajectory(
        self,
        trajectory_uid: str,
        reason: str,
        will_retry: bool = False,
        channel: str = TRAIN,
    ) -> TrajectoryOutcome:
        """`DataPool.abort_trajectory`."""
        outcome: TrajectoryOutcome = await self._outbox.send(
            "abort_trajectory", trajectory_uid, reason, will_retry, channel
        )
        return outcome

    async def drop_group(self, prompt_uid: str, reason: str, channel: str = TRAIN) -> None:
        """`DataPool.drop_group`."""
        await _call(self.actor.drop_group, prompt_uid, reason, channel)

    # -- consumers ---------------------------------------------------------------------------

    async def fetch_batch(
        self,
        n_rollouts: int | None = None,
        channel: str = TRAIN,
        batch_size: int = 1,
        timeout_s: float | None = 0,
    ) -> list[Step] | None:
        """The steps of the next ready groups, or None: a lease that is acked once it is here.
        Waits up to `timeout_s` (None: for ever)."""
        lease = await self.lease_batch(n_rollouts, channel, batch_size, timeout_s)
        if lease is None:
            return None
        await self.ack(lease.lease_id)
        return lease.steps

    async def lease_batch(
        self,
        n_rollouts: int | None = None,
        channel: str = TRAIN,
        batch_size: int = 1,
        timeout_s: float | None = 0,
        lease_s: float | None = None,
    ) -> Lease | None:
        """`DataPoolActor.lease_batch`: waits up to `timeout_s` (None: for ever)."""
        wait = _Wait(timeout_s)
        request_id = uuid.uuid4().hex
        while True:
            lease: Lease | None = await _call(
                self.actor.lease_batch,
                n_rollouts,
                channel,
                batch_size,
                wait.next_slice(),
                lease_s,
                request_id,
            )
            if lease is not None or wait.is_over() or wait.was_cut_short():
                return lease

    async def ack(self, lease_id: str) -> None:
        """`DataPool.ack`."""
        await _call(self.actor.ack, lease_id)

    async def nack(self, lease_id: str, reason: str = "") -> None:
        """`DataPool.nack`."""
        await _call(self.actor.nack, lease_id, reason)

    async def renew(self, lease_id: str, lease_s: float | None = None) -> float:
        """`DataPool.renew`."""
        expires_at: float = await _call(self.actor.renew, lease_id, lease_s)
        return expires_at

    async def release_leases(self, channel: str = TRAIN, reason: str = "released") -> int:
        """`DataPool.release_leases`."""
        n: int = await _call(self.actor.release_leases, channel, reason)
        return n

    # -- people and sources ------------------------------------------------------------------

    async def set_reward(
        self,
        trajectory_uid: str,
        reward: float,
        step_index: int | None = None,
        channel: str = TRAIN,
    ) -> SubmitOutcome:
        """`DataPool.set_reward`."""
        outcome: SubmitOutcome = await _call(
            self.actor.set_reward, trajectory_uid, reward, step_index, channel
        )
        return outcome

    async def mark(
        self,
        prompt_uid: str | None = None,
        trajectory_uid: str | None = None,
        channel: str = TRAIN,
        **marks: Any,
    ) -> Marks:
        """`DataPool.mark`."""
        result: Marks = await _call(self.actor.mark, prompt_uid, trajectory_uid, channel, marks)
        return result

    async def advance_version(self, version: int, channel: str = TRAIN) -> None:
        """`DataPool.advance_version`."""
        await _call(self.actor.advance_version, version, channel)

    async def dry_run(
        self,
        selection: SelectionConfig | None = None,
        channel: str = TRAIN,
        batch_size: int = 1,
    ) -> DryRun:
        """`DataPool.dry_run`."""
        result: DryRun = await _call(self.actor.dry_run, selection, channel, batch_size)
        return result

    async def get_events(
        self,
        cursor: str | None = None,
        channel: str | None = None,
        kinds: Collection[str] | None = None,
        limit: int = 1000,
        timeout_s: float = 0,
    ) -> Events:
        """`DataPoolActor.get_events`: what happened after `cursor`, waiting for the first."""
        wait = _Wait(timeout_s)
        while True:
            page: Events = await _call(
                self.actor.get_events, cursor, channel, kinds, limit, wait.next_slice()
            )
            if page.events or wait.is_over():
                return page

    # -- end and statistics ------------------------------------------------------------------

    async def get_statistics(self, channel: str | None = None) -> dict[str, Any]:
        """`DataPool.get_statistics`."""
        stats: dict[str, Any] = await _call(self.actor.get_statistics, channel)
        return stats

    async def describe(self) -> dict[str, Any]:
        """`DataPoolActor.describe`."""
        described: dict[str, Any] = await _call(self.actor.describe)
        return described

    async def shutdown(self, channel: str | None = None) -> None:
        """`DataPoolActor.shutdown`: wakes up whoever waits. The actor itself goes on."""
        await _call(self.actor.shutdown, channel)


class _Wait:
    """A long wait, asked for in slices.

    Ray does not tell an actor that a caller's process died. Its waiter would stand in the queue
    until its timeout and then be served; asked for in slices, it is gone within one.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self._end = None if timeout_s is None else time.monotonic() + timeout_s
        self._asked_at = 0.0
        self._slice = 0.0

    def next_slice(self) -> float:
        """Seconds to ask for now."""
        self._asked_at = time.monotonic()
        left = math.inf if self._end is None else max(0.0, self._end - self._asked_at)
        self._slice = min(left, SLICE_S)
        return self._slice

    def is_over(self) -> bool:
        return self._end is not None and time.monotonic() >= self._end

    def was_cut_short(self) -> bool:
        """The last slice came back empty before its time: the channel was shut down."""
        return time.monotonic() - self._asked_at < self._slice


@dataclass(frozen=True, eq=False, slots=True)
class _Letter:
    """An operation on its way, and who waits for its result."""

    operation: Operation
    n_steps: int
    answer: asyncio.Future[Any]


class _Tips:
    """Tokens of the steps sent last, so that what follows them is sent relative to them."""

    def __init__(self) -> None:
        self._tokens: OrderedDict[tuple[str, str, int], bytes] = OrderedDict()
        self._n_bytes = 0

    def pack(self, step: Step, channel: str) -> PackedStep:
        base = step.step_index - 1 if step.parent_index is None else step.parent_index
        key = (channel, step.trajectory_uid)
        packed = pack(step, base, self._tokens.get((*key, base)))
        if not step.is_last:
            self._put((*key, step.step_index), _tokens_of(step))
        return packed

    def forget(self, step: Step, channel: str) -> None:
        """The pool does not hold this step, or not as it was sent."""
        gone = self._tokens.pop((channel, step.trajectory_uid, step.step_index), b"")
        self._n_bytes -= len(gone)

    def clear(self) -> None:
        self._tokens.clear()
        self._n_bytes = 0

    def _put(self, key: tuple[str, str, int], tokens: bytes) -> None:
        self._n_bytes += len(tokens) - len(self._tokens.pop(key, b""))
        self._tokens[key] = tokens
        while self._n_bytes > TIP_BYTES:
            self._n_bytes -= len(self._tokens.popitem(last=False)[1])


def _tokens_of(step: Step) -> bytes:
    return step.prompt_ids.tobytes() + step.response_ids.tobytes()


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


class _Outbox:
    """Producers' operations on their way: one call is in flight, the next one fills meanwhile."""

    def __init__(self, actor: DataPoolHandle) -> None:
        self._actor = actor
        self._tips = _Tips()
        self._waiting: deque[_Letter] = deque()
        self._sender: asyncio.Task[None] | None = None

    async def send(self, name: str, *arguments: Any, n_steps: int = 1) -> Any:
        """The result of operation `name`; its refusal is raised."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Letter((name, arguments), n_steps, answer))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send_all())
        return await answer

    async def _send_all(self) -> None:
        while self._waiting:
            letters: list[_Letter] = []
            n_steps = 0
            while self._waiting and n_steps < STEPS_PER_CALL:
                letters.append(self._waiting.popleft())
                n_steps += letters[-1].n_steps
            error = await self._send(letters)
            if error is not None and len(letters) > 1 and not isinstance(error, DataPoolError):
                # One producer's operation did not travel (metadata that cannot be pickled, say).
                # It must not take the others down; what was applied already is a duplicate now.
                for letter in letters:
                    await self._send([letter])

    async def _send(self, letters: list[_Letter]) -> BaseException | None:
        """Send and hand out the answers. An error that is all theirs is handed out, too."""
        # Gathered and not raised: whatever went wrong has to reach the producers who wait for it.
        answers: list[Any] = await asyncio.gather(self._apply(letters), return_exceptions=True)
        answer = answers[0]
        if isinstance(answer, BaseException):
            self._tips.clear()
            if len(letters) == 1 or isinstance(answer, DataPoolError):
                for letter in letters:
                    _answer(letter, answer)
            return answer
        for letter, result in zip(letters, answer, strict=True):
            _answer(letter, result)
        return None

    async def _apply(self, letters: list[_Letter]) -> list[Any]:
        """Each letter's result. Steps go relative to those before them, and once more, whole, if
        the pool does not know those."""
        parcels = [_Parcel(letter.operation) for letter in letters]
        operations = [parcel.pack(self._tips) for parcel in parcels]
        for parcel, result in zip(parcels, await self._call(operations), strict=True):
            parcel.put(result, self._tips)
        again = [parcel for parcel in parcels if parcel.unknown]
        if again:
            whole = [parcel.pack(None) for parcel in again]
            for parcel, result in zip(again, await self._call(whole), strict=True):
                parcel.put(result, self._tips)
        return [parcel.result for parcel in parcels]

    async def _call(self, operations: list[Operation]) -> list[Any]:
        results: list[Any] = await _call(self._actor.apply, operations)
        return results


def _answer(letter: _Letter, result: Any) -> None:
    if letter.answer.done():  # its producer left
        return
    if isinstance(result, BaseException):
        letter.answer.set_exception(result)
    else:
        letter.answer.set_result(result)


async def _call(method: Any, *arguments: Any) -> Any:
    """Await a call of the actor; its error as itself. Calls again while the actor restarts."""
    give_up = time.monotonic() + RESTART_S
    while True:
        reference = method.remote(*arguments)
        try:
            return await reference
        except asyncio.CancelledError:
            # The caller leaves; so must its waiter in the actor, or it would be served.
            ray.cancel(reference)
            raise
        except RayTaskError as e:
            if isinstance(e.cause, DataPoolError):
                raise e.cause from None
            raise
        except ActorUnavailableError as e:
            if time.monotonic() > give_up:
                raise unavailable(e) from e
            await asyncio.sleep(RETRY_S)
        except RayActorError as e:
            raise unavailable(e) from e
