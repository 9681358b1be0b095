"""This module stores what `/buffer/write` is sent, so that rollouts from outside are Steps in the
pool.

    {trajectory_uid, reward}      its calls came through the gateway ──► completed with the reward
    {tokens, response_length, …}  sampled elsewhere ──► Steps of a new trajectory, completed
    text alone                    refused: text is never tokenised as if it had been sampled

Items of one `instance_id` fill one group after the other: `17`, `17#1`, `17#2`, … with
`num_repeat_per_sample` each. Writing an item again (the same uid) is harmless. Does not own: what
is served (`buffer.py`), the shape of what goes out (`items.py`).
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
)

from stepwell.datapool.errors import InvalidStepError, StepConflictError, UnknownTrajectoryError
from stepwell.datapool.errors import TrajectoryClosedError as PoolTrajectoryClosedError
from stepwell.datapool.errors import TrajectoryConflictError as PoolTrajectoryConflictError
from stepwell.datapool.inspect.rows import TrajectoryRow
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.types import Step
from stepwell.gateway.config import REMEMBERED, GatewayConfig
from stepwell.gateway.errors import RequestError, TrajectoryClosedError, TrajectoryConflictError
from stepwell.gateway.slime_buffer.items import INSTANCE, WRITTEN
from stepwell.gateway.trajectory.outcomes import Outcomes
from stepwell.gateway.trajectory.recording import ask

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


def _named(value: int | str) -> int | str:
    if value == "":
        raise ValueError("send a string or an integer")
    return value


_Id: TypeAlias = Annotated[int | str, AfterValidator(_named)]
_Number: TypeAlias = Annotated[float, Field(ge=-1e308, le=1e308)]
_Token: TypeAlias = Annotated[int, Field(ge=0, lt=2**31)]
_Version: TypeAlias = (
    Annotated[int, Field(ge=0, lt=10**18)]
    | Annotated[str, StringConstraints(pattern=r"^(\d{1,18}|default)$")]
)


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class _Message(_Body):
    role: str


class _Sampling(_Body):
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None


class Start(_Body):
    """`/start_rollout`. slime sends its numbers as strings."""

    num_repeat_per_sample: (
        Annotated[int, Field(ge=1)]
        | Annotated[str, StringConstraints(pattern=r"^\s*0*[1-9]\d{0,17}\s*$")]
    )
    skip_instance_ids: list[_Id] | None = None

    @property
    def repeats(self) -> int:
        return int(self.num_repeat_per_sample)

    @property
    def skipped(self) -> Counter[str]:
        return Counter(map(str, self.skip_instance_ids or ()))


class Item(_Body):
    """`/buffer/write`."""

    instance_id: _Id
    uid: _Id | None = None
    reward: _Number | None
    """Null: it is not scored yet."""
    trajectory_uid: str | None = None
    """Recorded here before; None: the item brings its tokens."""
    messages: list[_Message] | None = None
    extra_info: dict[str, Any] | None = None
    tokens: list[_Token] | None = None
    response_length: int | None = None
    loss_mask: list[Literal[0, 1]] | None = None
    rollout_log_probs: list[_Number] | None = None
    weight_versions: list[_Version] | None = None
    """One per call or one for all; SGLang's name of the first weights is "default"."""
    sampling_params: dict[str, Any] | None = None
    """slime's generators put them among `extra_info`."""
    finish_reason: str | None = None
    status: str | None = None

    def steps(self) -> list[Step]:
        """One Step per run of ones in the loss mask, each prompt being all that came before. What
        follows the last sampled token is left out: nothing was conditioned on it. The uids are to
        be filled in.

        Raises:
            RequestError: a field is missing or contradicts another.
        """
        tokens, length = self.tokens or [], self.response_length or 0
        if not 1 <= length < len(tokens):
            name = "response_length" if tokens else "tokens"
            raise RequestError(
                f"response_length is {self.response_length} of {len(tokens)} tokens; send all "
                "tokens and how many of them are not the prompt",
                name,
            )
        mask = [1] * length if self.loss_mask is None else self.loss_mask
        for name, column in (("loss_mask", mask), ("rollout_log_probs", self.rollout_log_probs)):
            if column is not None and len(column) != length:
                raise RequestError(
                    f"{name} has {len(column)} values; send {length} (response_length), or leave "
                    "it out",
                    name,
                )
        edges = np.flatnonzero(np.diff(mask, prepend=0, append=0)).tolist()
        runs = list(zip(edges[::2], edges[1::2], strict=True))
        if not runs:
            raise RequestError(
                "loss_mask marks no token as sampled; send at least one 1", "loss_mask"
            )
        if not self.weight_versions:
            raise RequestError(
                "weight_versions is missing; send the versions of the weights that sampled the "
                'tokens, one per call or one for all, e.g. ["3"]',
                "weight_versions",
            )
        versions = [0 if v == "default" else int(v) for v in self.weight_versions]
        # With another number of calls than of runs, which made which is not known: the oldest
        # bounds the staleness of all.
        of_run = versions if len(versions) == len(runs) else [min(versions)] * len(runs)
        extra = self.extra_info or {}
        sampling = parse(_Sampling, self.sampling_params or extra).model_dump(exclude_none=True)
        ended_by = self.finish_reason or extra.get("finish_reason")
        truncated = ended_by == "length" or self.status == "truncated"
        ids, start = np.asarray(tokens, np.int32), len(tokens) - length
        log_probs = self.rollout_log_probs
        try:
            return [
                Step(
                    prompt_ids=ids[: start + begin],
                    response_ids=ids[start + begin : start + end],
                    trajectory_uid="-",
                    prompt_uid="-",
                    step_index=k,
                    policy_version=of_run[k],
                    metadata={"sampling_params": sampling} if sampling else {},
                    rollout_log_probs=None
                    if log_probs is None
                    else np.asarray(log_probs[begin:end], np.float32),
                    finish_reason="length" if truncated and end == edges[-1] else "stop",
                    parent_index=k - 1 if k else None,
                )
                for k, (begin, end) in enumerate(runs)
            ]
        except InvalidStepError as e:
            raise RequestError(f"the item makes no Step: {e}", "tokens") from e


