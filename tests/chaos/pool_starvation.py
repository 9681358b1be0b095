"""`python -m tests.chaos pool-starvation`: what unfinished rollouts do to the groups around them.

10,000 declared groups of 8 rollouts; 5 % of all rollouts, drawn at random, hang after their first
step. Half of the groups may be served with 4 rollouts, the others need all 8::

    no rollout hangs               served in full, once                        ~66 % of the groups
    some hang, enough finished     served at the deadline with those that did  ~17 %
    some hang, too few finished    dropped at the deadline, reason "deadline"  ~17 %

Nothing else may happen to a group, and the actor's memory stops growing.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import psutil

from benchmarks.checks import BenchResult
from benchmarks.pool.cluster import bench_cluster, running_pool
from benchmarks.pool.workload import ROLLOUTS, Call, small_calls
from stepwell.datapool import DataPoolClient

GROUPS = 10_000
QUICK_GROUPS = 120
DEADLINE_S = 15.0
QUICK_DEADLINE_S = 4.0
HANGS = 0.05
TURNS = 2
MIN_ROLLOUTS = (4, ROLLOUTS)
"""`min_rollouts` of even and of odd groups."""
REMEMBERED_UIDS = 10_000
"""Fewer than the run closes, or the memory of closed uids would grow until its end."""
PRODUCERS = 32
GROUPS_PER_LEASE = 8
SAMPLE_S = 0.25


@dataclass(slots=True)
class _Run:
    """Plan of the run, made beforehand, and what came of it."""

    hung: dict[str, set[str]]
    """Group -> its rollouts that hang."""
    min_rollouts: dict[str, int]
    served: Counter[str] = field(default_factory=Counter)
    """Group -> how often it was served."""
    wrong: list[str] = field(default_factory=list)
    """Groups that were served with other rollouts than those that finished."""
    rss: list[float] = field(default_factory=list)

    @property
    def expected(self) -> set[str]:
        """Groups that have to be served."""
        return {g for g, n in self.min_rollouts.items() if ROLLOUTS - len(self.hung[g]) >= n}

    @property
    def full(self) -> set[str]:
        return {group for group, hung in self.hung.items() if not hung}


async def run(*, quick: bool = False) -> BenchResult:
    """The whole run; a quick one has no bound on memory, it ends before there is a plateau."""
    groups = QUICK_GROUPS if quick else GROUPS
    deadline_s = QUICK_DEADLINE_S if quick else DEADLINE_S
    with bench_cluster():
        async with running_pool(remembered_uids=REMEMBERED_UIDS) as pool:
            (pid,) = await pool.pids()
            began = time.monotonic()
            state = await _drive(pool.client, psutil.Process(pid), groups, deadline_s)
            elapsed = time.monotonic() - began
            statistics = await pool.client.get_statistics("train")
    return _result(state, statistics, groups, elapsed, quick)


async def _drive(
    client: DataPoolClient, process: psutil.Process, groups: int, deadline_s: float
) -> _Run:
    calls: dict[str, list[Call]] = {}
    for call in small_calls(groups, "s", turns=TURNS):
        calls.setdefault(call.prompt_uid, []).append(call)
    rng = random.Random(0)
    state = _Run(
        hung={
            group: {c.trajectory_uid for c in own if c.is_last and rng.random() < HANGS}
            for group, own in calls.items()
        },
        min_rollouts={group: MIN_ROLLOUTS[i % 2] for i, group in enumerate(calls)},
    )
    waiting = iter(calls.items())
    produced = asyncio.Event()

    async def produce() -> None:
        for group, own in waiting:
            await client.open_group(
                group, ROLLOUTS, deadline_s=deadline_s, min_rollouts=state.min_rollouts[group]
            )
            for turn in range(TURNS):
                running = [
                    c
                    for c in own
                    if c.step_index == turn
                    and (turn == 0 or c.trajectory_uid not in state.hung[group])
                ]
                await client.submit_steps([c.step() for c in running])

    async def consume() -> None:
        while not (produced.is_set() and await _is_empty(client)):
            # Batches while there is a flow; what deadlines release comes in ones and twos.
            size = 1 if produced.is_set() else GROUPS_PER_LEASE
            lease = await client.lease_batch(batch_size=size, timeout_s=0.2)
            if lease is None:
                continue
            for group in lease.groups:
                state.served[group.prompt_uid] += 1
                got = {t.trajectory_uid for t in group.trajectories}
                everyone = {c.trajectory_uid for c in calls[group.prompt_uid]}
                if got != everyone - state.hung[group.prompt_uid]:
                    state.wrong.append(group.prompt_uid)
            await client.ack(lease.lease_id)

    async def sample() -> None:
        while True:
            state.rss.append(process.memory_info().rss / 2**20)
            await asyncio.sleep(SAMPLE_S)

    sampler = asyncio.create_task(sample())
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(consume())
            async with asyncio.TaskGroup() as producers:
                for _ in range(PRODUCERS):
                    producers.create_task(produce())
            produced.set()
    finally:
        sampler.cancel()
    return state


async def _is_empty(client: DataPoolClient) -> bool:
    groups = (await client.get_statistics("train"))["groups"]
    return not (groups["open"] or groups["ready"] or groups["leased"])


def _result(
    state: _Run, statistics: dict[str, Any], groups: int, elapsed_s: float, quick: bool
) -> BenchResult:
    served, expected = set(state.served), state.expected
    counts = statistics["groups"]
    to_drop = groups - len(expected)
    result = BenchResult()
    result.zero(
        full_groups_not_served=len(state.full - served),
        affected_groups_not_served=len(expected - state.full - served),
        groups_not_dropped_by_deadline=to_drop - counts["drop_reasons"].get("deadline", 0),
        groups_served_wrongly=len(served - expected) + len(state.wrong),
        groups_served_again=state.served.total() - len(served),
        groups_left=counts["open"] + counts["ready"] + counts["leased"],
    )
    rss = state.rss
    middle, last = (max(rss[len(rss) * i // 3 : len(rss) * (i + 1) // 3]) for i in (1, 2))
    if not quick:
        result.at_most("rss_last_third_by_middle_third", last / middle, 1.1)
    result.figures.update(
        groups=groups,
        rollouts_hung=sum(map(len, state.hung.values())),
        groups_affected=groups - len(state.full),
        served_full=len(served & state.full),
        served_with_fewer=len(served - state.full),
        drop_reasons=dict(counts["drop_reasons"]),
        abort_reasons=dict(statistics["trajectories"]["abort_reasons"]),
        elapsed_s=elapsed_s,
        rss_mb_at_start=rss[0],
        rss_mb_middle_third=middle,
        rss_mb_last_third=last,
    )
    return result
