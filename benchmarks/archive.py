"""`python -m benchmarks archive [--minutes M] [--only …] [--quick]`: what the archive costs a pool
and a gateway, and the bytes that it takes.

    paced       a pool at 2,000 steps/s for M minutes, with the archive by without
    saturated   the same pool with all that 32 submits at a time give; bytes that wait are bounded
    gateway     requests/s at 64 connections, groups consumed meanwhile
    bytes       of files and index by those of the journal, a step

All through the wire: pool, archiver, gateway, engine and client are processes. Forms take turns,
each once nothing waits to be archived. Workload A of `benchmarks/pool/workload.py`; the gateway's
Steps have their messages. A quick run has the same parts on little data and no bounds.
"""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from benchmarks.checks import BenchResult, chosen_sections
from benchmarks.gateway import FULL as GATEWAY_SIZE
from benchmarks.gateway import running as running_gateways
from benchmarks.gateway.measure import GatewayBench, Sample, run_job
from benchmarks.gateway.systems import Stepwell as Gateway
from benchmarks.pool.cluster import bench_cluster
from benchmarks.pool.systems import Stepwell as Pool
from benchmarks.pool.workload import STEPS_PER_FETCH, STEPS_PER_GROUP, Call, chunks, workload_a
from benchmarks.system import paired
from stepwell.datapool.config import BACKLOG_BYTES, ArchiveConfig

RATE = 2000
PER_SUBMIT, IN_FLIGHT, FETCHES = 16, 32, 4
BASE_GROUPS = 64
"""Groups whose tokens are stored again and again under other names."""
CONNECTIONS = 64
DRAIN_S = 600.0
CHARACTERS = 640
"""Characters of a step's messages, where they are measured."""


@dataclass(frozen=True, slots=True)
class Size:
    """Amount of work that is measured."""

    rounds: int
    seconds: float
    """Seconds of one saturated measurement."""
    prompts: int
    """Prompts of one measurement of the gateway, with 32 calls each."""
    groups: int
    """Groups whose bytes are counted."""


FULL = Size(rounds=5, seconds=30.0, prompts=256, groups=256)
QUICK = Size(rounds=1, seconds=1.0, prompts=4, groups=8)


@dataclass(slots=True)
class Load:
    """Load that a pool took."""

    steps: int = 0
    seconds: float = 0.0
    submits_s: list[float] = field(default_factory=list)
    waiting_bytes: int = 0
    """Most bytes of rows that waited to be archived."""

    @property
    def rate(self) -> float:
        return self.steps / self.seconds


async def run(
    *,
    minutes: Annotated[float, "of the paced pool"] = 5.0,
    only: Sequence[str] = (),
    quick: bool = False,
) -> BenchResult:
    sections = {"paced": _paced, "saturated": _saturated, "gateway": _gateway, "bytes": _bytes}
    report, size = BenchResult(), QUICK if quick else FULL
    with tempfile.TemporaryDirectory(prefix="stepwell-archive-") as folder:
        for name in chosen_sections(only, sections):
            base = Path(folder) / name
            base.mkdir()
            await sections[name](report, base, size, 0.05 if quick else minutes)
    return report.without_bounds() if quick else report


def _kept(folder: Path) -> dict[str, Any]:
    """Options of a pool with an archive."""
    return {"archive": ArchiveConfig(dir=folder / "archive")}


# -- the pool ------------------------------------------------------------------------------------


async def _paced(report: BenchResult, base: Path, size: Size, minutes: float) -> None:
    """Without, with, without: the middle one has all the minutes."""
    with bench_cluster(_system_config={"worker_niceness": 0}):
        async with AsyncExitStack() as stack:
            without, archived = Pool("process"), Pool("process", **_kept(base))
            for pool in (without, archived):
                await stack.enter_async_context(pool.running())
            few = min(60.0, minutes * 60)
            before = await _load(without, "before", few, RATE)
            kept = await _load(archived, "kept", minutes * 60, RATE)
            unarchived = await _drained(archived)
            after = await _load(without, "after", few, RATE)
    report.at_least("paced_steps_by_without", 2 * kept.rate / (before.rate + after.rate), 0.97)
    report.zero(paced_unarchived=unarchived)
    report.figures["paced"] = [
        _told(name, load)
        for name, load in (("without", before), ("with", kept), ("without", after))
    ]


