"""This module puts a pool into a Ray actor so that it has a process of its own, which Ray places,
finds and starts again.

    Ray ──calls, one after the other──► DataPoolActor ─┐
    clients ──socket (`wire.py`)──────────────────────►└─► PoolService, on a loop in a thread

Who has the bare Ray handle uses the documented methods below; all else goes through a
`DataPoolClient`. Calls of one handle take effect in the order they were made, as those of any Ray
actor: they run one by one. Only `fetch_batch` has threads of its own, since it may wait, and comes
after what was called before it all the same.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import threading
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import ray

from stepwell.datapool.codec import PackedLease, decoder, encoder, in_trajectories, pack
from stepwell.datapool.config import PoolConfig
from stepwell.datapool.errors import InvalidStepError, PoolReplacedError
from stepwell.datapool.files.archive.launch import Settings
from stepwell.datapool.files.archive.launch import start as start_archiver
from stepwell.datapool.heap import growing_heap, return_large_blocks, settle_heap, use_one_heap
from stepwell.datapool.log_files import log_to_file
from stepwell.datapool.ops import (
    Ack,
    CompleteTrajectory,
    LeaseBatch,
    Op,
    PutPictures,
    SubmitOutcome,
    SubmitSteps,
    TrajectoryOutcome,
    check_carried,
    metadata_of,
    outcomes_or_raise,
)
from stepwell.datapool.questions import GetStatistics, ReadPictures
from stepwell.datapool.remote.incarnation import previous_of, record
from stepwell.datapool.remote.service import Applied, PoolService
from stepwell.datapool.remote.wire import PoolAddress, Server
from stepwell.datapool.store.folder import journal_exists
from stepwell.datapool.types import MAX_INT, TRAIN, Step

logger = logging.getLogger(__name__)

R = TypeVar("R")

SHARDS_FILE = "shards"
"""File in a journal_dir that several shards share: how many have their journals there."""
WAITING = "waiting"
FINDING = "finding"
"""Clients do not wait behind bare handles' calls to be told where the pool is."""
ARCHIVER_PAUSE_S = 2.0
"""Seconds before an archiver that ended is started again."""
N_WAITING = 16
"""Bare handles' `fetch_batch` calls that may wait at a time."""


