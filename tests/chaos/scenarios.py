"""This module says which faults meet which run: one function per scenario, each a run of its own.

kills     one machine: the trainer, the pool, the gateway or the engine is killed, again and again
machine   one machine: everything is killed and stopped, the driver is started again
lease     leases shorter than a step: groups are redelivered while they are trained
disk      the journal's disk is full for seconds, again and again
full      the disk of checkpoints, weights, logs and exports is full for seconds
nodes     two machines with a cable that is cut
attached  a service whose agents nobody here starts, and a trainer that is attached to it
salvage   a crash, a flipped bit in the journal and in a picture, `stepwell data salvage`, and
          training on
"""

from __future__ import annotations

import asyncio
import random
import secrets
import shutil
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from stepwell.layout import ARCHIVE, CHECKPOINTS, POOL
from tests.chaos.attached import AttachedRun
from tests.chaos.faults import PARTS, Action, plan
from tests.chaos.lives import EXCUSES, OURS, Run, SmallDisk
from tests.chaos.machines import Machines

OPTIONS = (
    "logging.wandb=disabled",
    "logging.console=plain",
    "run.name=chaos",
    "trainer.train_batch_size=2",
    "trainer.checkpoint_every=2",
    "trainer.keep_checkpoints=2",
    "validation.every=0",
    "validation.n=1",
    "data.val.size=2",
    "trainer.keep_weights=20",
    "async_training.trigger_parameter_sync_step=1",
    "rollout.agent=tests.chaos.agent:agent",
    "rollout.n=4",
    "rollout.max_outstanding_groups=6",
    "rollout.timeout_s=120",
    "rollout.group_deadline_s=300",
)
"""The quickstart in small: an optimizer step takes about a second."""
KINDS: tuple[tuple[Action, str], ...] = (
    *(("kill", part) for part in PARTS),
    *(("stop", part) for part in PARTS),
)


async def kills(folder: Path, seed: str, n: int) -> Run:
    kinds: tuple[tuple[Action, str], ...] = (
        ("kill", "driver"),
        *(("kill", part) for part in ("driver", "pool", "gateway", "engine")),
    )
    run = Run(folder, OPTIONS)
    async with run.running():
        await run.fire(plan(seed, n, kinds))
        await run.finish()
    return run


async def machine(folder: Path, seed: str, n: int) -> Run:
    run = Run(folder, OPTIONS)
    async with run.running():
        await run.fire(plan(seed, n, KINDS, long_stops=("pool", "driver")))
        await run.finish()
    return run


async def lease(folder: Path, seed: str, n: int) -> Run:
    kinds: tuple[tuple[Action, str], ...] = (
        ("stop", "driver"),
        ("stop", "driver"),
        ("kill", "driver"),
        ("kill", "pool"),
        ("stop", "pool"),
    )
    run = Run(folder, (*OPTIONS, "pool.channels.train.lease_s=0.5", "trainer.checkpoint_every=4"))
    async with run.running():
        await run.fire(plan(seed, n, kinds))
        await run.finish()
    return run


async def disk(folder: Path, seed: str, n: int) -> Run:
    kinds: tuple[tuple[Action, str], ...] = (
        ("fill", "disk"),
        ("fill", "disk"),
        ("fill", "disk"),
        ("kill", "pool"),
        ("kill", "driver"),
    )
    small = SmallDisk(folder / "disk", megabytes=32)
    try:
        run = Run(
            folder,
            (*OPTIONS, f"pool.journal_dir={small.folder / POOL}"),
            disk=small,
            home=small.folder,
        )
        async with run.running():
            await run.fire(plan(seed, n, kinds))
            await run.finish()
        return run
    finally:
        small.remove()


