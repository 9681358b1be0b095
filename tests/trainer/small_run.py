"""A trainer over a real pool in its own process, with everything slow replaced: rollouts that a
test writes by hand, a backend that records its columns, an engine that remembers what it was told.

Steps say which version "sampled" them as an engine would: the one it serves when the rollout ends
(`version_spans` if it changed meanwhile), so that what a test sees of lag is what the trainer's
order of things makes of it.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from stepwell.backends.base import LossFn, TokenBatch, TrainingBackend
from stepwell.backends.engines.client import EngineClient
from stepwell.cluster.parts import Parts
from stepwell.config.load import load_config
from stepwell.config.run import RunConfig
from stepwell.datapool import DataPoolClient, PoolConfig, Step, VersionSpan
from stepwell.datapool.remote.service import PoolService
from stepwell.datapool.remote.shard import LocalShard
from stepwell.datapool.types import GREEDY, TRAIN, VAL
from stepwell.run.trainer import build_trainer
from stepwell.trainer.checkpoint import CheckpointStore
from stepwell.trainer.config import DataConfig
from stepwell.trainer.data import PromptSource, Task, open_conversations
from stepwell.trainer.ledger import Ledger
from stepwell.trainer.loop import Trainer
from stepwell.trainer.rollout.producer import Producer
from stepwell.trainer.validation import Evaluation
from tests.engines import FakeEngine

SMALL = (
    "logging.wandb=disabled",
    "logging.console=quiet",
    "trainer.train_batch_size=2",
    "trainer.total_steps=4",
    "validation.every=0",
    "trainer.checkpoint_every=100",
    "trainer.rollout_samples=0",
    "trainer.starvation_timeout_s=20",
    "rollout.n=2",
    "rollout.max_outstanding_groups=8",
    "async_training.trigger_parameter_sync_step=1",
    "async_training.partial_rollout=false",
)
"""Two groups of two rollouts a step, weights published after each."""

Reward = Callable[[Task, int], float | None]


@dataclass
class Rollouts:
    """A worker whose rollouts end at once, unless `hold` says otherwise."""

    pool: DataPoolClient
    engine: FakeEngine
    reward: Reward = lambda task, index: float(index)
    hold: Callable[[Task, str], asyncio.Event | None] = lambda task, channel: None
    """An event that the rollouts of a task wait for, begun but not ended."""
    step: Callable[[Task, int], dict[str, Any]] = lambda task, index: {}
    """Further fields of the step of a task's rollout."""
    metadata: Callable[[Task, int], dict[str, Any]] = lambda task, index: {}
    """Metadata that the agent sends with the end of a task's rollout."""
    begun: Counter[int] = field(default_factory=Counter)
    """Training groups by the version that they were begun under."""
    begun_tasks: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    running: Counter[str] = field(default_factory=Counter)
    most_running: Counter[str] = field(default_factory=Counter)
    """Groups at once, by channel."""
    cancelled: list[str] = field(default_factory=list)

    async def run_group(
        self, task: Task, prompt_uid: str, n: int, channel: str = TRAIN, n_greedy: int = 0
    ) -> dict[str, int]:
        first = self.engine.version
        if channel == TRAIN:
            self.begun[first] += 1
            self.begun_tasks.append(task["instance_id"])
        self.running[channel] += 1
        self.most_running[channel] = max(self.most_running[channel], self.running[channel])
        try:
            if (event := self.hold(task, channel)) is not None:
                await event.wait()
            for index in range(n):
                greedy = index >= n - n_greedy
                await self._end(task, prompt_uid, index, channel, first, greedy)
        except asyncio.CancelledError:
            self.cancelled.append(task["instance_id"])
            raise
        finally:
            self.running[channel] -= 1
        self.ended.append(task["instance_id"])
        return {"complete": n}

    async def ready(self) -> None:
        return

    async def _end(
        self, task: Task, prompt_uid: str, index: int, channel: str, first: int, greedy: bool
    ) -> None:
        uid, last = uuid.uuid4().hex, self.engine.version
        spans = () if first == last else (VersionSpan(first, 0, 1), VersionSpan(last, 1, 2))
        fields: dict[str, Any] = {
            "prompt_ids": [1, 2],
            "response_ids": [3, 4],
            "rollout_log_probs": [-0.5, -0.5],
            "trajectory_uid": uid,
            "prompt_uid": prompt_uid,
            "policy_version": first,
            "version_spans": spans,
        }
        step = Step(**fields | self.step(task, index))
        await self.pool.submit_step(step, channel)
        mark = self.metadata(task, index) | ({GREEDY: True} if greedy else {})
        await self.pool.complete_trajectory(uid, self.reward(task, index), channel, mark or None)


class RecordingBackend(TrainingBackend):
    """log π moves by 0.01 with every update; remembers the columns it is trained on."""

    def __init__(self) -> None:
        self.updates = 0
        self.scored = 0
        """Calls of `compute_log_probs`."""
        self.columns: list[dict[str, Tensor]] = []
        self.steps: list[list[Step]] = []
        """Steps of each update."""

    def convert(self, steps: list[Step]) -> TokenBatch:
        return TokenBatch.of(steps)

    def compute_log_probs(self, batch: TokenBatch) -> Tensor:
        self.scored += 1
        return torch.full((batch.n_tokens,), -0.5 - 0.01 * self.updates)

    def train_step(
        self, batch: TokenBatch, loss_fn: LossFn, indices: Sequence[int] | None = None
    ) -> dict[str, float]:
        self.updates += 1
        self.columns.append(dict(batch.columns))
        self.steps.append([batch.steps[i] for i in indices or ()])
        return {"loss": 0.0}

    def save_weights(self, path: str | Path) -> None:
        Path(path).mkdir(parents=True)
        (Path(path) / "weights").write_text(str(self.updates))

    def load_weights(self, path: str | Path) -> None:
        file = Path(path) / "weights"  # the model of the start has none
        self.updates = int(file.read_text()) if file.is_file() else 0

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.updates = state["updates"]


