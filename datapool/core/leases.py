"""Who holds which groups, and until when: the book of leases.

    issue ──► active ──ack──► acked
                │ ├────nack──► nacked
                │ └──expire──► expired         an ended lease is remembered, so that a repeated
                └──renew──► active             call gets the same answer

Knows uids and times; the groups themselves are the channels'.
"""

from __future__ import annotations

import pickle
from collections import Counter, deque
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

from stepwell.datapool.core.heap import KeyedHeap
from stepwell.datapool.core.records import Log, Reasons, Remembered
from stepwell.datapool.errors import (
    DataPoolError,
    LeaseClosedError,
    LeaseExpiredError,
    UnknownLeaseError,
)

LeaseEnd: TypeAlias = Literal["acked", "nacked", "expired"]

POOL = ""
"""Rows of the log that belong to no channel."""


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """A lease that somebody holds."""

    lease_id: str
    channel: str
    prompt_uids: tuple[str, ...]
    expires_at: float
    request_id: str | None = None
    """Of the call that it answers; repeated, the call gets the same lease."""
    row: int = 0
    """Of the log."""


class LeaseBook:
    """All leases of a pool.

    Args:
        remembered: ended leases that are remembered.
    """

    def __init__(self, remembered: int) -> None:
        self.expiries: KeyedHeap[str] = KeyedHeap()
        self.n_issued = 0
        self.log: Log | None = None
        """Where leases are written down."""
        self._active: dict[str, LeaseRecord] = {}
        self._requests: dict[str, str] = {}
        self._ended: Remembered[LeaseEnd] = Remembered(remembered)
        self._ended_rows: deque[int] = deque()
        self._remembered = remembered
        self._counts: dict[str, Counter[str]] = {}
        self._nack_reasons: dict[str, Reasons] = {}
        self._changed = False

    def issue(
        self,
        epoch: str,
        channel: str,
        prompt_uids: list[str],
        expires_at: float,
        request_id: str | None = None,
    ) -> str:
        """A new lease; its id."""
        self.n_issued += 1
        lease_id = f"{epoch}-{self.n_issued}"
        self._put(LeaseRecord(lease_id, channel, tuple(prompt_uids), expires_at, request_id))
        self._count(channel)["issued"] += 1
        return lease_id

    def answer_to(self, request_id: str | None) -> LeaseRecord | None:
        """The active lease that a call of this id was given before."""
        lease_id = None if request_id is None else self._requests.get(request_id)
        return None if lease_id is None else self._active[lease_id]

    def get(self, lease_id: str, wanted: str) -> LeaseRecord:
        """An active lease.

        Raises:
            UnknownLeaseError, LeaseExpiredError, LeaseClosedError: it cannot be `wanted`.
        """
        lease = self._active.get(lease_id)
        if lease is None:
            raise self._no_lease(lease_id, wanted)
        return lease

    def active(self, channel: str | None = None) -> list[LeaseRecord]:
        """Leases that somebody holds, the oldest first."""
        return [r for r in self._active.values() if channel in (None, r.channel)]

    def renew(self, lease_id: str, expires_at: float) -> None:
        lease = self.get(lease_id, "renewed")
        if self.log is not None:
            self.log.delete([lease.row])
        # Last among the active ones and among equal expiries, as its row in the log is.
        del self._active[lease_id]
        self.expiries.discard(lease_id)
        self._put(replace(lease, expires_at=expires_at))

    def end(self, lease_id: str, how: LeaseEnd, reason: str | None = None) -> LeaseRecord | None:
        """The lease, ended; None if it ended the same way before. Raises as `get`."""
        if lease_id not in self._active and self._ended.get(lease_id) == how:
            return None
        lease = self.get(lease_id, how)
        del self._active[lease_id]
        self._requests.pop(lease.request_id or "", None)
        self.expiries.discard(lease_id)
        self._count(lease.channel)[how] += 1
        if reason is not None:
            self._nack_reasons.setdefault(lease.channel, Reasons()).add(reason)
        self._ended.put(lease_id, how)
        if self.log is not None:
            self.log.delete([lease.row])
            self._keep_row(self.log.append(POOL, "ended", pickle.dumps((lease_id, how))))
        return lease

    def expire(self, now: float) -> LeaseRecord | None:
        """End the lease that ran out first by `now`, if there is one."""
        first = self.expiries.first()
        if first is None or first[0] > now:
            return None
        return self.end(first[1], "expired")

    def statistics(self, channel: str) -> dict[str, Any]:
        counts = self._counts.get(channel, Counter())
        ends = {end: counts[end] for end in get_args(LeaseEnd)}
        reasons = self._nack_reasons.get(channel)
        return {
            "active": counts["issued"] - sum(ends.values()),
            **ends,
            "nack_reasons": dict(reasons.counts) if reasons else {},
        }

    # -- the log -----------------------------------------------------------------------------

    def write_counts(self) -> None:
        """Put the counts into the log, if they changed."""
        if self._changed and self.log is not None:
            self._changed = False
            state = (self.n_issued, self._counts, self._nack_reasons)
            self.log.put_state("leases", pickle.dumps(state, protocol=5))

    def restore_counts(self, state: bytes) -> None:
        self.n_issued, self._counts, self._nack_reasons = pickle.loads(state)

    def restore(self, lease: LeaseRecord) -> None:
        """A lease that was active."""
        self._active[lease.lease_id] = lease
        if lease.request_id is not None:
            self._requests[lease.request_id] = lease.lease_id
        self.expiries.set(lease.lease_id, lease.expires_at)

    def restore_ended(self, lease_id: str, how: LeaseEnd, row: int) -> None:
        self._ended.put(lease_id, how)
        self._keep_row(row)

    # -- inside ------------------------------------------------------------------------------

    def _put(self, lease: LeaseRecord) -> None:
        if self.log is not None:
            head = (
                lease.lease_id,
                lease.channel,
                lease.prompt_uids,
                lease.expires_at,
                lease.request_id,
            )
            lease = replace(lease, row=self.log.append(POOL, "lease", pickle.dumps(head)))
        self.restore(lease)

    def _keep_row(self, row: int) -> None:
        self._ended_rows.append(row)
        if self.log is not None and len(self._ended_rows) > self._remembered:
            self.log.delete([self._ended_rows.popleft()])

    def _count(self, channel: str) -> Counter[str]:
        self._changed = True
        return self._counts.setdefault(channel, Counter())

    def _no_lease(self, lease_id: str, wanted: str) -> DataPoolError:
        ended = self._ended.get(lease_id)
        if ended is None:
            return UnknownLeaseError(
                f"lease {lease_id!r} is unknown and cannot be {wanted}; it is not from this pool, "
                "or from before a restart: lease again"
            )
        if ended == "expired":
            return LeaseExpiredError(
                f"lease {lease_id!r} expired and cannot be {wanted}: its groups went back to the "
                "pool; raise lease_s, or renew the lease while working"
            )
        return LeaseClosedError(f"lease {lease_id!r} was {ended} and cannot be {wanted}")
