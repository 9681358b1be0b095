"""This module compares the rewards of two versions of the weights, so that a worse one is
rolled back.

    pool ──event `scored`──► rewards by version ──n──► Verdict: stays | falls below | unjudged

A trajectory counts for the version that sampled all its calls; one that saw two counts for none.
Rollouts of one prompt resemble each other, so the error of a mean is that of its prompts' means
(the cluster-robust variance, with g prompts of N rewards):

    mean m = Σ r / N        error² = g / (g − 1) · Σ_prompts (Σ (r − m))² / N²
    falls below: m_old − m_new > z · √(error_old² + error_new²)

Worked example, n = 64 singles, rewards 0 or 1. The version before earned 0.8, so its error is 0.05;
the new one earns 0.5, error 0.06. The difference, 0.3, is above 3 · 0.08: it is rolled back. At 0.6
it stays.

A canary is compared with what the others earn at the same time, if that is enough.

Limits: short trajectories end first, so the first n rewards of any version are those of shorter
ones; both sides are counted alike. Of a call that an update cut, the version it began with counts.

Owns rewards and the test. Does not own what follows from it (`publisher.py`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from stepwell.datapool.errors import DataPoolError
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.types import TRAIN, Group
from stepwell.trainer.config import GuardConfig
from stepwell.trainer.progress import Progress

log = logging.getLogger(__name__)

REMEMBERED = 16
"""Versions whose rewards are kept."""
SLICE_S = 10.0
RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Sample:
    """Rewards of a version, summed up."""

    n: int
    mean: float = math.nan
    error: float = math.inf
    """Standard error of the mean; infinite with fewer than two prompts."""

    @classmethod
    def of(cls, by_prompt: Sequence[Sequence[float]]) -> Sample:
        """Sum up rewards that are given prompt by prompt."""
        n, g = sum(map(len, by_prompt)), len(by_prompt)
        if n == 0:
            return cls(0)
        mean = sum(map(sum, by_prompt)) / n
        if g < 2:
            return cls(n, mean)
        squares = sum((sum(rewards) - len(rewards) * mean) ** 2 for rewards in by_prompt)
        return cls(n, mean, math.sqrt(g / (g - 1) * squares) / n)

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.error:.3f} of {self.n} rewards"


def falls_below(new: Sample, old: Sample, z: float) -> bool:
    """True if the mean of `new` is lower than that of `old` by more than its error."""
    return old.mean - new.mean > z * math.hypot(old.error, new.error)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of a version's trial."""

    outcome: Literal["stays", "falls_below", "unjudged"]
    why: str


_Rewards: TypeAlias = dict[str, tuple[str, float, float]]
"""trajectory_uid -> prompt_uid, reward, when it came."""


class Guard:
    """Follows the rewards of a channel and judges versions by them."""

    def __init__(self, config: GuardConfig, pool: DataPoolClient) -> None:
        self.config = config
        self._pool = pool
        self._rewards: dict[int, _Rewards] = defaultdict(dict)
        self._news = asyncio.Event()

    async def follow(self) -> None:
        """Count what the pool tells, for ever. A pool that is down is asked again."""
        cursor = None
        while True:
            try:
                page = await self._pool.get_events(
                    cursor, self.config.channel, ("scored",), timeout_s=SLICE_S
                )
            except DataPoolError as e:
                log.debug("no rewards: %s", e)
                await asyncio.sleep(RETRY_S)
                continue
            cursor = page.cursor
            for event in page.events:
                if event.data["oldest"] == event.data["newest"] and event.trajectory_uid:
                    rewards = self._rewards[event.data["oldest"]]
                    reward = event.prompt_uid, event.data["reward"], time.monotonic()
                    rewards[event.trajectory_uid] = reward
            self._notify()

    def scored(self, groups: Sequence[Group]) -> None:
        """Rewards that the trainer gave itself (`rollout.reward`), which the pool does not know."""
        if self.config.channel != TRAIN:
            return
        for group in groups:
            for t in group.trajectories:
                versions = {s.policy_version for s in t.steps}
                if len(versions) == 1 and t.reward is not None:
                    reward = group.prompt_uid, t.reward, time.monotonic()
                    self._rewards[versions.pop()][t.trajectory_uid] = reward
        self._notify()

    def _notify(self) -> None:
        for old in sorted(self._rewards)[:-REMEMBERED]:
            del self._rewards[old]
        news, self._news = self._news, asyncio.Event()
        news.set()

    def sample(self, version: int, progress: Progress, since: float = -math.inf) -> Sample:
        """The rewards of `version` and of those with the same weights."""
        weights = progress.weights_of(version)
        by_prompt: dict[str, list[float]] = defaultdict(list)
        for v, rewards in self._rewards.items():
            if progress.weights_of(v) == weights:
                for prompt_uid, reward, came in rewards.values():
                    if came >= since:
                        by_prompt[prompt_uid].append(reward)
        return Sample.of(list(by_prompt.values()))

    def before(self, version: int, progress: Progress) -> int | None:
        """The newest version before `version` that has enough rewards and was not rolled back."""
        enough = [
            v
            for v in self._rewards
            if v < version
            and progress.is_good(v)
            and progress.weights_of(v) != progress.weights_of(version)
            and self.sample(v, progress).n >= self.config.n
        ]
        return max(enough, default=None)

    async def verdict(
        self, version: int, progress: Progress, *, wait: bool = True, beside: bool = False
    ) -> Verdict:
        """Judge `version` by its rewards once there are enough; `wait` False: at once.

        Args:
            beside: the version before goes on earning: what it earns meanwhile is compared.
        """
        begun = time.monotonic()
        until = begun + self.config.wait_s
        while (new := self.sample(version, progress)).n < self.config.n:
            left = until - time.monotonic() if wait else 0.0
            if left <= 0:
                others = self.sample(version - 1, progress, since=begun)
                if beside and new.n == 0 and others.n >= self.config.n:
                    why = f"version {version} earns nothing, others {others} meanwhile"
                    return Verdict("falls_below", why)
                return Verdict("unjudged", f"version {version} has {new.n} rewards")
            news = self._news
            try:
                await asyncio.wait_for(news.wait(), left)
            except TimeoutError:
                continue
        before = self.before(version, progress)
        if before is None:
            return Verdict("unjudged", f"version {version} has no version before it with rewards")
        old = self.sample(before, progress, since=begun if beside else -math.inf)
        if old.n < self.config.n:
            old = self.sample(before, progress)
        why = f"version {version} earns {new}, version {before} {old}"
        return Verdict("falls_below" if falls_below(new, old, self.config.z) else "stays", why)
