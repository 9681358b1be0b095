"""The reward stage of the loop: scores what the agents left unscored, and warns of rewards that
teach nothing.

A trajectory whose agent returned None is scored by `rollout.reward`. Where that gives no score
after its retries, the trajectory is aborted: left out of its group, logged and counted by reason. A
missing score is never 0, and a group with fewer than `min_n` scored trajectories is not trained.

A group without a difference between its rewards has advantage 0 for every token: nothing is learnt
from it, whatever it cost. `FlatRewards` measures their share, and warns once in a run, with a cause
that can be told from the rollouts:

    scored groups ──see──► share of this optimizer step ─► metric `groups/no_signal`
                                   └─ the last STEPS of them ─► one warning, with its cause

A group of one rollout, or any where the baseline is not the group (`advantages/`), is compared with
the others of its batch; a batch of one rollout with the batches before. Groups are seen before
`sampling.filters` drops any; those that the pool drops are not seen.

Does not own: the reward functions and their calls (`rewards/`), the advantages, the filters.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.types import Group, Trajectory, mapping_in
from stepwell.trainer.algorithms.branches import Kinds, answer
from stepwell.trainer.config import OverlongBufferConfig, RewardConfig
from stepwell.trainer.errors import RewardError
from stepwell.trainer.plain import plain
from stepwell.trainer.rewards.base import RewardResult, RewardSample
from stepwell.trainer.rewards.data_sources import has_usual_reward
from stepwell.trainer.rewards.manager import RewardManager
from stepwell.trainer.rewards.overlong import punished
from stepwell.trainer.tokenizers import tokenizer_at
from stepwell.trainer.trajectory_metrics import (
    task_of,
    tool_use,
    trajectory_metrics,
)

log = logging.getLogger(__name__)

NOT_CONFIGURED = "the agent returned None and there is no rollout.reward"
MAX_FAILED_BATCHES = 3
GROUP_TOO_SMALL = "too few of the group were scored"
EXTRA = "reward_extra_info"
"""Key of a trajectory's metadata: what the reward function said beside the score."""
TOOLS: Mapping[str, Any] = {"tool_rewards": [], "turn_scores": [], "rollout_reward_scores": {}}
"""Keys that verl puts into `extra_info`, for rollouts that lack them."""
MEANINGS = {
    "no_steps": "no_steps (the agent never called the model at its base_url)",
    "timeout": "timeout (rollout.timeout_s, or its harness's, was over)",
}
"""Explanations of reasons that the pool gives."""
STEPS = 10
"""Optimizer steps that are looked at together: the first may be flat for a good reason."""
NEARLY_ALL = 0.95
"""Share of groups without a signal from which the user is warned."""
MOSTLY_WRONG = 0.85
"""The same where they fail: what a few lucky guesses earn teaches next to nothing."""
MOST = 0.9
"""Share of rollouts, or of groups without a signal, from which something counts as the cause."""
LOWEST: Final = "reward/min"
HIGHEST: Final = "reward/max"
_Figures: TypeAlias = dict[str, float]
"""Figures of a scored group, as `trajectory_metrics` names them; shares are of its rollouts."""


