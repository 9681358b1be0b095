"""`python -m benchmarks pool`: the DataPool beside a bare Ray actor and TransferQueue, in one run.

    memory       bytes per stored step of every system, and written      measure.py
    acks         bytes that a lease and its ack write to disk, a step    measure.py
    throughput   steps/s of every system in four modes                   measure.py
    shards       the same of pools of 1, 2 and 4 shards
    handle       the same of the pool's Ray handle, without a client
    latency      lease and submit at 1 k, 100 k and 1 M stored steps     latency.py
    conversion   128 leased steps to padded training tensors             conversion.py
    recovery     from kill -9 to the first answer, by what is stored     recovery.py

`workload.py` says what is stored, `systems.py` and `transfer_queue.py` where. What comes back from
a system is checked to be exactly what it was given. A quick run has the same parts on little data
and no bounds: its figures are those of a start-up.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass

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
from benchmarks.pool.recovery import recovery
from benchmarks.pool.systems import (
    BareActor,
    BareHandle,
    BareSocket,
    BareSteps,
    Stepwell,
    Store,
)
from benchmarks.pool.transfer_queue import INSTALL, TransferQueue, is_installed
from benchmarks.pool.workload import PAYLOAD_BYTES, small_calls, workload_a
from benchmarks.system import Bench

FIRST_ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class Size:
    """Amount of work that is measured."""

    rounds: int
    stored: int
    """Steps in the store when its memory is read, or the acks begin."""
    settle_s: float
    """More than the 5 s after which the journal has written what it puts off."""
    sizes: tuple[int, ...]
    turns: int
    conversions: int
    recovered: tuple[int, ...]
    """Steps that the pools hold that are killed; the last one's are of workload A."""
    groups: int | None = None
    """Groups of each mode; None: the mode's own."""


FULL = Size(
    3,
    20_096,
    7.0,
    (1_000, 100_000, 1_000_000),
    turns=150,
    conversions=40,
    recovered=(100_000, 1_000_000, 20_000),
)
QUICK = Size(1, 512, 0.1, (256, 1_024), turns=3, conversions=2, recovered=(1_280, 1_280), groups=4)


