"""Advantages: from the rewards of a batch's trajectories to one number per response token.

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

Pure functions in float64. Does not own: rewards (`rewards/`, `scoring.py`), the critic
(`backends/critic.py`), the loss.

Worked example, rewards [1, 0, 0, 1]: mean 0.5, unbiased std 0.577, GRPO advantages ±0.866.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stepwell.datapool.types import GREEDY, Group
from stepwell.trainer.config import AdvantageConfig, Credit
from stepwell.trainer.errors import ColumnError, RewardError, UnknownNameError

log = logging.getLogger(__name__)

Array: TypeAlias = npt.NDArray[np.float64]
Index: TypeAlias = npt.NDArray[np.int64]

GREEDY_REWARD = "greedy_reward"
"""Key of a group's metadata: that rollout's reward, once it has been taken out (`baselined`)."""

EPSILON = 1e-6
"""Added to GRPO's std, as verl does."""
WHITEN_EPSILON = 1e-8
"""Added to the variance that whitening divides by, as verl does."""
BASELINE_WINDOW = 256
"""Trajectories that a running baseline remembers: the plain mean up to here, then each new reward
counts 1/256, so that the baseline follows the policy."""


@dataclass(frozen=True, eq=False, slots=True)
class Returns:
    """The returns of one group, one per unit of credit; U of them in n trajectories."""

    values: Array
    """G, [U]."""
    tokens: Array
    """Response tokens each unit covers, [U]."""
    trajectory: Index
    """Which of the group's trajectories, 0..n-1, [U]."""
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
        """From plain numbers; by default each value is a trajectory of one token."""
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


def grpo(r: Returns, *, norm_by_std: bool = True, epsilon: float = EPSILON) -> Array:
    """A = (G - mean) / (std + ε), std unbiased (n - 1).

    With several units per trajectory each counts 1/units in both moments, so that a trajectory
    counts once. Source: DeepSeekMath, arXiv:2402.03300, eq. 4; ε and the unbiased std as in verl.
    `norm_by_std=False` is Dr.GRPO.
    """
    if r.settled is not None:
        return r.settled
    centred: Array = r.values - r.means.mean()
    if not norm_by_std:
        return centred
    share = 1 / np.bincount(r.trajectory)[r.trajectory]
    std = math.sqrt(float((share * centred**2).sum()) / (r.n - 1))
    return centred / (std + epsilon)


def dr_grpo(r: Returns) -> Array:
    """A = G - mean: no division by the std, which favours too easy and too hard prompts.

    Source: Understanding R1-Zero-Like Training, arXiv:2503.20783. The other half of Dr.GRPO is
    the aggregation with a constant norm.
    """
    return grpo(r, norm_by_std=False)


def rloo(r: Returns) -> Array:
    """A = G - mean of the other trajectories; with one unit each, n/(n-1) · (G - mean).

    Source: Back to Basics, arXiv:2402.14740 (leave-one-out baseline, unbiased).
    """
    if r.settled is not None:
        return r.settled
    others = (r.means.sum() - r.means) / (r.n - 1)
    return np.asarray(r.values - others[r.trajectory])


def opo(r: Returns) -> Array:
    """A = G - Σ l G / Σ l, l the response tokens: the variance-optimal baseline, if the squared
    gradient norm grows with the length.

    Source: On-Policy RL with Optimal Reward Baseline, arXiv:2505.23585.
    """
    if r.settled is not None:
        return r.settled
    return r.values - float((r.tokens * r.values).sum() / r.tokens.sum())


def remax(r: Returns) -> Array:
    """A = G - reward of the greedy rollout of the same prompt.

    Source: ReMax, arXiv:2310.10505. A group of one has its baseline, unlike elsewhere. verl's is
    that of credit "step": process rewards to go, minus the whole greedy reward.
    """
    if r.greedy is None:
        raise RewardError("a group has no greedy reward; pass groups through baselined() first")
    return r.values - r.greedy


def plain(r: Returns) -> Array:
    """A = G: no baseline within the group; REINFORCE++ has the batch's (whitening).

    Source: REINFORCE++, arXiv:2501.03262.
    """
    return r.values


@dataclass(frozen=True, slots=True)
class Batch:
    """Advantages of all units of a batch on their way to the tokens."""

    values: Array
    """[U]"""
    tokens: Array
    """Response tokens of each unit, [U]."""
    rewards: Array
    """Total reward of each trajectory, [N]."""


