"""This module turns the rewards of a batch's groups into advantages, one per response token.

Owns the batch's layout: which token is of which step, trajectory, group and unit of credit. Does
not own the formulas (the files beside this one).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import MappingProxyType

import numpy as np
from torch import Tensor

from stepwell.datapool.types import Group, mapping_in
from stepwell.trainer.algorithms.advantages.base import (
    GREEDY_REWARD,
    Array,
    Baselines,
    Batch,
    Estimate,
    Index,
    to_go,
)
from stepwell.trainer.config import AdvantageConfig
from stepwell.trainer.errors import ColumnError, RewardError
from stepwell.trainer.scoring import EXTRA
from stepwell.trainer.trajectory_metrics import task_of


def compute_advantages(
    groups: Sequence[Group],
    config: AdvantageConfig,
    *,
    token_rewards: Tensor | None = None,
    values: Tensor | None = None,
    baselines: Baselines = MappingProxyType({}),
    mask: Tensor | None = None,
) -> Estimate:
    """The advantage of every response token, in the order of `[s for g in groups for s in
    g.steps]`; metrics `advantage/mean|std` over trained tokens, and the estimator's own.

    Args:
        groups: what is trained, as `baselined` returns them.
        token_rewards: [T], added to the rewards at their tokens, e.g. -β KL.
        values: [T], the critic's value of the state before each response token.
        baselines: as the batch before returned them.
        mask: [T], 0 on tokens that are not trained: they count in no length and in no moment over
            tokens, γ and λ pass over them, and the critic has no target there. Rewards count
            whatever is trained. None: all are trained.

    Raises:
        RewardError: a trajectory has no reward. Missing is not zero, so it cannot be trained on;
            abort it before. Or it has no steps.
        ColumnError: a column has the wrong shape, or is missing.
    """
    for empty in (t for g in groups for t in g.trajectories if not t.steps):
        raise RewardError(
            f"trajectory {empty.trajectory_uid!r} of prompt {empty.prompt_uid!r} has no steps, "
            "so no token to credit; leave it out"
        )
    # Of each step, [S], of each trajectory, [N], and of each token, [T].
    step_tokens = np.array([len(s.response_ids) for g in groups for s in g.steps], np.int64)
    n_steps = np.array([len(t.steps) for g in groups for t in g.trajectories], np.int64)
    step_starts = np.cumsum(step_tokens) - step_tokens
    trajectory = np.repeat(np.repeat(np.arange(len(n_steps)), n_steps), step_tokens)
    n_tokens = len(trajectory)

    earned = np.zeros(n_tokens)
    earned[step_starts + step_tokens - 1] = _step_rewards(groups)
    if token_rewards is not None:
        earned += _column("token_rewards", token_rewards, n_tokens)
    starts = {
        "trajectory": step_starts[np.cumsum(n_steps) - n_steps],
        "step": step_starts,
        "token": np.arange(n_tokens),
    }[config.unit]
    trained = np.ones(n_tokens) if mask is None else _column("mask", mask, n_tokens)
    starts = _with_trained(starts, trajectory, trained)
    lengths: Index = np.diff(np.append(starts, n_tokens))
    rewards, unit_trajectory = np.add.reduceat(earned, starts), trajectory[starts]
    found = config.estimator.estimate(
        Batch(
            rewards=rewards,
            returns=to_go(rewards, unit_trajectory, config.gamma),
            tokens=np.add.reduceat(trained, starts),
            trajectory=unit_trajectory,
            group=np.repeat(np.arange(len(groups)), [len(g.trajectories) for g in groups]),
            greedy=[g.metadata.get(GREEDY_REWARD) for g in groups],
            sources=[_source(g) for g in groups for _ in g.trajectories],
            parts=[mapping_in(t.metadata, EXTRA) for g in groups for t in g.trajectories],
            values=None if values is None else _column("values", values, n_tokens)[starts],
            baselines=baselines,
            gamma=config.gamma,
            lam=config.lam,
            scaled=config.whiten,
        ),
        config.adv_options,
    )
    per_token, targets = np.repeat(found.advantages, lengths), None
    if found.targets is not None:  # a unit's first token has its target
        targets = np.full(n_tokens, np.nan)
        targets[starts] = found.targets
        targets[trained == 0] = np.nan
    shown = per_token[trained != 0] if trained.any() else per_token
    spread = {"advantage/mean": float(shown.mean()), "advantage/std": float(shown.std())}
    return Estimate(per_token, targets, found.baselines, {**found.metrics, **spread})


def _with_trained(starts: Index, trajectory: Index, trained: Array) -> Index:
    """First tokens of the units of credit, [U]: a unit without a trained token is part of the one
    before it. A trajectory keeps its first unit, and one of which nothing is trained all.

    Args:
        starts: before that.
        trajectory: of each token, [T].
        trained: 0 on tokens that are not trained, [T].
    """
    of = trajectory[starts]
    has_trained = np.add.reduceat(trained, starts) > 0
    is_first = np.append(True, of[1:] != of[:-1])
    kept: Index = starts[has_trained | is_first | (np.bincount(of, has_trained)[of] == 0)]
    return kept


def _source(group: Group) -> str:
    return str(task_of(group).get("data_source") or "")


def _step_rewards(groups: Sequence[Group]) -> list[float]:
    """Reward of each step, [S]; one without a reward earns nothing."""
    rewards: list[float] = []
    for trajectory in (t for g in groups for t in g.trajectories):
        total = trajectory.reward
        if total is None or not math.isfinite(total):
            raise RewardError(
                f"trajectory {trajectory.trajectory_uid!r} of prompt {trajectory.prompt_uid!r} has "
                f"reward {total}; score it or abort it before it is trained on"
            )
        rewards += [s.reward or 0.0 for s in trajectory.steps]
    return rewards


def _column(name: str, column: Tensor, n_tokens: int) -> Array:
    if column.shape != (n_tokens,):
        raise ColumnError(f"{name} has shape {tuple(column.shape)} for {n_tokens} response tokens")
    return np.asarray(column.detach().double().cpu().numpy())
