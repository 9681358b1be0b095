"""What the gateway asks of the DataPool. `DataPoolClient` provides it.

Owns: the protocol, and how a pool that fails becomes the gateway's errors. The pool decides what is
late or closed; its answers are passed on, never second-guessed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from stepwell.datapool.core.records import Deleted, Resumed, SubmitOutcome, TrajectoryOutcome
from stepwell.datapool.errors import DataPoolError, JournalError, JournalFullError, PoolFullError
from stepwell.datapool.errors import PoolUnavailableError as PoolGoneError
from stepwell.datapool.inspect.rows import Page, TrajectoryRow
from stepwell.datapool.selection import Marks
from stepwell.datapool.types import Lease, Step
from stepwell.gateway.errors import ChannelFullError, PoolStorageError, PoolUnavailableError

log = logging.getLogger(__name__)

T = TypeVar("T")


class PoolPort(Protocol):
    async def open_group(
        self,
        prompt_uid: str,
        n_rollouts: int,
        deadline_s: float | None = None,
        min_rollouts: int = 1,
        metadata: Mapping[str, Any] | None = None,
        channel: str = "train",
        timeout_s: float | None = None,
    ) -> SubmitOutcome: ...

    async def open_trajectory(
        self,
        trajectory_uid: str,
        prompt_uid: str,
        attempt: int = 0,
        metadata: Mapping[str, Any] | None = None,
        channel: str = "train",
        timeout_s: float | None = None,
    ) -> SubmitOutcome: ...

    async def resume_trajectory(
        self,
        trajectory_uid: str,
        prompt_uid: str,
        attempt: int = 0,
        metadata: Mapping[str, Any] | None = None,
        channel: str = "train",
        elsewhere: bool = False,
        timeout_s: float | None = None,
    ) -> Resumed: ...

    async def submit_step(
        self, step: Step, channel: str = "train", timeout_s: float | None = None
    ) -> SubmitOutcome: ...

    async def submit_steps(
        self, steps: Sequence[Step], channel: str = "train", timeout_s: float | None = None
    ) -> list[SubmitOutcome]: ...

    async def complete_trajectory(
        self,
        trajectory_uid: str,
        reward: float | None = None,
        metadata: Mapping[str, Any] | None = None,
        channel: str = "train",
    ) -> TrajectoryOutcome: ...

    async def abort_trajectory(
        self, trajectory_uid: str, reason: str, will_retry: bool = False, channel: str = "train"
    ) -> TrajectoryOutcome: ...

    async def set_reward(
        self,
        trajectory_uid: str,
        reward: float,
        step_index: int | None = None,
        channel: str = "train",
    ) -> SubmitOutcome: ...

    async def mark(
        self,
        prompt_uid: str | None = None,
        trajectory_uid: str | None = None,
        channel: str = "train",
        **marks: Any,
    ) -> Marks: ...

    async def delete(
        self, trajectory_uid: str | None = None, tag: str | None = None
    ) -> Deleted: ...

    async def drop_group(self, prompt_uid: str, reason: str, channel: str = "train") -> None: ...

    async def lease_batch(
        self, n_rollouts: int | None = None, channel: str = "train", batch_size: int = 1
    ) -> Lease | None: ...

    async def ack(self, lease_id: str) -> None: ...

    async def nack(self, lease_id: str, reason: str = "") -> None: ...

    async def list_trajectories(
        self, channel: str = "train", cursor: str | None = None, limit: int = 100, **filters: Any
    ) -> Page[TrajectoryRow]: ...

    async def get_statistics(self, channel: str | None = None) -> dict[str, Any]: ...


async def ask(answer: Awaitable[T], timeout_s: float) -> T:
    """The pool's answer within `timeout_s`.

    Raises:
        DataPoolError: the pool refuses what was sent.
        ChannelFullError: there is no room; nothing was applied.
        PoolUnavailableError: no answer, or one that is not durable; whether the pool applied the
            call is not known.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await answer
    except DataPoolError as e:
        if (failed := _failed(e)) is not None:
            raise failed from e
        raise
    except TimeoutError as e:
        raise PoolUnavailableError(
            f"the DataPool did not answer within {timeout_s:g} s (gateway.pool_timeout_s)"
        ) from e
    except Exception as e:  # Ray has many errors; to a client each means "not stored, try again"
        # Ray's words name nodes and files, which agents need not know.
        log.warning("the DataPool did not answer (%s: %.2000s)", type(e).__name__, e)
        raise PoolUnavailableError(
            f"the DataPool did not answer ({type(e).__name__}); see the gateway's log"
        ) from e


def _failed(e: DataPoolError) -> PoolUnavailableError | None:
    """What `e` says of the pool, without its addresses and files; None if it says something of the
    request."""
    if isinstance(e, PoolFullError):
        return ChannelFullError(f"the DataPool takes no new group now: {e}")
    if isinstance(e, PoolGoneError):
        failed = PoolUnavailableError("the DataPool cannot be reached; see the gateway's log")
    elif isinstance(e, JournalFullError):
        failed = PoolStorageError(
            "the DataPool's disk is full, so nothing can be stored; free space there and try again"
        )
    elif isinstance(e, JournalError):
        failed = PoolStorageError("the DataPool's journal cannot be used; see the gateway's log")
    else:
        return None
    log.warning("%s: %s", type(e).__name__, e)
    return failed