def whiten(b: Batch) -> Array:
    """(A - mean) / √(var + 1e-8), over tokens: a unit counts as often as it has tokens; var
    unbiased. A batch of one token is 0.

    Source: verl's `masked_whiten`; REINFORCE++, arXiv:2501.03262.
    """
    n = b.tokens.sum()
    centred = b.values - (b.tokens * b.values).sum() / n
    if n < 2 or np.ptp(b.values) == 0:
        return np.zeros_like(centred)
    variance = (b.tokens * centred**2).sum() / (n - 1)
    return np.asarray(centred / math.sqrt(variance + WHITEN_EPSILON))


def rescue(b: Batch) -> Array:
    """α A with α = trajectories / trajectories of non-zero reward (at least 1).

    Source: GPG, arXiv:2504.02546, in verl's form: the paper's α counts groups with a signal.
    """
    scored = int(np.count_nonzero(b.rewards))
    return b.values * (len(b.rewards) / max(1, scored))


GroupBaseline: TypeAlias = Callable[[Returns], Array]
OverBatch: TypeAlias = Callable[[Batch], Array]


@dataclass(frozen=True, slots=True)
class Estimator:
    """What is subtracted within each group, and what is done to the whole batch then."""

    within_group: GroupBaseline
    over_batch: OverBatch | None = None


ESTIMATORS: Mapping[str, Estimator] = MappingProxyType(
    {
        "grpo": Estimator(grpo),
        "dr_grpo": Estimator(dr_grpo),
        "rloo": Estimator(rloo),
        "opo": Estimator(opo),
        "gpg": Estimator(dr_grpo, rescue),
        "remax": Estimator(remax),
        "reinforce_plus_plus": Estimator(plain, whiten),
        "reinforce_plus_plus_baseline": Estimator(dr_grpo, whiten),
    }
)
"""All but `gae` and `reinforce_running`, whose baseline is not the group."""


def estimator(name: str) -> Estimator:
    """The estimator registered under `name`."""
    if name not in ESTIMATORS:
        raise UnknownNameError(
            f"algorithm.adv_estimator is {name!r}; choose one of {', '.join(ESTIMATORS)}, "
            "reinforce_running, gae"
        )
    return ESTIMATORS[name]


def is_within_group(name: str) -> bool:
    """Whether the estimator's baseline is the group: one whose rewards are all equal teaches it
    nothing."""
    return name in ESTIMATORS and ESTIMATORS[name].within_group is not plain


def gae(
    rewards: Array, values: Array, trajectory: Index, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Array, Array]:
    """(A, A + V) of every unit, [U] each, before whitening.

        δ_k = r_k + γ V_{k+1} - V_k        A_k = δ_k + γ λ A_{k+1}        0 behind the last

    V_k is the value of the state before unit k; units of a trajectory follow each other.
    Source: Generalized Advantage Estimation, arXiv:1506.02438, eq. 16.
    """
    following = np.append(values[1:], 0.0)
    following[np.append(trajectory[1:] != trajectory[:-1], True)] = 0.0
    advantages = to_go(rewards + gamma * following - values, trajectory, gamma * lam)
    return advantages, advantages + values


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


class RunningBaseline(NamedTuple):
    """Rewards of one data source lately."""

    n: int = 0
    """Trajectories, at most `BASELINE_WINDOW`."""
    mean: float = 0.0
    variance: float = 0.0

    def followed_by(self, rewards: Array) -> RunningBaseline:
        """With these too, in order: m' = m + (R - m)/n, v' = v + ((R - m)(R - m') - v)/n."""
        n, mean, variance = self
        for reward in map(float, rewards):
            n = min(n + 1, BASELINE_WINDOW)
            before, mean = mean, mean + (reward - mean) / n
            variance += ((reward - before) * (reward - mean) - variance) / n
        return RunningBaseline(n, mean, variance)


Baselines: TypeAlias = Mapping[str, RunningBaseline]
"""By data source; "" where tasks name none, as traffic."""


def reinforce_running(
    b: Batch, trajectory: Index, sources: Sequence[str], known: Baselines, *, scaled: bool = True
) -> tuple[Array, dict[str, RunningBaseline]]:
    """(A, the baselines that the next batch has): for groups of one, of which no other rollout
    tells what reward was to be expected.

        A = (G - m) / √(s² + 1e-8)        s² = max(mean of (G - m)², mean of v), over tokens

    m and v are mean and variance of the source's rewards before this batch; of a source that is
    new, m is its mean in this batch and v 0. Divided, not centred again: the mean of a batch of one
    source would cancel m. With s² no less than v, a batch whose rewards are all alike, and near m,
    is not blown up to size 1.

    Source: REINFORCE with a running baseline (Williams 1992, reinforcement comparison), scaled over
    the batch as in REINFORCE++, arXiv:2501.03262.

    Args:
        b: of which `values` are returns.
        trajectory: of each unit, [U].
        sources: of each trajectory, [N].
    """
    means, variances = np.zeros(len(b.rewards)), np.zeros(len(b.rewards))
    following = dict(known)
    for source in dict.fromkeys(sources):
        own = np.array([s == source for s in sources])
        rewards = b.rewards[own]
        before = known.get(source, RunningBaseline(0, float(rewards.mean())))
        means[own], variances[own] = before.mean, before.variance
        following[source] = known.get(source, RunningBaseline()).followed_by(rewards)
    advantages = b.values - means[trajectory]
    if not scaled:
        return advantages, following
    square = max((b.tokens * x).sum() for x in (advantages**2, variances[trajectory]))
    return advantages / math.sqrt(square / b.tokens.sum() + WHITEN_EPSILON), following


