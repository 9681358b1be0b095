"""Seconds from `kill -9` of the pool's actor to its next answer, by what is stored.

Pools of small steps, and one of workload A, are filled, killed and asked. `first_answer_s` is what
a client waits, Ray's start of a process (about 1.1 s) included; `recovery_s` is the part of it in
which the actor reads its journal.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil

from benchmarks.pool.cluster import running_pool
from benchmarks.pool.workload import ROLLOUTS, STEPS_PER_GROUP, Call, submit_all
from stepwell.datapool import ChannelConfig, DataPoolClient

STEPS_PER_SUBMIT = 512
SUBMITS_IN_FLIGHT = 4


async def kill_once(client: DataPoolClient, pid: int) -> tuple[int, float, float]:
    """SIGKILL; (the next life's pid, seconds until it answers, seconds it read its journal)."""
    process = psutil.Process(pid)
    began = time.monotonic()
    process.kill()
    await asyncio.to_thread(process.wait, 10)
    described = await client.describe()
    return described["pid"], time.monotonic() - began, described["journal"]["recovery_s"]


async def recovery(
    what: str, steps: int, calls: Callable[[int, str], Iterator[Call]]
) -> dict[str, Any]:
    """Fill a pool, kill it, ask it."""
    n_groups = -(-steps // STEPS_PER_GROUP)
    async with running_pool(default=ChannelConfig(n_rollouts=ROLLOUTS)) as pool:
        client = pool.client

        async def submit(chunk: list[Call]) -> None:
            await client.submit_steps([call.step() for call in chunk])

        await submit_all(submit, calls(n_groups, "stored"), STEPS_PER_SUBMIT, SUBMITS_IN_FLIGHT)
        before = await client.describe()
        _, first_answer_s, recovery_s = await kill_once(client, before["pid"])
        counts = await client.get_statistics("train")
    stored = counts["steps"]["stored"]
    if stored != n_groups * STEPS_PER_GROUP or counts["groups"]["ready"] != n_groups:
        raise RuntimeError(f"{what}: {stored} of {n_groups * STEPS_PER_GROUP} steps came back")
    return {
        "stored": what,
        "steps": stored,
        "journal_mb": before["journal"]["file_bytes"] / 2**20,
        "recovery_s": recovery_s,
        "first_answer_s": first_answer_s,
        "recovered_steps_per_s": stored / recovery_s,
    }