async def _saturated(report: BenchResult, base: Path, size: Size, minutes: float) -> None:
    loads: dict[str, list[Load]] = {"without": [], "with": []}
    with bench_cluster(_system_config={"worker_niceness": 0}):
        async with AsyncExitStack() as stack:
            pools = {"without": Pool("process"), "with": Pool("process", **_kept(base))}
            for name, pool in pools.items():
                await stack.enter_async_context(pool.running())
                await _load(pool, f"warm-up-{name}", 1.0, None)
            for turn in range(size.rounds):
                for name, pool in pools.items():
                    loads[name].append(await _load(pool, f"{name}-{turn}", size.seconds, None))
                    unarchived = await _drained(pools["with"])
    by = paired(loads["with"], loads["without"], lambda a, b: a.rate / b.rate)
    report.at_least("saturated_steps_by_without", by, 0.85)
    most = max(load.waiting_bytes for load in loads["with"])
    report.at_most("saturated_waiting_bytes", most, BACKLOG_BYTES)
    report.figures["saturated_unarchived"] = unarchived
    report.figures["saturated"] = [_told(name, each) for name in loads for each in loads[name]]


def _told(name: str, load: Load) -> dict[str, Any]:
    return {
        "archive": name,
        "steps": load.steps,
        "steps_per_s": load.rate,
        "submit_p99_ms": float(np.percentile(load.submits_s, 99)) * 1e3,
        "waiting_mb": load.waiting_bytes / 1e6,
    }


