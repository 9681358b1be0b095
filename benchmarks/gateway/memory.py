"""This module measures what live trajectories cost the gateway, so that their memory has a bound.

memory   64 trajectories of 20 turns to 64,000 tokens, left open: bytes of each
soak     512 agents with such conversations for some minutes, 64,000 tokens at the end of each:
         how fast the gateway's memory grows
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.gateway.measure import Bench
from benchmarks.gateway.process import resident_bytes
from benchmarks.gateway.size import bound
from benchmarks.gateway.systems import Stepwell
from benchmarks.gateway.workload import LONG_TURNS, ROLLOUTS

SAMPLE_S = 1.0
ABORT = '{"reason":"soak"}'
AFTER_S = 15.0
"""A gateway gives free memory back every 10 s."""


@dataclass(frozen=True, slots=True)
class Live:
    """Open trajectories of one length, on average."""

    n_tokens: float
    n_text_bytes: float
    held_bytes: float
    """What the objects of one hold."""
    resident_bytes: float
    """What the process grew by, over the number of trajectories."""

    @property
    def bound_bytes(self) -> float:
        return bound(self.n_tokens, self.n_text_bytes)


async def live_trajectories(bench: Bench, system: Stepwell, prompts: int, turns: int) -> Live:
    """What `prompts` × 8 open trajectories hold.

    As many were open and closed before: what they leave is caches and a heap of that size.
    """
    before = 0
    held: list[tuple[int, int, int]] = []
    for measured in (False, True):
        job = bench.job(
            system,
            "long",
            connections=ROLLOUTS,
            prompts=prompts,
            rollouts=ROLLOUTS,
            turns=turns,
            complete_path=None,
        )
        before = resident_bytes(system.pids[0])
        await bench.client.run(job)
        if measured:
            held = await system.actors[0].held.remote()
        grown = resident_bytes(system.pids[0]) - before
        await system.actors[0].complete_all.remote()
        await system.settle([job])
    n = prompts * ROLLOUTS
    if len(held) != n:
        raise RuntimeError(f"the gateway has {len(held)} of {n} trajectories open")
    return Live(
        n_tokens=statistics.mean(tokens for _, tokens, _ in held),
        n_text_bytes=statistics.mean(text for _, _, text in held),
        held_bytes=statistics.mean(size for size, _, _ in held),
        resident_bytes=grown / n,
    )


@dataclass(frozen=True, slots=True)
class Soak:
    """Agents that went on and on."""

    requests: int
    errors: list[str]
    rss_mb: list[float]
    """Of the gateway, every second."""
    slope_mb_per_minute: float
    """Behind the warm-up: the first half of the time."""
    rss_mb_after: float
    """When all have ended."""


async def soak(bench: Bench, system: Stepwell, agents: int, minutes: float) -> Soak:
    """`agents` at once, each with one conversation of 20 turns after the other.

    Their first conversations begin one after the other over a quarter of the time, so that those of
    all lengths are open at any later time.
    """
    seconds = 60.0 * minutes
    job = bench.job(
        system,
        "long",
        connections=agents,
        prompts=1_000_000,
        rollouts=ROLLOUTS,
        turns=LONG_TURNS,
        complete_path=system.abort_path,
        complete_body=ABORT,
        stagger_s=seconds / 4 / agents,
        duration_s=seconds,
        limit_s=seconds + 120.0,
    )
    rss: list[float] = []
    loads: list[tuple[int, int]] = []
    running = asyncio.ensure_future(bench.client.attempt(job))
    while not running.done():
        await asyncio.wait([running], timeout=SAMPLE_S)
        loads.append(await system.actors[0].load.remote())
        rss.append(resident_bytes(system.pids[0]) / 2**20)
    result = await running
    await asyncio.sleep(AFTER_S)
    n = int(seconds / SAMPLE_S)  # then they end
    slope = growth(rss[n // 2 : n], loads[n // 2 : n]) * 60.0 / SAMPLE_S
    after = resident_bytes(system.pids[0]) / 2**20
    return Soak(len(result.latencies_s), result.errors, rss[:n], slope, after)


def growth(values: Sequence[float], loads: Sequence[Sequence[float]]) -> float:
    """Growth from one value to the next that their loads do not explain: the slope d of the least
    squares of value = a + Σ c · load + d · t.

    Calls come in waves: a gateway with 20 of 512 calls in flight holds 620 MB, one with 480 of them
    820 MB. A line through such waves rises or falls by 10 MB a minute as it happens to cut them.
    """
    if len(values) < 5:  # of a quick run: as many as there are terms
        return 0.0
    t = np.arange(len(values))
    columns = np.column_stack([np.ones(len(values)), np.asarray(loads, float), t])
    fitted, *_ = np.linalg.lstsq(
        columns / np.maximum(columns.max(axis=0), 1), np.asarray(values), rcond=None
    )
    return float(fitted[-1] / t[-1])
