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
from collections import Counter
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Literal, TypeAlias, get_args

from datapool.channel import Channel
from datapool.config import PoolConfig
from datapool.errors import (
    DataPoolError,
    InvalidRequestError,
    InvalidStepError,
    LeaseClosedError,
    LeaseExpiredError,
    UnknownLeaseError,
)
from datapool.heap import KeyedHeap
from datapool.records import (
    GroupTerms,
    Reasons,
    Remembered,
    SubmitOutcome,
    TrajectoryOutcome,
)
from datapool.types import TRAIN, VAL, Lease, Step

LeaseEnd: TypeAlias = Literal["acked", "nacked", "expired"]


class DataPool:
    """All channels and all leases.

    Args:
        config: limits and defaults per channel.
        epoch: prefix of the lease ids. A pool that forgot its leases must get another one than
            before, or a consumer's stale id could name somebody else's lease.
    """

    def __init__(self, config: PoolConfig | None = None, epoch: str = "lease") -> None:
        self.config = config or PoolConfig()
        self.epoch = epoch
        self.channels: dict[str, Channel] = {}
        self._leases: dict[str, Lease] = {}
        self._lease_expiries = KeyedHeap()
        self._ended_leases: Remembered[LeaseEnd] = Remembered(self.config.remembered_uids)
        self._n_leases = 0
        self._lease_counts: dict[str, Counter[str]] = {}
        self._nack_reasons: dict[str, Reasons] = {}
        self._shut_down = False
        for name in (TRAIN, VAL, *self.config.channels):
            self._channel(name)

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
        return self._channel(channel).open_group(prompt_uid, terms, _mapping(metadata), now)

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
        return self._channel(channel).open_trajectory(
            trajectory_uid, prompt_uid, attempt, _mapping(metadata), now
        )

    def submit_step(self, step: Step, channel: str = TRAIN, *, now: float) -> SubmitOutcome:
        """Store one step. Raises as `submit_steps`."""
        return self.submit_steps([step], channel, now=now)[0]

    def submit_steps(
        self, steps: Sequence[Step], channel: str = TRAIN, *, now: float
    ) -> list[SubmitOutcome]:
        """Store steps, in order; one outcome each.

        Raises:
            StepConflictError, StepIndexError, TrajectoryConflictError, InvalidStepError: the
                first refusal, after every other step of the batch was applied.
        """
        return outcomes_or_raise(self.apply_steps(steps, channel, now=now))

    def apply_steps(
        self, steps: Sequence[Step], channel: str = TRAIN, *, now: float
    ) -> list[SubmitOutcome | DataPoolError]:
        """`submit_steps` with the refusals among the results, so that a batch made of several
        producers' steps can tell each of them its own."""
        target = self._channel(channel)
        results: list[SubmitOutcome | DataPoolError] = []
        for step in steps:
            try:
                if not isinstance(step, Step):
                    raise InvalidStepError(
                        f"got {step!r:.80} of type {type(step).__name__}; pass datapool.Step"
                    )
                results.append(target.submit(step, now))
            except DataPoolError as e:
                results.append(e)
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
        return self._channel(channel).complete_trajectory(
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
        return self._channel(channel).abort_trajectory(trajectory_uid, reason, will_retry)

    def drop_group(self, prompt_uid: str, reason: str, channel: str = TRAIN, *, now: float) -> None:
        """Take an open or ready group out of the pool. Dropping twice is a no-op.

        Raises:
            UnknownGroupError, GroupClosedError: never seen; acked, or leased at the moment.
        """
        _check_uid("reason", reason)
        self._channel(channel).drop_group(prompt_uid, reason)

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
        """The `batch_size` groups that are ready first, or None if there are fewer.

        `n_rollouts` is how many complete trajectories an undeclared group needs (None: the
        channel's); declared groups have their own number.
        """
        check_lease_request(n_rollouts, batch_size, lease_s)
        source = self._channel(channel)
        if source.n_available(n_rollouts) < batch_size:
            return None
        groups = tuple(g for _ in range(batch_size) if (g := source.take(n_rollouts)) is not None)
        self._n_leases += 1
        seconds = source.config.lease_s if lease_s is None else lease_s
        lease = Lease(f"{self.epoch}-{self._n_leases}", channel, groups, now + seconds)
        self._leases[lease.lease_id] = lease
        self._lease_expiries.set(lease.lease_id, lease.expires_at)
        self._lease_counts.setdefault(channel, Counter())["issued"] += 1
        return lease

    def fetch_batch(
        self,
        n_rollouts: int | None = None,
        channel: str = TRAIN,
        batch_size: int = 1,
        *,
        now: float,
    ) -> list[Step] | None:
        """Lease and ack at once: the steps of the groups that are ready first, or None."""
        lease = self.lease_batch(n_rollouts, channel, batch_size, now=now)
        if lease is None:
            return None
        self.ack(lease.lease_id, now=now)
        return lease.steps

    def ack(self, lease_id: str, *, now: float) -> None:
        """The groups are consumed for good. Acking twice is a no-op.

        Raises:
            UnknownLeaseError, LeaseExpiredError, LeaseClosedError
        """
        lease = self._end(lease_id, "acked")
        if lease is not None:
            channel = self._channel(lease.channel)
            for group in lease.groups:
                channel.ack(group.prompt_uid)

    def nack(self, lease_id: str, reason: str = "", *, now: float) -> None:
        """The groups go back, first in order, to be delivered again. Twice is a no-op.

        Raises:
            UnknownLeaseError, LeaseExpiredError, LeaseClosedError
        """
        lease = self._end(lease_id, "nacked")
        if lease is not None:
            self._nack_reasons.setdefault(lease.channel, Reasons()).add(reason or "unspecified")
            self._give_back(lease)

    def renew(self, lease_id: str, lease_s: float | None = None, *, now: float) -> float:
        """Hold the lease for `lease_s` (None: the channel's) from now; the new `expires_at`.

        Raises:
            UnknownLeaseError, LeaseExpiredError, LeaseClosedError
        """
        _check_seconds("lease_s", lease_s)
        lease = self._leases.get(lease_id)
        if lease is None:
            raise self._no_lease(lease_id, "renewed")
        seconds = self._channel(lease.channel).config.lease_s if lease_s is None else lease_s
        self._lease_expiries.set(lease_id, now + seconds)
        return now + seconds

    # -- time, end, statistics ---------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Do what is due by `now`: expire leases, then serve or drop groups past their deadline."""
        while (lease_id := self._lease_expiries.pop_until(now)) is not None:
            lease = self._end(lease_id, "expired")
            if lease is not None:
                self._give_back(lease)
        for channel in self.channels.values():
            channel.expire_deadlines(now)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do next, or None."""
        heaps = (self._lease_expiries, *(c.deadlines for c in self.channels.values()))
        return min((first[0] for heap in heaps if (first := heap.first())), default=None)

    def shutdown(self, channel: str | None = None, *, now: float) -> None:
        """No group is opened any more (None: in any channel). The rest still works, so that what
        is in flight can be finished, served and acked."""
        if channel is None:
            self._shut_down = True
            for known in self.channels.values():
                known.shut_down = True
        else:
            self._channel(channel).shut_down = True

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
        counts = self._lease_counts.get(channel, Counter())
        ends = {end: counts[end] for end in get_args(LeaseEnd)}
        reasons = self._nack_reasons.get(channel)
        return known.statistics(now) | {
            "leases": {
                "active": counts["issued"] - sum(ends.values()),
                **ends,
                "nack_reasons": dict(reasons.counts) if reasons else {},
            }
        }

    # -- inside ------------------------------------------------------------------------------

    def _channel(self, name: str) -> Channel:
        channel = self.channels.get(name)
        if channel is None:
            _check_uid("channel", name)
            channel = Channel(name, self.config.channel(name), self.config.remembered_uids)
            channel.shut_down = self._shut_down
            self.channels[name] = channel
        return channel

    def _end(self, lease_id: str, how: LeaseEnd) -> Lease | None:
        """The lease, ended; None if it ended the same way before."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            if self._ended_leases.get(lease_id) == how:
                return None
            raise self._no_lease(lease_id, how)
        self._lease_expiries.discard(lease_id)
        self._ended_leases.put(lease_id, how)
        self._lease_counts[lease.channel][how] += 1
        return lease

    def _no_lease(self, lease_id: str, wanted: str) -> DataPoolError:
        ended = self._ended_leases.get(lease_id)
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

    def _give_back(self, lease: Lease) -> None:
        channel = self._channel(lease.channel)
        # In reverse, because each goes to the front: the order stays as it was.
        for group in reversed(lease.groups):
            channel.give_back(group.prompt_uid)


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
    # Real and not float: a NumPy scalar is what reward functions often return.
    if not isinstance(value, Real) or not math.isfinite(value):
        raise InvalidRequestError(
            f"trajectory {trajectory_uid!r}: reward is {value!r}; "
            "pass a finite number, or None if not scored"
        )
    return float(value)


def _mapping(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise InvalidRequestError(f"metadata is {metadata!r:.80}; pass a mapping or None")
    return dict(metadata)