class Scorer:
    """Gives every trajectory of a group a reward, or takes it out.

    Args:
        reward: the section, or the name of the reward function; None if the agents score
            themselves: then what they leave is scored only where the data set has a usual reward.
        tokenizer_path: turns responses into the text that the function scores.
        overlong: what is taken off the rewards of long trajectories, whoever gave them.
        skip_special_tokens: leave them out of that text.
        flat_rewards: is shown what was scored for training; None: nobody is warned.
        branches: kinds of calls that are trained; None: all of them.

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
        flat_rewards: FlatRewards | None = None,
        branches: Kinds | None = None,
    ) -> None:
        self._flat = flat_rewards
        self._branches = branches
        self._overlong = overlong
        config = RewardConfig(function=reward) if isinstance(reward, str) else reward
        # Without a section the usual data sets are scored by their usual rewards.
        self._config = config or RewardConfig()
        self._only_usual = config is None
        self._manager = RewardManager(self._config)
        self._tokenizer_path = tokenizer_path
        self._skips = skip_special_tokens
        self._failed_batches = self._failed_groups = self._batch_size = 0
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
                running: a reward that never works would else use up the data in silence. Where a
                batch is filled up, with one group at a time, it takes as many as a batch has.
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

    def answer(self, trajectory: Trajectory) -> int:
        """Place of the step whose response is scored as the trajectory's answer."""
        return answer(trajectory.steps, self._branches)

    def see(self, groups: Sequence[Group]) -> None:
        """These were scored for the optimizer step that is recorded next: `FlatRewards` looks."""
        if self._flat is not None:
            self._flat.see(groups)

    def metrics(self, groups: Sequence[Group]) -> dict[str, float | str]:
        """`reward_extra/KEY`: the mean of what reward functions said beside the score, over the
        trajectories of `groups` that have KEY; `reward/missing`: trajectories left out so far, and
        the same by cause; and those of `FlatRewards`."""
        values: dict[str, list[float]] = defaultdict(list)
        for trajectory in (t for g in groups for t in g.trajectories):
            for key, value in mapping_in(trajectory.metadata, EXTRA).items():
                if isinstance(value, int | float):  # bool is an int
                    with suppress(OverflowError):  # an answer's hundreds of digits are no figure
                        number = float(value)
                        values[str(key)].append(number)
        metrics: dict[str, float | str] = {} if self._flat is None else self._flat.metrics()
        metrics |= {f"reward_extra/{key}": sum(v) / len(v) for key, v in sorted(values.items())}
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
        at = self.answer(trajectory)
        return RewardSample(
            data_source=str(task.get("data_source", "")),
            solution_str=responses[at],
            ground_truth=task.get("answer"),
            extra_info={
                **TOOLS,
                **mapping_in(task, "metadata"),
                **trajectory.metadata,
                **task,
                "trajectory_uid": trajectory.trajectory_uid,
                "prompt_uid": group.prompt_uid,
                "responses": responses,
                "num_turns": len(responses),
                "response_length": length,
                "truncated": trajectory.steps[at].finish_reason == "length",
                "agent_reward": trajectory.reward,
            },
            group=group.prompt_uid,
            trajectory=trajectory,
            answer=at,
        )

    def _watch(self, groups: Sequence[Group], scored: Sequence[Group]) -> None:
        if not groups:
            return
        self._batch_size = max(self._batch_size, len(groups))
        self._failed_batches = 0 if scored else self._failed_batches + 1
        self._failed_groups = 0 if scored else self._failed_groups + len(groups)
        if self._failed_batches >= MAX_FAILED_BATCHES and self._failed_groups >= self._batch_size:
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
    reasons = ", ".join(f"{n} × {MEANINGS.get(why, why)}" for why, n in common)
    lost = [f"aborted: {reasons}"] if reasons else []
    if scorer.unscored:
        lost.append(f"without a score: {scorer.why_unscored()}")
    return (
        f"{'; '.join(lost) or 'none was aborted'}. Look into the agent, the reward and "
        f"{folder / 'logs'}"
    )


def _source(group: Group) -> tuple[str, Any]:
    """The task's data source, and slime's name of its reward."""
    task = task_of(group)
    return str(task.get("data_source", "")), mapping_in(task, "metadata").get("rm_type")


def _rewarded(trajectory: Trajectory, result: RewardResult) -> Trajectory:
    metadata = trajectory.metadata
    if result.extra:
        metadata = {**metadata, EXTRA: plain(result.extra)}
    rewards = result.steps or (*(s.reward for s in trajectory.steps[:-1]), result.score)
    steps = tuple(
        replace(step, reward=reward) for step, reward in zip(trajectory.steps, rewards, strict=True)
    )
    return replace(trajectory, steps=steps, metadata=metadata)


# ── rewards that teach nothing ────────────────────────────────────────────────────────────────────


