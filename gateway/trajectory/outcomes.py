"""This module closes and scores trajectories by their uid alone, so that agents that know no URL
and rewards that come late reach them.

    trajectory_uid ──known here──► its channel ──► the pool
        └──any other──► the channels, one after the other, until one knows it

A caller whose key has a channel finds only what is there, or held out.

Does not own: trajectories that are open here (`trajectory.py`), until when a reward counts (the
pool).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from stepwell.datapool.errors import UnknownTrajectoryError
from stepwell.datapool.ops import SubmitOutcome, TrajectoryOutcome
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.types import VAL
from stepwell.gateway.config import GatewayConfig
from stepwell.gateway.trajectory.recording import ask
from stepwell.gateway.trajectory.trajectory import TrajectoryStore

T = TypeVar("T")


class Outcomes:
    """Owned by the app's lifespan."""

    def __init__(
        self, config: GatewayConfig, pool: DataPoolClient, trajectories: TrajectoryStore
    ) -> None:
        self._config = config
        self._pool = pool
        self._trajectories = trajectories

    async def complete(
        self,
        uid: str,
        reward: float | None,
        metadata: Mapping[str, Any],
        of_key: str | None = None,
    ) -> TrajectoryOutcome:
        """
        Args:
            of_key: the channel of the caller's key.

        Raises:
            UnknownTrajectoryError: no channel knows it.
            TrajectoryClosedError: the gateway's or the pool's: it was closed otherwise.
            PoolUnavailableError
        """
        live = self._trajectories.known(uid)
        if live is not None and (of_key is None or live.channel in (of_key, VAL)):
            return await live.complete(reward, metadata)
        return await self._first(
            uid,
            lambda channel: self._pool.complete_trajectory(
                uid, reward=reward, metadata=dict(metadata), channel=channel
            ),
            of_key,
        )

    async def score(self, uid: str, reward: float, of_key: str | None = None) -> SubmitOutcome:
        """The reward of a trajectory from now on; `late` once its group was leased.

        Raises:
            UnknownTrajectoryError: no channel knows it.
            PoolUnavailableError
        """
        return await self._first(
            uid, lambda channel: self._pool.set_reward(uid, reward, channel=channel), of_key
        )

    async def _first(self, uid: str, do: Callable[[str], Awaitable[T]], of_key: str | None) -> T:
        """What the first channel answers that knows the trajectory."""
        known = self._trajectories.channel(uid)
        likely = self._config.channels if known is None else (known,)
        tried = dict.fromkeys(likely if of_key is None else (of_key, VAL))
        for channel in tried:
            try:
                return await self._ask(do(channel))
            except UnknownTrajectoryError:
                continue
        others: dict[str, Any] = (
            {} if of_key is not None else await self._ask(self._pool.get_statistics())
        )
        for channel in others.keys() - tried:
            try:
                return await self._ask(do(channel))
            except UnknownTrajectoryError:
                continue
        raise UnknownTrajectoryError(f"trajectory {uid!r} is unknown in every channel")

    async def _ask(self, answer: Awaitable[T]) -> T:
        return await ask(answer, self._config.pool_timeout_s)
