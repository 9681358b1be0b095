"""The reward stage of the loop: scores what the agents left unscored.

A trajectory whose agent returned None is scored by `rollout.reward`. Without one, or if it fails,
the trajectory is left out of its group and counted; a missing score is never 0. Does not own: the
reward functions (`rewards/`), the advantages.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from transformers import AutoTokenizer

from datapool.types import Group, Trajectory
from trainer.rewards import RewardError, RewardFn, load_reward, score_with

log = logging.getLogger(__name__)


class Scorer:
    """Gives every trajectory of a group a reward, or takes it out.

    Args:
        reward: dotted path or file path of the reward function; None if the agents score
        themselves. tokenizer_path: turns the last response into the text that the function scores.
    """

    def __init__(self, reward: str | None, tokenizer_path: Path) -> None:
        self._reward: RewardFn | None = load_reward(reward) if reward else None
        self._tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
        self.unscored: Counter[str] = Counter()
        """Trajectories left out so far, by cause."""

    async def score(self, groups: Sequence[Group]) -> list[Group]:
        """`groups` with every trajectory scored; a group with none left is left out."""
        scored = await asyncio.gather(*(self._score_group(g) for g in groups))
        return [g for g in scored if g.trajectories]

    async def _score_group(self, group: Group) -> Group:
        if all(t.reward is not None for t in group.trajectories):
            return group
        scored = await asyncio.gather(*(self._score_one(group, t) for t in group.trajectories))
        return replace(group, trajectories=tuple(t for t in scored if t is not None))

    async def _score_one(self, group: Group, trajectory: Trajectory) -> Trajectory | None:
        if trajectory.reward is not None:
            return trajectory
        if self._reward is None:
            self.unscored["no rollout.reward configured"] += 1
            return None
        *earlier, last = trajectory.steps
        text = str(self._tokenizer.decode(last.response_ids, skip_special_tokens=True))
        task = group.metadata.get("task", {})
        try:
            reward = await score_with(
                self._reward, task.get("data_source", ""), text, task.get("answer"), task
            )
        except RewardError as e:
            log.warning("%s is left out: %s", trajectory.trajectory_uid, e)
            self.unscored[type(e).__name__] += 1
            return None
        return replace(trajectory, steps=(*earlier, replace(last, reward=reward)))