@dataclass
class SmallRun:
    config: RunConfig
    pool: DataPoolClient
    engine: FakeEngine
    rollouts: Rollouts
    backend: RecordingBackend
    source: PromptSource | None
    trainer: Trainer
    val_tasks: list[Task]
    records: list[dict[str, Any]] = field(default_factory=list)
    recorded: asyncio.Event = field(default_factory=asyncio.Event)
    evaluations: list[Evaluation] = field(default_factory=list)

    @property
    def producer(self) -> Producer:
        return cast(Producer, self.trainer.batches.producer)

    async def train(self, until: int | None = None) -> list[dict[str, Any]]:
        """Train as `run.py` does, without its files."""
        async with aclosing(self.trainer.train(until or self.config.trainer.total_steps)) as steps:
            async for record in steps:
                self.records.append(record)
                self.recorded.set()
                self.evaluations += self.trainer.validator.finished()
                if self.trainer.evaluation_due():
                    await self.trainer.begin_evaluation(self.val_tasks)
            await self.trainer.validator.join()
            self.evaluations += self.trainer.validator.finished()
        return self.records

    async def trained(self, n: int) -> None:
        """Returns once `n` updates are done."""
        while len(self.records) < n:
            self.recorded.clear()
            await self.recorded.wait()

    @property
    def versions(self) -> list[list[int]]:
        """Oldest policy version of the steps of each update."""
        return [sorted({s.policy_version for s in steps}) for steps in self.backend.steps]

    async def drop_reasons(self) -> dict[str, int]:
        reasons: dict[str, int] = (await self.pool.get_statistics(TRAIN))["groups"]["drop_reasons"]
        return reasons


def conversation(i: int) -> dict[str, Any]:
    """A row of `data.sft`: two turns."""
    said = [("user", f"say {i}"), ("assistant", f"{i}"), ("user", "again"), ("assistant", f"{i}!")]
    return {
        "instance_id": f"sft{i}",
        "messages": [{"role": role, "content": content} for role, content in said],
    }


def small_config(
    folder: Path, *overrides: str, train: int = 200, val: int = 3, sft: int = 0
) -> RunConfig:
    """The quickstart in small, over `train` and `val` questions and `sft` conversations in files of
    their own."""
    data: dict[str, Any] = {"val": {}, "train": {"epochs": 1}}
    for name, n in (("train", train), ("val", val)):
        path = folder / f"{name}.jsonl"
        path.write_text(
            "".join(
                json.dumps(
                    {"question": f"{name} {i}?", "answer": str(i), "instance_id": f"{name}{i}"}
                )
                + "\n"
                for i in range(n)
            )
        )
        data[name] |= {"kind": "jsonl", "path": str(path), "shuffle": False}
    if sft:
        path = folder / "sft.jsonl"
        path.write_text("".join(json.dumps(conversation(i)) + "\n" for i in range(sft)))
        data["sft"] = data["train"] | {"path": str(path)}
        overrides = (*overrides, f"data.sft={path}")
    config = load_config("quickstart", [*SMALL, f"run.dir={folder}", *overrides])
    return config.model_copy(update={"data": DataConfig.model_validate(data)})


def pool_config(config: RunConfig) -> PoolConfig:
    """The pool of the run, with its channels."""
    return PoolConfig(channels={**config.trained_channels, VAL: config.pool.channel(VAL)})


def local_pool(config: RunConfig) -> DataPoolClient:
    """The pool of the run in this process. Without a journal there is nothing to close, so a second
    run may go on with it."""
    return DataPoolClient([LocalShard(PoolService(pool_config(config)))])


@asynccontextmanager
async def small_run(
    config: RunConfig,
    *,
    pool: DataPoolClient | None = None,
    backend: RecordingBackend | None = None,
    checkpoints: CheckpointStore | None = None,
    notify: Callable[[str], None] = print,
    **rollouts: Any,
) -> AsyncIterator[SmallRun]:
    """Everything of a run, in this process but for a `pool` that is given."""
    pool = pool or local_pool(config)
    engine, backend = FakeEngine(), backend or RecordingBackend()
    worker = Rollouts(pool, engine, **rollouts)
    engines = cast("list[EngineClient]", [engine])  # what is needed of one
    data = config.data
    source = None if data is None or data.train is None else PromptSource(data.train)
    sft = data.sft if data is not None else None
    conversations = (
        open_conversations(sft, config.algorithm.sft, config.model.path) if sft else None
    )
    val_tasks = [] if data is None or data.val is None else PromptSource(data.val).all()
    with build_trainer(
        config,
        Parts(pool=pool, engines=engines, workers=[worker]),
        source,
        conversations,
        backend=backend,
        checkpoints=checkpoints or CheckpointStore(config.run.dir / "checkpoints", 2),
        ledger=Ledger(config.run.dir / "ledger.jsonl"),
        notify=notify,
    ) as trainer:
        try:
            yield SmallRun(config, pool, engine, worker, backend, source, trainer, val_tasks)
        finally:
            await trainer.validator.stop()
            await trainer.batches.scorer.aclose()