def parse(kind: type[M], body: Mapping[str, Any]) -> M:
    """
    Raises:
        RequestError: names the first field that is wrong.
    """
    try:
        return kind.model_validate(body)
    except ValidationError as e:
        first = e.errors()[0]
        field, *place = first["loc"]
        item = place[0] if place and field in ("messages", "skip_instance_ids") else None
        name = str(field) if item is None else f"{field}[{item}]"
        raise RequestError(f"{name}: {first['msg']} (got {first['input']!r:.80})", name) from e


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

    async def write(self, body: Mapping[str, Any], repeats: int | None) -> None:
        """Store a rollout that came from outside, or complete one whose calls were recorded here.
        Repeating it is harmless.

        Args:
            repeats: items per group; None: an instance's group fills up until it is served.

        Raises:
            RequestError, TrajectoryConflictError, TrajectoryClosedError, PoolUnavailableError
        """
        item = await asyncio.to_thread(parse, Item, body)
        written = {"messages": body.get("messages"), "extra_info": item.extra_info}
        written["uid"] = None if item.uid is None else str(item.uid)
        metadata = {
            INSTANCE: item.instance_id,
            WRITTEN: {k: v for k, v in written.items() if v not in (None, [], {})},
        }
        if item.trajectory_uid:
            await self._complete(item, item.trajectory_uid, metadata)
        elif item.tokens is not None:
            await self._store(item, metadata, repeats)
        else:
            raise RequestError(
                "the item has neither trajectory_uid nor tokens, and text is never tokenised as if "
                "it had been sampled. Send the trajectory_uid of the rollout that made its calls "
                "through this gateway (POST /init_trajectory), or tokens, response_length and "
                "weight_versions (and loss_mask, rollout_log_probs) as they were sampled",
                "trajectory_uid",
            )

    async def _complete(self, item: Item, uid: str, metadata: dict[str, Any]) -> None:
        """The trajectory's agent is done: close it with its reward."""
        try:
            outcome = await self._outcomes.complete(uid, item.reward, metadata)
        except UnknownTrajectoryError as e:
            raise RequestError(
                f"trajectory_uid is {uid!r}, which no call was recorded for", "trajectory_uid"
            ) from e
        except (TrajectoryClosedError, PoolTrajectoryClosedError) as e:
            # Completed without a reward, it takes the one that it is written with.
            row = await self._row(uid)
            unscored = row is not None and row.state == "complete" and row.reward is None
            if not unscored or item.reward is None:
                raise TrajectoryClosedError(str(e)) from e
            _check_in_time(uid, await self._outcomes.score(uid, item.reward) == "late")
            return
        if outcome == "aborted":
            raise TrajectoryConflictError(
                f"trajectory {uid!r} has no recorded call and cannot be served; let its agent call "
                "through the base_url that /init_trajectory returns"
            )
        _check_in_time(uid, outcome == "late")

    async def _store(self, item: Item, metadata: dict[str, Any], repeats: int | None) -> None:
        uid = str(uuid.uuid4().hex if item.uid is None else item.uid)
        # All that can be wrong with the item is found before anything is opened.
        found = await asyncio.to_thread(item.steps)
        home = await self._home(uid, str(item.instance_id), repeats)
        steps = [
            replace(s, trajectory_uid=home.trajectory_uid, prompt_uid=home.prompt_uid)
            for s in found
        ]
        channel, room_s = self._config.channel, self._config.queue_timeout_s
        try:
            submitted = await self._ask(
                self._pool.submit_steps(steps, channel=channel, timeout_s=room_s), room_s
            )
            outcome = await self._ask(
                self._pool.complete_trajectory(
                    home.trajectory_uid, item.reward, metadata, channel=channel
                )
            )
        except (StepConflictError, PoolTrajectoryConflictError) as e:
            raise TrajectoryConflictError(
                f"uid {uid!r} was written before with other content ({e})"
            ) from e
        except PoolTrajectoryClosedError as e:
            raise TrajectoryClosedError(str(e)) from e
        _check_in_time(uid, outcome == "late" or ("late" in submitted and outcome != "complete"))

    async def _home(self, uid: str, instance: str, repeats: int | None) -> _Home:
        """The trajectory and the group of a written item: the instance's group that is filling up,
        or its next one."""
        home = self._homes.get(uid)
        if home is None and (row := await self._row(uid)) is not None:
            return _Home(uid, row.prompt_uid, is_open=True)
        trajectory_uid = uid
        while home is None or not home.is_open:
            if home is None:
                # Taken before waiting: items that are written at once do not overfill a group, and
                # a write that fails and comes again has its place.
                home = _Home(trajectory_uid, self._place(instance, repeats), is_open=False)
                remember(self._homes, uid, home)
            trajectory_uid, prompt_uid, _ = home
            room_s = self._config.queue_timeout_s
            try:
                opened = await self._ask(
                    self._pool.open_trajectory(
                        trajectory_uid,
                        prompt_uid,
                        channel=self._config.channel,
                        timeout_s=room_s,
                    ),
                    room_s,
                )
            except PoolTrajectoryConflictError as e:
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
                home = home._replace(is_open=True)
                remember(self._homes, uid, home)
        return home

    def _place(self, instance: str, repeats: int | None) -> str:
        """A place in the instance's group that is filling up: its prompt_uid."""
        k, n = self._filling.get(instance, (0, 0))
        if repeats is not None and n >= repeats:
            k, n = k + 1, 0
        remember(self._filling, instance, (k, n + 1))
        return _group_name(instance, k)

    async def _row(self, uid: str) -> TrajectoryRow | None:
        """A trajectory of a live group."""
        page = await self._ask(
            self._pool.list_trajectories(channel=self._config.channel, limit=1, trajectory_uid=uid)
        )
        return page.items[0] if page.items else None

    async def _ask(self, answer: Awaitable[T], room_s: float = 0.0) -> T:
        """`room_s`: how long it may wait for room in the channel."""
        return await ask(answer, self._config.pool_timeout_s + room_s)


def _check_in_time(uid: str, is_late: bool) -> None:
    if is_late:
        raise TrajectoryClosedError(
            f"{uid!r} came too late: its group was served or dropped without it"
        )


def _group_name(name: str, k: int) -> str:
    """A name of its own for each name and number: an instance may itself be called `17#1`."""
    return f"{name}#{k}" if k or "#" in name else name


def remember(memory: OrderedDict[str, T], key: str, value: T) -> None:
    memory[key] = value
    memory.move_to_end(key)
    while len(memory) > REMEMBERED:
        memory.popitem(last=False)
