"""Random interleavings of every operation against a naive model.

The model keeps everything for ever and finds its answers by looking at all of it; the pool must
agree on every answer, on what is served in which order, on every count, and conserve groups,
trajectories and steps. The pool writes a log, keeps few payloads in memory, and is now and then
rebuilt from that log. At the end the same calls go into a fresh pool, without a log and never
restarted, which must answer and come out the same: a restart may not be noticed by anybody.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from stepwell.datapool import ChannelConfig, DataPool, DataPoolError, PoolConfig, Step
from stepwell.datapool.codec import Base, PackedLease, decoder, encoder, pack
from stepwell.datapool.config import SelectionConfig
from stepwell.datapool.ops import Deleted
from stepwell.datapool.store.replay import restore
from stepwell.datapool.store.segments import Row
from tests.datapool.conftest import SyncPool

PROMPTS = [f"p{i}" for i in range(8)]
ROLLOUTS = range(3)
CHANNELS = ["train", "val"]
# Mostly one channel: what happens between groups needs several of them in the same place.
ANY_CHANNEL = st.sampled_from(["train"] * 5 + ["val"])
ENDS = st.lists(
    st.sampled_from(["complete", "complete", "complete", "abort", "retry", "run"]), max_size=3
)
# Counted from the latest live one; beyond those it is any name.
WHICH = st.sampled_from([0, 0, 0, 1, 1, 2, 3, 4, 5, 8, 13])
# Counted from the latest, so that most picks hit a lease that is still held.
PICK = st.sampled_from([0, 0, 0, 0, 1, 1, 2, -1])
ENDED = {"ack": "acked", "nack": "nacked"}


@dataclass
class Rollout:
    prompt: str
    state: str = "open"  # open | complete | aborted
    by: str = ""
    reward: float | None = None
    retry: bool = False
    steps: dict[int, Step] = field(default_factory=dict)
    last: int | None = None
    outcome: float | None = None
    step_rewards: dict[int, float] = field(default_factory=dict)
    trainable: bool | None = None
    tags: tuple[str, ...] = ()
    deleted: bool = False

    def step_reward(self, index: int) -> float | None:
        return self.step_rewards.get(index, self.steps[index].reward)

    def is_scored(self) -> bool:
        return self.outcome is not None or any(self.step_reward(i) is not None for i in self.steps)

    def served(self) -> list[Step]:
        """The steps as a consumer gets them."""
        steps = [replace(self.steps[i], reward=self.step_reward(i)) for i in sorted(self.steps)]
        reward = steps[-1].reward
        if self.outcome is not None:
            reward = (reward or 0.0) + self.outcome
        return [*steps[:-1], replace(steps[-1], reward=reward, is_last=True)]


@dataclass
class Prompt:
    opened: int
    state: str = "open"  # open (ready or not) | leased | acked | dropped
    terms: tuple[int, int, float | None] | None = None
    rollouts: list[str] = field(default_factory=list)
    complete: list[str] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)  # of the last complete ones, until when
    reached: list[int] = field(default_factory=list)  # event at which it had 1, 2, … complete
    due: int | None = None
    opened_at: float = 0.0
    touched_at: float = 0.0
    completed_at: float = 0.0  # the last time
    heard: float | None = None  # people's feedback was waited for after that completion
    reward_due: float | None = None
    retired: bool = False  # to be dropped when it is handed back
    leaving: list[str] = field(default_factory=list)  # to be deleted when it is handed back
    deadline: float | None = None
    tags: tuple[str, ...] = ()
    frozen: bool = False
    delivery: int = 1
    oldest: int | None = None
    trainable: bool | None = None
    withheld: bool = False  # a consumer of fewer was refused it, since then nothing has changed


class Model:
    """One channel, without any index."""

    def __init__(self, config: ChannelConfig, retention_s: float | None) -> None:
        self.config = config
        self.retention_s = retention_s
        self.now = 0.0
        self.prompts: dict[str, Prompt] = {}
        self.rollouts: dict[str, Rollout] = {}
        self.events = 0
        self.returns = 0
        self.shut = False
        self.version = 0
        self.first_version: int | None = None
        self.n_stale = 0
        self.seen = {"accepted": 0, "duplicate": 0, "late": 0, "conflict": 0, "rejected": 0}
        self.released = {"acked": 0, "dropped": 0}

    def event(self) -> int:
        self.events += 1
        return self.events

    # what is where

    def key(self, g: Prompt, n: int | None) -> int | None:
        """Place in the ready order for a fetch of n; None if not ready."""
        n = n or self.config.n_rollouts
        if g.state != "open":
            return None
        if g.due is not None:
            return g.due
        if g.terms is None and len(g.reached) >= n:
            return g.reached[n - 1]
        return None

    def ready(self, n: int | None = None) -> list[str]:
        """Held ones, too."""
        keyed = [(k, p) for p, g in self.prompts.items() if (k := self.key(g, n)) is not None]
        return [p for _, p in sorted(keyed)]

    def is_refused(self, g: Prompt) -> bool:
        """Its holding time, marks or the filter do not let it be served."""
        if self.is_held(g):
            return True
        served = [self.rollouts[u] for u in g.complete if self.rollouts[u].trainable is not False]
        if g.trainable is False or not served:
            return True
        if all(r.is_scored() for r in served):
            return False
        return self.awaits(g) or bool(self.config.selection.filters)

    def is_held(self, g: Prompt) -> bool:
        hold_s = self.config.hold_s
        return hold_s is not None and not g.frozen and self.now < g.completed_at + hold_s

    def awaits(self, g: Prompt) -> bool:
        """Its rewards may still come."""
        is_over = g.reward_due is not None and g.reward_due <= self.now
        return self.config.reward_wait_s is not None and not (g.frozen or is_over)

    def is_unscored(self, g: Prompt) -> bool:
        """It would be served, and lacks rewards for which a channel waits."""
        served = [self.rollouts[u] for u in g.complete if self.rollouts[u].trainable is not False]
        return (
            self.config.reward_wait_s is not None
            and self.key(g, None) is not None
            and not (g.frozen or g.trainable is False or self.is_held(g))
            and bool(served)
            and not all(r.is_scored() for r in served)
        )

    def judge(self, p: str) -> None:
        """Begin an unscored group's wait for rewards; drop it after that if filters are set."""
        g = self.prompts[p]
        if not self.is_unscored(g):
            return
        if g.reward_due is None:
            g.reward_due = self.now + self.config.reward_wait_s
        if not self.awaits(g) and self.config.selection.filters:
            self.close(p, "dropped")

    def watch(self) -> None:
        """After every change."""
        for p, g in list(self.prompts.items()):
            if not self.is_held(g):
                g.heard = self.now
            self.judge(p)

    def held(self) -> list[str]:
        return [p for p in self.ready() if self.is_refused(self.prompts[p])]

    def count(self, state: str) -> int:
        return sum(g.state == state for g in self.prompts.values())

    def has_credit(self) -> bool:
        limit = self.config.max_outstanding_groups
        if limit is not None and self.count("open") - len(self.held()) >= limit:
            return False
        ahead, per_version = self.config.max_ahead_versions, self.config.groups_per_version
        if ahead is not None and per_version is not None:
            versions = self.version - (self.first_version or 0) + 1 + ahead
            if len(self.prompts) - self.count("dropped") >= versions * per_version:
                return False
        return self.has_room()

    def has_room(self) -> bool:
        limit = self.config.max_queue_size
        return self.config.overflow != "block" or limit is None or len(self.ready()) < limit

    # operations; each returns the answer, or the name of the error

    def open_group(self, p: str, n: int, least: int, deadline_s: float | None, now: float) -> str:
        g = self.prompts.get(p)
        if g and g.state in ("acked", "dropped"):
            return "GroupClosedError"
        if g and g.terms:
            return "duplicate" if g.terms == (n, least, deadline_s) else "GroupConflictError"
        if g and g.frozen:
            return "GroupClosedError"
        if self.shut:
            return "ChannelShutDownError"
        if g is None:
            if not self.has_credit():
                return "PoolFullError"
            g = self.open(p)
        elif g.due is None or not self.is_late(g):
            g.due, g.reached, g.withheld = None, [], False
        g.terms = (n, least, deadline_s)
        self.set_deadline(g, deadline_s, now)
        self.touch(g)
        self.settle(p)
        return "accepted"

    def open(self, p: str) -> Prompt:
        g = self.prompts[p] = Prompt(self.event(), opened_at=self.now, touched_at=self.now)
        return g

    def touch(self, g: Prompt) -> None:
        g.touched_at = self.now

    def set_deadline(self, g: Prompt, seconds: float | None, now: float) -> None:
        seconds = self.config.group_deadline_s if seconds is None else seconds
        if seconds is None or g.due is not None:
            return
        g.deadline = now + seconds

    def is_late(self, g: Prompt) -> bool:
        return g.deadline is not None and g.deadline <= self.now

    def find(self, uid: str, p: str, now: float, base: int | None = None) -> Rollout | str:
        r = self.rollouts.get(uid)
        if r is not None:
            return r if r.prompt == p else "TrajectoryConflictError"
        g = self.prompts.get(p)
        settled = g is not None and (g.frozen or g.state in ("acked", "dropped"))
        if not settled and base is not None:
            return "UnknownBaseError"
        if g is None and not self.has_room():
            return "PoolFullError"
        r = self.rollouts[uid] = Rollout(p)
        if settled:
            r.state, r.by = "aborted", "pool"
            return r
        if g is None:
            g = self.open(p)
            self.set_deadline(g, None, now)
        g.rollouts.append(uid)
        return r

    def open_trajectory(self, uid: str, p: str, now: float) -> str:
        known = uid in self.rollouts
        r = self.find(uid, p, now)
        if isinstance(r, str):
            return r
        if self.prompts[p].state in ("acked", "dropped") or r.state == "aborted":
            return "late"
        if not known:
            self.touch(self.prompts[p])
        return "duplicate" if known else "accepted"

    def submit(self, step: Step, base: Base | None, now: float) -> str:
        answer = self.try_submit(step, base, now)
        if answer in ("accepted", "duplicate", "late"):
            self.seen[answer] += 1
        elif answer != "UnknownBaseError":
            self.seen["conflict" if answer == "StepConflictError" else "rejected"] += 1
        return answer

    def try_submit(self, step: Step, base: Base | None, now: float) -> str:
        i = step.step_index
        r = self.find(step.trajectory_uid, step.prompt_uid, now, base)
        if isinstance(r, str):
            return r
        knows_base = base is None or (
            base.step_index in r.steps and base_of(r.steps[base.step_index]) == base
        )
        if i in r.steps:
            if not knows_base:
                return "UnknownBaseError"
            same = replace(step, parent_index=r.steps[i].parent_index)
            return "duplicate" if r.steps[i] == same else "StepConflictError"
        if r.state != "open":
            return "late"
        if r.last is not None and (i > r.last or step.is_last):
            return "StepIndexError"
        if step.is_last and any(k > i for k in r.steps):
            return "StepIndexError"
        if not knows_base:
            return "UnknownBaseError"
        parent = parent_of(step, r.steps) if base is None else base.step_index
        r.steps[i] = replace(step, parent_index=parent)
        self.touch(self.prompts[r.prompt])
        if step.is_last:
            r.last = i
        if r.last is not None and all(k in r.steps for k in range(r.last + 1)):
            self.finish(step.trajectory_uid, None, "is_last")
        return "accepted"

    def finish(self, uid: str, reward: float | None, by: str) -> None:
        r = self.rollouts[uid]
        r.state, r.reward, r.by = "complete", reward, by
        if reward is not None:
            r.outcome = reward
        g = self.prompts[r.prompt]
        g.complete.append(uid)
        g.completed_at, g.heard = self.now, None
        g.oldest = min(
            s.policy_version for u in g.complete for s in self.rollouts[u].steps.values()
        )
        running = any(self.rollouts[u].state == "open" for u in g.rollouts)
        if running and g.due is None and g.terms is None:
            g.waits.append(self.now + self.config.siblings_wait_s)
        g.withheld = False
        self.settle(r.prompt)

    def abort(self, r: Rollout, by: str, retry: bool = False) -> None:
        self.released["dropped"] += len(r.steps)
        r.state, r.by, r.retry, r.steps = "aborted", by, retry, {}

    def complete_trajectory(self, uid: str, reward: float | None) -> str:
        r = self.rollouts.get(uid)
        if r is None:
            return "UnknownTrajectoryError"
        if r.state == "open":
            if r.steps:
                self.finish(uid, reward, "complete")
                return "complete"
            self.abort(r, "complete")
            r.reward = reward
            self.settle(r.prompt)
            return "aborted"
        if r.by == "pool":
            return "late"
        if r.by == "abort" or r.reward != reward:
            return self.ended(r)
        return r.state

    def abort_trajectory(self, uid: str, retry: bool) -> str:
        r = self.rollouts.get(uid)
        if r is None:
            return "UnknownTrajectoryError"
        if r.state == "open":
            self.abort(r, "abort", retry)
            self.settle(r.prompt)
            return "aborted"
        is_live = self.prompts[r.prompt].state in ("open", "leased")
        gives_up = r.retry and not retry and is_live
        if r.by == "pool" and not gives_up:
            return "late"
        if r.state == "complete" or (retry and not r.retry):
            return self.ended(r)
        if gives_up:
            r.retry = False
            self.settle(r.prompt)
        return "aborted"

    def ended(self, r: Rollout) -> str:
        return "TrajectoryCompletedError" if r.state == "complete" else "TrajectoryClosedError"

    def drop_group(self, p: str) -> str | None:
        g = self.prompts.get(p)
        if g is None:
            return "UnknownGroupError"
        if g.state in ("leased", "acked"):
            return "GroupClosedError"
        if g.state == "open":
            self.close(p, "dropped")
        return None

    def set_reward(self, uid: str, reward: float, index: int | None) -> str:
        r = self.rollouts.get(uid)
        if r is None:
            return "UnknownTrajectoryError"
        g = self.prompts[r.prompt]
        if g.frozen or g.state in ("acked", "dropped") or r.state == "aborted":
            return "late"
        if index is None:
            r.outcome = reward
        elif index in r.steps:
            r.step_rewards[index] = reward
        else:
            return "StepIndexError"
        g.withheld = False
        return "accepted"

    def mark_group(self, p: str, trainable: bool | None, tags: Any) -> bool | str | None:
        g = self.prompts.get(p)
        if g is None:
            return "UnknownGroupError"
        if g.state in ("acked", "dropped"):
            return "GroupClosedError"
        g.trainable, g.withheld = trainable, False
        g.tags = g.tags if tags is None else tags
        return trainable

    def mark_trajectory(self, uid: str, trainable: bool | None, tags: Any) -> bool | str | None:
        r = self.rollouts.get(uid)
        if r is None:
            return "UnknownTrajectoryError"
        g = self.prompts[r.prompt]
        if g.frozen or r.deleted or g.state in ("acked", "dropped"):
            return "TrajectoryClosedError"
        r.trainable, g.withheld = trainable, False
        r.tags = r.tags if tags is None else tags
        return trainable

    def delete_trajectory(self, uid: str) -> tuple[list[str], list[str]]:
        """The trajectory if it is gone, and if a consumer has it."""
        r = self.rollouts.get(uid)
        g = self.prompts.get(r.prompt) if r is not None else None
        if g is None or uid not in g.rollouts or g.state not in ("open", "leased") or r.deleted:
            return [], []
        others = [self.rollouts[u] for u in g.rollouts if u not in (uid, *g.leaving)]
        n_over = sum(self.is_final(self.rollouts[u]) for u in g.rollouts)
        to_come = 0 if g.terms is None or g.frozen else g.terms[0] - n_over
        to_come -= sum(self.rollouts[u].state == "open" for u in g.rollouts)
        is_more = to_come > 0 or any(o.state != "aborted" for o in others)
        if g.state == "leased":
            if not is_more:
                g.retired = True
            elif uid not in g.leaving:
                g.leaving.append(uid)
            return [], [uid]
        if is_more:
            self.remove(uid)
        else:
            self.close(r.prompt, "dropped")
        return [uid], []

    @staticmethod
    def is_final(r: Rollout) -> bool:
        """It uses up a rollout."""
        return r.state == "complete" or (r.state == "aborted" and not r.retry)

    def take_out(self, uid: str) -> None:
        r = self.rollouts[uid]
        g = self.prompts[r.prompt]
        if r.state == "complete":
            at = g.complete.index(uid)
            if g.terms is None and g.due is None and not g.frozen:
                n_counted = len(g.complete) - len(g.waits)
                if at < n_counted:
                    g.reached.pop()
                else:
                    del g.waits[at - n_counted]
            del g.complete[at]
            self.note_oldest(g)
        if r.state == "aborted":
            r.by = "pool"
        else:
            self.abort(r, "pool")
        r.deleted, r.trainable, r.tags, r.outcome, r.step_rewards = True, None, (), None, {}

    def note_oldest(self, g: Prompt) -> None:
        steps = (s for u in g.complete for s in self.rollouts[u].steps.values())
        g.oldest = min((s.policy_version for s in steps), default=None)

    def remove(self, uid: str) -> None:
        r = self.rollouts[uid]
        g = self.prompts[r.prompt]
        counts = r.state != "aborted"
        was_ready = self.key(g, None) is not None
        self.take_out(uid)
        if not counts:
            return
        g.withheld = False
        self.touch(g)
        is_short = len(g.complete) < (g.terms[1] if g.terms else 1)
        if is_short and (g.frozen or (g.due is not None and self.is_late(g))):
            self.close(r.prompt, "dropped")
        elif not g.frozen:
            if was_ready and is_short and g.due is not None:
                g.due, g.reached, g.waits = None, [], []
            self.settle(r.prompt)

    def delete(self, uid: str | None, tag: str | None) -> tuple[list[str], list[str]]:
        """The trajectories that are gone, and those that a consumer has."""
        gone: list[str] = []
        leased: list[str] = []
        for p, g in self.prompts.items():
            of_group = [self.rollouts[u] for u in g.rollouts]
            tagged = tag in g.tags or any(tag in r.tags for r in of_group)
            if g.state == "leased" and (uid in g.rollouts or tagged):
                leased += g.rollouts
                g.retired = True
            elif g.state == "open" and (uid in g.rollouts or tagged):
                gone += g.rollouts
                self.close(p, "dropped")
        return gone, leased

    def advance_version(self, version: int) -> None:
        if self.first_version is None:
            self.first_version = 0 if self.prompts else version
        self.version = max(self.version, version)

    def close(self, p: str, how: str) -> None:
        g = self.prompts[p]
        g.state = how
        for uid in g.rollouts:
            r = self.rollouts[uid]
            if r.state == "open":
                self.abort(r, "pool")
            self.released[how] += len(r.steps)
            r.steps = {}

    def settle(self, p: str) -> None:
        g = self.prompts[p]
        if g.frozen or g.due is not None:
            return
        states = [self.rollouts[u] for u in g.rollouts]
        running = any(r.state == "open" for r in states)
        if g.terms is None:
            if not running:
                g.waits = []
            while len(g.reached) < len(g.complete) - len(g.waits):
                g.reached.append(self.event())
        else:
            n, least, _ = g.terms
            final = sum(r.state == "aborted" and not r.retry for r in states)
            if len(g.complete) >= n:
                self.make_due(g)
            elif not running and len(g.complete) + final >= n:
                if len(g.complete) >= least:
                    self.make_due(g)
                else:
                    self.close(p, "dropped")
        self.judge(p)
        self.trim()

    def make_due(self, g: Prompt) -> None:
        place = self.key(g, None)  # one that is ready already stays where it is
        g.due = self.event() if place is None else place
        g.withheld = False

    def trim(self) -> None:
        limit = self.config.max_queue_size
        if self.config.overflow == "block" or limit is None:
            return
        while len(self.ready()) > limit:
            self.close(self.ready()[0], "dropped")

    def drop_if_stale(self, p: str) -> bool:
        limit, oldest = self.config.max_staleness, self.prompts[p].oldest
        if limit is None or oldest is None or oldest >= self.version - limit:
            return False
        self.n_stale += 1
        self.close(p, "dropped")
        return True

    def choose(self, n: int | None, size: int) -> list[str] | None:
        for p in self.ready():
            self.drop_if_stale(p)

        def servable() -> list[str]:
            held = set(self.held())
            return [p for p in self.ready(n) if p not in held and not self.prompts[p].withheld]

        if len(servable()) < size:
            return None
        while True:
            first = servable()[:size]
            # Groups that only a consumer of fewer could have are looked at as they are reached.
            early = [p for p in first if self.key(self.prompts[p], None) is None]
            refused = 0
            for p in early:
                if self.drop_if_stale(p):
                    refused += 1
                elif self.is_refused(self.prompts[p]):
                    self.prompts[p].withheld = True
                    refused += 1
            if not refused:
                return first if len(first) == size else None

    def lease(self, n: int | None, size: int) -> list[str] | None:
        chosen = self.choose(n, size)
        for p in chosen or ():
            g = self.prompts[p]
            if not g.frozen:
                for uid in g.rollouts:
                    r = self.rollouts[uid]
                    if r.state == "open" or (r.state == "complete" and r.trainable is False):
                        self.abort(r, "pool")
                g.complete = [u for u in g.complete if self.rollouts[u].state == "complete"]
                self.note_oldest(g)
            g.state, g.frozen = "leased", True
        return chosen

    def give_back(self, chosen: list[str]) -> None:
        for p in reversed(chosen):
            g = self.prompts[p]
            for uid in () if g.retired or self.is_old(g) else g.leaving:
                self.take_out(uid)
            least = g.terms[1] if g.terms else 1
            if g.retired or self.is_old(g) or (g.leaving and len(g.complete) < least):
                self.close(p, "dropped")
                continue
            g.leaving = []
            self.returns -= 1
            g.state, g.due, g.delivery = "open", self.returns, g.delivery + 1
            self.trim()

    def is_old(self, g: Prompt) -> bool:
        return self.retention_s is not None and g.opened_at + self.retention_s <= self.now

    def tick(self, now: float) -> None:
        """Each group as of the time at which time alone changes it, the first ones first."""
        while (due := self.next_time()) is not None and due[0] <= now:
            self.now, _, p = due
            self.wake(p)
        self.now = now

    def wake(self, p: str) -> None:
        g = self.prompts[p]
        if self.is_old(g):
            self.close(p, "dropped")
            return
        if not self.is_held(g) and g.heard is None:
            g.heard, g.withheld = self.now, False
        g.waits = [until for until in g.waits if until > self.now]
        ends = self.ends(g)
        if g.due is None and not g.frozen and ends and min(ends) <= self.now:
            if len(g.complete) < (g.terms[1] if g.terms else 1):
                self.close(p, "dropped")
                return
            self.make_due(g)
        self.settle(p)
        self.judge(p)
        self.trim()

    def ends(self, g: Prompt) -> list[float]:
        """Times at which an open group is served with what is complete."""
        idle_s = self.config.group_idle_s
        ends = [] if g.deadline is None else [g.deadline]
        return ends if idle_s is None else [*ends, g.touched_at + idle_s]

    def times(self, g: Prompt) -> list[float]:
        """Times at which time alone changes the group."""
        times = [] if self.retention_s is None else [g.opened_at + self.retention_s]
        if g.due is None and not g.frozen:
            times += self.ends(g)
            times += g.waits[:1] if g.terms is None else []
        is_held = self.config.hold_s is not None and not g.frozen and g.heard is None
        if is_held and (g.due is not None or g.reached):
            times.append(g.completed_at + self.config.hold_s)
        if self.is_unscored(g) and self.awaits(g) and g.reward_due is not None:
            times.append(g.reward_due)
        return times

    def next_time(self) -> tuple[float, int, str] | None:
        live = [(p, g) for p, g in self.prompts.items() if g.state == "open"]
        return min(((at, g.opened, p) for p, g in live for at in self.times(g)), default=None)

    def next_deadline(self) -> float | None:
        first = self.next_time()
        return None if first is None else first[0]


