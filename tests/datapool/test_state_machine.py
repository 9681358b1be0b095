"""Random interleavings of every operation against a naive model.

The model keeps everything for ever and finds its answers by looking at all of it; the pool must
agree on every answer, on what is served in which order, on every count, and conserve groups,
trajectories and steps. At the end the same calls are replayed into a fresh pool, which must come
out equal: that is what a journal will rely on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from datapool import ChannelConfig, DataPool, DataPoolError, PoolConfig, Step

PROMPTS = [f"p{i}" for i in range(6)]
ROLLOUTS = range(3)
CHANNELS = ["train", "val"]
# Mostly one channel: what happens between groups needs several of them in the same place.
ANY_CHANNEL = st.sampled_from(["train"] * 4 + ["val"])


@dataclass
class Rollout:
    prompt: str
    state: str = "open"  # open | complete | aborted
    by: str = ""
    reward: float | None = None
    retry: bool = False
    steps: dict[int, Step] = field(default_factory=dict)
    last: int | None = None


@dataclass
class Prompt:
    opened: int
    state: str = "open"  # open (ready or not) | leased | acked | dropped
    terms: tuple[int, int, float | None] | None = None
    rollouts: list[str] = field(default_factory=list)
    complete: list[str] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)  # event at which it had 1, 2, … complete
    due: int | None = None
    deadline: tuple[float, int] | None = None
    frozen: bool = False
    delivery: int = 1


class Model:
    """One channel, without any index."""

    def __init__(self, config: ChannelConfig) -> None:
        self.config = config
        self.prompts: dict[str, Prompt] = {}
        self.rollouts: dict[str, Rollout] = {}
        self.events = 0
        self.returns = 0
        self.shut = False
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
        keyed = [(k, p) for p, g in self.prompts.items() if (k := self.key(g, n)) is not None]
        return [p for _, p in sorted(keyed)]

    def count(self, state: str) -> int:
        return sum(g.state == state for g in self.prompts.values())

    def has_credit(self) -> bool:
        limit = self.config.max_outstanding_groups
        return limit is None or self.count("open") < limit

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
            g = self.prompts[p] = Prompt(self.event())
        elif g.due is None:
            g.reached = []
        g.terms = (n, least, deadline_s)
        self.set_deadline(g, deadline_s, now)
        self.settle(p)
        return "accepted"

    def set_deadline(self, g: Prompt, seconds: float | None, now: float) -> None:
        seconds = self.config.group_deadline_s if seconds is None else seconds
        if seconds is None or g.due is not None:
            return
        if g.deadline is None or g.deadline[0] != now + seconds:
            g.deadline = (now + seconds, self.event())

    def find(self, uid: str, p: str, now: float) -> Rollout | str:
        r = self.rollouts.get(uid)
        if r is not None:
            return r if r.prompt == p else "TrajectoryConflictError"
        g = self.prompts.get(p)
        r = self.rollouts[uid] = Rollout(p)
        if g and (g.frozen or g.state in ("acked", "dropped")):
            r.state, r.by = "aborted", "pool"
            return r
        if g is None:
            g = self.prompts[p] = Prompt(self.event())
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
        return "duplicate" if known else "accepted"

    def submit(self, step: Step, now: float) -> str:
        answer = self.try_submit(step, now)
        if answer in ("accepted", "duplicate", "late"):
            self.seen[answer] += 1
        else:
            self.seen["conflict" if answer == "StepConflictError" else "rejected"] += 1
        return answer

    def try_submit(self, step: Step, now: float) -> str:
        i = step.step_index
        r = self.find(step.trajectory_uid, step.prompt_uid, now)
        if isinstance(r, str):
            return r
        if i in r.steps:
            return "duplicate" if r.steps[i] == step else "StepConflictError"
        if r.state != "open":
            return "late"
        if r.last is not None and (i > r.last or step.is_last):
            return "StepIndexError"
        if step.is_last and any(k > i for k in r.steps):
            return "StepIndexError"
        r.steps[i] = step
        if step.is_last:
            r.last = i
        if r.last is not None and all(k in r.steps for k in range(r.last + 1)):
            self.finish(step.trajectory_uid, None, "is_last")
        return "accepted"

    def finish(self, uid: str, reward: float | None, by: str) -> None:
        r = self.rollouts[uid]
        r.state, r.reward, r.by = "complete", reward, by
        g = self.prompts[r.prompt]
        g.complete.append(uid)
        if g.terms is None and g.due is None:
            g.reached.append(self.event())
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
            return "TrajectoryClosedError"
        return r.state

    def abort_trajectory(self, uid: str, retry: bool) -> str:
        r = self.rollouts.get(uid)
        if r is None:
            return "UnknownTrajectoryError"
        if r.state == "open":
            self.abort(r, "abort", retry)
            self.settle(r.prompt)
            return "aborted"
        if r.by == "pool":
            return "late"
        if r.state == "complete" or (retry and not r.retry):
            return "TrajectoryClosedError"
        if r.retry and not retry and self.prompts[r.prompt].state in ("open", "leased"):
            r.retry = False
            self.settle(r.prompt)
        return "aborted"

    def drop_group(self, p: str) -> str | None:
        g = self.prompts.get(p)
        if g is None:
            return "UnknownGroupError"
        if g.state in ("leased", "acked"):
            return "GroupClosedError"
        if g.state == "open":
            self.close(p, "dropped")
        return None

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
        if g.terms:
            n, least, _ = g.terms
            states = [self.rollouts[u] for u in g.rollouts]
            final = sum(r.state == "aborted" and not r.retry for r in states)
            running = any(r.state == "open" for r in states)
            if len(g.complete) >= n:
                self.make_due(g)
            elif not running and len(g.complete) + final >= n:
                if len(g.complete) >= least:
                    self.make_due(g)
                else:
                    self.close(p, "dropped")
        self.trim()

    def make_due(self, g: Prompt) -> None:
        g.due = self.event()
        g.deadline = None
        self.trim()

    def trim(self) -> None:
        limit = self.config.max_queue_size
        while limit is not None and len(self.ready()) > limit:
            self.close(self.ready()[0], "dropped")

    def lease(self, n: int | None, size: int) -> list[str] | None:
        chosen = self.ready(n)[:size]
        if len(chosen) < size:
            return None
        for p in chosen:
            g = self.prompts[p]
            g.state, g.frozen, g.deadline = "leased", True, None
            for uid in g.rollouts:
                if self.rollouts[uid].state == "open":
                    self.abort(self.rollouts[uid], "pool")
        return chosen

    def give_back(self, chosen: list[str]) -> None:
        for p in reversed(chosen):
            g = self.prompts[p]
            self.returns -= 1
            g.state, g.due, g.delivery = "open", self.returns, g.delivery + 1
            self.trim()

    def tick(self, now: float) -> None:
        due = [(g.deadline, p) for p, g in self.prompts.items() if g.deadline and g.state == "open"]
        for (at, _), p in sorted(due):
            g = self.prompts[p]
            if at > now or g.state != "open":
                continue
            g.deadline = None
            if len(g.complete) >= (g.terms[1] if g.terms else 1):
                self.make_due(g)
            else:
                self.close(p, "dropped")

    def next_deadline(self) -> float | None:
        times = [g.deadline[0] for g in self.prompts.values() if g.deadline and g.state == "open"]
        return min(times, default=None)


class DataPoolMachine(RuleBasedStateMachine):
    @initialize(
        n=st.integers(1, 2),
        queue=st.sampled_from([None, None, 1, 2]),
        outstanding=st.sampled_from([None, 2]),
        deadline=st.sampled_from([None, 15]),
    )
    def start(self, n, queue, outstanding, deadline):
        self.config = ChannelConfig(
            n_rollouts=n,
            max_queue_size=queue,
            max_outstanding_groups=outstanding,
            group_deadline_s=deadline,
            lease_s=10,
        )
        self.pool = DataPool(PoolConfig(default=self.config))
        self.models = {name: Model(self.config) for name in CHANNELS}
        self.now = 0.0
        self.leases: dict[str, dict[str, Any]] = {}
        self.calls: list[tuple[str, tuple[Any, ...], float]] = []
        self.tickets = 0

    def call(self, name: str, *args: Any) -> Any:
        """The pool's answer, or the name of its error."""
        self.calls.append((name, args, self.now))
        return replay(self.pool, name, args, self.now)

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
    )
    def submit_steps(self, channel, p, picks):
        steps = [
            Step(
                prompt_ids=[1],
                response_ids=[token],
                trajectory_uid=f"{p}/{k}",
                prompt_uid="elsewhere" if stray else p,
                step_index=index,
                is_last=last,
            )
            for k, index, token, last, stray in picks
        ]
        answers = self.call("apply_steps", steps, channel)
        model = self.models[channel]
        assert [named(a) for a in answers] == [model.submit(s, self.now) for s in steps]

    @rule(
        channel=ANY_CHANNEL,
        p=st.sampled_from(PROMPTS),
        k=st.sampled_from(ROLLOUTS),
        reward=st.sampled_from([None, 1.0, 1.0, 0.0]),
        twice=st.booleans(),
    )
    def complete_trajectory(self, channel, p, k, reward, twice):
        for _ in range(1 + twice):
            answer = self.call("complete_trajectory", f"{p}/{k}", reward, None, channel)
            assert answer == self.models[channel].complete_trajectory(f"{p}/{k}", reward)

    @rule(
        channel=ANY_CHANNEL,
        p=st.sampled_from(PROMPTS),
        ends=st.lists(
            st.sampled_from(["complete", "complete", "abort", "retry", "run"]), max_size=3
        ),
    )
    def run_rollouts(self, channel, p, ends):
        """What a well-behaved producer does, so that many groups get ready."""
        for k, end in enumerate(ends):
            self.submit_steps(channel, p, [(k, 0, 5, False, False)])
            if end == "complete":
                self.complete_trajectory(channel, p, k, 1.0, False)
            elif end != "run":
                self.abort_trajectory(channel, p, k, end == "retry")

    @rule(
        channel=ANY_CHANNEL,
        p=st.sampled_from(PROMPTS),
        k=st.sampled_from(ROLLOUTS),
        retry=st.booleans(),
    )
    def abort_trajectory(self, channel, p, k, retry):
        answer = self.call("abort_trajectory", f"{p}/{k}", "crash", retry, channel)
        assert answer == self.models[channel].abort_trajectory(f"{p}/{k}", retry)

    @rule(channel=ANY_CHANNEL, p=st.sampled_from(PROMPTS))
    def drop_group(self, channel, p):
        assert self.call("drop_group", p, "test", channel) == self.models[channel].drop_group(p)

    # consumers

    @rule(
        channel=ANY_CHANNEL,
        n=st.sampled_from([None, None, 1, 2, 3]),
        size=st.integers(1, 2),
        lease_s=st.sampled_from([None, 3]),
    )
    def lease_batch(self, channel, n, size, lease_s):
        lease = self.call("lease_batch", n, channel, size, lease_s)
        model = self.models[channel]
        expected = model.lease(n, size)
        assert (lease and [g.prompt_uid for g in lease.groups]) == expected
        if lease is None:
            return
        for group in lease.groups:
            g = model.prompts[group.prompt_uid]
            assert group.delivery == g.delivery
            assert [t.trajectory_uid for t in group.trajectories] == g.complete
            for t in group.trajectories:
                self.check_served(model.rollouts[t.trajectory_uid], t)
        self.tickets += 1
        self.leases[lease.lease_id] = {
            "channel": channel,
            "groups": expected,
            "expires": (lease.expires_at, self.tickets),
            "state": "held",
        }
        assert lease.expires_at == self.now + (lease_s or 10)

    def check_served(self, r: Rollout, t: Any) -> None:
        assert [s.step_index for s in t.steps] == sorted(r.steps)
        assert [s.is_last for s in t.steps] == [False] * (len(t.steps) - 1) + [True]
        assert t.reward == r.reward
        for s in t.steps:
            assert s.response_ids.tolist() == r.steps[s.step_index].response_ids.tolist()

    @rule(pick=st.sampled_from([0, 0, 0, 1, 1, 2, 3, -1]), how=st.sampled_from(["ack", "nack"]))
    def end_lease(self, pick, how):
        # Counted from the latest, so that most picks hit one that is still held.
        lease_id = f"lease-{len(self.leases) - pick}"
        answer = self.call(how, lease_id)
        lease = self.leases.get(lease_id)
        ended = {"ack": "acked", "nack": "nacked"}[how]
        if lease is None:
            assert answer == "UnknownLeaseError"
        elif lease["state"] == "expired":
            assert answer == "LeaseExpiredError"
        elif lease["state"] not in ("held", ended):
            assert answer == "LeaseClosedError"
        else:
            assert answer is None
            if lease["state"] == "held":
                self.end(lease, ended)

    def end(self, lease: dict[str, Any], state: str) -> None:
        model = self.models[lease["channel"]]
        lease["state"] = state
        if state == "acked":
            for p in lease["groups"]:
                model.close(p, "acked")
        else:
            model.give_back(lease["groups"])

    @rule(pick=st.integers(1, 5), lease_s=st.sampled_from([None, 2, 20]))
    def renew(self, pick, lease_s):
        answer = self.call("renew", f"lease-{pick}", lease_s)
        lease = self.leases.get(f"lease-{pick}")
        if lease is None or lease["state"] != "held":
            assert isinstance(answer, str)
            return
        assert answer == self.now + (lease_s or 10)
        if answer != lease["expires"][0]:
            self.tickets += 1
            lease["expires"] = (answer, self.tickets)

    # time and end

    @rule(seconds=st.sampled_from([1, 4, 12]))
    def tick(self, seconds):
        self.now += seconds
        self.calls.append(("tick", (), self.now))
        self.pool.tick(self.now)
        held = [v for v in self.leases.values() if v["state"] == "held"]
        for lease in sorted(held, key=lambda v: v["expires"]):
            if lease["expires"][0] <= self.now:
                self.end(lease, "expired")
        for model in self.models.values():
            model.tick(self.now)

    @rule(channel=st.sampled_from([None, *CHANNELS]), really=st.sampled_from([False] * 9 + [True]))
    def shutdown(self, channel, really):
        if really:
            self.call("shutdown", channel)
            for name in CHANNELS if channel is None else [channel]:
                self.models[name].shut = True

    # what always holds

    @invariant()
    def nothing_is_lost(self):
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
            assert stats["tokens"]["stored"] == 2 * s["stored"]

    @invariant()
    def the_counts_are_the_models(self):
        for name, model in self.models.items():
            stats = self.pool.get_statistics(name, now=self.now)
            ready = model.ready()
            assert stats["groups"]["ready"] == len(ready)
            assert stats["groups"]["open"] == model.count("open") - len(ready)
            for state in ("leased", "acked", "dropped"):
                assert stats["groups"][state] == model.count(state)
            states = [r.state for r in model.rollouts.values()]
            assert stats["trajectories"]["open"] == states.count("open")
            assert stats["trajectories"]["aborted"] == states.count("aborted")
            stored = sum(len(r.steps) for r in model.rollouts.values())
            expected = model.seen | model.released | {"stored": stored}
            assert {k: stats["steps"][k] for k in expected} == expected
            assert len(stats["oldest_open"]) == min(5, stats["groups"]["open"])
            versions = stats["oldest_policy_version_ready"]
            assert versions == (0 if ready else None)

    @invariant()
    def the_next_deadline_is_the_first_one(self):
        times = [v["expires"][0] for v in self.leases.values() if v["state"] == "held"]
        times += [t for m in self.models.values() if (t := m.next_deadline()) is not None]
        assert self.pool.next_deadline() == min(times, default=None)

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        again = DataPool(PoolConfig(default=self.config))
        for name, args, now in self.calls:
            replay(again, name, args, now)
        assert again.get_statistics(now=self.now) == self.pool.get_statistics(now=self.now)
        assert again.next_deadline() == self.pool.next_deadline()
        for channel in CHANNELS:
            rest = [drain(p, channel, self.now) for p in (self.pool, again)]
            assert rest[0] == rest[1]


def replay(pool: DataPool, name: str, args: tuple[Any, ...], now: float) -> Any:
    if name == "tick":
        return pool.tick(now)
    try:
        return getattr(pool, name)(*args, now=now)
    except DataPoolError as e:
        return type(e).__name__


def named(answer: Any) -> Any:
    return type(answer).__name__ if isinstance(answer, DataPoolError) else answer


def drain(pool: DataPool, channel: str, now: float) -> list[Any]:
    leases = []
    while (lease := pool.lease_batch(channel=channel, now=now)) is not None:
        leases.append(lease)
    return leases


TestDataPool = DataPoolMachine.TestCase
TestDataPool.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
TestDataPool = pytest.mark.timeout(120)(TestDataPool)