@dataclass(frozen=True, eq=False, slots=True)
class Advantages:
    """Columns of a batch, in the order of `[s for g in groups for s in g.steps]`."""

    columns: dict[str, Tensor]
    """`advantages`, [T] float32; with `gae` also `returns`, what the critic is to predict, NaN
    where nothing is (all but a step's first token with credit "step")."""
    metrics: dict[str, float]
    """`advantage/mean|std` over tokens, `advantage/no_signal_groups`: the share of groups whose
    advantages are all 0 before anything is done over the batch; `advantage/baseline`: the mean of
    running baselines."""
    baselines: Baselines = field(default_factory=dict)
    """For the next batch (`reinforce_running`)."""


def compute_advantages(
    groups: Sequence[Group],
    config: AdvantageConfig,
    *,
    token_rewards: Tensor | None = None,
    values: Tensor | None = None,
    baselines: Baselines = MappingProxyType({}),
) -> Advantages:
    """The advantage of every response token.

    Args:
        groups: what is trained; with `remax` as `baselined` returns them.
        token_rewards: [T], added to the rewards at their tokens, e.g. -β KL.
        values: [T], the critic's value of the state before each response token (`gae`).
        baselines: as the batch before returned them (`reinforce_running`).

    Raises:
        RewardError: a trajectory has no reward. Missing is not zero, so it cannot be trained on;
            abort it before. Or it has no steps.
        ColumnError: a column has the wrong shape, or gae has no `values`.
    """
    layout = _Layout.of(groups)
    earned = _earned(groups, layout)
    if token_rewards is not None:
        earned += _column("token_rewards", token_rewards, layout.n_tokens)
    starts = layout.unit_starts(config.unit)
    lengths = np.diff(np.append(starts, layout.n_tokens))
    tokens = lengths.astype(np.float64)
    trajectory = layout.trajectory[starts]
    rewards = np.add.reduceat(earned, starts)
    metrics: dict[str, float] = {}

    totals = np.bincount(layout.trajectory, earned).astype(np.float64)
    columns: dict[str, Tensor] = {}
    over_batch: OverBatch | None
    if config.adv_estimator == "gae":
        if values is None:
            raise ColumnError("gae has no values; compute the critic's before the advantages")
        v = _column("values", values, layout.n_tokens)[starts]
        units, targets = gae(rewards, v, trajectory, gamma=config.gamma, lam=config.lam)
        returns = torch.full((layout.n_tokens,), torch.nan)
        returns[torch.from_numpy(starts)] = torch.from_numpy(targets).float()
        columns["returns"] = returns
        over_batch = whiten
    elif config.adv_estimator == "reinforce_running":
        sources = [_source(group) for group in groups for _ in group.trajectories]
        batch = Batch(to_go(rewards, trajectory, config.gamma), tokens, totals)
        units, baselines = reinforce_running(
            batch, trajectory, sources, baselines, scaled=config.whiten
        )
        metrics["advantage/baseline"] = sum(baselines[s].mean for s in sources) / len(sources)
        over_batch = None
    else:
        chosen = estimator(config.adv_estimator)
        over_batch = chosen.over_batch
        units = to_go(rewards, trajectory, config.gamma)
        silent = 0
        for group, own, first in layout.groups(groups, trajectory):
            units[own] = chosen.within_group(
                Returns(
                    units[own],
                    tokens[own],
                    trajectory[own] - first,
                    group.metadata.get(GREEDY_REWARD),
                )
            )
            silent += not units[own].any()
        metrics["advantage/no_signal_groups"] = silent / len(groups)
    if over_batch is not None and (config.whiten or over_batch is not whiten):
        units = over_batch(Batch(units, tokens, totals))

    per_token = torch.from_numpy(np.repeat(units, lengths)).float()
    metrics["advantage/mean"] = float(per_token.mean())
    metrics["advantage/std"] = float(per_token.std(correction=0))
    columns["advantages"] = per_token
    return Advantages(columns, metrics, baselines)


def _source(group: Group) -> str:
    return str((group.metadata.get("task") or {}).get("data_source") or "")


