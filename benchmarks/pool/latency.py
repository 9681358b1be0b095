"""Time of a lease of 128 steps and a submit of 16 through Ray, at several sizes of the pool.

Pools of all sizes run at once and take turns, so that noise meets each of them. Every turn puts
back as many small steps as it leases: the sizes stay. Medians.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

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
from stepwell.datapool.heap import settle_heap

T = TypeVar("T")
STEPS_PER_SUBMIT = 16
FILL_STEPS_PER_SUBMIT, FILL_IN_FLIGHT = 512, 4


async def latency_by_size(sizes: Sequence[int], turns: int) -> list[dict[str, Any]]:
    """A row for each of `sizes`: a lease of 128 steps and a submit of 16, `turns` and 8 x `turns`
    times, and a call that does next to nothing: what the connection takes."""
    pools = {stored: Stepwell("process") for stored in sizes}
    rows: list[dict[str, Any]] = []
    times: dict[int, dict[str, list[float]]] = {n: defaultdict(list) for n in sizes}
    async with AsyncExitStack() as stack:
        for stored, pool in pools.items():
            await stack.enter_async_context(pool.running())
            rows.append({"stored_steps": stored, **await _fill(pool, stored)})
        settle_heap()
        for turn in range(turns):
            # Another one first in every turn: what follows a large lease is not always the same.
            for i in range(len(sizes)):
                stored = sizes[(turn + i) % len(sizes)]
                await _turn(pools[stored].client, turn, times[stored])
    return [
        row | {n: 1e3 * statistics.median(t) for n, t in times[row["stored_steps"]].items()}
        for row in rows
    ]


async def _fill(pool: Stepwell, stored: int) -> dict[str, float]:
    calls = small_calls(-(-stored // STEPS_PER_GROUP), "stored")
    began = time.perf_counter()
    await submit_all(pool.submit, calls, FILL_STEPS_PER_SUBMIT, FILL_IN_FLIGHT)
    took = time.perf_counter() - began
    (pid,) = pool.pids
    rss = psutil.Process(pid).memory_info().rss
    return {"fill_steps_per_s": stored / took, "rss_mb": rss / 2**20}


async def _turn(client: DataPoolClient, turn: int, times: dict[str, list[float]]) -> None:
    async def timed(name: str, work: Awaitable[T]) -> T:
        began = time.perf_counter()
        result = await work
        times[name].append(time.perf_counter() - began)
        return result

    steps = [call.step() for call in small_calls(GROUPS_PER_FETCH, f"turn-{turn}")]
    await timed("call_p50_ms", client.describe())
    lease_id, leased = await timed("lease_128_p50_ms", lease_128(client))
    if len(leased) != STEPS_PER_FETCH:
        raise RuntimeError(f"a lease of {STEPS_PER_FETCH} steps held {len(leased)}")
    await client.ack(lease_id)
    for batch in chunks(steps, STEPS_PER_SUBMIT):
        await timed("submit_16_p50_ms", client.submit_steps(batch))


async def lease_128(client: DataPoolClient) -> tuple[str, list[Step]]:
    """(lease_id, steps) of the next 4 groups."""
    lease = await client.lease_batch(
        n_rollouts=ROLLOUTS, batch_size=GROUPS_PER_FETCH, timeout_s=None
    )
    if lease is None:
        raise RuntimeError("the pool was shut down under the bench")
    return lease.lease_id, lease.steps
