"""Every figure that a run shows by its settings is in docs/metrics.md, and the other way round.
Those that every run has are looked for in a real one: `tests/e2e/test_command.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepwell.backends.torch import backend
from stepwell.datapool.types import DUPLICATE_OF, SFT
from stepwell.trainer.sampling import CHANNEL
from stepwell.trainer.updater import Updater, record_of
from stepwell.trainer.validation import Evaluation, Pooled
from tests.documented_metrics import documented, undocumented, unseen
from tests.trainer.small_run import small_config, small_run
from tests.trainer.test_loop_losses import groups, train, updater_of, with_side_call

CRITIC = (
    "algorithm.adv_estimator=gae",
    "algorithm.critic.cliprange_value=0.2",
    "algorithm.kl.place=loss",
    "algorithm.loss.report_entropy=true",
    "algorithm.loss.mask_truncated=true",
    "algorithm.off_policy.band=[0.5,2.0]",
    "algorithm.off_policy.veto=0.1",
    "algorithm.off_policy.opsm=0.1",
)
RUNNING = ("algorithm.adv_estimator=reinforce_running", "algorithm.loss.policy=kl_cov")
FLAT = (
    "trainer.total_steps=20",
    "async_training.ppo_epochs=2",
    "async_training.trigger_parameter_sync_step=2",
)
TOGETHER = ("trainer.total_steps=1", "sampling.channels={train: 0.5, sft: 0.5}")
SCORED = (
    "sampling.filters=[nonzero_std]",
    f"rollout.reward={__name__}:score",
    "rollout.min_n=1",
    "validation.every=2",
    "validation.n=2",
    "publish.guard.n=16",
    "publish.guard.wait_s=0.05",
    "trainer.keep_weights=3",
    "trainer.checkpoint_every=2",
    "engine.release_memory=true",
    "async_training.partial_rollout=true",
)


def score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
) -> dict[str, float] | None:
    """Every third task has no signal, every third a rollout without a score."""
    kind, cut = int(ground_truth) % 3, bool(extra_info["truncated"])
    if kind == 2 and cut:
        return None
    return {"score": 1.0 if kind == 0 else float(cut), "acc": 1.0}


def said(task: Mapping[str, Any], index: int) -> dict[str, Any]:
    """A step with a tool's result; all rollouts of a task but the first are cut off."""
    messages = [{"role": "tool", "content": "error: no such tool"}]
    metadata = {"tool_calls": 1, "messages": messages}
    finish_reason = "length" if index else "stop"
    return {"response_ids": [3, index], "finish_reason": finish_reason, "metadata": metadata}


def measured(task: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Metrics of a tool of verl's kind, beside its result."""
    return {"tool_metrics": {"search": [{"hits": index}, {"hits": 2, "note": "text"}]}}


async def keys_of_runs(folder: Path) -> set[str]:
    """Keys in all records of small runs with settings of their own."""
    keys: set[str] = set()
    flat = small_config(_new(folder / "flat"), *FLAT)
    async with small_run(flat, reward=lambda task, index: 0.0) as run:
        keys |= {key for record in await run.train() for key in record}
    scored = small_config(_new(folder / "scored"), *SCORED, "trainer.total_steps=6")
    kinds: dict[str, Any] = {"reward": lambda task, index: None, "step": said, "metadata": measured}
    async with small_run(scored, **kinds) as run:
        keys |= {key for record in await run.train() for key in record}
        for evaluation in run.evaluations:
            keys |= evaluation.as_metrics().keys()
    together = small_config(_new(folder / "together"), *TOGETHER, sft=8)
    async with small_run(together) as run:
        keys |= {key for record in await run.train() for key in record}
    return keys


def mixed(updater: Updater) -> dict[str, Any]:
    """The record of an optimizer step on a group that was rolled out and a conversation."""
    rolled_out, other = groups()
    long = next(t for t in rolled_out.trajectories if len(t.steps) > 1)
    *others, last = long.steps
    again = replace(last, parent_index=None, metadata={**last.metadata, DUPLICATE_OF: 0})
    rest = (t for t in rolled_out.trajectories if t is not long)
    trajectories = (replace(long, steps=(*others, again)), *rest)
    rolled_out = replace(rolled_out, trajectories=trajectories)
    batch = [rolled_out, replace(other, metadata={CHANNEL: SFT})]
    prepared = updater.prepare(batch)
    update = updater.step(prepared, prepared.mini_batches[0][0])
    return update | prepared.metrics | record_of(updater.progress, batch, {}, batch)


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


async def test_the_figures_of_settings_are_those_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = await keys_of_runs(tmp_path)
    for overrides in (CRITIC, RUNNING, ("backend.lora.rank=4",)):
        with updater_of(tmp_path, *overrides) as updater:
            keys |= (await asyncio.to_thread(train, updater))[1].keys()
    with updater_of(tmp_path) as updater:
        keys |= (await asyncio.to_thread(mixed, updater)).keys()
    with updater_of(tmp_path, "rollout.train_branches=main") as updater:
        keys |= updater.prepare([with_side_call(group) for group in groups()]).metrics.keys()
    monkeypatch.setattr(backend, "peak_of", lambda device: 1e12)  # as on a GPU that is known
    with updater_of(tmp_path) as updater:
        keys |= (await asyncio.to_thread(train, updater))[1].keys()
    live = Evaluation(4, 0.5, None, 4, 0, low=0.1, high=0.9, pooled=Pooled(0.5, 0.4, 0.6, 64, 0))
    keys |= live.as_metrics().keys()
    assert undocumented(keys) == set()
    assert unseen(documented(always=False), keys) == set()
