"""This module measures what live trajectories cost the gateway, so that their memory has a bound.

memory   64 trajectories of 20 turns to 64,000 tokens, left open: bytes of each
soak     512 agents with such conversations for some minutes, 64,000 tokens at the end of each:
         how fast the gateway's memory grows
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence

import numpy as np

from benchmarks.gateway.measure import GatewayBench
from benchmarks.gateway.process import resident_bytes
from benchmarks.gateway.size import bound
from benchmarks.gateway.workload import LONG_TURNS, ROLLOUTS

SAMPLE_S = 1.0
ABORT = '{"reason":"soak"}'
AFTER_S = 15.0
"""A gateway gives free memory back every 10 s."""


async def live_trajectories(bench: GatewayBench) -> None:
    """Measure the memory of open trajectories, 8 of each prompt, on average.

    As many were open and closed before: what they leave is caches. Free memory is given back before
    either reading: what lay free at the first one would hide as much of what the second one finds.
    """
    ours, report, n = bench.ours, bench.report, bench.size.live_prompts * ROLLOUTS
    before, grown, held = 0, 0, list[tuple[int, int, int]]()
    for measured in (False, True):
        job = bench.job(
            ours,
            "long",
            connections=ROLLOUTS,
            prompts=bench.size.live_prompts,
            turns=bench.size.live_turns,
            complete_path=None,
        )
        if measured:
            await asyncio.sleep(AFTER_S)
        before = resident_bytes(ours.pids[0])
        await bench.client.run(job)
        if measured:
            held = await ours.actors[0].held.remote()
            await asyncio.sleep(AFTER_S)
        grown = resident_bytes(ours.pids[0]) - before
        await ours.settle(job)
    if len(held) != n:
        raise RuntimeError(f"the gateway has {len(held)} of {n} trajectories open")
    size, tokens, text = (statistics.mean(column) for column in zip(*held, strict=True))
    most = bound(tokens, text)
    report.figures["live_trajectory"] = {
        "tokens": tokens,
        "text_bytes": text,
        "bound_bytes": most,
        "held_bytes": size,
        "resident_bytes": grown / n,
    }
    report.at_most("held_by_bound", size / most, 1.0)
    report.at_most("resident_by_bound", grown / n / most, 1.0)


async def soak(bench: GatewayBench) -> None:
    """Agents at once, each with one conversation of 20 turns after the other.

    Their first conversations begin one after the other over a quarter of the time, so that those of
    all lengths are open at any later time.
    """
    ours, report, agents = bench.ours, bench.report, bench.size.agents
    seconds = 60.0 * bench.minutes
    job = bench.job(
        ours,
        "long",
        connections=agents,
        prompts=1_000_000,
        turns=LONG_TURNS,
        complete_path=ours.abort_path,
        complete_body=ABORT,
        stagger_s=seconds / 4 / agents,
        duration_s=seconds,
        limit_s=seconds + 120.0,
    )
    rss_mb: list[float] = []
    loads: list[tuple[int, int]] = []
    running = asyncio.ensure_future(bench.client.attempt(job))
    while not running.done():
        await asyncio.wait([running], timeout=SAMPLE_S)
        loads.append(await ours.actors[0].load.remote())
        rss_mb.append(resident_bytes(ours.pids[0]) / 2**20)
    result = await running
    await asyncio.sleep(AFTER_S)
    n = int(seconds / SAMPLE_S)  # then they end
    report.figures[f"soak_of_{agents}_agents"] = {
        "minutes": bench.minutes,
        "requests": len(result.latencies_s),
        "gateway_rss_mb_by_tenths": [
            round(float(np.median(part))) for part in np.array_split(rss_mb[:n], 10) if len(part)
        ],
        "gateway_rss_mb_after": round(resident_bytes(ours.pids[0]) / 2**20),
    }
    if result.errors:
        report.figures["first_error"] = result.errors[0]
    report.zero(soak_errors=len(result.errors))
    # Behind the warm-up: the first half of the time.
    slope = growth(rss_mb[n // 2 : n], loads[n // 2 : n]) * 60.0 / SAMPLE_S
    report.at_most("soak_mb_per_minute", slope, 5.0)


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
