"""Interface of advantage estimators: from the rewards of a batch to a number per unit of credit.

    step rewards ──► returns G, one per unit of credit ──► minus a baseline ──► over the batch ──► A
                     trajectory: Σ r, all its tokens        of the group,        whitening,
                     step, token: discounted sum to go      greedy, critic,      GPG's α
                                                            running

The trajectory is the unit by default: its reward is the sum of its step rewards, and its one
advantage holds for every token of every step. With finer credit a step (or token) has a return of
its own, and still each trajectory counts once in its group's baseline, however many steps it has:
with a single reward at the end all three agree. A reward is earned at its step's last token.

Groups may differ in size; each is normalised within itself. A group of one has no baseline: its
trajectory keeps its raw score (verl's convention). A group whose returns are all equal carries no
signal: exactly 0.

Files beside this one hold an estimator or a small family each: its formula and its entry, an
`Estimator`. Pure functions in float64, without torch. Does not own: which token is of which unit
(`columns.py`), rewards (`rewards/`), the critic (`backends/torch/critic.py`), the loss.

Worked example, rewards [1, 0, 0, 1]: mean 0.5, unbiased std 0.577, GRPO advantages ±0.866.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from stepwell.datapool.types import GREEDY, Group
from stepwell.trainer.algorithms.options import Options
from stepwell.trainer.errors import RewardError

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

Array: TypeAlias = npt.NDArray[np.float64]
Index: TypeAlias = npt.NDArray[np.int64]
Credit: TypeAlias = Literal["trajectory", "step", "token"]
Baselines: TypeAlias = Mapping[str, Any]
"""Memory of an estimator from batch to batch; in checkpoints."""

GREEDY_REWARD = "greedy_reward"
"""Key of a group's metadata: the reward of its greedy rollout, once that has been taken out
(`baselined`)."""
WHITEN_EPSILON = 1e-8
"""Added to the variance that whitening divides by, as verl does."""


@dataclass(frozen=True, eq=False, slots=True)
class Returns:
    """The returns of one group, one per unit of credit; U of them in n trajectories."""

    values: Array
    """G, [U]."""
    tokens: Array
    """Trained response tokens of each unit, [U]."""
    trajectory: Index
    """Index of the unit's trajectory in the group, 0..n-1, [U]."""
    greedy: float | None = None
    """Reward of the greedy rollout (ReMax)."""

    @classmethod
    def of(
        cls,
        values: Sequence[float],
        tokens: Sequence[float] | None = None,
        trajectory: Sequence[int] | None = None,
        greedy: float | None = None,
    ) -> Returns:
        """Make a batch of plain numbers; by default each value is a trajectory of one token."""
        n = len(values)
        return cls(
            np.asarray(values, np.float64),
            np.ones(n) if tokens is None else np.asarray(tokens, np.float64),
            np.arange(n) if trajectory is None else np.asarray(trajectory, np.int64),
            greedy,
        )

    @property
    def n(self) -> int:
        """Trajectories."""
        return int(self.trajectory[-1]) + 1 if len(self.trajectory) else 0

    @property
    def settled(self) -> Array | None:
        """The advantages of a group that has no baseline to subtract (raw) or no signal (0)."""
        if self.n <= 1:
            return self.values
        # Rounding leaves equal returns 1e-17 off their mean; divided by a std as small it is noise.
        return np.zeros_like(self.values) if np.ptp(self.values) == 0 else None

    @property
    def means(self) -> Array:
        """Mean return of each trajectory over its units, [n]."""
        return np.asarray(np.bincount(self.trajectory, self.values) / np.bincount(self.trajectory))


@dataclass(frozen=True, eq=False, slots=True)
class Batch:
    """U units of credit in N trajectories in G groups, each contiguous."""

    rewards: Array
    """Reward earned within each unit, [U]."""
    returns: Array
    """G: rewards to go, discounted, [U]."""
    tokens: Array
    """Trained response tokens of each unit, [U]."""
    trajectory: Index
    """Trajectory of each unit, 0..N-1, [U]."""
    group: Index
    """Group of each trajectory, 0..G-1, [N]."""
    greedy: Sequence[float | None] = ()
    """Reward of each group's greedy rollout, [G]."""
    sources: Sequence[str] = ()
    """The data source of each trajectory's task, "" where it names none, as traffic; [N]."""
    parts: Sequence[Mapping[str, Any]] = ()
    """Further values of the reward function for each trajectory, by key, [N]."""
    values: Array | None = None
    """The critic's value of the state before each unit, [U]; None without a critic."""
    baselines: Baselines = field(default_factory=dict)
    """Memory that the estimate of the batch before left."""
    gamma: float = 1.0
    """`algorithm.gamma`, which is in `returns` already."""
    lam: float = 1.0
    """`algorithm.lam`."""
    scaled: bool = True
    """`algorithm.whiten`: over the batch, by estimators that say so."""

    def whitened(self, advantages: Array) -> Array:
        """`advantages`, scaled over the batch's tokens if that is wanted."""
        return whiten(advantages, self.tokens) if self.scaled else advantages

    @property
    def totals(self) -> Array:
        """The reward of each trajectory, [N]."""
        return np.bincount(self.trajectory, self.rewards).astype(np.float64)

    def by_group(self, baseline: Callable[[Returns], Array]) -> Array:
        """`baseline` of each group's returns, [U]."""
        found = np.empty_like(self.returns)
        group = self.group[self.trajectory]
        ends = np.append(np.flatnonzero(np.diff(group)) + 1, len(group))
        start = 0
        for number, end in enumerate(ends):
            own = slice(start, int(end))
            trajectory = self.trajectory[own] - self.trajectory[start]
            greedy = self.greedy[number] if self.greedy else None
            found[own] = baseline(Returns(self.returns[own], self.tokens[own], trajectory, greedy))
            start = int(end)
        return found


