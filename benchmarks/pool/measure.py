"""Steps/s end to end, memory per stored step and bytes written per acked step, on workload A.

    producers ── 16 or 1 a submit, 1 .. 64 in flight ──► system ──128 steps a fetch──► consumer
    └──────────── one process, one event loop; first submit to last fetched step ─────────────┘

With one submit in flight there is one fetch in flight, with more there are four (where the system
can): a fetch that waits for its turn in a busy loop would be measured, not the system.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import psutil

from benchmarks.pool.systems import Store
from benchmarks.pool.workload import (
    GROUPS_PER_FETCH,
    STEPS_PER_FETCH,
    STEPS_PER_GROUP,
    Call,
    check_exact,
    submit_all,
    workload_a,
)
from benchmarks.system import paired
from stepwell.datapool.heap import settle_heap


@dataclass(frozen=True, slots=True)
class Mode:
    """Way to submit: `per_submit` steps a call, `in_flight` calls at a time (16x32)."""

    per_submit: int
    in_flight: int
    groups: int
    """Groups of workload A in one measurement; a multiple of 4."""
    fetches: int = 1
    """Fetches under way at a time."""

    @property
    def name(self) -> str:
        return f"{self.per_submit}x{self.in_flight}"


ONE_AT_A_TIME = Mode(16, 1, 128)
PIPELINED = Mode(16, 32, 256, fetches=4)
ONE_BY_ONE = Mode(1, 1, 16)
CONCURRENT = Mode(1, 64, 64, fetches=4)
MODES = (ONE_AT_A_TIME, PIPELINED, ONE_BY_ONE, CONCURRENT)


class Rate(NamedTuple):
    """One measurement."""

    steps_per_s: float
    cpu_us: float
    """CPU of a step, µs: of the client and the store's processes, without Ray's own."""


Rates = dict[str, dict[str, list[Rate]]]
"""Store -> mode -> one rate per round."""
Timed: TypeAlias = tuple[Store, Mode]


@asynccontextmanager
async def running(systems: Sequence[Store]) -> AsyncIterator[None]:
    """All `systems` at once, each having served one batch."""
    async with AsyncExitStack() as stack:
        for system in systems:
            await stack.enter_async_context(system.running())
            await measured(system, list(workload_a(GROUPS_PER_FETCH, "warm-up")), PIPELINED)
        yield


async def throughput(
    systems: Sequence[Store], name: str, *, rounds: int, groups: int | None = None
) -> Rates:
    """Steps/s of every running system in every mode; all are empty before and after.

    Args:
        name: begins the uids of what is stored: a pool takes none twice.
        groups: of workload A in one measurement; None: the mode's.
    """
    rates: Rates = {system.name: {mode.name: [] for mode in MODES} for system in systems}
    for turn in range(rounds):
        for mode in MODES:
            calls = list(workload_a(groups or mode.groups, f"{name}-{mode.name}-{turn}", seed=turn))
            for system in systems:
                rates[system.name][mode.name].append(await measured(system, calls, mode))
    return rates


async def measured(system: Store, calls: Sequence[Call], mode: Mode) -> Rate:
    """One measurement; the content that came back is checked afterwards.

    Raises:
        RuntimeError: it is not exactly what was submitted.
    """
    fetched: list[Any] = []
    fetches = iter(range(len(calls) // STEPS_PER_FETCH))

    async def consume() -> None:
        for _ in fetches:
            fetched.append(await system.fetch())

    # The calls are a million objects that every collection would walk through.
    gc.unfreeze()
    settle_heap()
    began, cpu = time.perf_counter(), _cpu(system)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(mode.fetches, system.max_fetches)):
            tasks.create_task(consume())
        tasks.create_task(submit_all(system.submit, calls, mode.per_submit, mode.in_flight))
    elapsed, cpu = time.perf_counter() - began, _cpu(system) - cpu
    check_exact(calls, [call for batch in fetched for call in system.unpack(batch)])
    await system.drained()
    return Rate(len(calls) / elapsed, cpu / len(calls) * 1e6)


def _cpu(system: Store) -> float:
    """CPU seconds of this process and the store's."""
    times = [psutil.Process(pid).cpu_times() for pid in system.pids]
    return time.process_time() + sum(t.user + t.system for t in times)


def median(rates: Rates, system: Store, mode: Mode) -> Rate:
    """Medians over the rounds."""
    each = rates[system.name][mode.name]
    return Rate(*(statistics.median(values) for values in zip(*each, strict=True)))


def ratio(rates: Rates, of: Timed, to: Timed) -> float:
    """Median over the rounds of one rate by another of the same round."""
    above, below = (rates[system.name][mode.name] for system, mode in (of, to))
    return paired(above, below, lambda a, b: a.steps_per_s / b.steps_per_s)


async def memory(system: Store, steps: int) -> tuple[float, float, float]:
    """Bytes by which the store's processes grow per step stored: resident, and without what is
    shared with other processes, such as Ray's object store (unique set size); and bytes that they
    write, to disk or to a socket, while steps come in.

    Stores `steps` (a multiple of 128) of workload A, then fetches them. `system` runs, is empty and
    never held more than a batch: memory it had freed would be used again."""
    (rss, uss), written = _memory(system.pids), _written(system)
    calls = await _store(system, steps, "stored")
    (rss_then, uss_then), written = _memory(system.pids), _written(system) - written
    await _fetch_all(system, calls)
    return (rss_then - rss) / steps, (uss_then - uss) / steps, written / steps


def _memory(pids: Sequence[int]) -> tuple[int, int]:
    full = [psutil.Process(pid).memory_full_info() for pid in pids]
    return sum(m.rss for m in full), sum(m.uss for m in full)


async def bytes_written_by_acks(system: Store, steps: int, settle_s: float) -> float:
    """Bytes that the store's processes write, to disk or to a socket, per step that is leased and
    acked: of `steps` (a multiple of 128) of workload A that are stored.

    Args:
        settle_s: longer than the store takes to write what it has put off; waited for before the
            first lease and after the last ack.
    """
    calls = await _store(system, steps, "acked")
    await asyncio.sleep(settle_s)
    before = _written(system)
    await _fetch_all(system, calls)
    await asyncio.sleep(settle_s)
    return (_written(system) - before) / steps


def _written(system: Store) -> int:
    # Not `write_bytes`, which misses pages that are written again before the disk has them.
    return sum(psutil.Process(pid).io_counters().write_chars for pid in system.pids)


async def _store(system: Store, steps: int, name: str) -> list[Call]:
    calls = list(workload_a(steps // STEPS_PER_GROUP, name))
    await submit_all(system.submit, calls, PIPELINED.per_submit, PIPELINED.in_flight)
    return calls


async def _fetch_all(system: Store, calls: Sequence[Call]) -> None:
    fetched = [system.unpack(await system.fetch()) for _ in range(len(calls) // STEPS_PER_FETCH)]
    check_exact(calls, [call for batch in fetched for call in batch])
    await system.drained()
