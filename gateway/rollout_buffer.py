"""slime's Rollout Buffer API over the DataPool: a slime trainer consumes from here unchanged.

What its `rollout_buffer_example.py` sends and reads (THUDM/slime, slime_plugins/rollout_buffer)::

    POST /start_rollout     {num_repeat_per_sample, skip_instance_ids, …} -> {message}
    POST /buffer/write      {instance_id, reward, …}     -> {success, message, data: {data: [item]}}
    POST /get_rollout_data  {}                           -> {success, message, data: {data: [item…],
                                                             meta_info: {total_samples, …}}}
    item                    {uid, instance_id, messages, reward, extra_info} and, beyond slime's
                            own, {tokens, response_length, loss_mask, rollout_log_probs,
                            weight_versions, branches}: fields of its `Sample`

One item is one trajectory, `num_repeat_per_sample` items of one `instance_id` are one group. The
ids are what the engine was sent and what it sampled. `messages` are decoded from them (or those
that were written), for consumers that tokenise text again; they are a view and not the truth. An
item is the branch that ends in the trajectory's last call; tokens that were sampled on others are
in its `branches`, each exactly once.

A delivery::

    lease ──► encode and send, group by group ──► ack ──► the last bytes
      │                     └── client gone: nack           └── only now is it complete JSON
      └── groups that cannot be served: nack all, drop those with a reason, lease again

The pool's ack comes before the bytes that close the JSON, so a body that a client can read was
acked: no group is delivered twice. A client that goes away before that, a gateway that dies, a
lease that expires: the groups go back and nothing is lost. What remains is a client that vanishes
in the round trip between ack and last bytes; HTTP cannot tell. A consumer that must not lose even
that sends `{"hold": true}` and acks itself (`POST /ack_rollout_data`), after its checkpoint.

Never served: groups with fewer than `num_repeat_per_sample` trajectories, and groups with an
unscored one (missing is not zero). The pool's filter `scored` holds the latter until they are
scored; without it they are dropped here, counted as `unscored`, since a leased group cannot be
scored any more.

Owns: these routes, what is served, and the generator that `gateway.rollout_generator` names. Does
not own: the shape of items (`rollout_items.py`), writing (`rollout_writes.py`), text
(`transcript.py`), order and filters (the pool), agents (they come by themselves).
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
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stepwell.datapool.dotted import resolve
from stepwell.datapool.errors import (
    DataPoolError,
    GroupClosedError,
    UnknownGroupError,
    UnknownLeaseError,
)
from stepwell.datapool.types import Group, Lease, Trajectory
from stepwell.gateway.config import GatewayConfig
from stepwell.gateway.errors import (
    GatewayConfigError,
    PoolUnavailableError,
    RequestError,
    TrajectoryConflictError,
)
from stepwell.gateway.pool_port import PoolPort, ask
from stepwell.gateway.rollout_items import (
    SKIPPED,
    InstanceId,
    instance_of,
    make_item,
    parse_repeats,
    parse_skipped,
)
from stepwell.gateway.rollout_writes import RolloutWriter, remember
from stepwell.gateway.tokenization import ChatTokenizer
from stepwell.gateway.trajectories import TrajectoryStore
from stepwell.gateway.transcript import Transcript
from stepwell.gateway.web import OrjsonResponse, field, parse_object, read_body

if TYPE_CHECKING:
    from stepwell.gateway.app import Gateway

log = logging.getLogger(__name__)

router = APIRouter()

Generator: TypeAlias = Callable[[dict[str, Any]], Any]

MAX_GROUPS = 256
"""Groups in one answer if `gateway.rollout_batch_groups` is null."""
ACK_RETRY_S = 0.5
UNSCORED = "unscored"
GROUP_SIZE = "group_size"

_JSON = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


# -- routes ------------------------------------------------------------------------------------


def _buffer(request: Request) -> RolloutBuffer:
    return cast("Gateway", request.app.state.gateway).rollout_buffer


async def _body(request: Request) -> dict[str, Any]:
    return parse_object(await read_body(request))


@router.post("/start_rollout")
async def start_rollout(request: Request) -> Response:
    buffer = _buffer(request)
    gateway: Gateway = request.app.state.gateway
    buffer.start(await _body(request), gateway.hosts.origin(request.scope))
    return OrjsonResponse({"message": "Rollout started"})


@router.post("/buffer/write")
async def write(request: Request) -> Response:
    item = await _body(request)
    await _buffer(request).write(item)
    return OrjsonResponse(
        {
            "success": True,
            "message": "Data has been successfully written to buffer",
            "data": {"data": [item], "meta_info": "write to buffer"},
        }
    )


@router.post("/get_rollout_data")
async def get_rollout_data(request: Request) -> Response:
    """Other fields than `hold` are ignored, as slime's buffer ignores the whole body."""
    buffer = _buffer(request)
    hold = field(await _body(request), "hold", bool, "true or false") or False
    taken = await buffer.take()
    if taken is None:
        return OrjsonResponse(
            {
                "success": False,
                "message": "No data available to read",
                "data": {"data": [], "meta_info": {}},
            }
        )
    return _Delivery(buffer, *taken, hold=hold)


