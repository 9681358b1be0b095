"""The `data_pool` section of a run's configuration: limits and defaults per channel.

Owned by the DataPool, composed into `RunConfig` by the trainer. No other package reads it.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ChannelConfig(_Section):
    """Limits and defaults of one channel."""

    n_rollouts: int = Field(default=1, ge=1)
    """Complete trajectories that make an *undeclared* group ready. A group declared with
    `open_group` has its own number; a fetch may ask for another one."""

    max_queue_size: int | None = Field(default=None, ge=1)
    """Ready groups kept before the oldest ready one is dropped; null = unlimited."""

    max_outstanding_groups: int | None = Field(default=None, ge=1)
    """Open + ready groups beyond which `open_group` waits: how far generation may run ahead of
    the consumer; null = unlimited. Steps are never refused."""

    group_deadline_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Seconds from a group's first sight until it is served with what is complete, or dropped if
    that is less than its `min_rollouts`. `open_group(deadline_s=…)` overrides it; null = never."""

    lease_s: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """Seconds a consumer may hold a lease before its groups are given to the next one. Longer
    than the slowest training step plus checkpoint, or renew the lease."""


class PoolConfig(_Section):
    """The DataPool: a default for every channel, and channels that differ."""

    default: ChannelConfig = ChannelConfig()
    """Used by every channel that is not named in `channels`."""

    channels: dict[str, ChannelConfig] = Field(default_factory=dict)
    """Channels with limits of their own, for instance `val: {n_rollouts: 4}`. A channel named
    here takes nothing from `default`."""

    remembered_uids: int = Field(default=1_000_000, ge=0)
    """Uids of closed trajectories, groups and leases remembered (of each, per channel) so that a
    late or repeated call gets its right answer and revives nothing. About 0.3 kB each."""

    def channel(self, name: str) -> ChannelConfig:
        """The configuration of channel `name`."""
        return self.channels.get(name, self.default)
