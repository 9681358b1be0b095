"""What a channel may hold: credit and room for new groups, the oldest out beyond the limits, and
the age at which tokens are too old.

    max_outstanding_groups, max_ahead_versions   a declared group waits for credit
    max_queue_size, max_bytes   block            any new group waits for room
                                drop_oldest      the oldest group goes
    memory_limit_bytes, spill                    payloads leave memory
    max_staleness                                a group is dropped when somebody would take it

Refuses and drops; waiting is the caller's.
"""

from __future__ import annotations

from itertools import islice

from stepwell.datapool.core.groups import Groups
from stepwell.datapool.core.records import GroupRecord
from stepwell.datapool.errors import PoolFullError
from stepwell.datapool.ops import AdvanceVersion
from stepwell.datapool.questions import Credit, WaitCredit, WaitForRoom
from stepwell.datapool.selection import STALE

MAX_QUEUE_SIZE = "max_queue_size"
MAX_BYTES = "max_bytes"


class Limits(Groups):
    """See the module."""

    def credit(self, op: WaitCredit) -> Credit:
        """How much of each limit that `OpenGroup` waits for is used."""
        return Credit(self._used(), op.prompt_uid in self.prompt_groups, self.counts.shut_down)

    def _used(self, freed: int = 0) -> dict[str, tuple[int, int]]:
        """By limit, in the order in which they are looked at: how much of it is used, once so many
        more groups are dropped, and what it is. What is not limited is missing."""
        config, counts = self.config, self.counts
        used: dict[str, tuple[int, int]] = {}
        if config.max_outstanding_groups is not None:
            outstanding = len(self._open) + self.n_ready - len(self._held) - freed
            used["max_outstanding_groups"] = outstanding, config.max_outstanding_groups
        if config.max_ahead_versions is not None and config.groups_per_version is not None:
            versions = counts.version - (counts.first_version or 0) + 1 + config.max_ahead_versions
            started = counts.groups.submitted - counts.groups.dropped - freed
            used["max_ahead_versions"] = started, versions * config.groups_per_version
        if config.overflow == "block" and config.max_queue_size is not None:
            used[MAX_QUEUE_SIZE] = self.n_ready - freed, config.max_queue_size
        if config.overflow == "block" and config.max_bytes is not None:
            used[MAX_BYTES] = self.memory_bytes, config.max_bytes
        return used

    def _no_credit(self, freed: int = 0) -> str | None:
        """Why `OpenGroup` has to wait; None if it would be admitted now, or once so many more
        groups are dropped."""
        for name, (used, limit) in self._used(freed).items():
            if used >= limit:
                return self._describe(name, used, limit)
        return None

    def _no_room(self) -> str | None:
        """Why no group can begin at all, opened or with a first step; None if one can."""
        if self.config.overflow != "block":
            return None
        used = self._used()
        for name in (MAX_QUEUE_SIZE, MAX_BYTES):
            if name in used and used[name][0] >= used[name][1]:
                return self._describe(name, *used[name])
        return None

    def _describe(self, name: str, used: int, limit: int) -> str:
        """For messages."""
        if name == "max_ahead_versions":
            config = self.config
            return (
                f"has started all groups that policy version {self.counts.version} allows "
                f"(max_ahead_versions={config.max_ahead_versions}, "
                f"groups_per_version={config.groups_per_version})"
            )
        if name == MAX_QUEUE_SIZE:
            return f"holds {name}={limit} ready groups and blocks"
        if name == MAX_BYTES:
            return f"holds {used} bytes, {name}={limit}, and blocks"
        return f"holds {name}={limit} open and ready groups"

    def check_room(self, _: WaitForRoom) -> None:
        """Raises PoolFullError if a step of a new group would be refused now."""
        if (full := self._no_room()) is not None:
            raise PoolFullError(f"channel {self.name!r} {full}; try again once something is leased")

    def more_may_come(self, n_dropped: int = 0) -> bool:
        """Whether another group may still become ready, or could after so many drops."""
        return bool(self._open) or not (self.counts.shut_down or self._no_credit(n_dropped))

    def advance_version(self, op: AdvanceVersion) -> None:
        """Versions never go back."""
        counts = self.counts
        if counts.first_version is None:
            # A pool that starts with a later version owes nothing for those before.
            counts.first_version = 0 if counts.groups.submitted else op.version
        counts.version = max(counts.version, op.version)
        self.changed = True

    # -- what is too much --------------------------------------------------------------------

    def _trim(self, sparing: str = "") -> None:
        """Drop the oldest groups while the channel holds more than it may: ready ones, and where
        none is left and only bytes matter, open ones."""
        config = self.config
        if config.overflow == "block" or self.replaying:
            return
        while config.max_queue_size is not None and self.n_ready > config.max_queue_size:
            self._drop(next(iter(self._ready.values())), MAX_QUEUE_SIZE)
        if config.max_bytes is None or config.overflow == "spill":
            return
        while self.memory_bytes > config.max_bytes:
            others = (g for g in islice(self._open.values(), 2) if g.prompt_uid != sparing)
            oldest = next(iter(self._ready.values()), None) or next(others, None)
            if oldest is None:
                return
            self._drop(oldest, MAX_BYTES)

    def written(self, limit: int | None) -> None:
        """The log was flushed: payloads that came since may leave memory, beyond the limits.

        Args:
            limit: bytes that this channel may keep in memory by the pool's account; None: any.
        """
        config = self.config
        if config.overflow == "spill" and config.max_bytes is not None:
            limit = min(config.max_bytes, config.max_bytes if limit is None else limit)
        self.payloads.written(limit)

    # -- what is too old ---------------------------------------------------------------------

    def is_stale(self, group: GroupRecord) -> bool:
        """Whether its oldest token is too old for it to be served."""
        limit, oldest = self.config.max_staleness, group.oldest_version
        return limit is not None and oldest is not None and oldest < self.counts.version - limit

    def _is_fresh(self, group: GroupRecord) -> bool:
        """Whether its oldest token is young enough. Otherwise it is dropped."""
        if not self.is_stale(group):
            return True
        self._drop(group, STALE, returned=self.config.on_stale == "return")
        return False

    def _drop_stale(self) -> None:
        while (oldest := self._ready_versions.first()) is not None:
            if self._is_fresh(self.prompt_groups[oldest[1]]):
                return
