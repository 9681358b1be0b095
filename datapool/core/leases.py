"""The book of leases: the groups that consumers hold, and until when.

    issue ──► active ──ack──► acked
                │ ├────nack──► nacked
                │ └──expire──► expired         an ended lease is remembered, so that a repeated
                └──renew──► active             call gets the same answer

Knows uids and times; the groups themselves are the channels'.
"""

from __future__ import annotations

from typing import Any, get_args

import msgspec
from msgspec.structs import asdict, replace

from stepwell.datapool import errors
from stepwell.datapool.codec import decoder, encoder
from stepwell.datapool.core import log_rows as rows
from stepwell.datapool.core.accounting import count_reason
from stepwell.datapool.core.group_log import RowLog
from stepwell.datapool.core.orders import KeyedOrder, NextTick
from stepwell.datapool.core.pictures import PictureReferences
from stepwell.datapool.core.records import Remembered


class LeaseCounts(msgspec.Struct):
    """Lease counts of one channel."""

    issued: int = 0
    ended: dict[rows.LeaseEnd, int] = msgspec.field(default_factory=lambda: dict.fromkeys(ENDS, 0))
    nack_reasons: dict[str, int] = {}


STATE = "leases"
"""The counts' name among the log's states."""
ENDS: tuple[rows.LeaseEnd, ...] = get_args(rows.LeaseEnd)
_State = tuple[int, dict[str, LeaseCounts]]
_state_decoder = decoder(_State)


class LeaseBook:
    """All leases of a pool."""

    def __init__(self, remembered: int, next_tick: NextTick, pictures: PictureReferences) -> None:
        self.log = RowLog(rows.POOL, remembered, pictures)
        self._next_tick = next_tick
        self.expiries: KeyedOrder[str] = KeyedOrder()
        self.n_issued = 0
        self._active: dict[str, rows.LeaseRecord] = {}
        self._requests: dict[str, str] = {}
        self._ended: Remembered[rows.LeaseEnd] = Remembered(remembered)
        self._counts: dict[str, LeaseCounts] = {}

    def issue(self, epoch: str, lease: rows.LeaseRecord, now: float) -> str:
        """A lease becomes active; the id that it is given."""
        self.n_issued += 1
        lease_id = f"{epoch}-{self.n_issued}"
        self._put(replace(lease, lease_id=lease_id), now)
        self._count(lease.channel).issued += 1
        return lease_id

    def answer_to(self, request_id: str | None) -> rows.LeaseRecord | None:
        """The active lease that a call of this id was given before."""
        lease_id = None if request_id is None else self._requests.get(request_id)
        return None if lease_id is None else self._active[lease_id]

    def get(self, lease_id: str, wanted: str) -> rows.LeaseRecord:
        """An active lease.

        Raises:
            UnknownLeaseError, LeaseExpiredError, LeaseClosedError: it cannot be `wanted`.
        """
        lease = self._active.get(lease_id)
        if lease is not None:
            return lease
        ended = self._ended.get(lease_id)
        if ended is None:
            raise errors.UnknownLeaseError(
                f"lease {lease_id!r} is unknown and cannot be {wanted}; it is not from this pool, "
                "or from before a restart: lease again"
            )
        if ended == "expired":
            raise errors.LeaseExpiredError(
                f"lease {lease_id!r} expired and cannot be {wanted}: its groups went back to the "
                "pool; raise lease_s, or renew the lease while working"
            )
        raise errors.LeaseClosedError(f"lease {lease_id!r} was {ended} and cannot be {wanted}")

    def active(self, channel: str | None = None) -> list[rows.LeaseRecord]:
        """Leases that somebody holds, the oldest first."""
        return [r for r in self._active.values() if channel in (None, r.channel)]

    def renew(self, lease_id: str, expires_at: float, now: float) -> None:
        lease = self.get(lease_id, "renewed")
        self.log.delete([lease.row])
        # Last among the active ones and among equal expiries, as its row in the log is.
        del self._active[lease_id]
        self.expiries.discard(lease_id)
        self._put(replace(lease, expires_at=expires_at, row=0), now)

    def end(
        self, lease_id: str, how: rows.LeaseEnd, now: float, reason: str | None = None
    ) -> rows.LeaseRecord | None:
        """The lease, ended; None if it ended the same way before. Raises as `get`."""
        if lease_id not in self._active and self._ended.get(lease_id) == how:
            return None
        lease = self.get(lease_id, how)
        del self._active[lease_id]
        self._requests.pop(lease.request_id or "", None)
        self.expiries.discard(lease_id)
        counts = self._count(lease.channel)
        counts.ended[how] += 1
        if reason is not None:
            count_reason(counts.nack_reasons, reason)
        self.log.delete([lease.row])
        ended = rows.LeaseEnded(lease_id, how)
        self._ended[lease_id] = how
        self.log.write_tombstone(ended, now)
        return lease

    def expire(self, now: float) -> rows.LeaseRecord | None:
        """End the lease that ran out first by `now`, if there is one."""
        first = self.expiries.first()
        if first is None or first[0] > now:
            return None
        return self.end(first[1], "expired", now)

    def statistics(self, channel: str) -> dict[str, Any]:
        counts = asdict(self._counts.get(channel, LeaseCounts()))
        return {
            "active": counts["issued"] - sum(counts["ended"].values()),
            **counts["ended"],
            "nack_reasons": dict(counts["nack_reasons"]),
        }

    # -- the log -----------------------------------------------------------------------------

    def state(self) -> bytes:
        """Return the counts, for the log."""
        return encoder.encode((self.n_issued, self._counts))

    def restore_counts(self, state: bytes) -> None:
        self.n_issued, self._counts = _state_decoder.decode(state)

    def restore(self, lease: rows.LeaseRecord) -> None:
        """A lease that is active."""
        self._active[lease.lease_id] = lease
        if lease.request_id is not None:
            self._requests[lease.request_id] = lease.lease_id
        self.expiries.set(lease.lease_id, lease.expires_at)
        self._next_tick.no_later_than(lease.expires_at)

    def restore_ended(self, ended: rows.LeaseEnded, row: int) -> None:
        self._ended[ended.lease_id] = ended.how
        self.log.keep_tombstone(ended, row)

    def recount(self, last: int, n_lost: int) -> None:
        """Make the counts those of the leases that are here, after rows of some were lost.

        Args:
            last: the highest number in the id of a lease that is known.
            n_lost: leases that may have been lost; ids go on behind them.
        """
        self.n_issued = max(self.n_issued, last) + n_lost
        for name in {*self._counts, *(lease.channel for lease in self._active.values())}:
            counts = self._count(name)
            known = sum(counts.ended.values()) + len(self.active(name))
            counts.ended["expired"] += max(0, counts.issued - known)
            counts.issued = max(counts.issued, known)

    # -- inside ------------------------------------------------------------------------------

    def _put(self, lease: rows.LeaseRecord, now: float) -> None:
        self.restore(replace(lease, row=self.log.append(lease, now, None) or 0))

    def _count(self, channel: str) -> LeaseCounts:
        self.log.is_changed = True
        return self._counts.setdefault(channel, LeaseCounts())
