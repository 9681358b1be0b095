"""This module asks the pool, and decides what becomes of calls that cannot be stored, so that an
agent gets its answer whatever the pool does.

    refuse            the call answers 503, as long as the pool does not answer
    serve_unrecorded  pool away, full or slow ──► the call is answered; its trajectory is given up
                          │                         and the pool is to abort it, when it answers
                          └── till then: conversations that begin are not offered to it either

A trajectory with a call that is not stored is given up as a whole: its reward would be credited to
a part of what earned it, and its group would compare an episode with a piece of one. With the abort
a commit whose answer was lost leaves nothing half-stored either.

Owns: how long the pool is waited for (`ask`), the aborts that it is owed, how many calls were not
stored and why. Does not own: the calls (`call.py`), the state of a trajectory (`trajectory.py`),
how its errors are told (`errors.py`). What is late or closed the pool decides: its answers are
passed on, never second-guessed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Literal, TypeAlias, TypeVar

from stepwell.datapool.errors import DataPoolError, NotOwnerError, PoolFullError
from stepwell.datapool.ops import TrajectoryOutcome
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.gateway.config import TUNING, GatewayConfig, Tuning
from stepwell.gateway.errors import (
    UNAVAILABLE,
    GatewayError,
    PermissionDeniedError,
    PoolSilentError,
)
from stepwell.gateway.limits import Deadline, Deadlines

log = logging.getLogger(__name__)

T = TypeVar("T")

Unrecorded: TypeAlias = Literal["asked", "undeclared", "pool_failure", "closed"]
"""Why a call is answered and not stored: its client asked for that; nobody declared its group; the
pool failed; its trajectory was closed before its reply."""

POOL_FAILURE: Final = "pool_failure"
RETRY_S = 1.0
"""Between two tries of an abort."""
ABORTS_AT_ONCE = 16
"""Aborts that the pool is asked for at once, or waited with for the next try: a pool that is away
for an hour may owe thousands."""


class PoolAccess:
    """Owned by the app's lifespan."""

    def __init__(
        self, pool: DataPoolClient, config: GatewayConfig, tuning: Tuning = TUNING
    ) -> None:
        self.pool = pool
        self.serves_unrecorded = config.on_pool_failure == "serve_unrecorded"
        self.timeout_s = tuning.pool_timeout_s
        self.room_s = config.queue_timeout_s
        self.unrecorded: Counter[Unrecorded] = Counter()
        """Calls that were answered, by why they are not stored."""
        self._patience_s = tuning.pool_patience_s
        self._deadlines = Deadlines()
        self.is_away = False
        """The pool failed a call and has not answered since."""
        self._owed: set[asyncio.Task[None]] = set()
        """Aborts that the pool has not answered yet."""
        self._aborting = asyncio.Semaphore(ABORTS_AT_ONCE)
        self._noting: set[asyncio.Task[None]] = set()
        """Metadata that the pool has not answered yet."""

    def statistics(self, n_stored: int) -> dict[str, Any]:
        n = self.unrecorded.total()
        return {
            "unrecorded": dict(self.unrecorded),
            "unrecorded_share": n / (n + n_stored) if n else 0.0,
            "owed_aborts": len(self._owed),
        }

    async def ask(
        self, answer: Awaitable[T], *, room: bool = False, timeout_s: float | None = None
    ) -> T:
        """The pool's answer within `timeout_s`.

        Args:
            room: the pool was told to wait for room in its channel.
            timeout_s: None: the gateway's.

        Raises:
            DataPoolError: the pool refuses what was sent. One of UNAVAILABLE: no answer, or one
                that is not durable; whether the pool applied the call is not known, unless it is
                full.
            PermissionDeniedError: what the call is about has another owner.
        """
        if timeout_s is None:
            timeout_s = self.timeout_s + self.room_s * room
        try:
            with Deadline(self._deadlines, time.monotonic() + timeout_s):
                return await answer
        except NotOwnerError as e:
            raise PermissionDeniedError(str(e)) from e
        except DataPoolError as e:
            if isinstance(e, UNAVAILABLE) and not isinstance(e, PoolFullError):
                log.warning("%s: %s", type(e).__name__, e)  # the client is not told
            raise
        except TimeoutError as e:
            raise PoolSilentError(
                f"the DataPool did not answer within {timeout_s:g} s (with "
                "gateway.queue_timeout_s where a call may wait for room)"
            ) from e
        except Exception as e:  # whatever it is: to a client it means "not stored, try again"
            # Its words may name nodes and files, which agents need not know.
            log.warning("the DataPool did not answer (%s: %.2000s)", type(e).__name__, e)
            raise PoolSilentError(
                f"the DataPool did not answer ({type(e).__name__}); see the gateway's log"
            ) from e

    async def complete(
        self,
        uid: str,
        channel: str,
        reward: float | None,
        metadata: Mapping[str, Any],
        step_rewards: Sequence[float | None],
        owner: str | None = None,
    ) -> TrajectoryOutcome:
        """Close a trajectory with an outcome reward and its steps' own.

        Args:
            owner: who asks, where the trajectory's is not known here.

        Raises:
            StepIndexError: there are more rewards than steps; nothing is closed.
            NotOwnerError: it has another owner.
        """
        how: dict[str, Any] = {"reward": reward, "metadata": dict(metadata)}
        how |= {"channel": channel, "owner": owner}
        given = {i: own for i, own in enumerate(step_rewards) if own is not None}
        if given:
            listed = await self.pool.list_trajectories(channel, trajectory_uid=uid)
            if any(row.state != "open" for row in listed.items):
                # Refused if it was closed otherwise: no reward is to be changed then.
                await self.pool.complete_trajectory(uid, **how)
        for index in reversed(given):  # a step that is not there is told first
            own = given[index]
            await self.pool.set_reward(uid, own, step_index=index, channel=channel, owner=owner)
        return await self.pool.complete_trajectory(uid, **how)

    @asynccontextmanager
    async def patience(self) -> AsyncIterator[None]:
        """
        Raises:
            PoolSilentError: the body took longer than an agent is to wait.
        """
        try:
            async with asyncio.timeout(self._patience_s):
                yield
        except PoolFullError:  # a TimeoutError, too
            raise
        except TimeoutError as e:
            raise PoolSilentError(
                f"the DataPool did not answer within {self._patience_s:g} s"
            ) from e

    def give_up(self, channel: str, uid: str, why: DataPoolError) -> None:
        """A trajectory is not stored any more, because the pool failed."""
        log.warning("trajectory %s is not recorded any more: %s", uid, why)
        if isinstance(why, PoolFullError):
            return  # nothing of it was applied
        self.is_away = True
        task = asyncio.create_task(self._abort(channel, uid))
        self._owed.add(task)
        task.add_done_callback(self._owed.discard)

    def add_metadata(
        self, uid: str, prompt_uid: str, channel: str, metadata: dict[str, Any]
    ) -> None:
        """Let the pool add this to the metadata of an open trajectory; nobody waits for it."""
        task = asyncio.create_task(self._add_metadata(uid, prompt_uid, channel, metadata))
        self._noting.add(task)
        task.add_done_callback(self._noting.discard)

    async def close(self) -> None:
        tasks = [*self._owed, *self._noting]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _add_metadata(
        self, uid: str, prompt_uid: str, channel: str, metadata: dict[str, Any]
    ) -> None:
        told = self.pool.open_trajectory(uid, prompt_uid, metadata=metadata, channel=channel)
        try:
            await self.ask(told)
        except (DataPoolError, GatewayError) as e:  # this gateway knows it until it ends
            log.debug("the pool does not take %s of %s: %s", metadata, uid, e)

    async def _abort(self, channel: str, uid: str) -> None:
        while True:
            async with self._aborting:
                try:
                    abort = self.pool.abort_trajectory(uid, POOL_FAILURE, channel=channel)
                    await self.ask(abort, timeout_s=self._patience_s)
                except UNAVAILABLE:
                    await asyncio.sleep(RETRY_S)
                    continue
                except DataPoolError as e:  # it never heard of it, or has closed it
                    log.debug("%s needs no abort: %s", uid, e)
                except Exception:  # a bug: a pool that is away for good would stop all recording
                    log.exception("aborting %s failed", uid)
            self.is_away = False
            return
