"""`python -m benchmarks pool`: the DataPool beside a bare Ray actor, in one run.

    memory       bytes per stored step of every system                   measure.py
    acks         bytes that a lease and its ack write to disk, a step    measure.py
    throughput   steps/s of every system in four modes                   measure.py
    shards       the same of pools of 1, 2 and 4 shards
    handle       the same of the pool's Ray handle, without a client
    latency      lease and submit at 1 k, 100 k and 1 M stored steps     latency.py
    conversion   128 leased steps to padded training tensors             conversion.py

`workload.py` says what is stored, `systems.py` where. What comes back from a system is checked to
be exactly what it was given. A quick run has the same parts on little data and no bounds: its
figures are those of a start-up.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.checks import BenchResult, chosen_sections
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
    groups: int | None = None
    """Of each mode; None: the mode's own."""


FULL = _Size(3, 20_096, 7.0, (1_000, 100_000, 1_000_000), turns=150, conversions=40)
QUICK = _Size(1, 512, 0.1, (256, 1_024), turns=3, conversions=2, groups=4)


class Systems:
    """The systems of a run, and one row of the table for each."""

    def __init__(self) -> None:
        self.none, self.process = Stepwell("none"), Stepwell("process")
        self.power = Stepwell("power")
        self.bare = BareActor()
        self.two_shards, self.four_shards = Stepwell("process", 2), Stepwell("process", 4)
        self.handle = BareHandle()
        self.compared: list[System] = [self.none, self.process, self.power, self.bare]
        self._rows: dict[str, dict[str, Any]] = {s.name: {} for s in self.of(SECTIONS)}

    def of(self, sections: Collection[str]) -> list[System]:
        """Those that are measured in one of `sections`, in the order of the table."""
        measured: dict[str, Sequence[System]] = {
            "memory": self.compared,
            "acks": [self.none, self.process],
            "throughput": self.compared,
            "shards": [self.process, self.two_shards, self.four_shards],
            "handle": [self.handle, self.bare],
        }
        return list(
            dict.fromkeys(s for name in measured if name in sections for s in measured[name])
        )

    def note(self, system: System, **figures: float) -> None:
        self._rows[system.name] = figures | self._rows[system.name]

    def table(self) -> list[dict[str, Any]]:
        return [{"system": name, **row} for name, row in self._rows.items() if row]

    def claims(self, section: str) -> list[tuple[str, float, Timed, Timed]]:
        """What is divided by what, and the least that comes out."""
        process, bare = (self.process, PIPELINED), (self.bare, PIPELINED)
        bare_waited = (self.bare, ONE_AT_A_TIME)
        if section == "shards":
            return [
                ("two_shards_by_one", 0.9, (self.two_shards, PIPELINED), process),
                ("four_shards_by_one", 0.8, (self.four_shards, PIPELINED), process),
            ]
        if section == "handle":
            return [("handle_by_bare_pipelined", 0.8, (self.handle, PIPELINED), bare)]
        concurrent, one_by_one = (self.process, CONCURRENT), (self.bare, ONE_BY_ONE)
        waited = (self.process, ONE_AT_A_TIME)
        return [
            ("process_by_bare_one_at_a_time", 2.0, process, bare_waited),
            ("process_by_bare_both_one_at_a_time", 2.0, waited, bare_waited),
            ("none_by_bare_pipelined", 1.0, (self.none, PIPELINED), bare),
            ("process_concurrent_by_bare_one_by_one", 5.0, concurrent, one_by_one),
        ]


async def _memory(systems: Systems, size: _Size, report: BenchResult) -> None:
    for system in systems.compared:
        rss, private = await memory(system, size.stored)
        systems.note(system, rss_bytes_per_step=rss, private_bytes_per_step=private)
        if isinstance(system, Stepwell):
            # The actor's own: resident memory also counts pages of Ray's object store, which are
            # shared by all processes and do not grow with what is stored.
            report.at_most(f"bytes_per_step_{system.durability}", private, 2_000)


async def _acks(systems: Systems, size: _Size, report: BenchResult) -> None:
    none, process = [
        await bytes_written_by_acks(system, size.stored, size.settle_s)
        for system in (systems.none, systems.process)
    ]
    # Without a journal it is the leased steps on their way to the consumer.
    report.at_most("ack_bytes_per_step", process - none, 500)


def _throughput(section: str) -> Section:
    async def measured(systems: Systems, size: _Size, report: BenchResult) -> None:
        of_section = systems.of([section])
        rates = await throughput(of_section, section, rounds=size.rounds, groups=size.groups)
        for system in of_section:
            systems.note(system, **{mode.name: median(rates, system, mode) for mode in MODES})
        for name, bound, of, to in systems.claims(section):
            report.at_least(name, ratio(rates, of, to), bound)

    return measured


async def _latency(systems: Systems, size: _Size, report: BenchResult) -> None:
    rows = await latency_by_size(size.sizes, size.turns)
    report.figures["pool_sizes"] = rows
    smallest = rows[0]
    for row in rows:
        n, lease = row["stored_steps"], row["lease_128_p50_ms"]
        report.at_most(f"lease_p50_ms_at_{n}", lease, 5.0)
        if row is not smallest:
            by = f"at_{n}_by_{smallest['stored_steps']}"
            submit = row["submit_16_p50_ms"] / smallest["submit_16_p50_ms"]
            report.at_most(f"lease_{by}", lease / smallest["lease_128_p50_ms"], 1.5)
            report.at_most(f"submit_{by}", submit, 1.5)


async def _conversion(systems: Systems, size: _Size, report: BenchResult) -> None:
    from benchmarks.pool.conversion import conversion

    convert_ms, pad_ms, total_ms = await conversion(size.conversions)
    report.at_most("conversion_128_ms", total_ms, 6.0)
    report.figures.update(conversion_convert_ms=convert_ms, conversion_pad_ms=pad_ms)


Section = Callable[[Systems, _Size, BenchResult], Awaitable[None]]
SECTIONS: dict[str, Section] = {
    "memory": _memory,  # first: of processes that never held more
    "acks": _acks,
    **{name: _throughput(name) for name in ("throughput", "shards", "handle")},
    "latency": _latency,
    "conversion": _conversion,
}


async def run(*, quick: bool = False, only: Sequence[str] = ()) -> BenchResult:
    """All sections, or those named in `only`.

    Raises:
        ConfigError: `only` names no section.
        RuntimeError: a system gave back other content than it was given.
    """
    wanted = chosen_sections(only, SECTIONS)
    size, systems, report = QUICK if quick else FULL, Systems(), BenchResult()
    alone = [name for name in wanted if not systems.of([name])]
    with bench_cluster():
        async with running(systems.of(wanted)):
            for name in wanted:
                if name not in alone:
                    await SECTIONS[name](systems, size, report)
        for name in alone:  # with pools of their own
            await SECTIONS[name](systems, size, report)
    report.figures["systems"] = systems.table()
    return report.without_bounds() if quick else report
