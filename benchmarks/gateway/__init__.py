"""`python -m benchmarks gateway`: the gateway beside its engine, rllm-model-gateway
and sglang-router.

    throughput   requests/s, latency and CPU at 1, 16 and 64 connections      measure.py
    delayed      the same at 64 connections with an engine that takes 50 ms, and with
                 trajectories that stay open: stalls of the event loop         measure.py
    long         gateway CPU of each turn of a 64,000-token conversation       shapes.py
    stream       first token, and whether any chunk waits for the next         shapes.py
    many         512 agents with long prompts at once                          shapes.py
    memory       bytes of a live trajectory of 64,000 tokens                   memory.py
    soak         how fast memory grows with 512 live trajectories, some minutes; only if named

Everything runs on the cores of this machine: the client (`client.py`) and the engine (`engine.py`)
in processes of their own, made to cost next to nothing, the gateway in its Ray actor, and the
DataPool with durability "process". What the pool holds afterwards is checked to be exactly what the
engine said. A quick run has the same parts on little data and no bounds.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.checks import BenchResult, Check, chosen_sections
from benchmarks.gateway.measure import (
    CONNECTIONS,
    Bench,
    Samples,
    delayed,
    paired,
    table,
    throughput,
)
from benchmarks.gateway.memory import live_trajectories, soak
from benchmarks.gateway.process import Client, Engine
from benchmarks.gateway.shapes import long_conversations, streams, wave
from benchmarks.gateway.systems import (
    INSTALL,
    Direct,
    Rllm,
    SglangRouter,
    Stepwell,
    StepwellReplicas,
    System,
    is_installed,
)
from benchmarks.gateway.workload import LONG_TURNS, TURNS, make_workload
from benchmarks.pool.cluster import bench_cluster
from stepwell.trainer.errors import ConfigError

WAVES = 6
SOAK_MINUTES, MOST_MINUTES = 10.0, 600.0
SECTIONS = ("throughput", "delayed", "long", "stream", "many", "memory", "soak")
ON_DEMAND = ("soak",)
"""Sections that only run if they are named."""


@dataclass(frozen=True, slots=True)
class _Size:
    """How much is measured."""

    rounds: int
    connections: Sequence[int]
    groups: int
    """Prompts of the slowest system's jobs, each with 8 rollouts of 8 turns."""
    delayed_rounds: int
    delayed_groups: int
    """So many that the moment when all agents begin at once, 64 calls, is less than 1 % of all."""
    conversations: int
    stream_rounds: int
    agents: int
    live_prompts: int
    live_turns: int


FULL = _Size(
    rounds=5,
    connections=CONNECTIONS,
    groups=8,
    delayed_rounds=3,
    delayed_groups=128,
    conversations=7,
    stream_rounds=5,
    agents=512,
    live_prompts=8,
    live_turns=LONG_TURNS,
)
QUICK = _Size(
    rounds=1,
    connections=(1, 4),
    groups=1,
    delayed_rounds=1,
    delayed_groups=2,
    conversations=1,
    stream_rounds=1,
    agents=16,
    live_prompts=1,
    live_turns=3,
)


async def run(
    *, quick: bool = False, only: Sequence[str] = (), minutes: float = SOAK_MINUTES
) -> BenchResult:
    """All sections but the soak, or those named in `only`.

    Args:
        minutes: that the soak takes.

    Raises:
        ConfigError: `only` names no section, or `minutes` is none.
        RuntimeError: a system failed to answer, or stored other content than the engine's.
    """
    if not 0 < minutes <= MOST_MINUTES:
        raise ConfigError(f"minutes is {minutes:g}; give a number in (0, {MOST_MINUTES:g}]")
    wanted = chosen_sections(only, SECTIONS)
    if not only:
        wanted -= set(ON_DEMAND)
    size = QUICK if quick else FULL
    report = BenchResult()
    async with _running() as (bench, ours):
        if "throughput" in wanted:
            await _throughput(bench, ours, size, report)
        if "delayed" in wanted:
            await _delayed(bench, ours, size, report)
        if "long" in wanted:
            await _long(bench, ours, size, report)
        if "stream" in wanted:
            await _stream(bench, ours, size, report)
        if "many" in wanted:
            await _many(bench, ours, size, report)
        if "memory" in wanted:
            await _memory(bench, ours, size, report)
        if "soak" in wanted:
            await _soak(bench, ours, size, minutes, report)
    for other in (Rllm, SglangRouter):
        if not is_installed(other):
            report.figures[f"{other.package}, not installed"] = INSTALL
    return report.without_bounds() if quick else report