@dataclass(frozen=True, eq=False, slots=True)
class Estimate:
    """The advantages of a batch: of an estimator per unit of credit, of `compute_advantages` per
    response token."""

    advantages: Array
    """[U], or [T]."""
    targets: Array | None = None
    """Targets of the critic before each of them; per token, NaN where there is none (all but a
    unit's first token)."""
    baselines: Baselines = field(default_factory=dict)
    """For the next batch."""
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def columns(self) -> dict[str, Tensor]:
        """Columns of a batch, [T] float32: `advantages`, and with targets `returns`."""
        import torch  # only here: estimators take none

        found = {"advantages": self.advantages, "returns": self.targets}
        return {k: torch.from_numpy(v).float() for k, v in found.items() if v is not None}


@dataclass(frozen=True, slots=True)
class Estimator:
    """One advantage estimator. A plug-in's is named by a dotted path, or by an entry point of the
    group `stepwell.advantages`.
    """

    estimate: Callable[[Batch, Any], Estimate]
    """(batch, options)"""
    options: type[Options] = Options
    """Its own hyper-parameters, the section `algorithm.adv_options`."""
    credit: Credit = "trajectory"
    """Unit that gets one advantage where `algorithm.credit` is null."""
    group_baseline: bool = False
    """A group whose rewards are all equal teaches it nothing."""
    greedy: bool = False
    """It needs one greedy rollout more per prompt."""
    critic: bool = False
    """It needs values: a critic is trained. It has λ, and no credit by trajectory."""


def of_group(baseline: Callable[[Returns], Array], *, greedy: bool = False) -> Estimator:
    """The estimator of a baseline within each group."""

    def estimate(b: Batch, options: Options) -> Estimate:
        return Estimate(b.by_group(baseline))

    estimate.__doc__ = baseline.__doc__
    return Estimator(estimate, group_baseline=True, greedy=greedy)


def baselined(groups: Sequence[Group], wanted: Estimator) -> list[Group]:
    """`groups` to train on: greedy rollouts (metadata `GREEDY`) are taken out, and where they are
    wanted their reward becomes the group's metadata `GREEDY_REWARD`. A group whose greedy rollout
    failed has no baseline and is left out, logged: a failure is no reward of 0.

    Raises:
        RewardError: one is wanted, and nobody was to run it for a group (neither it nor one of its
            trajectories is marked).
    """
    kept: list[Group] = []
    for group in groups:
        greedy = [t for t in group.trajectories if t.metadata.get(GREEDY)]
        rewards = [t.reward for t in greedy if t.reward is not None]
        if greedy:
            trained = tuple(t for t in group.trajectories if not t.metadata.get(GREEDY))
            group = replace(group, trajectories=trained)
        if wanted.greedy:
            if not greedy and not group.metadata.get(GREEDY):
                raise RewardError(
                    f"group {group.prompt_uid!r} has no greedy rollout, which "
                    f"algorithm.adv_estimator needs: a trajectory with metadata {{{GREEDY!r}: "
                    "true}; Stepwell's own rollout workers run one"
                )
            if not rewards:
                log.warning("%s is left out: its greedy rollout failed", group.prompt_uid)
                continue
            baseline = math.fsum(rewards) / len(rewards)
            group = replace(group, metadata={**group.metadata, GREEDY_REWARD: baseline})
        if group.trajectories:
            kept.append(group)
    return kept


def whiten(advantages: Array, tokens: Array) -> Array:
    """(A - mean) / √(var + 1e-8), over tokens: a unit counts as often as it has trained ones; var
    unbiased. A batch of one token is 0.

    Source: verl's `masked_whiten`; REINFORCE++, arXiv:2501.03262.
    """
    n, counted = tokens.sum(), advantages[tokens != 0]
    if n < 2 or np.ptp(counted) == 0:
        return np.zeros_like(advantages)
    centred = advantages - (tokens * advantages).sum() / n
    variance = (tokens * centred**2).sum() / (n - 1)
    return np.asarray(centred / math.sqrt(variance + WHITEN_EPSILON))


def to_go(x: Array, trajectory: Index, discount: float) -> Array:
    """y_k = x_k + discount · y_{k+1} along each trajectory, 0 behind its last unit, [U]."""
    units = np.bincount(trajectory)
    starts = np.cumsum(units) - units
    # Time first: each turn of the loop is one contiguous operation over all trajectories.
    columns = np.zeros((int(units.max()), len(units)))
    place = np.arange(len(x)) - starts[trajectory]
    columns[place, trajectory] = x
    for k in range(len(columns) - 2, -1, -1):
        columns[k] += discount * columns[k + 1]
    return np.asarray(columns[place, trajectory])