class FlatRewards:
    """Watches the groups of a run.

    Args:
        samples: where replies can be read with their rewards, for the warning.
        within_group: a group's own rewards are the baseline.
    """

    def __init__(self, samples: Path, *, within_group: bool) -> None:
        self._samples = samples
        self._within_group = within_group
        self._batch: list[_Figures] = []
        self._steps: deque[list[_Figures]] = deque(maxlen=STEPS)
        self._warned = False

    def see(self, groups: Sequence[Group]) -> None:
        """These were scored for the optimizer step that is recorded next."""
        self._batch += map(_figures, groups)

    def metrics(self) -> dict[str, float | str]:
        """Figures of an optimizer step: `groups/no_signal`, the share of its groups whose rewards
        are all equal; and once in a run `warning`, when that was nearly all for `STEPS` steps."""
        if self._batch:
            self._steps.append(self._judged(self._batch))
            self._batch = []
        if not self._steps:
            return {}
        metrics: dict[str, float | str] = {
            "groups/no_signal": _share(s["flat"] for s in self._steps[-1])
        }
        seen = [s for step in self._steps for s in step]
        if not self._warned and len(self._steps) == STEPS and (found := _warning(seen)):
            self._warned = True
            metrics["warning"] = f"{found} (replies and rewards: {self._samples})"
        return metrics

    def _judged(self, batch: Sequence[_Figures]) -> list[_Figures]:
        """Copies of the batch with "flat": 1 if the group taught nothing."""
        others = list(batch)
        if sum(s["rollouts"] for s in batch) == 1:
            others += [s for step in self._steps for s in step]
        all_equal = min(s[LOWEST] for s in others) == max(s[HIGHEST] for s in others)
        return [
            {
                **s,
                "flat": s[LOWEST] == s[HIGHEST]
                if self._within_group and s["rollouts"] > 1
                else all_equal,
            }
            for s in batch
        ]


def _figures(group: Group) -> _Figures:
    """Figures that may show the cause: the group's metrics, "rollouts", "tool_use" where it was
    offered tools, and "same": 1 if every rollout has the very tokens of the first."""
    replies = {tuple(s.response_ids.tobytes() for s in t.steps) for t in group.trajectories}
    n, calls = len(group.trajectories), tool_use([group])
    return {
        **trajectory_metrics([group]),
        **({} if calls is None else {"tool_use": calls}),
        "rollouts": n,
        "same": n > 1 and len(replies) == 1,
    }


def _warning(seen: Sequence[_Figures]) -> str | None:
    """Warning about the groups; None: there is enough to learn from."""
    flat = [s for s in seen if s["flat"]]
    if len(flat) < MOSTLY_WRONG * len(seen):
        return None
    (reward, n_of_it), *_ = Counter(s["reward/mean"] for s in flat).most_common(1)
    alike = n_of_it >= MOST * len(flat)
    if len(flat) < NEARLY_ALL * len(seen) and not (alike and reward <= 0):
        return None
    n, what = (n_of_it, f"{reward:g}") if alike else (len(flat), "equal")
    return (
        f"little to learn from: in {n} of {len(seen)} groups of the last {STEPS} steps all rewards "
        f"were {what}. {_cause(flat, reward if alike else None)}"
    )


def _cause(flat: Sequence[_Figures], reward: float | None) -> str:
    """Cause that groups without a signal have in common, and what to do about it.

    Args:
        reward: of nearly all of them; None: they differ.
    """
    if _share(s["same"] for s in flat) >= MOST:
        return (
            "The rollouts of a group are the same, token for token: let the agent, or "
            "rollout.temperature, ask for temperature 1"
        )
    if reward is None:
        return (
            "Each task is either always right or always wrong: take tasks in between, or raise "
            "rollout.n"
        )
    if reward > 0:
        return (
            "The tasks are solved, or the reward accepts any reply: take harder tasks, or look at "
            "the reward"
        )
    if (cut := _share(s["response_length/clip_ratio"] for s in flat)) >= MOST:
        return (
            f"{cut:.0%} of the replies were cut off at max_tokens: raise it in the agent (and in "
            "rollout.max_tokens, if that is set)"
        )
    tools = [s["tool_use"] for s in flat if "tool_use" in s]
    if tools and (calls := _share(tools)) <= 1 - MOST:
        return (
            f"The model calls its tools in {calls:.0%} of the rollouts: tell it to in the prompt, "
            "or begin with a model that knows how"
        )
    return (
        "Either the reward accepts no reply, or the tasks are too hard for the model: try easier "
        "ones, or give some reward for a part of the way"
    )


def _share(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))
