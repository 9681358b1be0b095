"""`python -m tests.chaos pool-kills`: `kill -9` of the pool's actor under load loses nothing.

Kills at random points, while producers and consumers work; nobody is told::

    producers   groups of 8 rollouts, 3 steps each; some submits are repeated, some rollouts crash
                and are run again, every other group is declared; each leaves one group unfinished
    consumers   lease, then ack; some nack, some never come back and let the lease expire
    killer      SIGKILL, wait for the next life of the actor, check the books, work on, SIGKILL …

Every prompt has a picture a turn, the first one the group's; consumers read those of all steps that
they lease. In the end the pool has the pictures of what is left, and no others.

A ledger here, outside the pool, knows what was sent, what was acknowledged and what came back. In
the end every acknowledged step was served with equal content or (unfinished groups) is stored.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.checks import BenchResult
from benchmarks.pool.cluster import bench_cluster, running_pool
from benchmarks.pool.recovery import kill_once
from benchmarks.pool.workload import (
    ROLLOUTS,
    Call,
    small_calls,
)
from stepwell.datapool import (
    ChannelConfig,
    DataPoolClient,
    Lease,
    Step,
)
from stepwell.datapool.errors import (
    DataPoolError,
    LeaseExpiredError,
    TrajectoryClosedError,
    UnknownTrajectoryError,
)
from stepwell.datapool.pictures import Picture

PRODUCERS = 12
CONSUMERS = 3
TURNS = 3
RETRIES = 0.1
"""Share of submits that are repeated, rollouts that crash and are run again, leases nacked."""
ABANDONED = 0.05
LEASE_S = 3.0
LIMITS = ChannelConfig(n_rollouts=ROLLOUTS)
BETWEEN_KILLS_S = (0.02, 0.6)

Key = tuple[str, int]
PICTURE_BYTES = 20_000
PLACEHOLDER = 151_655


@dataclass(slots=True)
class _Ledger:
    """Ledger of producers and consumers: steps sent, acknowledged and served."""

    expected: dict[str, dict[str, list[Step]]] = field(default_factory=dict)
    """Group -> trajectory -> its steps as they have to be served."""
    acknowledged: dict[Key, Step] = field(default_factory=dict)
    """Acknowledged steps of rollouts that were not withdrawn."""
    received: set[Key] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)
    """Groups that were served with other content than was sent."""
    deliveries: Counter[str] = field(default_factory=Counter)
    bad_pictures: set[str] = field(default_factory=set)
    """Digests of pictures of leased steps that could not be read, or were others."""
    acked: set[str] = field(default_factory=set)
    served_after_ack: set[str] = field(default_factory=set)
    unbalanced: list[str] = field(default_factory=list)
    """Sums that did not add up after a restart."""
    n: Counter[str] = field(default_factory=Counter)
    """Counts of events, by name."""
    down_s: list[float] = field(default_factory=list)
    recovery_s: list[float] = field(default_factory=list)
    """Seconds in which the actor read its journal, for each of its lives after a kill."""

    def receive(self, lease: Lease) -> None:
        for group in lease.groups:
            uid = group.prompt_uid
            self.deliveries[uid] += 1
            if uid in self.acked:
                self.served_after_ack.add(uid)
            got = {t.trajectory_uid: list(t.steps) for t in group.trajectories}
            if got != self.expected[uid]:
                self.changed.add(uid)
            for t in group.trajectories:
                sent = self.expected[uid].get(t.trajectory_uid, [])
                self.received |= {(s.trajectory_uid, s.step_index) for s in t.steps if s in sent}

    def pictures(self, digests: Collection[str]) -> dict[str, bytes]:
        """Return pictures that the pool lacks."""
        self.n["pictures sent"] += len(digests)
        return {digest: _png(digest) for digest in digests}

    @property
    def lost(self) -> set[Key]:
        """Acknowledged steps that nobody received."""
        return self.acknowledged.keys() - self.received


async def run(*, kills: int = 100) -> BenchResult:
    """The whole run."""
    result = BenchResult()
    # Ray tells of every death on stdout, where the result goes.
    with redirect_stdout(sys.stderr), bench_cluster():
        await _killed_under_load(kills, result)
    return result


async def _killed_under_load(kills: int, result: BenchResult) -> None:
    ledger = _Ledger()
    began = time.monotonic()
    async with running_pool(default=LIMITS) as pool:
        client = pool.client
        left_open = await _drive(client, ledger, kills)
        stored = [step for steps in left_open for step in steps]
        outcomes = await client.submit_steps(stored)
        left = {picture.digest for step in stored for picture in step.pictures}
        for step in stored:
            await _look(client, ledger, step.trajectory_uid, [step])
        n_lost = len(ledger.lost) + sum(outcome != "duplicate" for outcome in outcomes)
        counts = await client.get_statistics("train")
    groups, steps, n = counts["groups"], counts["steps"], ledger.n
    n_sent = len(ledger.acknowledged) + n["withdrawn"] + len(stored)
    n_left = groups["ready"] + groups["leased"]
    result.at_least("kills", len(ledger.down_s), kills)
    result.zero(
        acknowledged_steps_lost=n_lost,
        steps_accepted_twice=n["accepted twice"] + abs(steps["accepted"] - n_sent),
        groups_served_changed=len(ledger.changed),
        pictures_lost=len(ledger.bad_pictures),
        pictures_left_behind=abs(counts["pictures"]["stored"] - len(left)),
        groups_served_after_their_ack=len(ledger.served_after_ack),
        groups_never_served=len(ledger.expected.keys() - ledger.deliveries.keys()),
        groups_never_acked=len(ledger.expected) - groups["acked"] + n_left,
        unbalanced_sums=len(ledger.unbalanced),
    )
    result.figures.update(
        elapsed_s=time.monotonic() - began,
        groups=len(ledger.expected),
        groups_left_unfinished=len(left_open),
        steps=n_sent,
        pictures_read=n["pictures read"],
        pictures_sent=n["pictures sent"],
        submits_answered_duplicate=n["duplicate"],
        submits_answered_late=n["late"],
        deliveries=ledger.deliveries.total(),
        leases_nacked=n["nacked"],
        leases_abandoned=n["abandoned"],
        acks_after_expiry=n["expired"],
        down_s_p50=statistics.median(ledger.down_s),
        down_s_max=max(ledger.down_s),
        recovery_s_max=max(ledger.recovery_s),
    )


async def _drive(client: DataPoolClient, ledger: _Ledger, kills: int) -> list[list[Step]]:
    """Everybody at once, until the kills are done and what was finished is acked. Returns the
    steps of groups that are left unfinished."""
    stopped, drained = asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as consumers:
        for i in range(CONSUMERS):
            consumers.create_task(_consume(client, ledger, random.Random(i), stopped, drained))
        async with asyncio.TaskGroup() as producers:
            tasks = [
                producers.create_task(_produce(client, ledger, random.Random(f"p{i}"), i, stopped))
                for i in range(PRODUCERS)
            ]
            await _kill(client, ledger, kills)
            stopped.set()
        while await _is_busy(client):  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0.05)
        drained.set()
    return [task.result() for task in tasks]


async def _is_busy(client: DataPoolClient) -> bool:
    groups = (await client.get_statistics("train"))["groups"]
    return bool(groups["ready"] or groups["leased"])


async def _kill(client: DataPoolClient, ledger: _Ledger, kills: int) -> None:
    rng = random.Random("killer")
    pid = (await client.describe())["pid"]
    for _ in range(kills):
        await asyncio.sleep(rng.uniform(*BETWEEN_KILLS_S))
        pid, down_s, recovery_s = await kill_once(client, pid)
        ledger.down_s.append(down_s)
        ledger.recovery_s.append(recovery_s)
        ledger.unbalanced += _unbalanced(await client.get_statistics("train"))


def _unbalanced(counts: dict[str, Any]) -> list[str]:
    """Laws of conservation that do not hold."""
    laws = {
        ("groups", "submitted"): ("open", "ready", "leased", "acked", "dropped"),
        ("trajectories", "submitted"): ("open", "complete", "acked", "dropped", "aborted"),
        ("steps", "submitted"): ("accepted", "duplicate", "late", "conflict", "rejected"),
        ("steps", "accepted"): ("stored", "acked", "dropped"),
    }
    return [
        f"{kind}.{whole}: {counts[kind]}"
        for (kind, whole), parts in laws.items()
        if counts[kind][whole] != sum(counts[kind][part] for part in parts)
    ]


async def _produce(
    client: DataPoolClient,
    ledger: _Ledger,
    rng: random.Random,
    number: int,
    stopped: asyncio.Event,
) -> list[Step]:
    """Group after group; the steps of one that is begun and left."""
    n_groups = 0
    while not stopped.is_set():
        own: dict[str, list[Call]] = {}
        for call in small_calls(1, f"{number}-{n_groups}", turns=TURNS):
            own.setdefault(call.trajectory_uid, []).append(call)
        declared = n_groups % 2 == 1
        prompt_uid = next(iter(own.values()))[0].prompt_uid
        # Declared groups are completed by a call with a reward, the others by their last step.
        rollouts = {uid: _as_sent(calls, declared) for uid, calls in own.items()}
        ledger.expected[prompt_uid] = {uid: _as_served(s, declared) for uid, s in rollouts.items()}
        if declared:
            await client.open_group(prompt_uid, ROLLOUTS)
        await asyncio.gather(
            *(_roll_out(client, ledger, rng, steps, declared) for steps in rollouts.values())
        )
        n_groups += 1
    calls = small_calls(1, f"{number}-left", turns=1)
    left = [step for call in calls for step in _with_pictures([call.step()])][: ROLLOUTS // 2]
    left = [replace(step, is_last=False) for step in left]
    await client.submit_steps(left, pictures=ledger.pictures)
    return left


def _with_pictures(steps: list[Step]) -> list[Step]:
    """The steps of a linear trajectory, with a picture at the end of each prompt."""
    shown: list[Step] = []
    pictures: tuple[Picture, ...] = ()
    known = 0
    for step in steps:
        of = step.trajectory_uid if pictures else step.prompt_uid
        digest = hashlib.sha256(f"{of} {step.step_index}".encode()).hexdigest()
        before = shown[-1].token_ids.tolist() if shown else []
        prompt: Any = [*before, *step.prompt_ids[known:].tolist(), PLACEHOLDER]
        pictures = (*pictures, Picture(digest, 28, 28, len(prompt) - 1, 1))
        known = step.n_tokens
        shown.append(replace(step, prompt_ids=prompt, pictures=pictures))
    return shown


def _png(digest: str) -> bytes:
    return (b"\x89PNG " + digest.encode()) * (PICTURE_BYTES // 70)


async def _look(client: DataPoolClient, ledger: _Ledger, uid: str, steps: Sequence[Step]) -> None:
    """Read the pictures of a trajectory's steps."""
    digests = {picture.digest for step in steps for picture in step.pictures}
    try:
        found = await client.read_pictures(uid, digests)
    except (TrajectoryClosedError, UnknownTrajectoryError):
        ledger.n["too late"] += 1  # the lease expired, and another consumer acked
    except DataPoolError:
        ledger.bad_pictures |= digests
    else:
        ledger.n["pictures read"] += len(found)
        ledger.bad_pictures |= {d for d in digests if found.get(d) != _png(d)}


