"""Validation: what the policy scores on prompts it is not trained on, without stopping training.

    weights v on the engines ─► rollouts into channel "val" ─► scored ─► Evaluation, sample table
              │                     training goes on                          │
              └────── pinned: v + 1 is not published before they end ◄────────┘

All rollouts of an evaluation come from one policy version, because the next publication waits for
them: optimizer steps, leases and training rollouts go on, under weights that get older meanwhile.
Every step is checked all the same: a rollout with a token of another version (a roll-back waits for
nothing) is left out and counted as `mixed`.

Worked example: `every` 20, a publication every 2 updates, an evaluation as long as 5 updates.
At update 20 version 10 is published and pinned; the publications of 22 and 24 do not happen; at 25
the evaluation has ended and version 11 is published, with the weights of 25.

Owns the figures of an evaluation. Does not own: running agents (`rollout/`), scoring
(`scoring.py`), sample tables (`samples.py`), publishing (`publish/`), which checkpoint is the best
(`checkpoint.py`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.types import VAL, Group, Trajectory, mapping_in
from stepwell.trainer.config import ValidationConfig
from stepwell.trainer.data import Task
from stepwell.trainer.errors import StarvedError
from stepwell.trainer.rewards.overlong import OVERLONG
from stepwell.trainer.rollout.producer import Producer
from stepwell.trainer.samples import validation_samples, write_evaluation
from stepwell.trainer.scoring import EXTRA, Scorer, why_lost
from stepwell.trainer.tokenizers import tokenizer_at
from stepwell.trainer.trajectory_metrics import (
    data_source,
    is_clipped,
    tool_use,
    trajectory_metrics,
    versions_of,
)

log = logging.getLogger(__name__)

ATTEMPTS = 3
"""Evaluations in a row, beside training, of which not one rollout finished, that end the run."""


ENOUGH = 30
"""Rollouts of traffic without which a score is compared with no other one."""
LEAST_PROMPTS = 4
"""Prompts without which there is no interval."""
Z95 = 1.96


class Policy(NamedTuple):
    """The policy being evaluated."""

    step: int
    """Optimizer steps done."""
    version: int
    """The policy version that the engines serve."""
    published: Mapping[int, int]
    """Version -> optimizer steps when it was published."""

    @property
    def weights_step(self) -> int:
        """Optimizer steps when the version that the engines serve was published."""
        return self.published[self.version]


@dataclass(frozen=True, slots=True)
class Pooled:
    """The score of the last versions together, since few rollouts of one version say little."""

    score: float
    low: float | None
    high: float | None
    """95 % interval of the score; None: of too few prompts."""
    rollouts: int
    oldest_version: int

    @property
    def is_enough(self) -> bool:
        return self.rollouts >= ENOUGH


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The figures of one evaluation. A rollout that failed has no reward: it is not 0, it is
    `failed`."""

    step: int
    """Optimizer steps when it was begun."""
    score: float
    """Mean reward of the finished rollouts."""
    tool_use: float | None
    """Share of them in which the agent called a tool; None: no call offered the model any."""
    rollouts: int
    """Finished, and all by `version`."""
    failed: int
    """Rollouts that have no reward."""
    version: int = 0
    """The policy version that generated every token."""
    weights_step: int = 0
    """Optimizer steps of those weights: at most `step`; -1 if they are lost."""
    mixed: int = 0
    """Finished rollouts left out because another version generated some of their tokens."""
    seconds: float = 0.0
    low: float | None = None
    high: float | None = None
    """95 % interval of the score (`interval`); None: of too few prompts."""
    pooled: Pooled | None = None
    """Score of this version with those before it, as far as they are needed; None: no traffic."""
    metrics: dict[str, float] = field(default_factory=dict)
    """`val/{data_source}/mean@n`, `…/pass@k`, `…/truncated_ratio` and `…/short`, see `figures`; and
    `val/response_length/mean`, …, see `trajectory_metrics`."""

    @property
    def comparable_score(self) -> float | None:
        """The score to compare with that of another evaluation; None: of too little traffic."""
        if self.pooled is None:
            return self.score
        return self.pooled.score if self.pooled.is_enough else None

    def describe(self) -> str:
        """The score with its interval, of how many rollouts of which versions, for people."""
        of = self if self.pooled is None else self.pooled
        within = "" if of.low is None else f" (95 %: {of.low:.2f} to {of.high:.2f})"
        versions = f"version {self.version}"
        if self.pooled is not None and self.pooled.oldest_version != self.version:
            versions = f"versions {self.pooled.oldest_version} to {self.version}"
        few = "" if self.comparable_score is not None else ", too few to compare"
        return f"score {of.score:.3f}{within}, {of.rollouts} rollouts of {versions}{few}"

    def as_metrics(self) -> dict[str, float]:
        """Every figure, under `val/…`."""
        bounds: dict[str, float | None] = {"val/score_low": self.low, "val/score_high": self.high}
        if self.pooled is not None:
            pooled = asdict(self.pooled)
            figures = pooled if self.pooled.is_enough else {"rollouts": self.pooled.rollouts}
            bounds |= {f"val/pooled/{name}": value for name, value in figures.items()}
        return {
            **{name: float(value) for name, value in bounds.items() if value is not None},
            "val/step": float(self.step),
            "val/version": float(self.version),
            "val/score": self.score,
            **({} if self.tool_use is None else {"val/tool_use": self.tool_use}),
            "val/rollouts": float(self.rollouts),
            "val/failed": float(self.failed),
            "val/mixed": float(self.mixed),
            "val/seconds": self.seconds,
            **self.metrics,
        }


