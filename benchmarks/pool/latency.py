"""What a lease of 128 steps and a submit of 16 take through Ray, at several sizes of the pool.

Pools of all sizes run at once and take turns, so that noise meets each of them. Every turn puts
back as many small steps as it leases: the sizes stay. Medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil

from benchmarks.pool.systems import Stepwell
from benchmarks.pool.workload import (
    GROUPS_PER_FETCH,
    ROLLOUTS,
    STEPS_PER_FETCH,
    STEPS_PER_GROUP,
    chunks,
    small_calls,
    submit_all,
)
from stepwell.datapool import DataPoolClient, Step
from stepwell.datapool.process import settle_heap

STEPS_PER_SUBMIT = 16
FILL_STEPS_PER_SUBMIT = 512
FILL_IN_FLIGHT = 4


@dataclass(slots=True)
class PoolOfSize:
    """A pool that holds about `stored` small steps, and what was measured on it."""

    stored: int
    system: Stepwell = field(default_factory=lambda: Stepwell("process"))
    fill_steps_per_s: float = 0.0
    rss_bytes: int = 0
    lease_s: list[float] = field(default_factory=list)
    submit_s: list[float] = field(default_factory=list)
    call_s: list[float] = field(default_factory=list)
    """Of a call that does next to nothing: what Ray takes."""

    @property
    def lease_p50_ms(self) -> float:
        return 1e3 * statistics.median(self.lease_s)

    @property
    def call_p50_ms(self) -> float:
        return 1e3 * statistics.median(self.call_s)

    @property
    def submit_p50_ms(self) -> float:
        return 1e3 * statistics.median(self.submit_s)


async def latency_by_size(sizes: Sequence[int], turns: int) -> list[PoolOfSize]:
    """Lease of 128 steps and submit of 16, `turns` and 8 x `turns` times at each of `sizes`."""
    pools = [PoolOfSize(size) for size in sizes]
    started: list[PoolOfSize] = []
    try:
        for pool in pools:
            await pool.system.start()
            started.append(pool)
            await _fill(pool)
        settle_heap()
        for turn in range(turns):
            # Another one first in every turn: what follows a large lease is not always the same.
            for i in range(len(pools)):
                await _turn(pools[(turn + i) % len(pools)], turn)
    finally:
        for pool in started:
            await pool.system.stop()
    return pools


async def _fill(pool: PoolOfSize) -> None:
    calls = small_calls(-(-pool.stored // STEPS_PER_GROUP), "stored")
    began = time.perf_counter()
    await submit_all(pool.system.submit, calls, FILL_STEPS_PER_SUBMIT, FILL_IN_FLIGHT)
    pool.fill_steps_per_s = pool.stored / (time.perf_counter() - began)
    (pid,) = await pool.system.pids()
    pool.rss_bytes = psutil.Process(pid).memory_info().rss


async def _turn(pool: PoolOfSize, turn: int) -> None:
    client = pool.system.client
    steps = [call.step() for call in small_calls(GROUPS_PER_FETCH, f"turn-{turn}")]
    began = time.perf_counter()
    await client.describe()
    pool.call_s.append(time.perf_counter() - began)
    began = time.perf_counter()
    lease_id, leased = await lease_128(client)
    pool.lease_s.append(time.perf_counter() - began)
    if len(leased) != STEPS_PER_FETCH:
        raise RuntimeError(f"a lease of {STEPS_PER_FETCH} steps held {len(leased)}")
    await client.ack(lease_id)
    for batch in chunks(steps, STEPS_PER_SUBMIT):
        began = time.perf_counter()
        await client.submit_steps(batch)
        pool.submit_s.append(time.perf_counter() - began)


async def lease_128(client: DataPoolClient) -> tuple[str, list[Step]]:
    """(lease_id, steps) of the next 4 groups."""
    lease = await client.lease_batch(
        n_rollouts=ROLLOUTS, batch_size=GROUPS_PER_FETCH, timeout_s=None
    )
    if lease is None:
        raise RuntimeError("the pool was shut down under the bench")
    return lease.lease_id, lease.steps
