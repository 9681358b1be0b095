"""The DataPool as a Ray actor: waiting, waking up and time, around the pure `DataPool`.

    submit ─► _change(pool op) ─► _wake: serve waiting consumers, admit waiting groups, set timer
                    ▲                          │
                    └───── timer (tick) ◄──────┘

Waiters sleep on futures and are woken by the change that satisfies them; nothing polls. It owns
the event loop's side only: what a call means is decided in `pool.py`, and `client.py` is what
most callers use. Methods mirror `DataPool`, so `handle.submit_step.remote(step)` reads the same.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import time
import uuid
import warnings
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import numpy as np
import ray

from datapool.config import PoolConfig
from datapool.errors import DataPoolError, InvalidRequestError, PoolFullError
from datapool.pool import DataPool, check_lease_request
from datapool.records import SubmitOutcome, TrajectoryOutcome
from datapool.turns import Numbering, Order, Turns
from datapool.types import TRAIN, Lease, Step

logger = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_NAME = "data_pool"
Operation: TypeAlias = tuple[str, tuple[Any, ...]]
"""(method, its positional arguments)"""
BATCHED = frozenset({"open_trajectory", "apply_steps", "complete_trajectory", "abort_trajectory"})
"""Operations that `apply` carries: none of them waits, and repeating one is harmless."""

DataPoolHandle: TypeAlias = Any
"""A Ray handle of `DataPoolActor`. Any, because Ray types a handle's methods as Never."""

# Every waiting consumer and every waiting `open_group` occupies a slot of the actor. Ray's default
# of 1000 would let them shut out the very submits they wait for.
MAX_CONCURRENCY = 100_000


@dataclass(eq=False, slots=True)
class _Consumer:
    """A `lease_batch` call that waits."""

    ticket: int
    n_rollouts: int | None
    batch_size: int
    lease_s: float | None
    answer: asyncio.Future[Lease | None]


@dataclass(eq=False, slots=True)
class _Producer:
    """An `open_group` call that waits for credit."""

    attempt: Callable[[], SubmitOutcome]
    answer: asyncio.Future[SubmitOutcome]


@dataclass(slots=True)
class _Waiting:
    """Who waits on one channel, first come first.

    Consumers queue per `n_rollouts`: those who ask for the same wait for each other, while a
    group that only a consumer of fewer can use is not kept from it.
    """

    consumers: dict[int | None, OrderedDict[int, _Consumer]] = field(default_factory=dict)
    producers: OrderedDict[int, _Producer] = field(default_factory=OrderedDict)

    def __bool__(self) -> bool:
        return bool(self.consumers or self.producers)