@asynccontextmanager
async def _running() -> AsyncIterator[tuple[Bench, Stepwell]]:
    """Engine, client and all systems that are installed, at once."""
    ours = Stepwell()
    systems: list[System] = [Direct(), ours, StepwellReplicas()]
    systems += [other() for other in (Rllm, SglangRouter) if is_installed(other)]
    # The others run at normal priority; Ray's processes would be nice by default.
    with (
        tempfile.TemporaryDirectory(prefix="stepwell-bench-") as folder,
        bench_cluster(_system_config={"worker_niceness": 0}),
    ):
        workload = make_workload(Path(folder))
        async with AsyncExitStack() as stack:
            engine, client = Engine(workload), Client(workload)
            stack.push_async_callback(engine.stop)
            stack.push_async_callback(client.stop)
            await engine.serve()
            await client.start(talks=True)
            for system in systems:
                await system.start(engine, workload)
                stack.push_async_callback(system.stop)
            yield Bench(workload, engine, client, systems), ours


async def _throughput(bench: Bench, ours: Stepwell, size: _Size, report: BenchResult) -> None:
    samples = await throughput(bench, size.connections, rounds=size.rounds, groups=size.groups)
    report.figures["systems"] = table(samples, Direct.name)
    few, most = min(size.connections), max(size.connections)
    alone, direct = samples[ours.name, few], samples[Direct.name, few]
    if (Rllm.name, most) in samples:
        one = _by_rllm(samples, ours, most)
        report.figures[f"requests_by_rllm_at_{most}_of_one_process"] = one
        report.checks[f"requests_by_rllm_at_{most}"] = Check(
            _by_rllm(samples, StepwellReplicas, most), 4.0, upper=False
        )
    flat = paired(samples[ours.name, most], alone, lambda a, b: a.cpu_ms / b.cpu_ms)
    report.checks[f"cpu_at_{most}_by_{few}"] = Check(flat, 1.3)
    added = paired(alone, direct, lambda a, b: a.p50_ms - b.p50_ms)
    report.checks[f"p50_added_ms_at_{few}"] = Check(added, 3.0)


def _by_rllm(samples: Samples, system: System | type[System], connections: int) -> float:
    return paired(
        samples[system.name, connections],
        samples[Rllm.name, connections],
        lambda a, b: a.requests_per_s / b.requests_per_s,
    )


async def _delayed(bench: Bench, ours: Stepwell, size: _Size, report: BenchResult) -> None:
    most = max(size.connections)
    samples, left_open, stalls = await delayed(
        bench, ours, most, rounds=size.delayed_rounds, groups=size.delayed_groups
    )
    report.figures["engine_of_50_ms"] = table(samples, Direct.name)
    report.figures["open_trajectories_of_one_process"] = [
        {
            "round": k + 1,
            "requests_per_s": each.requests_per_s,
            "p50_ms": each.p50_ms,
            "p99_ms": each.p99_ms,
            "cpu_ms": each.cpu_ms,
            "loop_delay_max_ms": stall.loop_max_ms,
            "collections": stall.collections,
            "collection_max_ms": stall.collection_max_ms,
        }
        for k, (each, stall) in enumerate(zip(left_open, stalls, strict=True))
    ]
    ratio = paired(left_open, samples[ours.name, most], lambda a, b: a.p99_ms / b.p99_ms)
    report.checks["p99_of_open_trajectories"] = Check(ratio, 1.15)
    longest = statistics.median(stall.loop_max_ms for stall in stalls)
    report.checks["longest_stall_ms_of_open_trajectories"] = Check(longest, 20.0)
    if (Rllm.name, most) in samples:
        by_rllm = _by_rllm(samples, StepwellReplicas, most)
        report.figures[f"requests_by_rllm_at_{most}_of_50_ms"] = by_rllm
    for system in (ours, StepwellReplicas):
        added = paired(
            samples[system.name, most],
            samples[Direct.name, most],
            lambda a, b: a.p99_ms - b.p99_ms,
        )
        name = f"p99_added_ms_at_{most}_of_50_ms"
        if system is ours:
            report.figures[f"{name}_of_one_process"] = added
        else:
            report.checks[name] = Check(added, 40.0)