async def full(folder: Path, seed: str, n: int) -> Run:
    kinds: tuple[tuple[Action, str], ...] = (
        ("fill", "disk"),
        ("fill", "disk"),
        ("fill", "disk"),
        ("kill", "driver"),
    )
    small, home = SmallDisk(folder / "run", megabytes=160, content=CHECKPOINTS), folder / "home"
    home.mkdir()
    try:
        # An archive on a full disk lets go what it has no room for.
        own = f"pool.journal_dir={home / POOL}", f"pool.archive.dir={home / ARCHIVE}"
        run = Run(folder, (*OPTIONS, *own), disk=small, home=home)
        async with run.running():
            await run.fire(plan(seed, n, kinds))
            await run.until(partial(run.trains, run.trained()), "a run to export")
            await asyncio.to_thread(export_in_vain, run, folder / "exports", *DATA)
            await run.finish()
            await asyncio.to_thread(export_in_vain, run, folder / "policy", POLICY)
        return run
    finally:
        shutil.copytree(run.folder, folder / "copy", symlinks=True)
        small.remove()
        run.folder.rmdir()
        (folder / "copy").rename(run.folder)


DATA, POLICY = ("x.jsonl", "x.parquet"), "policy"
"""Exports of a live run's trajectories, and of a checkpoint."""


def export_in_vain(run: Run, folder: Path, *targets: str) -> None:
    """On a full disk each export ends with a line that names it, and leaves no file."""
    small = SmallDisk(folder, megabytes=1, content=".")
    (folder / "other").touch()
    small.fill()
    try:
        for target in targets:
            path = folder / target
            what = ("export", "--to", path) if target == POLICY else ("data", "export", path)
            code, said = run.cli(*map(str, what), str(run.folder))
            own = [line for line in said.lower().splitlines() if line.startswith(OURS)]
            names_it = any(cause in line for line in own for cause in EXCUSES["disk"])
            left = [p.name for p in folder.iterdir() if p.name not in ("other", "ballast")]
            if code <= 0 or not names_it or left:
                run.books.violations.append(
                    f"{target} on a full disk: code {code}, left {left}: {said[-800:]}"
                )
            run.books.faults["fill exports"] += 1
    finally:
        small.remove()


async def nodes(folder: Path, seed: str, n: int) -> Run:
    machines = Machines(folder)
    options = (
        f"cluster.address={machines.address}",
        f"pool.journal_dir={machines.local / POOL}",
        # A gateway on each; the workers are where Ray puts them.
        "gateway.replicas=2",
        "gateway.host=0.0.0.0",
        "rollout.workers=2",
        f"gateway.admin_keys=[chaos-{secrets.token_hex()}]",
    )
    try:
        run = Run(folder, (*OPTIONS, *options), machines=machines)
        async with run.running():
            await run.fire(plan(seed, n, (*KINDS, ("cut", "cable")), long_stops=("raylet",)))
            await run.finish()
        return run
    finally:
        machines.remove()


async def attached(folder: Path, seed: str, n: int) -> Run:
    kinds: tuple[tuple[Action, str], ...] = (
        *(("kill", part) for part in ("driver", "pool", "gateway", "engine", "service", "gcs")),
        *(("stop", part) for part in ("driver", "pool", "gateway")),
    )
    run = AttachedRun(folder)
    async with run.running():
        await run.fire(plan(seed, n, kinds))
        await run.finish()
    return run


async def salvage(folder: Path, seed: str, n: int) -> Run:
    """`n` times: a crash, a flipped bit in what was written last and in a picture, a salvage, and
    training on."""
    pick = random.Random(seed)
    run = AttachedRun(folder)
    async with run.running():
        for _ in range(n):
            before = run.trained()
            await run.until(partial(run.trains, before + 5), "steps whose groups are acked")
            await run.crash()
            run.damage(pick)
            await run.salvage()
            run.books.faults["flip journal"] += 1
            run.start()
        await run.finish()
    return run


Scenario = Callable[[Path, str, int], Coroutine[Any, Any, Run]]
SCENARIOS: dict[str, tuple[Scenario, int]] = {
    "kills": (kills, 8),
    "machine": (machine, 32),
    "lease": (lease, 8),
    "disk": (disk, 6),
    "full": (full, 6),
    "nodes": (nodes, 16),
    "attached": (attached, 9),
    "salvage": (salvage, 4),
}
"""Each with its share of the faults."""