@router.post("/ack_rollout_data")
async def ack_rollout_data(request: Request) -> Response:
    """For consumers that sent `hold`: the groups of `meta_info.lease_id` are consumed for good."""
    lease_id = field(await _body(request), "lease_id", str, "meta_info.lease_id of the answer")
    if not lease_id:
        raise RequestError("lease_id is missing; send meta_info.lease_id of the answer", "lease_id")
    await _buffer(request).ack_held(lease_id)
    return OrjsonResponse({"success": True, "message": "acked", "data": None})


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


# -- what goes out -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Served:
    """A group as it is delivered."""

    group: Group
    instance_id: InstanceId
    trajectories: tuple[Trajectory, ...]

    @property
    def rewards(self) -> list[float]:
        return [t.reward for t in self.trajectories if t.reward is not None]


class _Delivery(Response):
    """An answer of `/get_rollout_data`, sent group by group; see the module for its end."""

    def __init__(
        self, buffer: RolloutBuffer, lease: Lease, groups: Sequence[_Served], *, hold: bool
    ) -> None:
        super().__init__(media_type="application/json")
        del self.headers["content-length"]
        self._buffer = buffer
        self._lease = lease
        self._groups = groups
        self._hold = hold

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_gone(receive))
        settled = False
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            separator = self._head()
            for served in self._groups:
                encoded = asyncio.ensure_future(self._buffer.encode(served))
                await asyncio.wait([encoded, gone], return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    encoded.cancel()
                    return
                await _send(send, separator + await encoded)
                separator = b","
            # Waits until what was written before has left for the network.
            await _send(send, b"]")
            await asyncio.sleep(0)
            if gone.done():
                return
            if not self._hold and not await self._buffer.ack(self._lease, gone):
                return
            settled = True
            self._buffer.count_delivered(self._groups)
            await send({"type": "http.response.body", "body": b"}}"})
        finally:
            gone.cancel()
            if not settled:
                # Without its end the body is no JSON, and the connection is cut.
                self._buffer.give_back(self._lease, "the client went away")

    def _head(self) -> bytes:
        meta = self._buffer.meta_info(self._groups)
        if self._hold:
            meta |= {"lease_id": self._lease.lease_id, "expires_at": self._lease.expires_at}
        message = f"Successfully read {meta['total_samples']} items"
        head = {"success": True, "message": message, "data": {"meta_info": meta, "data": []}}
        return orjson.dumps(head, option=_JSON).removesuffix(b"]}}")


async def _send(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# -- the buffer --------------------------------------------------------------------------------


class RolloutBuffer:
    """What consumers asked for, and the way from and to the pool. Owned by the app's lifespan."""

    def __init__(
        self,
        config: GatewayConfig,
        pool: PoolPort,
        tokenizer: ChatTokenizer,
        trajectories: TrajectoryStore,
    ) -> None:
        self._config = config
        self._pool = pool
        self._tokenizer = tokenizer
        self._generate = load_generator(config)
        self._repeats: int | None = config.rollout_repeats
        self._skip: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._ids: OrderedDict[str, str] = OrderedDict()
        """Group served last under an instance id."""
        self._writer = RolloutWriter(config, pool, trajectories)
        self._writer.repeats = self._repeats
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
        self._writer.repeats = repeats
        self._dropped.clear()
        engine = payload.get("remote_engine_url")
        known = (*self._config.engine_urls, self._config.engine_router_url)
        if isinstance(engine, str) and engine.rstrip("/") not in known:
            log.warning(
                "/start_rollout names the engine %s, but agents' calls go to gateway.engine_urls "
                "(%s)",
                engine,
                ", ".join(self._config.engine_urls) or "none",
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
        await self._writer.write(item)
        self._counts["written"] += 1

    # -- reading -----------------------------------------------------------------------------

    async def take(self) -> tuple[Lease, list[_Served]] | None:
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

    def _judge(self, groups: Iterable[Group]) -> tuple[list[_Served], list[tuple[Group, str]]]:
        served: list[_Served] = []
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
                served.append(_Served(group, group.prompt_uid, tuple(scored[:n])))
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

    def _named(self, served: _Served) -> _Served:
        """The consumer groups by instance id, over several answers: another group of an instance
        that was served before goes by its prompt_uid."""
        instance_id, prompt_uid = instance_of(served.group), served.group.prompt_uid
        name = str(instance_id)
        if self._ids.get(name, prompt_uid) != prompt_uid:
            return served
        remember(self._ids, name, prompt_uid, self._config.remembered_trajectories)
        return _Served(served.group, instance_id, served.trajectories)

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
                    "be scored any more; put `scored` among data_pool's selection.filters and the "
                    "pool holds such groups until they are",
                    group.prompt_uid,
                )

    def meta_info(self, groups: Sequence[_Served]) -> dict[str, Any]:
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

    async def encode(self, served: _Served) -> bytes:
        """A group's items as JSON, without the brackets."""
        return await asyncio.to_thread(self._encode, served)

    def _encode(self, served: _Served) -> bytes:
        items = [
            make_item(t, served.group, served.instance_id, self._transcript)
            for t in served.trajectories
        ]
        # Metadata of producers that are not HTTP clients may hold any value.
        try:
            return orjson.dumps(items, default=str, option=_JSON)[1:-1]
        except orjson.JSONEncodeError:
            # An integer beyond 64 bits, half a surrogate: not worth a group that never arrives.
            for item in items:
                item["extra_info"] = {str(k): ascii(v) for k, v in item["extra_info"].items()}
            return orjson.dumps(items, default=str, option=_JSON)[1:-1]

    def count_delivered(self, groups: Sequence[_Served]) -> None:
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
