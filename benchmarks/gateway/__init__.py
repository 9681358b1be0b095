"""`python -m benchmarks gateway`: the gateway beside its engine and rllm-model-gateway.

    throughput   requests/s, latency and CPU at 1, 16 and 64 connections      measure.py
    delayed      the same at 64 connections with an engine that takes 50 ms, and with
                 trajectories that stay open: stalls of the event loop         measure.py
    long         gateway CPU of each turn of a 64,000-token conversation       shapes.py
    contexts     CPU of a turn at 12 to 60 k tokens of context                  shapes.py
    coding       CPU of a turn of coding agents, 45 k tokens and 20 tools      shapes.py
    short        CPU of a call in short conversations of tool calls            shapes.py
    stream       first token, and whether any chunk waits for the next         shapes.py
    events       16 streams of 16 events at once: streams/s, CPU of an event   shapes.py
    many         512 agents with long prompts at once                          shapes.py
    memory       bytes of a live trajectory of 64,000 tokens                   memory.py
    soak         how fast memory grows with 512 live trajectories, some minutes; only if named
    hostile      the longest call of a client while others send hostile bodies; only if named

Everything runs on the cores of this machine: the client (`client.py`) and the engine (`engine.py`)
in processes of their own, made to cost next to nothing, the gateway in its Ray actor, and the
DataPool with durability "process". What the pool holds afterwards is checked to be exactly what the
engine said. A quick run has the same parts on little data and no bounds.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from benchmarks.checks import BenchResult, chosen_sections
from benchmarks.gateway.hostile import hostile
from benchmarks.gateway.measure import CONNECTIONS, GatewayBench, Size, delayed, throughput
from benchmarks.gateway.memory import live_trajectories, soak
from benchmarks.gateway.process import running_client, running_engine
from benchmarks.gateway.shapes import (
    coding,
    contexts,
    events,
    long_conversations,
    short_conversations,
    streams,
    waves,
)
from benchmarks.gateway.systems import (
    INSTALL,
    Direct,
    Gateway,
    Rllm,
    Stepwell,
    StepwellReplicas,
    is_installed,
)
from benchmarks.gateway.workload import LONG_TURNS, make_workload
from benchmarks.pool.cluster import bench_cluster
from stepwell.trainer.errors import ConfigError

SOAK_MINUTES, MOST_MINUTES = 10.0, 600.0
SECTIONS = {
    "throughput": throughput,
    "delayed": delayed,
    "long": long_conversations,
    "contexts": contexts,
    "coding": coding,
    "short": short_conversations,
    "stream": streams,
    "events": events,
    "many": waves,
    "memory": live_trajectories,
    "soak": soak,
    "hostile": hostile,
}
ONLY_IF_NAMED = ("soak", "hostile")
FULL = Size(
    rounds=5,
    connections=CONNECTIONS,
    groups=8,
    delayed_rounds=3,
    delayed_groups=128,
    conversations=7,
    agents=512,
    live_prompts=8,
    live_turns=LONG_TURNS,
)
QUICK = Size(
    rounds=1,
    connections=(1, 4),
    groups=1,
    delayed_rounds=1,
    delayed_groups=2,
    conversations=1,
    agents=16,
    live_prompts=1,
    live_turns=3,
)


async def run(
    *, quick: bool = False, only: Sequence[str] = (), minutes: float = SOAK_MINUTES
) -> BenchResult:
    """All sections but those that take minutes, or those named in `only`.

    Args:
        minutes: that each of `ONLY_IF_NAMED` takes.

    Raises:
        ConfigError: `only` names no section, or `minutes` is none.
        RuntimeError: a system failed to answer, or stored other content than the engine's.
    """
    if not 0 < minutes <= MOST_MINUTES:
        raise ConfigError(f"minutes is {minutes:g}; give a number in (0, {MOST_MINUTES:g}]")
    wanted = chosen_sections(only, SECTIONS)
    ours = Stepwell()
    systems: list[Gateway] = [Direct(), ours, StepwellReplicas()]
    systems += [Rllm()] if is_installed() else []
    async with running(systems, ours, QUICK if quick else FULL, minutes) as bench:
        for name in wanted:
            if name not in ONLY_IF_NAMED or only:
                await SECTIONS[name](bench)
    report = bench.report
    if not is_installed():
        report.figures[f"{Rllm.name}, not installed"] = INSTALL
    return report.without_bounds() if quick else report


@asynccontextmanager
async def running(
    systems: Sequence[Gateway], ours: Stepwell, size: Size, minutes: float = 0
) -> AsyncIterator[GatewayBench]:
    """An engine that answers at once, a client that sends load, and these systems, at once."""
    # The others run at normal priority; Ray's processes would be nice by default.
    with (
        tempfile.TemporaryDirectory(prefix="stepwell-bench-") as folder,
        bench_cluster(_system_config={"worker_niceness": 0}),
    ):
        workload = make_workload(Path(folder))
        async with AsyncExitStack() as stack:
            engine = await stack.enter_async_context(running_engine(workload))
            client = await stack.enter_async_context(running_client(workload))
            for system in systems:
                await stack.enter_async_context(system.running(engine, workload))
            yield GatewayBench(
                workload=workload,
                engine=engine,
                client=client,
                systems=systems,
                ours=ours,
                size=size,
                minutes=minutes,
            )
