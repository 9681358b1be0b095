"""What the gateway asks of the DataPool. `datapool.client.DataPoolClient` provides it.

Owns: the protocol, and how a pool that fails becomes the gateway's errors. The pool decides what is
late or closed; its answers are passed on, never second-guessed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from datapool.errors import DataPoolError
from datapool.errors import PoolUnavailableError as PoolGoneError
from datapool.records import SubmitOutcome, TrajectoryOutcome
from datapool.types import Step
from gateway.errors import PoolUnavailableError

T = TypeVar("T")


class PoolPort(Protocol):
    async def open_trajectory(
        self,
        trajectory_uid: str,
        prompt_uid: str,
        attempt: int = 0,
        metadata: Mapping[str, Any] | None = None,
        channel: str = "train",
    ) -> SubmitOutcome: ...

    async def submit_step(self, step: Step, channel: str = "train") -> SubmitOutcome: ...

    async def submit_steps(
        self, steps: Sequence[Step], channel: str = "train"
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


async def ask(answer: Awaitable[T], timeout_s: float) -> T:
    """The pool's answer within `timeout_s`.

    Raises:
        DataPoolError: the pool refuses.
        PoolUnavailableError: no answer; whether the pool applied the call is not known.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await answer
    except PoolGoneError as e:
        raise PoolUnavailableError(f"the DataPool cannot be reached ({e})") from e
    except DataPoolError:
        raise
    except TimeoutError as e:
        raise PoolUnavailableError(
            f"the DataPool did not answer within {timeout_s:g} s (gateway.pool_timeout_s)"
        ) from e
    except Exception as e:  # Ray has many errors; to a client each means "not stored, try again"
        raise PoolUnavailableError(
            f"the DataPool did not answer ({type(e).__name__}: {e!s:.200})"
        ) from e