class DataPoolActor:
    """A pool's process. Start it with `start_data_pool`. It has no coroutine: with a single one Ray
    takes the whole actor for an asyncio one, and calls lose their order."""

    def __init__(
        self,
        config: PoolConfig | None = None,
        folder: Path | None = None,
        shard: int = 0,
        has_journal: bool = False,
        log_file: Path | None = None,
    ) -> None:
        """
        Args:
            has_journal: there is one in `folder` already; none is made.
            log_file: what the process logs goes there, too.

        Raises:
            DataPoolError: the pool cannot be opened; the message says why.
        """
        log_to_file(log_file)
        use_one_heap()
        restarted = _was_restarted()
        previous = None if folder is None else previous_of(folder, journal_exists(folder))
        if folder is not None and has_journal and not journal_exists(folder):
            raise PoolReplacedError(
                f"shard {shard} had its journal in {folder}, and on {socket.gethostname()} "
                "there is none: what it acknowledged would be missing. Put the folder back, or "
                f"make it reachable from this node; or remove {folder.parent / SHARDS_FILE} "
                "to start this shard empty"
            )
        self._loop = _loop_in_a_thread()
        settle_heap()

        async def start() -> tuple[PoolService, Server]:
            with growing_heap():
                service = PoolService(
                    config, folder, shard, restarted=restarted, previous=previous, fenced=_end
                )
                gc.freeze()  # the first collection would walk through all that was read
            return service, Server(service, ray.get_runtime_context().get_node_id())

        self._service, self._server = self._run(start())
        if folder is not None and self._service.incarnation is not None:
            identity = self._service.incarnation.pool
            settings = Settings.of(config or PoolConfig(), folder, identity, shard, log_file)
            if settings is not None:
                self._archiving = asyncio.run_coroutine_threadsafe(
                    _keep_archiver(settings, self._service, self._server), self._loop
                )
        if self._service.incarnation is not None:
            record(self._service.incarnation)
        return_large_blocks(1 << 17)

    @ray.method(concurrency_group=FINDING)
    def address(self, from_node: str) -> PoolAddress:
        """Return the address at which clients on that node of the cluster reach this pool."""
        is_here = from_node == ray.get_runtime_context().get_node_id()
        tcp_host = None if is_here else ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        address: PoolAddress = self._run(self._server.address(tcp_host))
        return address

    # -- the documented calls of a bare handle ---------------------------------------------------

    def submit_step(self, step: Step, channel: str = TRAIN) -> SubmitOutcome:
        """Store one step; "accepted", "duplicate" or "late".

        Raises:
            DataPoolError: as `ops.SubmitSteps`.
        """
        return self.submit_steps([step], channel)[0]

    def submit_steps(self, steps: Sequence[Step], channel: str = TRAIN) -> list[SubmitOutcome]:
        """Store steps, in order; one outcome each.

        Raises:
            DataPoolError: the first refusal, after every other step was applied.
        """
        for step in steps:
            if not isinstance(step, Step):
                raise InvalidStepError(
                    f"got {step!r:.80} of type {type(step).__name__}; pass datapool.Step"
                )
        packed = in_trajectories((s.trajectory_uid, s.prompt_uid, pack(s)) for s in steps)
        results = self._call(SubmitSteps(packed, channel))
        return outcomes_or_raise(results)

    def put_pictures(
        self,
        trajectory_uid: str,
        pictures: Mapping[str, bytes],
        channel: str = TRAIN,
        prompt_uid: str | None = None,
    ) -> None:
        """Store pictures for steps that are about to come (`ops.PutPictures`)."""
        self._call(PutPictures(trajectory_uid, dict(pictures), channel, prompt_uid))

    def read_pictures(
        self, trajectory_uid: str, digests: Sequence[str], channel: str = TRAIN
    ) -> dict[str, bytes]:
        """Return pictures of a live trajectory by digest, as PNG (`questions.ReadPictures`)."""
        all_of_them = ReadPictures(trajectory_uid, tuple(digests), channel, max_bytes=MAX_INT - 1)
        return self._call(all_of_them)

    def complete_trajectory(
        self,
        trajectory_uid: str,
        reward: float | None = None,
        channel: str = TRAIN,
        metadata: Mapping[str, Any] | None = None,
    ) -> TrajectoryOutcome:
        """Close a trajectory as complete (`ops.CompleteTrajectory`)."""
        return self._call(
            CompleteTrajectory(trajectory_uid, reward, metadata_of(metadata), channel)
        )

    @ray.method(concurrency_group=WAITING)
    def fetch_batch(
        self,
        n_rollouts: int | None = None,
        channel: str = TRAIN,
        batch_size: int = 1,
        timeout_s: float | None = 0,
    ) -> Fetched | None:
        """Lease and ack: the steps of the next ready groups, as a `list[Step]`, or None.

        Nothing takes them back if the consumer dies on the way; who cannot afford that leases.
        """

        me: Any = ray.get_runtime_context().current_actor
        ray.get(me.wait_for_earlier.remote())

        async def fetch() -> Fetched | None:
            op = LeaseBatch(n_rollouts, channel, batch_size)
            lease = await self._service.call(op, timeout_s)
            if not isinstance(lease, PackedLease):
                return None
            await self._service.call(Ack(lease.lease_id))
            return Fetched(lease)

        fetched: Fetched | None = self._run(fetch())
        return fetched

    def wait_for_earlier(self) -> None:
        """Return after every call that this actor was sent before: its turn comes after theirs."""

    def get_statistics(self, channel: str | None = None) -> dict[str, Any]:
        """Return the counts of one channel, or of each (`questions.GetStatistics`)."""
        return self._call(GetStatistics(channel))

    # -- inside ----------------------------------------------------------------------------------

    def _call(self, op: Op[R]) -> R:
        check_carried(op)
        answered: Future[R] = Future()
        # A third of what a coroutine of the loop's takes.
        self._loop.call_soon_threadsafe(self._answer, op, answered)
        return answered.result()

    def _answer(self, op: Op[Any], answered: Future[Any]) -> None:
        def settled(applied: Sequence[Applied]) -> None:
            answer = applied[0][2]
            if isinstance(answer, Exception):
                answered.set_exception(answer)
            else:
                answered.set_result(answer)

        self._service.settle([(0, op, self._service.try_(op))], settled)

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def _keep_archiver(settings: Settings, service: PoolService, server: Server) -> None:
    """Run the archiver, again whenever it ends."""
    address = await server.address()
    while True:
        try:
            process = await asyncio.to_thread(start_archiver, settings, address)
        except OSError as e:  # no memory for a process, or it ended at once
            logger.error("DataPool: the archiver cannot be started (%s); it is tried again", e)
        else:
            service.archiver_pid = process.pid
            code = await asyncio.to_thread(process.wait)
            logger.error("DataPool: the archiver ended with %d; it is started again", code)
        await asyncio.sleep(ARCHIVER_PAUSE_S)


class Fetched:
    """Steps on their way through Ray: packed, they arrive as a `list[Step]`."""

    def __init__(self, lease: PackedLease) -> None:
        self._lease = lease

    def __reduce__(self) -> tuple[Any, ...]:
        return _steps_of, (encoder.encode(self._lease),)


def _steps_of(data: bytes) -> list[Step]:
    lease: PackedLease = decoder(PackedLease).decode(data)
    return lease.unpack().steps


def _loop_in_a_thread() -> asyncio.AbstractEventLoop:
    import uvloop  # not where a pool is only talked to

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    threading.Thread(target=loop.run_forever, name="pool", daemon=True).start()
    return loop


def _end() -> None:
    """A process that has a successor ends, so that its clients go there."""
    os._exit(1)


def _was_restarted() -> bool:
    with warnings.catch_warnings():
        # The property itself is current; its body uses a deprecated one.
        warnings.simplefilter("ignore")
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)
