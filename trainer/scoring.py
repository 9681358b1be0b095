"""The reward stage of the loop: scores what the agents left unscored.

A trajectory whose agent returned None is scored by `rollout.reward`. Where that gives no score
after its retries, the trajectory is aborted: left out of its group, logged and counted by reason. A
missing score is never 0, and a group with fewer than `min_n` scored trajectories is not trained.

Does not own: the reward functions and their calls (`rewards/`), the advantages.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.types import Group, Trajectory
from stepwell.trainer.config import OverlongBufferConfig
from stepwell.trainer.errors import RewardError
from stepwell.trainer.rewards import (
    RewardConfig,
    RewardManager,
    RewardResult,
    RewardSample,
)
from stepwell.trainer.rewards.data_sources import has_usual_reward
from stepwell.trainer.rewards.overlong import punished
from stepwell.trainer.tokenizers import tokenizer_at
from stepwell.trainer.trajectory_metrics import task_of

log = logging.getLogger(__name__)

NOT_CONFIGURED = "the agent returned None and there is no rollout.reward"
MAX_FAILED_BATCHES = 3
GROUP_TOO_SMALL = "too few of the group were scored"
EXTRA = "reward_extra_info"
"""Key of a trajectory's metadata: what the reward function said beside the score."""
TOOLS: Mapping[str, Any] = {"tool_rewards": [], "turn_scores": [], "rollout_reward_scores": {}}
"""Keys that verl puts into `extra_info`, for rollouts that lack them."""
MEANINGS = {"no_steps": "no_steps (the agent never called the model at its base_url)"}
"""Explanations of reasons that the pool gives."""