class PoolBench(Bench[Store, Size]):
    """Stores, and what was found about each."""

    def __init__(self, size: Size) -> None:
        self.rows: defaultdict[str, dict[str, float]] = defaultdict(dict)
        none, process, power = Stepwell("none"), Stepwell("process"), Stepwell("power")
        two, four = Stepwell("process", 2), Stepwell("process", 4)
        bare, of_steps, socket, handle = BareActor(), BareSteps(), BareSocket(), BareHandle()
        others = [TransferQueue()] if is_installed() else []
        self.compared: dict[str, list[Store]] = {
            "memory": [none, process, power, bare, *others],
            "acks": [none, process],
            "throughput": [none, process, power, bare, socket, *others],
            "shards": [process, two, four],
            "handle": [handle, bare, of_steps],
        }
        """Section -> what it measures; one that is not here has pools of its own."""
        super().__init__(systems=self.of([*self.compared]), size=size)
        if not others:
            self.report.figures[f"{TransferQueue.name}, not installed"] = INSTALL
        pipelined, waited = (process, PIPELINED), (bare, ONE_AT_A_TIME)
        one_by_one = (bare, ONE_BY_ONE)
        self.claims: dict[str, list[tuple[str, float, Timed, Timed]]] = {
            "throughput": [
                ("process_by_bare_one_at_a_time", 3.0, pipelined, waited),
                ("process_by_bare_both_one_at_a_time", 2.0, (process, ONE_AT_A_TIME), waited),
                ("process_by_bare_pipelined", 1.0, pipelined, (bare, PIPELINED)),
                ("none_by_bare_pipelined", 1.0, (none, PIPELINED), (bare, PIPELINED)),
                ("process_concurrent_by_bare_one_by_one", 5.0, (process, CONCURRENT), one_by_one),
                ("process_concurrent_by_socket", 1.7, (process, CONCURRENT), (socket, CONCURRENT)),
                # One put after another is how its documentation feeds it. With 32 at once it loses
                # the order that stands for its groups; the table shows that figure too.
                *(
                    ("process_by_transfer_queue", 8.0, pipelined, (other, ONE_AT_A_TIME))
                    for other in others
                ),
            ],
            "shards": [
                ("two_shards_by_one", 0.9, (two, PIPELINED), pipelined),
                ("four_shards_by_one", 0.8, (four, PIPELINED), pipelined),
            ],
            "handle": [
                ("handle_by_bare_pipelined", 1.0, (handle, PIPELINED), (bare, PIPELINED)),
                ("handle_by_bare_one_at_a_time", 1.0, (handle, ONE_AT_A_TIME), waited),
                # What is lost before there is a pool.
                ("bare_of_steps_by_bare_pipelined", 0.8, (of_steps, PIPELINED), (bare, PIPELINED)),
            ],
        }
        """Section -> what is divided by what, and the least that comes out."""

    def of(self, sections: Sequence[str]) -> list[Store]:
        """Return the systems that are measured in one of `sections`."""
        return list(dict.fromkeys(s for name in sections for s in self.compared.get(name, ())))

    async def memory(self, section: str) -> None:
        for system in self.compared[section]:
            rss, private, written = await memory(system, self.size.stored)
            figures = {"rss_bytes_per_step": rss, "private_bytes_per_step": private}
            self.rows[system.name] |= figures | {"written_bytes_per_step": written}
            if isinstance(system, Stepwell):
                if system.durability != "none":
                    name = f"written_by_payload_{system.durability}"
                    self.report.at_most(name, written / PAYLOAD_BYTES, 2.0)
                # The actor's own: resident memory also counts pages of Ray's object store, which
                # are shared by all processes and do not grow with what is stored.
                self.report.at_most(f"bytes_per_step_{system.durability}", private, 2_000)

    async def acks(self, section: str) -> None:
        none, process = [
            await bytes_written_by_acks(system, self.size.stored, self.size.settle_s)
            for system in self.compared[section]
        ]
        # Without a journal it is the leased steps on their way to the consumer.
        self.report.at_most("ack_bytes_per_step", process - none, 500)

    async def rates(self, section: str) -> None:
        systems, size = self.compared[section], self.size
        rates = await throughput(systems, section, rounds=size.rounds, groups=size.groups)
        for system in systems:
            for mode in MODES:  # those that were measured before stay
                rate, row = median(rates, system, mode), self.rows[system.name]
                row.setdefault(f"steps_per_s_{mode.name}", rate.steps_per_s)
                row.setdefault(f"cpu_us_{mode.name}", rate.cpu_us)
        for name, bound, of, to in self.claims[section]:
            self.report.at_least(name, ratio(rates, of, to), bound)

    async def latency(self, section: str) -> None:
        rows = await latency_by_size(self.size.sizes, self.size.turns)
        self.report.figures["pool_sizes"] = rows
        smallest = rows[0]
        for row in rows:
            n, lease = row["stored_steps"], row["lease_128_p50_ms"]
            self.report.at_most(f"lease_p50_ms_at_{n}", lease, 5.0)
            if row is not smallest:
                by = f"at_{n}_by_{smallest['stored_steps']}"
                submit = row["submit_16_p50_ms"] / smallest["submit_16_p50_ms"]
                self.report.at_most(f"lease_{by}", lease / smallest["lease_128_p50_ms"], 1.5)
                self.report.at_most(f"submit_{by}", submit, 1.5)

    async def conversion(self, section: str) -> None:
        from benchmarks.pool.conversion import conversion

        convert_ms, pad_ms, total_ms = await conversion(self.size.conversions)
        self.report.at_most("conversion_128_ms", total_ms, 6.0)
        self.report.figures.update(conversion_convert_ms=convert_ms, conversion_pad_ms=pad_ms)

    async def recovery(self, section: str) -> None:
        *small, large = self.size.recovered
        with redirect_stdout(sys.stderr):  # Ray tells of every death on stdout
            rows = [await recovery("small steps", steps, small_calls) for steps in small]
            for row in rows:
                name = f"first_answer_s_at_{row['steps']}"
                self.report.at_most(name, row["first_answer_s"], FIRST_ANSWER_S)
            rows.append(await recovery("workload A", large, workload_a))
        self.report.figures["recovery"] = rows


SECTIONS: dict[str, Callable[[PoolBench, str], Awaitable[None]]] = {
    "memory": PoolBench.memory,  # first: of processes that never held more
    "acks": PoolBench.acks,
    **dict.fromkeys(("throughput", "shards", "handle"), PoolBench.rates),
    "latency": PoolBench.latency,
    "conversion": PoolBench.conversion,
    "recovery": PoolBench.recovery,
}


async def run(*, quick: bool = False, only: Sequence[str] = ()) -> BenchResult:
    """All sections, or those named in `only`.

    Raises:
        ConfigError: `only` names no section.
        RuntimeError: a system gave back other content than it was given.
    """
    wanted = chosen_sections(only, SECTIONS)
    bench = PoolBench(QUICK if quick else FULL)
    with bench_cluster():
        async with running(bench.of(wanted)):
            for name in bench.compared:
                if name in wanted:
                    await SECTIONS[name](bench, name)
        for name in wanted:
            if name not in bench.compared:
                await SECTIONS[name](bench, name)
    bench.report.figures["systems"] = [{"system": k} | row for k, row in bench.rows.items()]
    return bench.report.without_bounds() if quick else bench.report
