"""This module stores what `/buffer/write` is sent, so that rollouts from outside are Steps in the
pool.

    {trajectory_uid, reward}      its calls came through the gateway ──► completed with the reward
    {tokens, response_length, …}  sampled elsewhere ──► Steps of a new trajectory, completed
    {messages}                    likewise, their ids from the text (`text.py`): no log-probs

Other fields are kept and come back as they were sent. Items of one `instance_id` fill one group
after the other: `17`, `17#1`, `17#2`, … with `num_repeat_per_sample` each. Writing an item again
(the same uid) is harmless. Does not own: what is served (`buffer.py`), the shape of what goes out
(`items.py`).
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from cachetools import LRUCache
from pydantic import ConfigDict, Field, PlainValidator

from stepwell.datapool.errors import (
    InvalidStepError,
    PoolFullError,
    StepConflictError,
    TrajectoryClosedError,
    TrajectoryConflictError,
    UnknownTrajectoryError,
)
from stepwell.datapool.types import MAX_REWARD, Step
from stepwell.gateway.config import REMEMBERED, GatewayConfig
from stepwell.gateway.dialects.params import Params, Part, wrong
from stepwell.gateway.errors import RequestError
from stepwell.gateway.pool_access import PoolAccess
from stepwell.gateway.prompt import Prompts
from stepwell.gateway.slime_buffer.items import INSTANCE, WRITTEN
from stepwell.gateway.slime_buffer.text import TextRollouts
from stepwell.gateway.trajectory.store import Outcomes


def _named(value: Any) -> int | str:
    if type(value) not in (int, str) or value == "":
        raise ValueError("send a string or an integer")
    named: int | str = value
    return named


def _column(kind: type[np.generic], low: float, high: float) -> PlainValidator:
    """A list of numbers as an array; the fields of a row are long, and each is one."""
    kinds = (int,) if issubclass(kind, np.integer) else (int, float)
    wanted = f"send a list of {'integers' if kinds == (int,) else 'numbers'} in [{low:g}, {high:g}]"

    def check(values: Any) -> npt.NDArray[Any]:
        if type(values) is not list or not values or not all(type(v) in kinds for v in values):
            raise ValueError(wanted)
        if not low <= min(values) <= max(values) <= high:
            raise ValueError(wanted)
        return np.asarray(values, kind)

    return PlainValidator(check)


def _count(value: Any) -> int:
    """slime sends its numbers as strings."""
    if isinstance(value, str) and value.strip().isdecimal() and len(value) <= 18:
        value = int(value)
    if type(value) is not int or value < 1:
        raise ValueError("send an integer >= 1")
    return value


def _versions(values: Any) -> list[int]:
    """SGLang's name of the first weights is "default"."""
    texts = ["0" if v == "default" else str(v) for v in values] if type(values) is list else []
    if not texts or not all(text.isdecimal() and len(text) <= 18 for text in texts):
        raise ValueError("send policy versions, decimal integers, one per call or one for all")
    return [int(text) for text in texts]


_Id: TypeAlias = Annotated[int | str, PlainValidator(_named)]
_Ids: TypeAlias = Annotated[npt.NDArray[np.int32], _column(np.int32, 0, 2**31 - 1)]
_Mask: TypeAlias = Annotated[npt.NDArray[np.int32], _column(np.int32, 0, 1)]
_LogProbs: TypeAlias = Annotated[npt.NDArray[np.float32], _column(np.float32, -1e38, 1e38)]


class _Fields(Params):
    model_config = ConfigDict(extra="ignore", arbitrary_types_allowed=True)


class Start(_Fields):
    """`/start_rollout`."""

    num_repeat_per_sample: Annotated[int, PlainValidator(_count)]
    skip_instance_ids: list[_Id] | None = None


COLUMNS = frozenset(
    (
        "instance_id",
        "reward",
        "trajectory_uid",
        "tokens",
        "response_length",
        "loss_mask",
        "rollout_log_probs",
        "weight_versions",
    )
)
"""Fields of an item that the pool keeps by itself; all others are kept as they were sent."""


class _Message(Part):
    role: str


class _Sampling(_Fields):
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None


