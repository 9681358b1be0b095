"""`python -m benchmarks overlap`: does generation overlap with training?

On the quickstart, in one run and on the same parts, the same number of batches three times:

    generate only     batch by batch, as a synchronous loop must: the next one starts from the
                      weights that this one gives, so its rollouts are waited for
    train only        on exactly those batches, producing nothing
    both              the async loop

generate + train is the synchronous loop: one after the other. wall(both) / (wall(generate) +
wall(train)) is 1 without overlap and 0.5 at best if the two take the same time. Publishing weights
counts as training.
"""

from __future__ import annotations

import tempfile
import time
from typing import cast

from benchmarks.checks import BenchResult, Check
from stepwell.checks import training_prompts
from stepwell.cluster import start_cluster
from stepwell.datapool.types import TRAIN
from stepwell.presets import load_config
from stepwell.trainer.ledger import Ledger
from stepwell.trainer.live import Traffic
from stepwell.trainer.loop import Trainer
from stepwell.trainer.rollout import Producer
from stepwell.training import build_trainer

BATCHES = 32
BOUND = 0.75


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
                producer = cast(Producer, trainer.producer)
                # Groups are brought by the bench alone.
                trainer.producer = Traffic(trainer.pool, Ledger(), producer.min_n)
                await _both(
                    trainer, producer, 2
                )  # warm up: first batches pay for imports and allocations
                generate_s = await _generate(trainer, producer, BATCHES)
                train_s = await _train(trainer, BATCHES)
                both_s = await _both(trainer, producer, BATCHES)
    ratio = both_s / (generate_s + train_s)
    return BenchResult(
        checks={"overlap_ratio": Check(ratio, BOUND)},
        figures={
            "batches": BATCHES,
            "generate_s": generate_s,
            "train_s": train_s,
            "both_s": both_s,
        },
    )


async def _generate(trainer: Trainer, producer: Producer, batches: int) -> float:
    groups = trainer.config.train_batch_size
    began = time.monotonic()
    leases = []
    for _ in range(batches):
        async with producer.running(limit=groups):
            leases.append(
                await trainer.pool.lease_batch(channel=TRAIN, batch_size=groups, timeout_s=600)
            )
    elapsed = time.monotonic() - began
    for lease in leases:
        if lease is not None:
            await trainer.pool.nack(lease.lease_id, "bench: kept for the training half")
    return elapsed


async def _train(trainer: Trainer, batches: int) -> float:
    began = time.monotonic()
    async for _ in trainer.train(trainer.progress.updates + batches):
        pass
    return time.monotonic() - began


async def _both(trainer: Trainer, producer: Producer, batches: int) -> float:
    groups = trainer.config.train_batch_size
    async with producer.running(limit=batches * groups):
        return await _train(trainer, batches)