class DataPoolActor:
    """Async actor around one `DataPool`. Start it with `start_data_pool`."""

    def __init__(self, config: PoolConfig | None = None) -> None:
        # A fresh epoch: leases of a lost predecessor must not name leases of this one.
        self._pool = DataPool(config, epoch=uuid.uuid4().hex[:12])
        self._waiting: dict[str, _Waiting] = {}
        self._tickets = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due: float | None = None
        restarted = _was_restarted()
        self.turns = Turns(resumed=restarted)
        if restarted:
            logger.warning("DataPool restarted: what it held before is gone; leases are void")

    # -- producers ---------------------------------------------------------------------------

    async def open_group(
        self,
        prompt_uid: str,
        n_rollouts: int,
        deadline_s: float | None = None,
        min_rollouts: int = 1,
        metadata: Mapping[str, Any] | None = None,
        channel: str = TRAIN,
        timeout_s: float | None = None,
    ) -> SubmitOutcome:
        """`DataPool.open_group`, waiting up to `timeout_s` (None: for ever) for credit.

        Raises:
            PoolFullError: no credit within `timeout_s`.
            ChannelShutDownError: the channel was shut down, perhaps while waiting.
        """

        def attempt() -> SubmitOutcome:
            return self._pool.open_group(
                prompt_uid,
                n_rollouts,
                deadline_s,
                min_rollouts,
                metadata,
                channel,
                now=self._now(),
            )

        # Whoever waits is admitted by the change that frees credit, so credit found here is
        # nobody else's, and arriving late cannot mean passing the queue.
        try:
            return self._change(attempt, channel)
        except PoolFullError:
            if timeout_s is not None and timeout_s <= 0:
                raise
        waiter = _Producer(attempt, asyncio.get_running_loop().create_future())
        queue = self._waiting.setdefault(channel, _Waiting()).producers
        ticket = self._ticket()
        queue[ticket] = waiter
        try:
            await asyncio.wait([waiter.answer], timeout=timeout_s)
            if waiter.answer.done():
                return waiter.answer.result()
        except asyncio.CancelledError:
            # Admitted while being cancelled: nobody would ever start its rollouts.
            if _answered(waiter.answer) == "accepted":
                self._change(
                    lambda: self._pool.drop_group(
                        prompt_uid, "open_cancelled", channel, now=self._now()
                    ),
                    channel,
                )
            raise
        finally:
            queue.pop(ticket, None)
            self._forget_idle(channel)
        return self._change(attempt, channel)

    async def open_trajectory(
        self,
        trajectory_uid: str,
        prompt_uid: str,
        attempt: int = 0,
        metadata: Mapping[str, Any] | None = None,
        channel: str = TRAIN,
    ) -> SubmitOutcome:
        """`DataPool.open_trajectory`."""
        return self._change(
            lambda: self._pool.open_trajectory(
                trajectory_uid, prompt_uid, attempt, metadata, channel, now=self._now()
            ),
            channel,
        )

    async def submit_step(self, step: Step, channel: str = TRAIN) -> SubmitOutcome:
        """`DataPool.submit_step`."""
        _own_payload([step])
        return self._change(lambda: self._pool.submit_step(step, channel, now=self._now()), channel)

    async def submit_steps(
        self, steps: Sequence[Step], channel: str = TRAIN
    ) -> list[SubmitOutcome]:
        """`DataPool.submit_steps`."""
        _own_payload(steps)
        return self._change(
            lambda: self._pool.submit_steps(steps, channel, now=self._now()), channel
        )

    async def apply_steps(
        self, steps: Sequence[Step], channel: str = TRAIN
    ) -> list[SubmitOutcome | DataPoolError]:
        """`DataPool.apply_steps`: `submit_steps` with the refusals among the results."""
        _own_payload(steps)
        return self._change(
            lambda: self._pool.apply_steps(steps, channel, now=self._now()), channel
        )

    async def complete_trajectory(
        self,
        trajectory_uid: str,
        reward: float | None = None,
        metadata: Mapping[str, Any] | None = None,
        channel: str = TRAIN,
    ) -> TrajectoryOutcome:
        """`DataPool.complete_trajectory`."""
        return self._change(
            lambda: self._pool.complete_trajectory(
                trajectory_uid, reward, metadata, channel, now=self._now()
            ),
            channel,
        )

    async def abort_trajectory(
        self,
        trajectory_uid: str,
        reason: str,
        will_retry: bool = False,
        channel: str = TRAIN,
    ) -> TrajectoryOutcome:
        """`DataPool.abort_trajectory`."""
        return self._change(
            lambda: self._pool.abort_trajectory(
                trajectory_uid, reason, will_retry, channel, now=self._now()
            ),
            channel,
        )

    async def apply(self, operations: Sequence[Operation]) -> list[Any]:
        """Producers' operations in one trip, in order: each one's result or, as a value, refusal.

        Raises:
            InvalidRequestError: an operation that is not in `BATCHED`; those before it are applied.
        """
        results: list[Any] = []
        for name, arguments in operations:
            if name not in BATCHED:
                raise InvalidRequestError(
                    f"operation is {name!r}; apply takes {', '.join(sorted(BATCHED))}"
                )
            try:
                results.append(await getattr(self, name)(*arguments))
            except DataPoolError as e:
                results.append(e)
        return results

    async def drop_group(self, prompt_uid: str, reason: str, channel: str = TRAIN) -> None:
        """`DataPool.drop_group`."""
        self._change(
            lambda: self._pool.drop_group(prompt_uid, reason, channel, now=self._now()), channel
        )

    # -- consumers ---------------------------------------------------------------------------

    async def lease_batch(
        self,
        n_rollouts: int | None = None,
        channel: str = TRAIN,
        batch_size: int = 1,
        timeout_s: float | None = 0,
        lease_s: float | None = None,
    ) -> Lease | None:
        """`DataPool.lease_batch`, waiting up to `timeout_s` (None: for ever) for the groups.

        None after the timeout, or as soon as the channel is shut down without enough of them.
        Consumers that ask for the same `n_rollouts` are served first come, first served.
        """
        check_lease_request(n_rollouts, batch_size, lease_s)
        ticket = self._ticket()
        waiter = _Consumer(
            ticket, n_rollouts, batch_size, lease_s, asyncio.get_running_loop().create_future()
        )
        consumers = self._waiting.setdefault(channel, _Waiting()).consumers
        queue = consumers.setdefault(n_rollouts, OrderedDict())
        queue[ticket] = waiter
        try:
            self._wake(channel)
            waits = timeout_s is None or timeout_s > 0
            if not waiter.answer.done() and waits and not self._pool.is_shut_down(channel):
                await asyncio.wait([waiter.answer], timeout=timeout_s)
            return waiter.answer.result() if waiter.answer.done() else None
        except asyncio.CancelledError:
            # Served while the caller was leaving: the groups go back, nobody has seen them.
            lease = _answered(waiter.answer)
            if lease is not None:
                self._nack(lease.lease_id, "consumer_left", channel)
            raise
        finally:
            queue.pop(ticket, None)
            if not queue and consumers.get(n_rollouts) is queue:
                del consumers[n_rollouts]
            self._forget_idle(channel)
            # A cancelled head of the queue may have held back a smaller request behind it.
            self._wake(channel)

    async def fetch_batch(
        self,
        n_rollouts: int | None = None,
        channel: str = TRAIN,
        batch_size: int = 1,
        timeout_s: float | None = 0,
    ) -> list[Step] | None:
        """Lease and ack: the steps of the next ready groups, or None.

        Nothing takes them back if the consumer dies on the way; who cannot afford that leases.
        """
        lease = await self.lease_batch(n_rollouts, channel, batch_size, timeout_s)
        if lease is None:
            return None
        await self.ack(lease.lease_id)
        return lease.steps

    async def ack(self, lease_id: str) -> None:
        """`DataPool.ack`."""
        self._change(lambda: self._pool.ack(lease_id, now=self._now()))

    async def nack(self, lease_id: str, reason: str = "") -> None:
        """`DataPool.nack`."""
        self._nack(lease_id, reason, None)

    async def renew(self, lease_id: str, lease_s: float | None = None) -> float:
        """`DataPool.renew`."""
        return self._change(lambda: self._pool.renew(lease_id, lease_s, now=self._now()))

    # -- end and statistics ------------------------------------------------------------------

    async def get_statistics(self, channel: str | None = None) -> dict[str, Any]:
        """`DataPool.get_statistics`, with the waiting callers of each channel."""
        stats = self._pool.get_statistics(channel, now=self._now())
        for name, counts in stats.items() if channel is None else [(channel, stats)]:
            waiting = self._waiting.get(name, _Waiting())
            counts["waiting"] = {
                "consumers": sum(len(queue) for queue in waiting.consumers.values()),
                "producers": len(waiting.producers),
            }
        return stats

    async def shutdown(self, channel: str | None = None) -> None:
        """`DataPool.shutdown`; consumers wake up with None, `open_group` with an error."""
        self._change(lambda: self._pool.shutdown(channel, now=self._now()), channel)
        for name in list(self._waiting) if channel is None else [channel]:
            waiting = self._waiting.get(name)
            for queue in list(waiting.consumers.values()) if waiting else ():
                for consumer in queue.values():
                    if not consumer.answer.done():
                        consumer.answer.set_result(None)

    # -- inside ------------------------------------------------------------------------------

    def _now(self) -> float:
        # Wall clock: deadlines and leases have to mean the same after a restart.
        return time.time()

    def _ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    def _change(self, operation: Callable[[], T], channel: str | None = None) -> T:
        """Every state change passes here, so a journal has one place to stand.

        `channel` is the only one the change can help; None wakes all.
        """
        try:
            return operation()
        finally:
            # Also after an error: the other steps of a refused batch were applied.
            self._wake(channel)

    def _nack(self, lease_id: str, reason: str, channel: str | None) -> None:
        self._change(lambda: self._pool.nack(lease_id, reason, now=self._now()), channel)

    def _wake(self, channel: str | None = None) -> None:
        for name in list(self._waiting) if channel is None else [channel]:
            waiting = self._waiting.get(name)
            if waiting is not None:
                # Consumers first: what they take is credit for producers.
                self._serve(waiting, name)
                self._admit(waiting)
        self._set_timer()

    def _serve(self, waiting: _Waiting, channel: str) -> None:
        heads = {n: queue for n, queue in waiting.consumers.items() if queue}
        while heads:
            n_rollouts = min(heads, key=lambda n: next(iter(heads[n])))
            queue = heads[n_rollouts]
            ticket, consumer = next(iter(queue.items()))
            if not consumer.answer.done():
                lease = self._pool.lease_batch(
                    n_rollouts, channel, consumer.batch_size, consumer.lease_s, now=self._now()
                )
                if lease is None:
                    del heads[n_rollouts]
                    continue
                consumer.answer.set_result(lease)
            del queue[ticket]
            if not queue:
                del heads[n_rollouts]

    def _admit(self, waiting: _Waiting) -> None:
        while waiting.producers:
            ticket, producer = next(iter(waiting.producers.items()))
            if not producer.answer.done():
                try:
                    producer.answer.set_result(producer.attempt())
                except PoolFullError:
                    return
                except DataPoolError as e:
                    producer.answer.set_exception(e)
            del waiting.producers[ticket]

    def _forget_idle(self, channel: str) -> None:
        if not self._waiting.get(channel, True):
            del self._waiting[channel]

    def _set_timer(self) -> None:
        due = self._pool.next_deadline()
        if due == self._timer_due:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_due = due
        if due is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, due - self._now()), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = self._timer_due = None
        self._change(lambda: self._pool.tick(self._now()))


