"""What `/buffer/write` stores: rollouts from outside, as Steps in the pool.

    {trajectory_uid, reward}      its calls came through the gateway ──► completed with the reward
    {tokens, response_length, …}  sampled elsewhere ──► Steps of a new trajectory, completed
    text alone                    refused: text is never tokenised as if it had been sampled

Items of one `instance_id` fill one group after the other: `17`, `17#1`, `17#2`, … with
`num_repeat_per_sample` each. Writing an item again (the same uid) is harmless.

Owns: which group an item belongs to. Does not own: the shape of items (`items.py`), what is
served (`buffer.py`).
"""

from __future__ import annotations

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from stepwell.datapool.errors import StepConflictError, UnknownTrajectoryError
from stepwell.datapool.errors import TrajectoryClosedError as PoolTrajectoryClosedError
from stepwell.datapool.errors import TrajectoryConflictError as PoolTrajectoryConflictError
from stepwell.datapool.inspect.rows import TrajectoryRow
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.gateway.config import REMEMBERED, GatewayConfig
from stepwell.gateway.errors import RequestError, TrajectoryClosedError, TrajectoryConflictError
from stepwell.gateway.slime_buffer.items import Written, steps_of
from stepwell.gateway.trajectory.outcomes import Outcomes
from stepwell.gateway.trajectory.recording import ask


class _Home(NamedTuple):
    """Where a written item is stored."""

    trajectory_uid: str
    prompt_uid: str
    is_open: bool
    """The pool has said so."""


