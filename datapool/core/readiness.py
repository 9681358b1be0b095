"""The readiness of a group: ready, held or dropped, by one pure function of the group, the rules
and the time.

    open ──enough complete──► ready ──lease──► leased ──ack──► acked
      │                        │ ▲              │
      │                        │ └──give back───┘
      └──────deadline, abort───┴──limits, filters, staleness, drop──► dropped(reason)

    group, rules, now ──decide──► Decision(readiness, verdict, look_again_at)
                                            │ changed: a row, which a replay takes as it is

A *declared* group is ready once all its rollouts are complete or aborted. An *undeclared* one is
ready for a consumer of n once n of its trajectories count: a complete trajectory counts once
nothing of the group is open, or after `siblings_wait_s`: whoever is slower is waited for, and not
for ever. At its deadline, or idle, a group is ready with what is complete, or dropped. A group that
is ready whatever a consumer asks for is *due*.

A ready group still takes steps and completions of its open trajectories: whatever is complete when
it is first leased is served, and from then on its content is frozen. A ready group can be *held*
(its holding time is not over, people's marks say so, a reward is missing): it stays, and is not
served until that changes.

Example: of an undeclared group, `n_rollouts` 2 and `siblings_wait_s` 60, two trajectories are
complete at 10 s and 20 s and a third is open. At 20 s it is open and looked at again at 70 s, then
at 80 s, when both count and it is ready. Had the third been complete at 30 s, it would be since.

Owns no state and changes nothing. What is dropped for capacity is the channel's, which sees all
groups; too old a group is dropped when somebody would take it (`is_stale`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Final, NamedTuple

from msgspec.structs import replace

from stepwell.datapool.config import ChannelConfig
from stepwell.datapool.core.records import GroupRecord, Readiness
from stepwell.datapool.errors import SelectionError
from stepwell.datapool.selection import (
    UNSCORED,
    Drop,
    GroupInfo,
    Hold,
    Selection,
    Verdict,
)

DEADLINE: Final = "deadline"
IDLE: Final = "idle"
RETENTION: Final = "retention"
TOO_FEW_ROLLOUTS: Final = "too_few_rollouts"
AWAITS_REWARDS: Final = Hold(UNSCORED)
"""Verdict on a group whose missing rewards may still come; a filter's equal verdict is another
object, and for good."""
AWAITS_FEEDBACK: Final = Hold("holding_time")


class Rules(NamedTuple):
    """The rules that a channel decides by."""

    channel: str
    config: ChannelConfig
    selection: Selection
    retention_s: float | None
    """Seconds after its opening at which a group goes, whatever became of it; None: never."""
    sequence: Callable[[GroupRecord], int]
    """A group's number in the order of readiness; one that is not ready: the next one."""

    examines_all: bool
    """True if groups without marks are looked at before they are served, too."""

    @classmethod
    def of(
        cls,
        channel: str,
        config: ChannelConfig,
        retention_s: float | None,
        sequence: Callable[[GroupRecord], int],
    ) -> Rules:
        """Load the functions that a channel's configuration names.

        Raises:
            SelectionError: its selection names what is not there.
        """
        selection = Selection(config.selection)
        waits = config.reward_wait_s is not None or config.hold_s is not None
        examines_all = waits or not selection.is_trivial
        return cls(channel, config, selection, retention_s, sequence, examines_all)

    def info(self, group: GroupRecord) -> GroupInfo:
        """Return what orders and filters see of a group: its complete trajectories."""
        return GroupInfo(
            prompt_uid=group.prompt_uid,
            channel=self.channel,
            n_rollouts=self.config.n_rollouts if group.terms is None else group.terms.n_rollouts,
            trajectories=tuple(record.info() for record in group.complete),
            sequence=self.sequence(group),
            opened_at=group.opened_at,
            delivery=group.delivery,
            metadata=group.metadata,
            marks=group.marks,
        )


class Decision(NamedTuple):
    """The decision on a group: its readiness, and whether it is served, held or dropped."""

    readiness: Readiness
    verdict: Verdict | None = None
    """None: it waits for its trajectories, or is served."""
    key: float = 0.0
    """Smallest is served first."""
    look_again_at: float | None = None
    """Time at which the decision may change by itself; None: never. Pool clock, seconds."""
    why: str = "complete"
    """Cause of the readiness, for the event."""


def decide(group: GroupRecord, rules: Rules, now: float) -> Decision:
    """Decide what becomes of a group at `now`. To decide again at once gives the same."""
    config = rules.config
    readiness, why = group.readiness, "complete"
    if group.is_leased:
        return Decision(readiness)
    times: list[float] = []  # at which time alone may change it
    if (until := retained_until(group, rules)) is not None:
        if until <= now:
            return Decision(readiness, Drop(RETENTION))
        times.append(until)
    if not readiness.is_due:
        gathered = _gather(group, config, readiness, now, times)
        if isinstance(gathered, Drop):
            return Decision(readiness, gathered)
        readiness, why = gathered
    verdict, key = None, 0.0
    is_ready = readiness.is_due or readiness.ready_for >= config.n_rollouts
    if is_ready and (group.is_marked or rules.examines_all):
        verdict, key = judge(group, rules, now, rules.selection)
        if verdict is AWAITS_FEEDBACK:
            times.append(held_until(group, config) or now)
        elif verdict is AWAITS_REWARDS:
            if readiness.unscored_since is None:
                readiness = replace(readiness, unscored_since=now)
            times.append((readiness.unscored_since or 0.0) + (config.reward_wait_s or 0.0))
    elif readiness.ready_for:
        # A consumer that wants it with what it has will have it judged, in this place.
        if rules.selection.config.order != "fifo":
            with contextlib.suppress(SelectionError):
                key = rules.selection.key(rules.info(group))
        if (until := held_until(group, config)) is not None and now < until:
            times.append(until)
    return Decision(readiness, verdict, key, min(times) if times else None, why)


