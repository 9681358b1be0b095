"""How groups of a channel get ready and are served::

    open ──enough complete──► ready ──take──► leased ──ack──► acked
      │                        │ ▲              │
      │                        │ └──give_back───┘
      └──────deadline, abort───┴──limits, filters, staleness, drop──► dropped(reason)

In an undeclared group a complete trajectory counts once nothing of the group is open, or after
`siblings_wait_s`: whoever is slower is waited for, and not for ever.

A ready group still takes steps and completions of its open trajectories: whatever is complete
when it is first leased is served, and from then on its content is frozen. A ready group can be
*held* (its holding time is not over, people's marks say so, a reward is missing): it stays, and is
not served until that changes.

Owns no lease (`leases.py`): who has a group, and until when, is not known here.
"""

from __future__ import annotations

import contextlib
import logging
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Final

from stepwell.datapool.codec import PackedGroup, PackedTrajectory
from stepwell.datapool.config import SelectionConfig
from stepwell.datapool.core import rows
from stepwell.datapool.core.groups import (
    DEADLINE,
    HOLD,
    IDLE,
    RETENTION,
    REWARD_WAIT,
    SIBLINGS,
    Groups,
)
from stepwell.datapool.core.records import Closing, GroupRecord, TrajectoryRecord
from stepwell.datapool.errors import JournalError, SelectionError
from stepwell.datapool.questions import Available, DryRunOf, WaitAvailable
from stepwell.datapool.selection import (
    NOT_TRAINABLE,
    STALE,
    UNSCORED,
    Drop,
    DryRun,
    GroupInfo,
    Hold,
    Selection,
    Verdict,
    dry_run,
)

logger = logging.getLogger(__name__)

GROUP_SERVED = "group_served"
TOO_FEW_ROLLOUTS = "too_few_rollouts"
AWAITS_REWARDS: Final = Hold(UNSCORED)
"""What a group is that lacks rewards which may still come; a filter's equal verdict is another
object, and for good."""
AWAITS_FEEDBACK: Final = Hold("holding_time")
AT_ONCE: Final = 300
"""Steps, trajectories and groups that one change deletes, or drops for their age: 3 ms of work."""


