"""The DataPool as a pure, synchronous state machine: channels of Steps, leases over their groups.

One operation is one state change, made whole or (with a typed error) not at all; `SubmitSteps` is
one per step. There is no Ray, no I/O and no clock in here: every operation comes with `now`, in
seconds, and equal operations give equal states, lease ids included. So a journal can stand between
the actor and this class, record the changes and replay them.

    producer ──SubmitSteps, CompleteTrajectory──► channel ──LeaseBatch──► consumer
                                                     ▲                       │ Ack: gone for good
                                                     └──Nack, expiry in tick─┘

    apply(op) ──► `_ANSWERS` of the pool, or `METHODS` of the channel named ──► answer, at once

Answers hold nothing that the pool changes later. What it leaves to `remote/`: waiting, waking up,
and calling `tick` at `next_tick`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import islice
from typing import Any, Final, TypeVar

import msgspec

from stepwell.datapool import ops
from stepwell.datapool import questions as asked
from stepwell.datapool.codec import PackedLease, PackedStep, decoder, encoder
from stepwell.datapool.config import PoolConfig
from stepwell.datapool.core.accounting import Counts
from stepwell.datapool.core.channel import METHODS, Channel
from stepwell.datapool.core.group_log import Departures
from stepwell.datapool.core.leases import STATE as LEASES
from stepwell.datapool.core.leases import LeaseBook
from stepwell.datapool.core.log_rows import GroupReturned, LeaseRecord, Log
from stepwell.datapool.core.orders import NextTick
from stepwell.datapool.core.pictures import PictureReferences
from stepwell.datapool.errors import InvalidRequestError
from stepwell.datapool.inspect.events import EventLog, Events
from stepwell.datapool.inspect.listing import listed
from stepwell.datapool.types import CHANNEL_BYTES, OWNER, TRAIN, VAL

R = TypeVar("R")

DAY_S = 86_400.0
COUNTS = "channel/"
_POOL = "pool"
"""Among the log's states: before a channel's name, its counts; and what is of the pool."""
_counts_decoder = decoder(Counts)


class DataPool:
    """All channels and all leases.

    Args:
        config: limits and defaults per channel.
        epoch: prefix of the lease ids. A pool that forgot its leases must get another one than
            before, or a consumer's stale id could name somebody else's lease.
        life: tells the events of this pool from those that it forgot in a restart; "" if it never
            restarts.
    """

    def __init__(
        self, config: PoolConfig | None = None, epoch: str = "lease", life: str = ""
    ) -> None:
        self.config = config or PoolConfig()
        self.epoch = epoch
        self._journal: Log | None = None
        picture_bytes = int(self.config.archive.max_gb * 1e9) // self.config.shards
        self.departures = Departures(self.config.backlog_bytes, picture_bytes)
        """Groups that left and wait to be archived."""
        self.events = EventLog(life or epoch)
        self.channels: dict[str, Channel] = {}
        self.next_tick = NextTick()
        """Time at which `tick` is to be called. Whoever needs it earlier says so."""
        self.may_spill = self.config.memory_limit_bytes is not None or any(
            c.overflow == "spill" for c in (self.config.default, *self.config.channels.values())
        )
        """True if `spill` is to be called when the log was flushed."""
        self.pictures = PictureReferences()
        self.leases = LeaseBook(self.config.remembered_uids, self.next_tick, self.pictures)
        self._shut_down = self._changed = False
        for name in (TRAIN, VAL, *self.config.channels):
            self.channel(name)

    def apply(self, op: ops.Op[R], now: float) -> R:
        """The answer to an operation or a question at `now`.

        Raises:
            DataPoolError: as the operation says; nothing is changed.
        """
        answer: Any
        if (own := _ANSWERS.get(type(op))) is not None:
            answer = own(self, op, now)
        else:
            name: str = op.channel  # type: ignore[attr-defined]  # all others have one
            channel = self.channels.get(name)
            if channel is None:  # asking about a channel does not make it
                make = self.channel if isinstance(op, ops.Change) else self._new_channel
                channel = make(name)
            channel.now = now
            answer = METHODS[type(op)](channel, op)
        result: R = answer
        return result

    # -- several channels --------------------------------------------------------------------

    def _open_group(self, op: ops.OpenGroup, now: float) -> ops.SubmitOutcome:
        channel = self._at(op.channel, now)
        if op.everywhere and not channel.is_declared(op.prompt_uid):
            for other in self.channels.values():
                if other.is_declared(op.prompt_uid):
                    other.check_group_owner(op)
        return channel.open_group(op)

    def _resume(self, op: ops.ResumeTrajectory, now: float) -> ops.Resumed:
        """Resume the trajectory in the channel where it is open, else where it was closed, else in
        the one that is asked for."""
        names = sorted(self.channels, key=lambda name: name != op.channel) if op.elsewhere else ()
        known = {n: self.channels[n].knows(op.trajectory_uid, op.prompt_uid) for n in names}
        for name in self.channels if OWNER in op.metadata else ():
            self.channels[name].check_owner(op)
        at_all = [n for state in ("open", "closed") for n in names if known[n] == state]
        return self._at((*at_all, op.channel)[0], now).resume_trajectory(op)

    def _delete(self, op: ops.Delete, now: float) -> ops.Deleted:
        found = ops.Deleted()
        for name in self.channels:
            if not found.more:
                found += self._at(name, now).delete(op)
        own = () if op.trajectory_uid is None else (op.trajectory_uid,)
        known = dict.fromkeys((*own, *found.trajectories, *found.leased))
        uids = self._delete_departed(known, op.tag, op.user)
        self.pictures.forget(op.trajectory_uid)
        live = {*found.trajectories, *found.leased}
        found = ops.Deleted(tuple(uid for uid in uids if uid not in live)) + found
        self.leases.log.scrub()  # also what was acked before
        return found

    def _delete_trajectory(self, op: ops.DeleteTrajectory, now: float) -> ops.Deleted:
        found = ops.Deleted()
        try:
            for name in self.channels:
                found += self._at(name, now).delete_trajectory(op)
            self.pictures.forget(op.trajectory_uid)
            if self._delete_departed((op.trajectory_uid,)) and found == ops.Deleted():
                found = ops.Deleted((op.trajectory_uid,))
        finally:
            self.leases.log.scrub()
        return found

    def _delete_departed(
        self, known: Collection[str], tag: str | None = None, user: str | None = None
    ) -> tuple[str, ...]:
        """Delete what waits to be archived of trajectories, with a tag, or of a user; with it goes
        what waits of its group, whose uids are returned."""
        uids, gone = self.departures.delete(known, tag, user)
        self.leases.log.delete(gone)
        return tuple(uids)

    # -- the archive -------------------------------------------------------------------------

    def _list_departed(self, op: asked.ListDeparted, now: float) -> asked.DepartedPage:
        departures, log = self.departures, self._journal
        found: list[asked.Departed] = []
        n_bytes = 0
        for departure in departures:
            if departure.row <= op.after:
                continue
            places = None if log is None else log.places(departure.rows)
            if n_bytes >= op.max_bytes or places is None:
                break
            found.append(asked.Departed(departure.row, departure.channel, places))
            n_bytes += departure.n_bytes
        return asked.DepartedPage(found, len(departures), departures.n_bytes)

    def _read_departed(self, op: asked.ReadDeparted, now: float) -> list[asked.DepartedRows]:
        found: list[asked.DepartedRows] = []
        if (log := self._journal) is None:
            return found
        groups = [(d.channel, d.rows) for d in self.departures.of(op.uid)]
        for name, channel in self.channels.items():
            record = channel.records.trajectories.get(op.uid)
            if record is not None and record.closing is not None and not record.is_complete:
                groups.append((name, channel.records.groups[record.prompt_uid].rows))
        for name, numbers in groups:
            both = zip(numbers, log.heads(numbers), log.read(numbers), strict=True)
            rows = [(row, kind, head, payload) for row, (kind, head), payload in both]
            found.append(asked.DepartedRows(name, rows))
        return found

    def _release_departed(self, op: ops.ReleaseDeparted, now: float) -> None:
        self.leases.log.delete(self.departures.release(op.through, unarchived=op.unarchived))

    @property
    def backlog(self) -> dict[str, int]:
        """Counts of what waits to be archived, and of what left unarchived."""
        departures = self.departures
        return {
            "waiting": len(departures),
            "waiting_bytes": departures.n_bytes,
            "unarchived": departures.n_unarchived,
        }

    # -- consumers ---------------------------------------------------------------------------

    def _lease(self, op: ops.LeaseBatch, now: float) -> PackedLease | ops.NoLease:
        source = self._at(op.channel, now)
        before = self.leases.answer_to(op.request_id)
        if before is not None:
            again = [source.leased(uid) for uid in before.prompt_uids]
            return PackedLease(before.lease_id, op.channel, again, before.expires_at)
        chosen = source.choose(op.n_rollouts, op.batch_size)
        if not chosen:
            return "shut_down" if source.counts.shut_down else "nothing_yet"
        groups = source.take(chosen, op.n_rollouts)
        expires_at = now + (op.lease_s or source.config.lease_s)
        lease = LeaseRecord("", op.channel, tuple(chosen), expires_at, op.request_id)
        lease_id = self.leases.issue(self.epoch, lease, now)
        return PackedLease(lease_id, op.channel, groups, expires_at)

    def _ack(self, op: ops.Ack, now: float) -> None:
        lease = self.leases.end(op.lease_id, "acked", now)
        if lease is not None:
            channel = self._at(lease.channel, now)
            for prompt_uid in lease.prompt_uids:
                channel.ack(prompt_uid)

    def _nack(self, op: ops.Nack, now: float) -> None:
        lease = self.leases.end(op.lease_id, "nacked", now, op.reason or "unspecified")
        if lease is not None:
            self._give_back(lease, now)

    def _renew(self, op: ops.Renew, now: float) -> float:
        channel = self.channel(self.leases.get(op.lease_id, "renewed").channel)
        expires_at = now + (op.lease_s or channel.config.lease_s)
        self.leases.renew(op.lease_id, expires_at, now)
        return expires_at

    def _release_leases(self, op: ops.ReleaseLeases, now: float) -> int:
        active = self.leases.active(op.channel)
        for lease in active:
            self._nack(ops.Nack(lease.lease_id, op.reason), now)
        return len(active)

    def _give_back(self, lease: LeaseRecord, now: float) -> None:
        channel = self._at(lease.channel, now)
        # In reverse, because each goes to the front: the order stays as it was.
        for prompt_uid in reversed(lease.prompt_uids):
            channel.give_back(GroupReturned(prompt_uid))

    # -- time and end ------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Do what is due by `now`: expire leases, then look again at groups whose alarm
        rings. If that is a lot, some is left, and `next_tick` is in the past."""
        while (lease := self.leases.expire(now)) is not None:
            self._give_back(lease, now)
        for name in self.channels:
            self._at(name, now).expire()
        self.pictures.expire(now)
        deadline = self.next_deadline()
        self.next_tick.at = math.inf if deadline is None else deadline

    def next_deadline(self) -> float | None:
        """Return when `tick` next has something to do; None: never."""
        first = self.leases.expiries.first()
        times = [first and first[0], *(c.next_alarm for c in self.channels.values())]
        times.append(self.pictures.next_expiry)
        return min((at for at in times if at is not None), default=None)

    def _close(self, op: ops.Shutdown, now: float) -> None:
        self._shut(True, op.channel)

    def reopen(self) -> None:
        """Undo every `Shutdown`: what a new run does that starts from the old one's journal."""
        self._shut(False, None)

    def _shut(self, shut_down: bool, channel: str | None) -> None:
        if channel is None:
            self._shut_down, self._changed = shut_down, True
        for target in self.channels.values() if channel is None else [self.channel(channel)]:
            target.counts.shut_down, target.log.is_changed = shut_down, True

    def is_shut_down(self, channel: str) -> bool:
        known = self.channels.get(channel)
        return self._shut_down if known is None else known.counts.shut_down

    # -- questions ---------------------------------------------------------------------------

    def _statistics(self, op: asked.GetStatistics, now: float) -> dict[str, Any]:
        def of(name: str) -> dict[str, Any]:
            return self._seen(name, now).statistics() | {"leases": self.leases.statistics(name)}

        return {name: of(name) for name in self.channels} if op.channel is None else of(op.channel)

    def _events(self, op: asked.GetEvents, now: float) -> Events:
        return self.events.after(op.cursor, op.channel, op.kinds, op.limit)

    def _list(self, op: asked.Listing[R], now: float) -> R:
        page: R = listed(self._seen(op.channel, now), self.epoch, op)
        return page

    def _read_ends(self, op: asked.ReadEnds, now: float) -> dict[str, list[PackedStep]]:
        channel = self._seen(op.channel, now)
        found: dict[str, list[PackedStep]] = {}
        for uid in op.uids:
            group = channel.records.groups.get(uid)
            of = channel.records.trajectories.get(uid)
            records = group.trajectories if group is not None else [] if of is None else [of]
            steps = next((record.steps for record in records if record.steps), [])
            ends = channel.steps.loaded([*steps[:1], *steps[1:][-1:]])
            found[uid] = [PackedStep(None, step.payload) for step in ends]
        return {uid: ends for uid, ends in found.items() if ends}

    def _find_uids(self, op: asked.FindUids, now: float) -> list[asked.FoundUid]:
        return list(islice(self._uids_beginning(op.start), op.limit))

    def _uids_beginning(self, start: str) -> Iterator[asked.FoundUid]:
        for name, channel in self.channels.items():
            for uid in channel.records.groups:
                if uid.startswith(start):
                    yield asked.FoundUid(name, uid, None)
            for uid, record in channel.records.trajectories.items():
                if uid.startswith(start) and not record.is_deleted:
                    yield asked.FoundUid(name, record.prompt_uid, uid)
        for left in self.departures:
            if left.prompt_uid.startswith(start):
                yield asked.FoundUid(left.channel, left.prompt_uid, None)
            for uid in left.trajectory_uids:
                if uid.startswith(start):
                    yield asked.FoundUid(left.channel, left.prompt_uid, uid)

    # -- memory and the log ------------------------------------------------------------------

    @property
    def memory_bytes(self) -> int:
        """Payloads and prompts in memory."""
        return sum(channel.memory_bytes for channel in self.channels.values())

    def attach(self, log: Log) -> None:
        """Write every change down from now on, and read payloads back that are only there."""
        self._journal = self.leases.log.journal = log
        for channel in self.channels.values():
            channel.log.journal = log
        if not self.departures.has_archive and len(self.departures):  # it was turned off
            gone = self.departures.release(max(d.row for d in self.departures))
            self.leases.log.delete(gone)

    def write_counts(self) -> None:
        """Put the counts that changed into the log. Before a flush."""
        if (log := self._journal) is None:
            return
        for channel in self.channels.values():
            if channel.log.is_changed:
                channel.log.is_changed = False
                log.put_state(COUNTS + channel.name, encoder.encode(channel.counts))
        if self.leases.log.is_changed:
            self.leases.log.is_changed = False
            log.put_state(LEASES, self.leases.state())
        if self._changed:
            self._changed = False
            log.put_state(_POOL, encoder.encode(self._shut_down))

    def restore_counts(self, key: str, state: bytes) -> None:
        """Restore the counts that `write_counts` wrote under this key."""
        if key.startswith(COUNTS):
            self.channel(key.removeprefix(COUNTS)).counts = _counts_decoder.decode(state)
        elif key == LEASES:
            self.leases.restore_counts(state)
        elif key == _POOL:
            self._shut_down = msgspec.msgpack.decode(state, type=bool)

    def spill(self) -> None:
        """Let payloads beyond the memory limits live in the log alone, now that it was flushed."""
        limit = self.config.memory_limit_bytes
        total = self.memory_bytes
        for channel in self.channels.values():
            over = None if limit is None or total <= limit else channel.memory_bytes - total + limit
            before = channel.memory_bytes
            channel.spill(over)
            total += channel.memory_bytes - before

    # -- channels ----------------------------------------------------------------------------

    def channel(self, name: str) -> Channel:
        """The channel of this name, made if there is none."""
        channel = self.channels.get(name)
        if channel is None:
            channel = self.channels[name] = self._new_channel(name)
        return channel

    def _new_channel(self, name: str) -> Channel:
        if len(name.encode(errors="surrogatepass")) >= CHANNEL_BYTES:
            raise InvalidRequestError(
                f"channel is {name!r:.80}, of {len(name)} characters; pass a name of fewer than "
                f"{CHANNEL_BYTES} bytes"
            )
        days = self.config.retention_days
        retention_s = None if days is None else days * DAY_S
        config = self.config.channel(name)
        channel = Channel(
            name,
            config,
            self.config.remembered_uids,
            self.events,
            retention_s,
            self.next_tick,
            self.may_spill,
            self.departures,
            self.pictures,
        )
        channel.log.journal = self._journal
        channel.counts.shut_down = self._shut_down
        return channel

    def _at(self, name: str, now: float) -> Channel:
        """The channel, with its clock set."""
        channel = self.channel(name)
        channel.now = now
        return channel

    def _seen(self, name: str, now: float) -> Channel:
        """The same, and it is not made if there is none."""
        channel = self.channels.get(name) or self._new_channel(name)
        channel.now = now
        return channel


_ANSWERS: Final[Mapping[type, Callable[[DataPool, Any, float], Any]]] = {
    ops.OpenGroup: DataPool._open_group,
    ops.ResumeTrajectory: DataPool._resume,
    ops.Delete: DataPool._delete,
    ops.DeleteTrajectory: DataPool._delete_trajectory,
    ops.LeaseBatch: DataPool._lease,
    ops.Ack: DataPool._ack,
    ops.Nack: DataPool._nack,
    ops.Renew: DataPool._renew,
    ops.ReleaseLeases: DataPool._release_leases,
    ops.Shutdown: DataPool._close,
    ops.ReleaseDeparted: DataPool._release_departed,
    asked.ListDeparted: DataPool._list_departed,
    asked.ReadDeparted: DataPool._read_departed,
    asked.FindUids: DataPool._find_uids,
    asked.GetStatistics: DataPool._statistics,
    asked.GetEvents: DataPool._events,
    asked.ListGroups: DataPool._list,
    asked.ListTrajectories: DataPool._list,
    asked.IndexTrajectories: DataPool._list,
    asked.ReadTrajectories: DataPool._list,
    asked.ReadEnds: DataPool._read_ends,
}
"""Method for each operation or question that is not about one channel alone; `METHODS` has the
others."""