def implied(group: GroupRecord) -> Readiness:
    """Return the readiness that the trajectories of a group give it without a decision: all that
    are complete count, while nothing of an undeclared group is open. It has no row."""
    readiness, n_complete = group.readiness, len(group.complete)
    if group.terms is not None or group.n_open or readiness.ready_for == n_complete:
        return readiness
    if readiness.is_due or group.is_leased:
        return readiness
    return replace(readiness, ready_for=n_complete)


def _gather(
    group: GroupRecord, config: ChannelConfig, readiness: Readiness, now: float, times: list[float]
) -> tuple[Readiness, str] | Drop:
    """Decide on a group that is not due: whether its complete trajectories are enough. When they
    may be later is added to `times`."""
    n_complete, terms = len(group.complete), group.terms
    if terms is None:
        ready_for = _counted(group, config, readiness.ready_for, now)
        if ready_for < n_complete:
            times.append(group.complete[ready_for].closed_at + config.siblings_wait_s)
        if ready_for != readiness.ready_for:
            readiness = replace(readiness, ready_for=ready_for)
    elif n_complete >= terms.n_rollouts:
        return replace(readiness, is_due=True), "complete"
    elif group.n_open == 0 and n_complete + group.n_final >= terms.n_rollouts:
        if n_complete < terms.min_rollouts:
            return Drop(TOO_FEW_ROLLOUTS)
        return replace(readiness, is_due=True), "aborted"
    ends = [] if group.deadline is None else [(group.deadline, DEADLINE)]
    if config.group_idle_s is not None:
        ends.append((group.touched_at + config.group_idle_s, IDLE))
    if ends:
        end, reason = min(ends)
        if end <= now:
            due = replace(readiness, is_due=True), reason
            return due if n_complete >= group.least else Drop(reason)
        times.append(end)
    return readiness, "complete"


def _counted(group: GroupRecord, config: ChannelConfig, counted: int, now: float) -> int:
    """Return how many complete trajectories of an undeclared group count."""
    complete = group.complete
    if group.n_open == 0:
        return len(complete)
    while counted < len(complete) and complete[counted].closed_at + config.siblings_wait_s <= now:
        counted += 1
    return counted


def judge(
    group: GroupRecord, rules: Rules, now: float, selection: Selection
) -> tuple[Verdict | None, float]:
    """Return what a selection says of a group that somebody could have, and its key."""
    config = rules.config
    if (until := held_until(group, config)) is not None and now < until:
        return AWAITS_FEEDBACK, 0.0
    info = rules.info(group)
    try:
        verdict, key = selection.judge(info), selection.key(info)
    except SelectionError as e:
        # Somebody's function failed; whoever submitted a step cannot help that.
        return Hold(f"selection: {e}"), 0.0
    if selection.config.order == "fifo":
        # Equal keys stand by readiness for the very n that a consumer asks for.
        key = 0.0
    served, refusal = selection.gate(info)
    settled = refusal or isinstance(verdict, Drop) or served.is_scored or group.is_frozen
    if settled or config.reward_wait_s is None:
        return verdict, key
    since = group.readiness.unscored_since
    if since is not None and since + config.reward_wait_s <= now:
        return Drop(UNSCORED) if verdict == AWAITS_REWARDS else verdict, key
    return AWAITS_REWARDS, key


def is_stale(group: GroupRecord, config: ChannelConfig, version: int) -> bool:
    """Return whether its oldest token is too old for it to be served at policy `version`."""
    limit, oldest = config.max_staleness, group.oldest_version
    return limit is not None and oldest is not None and oldest < version - limit


def held_until(group: GroupRecord, config: ChannelConfig) -> float | None:
    """Return when people's time to say something of it is over; None: it has none."""
    return None if config.hold_s is None or group.is_frozen else group.completed_at + config.hold_s


def retained_until(group: GroupRecord, rules: Rules) -> float | None:
    """Return when it goes whatever became of it; None: never."""
    return None if rules.retention_s is None else group.opened_at + rules.retention_s


def without(group: GroupRecord, position: int) -> Readiness:
    """Return the decision on a group whose complete trajectory at `position` was taken out: one
    that made it due may be missing now."""
    readiness = group.readiness
    if readiness.is_due:
        is_open = not group.is_frozen and len(group.complete) < group.least
        return replace(readiness, is_due=False, ready_for=0) if is_open else readiness
    if position >= readiness.ready_for:
        return readiness
    return replace(readiness, ready_for=readiness.ready_for - 1)
