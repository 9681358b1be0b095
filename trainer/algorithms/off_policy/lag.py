"""Lag: publications between the policy that sampled a step and the policy of now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from stepwell.trainer.errors import VersionError


def lags(
    policy_versions: Sequence[int],
    published_at: Mapping[int, int],
    *,
    updates_now: int,
    updates_per_sync: int,
) -> Tensor:
    """Lag of each step, [S] float32, in publications: 0 = sampled by the weights of now.

    Args:
        policy_versions: the oldest version of each step.
        published_at: version -> updates applied when it was published. A version older
            than all of them (published before a resume) counts one sync per version further back.

    Raises:
        VersionError: a version that was never published; its step's origin is not what it says.
    """
    if not published_at:
        raise VersionError("published_at is empty; record version 0 at update 0 before training")
    oldest = min(published_at)

    def updates_at(version: int) -> int:
        if version in published_at:
            return published_at[version]
        if version < oldest:
            return published_at[oldest] - (oldest - version) * updates_per_sync
        raise VersionError(
            f"a step carries policy_version {version}, but the versions published are "
            f"{oldest}..{max(published_at)}; check the engine's weight_version"
        )

    return torch.tensor(
        [(updates_now - updates_at(v)) / updates_per_sync for v in policy_versions],
        dtype=torch.float32,
    )
