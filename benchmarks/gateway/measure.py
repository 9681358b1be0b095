"""Requests/s, latency and CPU of every system, by number of connections.

client ──1 | 16 | 64 connections──► system ──► engine      all on the same cores
                                      └──► pool            (Stepwell)
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.gateway.client import Job, Result, cpu_seconds
from benchmarks.gateway.process import Client, Engine, resident_bytes
from benchmarks.gateway.systems import (
    BareProxy,
    Direct,
    Gateway,
    LibraryProxy,
    Rllm,
    Stepwell,
    StepwellReplicas,
)
from benchmarks.gateway.workload import ROLLOUTS, TURNS, Workload
from benchmarks.system import Bench, paired

CONNECTIONS = (1, 16, 64)
DELAY_S = 0.05


@dataclass(frozen=True, slots=True)
class Size:
    """Amount of work that is measured."""

    rounds: int
    connections: Sequence[int]
    groups: int
    """Prompts of the slowest system's jobs, each with 8 rollouts of 8 turns."""
    delayed_rounds: int
    delayed_groups: int
    """So many that the moment when all agents begin at once, 64 calls, is less than 1 % of all."""
    conversations: int
    agents: int
    live_prompts: int
    live_turns: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One system's run of one job."""

    requests_per_s: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    cpu_ms: float
    """CPU time of the gateway's processes, per request."""
    pool_cpu_ms: float
    rss_mb: float


Samples = dict[tuple[str, int], list[Sample]]
"""(system, connections) -> one per round."""


@dataclass(kw_only=True)
class GatewayBench(Bench[Gateway, Size]):
    """Gateways, and the processes that all sections use."""

    workload: Workload
    engine: Engine
    client: Client
    ours: Stepwell
    """One process."""
    minutes: float
    """Length of the soak."""
    _names: itertools.count[int] = field(default_factory=itertools.count)

    def job(self, system: Gateway, kind: str, **options: int | float | bool | str | None) -> Job:
        """A job for `system` with a name of its own."""
        fields: dict[str, Any] = {
            "kind": kind,
            "ports": system.ports,
            "path": system.path,
            "complete_path": system.complete_path,
            "name": f"{kind}-{next(self._names)}",
            "rollouts": ROLLOUTS,
            "turns": TURNS,
            **options,
        }
        return Job(**fields)


