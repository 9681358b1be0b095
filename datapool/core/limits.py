"""The limits on a channel's groups, and the reason why a new one has to wait.

    max_outstanding_groups, max_ahead_versions   a declared group waits for credit
    max_queue_size, max_bytes   block            any new group waits for room
                                drop_oldest      the oldest group goes
    memory_limit_bytes, spill                    payloads leave memory
    max_staleness                                a group is dropped when somebody would take it

Refuses; waiting is the caller's, and dropping the channel's.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from stepwell.datapool.config import ChannelConfig
from stepwell.datapool.core.accounting import Counts

MAX_QUEUE_SIZE: Final = "max_queue_size"
MAX_BYTES: Final = "max_bytes"
NO_LIMIT: Final = 2**63 - 1
"""A limit that holds later; one that a channel never has is left out."""

_FULL: Final = {
    "max_outstanding_groups": "holds max_outstanding_groups={limit} open and ready groups",
    "max_ahead_versions": "has started all groups that policy version {version} allows "
    "(max_ahead_versions={config.max_ahead_versions}, "
    "groups_per_version={config.groups_per_version})",
    MAX_QUEUE_SIZE: "holds max_queue_size={limit} ready groups and blocks",
    MAX_BYTES: "holds {used} bytes, max_bytes={limit}, and blocks",
}


class Load(NamedTuple):
    """The load of a channel, which its limits are compared with."""

    n_open: int
    n_ready: int
    """Held ones, too."""
    n_held: int
    n_bytes: int
    """Payloads in memory, and pictures, each once."""
    has_consumer: bool


def is_limited(config: ChannelConfig) -> bool:
    """Return whether a new group may have to wait."""
    blocks = config.overflow == "block" and (config.max_queue_size or config.max_bytes)
    ahead = config.max_ahead_versions is not None
    return bool(blocks or ahead or config.max_outstanding_groups is not None)


def used(config: ChannelConfig, counts: Counts, load: Load) -> dict[str, tuple[int, int]]:
    """Return by limit, in the order in which they are looked at, how much of it is used and what it
    is. What is not limited is missing."""
    found: dict[str, tuple[int, int]] = {}
    if (most := config.max_outstanding_groups) is not None:
        if not (config.limit_without_consumer or load.has_consumer):
            most = NO_LIMIT
        found["max_outstanding_groups"] = load.n_open + load.n_ready - load.n_held, most
    if config.max_ahead_versions is not None and config.groups_per_version is not None:
        versions = counts.version - (counts.first_version or 0) + 1 + config.max_ahead_versions
        started = counts.groups.submitted - counts.groups.dropped
        found["max_ahead_versions"] = started, versions * config.groups_per_version
    if config.overflow == "block" and config.max_queue_size is not None:
        found[MAX_QUEUE_SIZE] = load.n_ready, config.max_queue_size
    if config.overflow == "block" and config.max_bytes is not None:
        found[MAX_BYTES] = load.n_bytes, config.max_bytes
    return found


def why_full(config: ChannelConfig, counts: Counts, load: Load, *names: str) -> str | None:
    """Return which of these limits (none named: of all) is reached, so that a new group waits."""
    for name, (n_used, limit) in used(config, counts, load).items():
        if n_used >= limit and (not names or name in names):
            return _FULL[name].format(
                used=n_used, limit=limit, version=counts.version, config=config
            )
    return None
