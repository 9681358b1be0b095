"""The DataPool as a pure, synchronous state machine: channels of Steps, leases over their groups.

One call is one state change, made whole or (with a typed error) not at all; `submit_steps` is
one per step. There is no Ray, no I/O and no clock in here: every change takes `now`, in seconds,
and equal calls give equal states, lease ids included. So a journal can stand between the actor
and this class, record the calls and replay them.

    producer ──submit, complete──► channel ──lease_batch──► consumer
                                      ▲                        │ ack: gone for good
                                      └──nack, expiry in tick──┘

What it leaves to `actor.py`: waiting, waking up, and calling `tick` when `next_deadline` comes.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from stepwell.datapool.codec import PackedLease, PackedStep, pack
from stepwell.datapool.config import PoolConfig, SelectionConfig
from stepwell.datapool.core.channel import Channel, Load
from stepwell.datapool.core.leases import LeaseBook, LeaseRecord
from stepwell.datapool.core.records import (
    Deleted,
    GroupTerms,
    Log,
    Resumed,
    SubmitOutcome,
    TrajectoryOutcome,
)
from stepwell.datapool.errors import (
    DataPoolError,
    InvalidRequestError,
    InvalidStepError,
    UnknownBaseError,
)
from stepwell.datapool.inspect.events import EventLog
from stepwell.datapool.inspect.listing import (
    list_groups,
    list_steps,
    list_steps_with_tokens,
    list_trajectories,
    read_trajectories,
)
from stepwell.datapool.inspect.rows import ExportedPage, GroupRow, Page, StepRow, TrajectoryRow
from stepwell.datapool.selection import DryRun, Marks, Selection
from stepwell.datapool.types import MAX_REWARD, TRAIN, VAL, Lease, Step, is_reward

DAY_S = 86_400.0


class Credit(NamedTuple):
    """What a channel has of that which a new group needs."""

    used: dict[str, tuple[int, int]]
    """Limit by name: how much of it is used, and what it is."""
    is_known: bool
    """The group asked about is in the channel, and needs no credit."""
    shut_down: bool

    def is_freer(self, before: Mapping[str, tuple[int, int]]) -> bool:
        """Whether less of a limit is used than before, or more is allowed."""
        return any(
            name in before and (used < before[name][0] or limit > before[name][1])
            for name, (used, limit) in self.used.items()
        )


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
        self.log: Log | None = None
        self.events = EventLog(life or epoch)
        self.channels: dict[str, Channel] = {}
        self.leases = LeaseBook(self.config.remembered_uids)
        self._load: Load | None = None
        self._shut_down = self._changed = False
        for name in (TRAIN, VAL, *self.config.channels):
            self.channel(name)

    # -- producers ---------------------------------------------------------------------------

    def open_group(
        self,
        prompt_uid: str,
        n_rollouts: int,
        deadline_s: float | None = None,
        min_rollouts: int = 1,
        metadata: Mapping[str, Any] | None = None,
        channel: str = TRAIN,
        *,
        now: float,
    ) -> SubmitOutcome:
        """Declare a group before its rollouts start. "duplicate" if it is so declared already.

        Raises:
            PoolFullError: no admission credit; try again after a lease or a drop.
            GroupConflictError, GroupClosedError: the prompt_uid is taken.
            ChannelShutDownError: no more groups.
        """
        _check_uid("prompt_uid", prompt_uid)
        _check_int("n_rollouts", n_rollouts, 1)
        _check_int("min_rollouts", min_rollouts, 1)
        if min_rollouts > n_rollouts:
            raise InvalidRequestError(
                f"min_rollouts is {min_rollouts} but n_rollouts is {n_rollouts}; "
                "a group cannot need more trajectories than it asks for"
            )
        _check_seconds("deadline_s", deadline_s)
        terms = GroupTerms(n_rollouts, min_rollouts, deadline_s)
        return self._at(channel, now).open_group(prompt_uid, terms, _mapping(metadata))

    def credit(self, prompt_uid: str | None = None, channel: str = TRAIN) -> Credit:
        """How much of each limit that `open_group` waits for is used."""
        source = self.channels.get(channel)
        shut_down = self.is_shut_down(channel)
        if source is None:
            source = Channel(channel, self.config.channel(channel), 0)
        config, stats = source.config, source.statistics()
        groups = stats["groups"]
        used: dict[str, tuple[int, int]] = {}
        if config.max_outstanding_groups is not None:
            outstanding = groups["open"] + groups["ready"] - groups["held"]
            used["max_outstanding_groups"] = outstanding, config.max_outstanding_groups
        if config.max_ahead_versions is not None and config.groups_per_version is not None:
            versions = source.version - (source.first_version or 0) + 1 + config.max_ahead_versions
            started = groups["submitted"] - groups["dropped"]
            used["max_ahead_versions"] = started, versions * config.groups_per_version
        if config.overflow == "block" and config.max_queue_size is not None:
            used["max_queue_size"] = groups["ready"], config.max_queue_size
        if config.overflow == "block" and config.max_bytes is not None:
            used["max_bytes"] = source.memory_bytes, config.max_bytes
        return Credit(used, prompt_uid in source.prompt_groups, shut_down)

    def open_trajectory(
        self,
        trajectory_uid: str,
        prompt_uid: str,
        attempt: int = 0,
        metadata: Mapping[str, Any] | None = None,
        channel: str = TRAIN,
        *,
        now: float,
    ) -> SubmitOutcome:
        """Register a trajectory before its first step. Again: metadata is merged, "duplicate".

        Raises:
            TrajectoryConflictError: the uid belongs to another prompt.
        """
        _check_uid("trajectory_uid", trajectory_uid)
        _check_uid("prompt_uid", prompt_uid)
        _check_int("attempt", attempt, 0)
        return self._at(channel, now).open_trajectory(
            trajectory_uid, prompt_uid, attempt, _mapping(metadata)
        )

    def resume_trajectory(
        self,
        trajectory_uid: str,
        prompt_uid: str,
        attempt: int = 0,
        metadata: Mapping[str, Any] | None = None,
        channel: str = TRAIN,
        elsewhere: bool = False,
        *,
        now: float,
    ) -> Resumed:
        """`open_trajectory` for a producer that may go on with what another one began.

        Args:
            elsewhere: if another channel knows the trajectory and `channel` does not, or it is
                open only there, that one is meant.

        Raises:
            TrajectoryConflictError: the uid belongs to another prompt.
            JournalError: a payload cannot be read back.
        """
        if elsewhere:
            channel = self._channel_of(trajectory_uid, prompt_uid, channel)
        outcome = self.open_trajectory(
            trajectory_uid, prompt_uid, attempt, metadata, channel, now=now
        )
        target = self.channels[channel]
        record = target.trajectory_index.get(trajectory_uid)
        if outcome == "late" or record is None or record.closing is not None:
            return Resumed(outcome, channel, is_open=False)
        steps = target.packed(record).steps if record.steps else ()
        packed, known = list(map(tuple, steps)), dict(record.metadata)
        return Resumed(outcome, channel, is_open=True, packed=packed, metadata=known)

    def submit_step(
        self, step: Step | PackedStep, channel: str = TRAIN, *, now: float
    ) -> SubmitOutcome:
        """Store one step. Raises as `submit_steps`."""
        return self.submit_steps([step], channel, now=now)[0]

    def submit_steps(
        self, steps: Sequence[Step | PackedStep], channel: str = TRAIN, *, now: float
    ) -> list[SubmitOutcome]:
        """Store steps, in order; one outcome each.

        Raises:
            StepConflictError, StepIndexError, TrajectoryConflictError, InvalidStepError: the
                first refusal, after every other step of the batch was applied.
            PoolFullError: the channel blocks, and the step would begin a new group.
        """
        return outcomes_or_raise(self.apply_steps(steps, channel, now=now))

    def apply_steps(
        self,
        steps: Sequence[Step | PackedStep],
        channel: str = TRAIN,
        refused: set[str] | None = None,
        *,
        now: float,
    ) -> list[SubmitOutcome | DataPoolError]:
        """`submit_steps` with the refusals among the results, so that a batch made of several
        producers' steps can tell each of them its own.

        Args:
            refused: trajectories with a refused step in this batch, shared by the calls that came
                together. What is packed relative to such a step is not what its sender thinks.
        """
        target = self._at(channel, now)
        refused = set() if refused is None else refused
        results: list[SubmitOutcome | DataPoolError] = []
        for step in steps:
            try:
                packed = _packed(step)
                if packed.base is not None and packed.trajectory_uid in refused:
                    raise UnknownBaseError(
                        f"step {packed.trajectory_uid!r}[{packed.step_index}] is packed relative "
                        "to a refused one; send it whole"
                    )
                results.append(target.submit(packed))
            except DataPoolError as e:
                results.append(e)
                refused.add(getattr(step, "trajectory_uid", ""))
        return results

    def complete_trajectory(
        self,
        trajectory_uid: str,
        reward: float | None = None,
        metadata: Mapping[str, Any] | None = None,
        channel: str = TRAIN,
        *,
        now: float,
    ) -> TrajectoryOutcome:
        """Close a trajectory with what has arrived; `reward` is added to its last step's own.

        Returns "complete"; "aborted" if it has no step; "late" if its group went on without it.

        Raises:
            UnknownTrajectoryError: never seen in this channel.
            TrajectoryClosedError: aborted before, or completed with another reward.
        """
        return self._at(channel, now).complete_trajectory(
            trajectory_uid, _reward(trajectory_uid, reward), _mapping(metadata)
        )

    def abort_trajectory(
        self,
        trajectory_uid: str,
        reason: str,
        will_retry: bool = False,
        channel: str = TRAIN,
        *,
        now: float,
    ) -> TrajectoryOutcome:
        """Close a trajectory without serving it. With `will_retry` its rollout is not used up.

        Returns "aborted", or "late" if its group went on without it.

        Raises:
            UnknownTrajectoryError: never seen in this channel.
            TrajectoryClosedError: completed before, or aborted for good and now `will_retry`.
        """
        _check_uid("reason", reason)
        return self._at(channel, now).abort_trajectory(trajectory_uid, reason, will_retry)

    def drop_group(self, prompt_uid: str, reason: str, channel: str = TRAIN, *, now: float) -> None:
        """Take an open or ready group out of the pool. Dropping twice is a no-op.

        Raises:
            UnknownGroupError, GroupClosedError: never seen; acked, or leased at the moment.
        """
        _check_uid("reason", reason)
        self._at(channel, now).drop_group(prompt_uid, reason)

    def set_reward(
        self,
        trajectory_uid: str,
        reward: float,
        step_index: int | None = None,
        channel: str = TRAIN,
        *,
        now: float,
    ) -> SubmitOutcome:
        """Set the outcome reward of a trajectory, or one step's own, until its group is leased.

        Returns "accepted", or "late" if it was leased, or will not be served.

        Raises:
            UnknownTrajectoryError, StepIndexError: no such trajectory, no such step.
        """
        value = _reward(trajectory_uid, reward)
        if value is None:
            raise InvalidRequestError(
                f"trajectory {trajectory_uid!r}: reward is None; pass a finite number"
            )
        if step_index is not None:
            _check_int("step_index", step_index, 0)
        return self._at(channel, now).set_reward(trajectory_uid, value, step_index)

    def mark(
        self,
        prompt_uid: str | None = None,
        trajectory_uid: str | None = None,
        channel: str = TRAIN,
        *,
        now: float,
        **marks: Any,
    ) -> Marks:
        """What people say of a group or of one trajectory: `trainable`, `quality`, `tags`, `note`.
        Those given replace the ones before, None clears; returns all. `selection` obeys them.

        Raises:
            UnknownGroupError, UnknownTrajectoryError: never seen.
            GroupClosedError, TrajectoryClosedError: served or dropped already.
            InvalidRequestError: not exactly one of the two uids, or a malformed mark.
        """
        target = self._at(channel, now)
        if prompt_uid is not None and trajectory_uid is None:
            return target.mark_group(prompt_uid, marks)
        if trajectory_uid is not None and prompt_uid is None:
            return target.mark_trajectory(trajectory_uid, marks)
        raise InvalidRequestError(
            f"prompt_uid is {prompt_uid!r} and trajectory_uid is {trajectory_uid!r}; pass one of "
            "them: what is to be marked"
        )

    def delete(
        self, trajectory_uid: str | None = None, tag: str | None = None, *, now: float
    ) -> Deleted:
        """Take the data of one trajectory, or all that is marked with `tag`, out of every channel:
        each goes with its group, uncounted for training. What is unknown, or gone, is no error.

        Raises:
            InvalidRequestError: not exactly one of the two.
        """
        if (trajectory_uid is None) == (tag is None):
            raise InvalidRequestError(
                f"trajectory_uid is {trajectory_uid!r} and tag is {tag!r}; pass one of them: what "
                "is to be deleted"
            )
        _check_uid("trajectory_uid" if tag is None else "tag", trajectory_uid or tag)
        found = Deleted()
        for name in self.channels:
            if not found.more:
                found += self._at(name, now).delete(trajectory_uid, tag)
        if self.log is not None:
            self.log.scrub()  # also what was acked before
        return found

    def advance_version(self, version: int, channel: str = TRAIN, *, now: float) -> None:
        """Generation uses policy `version` from now on: gives credit for the groups of one version
        more (`max_ahead_versions`), and ages those that wait (`max_staleness`)."""
        _check_int("version", version, 0)
        self._at(channel, now).advance_version(version)

    # -- consumers ---------------------------------------------------------------------------

    def lease_batch(
        self,
        n_rollouts: int | None = None,
        channel: str = TRAIN,
        batch_size: int = 1,
        lease_s: float | None = None,
        *,
        now: float,
    ) -> Lease | None:
        """The `batch_size` groups that are first in the channel's order, or None if there are
        fewer.

        `n_rollouts` is how many complete trajectories an undeclared group needs (None: the
        channel's); declared groups have their own number.

        Raises:
            SelectionError: the channel's batch filter failed.
        """
        lease = self.lease_packed(n_rollouts, channel, batch_size, lease_s, now=now)
        return None if lease is None else lease.unpack()

    def lease_packed(
        self,
        n_rollouts: int | None = None,
        channel: str = TRAIN,
        batch_size: int = 1,
        lease_s: float | None = None,
        request_id: str | None = None,
        at_most: bool = False,
        *,
        now: float,
    ) -> PackedLease | None:
        """`lease_batch`, on its way to somebody who unpacks it.

        Args:
            request_id: names the call; repeated while its lease is active, it gets the same one.
            at_most: with fewer groups than `batch_size`, if there is one at all: a part of a
                batch that several shards fill.
        """
        check_lease_request(n_rollouts, batch_size, lease_s)
        source = self._at(channel, now)
        before = self.leases.answer_to(request_id)
        if before is not None:
            again = tuple(source.leased(uid) for uid in before.prompt_uids)
            return PackedLease(before.lease_id, channel, again, before.expires_at)
        chosen = source.choose(n_rollouts, batch_size)
        while at_most and not chosen and 0 < source.n_available(n_rollouts) < batch_size:
            batch_size = source.n_available(n_rollouts)  # choosing may drop some: fewer are left
            chosen = source.choose(n_rollouts, batch_size)
        if not chosen:
            return None
        groups = source.take(chosen, n_rollouts)
        seconds = source.config.lease_s if lease_s is None else lease_s
        lease_id = self.leases.issue(self.epoch, channel, chosen, now + seconds, request_id)
        return PackedLease(lease_id, channel, groups, now + seconds)

    def n_available(self, n_rollouts: int | None = None, channel: str = TRAIN) -> int:
        """Ready groups that a consumer asking for `n_rollouts` could have: at most, because those
        that are stale or that a filter objects to are dropped when somebody takes them."""
        known = self.channels.get(channel)
        return 0 if known is None else known.n_available(n_rollouts)

    def fetch_batch(
        self,
        n_rollouts: int | None = None,
        channel: str = TRAIN,
        batch_size: int = 1,
        *,
        now: float,
    ) -> list[Step] | None:
        """Lease and ack at once: the steps of the groups that are ready first, or None."""
        lease = self.lease_packed(n_rollouts, channel, batch_size, now=now)
        if lease is None:
            return None
        self.ack(lease.lease_id, now=now)
        return lease.steps().unpack()

    def ack(self, lease_id: str, *, now: float) -> None:
        """The groups are consumed for good. Acking twice is a no-op.

        Raises:
            UnknownLeaseError, LeaseExpiredError, LeaseClosedError
        """
        lease = self.leases.end(lease_id, "acked")
        if lease is not None:
            channel = self._at(lease.channel, now)
            for prompt_uid in lease.prompt_uids:
                channel.ack(prompt_uid)

    def nack(self, lease_id: str, reason: str = "", *, now: float) -> None:
        """The groups go back, first in order, to be delivered again. Twice is a no-op.

        Raises:
            UnknownLeaseError, LeaseExpiredError, LeaseClosedError
        """
        lease = self.leases.end(lease_id, "nacked", reason or "unspecified")
        if lease is not None:
            self._give_back(lease, now)

    def renew(self, lease_id: str, lease_s: float | None = None, *, now: float) -> float:
        """Hold the lease for `lease_s` (None: the channel's) from now; the new `expires_at`.

        Raises:
            UnknownLeaseError, LeaseExpiredError, LeaseClosedError
        """
        _check_seconds("lease_s", lease_s)
        channel = self.channel(self.leases.get(lease_id, "renewed").channel)
        expires_at = now + (channel.config.lease_s if lease_s is None else lease_s)
        self.leases.renew(lease_id, expires_at)
        return expires_at

    def release_leases(self, channel: str = TRAIN, reason: str = "released", *, now: float) -> int:
        """Nack every lease of the channel; how many. For the only consumer, when it starts over:
        what it was working on is forgotten, and should not wait for its leases to expire."""
        active = self.leases.active(channel)
        for lease in active:
            self.nack(lease.lease_id, reason, now=now)
        return len(active)

    # -- time, end, statistics ---------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Do what is due by `now`: expire leases, then what the groups' timers say. If that is a
        lot, some is left, and `next_deadline` is in the past."""
        while (lease := self.leases.expire(now)) is not None:
            self._give_back(lease, now)
        for name in self.channels:
            self._at(name, now).expire()

    def next_deadline(self) -> float | None:
        """When `tick` has something to do next, or None."""
        firsts = [self.leases.expiries.first(), *(c.timers.first() for c in self.channels.values())]
        return min((first[0] for first in firsts if first is not None), default=None)

    def shutdown(self, channel: str | None = None, *, now: float) -> None:
        """No group is opened any more (None: in any channel). The rest still works, so that what
        is in flight can be finished, served and acked."""
        if channel is None:
            self._shut_down = self._changed = True
        for target in self.channels.values() if channel is None else [self.channel(channel)]:
            target.shut_down = target.changed = True

    def reopen(self) -> None:
        """Undo every `shutdown`: what a new run does that starts from the old one's journal."""
        self._shut_down, self._changed = False, True
        for channel in self.channels.values():
            channel.shut_down, channel.changed = False, True

    def is_shut_down(self, channel: str) -> bool:
        known = self.channels.get(channel)
        return self._shut_down if known is None else known.shut_down

    def get_statistics(self, channel: str | None = None, *, now: float) -> dict[str, Any]:
        """Counts of one channel, or `{channel: counts}`; see docs/design/datapool.md for the keys.

        At every moment, per channel::

            groups.submitted       = open + ready + leased + acked + dropped
            trajectories.submitted = open + complete + acked + dropped + aborted
            steps.submitted        = accepted + duplicate + late + conflict + rejected
            steps.accepted         = stored + acked + dropped
        """
        if channel is None:
            return {name: self.get_statistics(name, now=now) for name in self.channels}
        known = self.channels.get(channel)
        if known is None:
            # Asking about a channel does not make one.
            known = Channel(channel, self.config.channel(channel), 0)
        known.now = now
        return known.statistics() | {"leases": self.leases.statistics(channel)}

    def dry_run(
        self,
        selection: SelectionConfig | None = None,
        channel: str = TRAIN,
        batch_size: int = 1,
        *,
        now: float,
    ) -> DryRun:
        """What a fetch would be given, with this selection (None: the channel's own), out of what
        is ready now; and why. Changes nothing. Looks at every ready group.

        Raises:
            SelectionError: a name of the selection is wrong, or its batch filter failed.
        """
        source = self._at(channel, now)
        rules = source.selection if selection is None else Selection(selection)
        return source.dry_run(rules, batch_size)

    # -- reading -----------------------------------------------------------------------------

    def list_groups(
        self,
        channel: str = TRAIN,
        cursor: str | None = None,
        limit: int = 100,
        *,
        now: float,
        **filters: Any,
    ) -> Page[GroupRow]:
        """Live groups in the order they were opened in; filters: `inspect/listing.py`."""
        return list_groups(self._known(channel, now), self.epoch, cursor, limit, filters)

    def list_trajectories(
        self,
        channel: str = TRAIN,
        cursor: str | None = None,
        limit: int = 100,
        *,
        now: float,
        **filters: Any,
    ) -> Page[TrajectoryRow]:
        """Trajectories of live groups; filters and errors: `inspect/listing.py`."""
        return list_trajectories(self._known(channel, now), self.epoch, cursor, limit, filters)

    def list_steps(
        self,
        channel: str = TRAIN,
        cursor: str | None = None,
        limit: int = 100,
        include_tokens: bool = False,
        *,
        now: float,
        **filters: Any,
    ) -> Page[StepRow]:
        """Stored steps; filters and errors: `inspect/listing.py`."""
        listing = list_steps_with_tokens if include_tokens else list_steps
        return listing(self._known(channel, now), self.epoch, cursor, limit, filters)

    def read_trajectories(
        self,
        channel: str = TRAIN,
        cursor: str | None = None,
        limit: int = 100,
        *,
        now: float,
        **filters: Any,
    ) -> ExportedPage:
        """Whole trajectories with their tokens; filters and errors: `inspect/listing.py`."""
        return read_trajectories(self._known(channel, now), self.epoch, cursor, limit, filters)

    # -- memory and the log ------------------------------------------------------------------

    def attach(self, log: Log, load: Load) -> None:
        """Write every change down from now on, and read payloads back that are only there."""
        self.log = self.leases.log = log
        self._load = load
        for channel in self.channels.values():
            channel.log, channel.load = log, load

    def write_counts(self) -> None:
        """Put the counts that changed into the log. Before a flush."""
        if self.log is None:
            return
        for channel in self.channels.values():
            if channel.changed:
                channel.changed = False
                self.log.put_state(f"channel/{channel.name}", channel.dump_counts())
        self.leases.write_counts()
        if self._changed:
            self._changed = False
            self.log.put_state("pool", pickle.dumps(self._shut_down))

    def restore_state(self, state: bytes) -> None:
        """What `write_counts` wrote of the pool itself."""
        self._shut_down = pickle.loads(state)

    def written(self) -> None:
        """The log was flushed: payloads beyond the memory limits may live there alone."""
        limit = self.config.memory_limit_bytes
        total = sum(channel.memory_bytes for channel in self.channels.values())
        for channel in self.channels.values():
            over = None if limit is None or total <= limit else channel.memory_bytes - total + limit
            before = channel.memory_bytes
            channel.written(over)
            total += channel.memory_bytes - before

    def channel(self, name: str) -> Channel:
        """The channel of this name, made if there is none."""
        channel = self.channels.get(name)
        if channel is None:
            _check_uid("channel", name)
            days = self.config.retention_days
            channel = Channel(
                name,
                self.config.channel(name),
                self.config.remembered_uids,
                self._notice,
                None if days is None else days * DAY_S,
            )
            channel.log, channel.load = self.log, self._load
            channel.shut_down = self._shut_down
            self.channels[name] = channel
        return channel

    # -- inside ------------------------------------------------------------------------------

    def _at(self, channel: str, now: float) -> Channel:
        """The channel, with its clock set."""
        target = self.channel(channel)
        target.now = now
        return target

    def _channel_of(self, trajectory_uid: str, prompt_uid: str, first: str) -> str:
        """The channel where the trajectory is open, else one that closed it, else `first`."""
        found = first
        is_known = False
        for name in sorted(self.channels, key=lambda name: name != first):
            known = self.channels[name].knows(trajectory_uid, prompt_uid)
            if known == "open":
                return name
            if known is not None and not is_known:
                found, is_known = name, True
        return found

    def _known(self, channel: str, now: float) -> Channel | None:
        """The channel, if there is one: asking about it does not make it."""
        return None if channel not in self.channels else self._at(channel, now)

    def _notice(self, channel: Channel, kind: str, *uids: str, **data: Any) -> None:
        if not channel.replaying:
            self.events.add(channel.now, kind, channel.name, *uids, **data)

    def _give_back(self, lease: LeaseRecord, now: float) -> None:
        channel = self._at(lease.channel, now)
        # In reverse, because each goes to the front: the order stays as it was.
        for prompt_uid in reversed(lease.prompt_uids):
            channel.give_back(prompt_uid)


def _packed(step: object) -> PackedStep:
    if isinstance(step, PackedStep):
        return step
    if not isinstance(step, Step):
        raise InvalidStepError(
            f"got {step!r:.80} of type {type(step).__name__}; pass datapool.Step"
        )
    return pack(step)


def outcomes_or_raise(results: list[SubmitOutcome | DataPoolError]) -> list[SubmitOutcome]:
    """The outcomes of a batch, or its first refusal raised."""
    outcomes: list[SubmitOutcome] = []
    refused: list[DataPoolError] = []
    for result in results:
        if isinstance(result, DataPoolError):
            refused.append(result)
        else:
            outcomes.append(result)
    if not refused:
        return outcomes
    if len(results) == 1:
        raise refused[0]
    raise type(refused[0])(
        f"{refused[0]} ({len(refused)} of {len(results)} steps refused; the others are applied)"
    )


def check_lease_request(n_rollouts: int | None, batch_size: int, lease_s: float | None) -> None:
    """Raises InvalidRequestError if an argument of `lease_batch` is out of range."""
    if n_rollouts is not None:
        _check_int("n_rollouts", n_rollouts, 1)
    _check_int("batch_size", batch_size, 1)
    _check_seconds("lease_s", lease_s)


def _check_uid(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(f"{name} is {value!r}; pass a non-empty string")


def _check_int(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidRequestError(f"{name} is {value!r}; pass an integer >= {least}")


def _check_seconds(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise InvalidRequestError(f"{name} is {value!r}; pass seconds > 0, or None for the default")


def _reward(trajectory_uid: str, value: object) -> float | None:
    if value is None:
        return None
    if not is_reward(value):
        raise InvalidRequestError(
            f"trajectory {trajectory_uid!r}: reward is {value!r}; "
            f"pass a number within ±{MAX_REWARD:g}, or None if not scored"
        )
    return float(value)


def _mapping(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise InvalidRequestError(f"metadata is {metadata!r:.80}; pass a mapping or None")
    return dict(metadata)