def _as_sent(calls: list[Call], declared: bool) -> list[Step]:
    steps = _with_pictures([call.step() for call in calls])
    return [replace(step, is_last=False) for step in steps] if declared else steps


def _as_served(steps: list[Step], declared: bool) -> list[Step]:
    return [*steps[:-1], replace(steps[-1], is_last=True, reward=1.0 if declared else None)]


async def _roll_out(
    client: DataPoolClient,
    ledger: _Ledger,
    rng: random.Random,
    steps: list[Step],
    declared: bool,
) -> None:
    uid = steps[0].trajectory_uid
    if rng.random() < RETRIES:
        crashed = replace(steps[0], trajectory_uid=f"{uid}-crashed")
        await client.submit_step(crashed, pictures=ledger.pictures)
        ledger.n["withdrawn"] += 1
        await client.abort_trajectory(crashed.trajectory_uid, "agent_crashed", will_retry=True)
    for step in steps:
        for attempt in range(1 + (rng.random() < RETRIES)):
            outcome = await client.submit_step(step, pictures=ledger.pictures)
            ledger.acknowledged[uid, step.step_index] = step
            ledger.n[outcome] += 1
            ledger.n["accepted twice"] += attempt > 0 and outcome == "accepted"
    if declared:
        await client.complete_trajectory(uid, reward=1.0)


async def _consume(
    client: DataPoolClient,
    ledger: _Ledger,
    rng: random.Random,
    stopped: asyncio.Event,
    drained: asyncio.Event,
) -> None:
    while not drained.is_set():
        lease = await client.lease_batch(
            batch_size=1 if stopped.is_set() else 2, timeout_s=0.2, lease_s=LEASE_S
        )
        if lease is None:
            continue
        ledger.receive(lease)
        for group in lease.groups:
            for trajectory in group.trajectories:
                await _look(client, ledger, trajectory.trajectory_uid, trajectory.steps)
        await asyncio.sleep(rng.uniform(0, 0.02))
        fate = rng.random()
        if fate < ABANDONED and not stopped.is_set():
            ledger.n["abandoned"] += 1
            continue
        try:
            if fate < ABANDONED + RETRIES:
                await client.nack(lease.lease_id, "training step failed")
                ledger.n["nacked"] += 1
            else:
                await client.ack(lease.lease_id)
                ledger.acked |= {group.prompt_uid for group in lease.groups}
        except LeaseExpiredError:
            ledger.n["expired"] += 1  # the pool was away for long; somebody else gets the groups
