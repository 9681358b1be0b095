"""This module closes and scores trajectories by their uid alone, so that agents that know no URL
and rewards that come late reach them.

    trajectory_uid ──known here──► its channel ──► the pool
        └──any other──► the channels, one after the other, until one knows it

A caller whose key has a channel finds only what is there, or held out.

Does not own: trajectories that are open here (`trajectory.py`), until when a reward counts (the
pool).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from stepwell.datapool.errors import UnknownTrajectoryError
from stepwell.datapool.ops import SubmitOutcome, TrajectoryOutcome
from stepwell.datapool.types import VAL
from stepwell.gateway.config import GatewayConfig
from stepwell.gateway.trajectory.recording import Recording
from stepwell.gateway.trajectory.store import TrajectoryStore

T = TypeVar("T")


class Outcomes:
    """Owned by the app's lifespan."""

    def __init__(
        self, config: GatewayConfig, recording: Recording, trajectories: TrajectoryStore
    ) -> None:
        self._config = config
        self._recording = recording
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
        pool = self._recording.pool
        return await self._first(
            uid,
            of_key,
            lambda channel: pool.complete_trajectory(
                uid, reward=reward, metadata=dict(metadata), channel=channel
            ),
        )

    async def score(self, uid: str, reward: float, of_key: str | None = None) -> SubmitOutcome:
        """The reward of a trajectory from now on; `late` once its group was leased.

        Raises:
            UnknownTrajectoryError: no channel knows it.
            PoolUnavailableError
        """
        set_reward = self._recording.pool.set_reward
        return await self._first(
            uid, of_key, lambda channel: set_reward(uid, reward, channel=channel)
        )

    async def _first(self, uid: str, of_key: str | None, do: Callable[[str], Awaitable[T]]) -> T:
        """What the first channel answers that knows the trajectory."""
        async for channel in self._channels(uid, of_key):
            try:
                return await self._recording.ask(do(channel))
            except UnknownTrajectoryError:
                continue
        raise UnknownTrajectoryError(f"trajectory {uid!r} is unknown in every channel")

    async def _channels(self, uid: str, of_key: str | None) -> AsyncIterator[str]:
        """Where it may be, the likely ones first."""
        if of_key is not None:
            likely = dict.fromkeys((of_key, VAL))
        else:
            known = self._trajectories.channel(uid)
            likely = dict.fromkeys(self._config.channels if known is None else (known,))
        for channel in likely:
            yield channel
        if of_key is None:
            everywhere: dict[str, Any] = await self._recording.ask(
                self._recording.pool.get_statistics()
            )
            for channel in everywhere.keys() - likely:
                yield channel
