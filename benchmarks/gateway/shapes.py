"""What long conversations, streams and many agents at once cost.

long     20 turns to 64,000 tokens, one agent: gateway CPU of each turn
stream   one agent, an event every 5 ms: when the text of each event is seen
many     512 agents at once, 4,000 to 8,000 tokens: errors, event-loop delay, memory; six times
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import orjson

from benchmarks.gateway.measure import Bench
from benchmarks.gateway.process import resident_bytes
from benchmarks.gateway.systems import Stepwell, System
from benchmarks.gateway.workload import LONG_TURNS, ROLLOUTS

PAUSE_S = 0.05
"""Between the turns of a long conversation: what the gateway does after its answer is counted."""
INTERVAL_S = 0.005
MANY_TURNS = 3


async def long_conversations(bench: Bench, system: System, conversations: int) -> list[list[float]]:
    """Seconds of gateway CPU of each turn, by conversation."""
    job = bench.job(
        system,
        "long",
        connections=1,
        prompts=conversations,
        rollouts=1,
        turns=LONG_TURNS,
        cpu_pid=system.pids[0],
        pause_s=PAUSE_S,
    )
    result = await bench.client.run(job)
    await system.settle([job])
    return result.cpu_s


@dataclass(frozen=True, slots=True)
class Stream:
    """One system's streams."""

    first_ms: list[float]
    """From a request to its first text."""
    prompt_share: float
    """Of the events but the last: their text was seen before the next event was written."""
    lag_p99_ms: float
    """From an event's writing to its text being seen."""


async def streams(bench: Bench, *, rounds: int, turns: int) -> dict[str, Stream]:
    """Every system's streams, taking turns."""
    lengths = _lengths(bench)
    first: dict[str, list[float]] = {system.name: [] for system in bench.systems}
    lags: dict[str, list[float]] = {system.name: [] for system in bench.systems}
    seen_in_time: dict[str, list[bool]] = {system.name: [] for system in bench.systems}
    for turn in range(rounds):
        for system in bench.systems:
            await bench.engine.control(interval_s=INTERVAL_S)
            job = bench.job(
                system,
                "chat",
                connections=1,
                prompts=1,
                rollouts=1,
                turns=turns,
                stream=True,
                first_prompt=turn,
            )
            result = await bench.client.run(job)
            emitted = await bench.engine.emitted()
            await system.settle([job])
            for sent, seen, written in zip(result.sent, result.seen, emitted, strict=True):
                arrived = _arrivals(seen, lengths)
                first[system.name].append(1e3 * (arrived[0] - sent))
                lags[system.name] += [a - w for a, w in zip(arrived, written, strict=False)]
                seen_in_time[system.name] += [
                    a < after for a, after in zip(arrived, written[1:], strict=True)
                ]
    await bench.engine.control()
    return {
        system.name: Stream(
            first[system.name],
            statistics.mean(seen_in_time[system.name]),
            float(np.percentile(lags[system.name], 99)) * 1e3,
        )
        for system in bench.systems
    }


def _lengths(bench: Bench) -> list[int]:
    """Characters of the answer after each event that has text."""
    pieces = orjson.loads(bench.workload.answer_file.read_bytes())["pieces"]
    return list(accumulate(len(piece) for piece in pieces if piece))


def _arrivals(seen: Sequence[tuple[float, int]], lengths: Sequence[int]) -> list[float]:
    """When the text of each event had arrived."""
    times = []
    at = iter(seen)
    now, n = next(at)
    for length in lengths:
        while n < length:
            now, n = next(at)
        times.append(now)
    return times


@dataclass(frozen=True, slots=True)
class Wave:
    """512 agents that came at once."""

    requests_per_s: float
    p99_ms: float
    errors: list[str]
    late_p99_ms: float
    """How late a task in the gateway's event loop woke up."""
    late_max_ms: float
    rss_mb: float
    """Of the gateway, when all was answered."""


async def wave(bench: Bench, system: Stepwell, agents: int) -> Wave:
    """Every agent opens a connection of its own and runs one trajectory."""
    job = bench.job(
        system,
        "many",
        connections=agents,
        prompts=agents // ROLLOUTS,
        rollouts=ROLLOUTS,
        turns=MANY_TURNS,
    )
    await system.actors[0].watch.remote()
    result = await bench.client.attempt(job)
    late, _ = await system.actors[0].stalls.remote()
    rss = sum(map(resident_bytes, system.pids))
    if not result.errors:
        await system.settle([job])
    late_p99, late_max = np.percentile(late, (99, 100)) * 1e3
    return Wave(
        requests_per_s=len(result.latencies_s) / (result.ended - result.began),
        p99_ms=float(np.percentile(result.latencies_s, 99)) * 1e3,
        errors=result.errors,
        late_p99_ms=float(late_p99),
        late_max_ms=float(late_max),
        rss_mb=rss / 2**20,
    )