class RolloutWriter:
    """Stores written items. Owned by the `RolloutBuffer`."""

    def __init__(self, config: GatewayConfig, pool: DataPoolClient, outcomes: Outcomes) -> None:
        self._config = config
        self._pool = pool
        self._outcomes = outcomes
        self._filling: OrderedDict[str, tuple[int, int]] = OrderedDict()
        """By instance id: (number of its group that is filling up, items in it)."""
        self._homes: OrderedDict[str, _Home] = OrderedDict()
        """By uid: a repeated write is the same rollout."""

    async def write(self, item: Mapping[str, Any], repeats: int | None) -> None:
        """Store a rollout that came from outside, or complete one whose calls were recorded here.
        Repeating it is harmless.

        Args:
            repeats: items per group; None: an instance's group fills up until it is served.

        Raises:
            RequestError, TrajectoryConflictError, TrajectoryClosedError, PoolUnavailableError
        """
        written = Written.parse(item)
        if written.trajectory_uid is not None:
            await self._complete(written, written.trajectory_uid)
        else:
            await self._store(written, item, repeats)

    async def _complete(self, written: Written, uid: str) -> None:
        """The trajectory's agent is done: close it with its reward."""
        try:
            outcome = await self._outcomes.complete(uid, written.reward, written.metadata)
        except UnknownTrajectoryError as e:
            raise RequestError(
                f"trajectory_uid is {uid!r}, which no call was recorded for",
                "trajectory_uid",
            ) from e
        except (TrajectoryClosedError, PoolTrajectoryClosedError) as e:
            if not await self._score(written, await self._row(uid)):
                raise TrajectoryClosedError(str(e)) from e
            return
        if outcome == "aborted":
            raise TrajectoryConflictError(
                f"trajectory {uid!r} has no recorded call and cannot be served; let its agent call "
                "through the base_url that /init_trajectory returns"
            )
        if outcome == "late":
            raise TrajectoryClosedError(
                f"trajectory {uid!r} came too late: its group was served or dropped without it"
            )

    async def _score(self, written: Written, row: TrajectoryRow | None) -> bool:
        """Give a trajectory that was completed without a reward the one it was written with."""
        if row is None or row.state != "complete" or row.reward is not None:
            return False
        if written.reward is None:
            return False
        return await self._outcomes.score(row.trajectory_uid, written.reward) == "accepted"

    async def _store(self, written: Written, item: Mapping[str, Any], repeats: int | None) -> None:
        uid = written.uid or uuid.uuid4().hex
        # All that can be wrong with the item is found before anything is opened.
        found = await asyncio.to_thread(steps_of, item)
        trajectory_uid, prompt_uid, _ = await self._home(written, uid, repeats)
        steps = [replace(s, trajectory_uid=trajectory_uid, prompt_uid=prompt_uid) for s in found]
        channel = self._config.channel
        try:
            room_s = self._config.queue_timeout_s
            outcomes = await self._ask(
                self._pool.submit_steps(steps, channel=channel, timeout_s=room_s), room_s
            )
            outcome = await self._ask(
                self._pool.complete_trajectory(
                    trajectory_uid, written.reward, written.metadata, channel=channel
                )
            )
        except (StepConflictError, PoolTrajectoryConflictError) as e:
            raise TrajectoryConflictError(
                f"uid {uid!r} was written before with other content ({e})"
            ) from e
        except PoolTrajectoryClosedError as e:
            raise TrajectoryClosedError(str(e)) from e
        if outcome == "late" or ("late" in outcomes and outcome != "complete"):
            raise TrajectoryClosedError(
                f"item {uid!r} came too late: its group was served or dropped without it"
            )

    async def _home(self, written: Written, uid: str, repeats: int | None) -> _Home:
        """The trajectory and the group of a written item: the instance's group that is filling up,
        or its next one. An instance that comes again has groups `17`, `17#1`, `17#2`, ….
        """
        limit = REMEMBERED
        home = self._homes.get(uid)
        if home is None and (row := await self._row(uid)) is not None:
            return _Home(uid, row.prompt_uid, is_open=True)
        trajectory_uid = uid
        while home is None or not home.is_open:
            if home is None:
                # Taken before waiting: items that are written at once do not overfill a group, and
                # a write that fails and comes again has its place.
                prompt_uid = self._place(str(written.instance_id), repeats)
                home = _Home(trajectory_uid, prompt_uid, is_open=False)
                remember(self._homes, uid, home, limit)
            try:
                room_s = self._config.queue_timeout_s
                outcome = await self._ask(
                    self._pool.open_trajectory(
                        home.trajectory_uid,
                        home.prompt_uid,
                        channel=self._config.channel,
                        timeout_s=room_s,
                    ),
                    room_s,
                )
            except PoolTrajectoryConflictError as e:
                raise TrajectoryConflictError(
                    f"uid is {uid!r}, which another trajectory has; send a uid of its own ({e})"
                ) from e
            if outcome == "late":
                # That group was served, and the pool remembers the uid as its latecomer's.
                self._next_group(str(written.instance_id), home.prompt_uid)
                trajectory_uid = f"{home.trajectory_uid}+"
                home = None
            else:
                home = home._replace(is_open=True)
                remember(self._homes, uid, home, limit)
        return home

    def _place(self, name: str, repeats: int | None) -> str:
        """A place in the instance's group that is filling up: its prompt_uid."""
        k, n = self._filling.get(name, (0, 0))
        if repeats is not None and n >= repeats:
            k, n = k + 1, 0
        remember(self._filling, name, (k, n + 1), REMEMBERED)
        return _group_name(name, k)

    def _next_group(self, name: str, served: str) -> None:
        k, _ = self._filling.get(name, (0, 0))
        if _group_name(name, k) == served:
            self._filling[name] = k + 1, 0

    async def _row(self, uid: str) -> TrajectoryRow | None:
        """A trajectory of a live group."""
        page = await self._ask(
            self._pool.list_trajectories(channel=self._config.channel, limit=1, trajectory_uid=uid)
        )
        return page.items[0] if page.items else None

    async def _ask(self, answer: Awaitable[Any], room_s: float = 0.0) -> Any:
        """`room_s`: how long it may wait for room in the channel."""
        return await ask(answer, self._config.pool_timeout_s + room_s)


def _group_name(name: str, k: int) -> str:
    """A name of its own for each name and number: an instance may itself be called `17#1`."""
    return f"{name}#{k}" if k or "#" in name else name


def remember(memory: OrderedDict[str, Any], key: str, value: Any, limit: int) -> None:
    memory[key] = value
    memory.move_to_end(key)
    while len(memory) > limit:
        memory.popitem(last=False)