def baselined(groups: Sequence[Group], config: AdvantageConfig) -> list[Group]:
    """`groups` to train on: greedy rollouts (metadata `GREEDY`) are taken out, and with `remax`
    their reward becomes the group's metadata `GREEDY_REWARD`. A group whose greedy rollout failed
    has no baseline and is left out, logged: a failure is no reward of 0.

    Raises:
        RewardError: `remax`, and nobody was to run a greedy rollout for a group (neither it nor
            one of its trajectories is marked).
    """
    kept: list[Group] = []
    for group in groups:
        greedy = [t for t in group.trajectories if t.metadata.get(GREEDY)]
        rewards = [t.reward for t in greedy if t.reward is not None]
        if greedy:
            trained = tuple(t for t in group.trajectories if not t.metadata.get(GREEDY))
            group = replace(group, trajectories=trained)
        if config.adv_estimator == "remax":
            if not greedy and not group.metadata.get(GREEDY):
                raise RewardError(
                    f"group {group.prompt_uid!r} has no greedy rollout, which remax needs: a "
                    f"trajectory with metadata {{{GREEDY!r}: true}}; Stepwell's own rollout "
                    "workers run one"
                )
            if not rewards:
                log.warning("%s is left out: its greedy rollout failed", group.prompt_uid)
                continue
            baseline = math.fsum(rewards) / len(rewards)
            group = replace(group, metadata={**group.metadata, GREEDY_REWARD: baseline})
        if group.trajectories:
            kept.append(group)
    return kept


@dataclass(frozen=True, eq=False, slots=True)
class _Layout:
    """Where the tokens of each step and trajectory lie; a trajectory's are contiguous."""

    step_starts: Index
    """First token of each step, [S]."""
    trajectory_starts: Index
    """First token of each trajectory, [N]."""
    trajectory: Index
    """Trajectory of each token, [T]."""
    group_of_trajectory: Index
    """[N]"""

    @classmethod
    def of(cls, groups: Sequence[Group]) -> _Layout:
        for empty in (t for g in groups for t in g.trajectories if not t.steps):
            raise RewardError(
                f"trajectory {empty.trajectory_uid!r} of prompt {empty.prompt_uid!r} has no steps, "
                "so no token to credit; leave it out"
            )
        lengths = np.array([len(s.response_ids) for g in groups for s in g.steps], np.int64)
        steps = np.array([len(t.steps) for g in groups for t in g.trajectories], np.int64)
        step_starts = np.cumsum(lengths) - lengths
        trajectory = np.repeat(np.arange(len(steps)), steps)
        sizes = [len(g.trajectories) for g in groups]
        return cls(
            step_starts,
            step_starts[np.cumsum(steps) - steps],
            np.repeat(trajectory, lengths),
            np.repeat(np.arange(len(groups)), sizes),
        )

    @property
    def n_tokens(self) -> int:
        return len(self.trajectory)

    def unit_starts(self, unit: Credit) -> Index:
        """First token of each unit of credit."""
        if unit == "trajectory":
            return self.trajectory_starts
        return self.step_starts if unit == "step" else np.arange(self.n_tokens)

    def groups(
        self, groups: Sequence[Group], trajectory: Index
    ) -> Iterator[tuple[Group, slice, int]]:
        """Each group, its units and the number of its first trajectory.

        Args:
            trajectory: of each unit, [U].
        """
        numbers = np.arange(len(groups) + 1)
        trajectories = np.searchsorted(self.group_of_trajectory, numbers)
        units = np.searchsorted(trajectory, trajectories)
        for i, group in enumerate(groups):
            yield group, slice(units[i], units[i + 1]), int(trajectories[i])


def _earned(groups: Sequence[Group], layout: _Layout) -> Array:
    """Rewards at the last token of their step, [T]; a step without one earns nothing."""
    rewards: list[float] = []
    for group in groups:
        for trajectory in group.trajectories:
            total = trajectory.reward
            if total is None or not math.isfinite(total):
                raise RewardError(
                    f"trajectory {trajectory.trajectory_uid!r} of prompt {group.prompt_uid!r} has "
                    f"reward {total}; score it or abort it before it is trained on"
                )
            rewards += [s.reward or 0.0 for s in trajectory.steps]
    earned = np.zeros(layout.n_tokens)
    earned[np.append(layout.step_starts[1:], layout.n_tokens) - 1] = rewards
    return earned


def _column(name: str, column: Tensor, n_tokens: int) -> Array:
    if column.shape != (n_tokens,):
        raise ColumnError(f"{name} has shape {tuple(column.shape)} for {n_tokens} response tokens")
    return np.asarray(column.detach().double().cpu().numpy())