class Item(_Fields):
    """`/buffer/write`."""

    instance_id: _Id
    uid: _Id | None = None
    reward: Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD)] | None = None
    trajectory_uid: str | None = None
    """Recorded here before; None: the item brings its tokens."""
    messages: list[_Message] | None = None
    """None: the item brings its tokens, or its calls were recorded here."""
    tools: list[Any] | None = None
    """Tools that the model was shown; None: those in `extra_info`, if any."""
    extra_info: dict[str, Any] | None = None
    tokens: _Ids | None = None
    response_length: int = 0
    loss_mask: _Mask | None = None
    rollout_log_probs: _LogProbs | None = None
    weight_versions: Annotated[list[int], PlainValidator(_versions)] | None = None
    sampling_params: dict[str, Any] | None = None
    """slime's generators put them among `extra_info`."""
    finish_reason: str | None = None
    status: str | None = None

    def steps(self, body: Mapping[str, Any], text: TextRollouts, version: int) -> list[Step]:
        """The rollout's Steps, without uids.

        Args:
            body: that this item was read from.
            version: the newest that can have sampled it, for an item that does not say.

        Raises:
            RequestError: a field is missing or contradicts another.
        """
        extra = self.extra_info or {}
        ended_by = self.finish_reason or extra.get("finish_reason")
        truncated = ended_by == "length" or self.status == "truncated"
        if self.tokens is not None:
            steps = self._of_tokens(truncated=truncated)
            if not self.weight_versions:
                problem = 'send the versions that sampled, e.g. ["3"]'
                raise wrong("weight_versions", None, problem)
        else:
            tools = self.tools or extra.get("tools")
            given = tools if isinstance(tools, list) else None
            steps = text.steps(body["messages"], given, truncated=truncated)
        versions = self.weight_versions or [version]
        # With another number of calls than of Steps, which made which is not known: the oldest
        # bounds the staleness of all.
        if len(versions) != len(steps):
            versions = [min(versions)] * len(steps)
        params = _Sampling.read(self.sampling_params or extra).model_dump(exclude_none=True)
        told = {"sampling_params": params} if params else {}
        return [
            replace(s, policy_version=v, metadata={**s.metadata, **told})
            for s, v in zip(steps, versions, strict=True)
        ]

    def _of_tokens(self, *, truncated: bool) -> list[Step]:
        """One Step per run of ones in the loss mask, each prompt being all that came before. What
        follows the last sampled token is left out: nothing was conditioned on it."""
        ids, n = self.tokens, self.response_length
        if ids is None or not 1 <= n < len(ids):
            most = 0 if ids is None else len(ids) - 1
            raise wrong("response_length", n, f"send an integer in [1, {most}]: all but the prompt")
        mask = np.ones(n, np.int32) if self.loss_mask is None else self.loss_mask
        log_probs = self.rollout_log_probs
        for name, column in (("loss_mask", mask), ("rollout_log_probs", log_probs)):
            if column is not None and len(column) != n:
                problem = f"{name} has {len(column)} values; send {n} (response_length), or none"
                raise RequestError(problem, name)
        edges = np.flatnonzero(np.diff(mask, prepend=0, append=0)).tolist()
        runs = list(zip(edges[::2], edges[1::2], strict=True))
        if not runs:
            raise wrong("loss_mask", mask.tolist(), "send at least one 1, for a sampled token")
        start = len(ids) - n
        try:
            return [
                Step(
                    prompt_ids=ids[: start + begin],
                    response_ids=ids[start + begin : start + end],
                    trajectory_uid="-",
                    prompt_uid="-",
                    step_index=k,
                    rollout_log_probs=None if log_probs is None else log_probs[begin:end],
                    finish_reason="length" if truncated and end == edges[-1] else "stop",
                    parent_index=k - 1 if k else None,
                )
                for k, (begin, end) in enumerate(runs)
            ]
        except InvalidStepError as e:
            raise RequestError(f"the item makes no Step: {e}", "tokens") from e


class _Home(NamedTuple):
    """Trajectory and group in which a written item is stored."""

    trajectory_uid: str
    prompt_uid: str
    is_open: bool
    """The pool has said so."""