class Scorer:
    """Gives every trajectory of a group a reward, or takes it out.

    Args:
        reward: the section, or the name of the reward function; None if the agents score
            themselves: then what they leave is scored only where the data set has a usual reward.
        tokenizer_path: turns responses into the text that the function scores.
        overlong: what is taken off the rewards of long trajectories, whoever gave them.
        skip_special_tokens: leave them out of that text.

    Raises:
        RewardLoadError: the reward cannot be found or made.
    """

    def __init__(
        self,
        reward: RewardConfig | str | None,
        tokenizer_path: Path,
        overlong: OverlongBufferConfig | None = None,
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._overlong = overlong
        config = RewardConfig(function=reward) if isinstance(reward, str) else reward
        # Without a section the usual data sets are scored by their usual rewards.
        self._config = config or RewardConfig()
        self._only_usual = config is None
        self._manager = RewardManager(self._config)
        self._tokenizer_path = tokenizer_path
        self._skips = skip_special_tokens
        self._failed_batches = 0
        self.unscored: Counter[str] = Counter()
        """Trajectories left out so far, by cause."""
        self._last_failure = ""

    async def score(self, groups: Sequence[Group], min_rollouts: int | None = None) -> list[Group]:
        """`groups` with every trajectory scored; those that cannot be are left out.

        Args:
            min_rollouts: a group that loses trajectories here and has fewer left is left out too.
            None, of an evaluation: every score counts, and the caller sees to the failures.

        Raises:
            RewardError: nothing of a training batch could be scored, `MAX_FAILED_BATCHES` times
                running: a reward that never works would else use up the data in silence.
        """
        rewarded = await self._reward(groups)
        scored: list[Group] = []
        for group in groups:
            kept = [rewarded.get(t.trajectory_uid, t) for t in group.trajectories]
            kept = [t for t in kept if t.reward is not None]
            if self._overlong is not None:
                kept = [punished(t, self._overlong, EXTRA) for t in kept]
            wanted = min_rollouts or 1
            enough = min(wanted, group.n_rollouts or wanted)
            if len(kept) == len(group.trajectories) or len(kept) >= enough:
                if kept:
                    scored.append(replace(group, trajectories=tuple(kept)))
            elif kept:
                self.unscored[GROUP_TOO_SMALL] += len(kept)
        if min_rollouts is not None:
            self._watch(groups, scored)
        return scored

    def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """`reward_extra/KEY`: the mean of what reward functions said beside the score, over the
        trajectories of `groups` that have KEY; `reward/missing`: trajectories left out so far, and
        the same by cause."""
        values: dict[str, list[float]] = defaultdict(list)
        for trajectory in (t for g in groups for t in g.trajectories):
            for key, value in trajectory.metadata.get(EXTRA, {}).items():
                if isinstance(value, int | float):  # bool is an int
                    values[key].append(float(value))
        metrics = {f"reward_extra/{key}": sum(v) / len(v) for key, v in sorted(values.items())}
        for cause, n in sorted(self.unscored.items()):
            metrics[f"reward/missing/{cause}"] = float(n)
        return metrics | {"reward/missing": float(self.unscored.total())}

    def why_unscored(self) -> str:
        """The commonest causes, and the last error of a reward as it was raised."""
        causes = ", ".join(f"{n} × {cause}" for cause, n in self.unscored.most_common(3))
        return causes + self._last_failure

    async def aclose(self) -> None:
        """End the reward's processes and connections."""
        await self._manager.aclose()

    async def _reward(self, groups: Sequence[Group]) -> dict[str, Trajectory]:
        """The trajectories that were scored here, by uid."""
        unscored = [(g, t) for g in groups for t in g.trajectories if t.reward is None]
        if self._only_usual:
            usual = [(g, t) for g, t in unscored if has_usual_reward(*_source(g))]
            if lost := len(unscored) - len(usual):
                self.unscored[NOT_CONFIGURED] += lost
            unscored = usual
        if not unscored:
            return {}
        asked = unscored
        if self._config.manager == "group":  # which sees those that agents have scored as well
            some = {g.prompt_uid for g, _ in unscored}
            asked = [(g, t) for g in groups if g.prompt_uid in some for t in g.trajectories]
        samples = await asyncio.to_thread(self._samples, asked)
        outcomes = await self._manager.score(samples)
        rewarded: dict[str, Trajectory] = {}
        failed: dict[str, list[str]] = defaultdict(list)
        for (_, trajectory), outcome in zip(asked, outcomes, strict=True):
            if trajectory.reward is not None:
                continue
            if isinstance(outcome, RewardError):
                failed[str(outcome)].append(trajectory.trajectory_uid)
                self.unscored[type(outcome).__name__] += 1
            else:
                rewarded[trajectory.trajectory_uid] = _rewarded(trajectory, outcome)
        for reason, uids in failed.items():  # one line for a reward that fails on all of them
            self._last_failure = f"; the last: {reason}"
            log.warning("%d aborted (the first is %s): %s", len(uids), uids[0], reason)
        return rewarded

    def _samples(self, asked: Sequence[tuple[Group, Trajectory]]) -> list[RewardSample]:
        return [self._sample(group, trajectory) for group, trajectory in asked]

    def _sample(self, group: Group, trajectory: Trajectory) -> RewardSample:
        """Arguments of the reward function. `extra_info` is the task, beneath it the trajectory's
        metadata (what agent and tools said) and the task's (where verl's functions look), and what
        only the rollout knows."""
        task, tokenizer = task_of(group), tokenizer_at(self._tokenizer_path)
        responses = [
            str(tokenizer.decode(s.response_ids, skip_special_tokens=self._skips))
            for s in trajectory.steps
        ]
        length = sum(len(s.response_ids) for s in trajectory.steps)
        return RewardSample(
            data_source=str(task.get("data_source", "")),
            solution_str=responses[-1],
            ground_truth=task.get("answer"),
            extra_info={
                **TOOLS,
                **(task.get("metadata") or {}),
                **trajectory.metadata,
                **task,
                "trajectory_uid": trajectory.trajectory_uid,
                "prompt_uid": group.prompt_uid,
                "responses": responses,
                "num_turns": len(responses),
                "response_length": length,
                "truncated": trajectory.steps[-1].finish_reason == "length",
                "agent_reward": trajectory.reward,
            },
            group=group.prompt_uid,
            trajectory=trajectory,
        )

    def _watch(self, groups: Sequence[Group], scored: Sequence[Group]) -> None:
        if not groups:
            return
        self._failed_batches = 0 if scored else self._failed_batches + 1
        if self._failed_batches >= MAX_FAILED_BATCHES:
            raise RewardError(
                f"no trajectory could be scored in {self._failed_batches} batches running "
                f"(left out so far: {self.why_unscored()}); "
                + (
                    "correct rollout.reward or the data's label_key; the log has each cause"
                    if not self._only_usual
                    else "set rollout.reward, or let the agent return its score"
                )
            )


async def why_lost(pool: DataPoolClient, channel: str, scorer: Scorer, folder: Path) -> str:
    """Return why trajectories of a channel bring no reward, the commonest causes first, and where
    to look.

    Args:
        folder: of the run.
    """
    aborted = (await pool.get_statistics(channel))["trajectories"]["abort_reasons"]
    common = Counter(aborted).most_common(3)
    said = ", ".join(f"{n} × {MEANINGS.get(why, why)}" for why, n in common)
    lost = [f"aborted: {said}"] if said else []
    if scorer.unscored:
        lost.append(f"without a score: {scorer.why_unscored()}")
    return (
        f"{'; '.join(lost) or 'none was aborted'}. Look into the agent, the reward and "
        f"{folder / 'logs'}"
    )


def _source(group: Group) -> tuple[str, Any]:
    """The task's data source, and slime's name of its reward."""
    task = task_of(group)
    return str(task.get("data_source", "")), (task.get("metadata") or {}).get("rm_type")


def _rewarded(trajectory: Trajectory, result: RewardResult) -> Trajectory:
    metadata = trajectory.metadata
    if result.extra:
        metadata = {**metadata, EXTRA: dict(result.extra)}
    rewards = result.steps or (*(s.reward for s in trajectory.steps[:-1]), result.score)
    steps = tuple(
        replace(step, reward=reward) for step, reward in zip(trajectory.steps, rewards, strict=True)
    )
    return replace(trajectory, steps=steps, metadata=metadata)