class Validator(ABC):
    """Evaluates the policy, beside training or while it waits.

    Args:
        folder: the run's, for sample tables.
        tokenizer_path: turns responses into their text.
    """

    pins: ClassVar[bool]
    """Publications wait for an evaluation beside training."""

    def __init__(
        self,
        config: ValidationConfig,
        pool: DataPoolClient,
        scorer: Scorer,
        *,
        folder: Path,
        tokenizer_path: Path,
    ) -> None:
        self.config = config
        self._folder = folder
        self._tokenizer_path = tokenizer_path
        self._pool = pool
        self._scorer = scorer
        self._task: asyncio.Task[None] | None = None
        self._done: list[Evaluation] = []

    def start(self, evaluation: Coroutine[Any, Any, None]) -> None:
        """Begin an evaluation beside training; `finished` has it when it has ended."""
        if self._task is not None:
            raise RuntimeError("an evaluation is under way; await `join` before the next")
        self._task = asyncio.create_task(evaluation, name="validation")

    async def persistently(self, tasks: Sequence[Task], policy: Policy) -> list[Evaluation]:
        """`run` beside training; again where not one rollout finished: a part was down, and is
        restarted."""
        for _ in range(ATTEMPTS - 1):
            try:
                return await self.run(tasks, policy, beside_training=True)
            except StarvedError as e:
                log.warning("evaluating step %d again: %s", policy.step, e)
        return await self.run(tasks, policy, beside_training=True)

    async def join(self) -> None:
        """Returns once no evaluation is under way.

        Raises:
            StarvedError: it failed (so does any error of its agents' infrastructure).
        """
        if self._task is not None:
            await asyncio.wait([self._task])
            self._collect()

    def finished(self) -> list[Evaluation]:
        """Evaluations that have ended since the last call.

        Raises:
            StarvedError: the last one failed.
        """
        self._collect()
        done, self._done = self._done, []
        return done

    async def stop(self) -> None:
        """Give up the evaluation under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def _collect(self) -> None:
        if self._task is not None and self._task.done():
            task, self._task = self._task, None
            task.result()

    @abstractmethod
    async def run(
        self, tasks: Sequence[Task], policy: Policy, *, beside_training: bool = False
    ) -> list[Evaluation]:
        """Evaluate `policy`, which the engines serve now.

        Raises:
            StarvedError: not one rollout finished.
        """

    def _evaluation(
        self, groups: Sequence[Group], policy: Policy, n: int | None = None, **counts: Any
    ) -> Evaluation:
        """Return the figures of `groups`, all of the policy's version.

        Args:
            n: rollouts of each prompt; None: as many as came.
            counts: the fields of `Evaluation` that they do not tell.
        """
        metrics = {f"val/{name}": x for name, x in trajectory_metrics(groups).items()}
        score = metrics["val/reward/mean"]
        for name in [m for m in metrics if m.startswith("val/reward/") and m.endswith("/mean")]:
            del metrics[name]  # `val/score` and mean@n say it
        bounds = interval(rewards_by_prompt(groups)) or (None, None)
        if n is not None:
            metrics |= figures(groups, n, pass_reward=self.config.pass_reward)
        return Evaluation(
            step=policy.step,
            score=score,
            tool_use=tool_use(groups),
            rollouts=sum(len(g.trajectories) for g in groups),
            low=bounds[0],
            high=bounds[1],
            version=policy.version,
            metrics=metrics,
            **counts,
        )

    def _samples(self, groups: Sequence[Group], policy: Policy) -> list[dict[str, Any]]:
        decode = tokenizer_at(self._tokenizer_path).decode
        step, version, answer = policy.step, policy.version, self._scorer.answer
        return validation_samples(groups, decode, step=step, version=version, answer=answer)


class TaskValidator(Validator):
    """Evaluates by running the agent on the tasks of `data.val`."""

    pins = True

    def __init__(
        self,
        config: ValidationConfig,
        pool: DataPoolClient,
        scorer: Scorer,
        producer: Producer,
        *,
        folder: Path,
        tokenizer_path: Path,
    ) -> None:
        super().__init__(config, pool, scorer, folder=folder, tokenizer_path=tokenizer_path)
        self._producer = producer

    async def run(
        self, tasks: Sequence[Task], policy: Policy, *, beside_training: bool = False
    ) -> list[Evaluation]:
        """Roll out `tasks`, `n` times each, and score them; the engines serve `policy`. One
        evaluation, whose sample table is written; none if every rollout is mixed.

        Raises:
            StarvedError: not one rollout finished.
        """
        began = time.monotonic()
        n = self.config.n
        uids = await self._producer.evaluate(tasks, n, VAL, beside_training=beside_training)
        groups = await self._read_scored(uids)
        pinned = [only_of(group, policy.version) for group in groups]
        finished = sum(len(g.trajectories) for g in groups)
        trajectories = [t for g in pinned for t in g.trajectories]
        if not finished:
            why = await why_lost(self._pool, VAL, self._scorer, self._folder)
            raise StarvedError(f"{why}; none of {len(tasks) * n} evaluation rollouts finished")
        if not trajectories:
            log.warning("no evaluation at step %d: weights were published meanwhile", policy.step)
            return []
        await asyncio.to_thread(self._write, pinned, policy)
        evaluation = self._evaluation(
            pinned,
            policy,
            n,
            failed=len(tasks) * n - finished,
            weights_step=policy.weights_step,
            mixed=finished - len(trajectories),
            seconds=time.monotonic() - began,
        )
        self._done.append(evaluation)
        return [evaluation]

    async def _read_scored(self, uids: Sequence[str]) -> list[Group]:
        """The groups of the evaluation, scored, in the order of its prompts; whatever else is in
        the channel is not part of it."""
        place = {uid: i for i, uid in enumerate(uids)}
        groups: list[Group] = []
        while (lease := await self._pool.lease_batch(channel=VAL)) is not None:
            groups += [g for g in lease.groups if g.prompt_uid in place]
            await self._pool.ack(lease.lease_id)
        # All at once: a judge that takes seconds would else be waited for group by group.
        return await self._scorer.score(sorted(groups, key=lambda g: place[g.prompt_uid]))

    def _write(self, groups: Sequence[Group], policy: Policy) -> None:
        write_evaluation(self._folder, policy.step, self._samples(groups, policy))


# ── figures ──────────────────────────────────────────────────────────────────────────────────────


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that k rollouts, drawn without replacement from n of which c pass, have one that does:
    1 − C(n − c, k) / C(n, k). Unbiased for 1 − (1 − p)^k, which 1 − (1 − c/n)^k is not (Chen et al.
    2021, arXiv:2107.03374, eq. 1). Exact integers, rounded once.

    Raises:
        ValueError: not 0 <= c <= n, or not 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {c} passes in {n} rollouts; 0 <= c <= n and 1 <= k <= n")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def powers_of_two(n: int) -> list[int]:
    """1, 2, 4, … below n, and n."""
    return [*(1 << i for i in range((n - 1).bit_length())), n]


def figures(groups: Iterable[Group], n: int, *, pass_reward: float) -> dict[str, float]:
    """Per data source, each prompt counting once; k: the powers of two below n, and n:

    - `val/{source}/mean@{n}`: mean over prompts of the mean reward of their finished rollouts;
    - `val/{source}/pass@{k}`: mean over prompts with at least k finished rollouts of `pass_at_k`;
      a rollout passes with a reward of `pass_reward` or more, without what its length has cost;
    - `val/{source}/short`: prompts with fewer than n finished rollouts, if there are any.

    And `val/{source}/truncated_ratio`: share of the finished rollouts whose last response was cut
    off at its length.
    """
    rewards: dict[str, list[list[float]]] = defaultdict(list)
    passed: dict[str, list[list[bool]]] = defaultdict(list)
    cut_off: dict[str, list[bool]] = defaultdict(list)
    for group in groups:
        finished = [t for t in group.trajectories if t.reward is not None]
        if finished:
            source = data_source(group)
            rewards[source].append([float(t.reward) for t in finished if t.reward is not None])
            passed[source].append([_passes(t, pass_reward) for t in finished])
            cut_off[source] += map(is_clipped, finished)
    result: dict[str, float] = {}
    for source, prompts in sorted(rewards.items()):
        result[f"val/{source}/truncated_ratio"] = float(np.mean(cut_off[source]))
        result[f"val/{source}/mean@{n}"] = float(np.mean([np.mean(p) for p in prompts]))
        for k in powers_of_two(n):
            chances = [pass_at_k(len(p), sum(p), k) for p in passed[source] if len(p) >= k]
            if chances:
                result[f"val/{source}/pass@{k}"] = float(np.mean(chances))
        if short := sum(len(p) < n for p in prompts):
            result[f"val/{source}/short"] = float(short)
    return result


def _passes(trajectory: Trajectory, pass_reward: float) -> bool:
    """True if its reward, without the penalty for its length, is enough."""
    reward = trajectory.reward or 0.0
    penalty = mapping_in(trajectory.metadata, EXTRA).get(OVERLONG)
    if not isinstance(penalty, int | float) or not penalty:
        return reward >= pass_reward
    return reward - penalty >= pass_reward - 1e-6  # a reward is stored to the precision of float32


def rewards_by_prompt(groups: Iterable[Group]) -> list[list[float]]:
    """Rewards of the finished rollouts of each prompt that has some."""
    found = [[t.reward for t in g.trajectories if t.reward is not None] for g in groups]
    return [rewards for rewards in found if rewards]


def interval(prompts: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """95 % interval of the mean over all rollouts; None: of fewer than `LEAST_PROMPTS` prompts.

    Rollouts of one prompt are alike, so the variance is that of prompts (clustered). Of rewards
    that are 0 or 1 it is Wilson's interval, of as many independent rollouts as give this variance:
    all right in 5 of 5 is not sure to be right. Of others it is Student's.

    Args:
        prompts: rewards of the rollouts of each.
    """
    n_prompts, rewards = len(prompts), [r for rewards in prompts for r in rewards]
    if n_prompts < LEAST_PROMPTS:
        return None
    n, mean = len(rewards), sum(rewards) / len(rewards)
    off = sum(sum(r - mean for r in of) ** 2 for of in prompts)
    if set(rewards) <= {0.0, 1.0}:
        chance = mean * (1 - mean)
        z2 = Z95**2 / (n / max(1.0, off / (n * chance)) if chance else n_prompts)
        middle = (mean + z2 / 2) / (1 + z2)
        half = math.sqrt(chance * z2 + z2**2 / 4) / (1 + z2)
    else:
        free = n_prompts - 1
        student = Z95 + (Z95**3 + Z95) / (4 * free)
        student += (5 * Z95**5 + 16 * Z95**3 + 3 * Z95) / (96 * free**2)
        student += (3 * Z95**7 + 19 * Z95**5 + 17 * Z95**3 - 15 * Z95) / (384 * free**3)
        variance = n_prompts / free * off / n**2
        middle, half = mean, student * math.sqrt(variance)
    return middle - half, middle + half


def only_of(group: Group, version: int) -> Group:
    """The group without the rollouts of which another version generated a token."""
    kept = tuple(t for t in group.trajectories if versions_of(t) == {version})
    return replace(group, trajectories=kept)