async def _load(pool: Pool, name: str, seconds: float, rate: int | None) -> Load:
    """Submit and consume for so long; `rate` None: as fast as the pool takes them.

    Args:
        name: begins the uids of what is stored: a pool takes none twice.
    """
    load, base = Load(), _base()
    fetches: asyncio.Queue[bool] = asyncio.Queue()
    """True: the groups of one more fetch are stored; False: there are no more."""
    is_over = False
    numbers = itertools.count()
    began = time.perf_counter()

    async def consume() -> None:
        while await fetches.get():
            await pool.fetch()

    async def produce() -> None:
        nonlocal is_over
        while True:
            number = next(numbers)
            due = 0.0 if rate is None else number * STEPS_PER_GROUP / rate
            now = time.perf_counter() - began
            # Whole fetches: nothing is left behind.
            if max(now, due) >= seconds and number % (STEPS_PER_FETCH // STEPS_PER_GROUP) == 0:
                is_over = True
            if is_over:
                return
            await asyncio.sleep(due - now)
            for calls in chunks(
                _renamed(base[number % BASE_GROUPS], f"{name}-{number}"), PER_SUBMIT
            ):
                asked = time.perf_counter()
                await pool.submit(calls)
                load.submits_s.append(time.perf_counter() - asked)
                load.steps += len(calls)
                if load.steps % STEPS_PER_FETCH == 0:
                    fetches.put_nowait(True)

    watching = asyncio.create_task(_watch(pool, load))
    try:
        async with asyncio.TaskGroup() as consumers:
            for _ in range(FETCHES):
                consumers.create_task(consume())
            async with asyncio.TaskGroup() as producers:
                for _ in range(IN_FLIGHT):
                    producers.create_task(produce())
            for _ in range(FETCHES):
                fetches.put_nowait(False)
        load.seconds = time.perf_counter() - began
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
    return load


def _base() -> list[list[Call]]:
    calls = [
        call._replace(
            prompt_ids=np.array(call.prompt_ids, np.int32),  # type: ignore[arg-type]  # at once
            response_ids=np.array(call.response_ids, np.int32),  # type: ignore[arg-type]
            log_probs=np.array(call.log_probs, np.float32),  # type: ignore[arg-type]
        )
        for call in workload_a(BASE_GROUPS, "base")
    ]
    return list(chunks(calls, STEPS_PER_GROUP))


def _renamed(calls: Sequence[Call], prompt_uid: str) -> list[Call]:
    """The calls of a group as those of another one."""
    return [
        call._replace(
            prompt_uid=prompt_uid,
            trajectory_uid=f"{prompt_uid}-{call.trajectory_uid.rpartition('-')[2]}",
            metadata=call.metadata | {"request_id": f"{prompt_uid}-{i}"},
        )
        for i, call in enumerate(calls)
    ]


async def _watch(pool: Pool | Gateway, load: Load) -> None:
    while True:
        load.waiting_bytes = max(load.waiting_bytes, (await _backlog(pool))["waiting_bytes"])
        await asyncio.sleep(0.5)


async def _drained(pool: Pool | Gateway) -> int:
    """Wait until nothing waits to be archived; groups that left unarchived so far."""
    for _ in range(int(DRAIN_S / 0.5)):
        if not (backlog := await _backlog(pool))["waiting"]:
            return backlog["unarchived"]
        await asyncio.sleep(0.5)
    raise RuntimeError(f"after {DRAIN_S:g} s {backlog['waiting']} groups wait to be archived")


async def _backlog(pool: Pool | Gateway) -> dict[str, int]:
    client = pool.client if isinstance(pool, Pool) else pool.pool
    described = await client.describe()
    none = {"waiting": 0, "waiting_bytes": 0, "unarchived": 0}
    found: dict[str, int] = described.get("archive", none)
    return found


# -- the gateway ---------------------------------------------------------------------------------


async def _gateway(report: BenchResult, base: Path, size: Size, minutes: float) -> None:
    """Groups are consumed while calls come, so that the archiver works meanwhile."""
    samples: dict[str, list[Sample]] = {"without": [], "with": []}
    systems = {"without": Gateway(), "with": Gateway(**_kept(base))}

    async with running_gateways(list(systems.values()), systems["without"], GATEWAY_SIZE) as bench:
        for turn in range(-1, size.rounds):
            for name, system in systems.items():
                one = await _calls(bench, system, size.prompts, (turn + 1) * size.prompts)
                unarchived = await _drained(systems["with"])
                if turn >= 0:
                    samples[name].append(one)
    by = paired(
        samples["with"], samples["without"], lambda a, b: a.requests_per_s / b.requests_per_s
    )
    report.at_least("gateway_requests_by_without", by, 0.97)
    report.zero(gateway_unarchived=unarchived)
    shown = ("requests_per_s", "p50_ms", "p99_ms", "cpu_ms", "pool_cpu_ms")
    report.figures["gateway"] = [
        {"archive": name, **{n: statistics.median(getattr(s, n) for s in of) for n in shown}}
        for name, of in samples.items()
    ]


async def _calls(bench: GatewayBench, system: Gateway, prompts: int, first: int) -> Sample:
    options = {"connections": CONNECTIONS, "prompts": prompts, "first_prompt": first}
    job = bench.job(system, "chat", **options)
    async with asyncio.TaskGroup() as tasks:
        measured = tasks.create_task(run_job(bench, system, job))
        tasks.create_task(system.settle(job))
    sample, _ = measured.result()
    return sample


# -- bytes ---------------------------------------------------------------------------------------


async def _bytes(report: BenchResult, base: Path, size: Size, minutes: float) -> None:
    with bench_cluster(_system_config={"worker_niceness": 0}):
        plain = await _bytes_of(base / "plain", size.groups, "")
        said = await _bytes_of(base / "said", size.groups, "words of some length " * 99)
    report.at_most("file_bytes_by_journal", plain["files"] / plain["journal"], 0.7)
    report.figures["bytes_a_step"] = [
        {"characters": 0, **plain},
        {"characters": CHARACTERS, **said},
    ]


async def _bytes_of(base: Path, groups: int, text: str) -> dict[str, float]:
    messages = [{"role": "user", "content": text[: CHARACTERS // 2]}]
    messages += [{"role": "assistant", "content": text[CHARACTERS // 2 : CHARACTERS]}]
    pool = Pool("process", **_kept(base))
    async with pool.running():
        calls = list(workload_a(groups, "bytes"))
        for some in chunks(calls, PER_SUBMIT):
            if text:
                some = [c._replace(metadata=c.metadata | {"messages": messages}) for c in some]
            await pool.submit(some)
        await asyncio.sleep(6.0)  # more than it puts off
        journal = _size(pool.folder)
        for _ in range(len(calls) // STEPS_PER_FETCH):
            await pool.fetch()
        await _drained(pool)
        files = _size(base / "archive" / "trajectories")
        index = sum(map(_index_size, (base / "archive").glob("catalogue-*.sqlite")))
    found = {"journal": journal, "files": files, "index": index}
    return {name: n / len(calls) for name, n in found.items()}


def _index_size(path: Path) -> int:
    """Bytes of all pages, those that only the write-ahead log has among them."""
    with closing(sqlite3.connect(path)) as db:
        pages = db.execute("SELECT page_count * page_size FROM pragma_page_count, pragma_page_size")
        return int(pages.fetchone()[0])


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
