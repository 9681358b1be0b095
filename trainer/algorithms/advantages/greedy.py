"""ReMax: the reward of one greedy rollout of the prompt is the baseline.

    A = G - reward of the greedy rollout

A group of one has its baseline, unlike elsewhere. verl's is that of credit "step": process rewards
to go, minus the whole greedy reward.

Source: ReMax, arXiv:2310.10505.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

from stepwell.datapool.types import GREEDY, Group
from stepwell.trainer.algorithms.advantages.base import Array, Estimator, Returns, of_group
from stepwell.trainer.errors import RewardError

log = logging.getLogger(__name__)

GREEDY_REWARD = "greedy_reward"
"""Key of a group's metadata: that rollout's reward, once it has been taken out (`baselined`)."""


def remax(r: Returns) -> Array:
    """The greedy rollout's reward as the baseline."""
    if r.greedy is None:
        raise RewardError("a group has no greedy reward; pass groups through baselined() first")
    return r.values - r.greedy


REMAX = of_group(remax, greedy=True)


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
