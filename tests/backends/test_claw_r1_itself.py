"""Claw-R1's own DataPool and VerlBackend beside ours, on the same steps: `make test-verl`."""

from __future__ import annotations

import importlib.util
import random
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stepwell.backends.config import VerlConfig
from stepwell.backends.verl.backend import VerlBackend
from stepwell.datapool import DataPoolClient, Step

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("claw_r1") is None, reason="make test-verl runs it, where Claw-R1 is"
)


def histories(seed: int) -> list[list[Step]]:
    """Trajectories of three prompts, each with steps in order; the last one says so, or nobody."""
    rng = random.Random(seed)
    return [
        [
            Step(
                prompt_ids=[rng.randrange(1, 99) for _ in range(rng.randint(1, 5))],
                response_ids=(ids := [rng.randrange(1, 99) for _ in range(rng.randint(1, 4))]),
                rollout_log_probs=[-rng.random() for _ in ids],
                reward=rng.random(),
                trajectory_uid=f"{prompt}-{i}",
                prompt_uid=f"p{prompt}",
                step_index=index,
                policy_version=index,
                is_last=index == n - 1 and i < 2,
                metadata={"data_source": "gsm8k"},
            )
            for index in range(n)
        ]
        for prompt in range(3)
        for i in range(3)
        for n in [rng.randint(1, 3)]
    ]


def theirs(step: Step) -> Any:
    """The same step as Claw-R1's class, with lists."""
    from claw_r1.data_pool import Step as Their

    names = {field.name for field in fields(Their)}
    return Their(**{name: value for name, value in step.to_dict().items() if name in names})


def their_pool() -> Any:
    """Claw-R1's pool without Ray, whose backend leaves steps as they are."""
    from claw_r1.data_pool import DataPool, DataPoolConfig

    cls = DataPool.__ray_metadata__.modified_class
    backend = SimpleNamespace(convert=lambda steps: steps)
    return cls(DataPoolConfig(n_rollouts=3), backend)


@pytest.mark.parametrize("seed", range(5))
async def test_both_pools_index_and_serve_the_same(seed: int) -> None:
    rng, waiting = random.Random(seed), histories(seed)
    other = their_pool()
    async with DataPoolClient.local() as pool:
        while waiting:
            trajectory = rng.choice(waiting)
            step = trajectory.pop(0)
            if not trajectory:
                waiting.remove(trajectory)
            await pool.submit_step(step, "val")
            other.submit_step(theirs(step), "val")
            channel = other._ch("val")
            assert await pool.trajectory_index("val") == {
                uid: [channel.steps[i].step_index for i in places]
                for uid, places in channel.trajectory_index.items()
            }
            assert await pool.trajectory_complete("val") == channel.trajectory_complete
            assert {
                uid: (set(group.trajectory_uids), set(group.complete_trajectories))
                for uid, group in (await pool.prompt_groups("val")).items()
            } == {
                uid: (group.trajectory_uids, group.complete_trajectories)
                for uid, group in channel.prompt_groups.items()
            }
        order = [*other._ch("val").fifo_queue]  # ours serves in the order of completion
        for prompt_uid in order:
            uid = f"{prompt_uid[1:]}-2"
            assert await pool.complete_trajectory(uid, 0.5, "val") == "complete"
            assert other.complete_trajectory(uid, None, "val") is True
        for _ in order:
            batch = await pool.fetch_batch(n_rollouts=3, channel="val")
            expected = await other.fetch_batch(1, 3, "val")
            assert batch is not None
            assert sorted((s.trajectory_uid, s.step_index, s.is_last) for s in batch) == [
                (s.trajectory_uid, s.step_index, s.is_last) for s in expected
            ]


class Padding:
    """A tokenizer, as far as padding goes."""

    pad_token_id = 0
    padding_side = "right"

    def pad(
        self, given: dict[str, list[int]], max_length: int, **_: Any
    ) -> dict[str, torch.Tensor]:
        ids = torch.tensor(given["input_ids"])
        room = max_length - len(ids)
        side = (room, 0) if self.padding_side == "left" else (0, room)
        padded = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return {
            name: torch.nn.functional.pad(column, side)[None] for name, column in padded.items()
        }


def test_both_backends_make_the_same_batch() -> None:
    from claw_r1.data_pool import VerlBackend as Their

    # A reward of one step: of several, ours puts their sum on each row.
    steps = [trajectory[0] for seed in range(4) for trajectory in histories(seed)]
    steps = [
        Step.from_dict({**step.to_dict(), "trajectory_uid": f"t{i}", "is_last": True})
        for i, step in enumerate(steps)
    ]
    limits = {"prompt_length": 6, "response_length": 5}
    tokenizer: Any = Padding()
    expected = Their(tokenizer, **limits).convert([theirs(step) for step in steps]).batch
    batch = VerlBackend(VerlConfig(rows="step", **limits)).convert(steps).batch
    for name in ("prompts", "responses", "input_ids", "attention_mask", "response_mask"):
        assert batch[name].equal(expected[name]), name
    assert batch["position_ids"].equal(expected["position_ids"])
    for name in ("rollout_log_probs", "rm_scores"):
        torch.testing.assert_close(batch[name], expected[name])
