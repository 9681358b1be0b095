"""`python -m benchmarks pool`: the DataPool beside a bare Ray actor and TransferQueue, in one run.

    memory       bytes per stored step of every system                  measure.py
    acks         bytes that a lease and its ack write to disk, a step   measure.py
    throughput   steps/s of every system in four modes                  measure.py
    shards       the same of pools of 1, 2 and 4 shards                 measure.py
    handle       the same of the pool's Ray handle, without a client    measure.py
    latency      lease and submit at 1 k, 100 k and 1 M stored steps    latency.py
    conversion   128 leased steps to padded training tensors            conversion.py

`workload.py` says what is stored, `systems.py` and `transfer_queue.py` where. What comes back from
a system is checked to be exactly what it was given. A quick run has the same parts on little data
and no bounds: its figures are those of a start-up.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.checks import BenchResult, Check, chosen_sections
from benchmarks.pool.cluster import bench_cluster
from benchmarks.pool.latency import latency_by_size
from benchmarks.pool.measure import (
    CONCURRENT,
    MODES,
    ONE_AT_A_TIME,
    ONE_BY_ONE,
    PIPELINED,
    Timed,
    bytes_written_by_acks,
    median,
    memory,
    ratio,
    running,
    throughput,
)
from benchmarks.pool.systems import BareActor, BareHandle, Stepwell, System
from benchmarks.pool.transfer_queue import INSTALL, TransferQueue, is_installed

SECTIONS = ("memory", "acks", "throughput", "shards", "handle", "latency", "conversion")
TIMED = {"throughput", "shards", "handle"}
"""Sections that compare the steps/s of systems."""


@dataclass(frozen=True, slots=True)
class _Size:
    """How much is measured."""

    rounds: int
    stored: int
    """Steps in the store when its memory is read, or the acks begin."""
    settle_s: float
    """More than the 5 s after which the journal has written what it puts off."""
    sizes: tuple[int, ...]
    turns: int
    conversions: int


FULL = _Size(
    rounds=3,
    stored=20_096,
    settle_s=7.0,
    sizes=(1_000, 100_000, 1_000_000),
    turns=150,
    conversions=40,
)
QUICK = _Size(rounds=1, stored=512, settle_s=0.1, sizes=(256, 1_024), turns=3, conversions=2)


async def run(*, quick: bool = False, only: Sequence[str] = ()) -> BenchResult:
    """All sections, or those named in `only`.

    Raises:
        ConfigError: `only` names no section.
        RuntimeError: a system gave back other content than it was given.
    """
    wanted = chosen_sections(only, SECTIONS)
    size = QUICK if quick else FULL
    systems = Systems()
    report = BenchResult()
    with bench_cluster():
        async with running(systems.of(wanted)):
            # Memory first: it is of processes that never held more.
            if "memory" in wanted:
                await _memory(systems, size, report)
            if "acks" in wanted:
                await _acks(systems, size, report)
            if timed := wanted & TIMED:
                await _throughput(systems, timed, size, quick, report)
        if "latency" in wanted:
            await _latency(size, report)
        if "conversion" in wanted:
            await _conversion(size, report)
    report.figures["systems"] = systems.table()
    return report.without_bounds() if quick else report


class Systems:
    """The systems of a run, and one row of the table for each."""

    def __init__(self) -> None:
        self.none, self.process = Stepwell("none"), Stepwell("process")
        self.power = Stepwell("power")
        self.bare = BareActor()
        self.other = TransferQueue() if is_installed() else None
        self.two_shards, self.four_shards = Stepwell("process", 2), Stepwell("process", 4)
        self.handle = BareHandle()
        self.compared: list[System] = [self.none, self.process, self.power, self.bare]
        self.compared += [self.other] if self.other else []
        self._rows: dict[str, dict[str, Any]] = {system.name: {} for system in self.of(SECTIONS)}

    def of(self, sections: Collection[str]) -> list[System]:
        """Those that are measured in one of `sections`."""
        measured: dict[str, Sequence[System]] = {
            "memory": self.compared,
            "acks": [self.none, self.process],
            "throughput": self.compared,
            "shards": [self.process, self.two_shards, self.four_shards],
            "handle": [self.handle, self.bare],
        }
        # Each once, in the order of the table.
        return list(
            dict.fromkeys(s for name in measured if name in sections for s in measured[name])
        )

    def note(self, system: System, **figures: float) -> None:
        self._rows[system.name] |= figures

    def table(self) -> list[dict[str, Any]]:
        rows = [{"system": name, **row} for name, row in self._rows.items() if row]
        if self.other is None:
            rows.append({"system": f"{TransferQueue.name}, not installed: {INSTALL}"})
        return rows


async def _throughput(
    systems: Systems, sections: Collection[str], size: _Size, quick: bool, report: BenchResult
) -> None:
    measured = systems.of(sections)
    rates = await throughput(measured, rounds=size.rounds, quick=quick)
    for system in measured:
        systems.note(system, **{mode.name: median(rates, system, mode) for mode in MODES})
    process, waited = (systems.process, PIPELINED), (systems.process, ONE_AT_A_TIME)
    concurrent, one_by_one = (systems.process, CONCURRENT), (systems.bare, ONE_BY_ONE)
    bare, bare_waited = (systems.bare, PIPELINED), (systems.bare, ONE_AT_A_TIME)
    claims: list[tuple[str, str, float, Timed, Timed]] = [
        ("throughput", "process_by_bare_one_at_a_time", 2.0, process, bare_waited),
        ("throughput", "process_by_bare_both_one_at_a_time", 2.0, waited, bare_waited),
        ("throughput", "none_by_bare_pipelined", 1.0, (systems.none, PIPELINED), bare),
        ("throughput", "process_concurrent_by_bare_one_by_one", 5.0, concurrent, one_by_one),
        ("shards", "two_shards_by_one", 0.9, (systems.two_shards, PIPELINED), process),
        ("shards", "four_shards_by_one", 0.8, (systems.four_shards, PIPELINED), process),
        ("handle", "handle_by_bare_pipelined", 0.8, (systems.handle, PIPELINED), bare),
    ]
    if systems.other is not None:
        # One put after another is how its documentation feeds it. With 32 at once it loses the
        # order that stands for its groups; the table shows that figure too.
        other = (systems.other, ONE_AT_A_TIME)
        claims.append(("throughput", "process_by_transfer_queue", 8.0, process, other))
    for section, name, bound, of, to in claims:
        if section in sections:
            report.checks[name] = Check(ratio(rates, of, to), bound, upper=False)


async def _memory(systems: Systems, size: _Size, report: BenchResult) -> None:
    for system in systems.compared:
        grown = await memory(system, size.stored)
        systems.note(system, rss_bytes_per_step=grown.rss, private_bytes_per_step=grown.private)
        if isinstance(system, Stepwell):
            # The actor's own: resident memory also counts pages of Ray's object store, which are
            # shared by all processes and do not grow with what is stored.
            name = f"bytes_per_step_{system.durability}"
            report.checks[name] = Check(grown.private, 2_000)


async def _acks(systems: Systems, size: _Size, report: BenchResult) -> None:
    none, process = [
        await bytes_written_by_acks(system, size.stored, size.settle_s)
        for system in (systems.none, systems.process)
    ]
    # Without a journal it is the leased steps on their way to the consumer.
    report.checks["ack_bytes_per_step"] = Check(process - none, 500)


async def _latency(size: _Size, report: BenchResult) -> None:
    pools = await latency_by_size(size.sizes, size.turns)
    smallest = pools[0]
    for pool in pools:
        report.checks[f"lease_p50_ms_at_{pool.stored}"] = Check(pool.lease_p50_ms, 5.0)
    for pool in pools[1:]:
        lease = pool.lease_p50_ms / smallest.lease_p50_ms
        submit = pool.submit_p50_ms / smallest.submit_p50_ms
        report.checks[f"lease_at_{pool.stored}_by_{smallest.stored}"] = Check(lease, 1.5)
        report.checks[f"submit_at_{pool.stored}_by_{smallest.stored}"] = Check(submit, 1.5)
    report.figures["pool_sizes"] = [
        {
            "stored_steps": pool.stored,
            "call_p50_ms": pool.call_p50_ms,
            "lease_128_p50_ms": pool.lease_p50_ms,
            "submit_16_p50_ms": pool.submit_p50_ms,
            "fill_steps_per_s": pool.fill_steps_per_s,
            "rss_mb": pool.rss_bytes / 2**20,
        }
        for pool in pools
    ]


async def _conversion(size: _Size, report: BenchResult) -> None:
    from benchmarks.pool.conversion import conversion

    measured = await conversion(size.conversions)
    report.checks["conversion_128_ms"] = Check(1e3 * measured.total_s, 6.0)
    report.figures["conversion_convert_ms"] = 1e3 * measured.convert_s
    report.figures["conversion_pad_ms"] = 1e3 * measured.pad_s
