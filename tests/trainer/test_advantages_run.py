"""Advantages in the real loop: ReMax's greedy rollout, and GAE's critic with its warm-up."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import torch

from stepwell.datapool.types import GREEDY
from tests.trainer.small_run import small_config, small_run


async def test_remax_runs_one_greedy_rollout_more_per_group_and_trains_the_others_against_it(
    tmp_path: Path,
) -> None:
    config = small_config(tmp_path, "algorithm.adv_estimator=remax", "trainer.total_steps=2")
    # rollout.n = 2: rewards 0 and 1, and 2 for the greedy one, which is the last.
    async with small_run(config) as run:
        records = await run.train()
        advantages = [c["advantages"].unique().tolist() for c in run.backend.columns]
        events = await run.pool.list_trajectories(limit=100)
    assert advantages == [[-2.0, -1.0]] * 2
    assert [r["trajectories"] for r in records] == [4, 4]
    assert [r["reward/mean"] for r in records] == [0.5, 0.5]
    marked = [t.metadata.get(GREEDY) for t in events.items]
    assert marked.count(True) * 3 == len(marked)


async def test_gae_trains_its_critic_alone_during_the_warm_up_and_saves_it_with_the_checkpoint(
    tmp_path: Path,
) -> None:
    options = (
        "algorithm.adv_estimator=gae",
        "algorithm.critic.lr=1e-3",
        "algorithm.critic.warmup_updates=2",
        "trainer.total_steps=4",
        "backend.device=cpu",
    )
    async with small_run(small_config(tmp_path, *options)) as run:
        records = await run.train()
        assert run.backend.updates == 2
        for columns in run.backend.columns:
            assert columns["values"].shape == columns["returns"].shape
        critic = run.trainer.updater.critic
        assert critic is not None
        saved = deepcopy(critic._model.state_dict()["model"])
    assert [("loss" in r, "critic/loss" in r) for r in records] == [
        (False, True),
        (False, True),
        (True, True),
        (True, True),
    ]
    losses = [r["critic/loss"] for r in records]
    assert losses[-1] < losses[0]

    async with small_run(small_config(tmp_path, *options, "trainer.total_steps=5")) as run:
        assert await run.trainer.resume()
        critic = run.trainer.updater.critic
        assert critic is not None
        assert critic.warm
        for name, weight in critic._model.state_dict()["model"].items():
            assert torch.equal(weight, saved[name])
