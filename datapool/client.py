"""The typed async handle of the DataPool: what gateway, rollouts and trainer hold.

Same methods as `DataPoolActor`. It adds three things to a bare Ray handle: errors arrive as
themselves, with a one-line message; a pool that cannot be reached is a `PoolUnavailableError`;
and what producers send at the same time travels together, in order::

    open_trajectory ─────┐                        ┌─► its own outcome or error
    submit_step(s) ──────┼─► one call in flight ──┼─► …
    complete_trajectory ─┘   (the next one fills  └─►
                              while it is away)

A step is acknowledged only after the pool applied it. Nothing is retried here: a resubmission is
safe (it is a duplicate), so the caller decides. Not thread-safe: one client per event loop.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import ray
from ray.exceptions import RayActorError, RayTaskError

from datapool.actor import DEFAULT_NAME, DataPoolHandle, Operation
from datapool.errors import DataPoolError, PoolFullError, PoolUnavailableError
from datapool.pool import outcomes_or_raise
from datapool.records import SubmitOutcome, TrajectoryOutcome
from datapool.types import TRAIN, Lease, Step

STEPS_PER_CALL = 256
SLICE_S = 10.0

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
                    self.actor.open_group.remote(
                        prompt_uid,
                        n_rollouts,
                        deadline_s,
                        min_rollouts,
                        metadata,
                        channel,
                        wait.next_slice(),
                    )
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
        outcome: SubmitOutcome = await self._outbox.send(
            "open_trajectory", trajectory_uid, prompt_uid, attempt, metadata, channel
        )
        return outcome

    async def submit_step(self, step: Step, channel: str = TRAIN) -> SubmitOutcome:
        """`DataPool.submit_step`."""
        return (await self.submit_steps([step], channel))[0]

    async def submit_steps(
        self, steps: Sequence[Step], channel: str = TRAIN
    ) -> list[SubmitOutcome]:
        """`DataPool.submit_steps`."""
        if not steps:
            return []
        results: Results = await self._outbox.send(
            "apply_steps", steps, channel, n_steps=len(steps)
        )
        return outcomes_or_raise(results)

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
        await _call(self.actor.drop_group.remote(prompt_uid, reason, channel))

    # -- consumers ---------------------------------------------------------------------------

    async def fetch_batch(
        self,
        n_rollouts: int | None = None,
        channel: str = TRAIN,
        batch_size: int = 1,
        timeout_s: float | None = 0,
    ) -> list[Step] | None:
        """`DataPoolActor.fetch_batch`: waits up to `timeout_s` (None: for ever)."""
        wait = _Wait(timeout_s)
        while True:
            steps: list[Step] | None = await _call(
                self.actor.fetch_batch.remote(n_rollouts, channel, batch_size, wait.next_slice())
            )
            if steps is not None or wait.is_over() or wait.was_cut_short():
                return steps

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
        while True:
            lease: Lease | None = await _call(
                self.actor.lease_batch.remote(
                    n_rollouts, channel, batch_size, wait.next_slice(), lease_s
                )
            )
            if lease is not None or wait.is_over() or wait.was_cut_short():
                return lease

    async def ack(self, lease_id: str) -> None:
        """`DataPool.ack`."""
        await _call(self.actor.ack.remote(lease_id))

    async def nack(self, lease_id: str, reason: str = "") -> None:
        """`DataPool.nack`."""
        await _call(self.actor.nack.remote(lease_id, reason))

    async def renew(self, lease_id: str, lease_s: float | None = None) -> float:
        """`DataPool.renew`."""
        expires_at: float = await _call(self.actor.renew.remote(lease_id, lease_s))
        return expires_at

    # -- end and statistics ------------------------------------------------------------------

    async def get_statistics(self, channel: str | None = None) -> dict[str, Any]:
        """`DataPool.get_statistics`."""
        stats: dict[str, Any] = await _call(self.actor.get_statistics.remote(channel))
        return stats

    async def shutdown(self, channel: str | None = None) -> None:
        """`DataPoolActor.shutdown`: wakes up whoever waits. The actor itself goes on."""
        await _call(self.actor.shutdown.remote(channel))


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


class _Outbox:
    """Producers' operations on their way: one call is in flight, the next one fills meanwhile."""

    def __init__(self, actor: DataPoolHandle) -> None:
        self._actor = actor
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
            if error is None:
                continue
            if len(letters) > 1 and not isinstance(error, PoolUnavailableError):
                # One producer's step did not travel (metadata that cannot be pickled, say). It
                # must not take the others down; what was applied already is a duplicate now.
                for letter in letters:
                    await self._send([letter])

    async def _send(self, letters: list[_Letter]) -> BaseException | None:
        """Send and hand out the answers. An error that is all theirs is handed out, too."""
        applying = self._apply([letter.operation for letter in letters])
        # Gathered and not raised: whatever went wrong has to reach the producers who wait for it.
        answers: list[Any] = await asyncio.gather(applying, return_exceptions=True)
        answer = answers[0]
        if isinstance(answer, BaseException):
            if len(letters) == 1 or isinstance(answer, PoolUnavailableError):
                for letter in letters:
                    _answer(letter, answer)
            return answer
        for letter, result in zip(letters, answer, strict=True):
            _answer(letter, result)
        return None

    async def _apply(self, operations: list[Operation]) -> list[Any]:
        results: list[Any] = await _call(self._actor.apply.remote(operations))
        return results


def _answer(letter: _Letter, result: Any) -> None:
    if letter.answer.done():  # its producer left
        return
    if isinstance(result, BaseException):
        letter.answer.set_exception(result)
    else:
        letter.answer.set_result(result)


async def _call(reference: Any) -> Any:
    """Await a Ray call; its error as itself."""
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
    except RayActorError as e:
        reason = str(e).strip().splitlines()[0]
        raise PoolUnavailableError(
            f"the DataPool cannot be reached ({reason}); "
            "what was not acknowledged may be submitted again"
        ) from e