class Serving(Groups):
    """See the module."""

    # -- a trajectory is complete, a group gets ready ----------------------------------------

    def _complete(self, record: TrajectoryRecord, closing: Closing) -> None:
        group = self.prompt_groups[record.prompt_uid]
        record.closing = closing
        if closing.reward is not None:
            record.outcome = closing.reward
        self.counts.steps.missing += record.max_index + 1 - len(record.steps)
        self.counts.trajectories.open -= 1
        self.counts.trajectories.complete += 1
        group.n_open -= 1
        group.complete.append(record)
        oldest, _ = record.versions()
        if group.oldest_version is None or oldest < group.oldest_version:
            group.oldest_version = oldest
        self._notice_score(record)
        if self.config.hold_s is not None:
            group.held = True
            self._set_timer(group, HOLD, self.config.hold_s)
        if group.terms is None and not group.due and group.n_open:
            group.waits.append(self.now + self.config.siblings_wait_s)
            self.timers.set((SIBLINGS, group.prompt_uid), group.waits[0])
        self._settle(group)

    def _notice_score(self, record: TrajectoryRecord) -> None:
        if not self.replaying and (reward := record.reward()) is not None:
            oldest, newest = record.versions()
            scored = {"reward": reward, "oldest": oldest, "newest": newest}
            self._notice("scored", record.prompt_uid, record.trajectory_uid, **scored)

    def _settle(self, group: GroupRecord) -> None:
        """Move a group on if a trajectory that just closed, or its new terms, decide it."""
        if group.frozen:
            return
        n_complete = len(group.complete)
        if group.terms is None and not group.due:
            self._count_complete(group)
        if group.prompt_uid in self._ready:
            self._note_version(group)
            self._judge(group)
        elif group.terms is None:
            if group.is_ready_for(self.config.n_rollouts):
                self._make_ready(group, "complete")
            else:
                self._judge_again(group)
        elif n_complete >= group.terms.n_rollouts:
            self._make_due(group, "complete")
        elif group.n_open == 0 and n_complete + group.n_final >= group.terms.n_rollouts:
            if n_complete >= group.terms.min_rollouts:
                self._make_due(group, "aborted")
            else:
                self._drop(group, TOO_FEW_ROLLOUTS)

    def _count_complete(self, group: GroupRecord) -> None:
        """Those of an undeclared group whose siblings are not waited for any more make it ready."""
        if group.waits and group.n_open == 0:
            group.waits = []
            self._stop_timers(group, SIBLINGS)
        for _ in range(len(group.places), len(group.complete) - len(group.waits)):
            self._order.reach(group)

    def end_wait(self, awaited: rows.SiblingsAwaited) -> None:
        """What has been complete for `siblings_wait_s` counts, whatever is open."""
        group = self.prompt_groups[awaited.prompt_uid]
        del group.waits[: bisect_right(group.waits, self.now)]
        self._await_siblings(group)  # in a replay the timer still runs
        self._settle(group)

    def _make_due(self, group: GroupRecord, why: str) -> None:
        self._stop_timers(group, DEADLINE, IDLE, SIBLINGS)
        if group.prompt_uid in self._ready:
            # It was, for the channel's own n: now it is for any, in the same place.
            self._order.make_due_in_place(group, self.config.n_rollouts)
            self._judge(group)
        else:
            self._order.make_due(group)
            self._make_ready(group, why)

    def _make_ready(self, group: GroupRecord, why: str) -> None:
        self._open.pop(group.prompt_uid, None)
        self._ready[group.prompt_uid] = group
        self._note_version(group)
        self._notice("ready", group.prompt_uid, size=len(group.complete), why=why)
        self._judge(group)
        self._trim()

    # -- a trajectory is deleted, its group goes on ------------------------------------------

    def remove(self, deleted: rows.TrajectoryDeleted) -> None:
        """Go on without a trajectory, as if it had been aborted for good."""
        group = self.prompt_groups[deleted.prompt_uid]
        record = self.trajectory_index[deleted.trajectory_uid]
        if group.prompt_uid in self._leased:
            group.leaving = (*group.leaving, record.trajectory_uid)
            return
        counts = record.closing is None or record.is_complete
        self._take_out(group, record)
        if not counts:
            return
        is_short = len(group.complete) < _least(group)
        is_late = group.due and group.deadline is not None and group.deadline <= self.now
        if is_short and (group.frozen or is_late):
            self._drop(group, TOO_FEW_ROLLOUTS)
        elif group.frozen:
            self._note_version(group)
            self._judge(group)
        else:
            is_ready = group.due or group.is_ready_for(self.config.n_rollouts)
            if group.prompt_uid in self._ready and (is_short or not is_ready):
                self._reopen(group)
            self._settle(group)

    def _reopen(self, group: GroupRecord) -> None:
        """Take back that it is ready: a trajectory which made it so is gone."""
        if group.due:
            self._unready(group)
            group.due = False
            if group.deadline is not None:
                self.timers.set((DEADLINE, group.prompt_uid), group.deadline)
            self._touch(group)
        else:  # its places for consumers of fewer stay
            self._leave_ready(group)
        self._open[group.prompt_uid] = group

    def _note_version(self, group: GroupRecord) -> None:
        if group.oldest_version is not None:
            self._ready_versions.set(group.prompt_uid, group.oldest_version)

    # -- whether it may be served ------------------------------------------------------------

    def info(self, group: GroupRecord) -> GroupInfo:
        """What orders and filters see of a group: its complete trajectories."""
        return GroupInfo(
            prompt_uid=group.prompt_uid,
            channel=self.name,
            n_rollouts=self.config.n_rollouts if group.terms is None else group.terms.n_rollouts,
            trajectories=tuple(record.info() for record in group.complete),
            sequence=group.sequence(self.config.n_rollouts),
            opened_at=group.opened_at,
            delivery=group.delivery,
            metadata=group.metadata,
            marks=group.marks,
        )

    def ready_groups(self) -> Iterable[GroupRecord]:
        """All that are ready or held, the oldest first."""
        return self._ready.values()

    def _judge(self, group: GroupRecord) -> bool:
        """Whether a ready group may be served. Otherwise it is held, or dropped."""
        waits = self.config.reward_wait_s is not None or self.config.hold_s is not None
        if self.replaying or (self.selection.is_trivial and not group.is_marked and not waits):
            return True
        uid = group.prompt_uid
        verdict, key = self.verdict(self.info(group), self.selection)
        if verdict is not AWAITS_REWARDS:
            self._stop_timers(group, REWARD_WAIT)
        elif uid in self._ready and self.config.reward_wait_s is not None:
            if group.reward_due is None:
                group.reward_due = self.now + self.config.reward_wait_s
                self._write(group, rows.RewardsAwaited(uid, group.reward_due))
            self.timers.set((REWARD_WAIT, uid), group.reward_due)
        if isinstance(verdict, Drop):
            self._drop(group, verdict.reason)
            return False
        if verdict is not None:
            self._order.hold(group)
            if uid in self._ready:
                self._held[uid] = verdict.reason
            return False
        self._order.release(group)
        self._held.pop(uid, None)
        # Equal keys stand by readiness for the very n that a consumer asks for.
        self._order.rekey(group, 0.0 if self.config.selection.order == "fifo" else key)
        return True

    def verdict(self, info: GroupInfo, rules: Selection) -> tuple[Verdict | None, float]:
        """What these rules say of a ready group, and its key in the order. Changes nothing."""
        group = self.prompt_groups[info.prompt_uid]
        if group.held and not group.frozen:
            return AWAITS_FEEDBACK, 0.0
        try:
            verdict, key = rules.judge(info), rules.key(info)
        except SelectionError as e:
            # Somebody's function failed; whoever submitted a step cannot help that.
            return Hold(f"selection: {e}"), 0.0
        served, refusal = rules.gate(info)
        settled = refusal or isinstance(verdict, Drop) or served.is_scored or group.frozen
        if settled or self.config.reward_wait_s is None:
            return verdict, key
        if info.prompt_uid in self._ready and group.reward_due == -math.inf:
            return Drop(UNSCORED) if verdict == AWAITS_REWARDS else verdict, key
        return AWAITS_REWARDS, key

    def await_rewards(self, record: rows.RewardsAwaited) -> None:
        self.prompt_groups[record.prompt_uid].reward_due = record.until

    def end_hold(self, ended: rows.HoldEnded) -> None:
        """What people say from now on counts until it is leased."""
        group = self.prompt_groups[ended.prompt_uid]
        group.held = False
        self._stop_timers(group, HOLD)  # in a replay it still runs
        self._judge_again(group)

    def _judge_again(self, group: GroupRecord) -> None:
        """Its marks, rewards or trajectories changed."""
        if group.prompt_uid in self._ready:
            self._judge(group)
        elif not self.replaying and group.is_ready_for(1):
            # Not ready yet: a consumer that wants it with what it has will have it judged.
            self._order.release(group)
            if self.config.selection.order != "fifo":
                with contextlib.suppress(SelectionError):
                    self._order.rekey(group, self.selection.key(self.info(group)))

    def end_replay(self) -> None:
        """After a restart: the limits and filters of today apply to what is there."""
        self.replaying = False
        for group in (*self._ready.values(), *self._open.values()):
            self._judge_again(group)
        self._trim()

    def dry_run(self, op: DryRunOf) -> DryRun:
        """`DryRunOf`."""
        given = op.selection
        rules = self.selection if given is None else Selection(SelectionConfig(**given))

        def judge(info: GroupInfo) -> tuple[Verdict | None, float]:
            verdict, key = self.verdict(info, rules)
            stale = self.is_stale(self.prompt_groups[info.prompt_uid])
            return Drop(STALE) if stale else verdict, key

        infos = map(self.info, self.ready_groups())
        return dry_run(rules, infos, op.batch_size, judge)

    # -- consumers ---------------------------------------------------------------------------

    def available(self, op: WaitAvailable) -> Available:
        n_wanted = op.n_rollouts or self.config.n_rollouts
        return Available(self._order.count(n_wanted), self.counts.shut_down)

    def choose(self, n_rollouts: int | None, batch_size: int) -> list[str]:
        """The groups that a consumer gets next, if there are `batch_size` of them; else none. Drops
        those on the way that are too old or that a filter objects to."""
        while (oldest := self._ready_versions.first()) is not None:
            if self._is_fresh(self.prompt_groups[oldest[1]]):
                break
        n_wanted = n_rollouts or self.config.n_rollouts
        if self._order.count(n_wanted) < batch_size:
            return []
        if n_wanted != self.config.n_rollouts:
            self._judge_first(n_wanted, batch_size)
        first = self._order.first(n_wanted, batch_size)
        return first if len(first) == batch_size else []

    def _judge_first(self, n_wanted: int, n_seen: int) -> None:
        """Judge undeclared groups that are ready for this consumer only."""
        while True:
            unjudged = [
                self.prompt_groups[uid]
                for uid in self._order.first(n_wanted, n_seen)
                if uid not in self._ready
            ]
            n_refused = sum(
                not (self._is_fresh(group) and self._judge(group)) for group in unjudged
            )
            if n_refused == 0:
                return

    def take(self, prompt_uids: Sequence[str], n_rollouts: int | None) -> list[PackedGroup]:
        """Lease these ready groups. Their open trajectories end here.

        Raises:
            DataPoolError: a payload cannot be read back; nothing is leased.
        """
        groups = [self.prompt_groups[uid] for uid in prompt_uids]
        # Before anything is changed, because it may fail.
        packed = {r.trajectory_uid: self.packed(r) for g in groups for r in g.complete}
        for group in groups:
            excluded, n_asked = self._excluded(group), n_rollouts or self.config.n_rollouts
            leased = rows.GroupLeased(group.prompt_uid, excluded, n_asked)
            self._write(group, leased)
            self.begin_lease(leased)
            self._notice("leased", group.prompt_uid, delivery=group.delivery)
        return [self._served(g, [packed[r.trajectory_uid] for r in g.complete]) for g in groups]

    def leased(self, prompt_uid: str) -> PackedGroup:
        """A leased group as its consumer gets it."""
        group = self._leased[prompt_uid]
        return self._served(group, [self.packed(record) for record in group.complete])

    def _served(self, group: GroupRecord, trajectories: list[PackedTrajectory]) -> PackedGroup:
        return PackedGroup(
            group.prompt_uid,
            trajectories,
            group.n_asked if group.terms is None else group.terms.n_rollouts,
            dict(group.metadata),
            group.delivery,
        )

    def packed(self, record: TrajectoryRecord) -> PackedTrajectory:
        """A trajectory as consumers get it, if it is complete; else with its steps so far."""
        steps = record.as_served(self.payloads.read(record.steps))
        return PackedTrajectory(
            record.trajectory_uid, record.prompt_uid, steps, dict(record.metadata), record.attempt
        )

    def _excluded(self, group: GroupRecord) -> tuple[str, ...]:
        """Complete trajectories that marks keep from being served."""
        if group.frozen or (self.selection.is_trivial and not group.is_marked):
            return ()
        served, _ = self.selection.gate(self.info(group))
        kept = {t.trajectory_uid for t in served.trajectories}
        return tuple(r.trajectory_uid for r in group.complete if r.trajectory_uid not in kept)

    def begin_lease(self, leased: rows.GroupLeased) -> None:
        """A consumer has it; the first time, what is served is settled: all complete
        trajectories that are not excluded."""
        group = self.prompt_groups[leased.prompt_uid]
        group.n_asked = leased.n_asked
        self._unqueue(group)
        self._leased[group.prompt_uid] = group
        self.changed = True
        if group.frozen:
            return
        group.frozen = True
        for record in group.trajectories:
            if record.closing is None:
                self._abort(record, Closing(group.prompt_uid, "pool", aborted=GROUP_SERVED))
        for uid in leased.excluded:
            record = self.trajectory_index[uid]
            group.complete.remove(record)
            self.counts.trajectories.complete -= 1
            closing = Closing(group.prompt_uid, "pool", aborted=NOT_TRAINABLE)
            self._set_aside(group, record, closing)

    def ack(self, prompt_uid: str) -> None:
        group = self._leased.pop(prompt_uid)
        self.counts.groups.acked += 1
        self.counts.steps.acked += self._close(group, "acked")
        self.counts.trajectories.acked += len(group.complete)
        self._notice("acked", prompt_uid)

    def give_back(self, returned: rows.GroupReturned) -> None:
        """Return a leased group to the front. Call in reverse order for the groups of one lease."""
        group = self._leased.pop(returned.prompt_uid)
        if group.retired is not None or not self._take_out_leaving(group):
            self._drop(group, group.retired or TOO_FEW_ROLLOUTS)
            return
        group.delivery += 1
        self._write(group, returned)
        self._order.give_back(group)
        self._ready[group.prompt_uid] = group
        self._ready.move_to_end(group.prompt_uid, last=False)
        self._note_version(group)
        self._notice("returned", group.prompt_uid, delivery=group.delivery)
        self._judge(group)
        self._trim()

    def _take_out_leaving(self, group: GroupRecord) -> bool:
        """Take out trajectories deleted while a consumer had the group; false: it cannot go on."""
        if not group.leaving:
            return True
        try:
            erasure = self._erasure(group, *group.leaving)
        except JournalError as e:
            logger.error(
                "%s; group %r in channel %r is dropped with what is deleted of it",
                *(e, group.prompt_uid, self.name),
            )
            return False
        for uid in group.leaving:
            self._take_out(group, self.trajectory_index[uid])
        if len(group.complete) < _least(group):
            return False
        self._erase(group, erasure)
        self._writer.scrub()
        group.leaving = ()
        return True

    # -- time --------------------------------------------------------------------------------

    def expire(self) -> None:
        """Do what is due; of what is too old about `AT_ONCE`: nobody waits for thousands."""
        n = 0
        while n < AT_ONCE and (due := self.timers.pop_until(self.now)) is not None:
            timer, group = due[0], self.prompt_groups[due[1]]
            if timer == RETENTION:
                n += group.size
                self.retire(rows.GroupRetired(group.prompt_uid, RETENTION))
            elif timer == SIBLINGS:
                awaited = rows.SiblingsAwaited(group.prompt_uid)
                self._write(group, awaited)
                self.end_wait(awaited)
            elif timer == HOLD:
                ended = rows.HoldEnded(group.prompt_uid)
                self._write(group, ended)
                self.end_hold(ended)
            elif timer == REWARD_WAIT:
                over = rows.RewardsAwaited(group.prompt_uid, -math.inf)
                self._write(group, over)
                self.await_rewards(over)
                self._judge(group)
            else:
                self.close_by_deadline(rows.GroupDue(group.prompt_uid), timer)

    def close_by_deadline(self, due: rows.GroupDue, reason: str = DEADLINE) -> None:
        """Serve it with what is complete, or drop it."""
        group = self.prompt_groups[due.prompt_uid]
        if len(group.complete) >= _least(group):
            self._write(group, due)
            self._make_due(group, reason)
        else:
            self._drop(group, reason)


def _least(group: GroupRecord) -> int:
    """Complete trajectories without which it is not served."""
    return group.terms.min_rollouts if group.terms else 1