def start_data_pool(
    config: PoolConfig | None = None,
    name: str = DEFAULT_NAME,
    namespace: str | None = None,
    **options: Any,
) -> DataPoolHandle:
    """Start the pool's actor and wait until it answers. Needs an initialised Ray.

    Args:
        name, namespace: under which `DataPoolClient.connect` finds it.
        options: further Ray actor options (`lifetime="detached"`, `resources`, …).
    """
    settings: dict[str, Any] = {
        "name": name,
        "namespace": namespace,
        "max_restarts": -1,
        "max_concurrency": MAX_CONCURRENCY,
        "num_cpus": 0,
        **options,
    }
    # Any: Ray's own types do not cover `.options`.
    actor_class: Any = ray.remote(_in_order(DataPoolActor))
    handle: DataPoolHandle = actor_class.options(**settings).remote(config)
    ray.get(handle.get_statistics.remote())
    return handle


def _in_order(cls: type[DataPoolActor]) -> type[DataPoolActor]:
    """`cls` with calls that begin in the order they were made (see `turns.py`).

    A class of its own for every pool, because Ray takes the numbering from the class: two pools
    that shared one would each miss the other's numbers.
    """
    numbering = Numbering()

    def wrap(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        @functools.wraps(method)
        async def in_turn(
            self: DataPoolActor, *args: Any, order: Order | None = None, **kwargs: Any
        ) -> Any:
            await self.turns.take(order)
            return await method(self, *args, **kwargs)

        # Ray unwraps methods and would look at the inner one; and it checks calls against the
        # signature before it sends them.
        del in_turn.__dict__["__wrapped__"]
        signature = inspect.signature(method)
        keyword = inspect.Parameter("order", inspect.Parameter.KEYWORD_ONLY, default=None)
        extra = {
            "__signature__": signature.replace(
                parameters=[*signature.parameters.values(), keyword]
            ),
            "__ray_invocation_decorator__": numbering,
        }
        in_turn.__dict__.update(extra)
        return in_turn

    methods = {
        name: wrap(method)
        for name, method in vars(cls).items()
        if not name.startswith("_") and inspect.iscoroutinefunction(method)
    }
    return type(cls.__name__, (cls,), {**methods, "__doc__": cls.__doc__})


def _was_restarted() -> bool:
    if not ray.is_initialized():
        return False
    with warnings.catch_warnings():
        # The property itself is current; its body uses a deprecated one.
        warnings.simplefilter("ignore")
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def _answered(answer: asyncio.Future[T]) -> T | None:
    """The result of a future that has one."""
    if answer.done() and not answer.cancelled() and answer.exception() is None:
        return answer.result()
    return None


def _own_payload(steps: Sequence[object]) -> None:
    """Copy arrays out of the message they came in.

    Ray hands out views: one stored step would keep its whole batch alive, and a large batch
    would stay pinned in the object store. The steps are this process's own, so no one else sees
    the change.
    """
    for step in steps:
        if not isinstance(step, Step):
            continue  # the pool refuses it with a typed error
        for name in ("prompt_ids", "response_ids", "rollout_log_probs", "routed_experts"):
            array = getattr(step, name)
            if isinstance(array, np.ndarray) and not array.flags.owndata:
                array = array.copy()
                array.flags.writeable = False
                object.__setattr__(step, name, array)
