"""This module leases the groups that slime's Rollout Buffer API serves, and drops those that it may
not serve.

Never served: groups with fewer than `num_repeat_per_sample` trajectories, and groups with an
unscored one (missing is not zero). The pool's filter `scored` holds the latter until they are
scored; without it they are dropped here, counted as `unscored`, since a leased group cannot be
scored any more.

Owns: what is served, and the generator that `gateway.rollout_generator` names. Does not own: the
routes and a delivery's end (`router.py`), the shape of items (`items.py`), writing (`writes.py`),
text (`transcript.py`), order and filters (the pool), agents (they come by themselves).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias, cast

import orjson

from stepwell.datapool.dotted import resolve
from stepwell.datapool.errors import (
    DataPoolError,
    GroupClosedError,
    UnknownGroupError,
    UnknownLeaseError,
)
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.types import Group, Lease, Trajectory
from stepwell.gateway.config import REMEMBERED, GatewayConfig
from stepwell.gateway.errors import (
    GatewayConfigError,
    PoolUnavailableError,
    RequestError,
    TrajectoryConflictError,
)
from stepwell.gateway.slime_buffer.items import (
    SKIPPED,
    InstanceId,
    instance_of,
    make_item,
    parse_repeats,
    parse_skipped,
)
from stepwell.gateway.slime_buffer.transcript import Transcript
from stepwell.gateway.slime_buffer.writes import RolloutWriter, remember
from stepwell.gateway.tokens.tokenizer import ChatTokenizer
from stepwell.gateway.trajectory.outcomes import Outcomes
from stepwell.gateway.trajectory.recording import ask

log = logging.getLogger(__name__)

Generator: TypeAlias = Callable[[dict[str, Any]], Any]

MAX_GROUPS = 256
"""Groups in one answer if `gateway.rollout_batch_groups` is null."""
ACK_RETRY_S = 0.5
UNSCORED = "unscored"
GROUP_SIZE = "group_size"

JSON_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


def load_generator(config: GatewayConfig) -> Generator | None:
    """The callable behind `gateway.rollout_generator`.

    Raises:
        GatewayConfigError
    """
    path = config.rollout_generator
    if path is None:
        return None
    try:
        found = resolve(path)
    except ImportError as e:
        raise GatewayConfigError(
            f"gateway.rollout_generator is {path!r}, which cannot be imported ({e}); "
            "name a function as package.module:function"
        ) from e
    if not callable(found):
        raise GatewayConfigError(f"gateway.rollout_generator is {path!r}, which cannot be called")
    return cast("Generator", found)


@dataclass(frozen=True, slots=True)
class Served:
    """A group as it is delivered."""

    group: Group
    instance_id: InstanceId
    trajectories: tuple[Trajectory, ...]

    @property
    def rewards(self) -> list[float]:
        return [t.reward for t in self.trajectories if t.reward is not None]


class RolloutBuffer:
    """What consumers asked for, and the way from and to the pool. Owned by the app's lifespan."""

    def __init__(
        self,
        config: GatewayConfig,
        engine_urls: Sequence[str],
        pool: DataPoolClient,
        tokenizer: ChatTokenizer,
        outcomes: Outcomes,
        generate: Generator | None,
    ) -> None:
        self._config = config
        self._engine_urls = engine_urls
        self._pool = pool
        self._tokenizer = tokenizer
        self._generate = generate
        self._repeats: int | None = None
        self._skip: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._ids: OrderedDict[str, str] = OrderedDict()
        """Group served last under an instance id."""
        self._writer = RolloutWriter(config, pool, outcomes)
        self._payload: dict[str, Any] | None = None
        self._run: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._generator_state = "none" if self._generate is None else "not started"

    @cached_property
    def _transcript(self) -> Transcript:
        return Transcript(self._tokenizer, self._config.chat_template_args)

    def statistics(self) -> dict[str, Any]:
        return {
            "num_repeat_per_sample": self._repeats,
            "generator": self._generator_state,
            **self._counts,
            "dropped_groups": dict(self._dropped),
        }

    async def close(self) -> None:
        """Stop an asynchronous generator; let what was taken go back."""
        if self._run is not None:
            self._run.cancel()
            await asyncio.wait([self._run])
        if self._tasks:
            await asyncio.wait(self._tasks)

    # -- start -------------------------------------------------------------------------------

    def start(self, payload: dict[str, Any], origin: str) -> None:
        """What `/get_rollout_data` serves from now on; starts the generator, if one is configured
        and does not run with this very payload already.

        Raises:
            RequestError
        """
        repeats, skip = parse_repeats(payload), parse_skipped(payload)
        self._repeats, self._skip = repeats, skip
        self._dropped.clear()
        engine = payload.get("remote_engine_url")
        if isinstance(engine, str) and engine.rstrip("/") not in self._engine_urls:
            log.warning(
                "/start_rollout names the engine %s, but agents' calls go to %s; with "
                "engine.kind=attach engine.urls says where",
                engine,
                ", ".join(self._engine_urls) or "none",
            )
        if self._generate is None:
            return
        running = self._run is not None and not self._run.done()
        if running and payload == self._payload:
            return
        if running and self._run is not None:
            log.warning("the rollout generator was still running; it is started anew")
            # A thread cannot be stopped: its generator goes on beside the new one, as in slime.
            self._run.cancel()
        self._payload = payload
        url = (self._config.public_url or origin).rstrip("/")
        self._generator_state = "running"
        self._run = asyncio.create_task(
            self._run_generator(self._generate, {**payload, "gateway_url": url})
        )

    async def _run_generator(self, generate: Generator, payload: dict[str, Any]) -> None:
        me = asyncio.current_task()
        try:
            if inspect.iscoroutinefunction(generate):
                await generate(payload)
            else:
                await _in_daemon_thread(generate, payload)
            state = "finished"
        except Exception as e:  # foreign code: the buffer serves on, and says what happened
            log.exception("the rollout generator failed")
            state = f"failed ({type(e).__name__}: {e!s:.200})"
        if self._run is me:
            self._generator_state = state

    async def write(self, item: Mapping[str, Any]) -> None:
        """`RolloutWriter.write`."""
        await self._writer.write(item, self._repeats)
        self._counts["written"] += 1

    # -- reading -----------------------------------------------------------------------------

    async def take(self) -> tuple[Lease, list[Served]] | None:
        """Lease groups that can be served: as many as `gateway.rollout_batch_groups` says, or else
        up to `MAX_GROUPS`. None: there are none (or fewer).

        Raises:
            PoolUnavailableError, DataPoolError
        """
        config = self._config
        wanted = config.rollout_batch_groups
        if wanted is None:
            counts = await self._ask(self._pool.get_statistics(config.channel))
            # Ready for the channel's own number of rollouts: a first guess.
            size = min(max(int(counts["ready"]), 1), MAX_GROUPS)
        else:
            size = wanted
        while True:
            lease = await self._ask(
                self._pool.lease_batch(self._repeats, channel=config.channel, batch_size=size)
            )
            if lease is None:
                if wanted is not None or size == 1:
                    return None
                size = size * 3 // 4  # an undeclared group counts there with fewer rollouts
                continue
            served, refused = self._judge(lease.groups)
            if not refused:
                return lease, served
            try:
                await self._ask(self._pool.nack(lease.lease_id, "holds groups not to be served"))
            finally:
                await self._drop(refused)

    def _judge(self, groups: Iterable[Group]) -> tuple[list[Served], list[tuple[Group, str]]]:
        served: list[Served] = []
        refused: list[tuple[Group, str]] = []
        for group in groups:
            n = self._repeats or group.n_rollouts or len(group.trajectories)
            scored = [t for t in group.trajectories if t.reward is not None]
            if self._is_skipped(group):
                refused.append((group, SKIPPED))
            elif len(group.trajectories) < n:
                refused.append((group, GROUP_SIZE))
            elif len(scored) < n:
                refused.append((group, UNSCORED))
            else:
                served.append(Served(group, group.prompt_uid, tuple(scored[:n])))
        if refused:
            return served, refused
        return [self._named(s) for s in served], []

    def _is_skipped(self, group: Group) -> bool:
        """Each entry of `skip_instance_ids` stands for one group that the trainer had before. A
        generator of ours was told and leaves them out itself; what it cannot know of is a group
        that was on its way already."""
        if not self._skip or (self._generate is not None and group.delivery == 1):
            return False
        for name in (str(instance_of(group)), group.prompt_uid):
            if self._skip[name] > 0:
                self._skip[name] -= 1
                return True
        return False

    def _named(self, served: Served) -> Served:
        """The consumer groups by instance id, over several answers: another group of an instance
        that was served before goes by its prompt_uid."""
        instance_id, prompt_uid = instance_of(served.group), served.group.prompt_uid
        name = str(instance_id)
        if self._ids.get(name, prompt_uid) != prompt_uid:
            return served
        remember(self._ids, name, prompt_uid, REMEMBERED)
        return Served(served.group, instance_id, served.trajectories)

    async def _drop(self, refused: Sequence[tuple[Group, str]]) -> None:
        for group, reason in refused:
            try:
                await self._ask(
                    self._pool.drop_group(group.prompt_uid, reason, channel=self._config.channel)
                )
            except (GroupClosedError, UnknownGroupError):
                # Another consumer has it meanwhile, and judges it.
                if reason == SKIPPED:
                    self._skip[str(instance_of(group))] += 1
                continue
            self._dropped[reason] += 1
            if reason == UNSCORED:
                log.warning(
                    "group %r has unscored trajectories and was dropped, as a leased group cannot "
                    "be scored any more; put `scored` among the channel's selection.filters in "
                    "`pool` and the pool holds such groups until they are",
                    group.prompt_uid,
                )

    def meta_info(self, groups: Sequence[Served]) -> dict[str, Any]:
        """slime's, of the groups of this answer; and what was dropped since `/start_rollout`."""
        rewards = [r for s in groups for r in s.rewards]
        return {
            "total_samples": len(rewards),
            "num_groups": len(groups),
            "avg_group_size": len(rewards) / len(groups),
            "avg_reward": sum(rewards) / len(rewards),
            "finished_groups": [s.instance_id for s in groups],
            "dropped_groups": dict(self._dropped),
        }

    async def encode(self, served: Served) -> bytes:
        """A group's items as JSON, without the brackets."""
        return await asyncio.to_thread(self._encode, served)

    def _encode(self, served: Served) -> bytes:
        items = [
            make_item(t, served.group, served.instance_id, self._transcript)
            for t in served.trajectories
        ]
        # Metadata of producers that are not HTTP clients may hold any value.
        try:
            return orjson.dumps(items, default=str, option=JSON_OPTIONS)[1:-1]
        except orjson.JSONEncodeError:
            # An integer beyond 64 bits, half a surrogate: not worth a group that never arrives.
            for item in items:
                item["extra_info"] = {str(k): ascii(v) for k, v in item["extra_info"].items()}
            return orjson.dumps(items, default=str, option=JSON_OPTIONS)[1:-1]

    def count_delivered(self, groups: Sequence[Served]) -> None:
        self._counts["delivered_groups"] += len(groups)
        self._counts["delivered_items"] += sum(len(s.trajectories) for s in groups)
        self._counts["surplus_trajectories"] += sum(
            len(s.group.trajectories) - len(s.trajectories) for s in groups
        )

    async def ack(self, lease: Lease, gone: asyncio.Task[None]) -> bool:
        """Whether the lease is acked. An answer that was lost is asked for again, for as long as
        the client is there: acking twice is harmless, and not knowing is not."""
        while True:
            try:
                await self._ask(self._pool.ack(lease.lease_id))
                return True
            except PoolUnavailableError as e:
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
        except (DataPoolError, TimeoutError) as e:
            raise TrajectoryConflictError(str(e)) from e

    def give_back(self, lease: Lease, reason: str) -> None:
        """Return an undelivered lease; a task of its own, since a cancelled one cannot wait."""
        self._counts["returned_groups"] += len(lease.groups)
        task = asyncio.get_running_loop().create_task(self._nack(lease, reason))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _nack(self, lease: Lease, reason: str) -> None:
        try:
            await self._ask(self._pool.nack(lease.lease_id, reason))
        except (DataPoolError, PoolUnavailableError) as e:
            log.warning(
                "lease %s was not returned (%s); unless it was acked, its groups come back when it "
                "expires",
                lease.lease_id,
                e,
            )

    async def _ask(self, answer: Awaitable[Any]) -> Any:
        return await ask(answer, self._config.pool_timeout_s)


async def _in_daemon_thread(function: Generator, payload: dict[str, Any]) -> None:
    """Run it; a daemon, because a generator may run for days and must not hold up the exit."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def work() -> None:
        error: BaseException | None = None
        try:
            function(payload)
        except (Exception, SystemExit) as e:  # noqa: BLE001 - foreign code; raised where it is awaited
            error = e if isinstance(e, Exception) else RuntimeError(f"it called sys.exit({e})")
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(settle, error)

    threading.Thread(target=work, name="rollout-generator", daemon=True).start()
    await done