async def _long(bench: Bench, ours: Stepwell, size: _Size, report: BenchResult) -> None:
    await long_conversations(bench, ours, 1)
    cpu_s = await long_conversations(bench, ours, size.conversations)
    by_turn = [1e3 * statistics.median(turn) for turn in zip(*cpu_s, strict=True)]
    ratio = statistics.median(turns[-1] / turns[1] for turns in cpu_s)
    report.checks["last_turn_by_second_cpu"] = Check(ratio, 2.0)
    shown = (1, 2, 5, 10, 15, len(by_turn))
    report.figures["turns_of_3200_tokens"] = [
        {"turn": turn, "gateway_cpu_ms": by_turn[turn - 1]} for turn in shown
    ]


async def _stream(bench: Bench, ours: Stepwell, size: _Size, report: BenchResult) -> None:
    measured = await streams(bench, rounds=size.stream_rounds, turns=TURNS)
    direct = statistics.median(measured[Direct.name].first_ms)
    rows = []
    for name, stream in measured.items():
        first = statistics.median(stream.first_ms)
        rows.append(
            {
                "system": name,
                "first_token_ms": first,
                "first_token_added_ms": first - direct,
                "chunk_lag_p99_ms": stream.lag_p99_ms,
                "seen_before_the_next": stream.prompt_share,
            }
        )
    report.figures["streams_of_an_event_every_5_ms"] = rows
    mine = measured[ours.name]
    added = statistics.median(mine.first_ms) - direct
    report.checks["first_token_added_ms"] = Check(added, 3.0)
    report.checks["chunks_seen_before_the_next"] = Check(mine.prompt_share, 0.99, upper=False)


async def _many(bench: Bench, ours: Stepwell, size: _Size, report: BenchResult) -> None:
    waves = [await wave(bench, ours, size.agents) for _ in range(WAVES)]
    report.figures[f"waves_of_{size.agents}_agents"] = [
        {
            "wave": k + 1,
            "requests_per_s": each.requests_per_s,
            "p99_ms": each.p99_ms,
            "errors": len(each.errors),
            "loop_delay_p99_ms": each.late_p99_ms,
            "loop_delay_max_ms": each.late_max_ms,
            "gateway_rss_mb": each.rss_mb,
        }
        for k, each in enumerate(waves)
    ]
    if errors := [error for each in waves for error in each.errors]:
        report.figures["first_error"] = errors[0]
    report.checks["errors"] = Check(len(errors), 0)
    delay = max(each.late_p99_ms for each in waves)
    report.checks["loop_delay_p99_ms"] = Check(delay, 50.0)
    # The first ones leave caches and a heap of the size that the most calls in flight ever needed;
    # later ones must find that enough. The prompt ids of one wave, were they kept, would be 6 % of
    # the process.
    half = WAVES // 2
    grown = max(w.rss_mb for w in waves[half:]) / max(w.rss_mb for w in waves[:half])
    report.checks["rss_of_later_waves"] = Check(grown, 1.03)


async def _memory(bench: Bench, ours: Stepwell, size: _Size, report: BenchResult) -> None:
    live = await live_trajectories(bench, ours, size.live_prompts, size.live_turns)
    report.figures["live_trajectory"] = {
        "tokens": live.n_tokens,
        "text_bytes": live.n_text_bytes,
        "bound_bytes": live.bound_bytes,
        "held_bytes": live.held_bytes,
        "resident_bytes": live.resident_bytes,
    }
    report.checks["held_by_bound"] = Check(live.held_bytes / live.bound_bytes, 1.0)
    report.checks["resident_by_bound"] = Check(live.resident_bytes / live.bound_bytes, 1.0)


async def _soak(
    bench: Bench, ours: Stepwell, size: _Size, minutes: float, report: BenchResult
) -> None:
    measured = await soak(bench, ours, size.agents, minutes)
    report.figures[f"soak_of_{size.agents}_agents"] = {
        "minutes": minutes,
        "requests": measured.requests,
        "gateway_rss_mb_by_tenths": [
            round(float(np.median(part)))
            for part in np.array_split(measured.rss_mb, 10)
            if len(part)
        ],
        "gateway_rss_mb_after": round(measured.rss_mb_after),
    }
    if measured.errors:
        report.figures["first_error"] = measured.errors[0]
    report.checks["soak_errors"] = Check(len(measured.errors), 0)
    report.checks["soak_mb_per_minute"] = Check(measured.slope_mb_per_minute, 5.0)
