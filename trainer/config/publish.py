"""The section `publish`: how a new version is let into traffic (`trainer/publish/`)."""

from __future__ import annotations

from pydantic import Field

from stepwell.datapool.config import Section


class GuardConfig(Section):
    """A version whose rewards fall below those of the version before is rolled back. The next one
    is published when this one has been judged."""

    n: int = Field(default=64, ge=8)
    """Rewards that a version is judged by."""
    z: float = Field(default=3.0, gt=0)
    """It is rolled back when its mean lies lower by more than `z` standard errors of the
    difference. Rewards of one prompt are not independent: the error is that of means of prompts."""
    channel: str = Field(default="train", min_length=1)
    """Channel whose rewards count: `train`, or `val` for held-out traffic (`gateway.holdout`)."""
    wait_s: float = Field(default=600.0, gt=0)
    """A version that has fewer rewards after this stays, unjudged."""


class PublishConfig(Section):
    guard: GuardConfig | None = None
    """Rolls bad versions back; null = nobody looks."""
    canary_share: float | None = Field(default=0.2, gt=0, lt=1)
    """With a guard and two engines or more, a version goes to one engine first, which gets this
    share of new trajectories; null = to all engines at once."""
