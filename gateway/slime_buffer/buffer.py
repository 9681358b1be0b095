"""This module leases the groups that slime's Rollout Buffer API serves, and drops those that it may
not serve.

    ready in the pool ──take──► leased ──judged──► served ──► acked with the answer's last bytes
                                  │                  └──────► returned, if nobody got them
                                  └─► dropped: skipped, too small, unscored, with pictures

Never served: groups with fewer than `num_repeat_per_sample` trajectories, those that the rollout
generator's own `is_valid_group` refuses, and groups with an unscored one (missing is not zero). The
pool's filter `scored` holds the latter until they are scored; without it they are dropped here,
counted as `unscored`, since a leased group cannot be scored any more. Groups with pictures go as
`pictures`: an item has tokens and text, and placeholders alone would be trained as other pictures.

A gateway that is started again serves on by the last `/start_rollout`, which the run's folder
keeps.

Owns: what is served. Does not own: the routes and a delivery's end (`router.py`), the shape of
items (`items.py`), writing (`writes.py`), order and filters (the pool).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from cachetools import LRUCache

from stepwell.datapool.errors import (
    DamagedFileError,
    DataPoolError,
    GroupClosedError,
    UnknownGroupError,
    UnknownLeaseError,
)
from stepwell.datapool.sealed import read_sealed, write_sealed
from stepwell.datapool.types import Group, Lease, Trajectory
from stepwell.gateway.config import LAST_START, REMEMBERED, GatewayConfig
from stepwell.gateway.dialects.params import wrong
from stepwell.gateway.engine import Sampler
from stepwell.gateway.errors import UNAVAILABLE, RequestError
from stepwell.gateway.pool_access import PoolAccess
from stepwell.gateway.prompt import Prompts
from stepwell.gateway.slime_buffer.generators import (
    EXTERNAL,
    Generator,
    GeneratorError,
    chosen,
    load_generators,
)
from stepwell.gateway.slime_buffer.items import InstanceId, instance_of, make_item
from stepwell.gateway.slime_buffer.process import RolloutProcess
from stepwell.gateway.slime_buffer.text import TextRollouts
from stepwell.gateway.slime_buffer.writes import RolloutWriter, Start
from stepwell.gateway.tokens.messages import TurnMessages
from stepwell.gateway.trajectory.store import Outcomes

log = logging.getLogger(__name__)

MAX_GROUPS = 256
"""Groups in one answer if `gateway.rollout_batch_groups` is null."""
ACK_RETRY_S = 0.5
SKIPPED, GROUP_SIZE, UNSCORED = "skip_instance_ids", "group_size", "unscored"
INVALID, PICTURES = "is_valid_group", "pictures"
"""Why a group is dropped."""

JSON_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


@dataclass(frozen=True, slots=True)
class Served:
    """A group as it is delivered."""

    group: Group
    instance_id: InstanceId
    trajectories: Sequence[Trajectory]


class RolloutBuffer:
    """Serves what consumers ask for, from and to the pool. Owned by the app's lifespan."""

    def __init__(
        self,
        config: GatewayConfig,
        pool_access: PoolAccess,
        outcomes: Outcomes,
        prompts: Prompts,
        turn_messages: TurnMessages,
        engine: Sampler,
        engine_urls: Collection[str],
        run_dir: Path | None = None,
    ) -> None:
        """
        Args:
            run_dir: folder of the run, which keeps what was started last; None: a restart forgets.

        Raises:
            GatewayConfigError: see `TextRollouts` and `load_generators`.
        """
        self._config = config
        self._pool, self._ask = pool_access.pool, pool_access.ask
        self._engine = engine
        self._tokenizer = prompts.renderer.tokenizer
        self._repeats: int | None = None
        self._skip: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._ids: LRUCache[str, str] = LRUCache(REMEMBERED)
        """Group served last under an instance id."""
        text = TextRollouts(config, prompts, turn_messages)
        self._writer = RolloutWriter(config, pool_access, outcomes, text, prompts)
        self._generators = load_generators(config.rollout_generators)
        self._generator: Generator | None = None
        self._task_type = ""
        self._process = RolloutProcess()
        self._engine_urls = engine_urls
        self._returns: set[asyncio.Task[None]] = set()
        self._file = None if run_dir is None else run_dir / LAST_START
        self._writing = asyncio.Lock()
        self._has_lost = False
        """The generator of the last start ended with the gateway before this one."""
        self._go_on()

    def statistics(self) -> dict[str, Any]:
        return {
            "num_repeat_per_sample": self._repeats,
            "generator": self._process.state,
            **self._counts,
            "dropped_groups": dict(self._dropped),
        }

    async def close(self) -> None:
        """End the generator; let what was taken go back."""
        await self._process.stop()
        await asyncio.gather(*self._returns)

    async def start(self, payload: dict[str, Any], origin: str, key: str) -> str:
        """Run the generator of the payload's `task_type`, which is told `gateway_url` beside what
        was sent; from now on `/get_rollout_data` serves what this payload asks for.

        Args:
            key: with which the generator may write.

        Returns:
            What was done, in words.

        Raises:
            RequestError: there is no such generator, or the payload is not for it.
        """
        wanted = Start.read(payload)
        generator = await asyncio.to_thread(chosen, self._generators, payload.get("task_type"))
        url = (self._config.public_url or origin).rstrip("/")
        told = {**payload, "gateway_url": url, "reward_fn": self._config.reward_fn}
        engine = str(payload.get("remote_engine_url") or url).rstrip("/").removesuffix("/v1")
        if generator is not None and generator.is_built_in and engine in (url, *self._engine_urls):
            told["remote_engine_url"] = None  # calls through this gateway are recorded
        if generator is not None:
            await asyncio.to_thread(generator.check, told)
        self._repeats = wanted.num_repeat_per_sample
        self._skip = Counter(map(str, wanted.skip_instance_ids or ()))
        self._dropped.clear()
        self._generator, self._task_type = generator, str(payload["task_type"])
        self._has_lost = False
        await self._keep()
        if generator is None:
            await self._process.stop()
            return f"Nothing was started: task_type {EXTERNAL} waits for rollouts from outside"
        await self._process.start(generator, told, key)
        return "Rollout started"

    async def _keep(self) -> None:
        """Write down what was started last, and what of it is still to be skipped."""
        if (file := self._file) is None:
            return
        async with self._writing:  # one after the other: the last one counts
            skip = {name: n for name, n in self._skip.items() if n > 0}
            started = {"task_type": self._task_type, "num_repeat_per_sample": self._repeats}
            try:
                await asyncio.to_thread(write_sealed, file, {**started, "skip": skip})
            except OSError as e:  # a full disk, or a folder of another machine
                log.warning("a gateway that is started again will not know the rollout: %s", e)

    def _go_on(self) -> None:
        """Go on with what was started before a restart. Its generator has ended with the gateway;
        its functions still judge the groups."""
        if self._file is None:
            return
        try:
            started = read_sealed(self._file, "send POST /start_rollout again")
        except FileNotFoundError:
            return
        except (OSError, DamagedFileError) as e:
            log.warning("the last rollout is not known any more: %s", e)
            return
        self._task_type, self._repeats = started["task_type"], started["num_repeat_per_sample"]
        self._skip = Counter(started["skip"])
        try:
            self._generator = chosen(self._generators, self._task_type)
            self._has_lost = self._generator is not None
        except (RequestError, ImportError) as e:
            log.warning("groups are served without their generator: %s", e)

    def nothing(self) -> tuple[str, dict[str, Any]]:
        """Why there is nothing to serve, and the `meta_info` that says so.

        Raises:
            GeneratorError: the generator failed, so nothing will come.
        """
        state = self._process.state
        if self._generator is None:
            return "No data available to read", {}
        if self._has_lost:
            raise GeneratorError(
                f"No data available to read: the rollout of task_type {self._task_type!r} ended "
                "with the gateway, which was started again, unless it had finished; start it again "
                "with POST /start_rollout"
            )
        if state.startswith("failed"):
            raise GeneratorError(
                f"No data available to read: the rollout of task_type {self._task_type!r} {state}; "
                "start it again with POST /start_rollout"
            )
        return f"No data available to read; the rollout is {state}", {"generator": state}

    async def write(self, item: Mapping[str, Any]) -> None:
        """`RolloutWriter.write`."""
        # Who had an item of messages sampled does not say by which version: by none newer.
        kind = await self._writer.write(item, self._repeats, self._engine.version or 0)
        self._counts["written"] += 1
        self._counts[f"written_{kind}"] += 1

    async def take(self, num: int | None = None) -> tuple[Lease, list[Served]] | None:
        """Lease groups that can be served. None: there are none (or fewer).

        Args:
            num: items asked for; the answer has as many, rounded up to whole groups. None: as many
                groups as `gateway.rollout_batch_groups` says, or else up to `MAX_GROUPS`.

        Raises:
            RequestError, DataPoolError
        """
        channel, wanted = self._config.channel, self._config.rollout_batch_groups
        if num is not None:
            if self._repeats is None:
                raise wrong("num", num, "start a rollout first, which says how large groups are")
            wanted = -(-num // self._repeats)
        if wanted is None:
            counts = await self._ask(self._pool.get_statistics(channel))
            # Ready for the channel's own number of rollouts: a first guess.
            size = min(max(int(counts["ready"]), 1), MAX_GROUPS)
        else:
            size = wanted
        while True:
            lease = await self._ask(self._pool.lease_batch(self._repeats, channel, size))
            if lease is None:
                if wanted is not None or size == 1:
                    return None
                size = size * 3 // 4  # an undeclared group counts there with fewer rollouts
                continue
            refused: list[tuple[Group, str]] = []
            try:
                for group in lease.groups:
                    if (why := await self._refusal(group)) is not None:
                        refused.append((group, why))
            except BaseException:  # the consumer may have left, too
                self._skip_again(refused)
                self.give_back(lease)
                raise
            if not refused:
                return lease, [self._serve(g) for g in lease.groups]
            try:
                await self._ask(self._pool.nack(lease.lease_id, "holds groups not to be served"))
            finally:
                await self._drop(refused)
            if any(reason == SKIPPED for _, reason in refused):
                await self._keep()

    async def _refusal(self, group: Group) -> str | None:
        """Why a group may not be served.

        Raises:
            GeneratorError
        """
        n = self._n_repeats(group)
        if self._is_skipped(group):
            return SKIPPED
        if len(group.trajectories) < n:
            return GROUP_SIZE
        if len(_scored(group)) < n:
            return UNSCORED
        if any(step.pictures for step in group.steps):
            return PICTURES
        judge = self._generator
        if judge is None or judge.is_valid_group is None:
            return None
        served = Served(group, instance_of(group), _scored(group)[:n])

        def is_valid() -> Any:
            items = served.instance_id, self._items(served)
            found = judge.call("is_valid_group", items, n, self._task_type)
            # Generators of July 2025 return (is_valid, is_finished).
            return found[0] if isinstance(found, tuple) else found

        return None if await asyncio.to_thread(is_valid) else INVALID

    def _n_repeats(self, group: Group) -> int:
        return self._repeats or group.n_rollouts or len(group.trajectories)

    def _is_skipped(self, group: Group) -> bool:
        """Each entry of `skip_instance_ids` stands for one group that the trainer had before. A
        generator of ours was told and leaves them out itself; what it cannot know of is a group
        that was on its way already."""
        if not self._skip or (self._generator is not None and group.delivery == 1):
            return False
        for name in (str(instance_of(group)), group.prompt_uid):
            if self._skip[name] > 0:
                self._skip[name] -= 1
                return True
        return False

    def _serve(self, group: Group) -> Served:
        """The consumer groups by instance id, over several answers: another group of an instance
        that was served before goes by its prompt_uid."""
        instance_id: InstanceId = instance_of(group)
        if self._ids.get(str(instance_id), group.prompt_uid) == group.prompt_uid:
            self._ids[str(instance_id)] = group.prompt_uid
        else:
            instance_id = group.prompt_uid
        return Served(group, instance_id, _scored(group)[: self._n_repeats(group)])

    def _skip_again(self, refused: Iterable[tuple[Group, str]]) -> None:
        """Groups that are to be skipped may come again: it is not known that they were dropped."""
        self._skip.update(group.prompt_uid for group, reason in refused if reason == SKIPPED)

    async def _drop(self, refused: Sequence[tuple[Group, str]]) -> None:
        for i, (group, reason) in enumerate(refused):
            try:
                await self._ask(
                    self._pool.drop_group(group.prompt_uid, reason, channel=self._config.channel)
                )
            except (GroupClosedError, UnknownGroupError):
                # Another consumer has it meanwhile, and judges it.
                if reason == SKIPPED:
                    self._skip[str(instance_of(group))] += 1
                continue
            except BaseException:  # the consumer has left, or the pool fails: it is raised
                self._skip_again(refused[i:])
                raise
            self._dropped[reason] += 1
            if reason == UNSCORED:
                log.warning(
                    "group %r has unscored trajectories and was dropped, as a leased group cannot "
                    "be scored any more; put `scored` among the channel's selection.filters in "
                    "`pool` and the pool holds such groups until they are",
                    group.prompt_uid,
                )
            if reason == PICTURES:
                log.warning(
                    "group %r has pictures and was dropped: items of the Rollout Buffer are text; "
                    "train it on slime's Ray cluster, with --rollout-function-path "
                    "stepwell.trainer.slime.rollout.generate_rollout",
                    group.prompt_uid,
                )

    async def meta_info(self, groups: Sequence[Served]) -> dict[str, Any]:
        """slime's, or the generator's own, of the groups of this answer; and what was dropped since
        `/start_rollout`."""
        own = self._generator
        if own is not None and own.get_group_data_meta_info is not None:

            def tell() -> Any:
                items = {s.instance_id: self._items(s) for s in groups}
                return own.call("get_group_data_meta_info", items)

            meta = await asyncio.to_thread(tell)
        else:
            rewards = [t.reward or 0.0 for s in groups for t in s.trajectories]
            meta = {
                "total_samples": len(rewards),
                "num_groups": len(groups),
                "avg_group_size": len(rewards) / len(groups),
                "avg_reward": sum(rewards) / len(rewards),
            }
        return {
            **meta,
            # As `skip_instance_ids` of a resumed run will name them.
            "finished_groups": [instance_of(s.group) for s in groups],
            "dropped_groups": dict(self._dropped),
        }

    async def encode(self, served: Served) -> bytes:
        """A group's items as JSON, without the brackets."""
        return await asyncio.to_thread(self._encode, served)

    def _items(self, served: Served) -> list[dict[str, Any]]:
        return [
            make_item(t, served.group, served.instance_id, self._tokenizer)
            for t in served.trajectories
        ]

    def _encode(self, served: Served) -> bytes:
        items = self._items(served)
        if self._generator is not None and self._generator.transform_group is not None:
            group = served.instance_id, items
            raw = {item["uid"]: item["raw_reward"] for item in items}
            _, items = self._generator.call("transform_group", group, self._task_type)
            for item in items:  # which may be new ones
                item.setdefault("raw_reward", raw.get(item.get("uid"), item["reward"]))
        try:
            return orjson.dumps(items, default=str, option=JSON_OPTIONS)[1:-1]
        except orjson.JSONEncodeError:
            # Metadata may hold any value: an integer beyond 64 bits, half a surrogate.
            for item in items:
                item["extra_info"] = {str(k): ascii(v) for k, v in item["extra_info"].items()}
            return orjson.dumps(items, option=JSON_OPTIONS)[1:-1]

    async def ack(self, lease: Lease, gone: asyncio.Task[None]) -> bool:
        """Ack the lease; True if that is done. A lost answer is asked for again, for as long as the
        client is there: acking twice is harmless, and not knowing is not."""
        while True:
            try:
                await self._ask(self._pool.ack(lease.lease_id))
                return True
            except UNAVAILABLE as e:
                if gone.done():
                    return False
                log.warning("lease %s could not be acked (%s); trying again", lease.lease_id, e)
                await asyncio.wait([gone], timeout=ACK_RETRY_S)
            except DataPoolError as e:
                log.warning("lease %s is void and its answer is cut: %s", lease.lease_id, e)
                return False

    async def ack_held(self, lease_id: str) -> None:
        try:
            await self._ask(self._pool.ack(lease_id))
        except UnknownLeaseError as e:
            raise RequestError(str(e), "lease_id") from e

    def count_delivered(self, groups: Sequence[Served]) -> None:
        self._counts["delivered_groups"] += len(groups)
        self._counts["delivered_items"] += sum(len(s.trajectories) for s in groups)

    def give_back(self, lease: Lease) -> None:
        """Return an undelivered lease; a task of its own, since a cancelled one cannot wait."""
        self._counts["returned_groups"] += len(lease.groups)
        task = asyncio.create_task(self._nack(lease))
        self._returns.add(task)
        task.add_done_callback(self._returns.discard)

    async def _nack(self, lease: Lease) -> None:
        try:
            await self._ask(self._pool.nack(lease.lease_id, "the client went away"))
        except DataPoolError as e:
            log.warning(
                "lease %s was not returned (%s); unless it was acked, its groups come back when it "
                "expires",
                lease.lease_id,
                e,
            )


def _scored(group: Group) -> list[Trajectory]:
    return [t for t in group.trajectories if t.reward is not None]
