"""`python -m benchmarks overlap`: does generation overlap with training?

On the quickstart, in one run and on the same parts, the same number of batches three times:

    generate only     batch by batch, as a synchronous loop must: the next one starts from the
                      weights that this one gives, so its rollouts are waited for
    train only        on exactly those batches, producing nothing
    both              the async loop

generate + train is the synchronous loop: one after the other. Its share, wall(both) /
(wall(generate) + wall(train)), is 1 without overlap, and as small as the cores allow: where
generation alone keeps most of them busy, little is left to save. So two more things are checked:
the loop waits for nothing (its wall time is that of the longer part, or all cores are busy), and
doing both at once costs little more CPU time than one after the other. Publishing weights counts as
training.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Awaitable
from typing import NamedTuple, cast

import psutil

from benchmarks.checks import BenchResult
from stepwell.cluster.parts import start_cluster
from stepwell.config.load import load_config
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.types import TRAIN
from stepwell.run.checks import training_prompts
from stepwell.run.trainer import build_trainer
from stepwell.trainer.ledger import Ledger
from stepwell.trainer.live import Traffic
from stepwell.trainer.loop import Trainer
from stepwell.trainer.rollout.producer import Producer

BATCHES = 32
SHARE, WAITS, EXTRA = 0.75, 1.1, 1.15
"""Bounds: of the share, of wall time by what the cores allow, of CPU time by that of the parts."""


class Cost(NamedTuple):
    """Time that a part of the bench took, in seconds."""

    wall: float
    cpu: float
    """CPU time of this process and all that the run has started."""


async def run() -> BenchResult:
    with tempfile.TemporaryDirectory(prefix="stepwell-bench-") as folder:
        config = load_config(
            "quickstart",
            # The policy stands still: a better one calls its tool more often, and the same number
            # of batches would be more work the third time than the first.
            [f"run.dir={folder}", "backend.lr=1e-12", "trainer.checkpoint_every=1000"],
        )
        async with start_cluster(config) as cluster:
            with build_trainer(config, cluster, training_prompts(config)) as trainer:
                groups = config.trainer.train_batch_size
                producer = cast(Producer, trainer.batches.producer)
                # Groups are brought by the bench alone.
                traffic = Traffic(cluster.pool, Ledger(), producer.min_n)
                trainer.batches.channels[0].producer = traffic
                # Warm up: first batches pay for imports and allocations.
                await _both(trainer, producer, 2, groups)
                generate = await _cost(_generate(cluster.pool, producer, BATCHES, groups))
                train = await _cost(_train(trainer, BATCHES))
                both = await _cost(_both(trainer, producer, BATCHES, groups))
    cores = os.cpu_count() or 1
    least = max(generate.wall, train.wall, both.cpu / cores)
    result = BenchResult()
    result.at_most("overlap_ratio", both.wall / (generate.wall + train.wall), SHARE)
    result.at_most("wall_by_what_the_cores_allow", both.wall / least, WAITS)
    result.at_most("cpu_by_that_of_the_parts", both.cpu / (generate.cpu + train.cpu), EXTRA)
    result.figures.update(batches=BATCHES, cores=cores)
    for name, part in (("generate", generate), ("train", train), ("both", both)):
        result.figures.update({f"{name}_s": part.wall, f"{name}_cpu_s": part.cpu})
    return result


async def _cost(work: Awaitable[object]) -> Cost:
    began, before = time.monotonic(), _cpu_s()
    await work
    return Cost(time.monotonic() - began, _cpu_s() - before)


def _cpu_s() -> float:
    me = psutil.Process()
    return sum(sum(p.cpu_times()[:2]) for p in (me, *me.children(recursive=True)))


async def _generate(pool: DataPoolClient, producer: Producer, batches: int, groups: int) -> None:
    leases = []
    for _ in range(batches):
        async with producer.running(limit=groups):
            leases.append(await pool.lease_batch(channel=TRAIN, batch_size=groups, timeout_s=600))
    for lease in leases:
        if lease is not None:
            await pool.nack(lease.lease_id, "bench: kept for the training half")


async def _train(trainer: Trainer, batches: int) -> None:
    async for _ in trainer.train(trainer.progress.updates + batches):
        pass


async def _both(trainer: Trainer, producer: Producer, batches: int, groups: int) -> None:
    async with producer.running(limit=batches * groups):
        await _train(trainer, batches)