class RolloutWriter:
    """Stores written items. Owned by the `RolloutBuffer`."""

    def __init__(
        self,
        config: GatewayConfig,
        pool_access: PoolAccess,
        outcomes: Outcomes,
        text: TextRollouts,
        prompts: Prompts,
    ) -> None:
        self._prompts = prompts
        self._channel = config.channel
        self._pool_access, self._pool = pool_access, pool_access.pool
        self._outcomes = outcomes
        self._text = text
        self._filling: LRUCache[str, tuple[int, int]] = LRUCache(REMEMBERED)
        """By instance id: (number of its group that is filling up, items in it)."""
        self._left: LRUCache[str, list[str]] = LRUCache(REMEMBERED)
        """By instance id: groups with a place that was taken and is free again."""
        self._homes: LRUCache[str, _Home] = LRUCache(REMEMBERED)
        """By uid: a repeated write is the same rollout."""
        self._earlier: LRUCache[str, bool] = LRUCache(REMEMBERED)
        """Instance ids of which an earlier process had written items."""
        self._looking: dict[str, asyncio.Task[tuple[int, int]]] = {}
        """By instance id: the pool is asked what there is of it."""

    async def write(self, body: Mapping[str, Any], repeats: int | None, version: int) -> str:
        """Store a rollout that came from outside, or complete one whose calls were recorded here.
        Repeating it is harmless.

        Args:
            repeats: items per group; None: an instance's group fills up until it is served.
            version: of the policy, which an item of messages was sampled by at the latest.

        Returns:
            `recorded`, `tokens` or `text`: what the item's Steps were made of.

        Raises:
            RequestError, TrajectoryConflictError, TrajectoryClosedError; one of UNAVAILABLE
        """
        item = await asyncio.to_thread(Item.read, body)
        if "reward" not in body:
            raise wrong("reward", None, "send a number, or null if it is not scored yet")
        written = {k: v for k, v in body.items() if k not in COLUMNS}
        if item.uid is not None:
            written["uid"] = str(item.uid)
        metadata = {INSTANCE: item.instance_id, WRITTEN: written}
        if item.trajectory_uid:
            await self._complete(item, item.trajectory_uid, metadata)
            return "recorded"
        if item.tokens is None and not item.messages:
            raise RequestError(
                "the item has neither trajectory_uid nor tokens nor messages; send the "
                "trajectory_uid of a rollout that made its calls through this gateway (POST "
                "/init_trajectory), or tokens, response_length and weight_versions (and loss_mask, "
                "rollout_log_probs) as they were sampled, or its messages",
                "messages",
            )
        # All that can be wrong with the item is found before anything is opened.
        steps = await asyncio.to_thread(item.steps, body, self._text, version)
        for step in steps:
            self._prompts.refuse_other_ids(step.token_ids, "tokens")
        await self._store(item, steps, metadata, repeats)
        return "text" if item.tokens is None else "tokens"

    async def _complete(self, item: Item, uid: str, metadata: dict[str, Any]) -> None:
        """The trajectory's agent is done: close it with its reward."""
        try:
            outcome = await self._outcomes.complete(uid, item.reward, metadata)
        except UnknownTrajectoryError as e:
            raise RequestError(
                f"trajectory_uid is {uid!r}, which no call was recorded for", "trajectory_uid"
            ) from e
        except TrajectoryClosedError:
            # Completed already, perhaps by its agent: it has the reward that it is written with.
            if item.reward is None:
                raise
            _check_in_time(uid, await self._outcomes.score(uid, item.reward) == "late")
            return
        if outcome == "aborted":
            raise TrajectoryConflictError(
                f"trajectory {uid!r} has no recorded call and cannot be served; let its agent call "
                "through the base_url that /init_trajectory returns"
            )
        _check_in_time(uid, outcome == "late")

    async def _store(
        self, item: Item, found: list[Step], metadata: dict[str, Any], repeats: int | None
    ) -> None:
        uid = str(uuid.uuid4().hex if item.uid is None else item.uid)
        instance = str(item.instance_id)
        try:
            home = await self._home(uid, instance, repeats)
        except PoolFullError:
            if item.uid is None:  # it cannot come again under its name
                left = self._homes.pop(uid).prompt_uid
                self._left[instance] = [*self._left.get(instance, ()), left]
            raise
        steps = [
            replace(s, trajectory_uid=home.trajectory_uid, prompt_uid=home.prompt_uid)
            for s in found
        ]
        channel, ask, room_s = self._channel, self._pool_access.ask, self._pool_access.room_s
        try:
            submitted = await ask(
                self._pool.submit_steps(steps, channel=channel, timeout_s=room_s), room=True
            )
            outcome = await ask(
                self._pool.complete_trajectory(home.trajectory_uid, item.reward, channel, metadata)
            )
        except (StepConflictError, TrajectoryConflictError) as e:
            raise TrajectoryConflictError(
                f"uid {uid!r} was written before with other content ({e})"
            ) from e
        _check_in_time(uid, outcome == "late" or ("late" in submitted and outcome != "complete"))

    async def _home(self, uid: str, instance: str, repeats: int | None) -> _Home:
        """The trajectory and the group of a written item: the instance's group that is filling up,
        or its next one."""
        home, trajectory_uid = self._homes.get(uid), uid
        if home is None and instance not in self._filling:
            await self._look(instance, repeats)
        if home is None and instance in self._earlier:
            found = await self._written(uid, instance)
            if found is not None:
                self._homes.setdefault(uid, found)
            home = self._homes.get(uid)
        while home is None or not home.is_open:
            if home is None:
                # Taken before waiting: items that are written at once do not overfill a group, and
                # a write that fails and comes again has its place.
                home = _Home(trajectory_uid, self._place(instance, repeats), is_open=False)
                self._homes[uid] = home
            trajectory_uid, prompt_uid, _ = home
            opening = self._pool.open_trajectory(
                trajectory_uid,
                prompt_uid,
                channel=self._channel,
                timeout_s=self._pool_access.room_s,
            )
            try:
                opened = await self._pool_access.ask(opening, room=True)
            except TrajectoryConflictError as e:
                raise TrajectoryConflictError(
                    f"uid is {uid!r}, which another trajectory has; send a uid of its own ({e})"
                ) from e
            if opened == "late":
                # That group was served, and the pool remembers the uid as its latecomer's.
                k, _ = self._filling.get(instance, (0, 0))
                if _group_name(instance, k) == prompt_uid:
                    self._filling[instance] = k + 1, 0
                trajectory_uid, home = f"{trajectory_uid}+", None
            else:
                home = self._homes[uid] = home._replace(is_open=True)
        return home

    async def _look(self, instance: str, repeats: int | None) -> None:
        """Find the group of an instance that is filling up, where an earlier process may have begun
        one."""
        looking = self._looking.get(instance)
        if looking is None:
            looking = asyncio.create_task(self._fill(instance, repeats))
            self._looking[instance] = looking
            looking.add_done_callback(lambda _: self._looking.pop(instance))
        found = await asyncio.shield(looking)
        self._filling.setdefault(instance, found)
        if found != (0, 0):
            self._earlier[instance] = True

    async def _fill(self, instance: str, repeats: int | None) -> tuple[int, int]:
        k = 0
        while True:
            name = _group_name(instance, k)
            asking = self._pool.list_groups(self._channel, prompt_uid=name)
            rows = (await self._pool_access.ask(asking)).items
            n = sum(row.n_complete + row.n_running for row in rows)
            if repeats is None or n < repeats:
                return k, n
            k += 1

    async def _written(self, trajectory_uid: str, instance: str) -> _Home | None:
        """Return where an earlier process stored an item of this instance; None: nowhere."""
        asking = self._pool.list_trajectories(self._channel, trajectory_uid=trajectory_uid)
        rows = (await self._pool_access.ask(asking)).items
        names = (row.prompt_uid for row in rows)
        found = next((name for name in names if _instance_named(name) == instance), None)
        return None if found is None else _Home(trajectory_uid, found, is_open=True)

    def _place(self, instance: str, repeats: int | None) -> str:
        """A place in the instance's group that is filling up: its prompt_uid."""
        if left := self._left.pop(instance, None):
            if left[1:]:
                self._left[instance] = left[1:]
            return left[0]
        k, n = self._filling.get(instance, (0, 0))
        if repeats is not None and n >= repeats:
            k, n = k + 1, 0
        self._filling[instance] = k, n + 1
        return _group_name(instance, k)


def _check_in_time(uid: str, is_late: bool) -> None:
    if is_late:
        raise TrajectoryClosedError(
            f"{uid!r} came too late: its group was served or dropped without it"
        )


def _group_name(name: str, k: int) -> str:
    """A name of its own for each name and number: an instance may itself be called `17#1`."""
    return f"{name}#{k}" if k or "#" in name else name


def _instance_named(group: str) -> str:
    """The instance of a `_group_name`."""
    return group.rpartition("#")[0] or group