class MemoryLog:
    """Journal in memory: everything is written at once."""

    def __init__(self) -> None:
        self._numbers = count()
        self._rows: dict[int, Row] = {}
        self._states: dict[str, bytes] = {}

    def append(self, channel: str, kind: str, head: bytes, *payload: bytes) -> int:
        number = next(self._numbers)
        self._rows[number] = Row(number, channel, kind, head, b"".join(payload))
        return number

    def delete(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._rows.pop(row, None)

    def put(self, row: int, channel: str, kind: str, head: bytes, *payload: bytes) -> None:
        self._rows[row] = Row(row, channel, kind, head, b"".join(payload))

    def put_state(self, key: str, value: bytes) -> None:
        self._states[key] = value

    def scrub(self) -> None: ...

    def rows(self) -> Iterator[Row]:
        return iter(list(self._rows.values()))

    def states(self) -> dict[str, bytes]:
        return self._states

    def heads(self, rows: Sequence[int]) -> list[tuple[str, bytes]]:
        return [(self._rows[row].kind, self._rows[row].head) for row in rows]

    def read(self, rows: Sequence[int]) -> list[bytes]:
        return [self._rows[row].payload for row in rows]


@dataclass
class Held:
    """A lease, as the model has it."""

    channel: str
    groups: list[str]
    expires: tuple[float, int]
    request: str | None
    content: Any
    state: str = "held"


class DataPoolMachine(RuleBasedStateMachine):
    @initialize(
        n=st.integers(1, 2),
        queue=st.sampled_from([None, None, 1, 2]),
        overflow=st.sampled_from(["drop_oldest", "drop_oldest", "block"]),
        outstanding=st.sampled_from([None, None, 2]),
        ahead=st.sampled_from([None, None, 0, 1]),
        staleness=st.sampled_from([None, None, 1, 2]),
        on_stale=st.sampled_from(["drop", "return"]),
        deadline=st.sampled_from([None, 15]),
        idle=st.sampled_from([None, None, 9]),
        siblings_wait=st.sampled_from([5.25, 5.25, 60.25]),
        # No two of them at the same time: their order then would depend on restarts.
        reward_wait=st.sampled_from([None, None, 6.5]),
        hold=st.sampled_from([None, None, 3.125]),
        retention_days=st.sampled_from([None, None, 2**-11]),
        filters=st.sampled_from([(), (), ("scored",)]),
        memory=st.sampled_from([None, 1, 300]),
        begun=st.lists(ENDS, max_size=3),
    )
    def start(
        self,
        memory,
        n,
        queue,
        outstanding,
        ahead,
        staleness,
        deadline,
        idle,
        siblings_wait,
        reward_wait,
        hold,
        retention_days,
        filters,
        begun,
        **kwargs,
    ):
        self.config = ChannelConfig(
            n_rollouts=n,
            max_queue_size=queue,
            max_outstanding_groups=outstanding,
            max_ahead_versions=ahead,
            groups_per_version=2,
            max_staleness=staleness,
            group_deadline_s=deadline,
            group_idle_s=idle,
            siblings_wait_s=siblings_wait,
            reward_wait_s=reward_wait,
            hold_s=hold,
            lease_s=10,
            selection=SelectionConfig(filters=filters),
            **kwargs,
        )
        self.pool_config = PoolConfig(
            default=self.config, memory_limit_bytes=memory, retention_days=retention_days
        )
        self.log = MemoryLog()
        self.pool = SyncPool(self.pool_config)
        self.pool.attach(self.log)
        retention_s = None if retention_days is None else retention_days * 86_400
        self.models = {name: Model(self.config, retention_s) for name in CHANNELS}
        self.now = 0.0
        self.leases: dict[str, Held] = {}
        self.calls: list[tuple[str, tuple[Any, ...], float, Any]] = []
        self.tickets = 0
        self.recent: dict[tuple[str, str, int], Base] = {}
        # So that most of what follows meets something.
        for p, ends in zip(PROMPTS, begun, strict=False):
            self.run_rollouts("train", p, ends, 2)

    def call(self, name: str, *args: Any) -> Any:
        """The pool's answer, or the name of its error."""
        for model in self.models.values():
            model.watch()
        answer = replay(self.pool, name, args, self.now)
        self.calls.append((name, args, self.now, answer))
        self.pool.write_counts()
        self.pool.spill()
        return answer

    # producers

    @rule(
        channel=ANY_CHANNEL,
        p=st.sampled_from(PROMPTS),
        n=st.integers(1, 3),
        least=st.integers(1, 2),
        deadline_s=st.sampled_from([None, 5, 20]),
    )
    def open_group(self, channel, p, n, least, deadline_s):
        least = min(least, n)
        answer = self.call("open_group", p, n, deadline_s, least, None, channel)
        assert answer == self.models[channel].open_group(p, n, least, deadline_s, self.now)

    @rule(channel=ANY_CHANNEL, p=st.sampled_from(PROMPTS), k=st.sampled_from(ROLLOUTS))
    def open_trajectory(self, channel, p, k):
        answer = self.call("open_trajectory", f"{p}/{k}", p, 0, None, channel)
        assert answer == self.models[channel].open_trajectory(f"{p}/{k}", p, self.now)

    @rule(
        channel=ANY_CHANNEL,
        p=st.sampled_from(PROMPTS),
        picks=st.lists(
            st.tuples(
                st.sampled_from(ROLLOUTS),
                st.integers(0, 2),
                st.sampled_from([5, 5, 5, 6]),
                st.sampled_from([False, False, True]),
                st.sampled_from([False] * 9 + [True]),
            ),
            min_size=1,
            max_size=4,
        ),
        relative=st.booleans(),
    )
    def submit_steps(self, channel, p, picks, relative):
        steps = [build_step(p, *pick) for pick in picks]
        bases = [self.base(step, channel) if relative else None for step in steps]
        packed = [pack(step, base) for step, base in zip(steps, bases, strict=True)]
        sent = [(s.trajectory_uid, s.prompt_uid, p) for s, p in zip(steps, packed, strict=True)]
        answers = self.call("apply_steps", sent, channel)
        for step, base, now_packed, answer in zip(steps, bases, packed, answers, strict=True):
            known = None if now_packed.header.base is None else base
            assert answer == self.models[channel].submit(step, known, self.now)
            if answer not in ("accepted", "duplicate", "late"):
                self.recent.pop((channel, step.trajectory_uid, step.step_index), None)

    def base(self, step: Step, channel: str) -> Base | None:
        """The base that a client has for the step: what it sent before, until that is refused."""
        tip = self.recent.get((channel, step.trajectory_uid, step.step_index - 1))
        self.recent[channel, step.trajectory_uid, step.step_index] = base_of(step)
        return tip

    @rule(
        channel=ANY_CHANNEL,
        which=WHICH,
        reward=st.sampled_from([None, 1.0, 1.0, 0.0]),
        twice=st.booleans(),
    )
    def complete_some(self, channel, which, reward, twice):
        for uid in [self.rollout(channel, which)] * (1 + twice):
            self.complete_trajectory(channel, uid, reward)

    def complete_trajectory(self, channel, uid, reward):
        answer = self.call("complete_trajectory", uid, reward, None, channel)
        assert answer == self.models[channel].complete_trajectory(uid, reward)

    @rule(
        channel=ANY_CHANNEL,
        p=st.sampled_from(PROMPTS),
        ends=ENDS,
        n_steps=st.integers(1, 3),
    )
    def run_rollouts(self, channel, p, ends, n_steps):
        """Run rollouts as a well-behaved producer does, so that many groups get ready."""
        for k, end in enumerate(ends):
            picks = [(k, i, 5, False, False) for i in range(n_steps)]
            self.submit_steps(channel, p, picks, True)
            if end == "complete":
                self.complete_trajectory(channel, f"{p}/{k}", 1.0)
            elif end != "run":
                self.abort_trajectory(channel, f"{p}/{k}", end == "retry")

    @rule(channel=ANY_CHANNEL, which=WHICH, retry=st.booleans())
    def abort_some(self, channel, which, retry):
        self.abort_trajectory(channel, self.rollout(channel, which), retry)

    def abort_trajectory(self, channel, uid, retry):
        answer = self.call("abort_trajectory", uid, "crash", retry, channel)
        assert answer == self.models[channel].abort_trajectory(uid, retry)

    @rule(channel=ANY_CHANNEL, which=WHICH)
    def drop_group(self, channel, which):
        p = self.group(channel, which)
        assert self.call("drop_group", p, "test", channel) == self.models[channel].drop_group(p)

    def group(self, channel: str, which: int) -> str:
        groups = self.models[channel].prompts.items()
        live = [p for p, g in groups if g.state in ("open", "leased")]
        names = [*reversed(live), *PROMPTS]
        return names[which % len(names)]

    def rollout(self, channel: str, which: int) -> str:
        model = self.models[channel]
        live = [
            uid
            for uid, r in model.rollouts.items()
            if model.prompts[r.prompt].state in ("open", "leased")
        ]
        names = [*reversed(live), *(f"{p}/0" for p in PROMPTS)]
        return names[which % len(names)]

    # people and sources

    @rule(
        channel=ANY_CHANNEL,
        which=WHICH,
        reward=st.sampled_from([0.0, 2.0]),
        index=st.sampled_from([None, None, 0, 1]),
    )
    def set_reward(self, channel, which, reward, index):
        uid = self.rollout(channel, which)
        answer = self.call("set_reward", uid, reward, index, channel)
        assert answer == self.models[channel].set_reward(uid, reward, index)

    @rule(
        channel=ANY_CHANNEL,
        which=WHICH,
        whole=st.booleans(),
        trainable=st.sampled_from([False, False, True, None]),
        tags=st.sampled_from([None, (), ("x",)]),
    )
    def mark(self, channel, which, whole, trainable, tags=None):
        marks = {"trainable": trainable} | ({} if tags is None else {"tags": tags})
        if whole:
            p = self.group(channel, which)
            answer = self.call("mark", p, None, channel, marks)
            assert answer == self.models[channel].mark_group(p, trainable, tags)
        else:
            uid = self.rollout(channel, which)
            answer = self.call("mark", None, uid, channel, marks)
            assert answer == self.models[channel].mark_trajectory(uid, trainable, tags)

    @rule(channel=ANY_CHANNEL, which=WHICH, tag=st.sampled_from([None, None, "x"]))
    def delete(self, channel, which, tag):
        uid = None if tag else self.rollout(channel, which)
        answer = Deleted(more=True)
        while answer.more:
            answer += self.call("delete", uid, tag)
        found = [model.delete(uid, tag) for model in self.models.values()]
        assert sorted(answer.trajectories) == sorted(u for gone, _ in found for u in gone)
        assert sorted(answer.leased) == sorted({u for _, leased in found for u in leased})

    @rule(channel=ANY_CHANNEL, which=WHICH)
    def delete_trajectory(self, channel, which):
        uid = self.rollout(channel, which)
        answer = self.call("delete_trajectory", uid)
        found = [model.delete_trajectory(uid) for model in self.models.values()]
        assert sorted(answer.trajectories) == sorted(u for gone, _ in found for u in gone)
        assert sorted(answer.leased) == sorted({u for _, leased in found for u in leased})

    @rule(channel=ANY_CHANNEL, version=st.integers(0, 4))
    def advance_version(self, channel, version):
        self.call("advance_version", version, channel)
        self.models[channel].advance_version(version)

    # consumers

    @rule(
        channel=ANY_CHANNEL,
        n=st.sampled_from([None, None, None, 1, 2, 3]),
        size=st.sampled_from([1, 1, 1, 2]),
        lease_s=st.sampled_from([None, 3]),
        request=st.sampled_from([None, None, "r", "s"]),
    )
    def lease_batch(self, channel, n, size, lease_s, request):
        request = request and f"{channel}-{request}"
        lease = self.call("lease_packed", n, channel, size, lease_s, request)
        held = [v for v in self.leases.values() if v.state == "held" and v.request == request]
        if request is not None and held:
            assert lease == replace(held[0].content, expires_at=held[0].expires[0])
            return
        model = self.models[channel]
        expected = model.lease(n, size)
        assert (lease and [g.prompt_uid for g in lease.groups]) == expected
        if lease is None:
            return
        for group in lease.groups:
            g = model.prompts[group.prompt_uid]
            assert group.delivery == g.delivery
            assert group.n_rollouts == (g.terms[0] if g.terms else n or self.config.n_rollouts)
            assert [t.trajectory_uid for t in group.trajectories] == g.complete
            for t in group.trajectories:
                assert list(t.steps) == model.rollouts[t.trajectory_uid].served()
        self.tickets += 1
        expires = lease.expires_at, self.tickets
        self.leases[lease.lease_id] = Held(channel, expected, expires, request, lease)
        assert lease.expires_at == self.now + (lease_s or 10)

    @rule(
        channel=ANY_CHANNEL,
        ends=ENDS,
        marked=st.sampled_from([None, None, "trajectory", "group"]),
        n=st.sampled_from([None, None, 1, 2]),
        leases=st.lists(st.sampled_from(["ack", "nack", "hold"]), max_size=3),
    )
    def live_through(self, channel, ends, marked, n, leases):
        """A group from its first step on, so that many lives are long."""
        p = f"q{len(self.calls)}"
        self.run_rollouts(channel, p, ends, 1)
        if marked and ends:
            self.mark(channel, 0, marked == "group", False)
        for end in leases:
            before = len(self.leases)
            self.lease_batch(channel, n, 1, None, None)
            if end != "hold" and len(self.leases) > before:
                self.end_lease(0, end)
        if marked and ends:
            self.mark(channel, 0, marked == "group", None)
        self.lease_batch(channel, n, 1, None, None)

    @rule(pick=PICK, how=st.sampled_from(["ack", "nack"]))
    def end_lease(self, pick, how):
        lease_id = f"lease-{len(self.leases) - pick}"
        answer = self.call(how, lease_id)
        lease = self.leases.get(lease_id)
        if lease is None:
            assert answer == "UnknownLeaseError"
        elif lease.state == "expired":
            assert answer == "LeaseExpiredError"
        elif lease.state not in ("held", ENDED[how]):
            assert answer == "LeaseClosedError"
        else:
            assert answer is None
            if lease.state == "held":
                self.end(lease, ENDED[how])

    def end(self, lease: Held, state: str) -> None:
        model = self.models[lease.channel]
        lease.state = state
        if state == "acked":
            for p in lease.groups:
                model.close(p, "acked")
        else:
            model.give_back(lease.groups)

    @rule(pick=PICK, lease_s=st.sampled_from([None, 2, 20]))
    def renew(self, pick, lease_s):
        lease_id = f"lease-{len(self.leases) - pick}"
        answer = self.call("renew", lease_id, lease_s)
        lease = self.leases.get(lease_id)
        if lease is None or lease.state != "held":
            assert isinstance(answer, str)
            return
        assert answer == self.now + (lease_s or 10)
        self.tickets += 1
        lease.expires = answer, self.tickets

    @rule(channel=ANY_CHANNEL, really=st.sampled_from([False, False, True]))
    def release_leases(self, channel, really):
        if really:
            held = [v for v in self.leases.values() if (v.channel, v.state) == (channel, "held")]
            assert self.call("release_leases", channel) == len(held)
            for lease in sorted(held, key=lambda v: v.expires[1]):
                self.end(lease, "nacked")

    # time, restarts and end

    @rule(seconds=st.sampled_from([1, 4, 12]))
    def tick(self, seconds):
        self.now += seconds
        self.call("tick")
        while (due := self.pool.next_deadline()) is not None and due <= self.now:
            self.call("tick")  # the rest of much
        held = [v for v in self.leases.values() if v.state == "held"]
        for lease in sorted(held, key=lambda v: v.expires):
            if lease.expires[0] <= self.now:
                self.end(lease, "expired")
        for model in self.models.values():
            model.tick(self.now)

    @rule()
    def restart(self):
        before = self.pool
        self.pool = SyncPool(self.pool_config)
        restore(self.pool, self.log)
        assert_same(self.pool, before, self.now)
        self.pool.write_counts()
        self.pool.spill()

    @rule(channel=st.sampled_from([None, *CHANNELS]), really=st.sampled_from([False] * 9 + [True]))
    def shutdown(self, channel, really):
        if really:
            self.call("shutdown", channel)
            for name in CHANNELS if channel is None else [channel]:
                self.models[name].shut = True

    # what always holds

    @invariant()
    def nothing_is_lost(self):
        for model in self.models.values():
            model.watch()
        for name in CHANNELS:
            stats = self.pool.get_statistics(name, now=self.now)
            g, t, s = stats["groups"], stats["trajectories"], stats["steps"]
            assert g["submitted"] == (
                g["open"] + g["ready"] + g["leased"] + g["acked"] + g["dropped"]
            )
            assert g["dropped"] == sum(g["drop_reasons"].values())
            assert t["submitted"] == (
                t["open"] + t["complete"] + t["acked"] + t["dropped"] + t["aborted"]
            )
            assert t["aborted"] == sum(t["abort_reasons"].values())
            assert s["submitted"] == (
                s["accepted"] + s["duplicate"] + s["late"] + s["conflict"] + s["rejected"]
            )
            assert s["accepted"] == s["stored"] + s["acked"] + s["dropped"]

    @invariant()
    def the_counts_are_the_models(self):
        for name, model in self.models.items():
            stats = self.pool.get_statistics(name, now=self.now)
            groups, ready, held = stats["groups"], model.ready(), model.held()
            assert (groups["ready"], groups["held"]) == (len(ready), len(held))
            assert stats["ready"] == len(ready) - len(held)
            assert groups["open"] == model.count("open") - len(ready)
            for state in ("leased", "acked", "dropped"):
                assert groups[state] == model.count(state)
            assert groups["drop_reasons"].get("stale", 0) == model.n_stale
            assert groups["returned"] == (model.n_stale if self.config.on_stale == "return" else 0)
            states = [r.state for r in model.rollouts.values()]
            assert stats["trajectories"]["open"] == states.count("open")
            assert stats["trajectories"]["aborted"] == states.count("aborted")
            stored = [s for r in model.rollouts.values() for s in r.steps.values()]
            expected = model.seen | model.released | {"stored": len(stored)}
            assert {k: stats["steps"][k] for k in expected} == expected
            assert stats["tokens"]["stored"] == sum(s.n_tokens for s in stored)
            assert len(stats["oldest_open"]) == min(5, groups["open"])
            oldest = [model.prompts[p].oldest for p in ready]
            assert stats["oldest_policy_version_ready"] == min(oldest, default=None)

    @invariant()
    def the_next_deadline_is_the_first_one(self):
        times = [v.expires[0] for v in self.leases.values() if v.state == "held"]
        times += [t for m in self.models.values() if (t := m.next_deadline()) is not None]
        # A pool may look too early, never too late.
        due = self.pool.next_deadline()
        assert not times or (due is not None and due <= min(times))

    @invariant()
    def memory_is_counted_and_limited(self):
        payloads = 0
        for channel in self.pool.channels.values():
            groups = channel.records.groups.values()
            prompts = sum(len(prompt) for g in groups for prompt in g.prompts)
            steps = [s for g in groups for t in g.trajectories for s in t.steps]
            in_memory = sum(len(s.payload) for s in steps if not s.is_spilled)
            assert channel.memory_bytes == prompts + in_memory
            payloads += in_memory
        limit = self.pool_config.memory_limit_bytes
        assert limit is None or payloads <= limit

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        self.restart()
        days = self.pool_config.retention_days
        again = SyncPool(PoolConfig(default=self.config, retention_days=days))
        for name, args, now, answer in self.calls:
            assert replay(again, name, args, now) == answer
        assert_same(again, self.pool, self.now)
        for channel in CHANNELS:
            rest = [drain(p, channel, self.now) for p in (self.pool, again)]
            assert rest[0] == rest[1]


def parent_of(step: Step, stored: dict[int, Step]) -> int | None:
    """The longest stored step that its prompt begins with."""
    found = [
        (len(tokens), -i)
        for i, other in stored.items()
        if i < step.step_index
        and (tokens := other.token_ids.tolist()) == step.prompt_ids[: other.n_tokens].tolist()
    ]
    return -max(found)[1] if found else None


def base_of(step: Step) -> Base:
    return Base.of(step, pack(step).header.crc)


def build_step(p: str, k: int, index: int, token: int, is_last: bool, is_stray: bool) -> Step:
    """A step of rollout `k`, in one of two versions; each extends the first version before it."""
    prompt = [1]
    for i in range(index):
        prompt += [5, 10 + i]
    return Step(
        prompt_ids=prompt,
        response_ids=[token],
        rollout_log_probs=[-0.5] if k else None,
        reward=0.5 if index == 1 else None,
        metadata={"index": index},
        policy_version=[2, 1, 3][k],
        trajectory_uid=f"{p}/{k}",
        prompt_uid="elsewhere" if is_stray else p,
        step_index=index,
        is_last=is_last,
    )


def replay(pool: DataPool, name: str, args: tuple[Any, ...], now: float) -> Any:
    """The answer as its caller gets it; errors by name."""
    if name == "tick":
        return pool.tick(now)
    if name == "mark":
        *args, marks = args
    else:
        marks = {}
    try:
        answer = getattr(pool, name)(*args, now=now, **marks)
    except DataPoolError as e:
        return type(e).__name__
    if isinstance(answer, PackedLease):
        return decoder(PackedLease).decode(encoder.encode(answer)).unpack()
    if name == "apply_steps":
        return [type(a).__name__ if isinstance(a, DataPoolError) else a for a in answer]
    return answer.trainable if name == "mark" else answer


def assert_same(a: DataPool, b: DataPool, now: float) -> None:
    """Nobody can tell the two pools apart, short of taking something out."""
    spills = any(pool.config.memory_limit_bytes is not None for pool in (a, b))
    for name in CHANNELS:
        stats = [pool.get_statistics(name, now=now) for pool in (a, b)]
        for s in stats if spills else ():
            del s["memory_bytes"]  # what is in memory depends on when it was written
        assert stats[0] == stats[1]
        infos = [
            [replace(channel.info(g), sequence=0) for g in channel.ready_groups()]
            for channel in (a.channels[name], b.channels[name])
        ]
        assert infos[0] == infos[1]
        numbers = [list(pool.channels[name].records.by_number) for pool in (a, b)]
        assert numbers[0] == numbers[1]
    assert [dropping_row(r) for r in a.leases.active()] == [
        dropping_row(r) for r in b.leases.active()
    ]


def dropping_row(lease: Any) -> Any:
    return msgspec.structs.replace(lease, row=0)


def drain(pool: DataPool, channel: str, now: float) -> list[Any]:
    leases = []
    while (lease := pool.lease_batch(channel=channel, now=now)) is not None:
        leases.append(lease)
    return leases


TestDataPool = DataPoolMachine.TestCase
TestDataPool.settings = settings(stateful_step_count=40)