async def throughput(bench: GatewayBench) -> None:
    """Every system, and two bare proxies, at every number of connections, from an engine that
    answers at once."""
    size, report, ours = bench.size, bench.report, bench.ours
    few, most = min(size.connections), max(size.connections)
    by_hand, of_libraries = proxies = (BareProxy(), LibraryProxy())
    systems = [*bench.systems, *proxies]
    samples: Samples = {}
    first_prompt = 0
    async with AsyncExitStack() as stack:
        for proxy in proxies:
            await stack.enter_async_context(proxy.running(bench.engine, bench.workload))
        for system in systems:
            await sample(bench, system, most, most // ROLLOUTS or 1)
        for _ in range(size.rounds):
            for n in size.connections:
                for system in systems:
                    n_groups = size.groups * system.scale
                    measured = await sample(bench, system, n, n_groups, first_prompt)
                    samples.setdefault((system.name, n), []).append(measured)
                first_prompt += size.groups * max(system.scale for system in systems)
    report.figures["systems"] = table(samples, Direct.name)
    alone, direct = samples[ours.name, few], samples[Direct.name, few]
    if (Rllm.name, most) in samples:
        name = f"requests_by_rllm_at_{most}"
        report.figures[f"{name}_of_one_process"] = _by_rllm(samples, ours, most)
        report.figures[f"cpu_by_rllm_at_{most}"] = paired(
            samples[ours.name, most], samples[Rllm.name, most], lambda a, b: a.cpu_ms / b.cpu_ms
        )
        report.at_least(name, _by_rllm(samples, StepwellReplicas, most), 4.0)
    for name, proxy in (("bare_proxy", by_hand), ("library_proxy", of_libraries)):
        report.figures[f"cpu_by_{name}_at_{most}"] = paired(
            samples[ours.name, most], samples[proxy.name, most], lambda a, b: a.cpu_ms / b.cpu_ms
        )
    flat = paired(samples[ours.name, most], alone, lambda a, b: a.cpu_ms / b.cpu_ms)
    report.at_most(f"cpu_at_{most}_by_{few}", flat, 1.3)
    added = paired(alone, direct, lambda a, b: a.p50_ms - b.p50_ms)
    report.at_most(f"p50_added_ms_at_{few}", added, 3.0)


async def delayed(bench: GatewayBench) -> None:
    """The same with an engine that takes 50 ms; and, of one process of ours, once more with
    trajectories that stay open and begin one after the other."""
    size, report, ours = bench.size, bench.report, bench.ours
    few, most, groups = min(size.connections), max(size.connections), size.delayed_groups
    samples: Samples = {}
    left_open: list[Sample] = []
    stalls: list[dict[str, float]] = []
    await bench.engine.control(delay_s=DELAY_S)
    try:
        for turn in range(size.delayed_rounds):
            for system in bench.systems:
                for n, n_groups in ((few, 1), (most, groups)):
                    measured = await sample(bench, system, n, n_groups, turn * groups)
                    samples.setdefault((system.name, n), []).append(measured)
            job = bench.job(
                ours,
                "chat",
                connections=most,
                prompts=groups,
                first_prompt=turn * groups,
                complete_path=None,
                stagger_s=DELAY_S / ROLLOUTS,
            )
            await ours.actors[0].watch.remote()
            found, _ = await run_job(bench, ours, job)
            left_open.append(found)
            late_s, collections_s = await ours.actors[0].stalls.remote()
            stall = {
                "loop_delay_max_ms": 1e3 * max(late_s),
                "collections": len(collections_s),
                "collection_max_ms": 1e3 * max(collections_s, default=0.0),
            }
            stalls.append(stall)
            await ours.settle(job)
    finally:
        await bench.engine.control()
    report.figures["engine_of_50_ms"] = table(samples, Direct.name)
    shown = ("requests_per_s", "p50_ms", "p99_ms", "cpu_ms")
    report.figures["open_trajectories_of_one_process"] = [
        {"round": k + 1, **{name: getattr(each, name) for name in shown}, **stall}
        for k, (each, stall) in enumerate(zip(left_open, stalls, strict=True))
    ]
    ratio = paired(left_open, samples[ours.name, most], lambda a, b: a.p99_ms / b.p99_ms)
    report.at_most("p99_of_open_trajectories", ratio, 1.15)
    longest = statistics.median(stall["loop_delay_max_ms"] for stall in stalls)
    report.at_most("longest_stall_ms_of_open_trajectories", longest, 20.0)
    if (Rllm.name, most) in samples:
        by_rllm = _by_rllm(samples, StepwellReplicas, most)
        report.figures[f"requests_by_rllm_at_{most}_of_50_ms"] = by_rllm
    name, direct = f"p99_added_ms_at_{most}_of_50_ms", samples[Direct.name, most]
    one, two = (
        paired(samples[system.name, most], direct, lambda a, b: a.p99_ms - b.p99_ms)
        for system in (ours, StepwellReplicas)
    )
    report.figures[f"{name}_of_one_process"] = one
    report.at_most(name, two, 40.0)


async def sample(
    bench: GatewayBench, system: Gateway, connections: int, prompts: int, first_prompt: int = 0
) -> Sample:
    """One measurement; what was stored is checked afterwards."""
    options = {"connections": connections, "prompts": prompts, "first_prompt": first_prompt}
    job = bench.job(system, "chat", **options)
    found, _ = await run_job(bench, system, job)
    await system.settle(job)
    return found


async def run_job(bench: GatewayBench, system: Gateway, job: Job) -> tuple[Sample, Result]:
    """The figures of one job, and what the client saw."""
    cpu, pool_cpu = _cpu(*system.pids), _cpu(system.pool_pid)
    result = await bench.client.run(job)
    cpu, pool_cpu = _cpu(*system.pids) - cpu, _cpu(system.pool_pid) - pool_cpu
    rss = sum(map(resident_bytes, system.pids))
    turns = job.turns - job.first_turn
    n, asked = len(result.latencies_s), job.prompts * job.rollouts * turns
    if n != asked:
        raise RuntimeError(f"{system.name} answered {n} of {asked} requests")
    p50, p99, most = np.percentile(result.latencies_s, (50, 99, 100)) * 1e3
    found = Sample(
        requests_per_s=n / (result.ended - result.began),
        p50_ms=float(p50),
        p99_ms=float(p99),
        max_ms=float(most),
        cpu_ms=1e3 * cpu / n,
        pool_cpu_ms=1e3 * pool_cpu / n,
        rss_mb=rss / 2**20,
    )
    return found, result


def _by_rllm(samples: Samples, system: Gateway | type[Gateway], connections: int) -> float:
    return paired(
        samples[system.name, connections],
        samples[Rllm.name, connections],
        lambda a, b: a.requests_per_s / b.requests_per_s,
    )


def table(samples: Samples, reference: str) -> list[dict[str, str | int | float]]:
    """One row a system and number of connections; `added` is over `reference`, CPU per request."""
    rows = []
    for (name, connections), measured in samples.items():
        against = samples[reference, connections]
        row: dict[str, str | int | float] = {"system": name, "connections": connections}
        shown = ["requests_per_s", "p50_ms", "p99_ms", "max_ms"]
        if name != reference:
            row |= {
                "p50_added_ms": paired(measured, against, lambda a, b: a.p50_ms - b.p50_ms),
                "p99_added_ms": paired(measured, against, lambda a, b: a.p99_ms - b.p99_ms),
                "rss_mb": measured[-1].rss_mb,
            }
            shown += (
                ["cpu_ms", "pool_cpu_ms"] if any(s.pool_cpu_ms for s in measured) else ["cpu_ms"]
            )
        row |= {figure: statistics.median(getattr(s, figure) for s in measured) for figure in shown}
        rows.append(row)
    return sorted(rows, key=lambda row: row["connections"])


def _cpu(*pids: int | None) -> float:
    return sum(cpu_seconds(pid) for pid in pids if pid is not None)
