"""Requests/s, latency and CPU of every system, by number of connections.

    client ──1 | 16 | 64 connections──► system ──► engine      all on the same cores
                                          └──► pool            (Stepwell)

The systems take turns on the same conversations in every round; differences and ratios are taken
within a round: what else the machine does meets all of them. Medians over the rounds.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.gateway.client import Job, cpu_seconds
from benchmarks.gateway.process import Client, Engine, resident_bytes
from benchmarks.gateway.systems import Stepwell, System
from benchmarks.gateway.workload import ROLLOUTS, TURNS, Workload

CONNECTIONS = (1, 16, 64)
DELAY_S = 0.05


@dataclass(frozen=True, slots=True)
class Sample:
    """One system's run of one job."""

    requests_per_s: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    cpu_ms: float
    """Of the gateway's processes, per request."""
    pool_cpu_ms: float
    rss_mb: float


Samples = dict[tuple[str, int], list[Sample]]
"""(system, connections) -> one per round."""


@dataclass(slots=True)
class Bench:
    """The processes that all sections use."""

    workload: Workload
    engine: Engine
    client: Client
    systems: Sequence[System]
    _names: itertools.count[int] = field(default_factory=itertools.count)

    def job(self, system: System, kind: str, **options: int | float | bool | str | None) -> Job:
        """A job for `system` with a name of its own."""
        fields: dict[str, Any] = {
            "kind": kind,
            "ports": system.ports,
            "path": system.path,
            "complete_path": system.complete_path,
            "name": f"{kind}-{next(self._names)}",
            **options,
        }
        return Job(**fields)


async def sample(
    bench: Bench, system: System, connections: int, prompts: int, first_prompt: int = 0
) -> Sample:
    """One measurement; what was stored is checked afterwards."""
    job = _job(bench, system, connections, prompts, first_prompt)
    measured = await _measured(bench, system, job)
    await system.settle([job])
    return measured


def _job(
    bench: Bench,
    system: System,
    connections: int,
    prompts: int,
    first_prompt: int,
    **options: float | None,
) -> Job:
    return bench.job(
        system,
        "chat",
        connections=connections,
        prompts=prompts,
        rollouts=ROLLOUTS,
        turns=TURNS,
        first_prompt=first_prompt,
        **options,
    )


async def _measured(bench: Bench, system: System, job: Job) -> Sample:
    cpu, pool_cpu = _cpu(*system.pids), _cpu(system.pool_pid)
    result = await bench.client.run(job)
    cpu, pool_cpu = _cpu(*system.pids) - cpu, _cpu(system.pool_pid) - pool_cpu
    rss = sum(map(resident_bytes, system.pids))
    n, asked = len(result.latencies_s), job.prompts * job.rollouts * job.turns
    if n != asked:
        raise RuntimeError(f"{system.name} answered {n} of {asked} requests")
    p50, p99, most = np.percentile(result.latencies_s, (50, 99, 100)) * 1e3
    return Sample(
        requests_per_s=n / (result.ended - result.began),
        p50_ms=float(p50),
        p99_ms=float(p99),
        max_ms=float(most),
        cpu_ms=1e3 * cpu / n,
        pool_cpu_ms=1e3 * pool_cpu / n,
        rss_mb=rss / 2**20,
    )


async def throughput(
    bench: Bench, connections: Sequence[int], *, rounds: int, groups: int
) -> Samples:
    """Every system at every number of connections, from an engine that answers at once.

    Args:
        groups: prompts of the slowest system's jobs; the others get `scale` times as many.
    """
    samples: Samples = {}
    for system in bench.systems:
        await sample(bench, system, max(connections), max(connections) // ROLLOUTS or 1)
    first_prompt = 0
    for _ in range(rounds):
        for n in connections:
            for system in bench.systems:
                prompts = groups * system.scale
                measured = await sample(bench, system, n, prompts, first_prompt)
                samples.setdefault((system.name, n), []).append(measured)
            first_prompt += groups * max(system.scale for system in bench.systems)
    return samples


@dataclass(frozen=True, slots=True)
class Stalls:
    """What the gateway's event loop and garbage collector did during a job."""

    loop_max_ms: float
    """The longest that a task in the loop woke up too late."""
    collections: int
    collection_max_ms: float


async def delayed(
    bench: Bench, ours: Stepwell, connections: int, *, rounds: int, groups: int
) -> tuple[Samples, list[Sample], list[Stalls]]:
    """The same with an engine that takes 50 ms; and, of one process of ours, once more with
    trajectories that stay open and begin one after the other."""
    samples: Samples = {}
    left_open: list[Sample] = []
    stalls: list[Stalls] = []
    await bench.engine.control(delay_s=DELAY_S)
    try:
        for turn in range(rounds):
            for system in bench.systems:
                measured = await sample(bench, system, connections, groups, turn * groups)
                samples.setdefault((system.name, connections), []).append(measured)
            with_stalls = await _open_trajectories(bench, ours, connections, groups, turn * groups)
            left_open.append(with_stalls[0])
            stalls.append(with_stalls[1])
    finally:
        await bench.engine.control()
    return samples, left_open, stalls


async def _open_trajectories(
    bench: Bench, system: Stepwell, connections: int, prompts: int, first_prompt: int
) -> tuple[Sample, Stalls]:
    job = _job(
        bench,
        system,
        connections,
        prompts,
        first_prompt,
        complete_path=None,
        stagger_s=DELAY_S / ROLLOUTS,
    )
    await system.actors[0].watch.remote()
    measured = await _measured(bench, system, job)
    late_s, collections_s = await system.actors[0].stalls.remote()
    await system.actors[0].complete_all.remote()
    await system.settle([job])
    stalls = Stalls(1e3 * max(late_s), len(collections_s), 1e3 * max(collections_s, default=0.0))
    return measured, stalls


def table(samples: Samples, reference: str) -> list[dict[str, str | int | float]]:
    """One row a system and number of connections; `added` is over `reference`, CPU per request."""
    rows = []
    for (name, connections), measured in samples.items():
        against = samples[reference, connections]
        row: dict[str, str | int | float] = {"system": name, "connections": connections}
        row |= {
            "requests_per_s": _median(measured, lambda s: s.requests_per_s),
            "p50_ms": _median(measured, lambda s: s.p50_ms),
            "p99_ms": _median(measured, lambda s: s.p99_ms),
            "max_ms": _median(measured, lambda s: s.max_ms),
        }
        if name != reference:
            row |= {
                "p50_added_ms": paired(measured, against, lambda a, b: a.p50_ms - b.p50_ms),
                "p99_added_ms": paired(measured, against, lambda a, b: a.p99_ms - b.p99_ms),
                "cpu_ms": _median(measured, lambda s: s.cpu_ms),
            }
            if any(s.pool_cpu_ms for s in measured):
                row["pool_cpu_ms"] = _median(measured, lambda s: s.pool_cpu_ms)
            row["rss_mb"] = measured[-1].rss_mb
        rows.append(row)
    return sorted(rows, key=lambda row: row["connections"])


def paired(
    of: Sequence[Sample], to: Sequence[Sample], compare: Callable[[Sample, Sample], float]
) -> float:
    """Median over the rounds of `compare`, of two samples of the same round."""
    return statistics.median(compare(a, b) for a, b in zip(of, to, strict=True))


def _median(measured: Sequence[Sample], value: Callable[[Sample], float]) -> float:
    return statistics.median(map(value, measured))


def _cpu(*pids: int | None) -> float:
    return sum(cpu_seconds(pid) for pid in pids if pid is not None)
