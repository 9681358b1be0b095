"""A pool that is started again from its journal: nobody can tell, and what cannot be is said."""

from __future__ import annotations

import asyncio
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from stepwell.datapool import (
    ChannelConfig,
    DataPoolClient,
    DataPoolError,
    PoolConfig,
    Step,
    client_of,
    start_data_pool,
)
from stepwell.datapool.codec import Base, PackedLease, decoder, encoder, pack
from stepwell.datapool.config import SelectionConfig
from stepwell.datapool.core import group_log
from stepwell.datapool.errors import (
    ChannelShutDownError,
    InvalidRequestError,
    JournalCorruptError,
    JournalFullError,
    PoolFullError,
    PoolUnavailableError,
    ReplayError,
    StepConflictError,
)
from stepwell.datapool.ops import LeaseBatch
from stepwell.datapool.remote import service as service_module
from stepwell.datapool.store.journal import Journal
from stepwell.datapool.store.replay import restore
from stepwell.datapool.store.segments import segment_path
from tests.builders import step_of
from tests.datapool.conftest import SyncPool, newest_segment
from tests.datapool.pools import pool_here, service_of
from tests.helpers import full_disk

MakeStep = Callable[..., Step]
READING = {"is_shut_down", "next_deadline"}


class Journaled:
    """A pool with a journal, a clock that the test moves, and one life after another."""

    def __init__(self, folder: Path, config: PoolConfig) -> None:
        self.now = 1000.0
        self._start(folder, config)

    def _start(self, folder: Path, config: PoolConfig) -> None:
        self.journal = Journal(folder, "process", lock_timeout_s=0.1)
        self.pool = SyncPool(config)
        restore(self.pool, self.journal)
        self._flush()

    def _flush(self) -> None:
        self.pool.write_counts()
        self.journal.flush()
        self.pool.spill()

    def restart(self, config: PoolConfig | None = None) -> None:
        self.journal.close()
        self._start(self.journal.folder, config or self.pool.config)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.pool, name)
        if name in READING:
            return method

        def change(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, now=self.now, **kwargs)
            finally:
                self._flush()

        return change

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.pool.tick(self.now)
        self._flush()

    def kinds(self) -> list[str]:
        return [row.kind for row in self.journal.rows()]

    def snapshot(self) -> dict[str, Any]:
        """All that it knows."""
        channels = {
            name: {
                "groups": [_record(g) for g in channel.records.groups.values()],
                "order": [channel.state(g) for g in channel.records.groups.values()],
                "ready": [g.prompt_uid for g in channel.ready_groups()],
                "version": channel.counts.version,
                "statistics": self.pool.get_statistics(name, now=self.now),
            }
            for name, channel in self.pool.channels.items()
        }
        leases = [(r.lease_id, r.prompt_uids, r.expires_at) for r in self.pool.leases.active()]
        return {"channels": channels, "leases": leases, "deadline": self.pool.next_deadline()}


def _record(record: Any) -> Any:
    """A record as plain values, without the numbers of its rows and their bytes, which an erasure
    changes, and the time of its alarm, which may be too early."""
    if isinstance(record, dict):
        return {key: _record(value) for key, value in record.items()}
    if isinstance(record, list | tuple):
        return [_record(value) for value in record]
    names = getattr(record, "__struct_fields__", None) or getattr(record, "__slots__", None)
    if names is None:
        return record
    numbers = ("row", "rows", "n_bytes", "prompts", "alarm")
    return {n: _record(getattr(record, n)) for n in names if n not in numbers}


@pytest.fixture
def make_pool(tmp_path: Path) -> Iterator[Callable[..., Journaled]]:
    """`make_pool(memory=None, **limits)`: a pool with its journal in the test's folder."""
    made: list[Journaled] = []

    def make(memory: int | None = None, **limits: Any) -> Journaled:
        config = PoolConfig(default=ChannelConfig(**limits), memory_limit_bytes=memory)
        made.append(Journaled(tmp_path / uuid.uuid4().hex, config))
        return made[-1]

    yield make
    for pool in made:
        pool.journal.close()


@pytest.fixture
def pool(make_pool: Callable[..., Journaled]) -> Journaled:
    return make_pool()


def finish(pool: Any, make_step: MakeStep, prompt_uid: str, *uids: str) -> None:
    for uid in uids:
        pool.submit_step(make_step(uid, prompt_uid))
        pool.complete_trajectory(uid)


# -- one kind of row after the other -------------------------------------------------------------


def _opened(p: Journaled, s: MakeStep) -> None:
    p.open_group("p", 3, 60.0, 2, {"k": 1})


def _trajectory(p: Journaled, s: MakeStep) -> None:
    p.open_trajectory("a", "p", 2, {"m": 1})


def _steps(p: Journaled, s: MakeStep) -> None:
    root = s("a", metadata={"i": 0})
    p.submit_steps([root, s("a", index=1, prompt_ids=[1, 2, 3, 4, 5, 6], parent_index=0)])
    p.submit_step(s("b"))


def _completed(p: Journaled, s: MakeStep) -> None:
    p.submit_step(s("a", reward=0.25))
    p.complete_trajectory("a", 1.0, {"n": 2})


def _completed_by_its_last_step(p: Journaled, s: MakeStep) -> None:
    p.submit_step(s("a", index=1, is_last=True))
    p.submit_step(s("a", index=0))


def _aborted(p: Journaled, s: MakeStep) -> None:
    finish(p, s, "p", "a")
    p.submit_step(s("b"))
    p.abort_trajectory("b", "crash")


def _given_up(p: Journaled, s: MakeStep) -> None:
    p.open_group("p", 2)
    finish(p, s, "p", "a")
    p.submit_step(s("b"))
    p.abort_trajectory("b", "crash", will_retry=True)
    p.abort_trajectory("b", "crash", will_retry=False)


def _due(p: Journaled, s: MakeStep) -> None:
    p.open_group("p", 3, 10.0)
    finish(p, s, "p", "a")
    p.submit_step(s("b"))
    p.advance(11)


def _awaited(p: Journaled, s: MakeStep) -> None:
    for uid in "bcd":
        p.submit_step(s(uid))
    finish(p, s, "p", "a")
    p.advance(40)
    p.complete_trajectory("c")
    p.advance(30)


def _all_awaited(p: Journaled, s: MakeStep) -> None:
    _awaited(p, s)
    p.advance(60)


def _rewarded(p: Journaled, s: MakeStep) -> None:
    _completed(p, s)
    p.set_reward("a", 3.0)
    p.set_reward("a", 4.0, step_index=0)


def _marked(p: Journaled, s: MakeStep) -> None:
    finish(p, s, "p", "a", "b")
    p.mark("p", trainable=False, tags=["x"], note="look")
    p.mark(trajectory_uid="a", quality=0.5)


def _leased(p: Journaled, s: MakeStep) -> None:
    finish(p, s, "p", "a", "b")
    p.submit_step(s("c"))
    p.advance(60)
    p.mark(trajectory_uid="a", trainable=False)
    p.lease_packed(request_id="r")


def _renewed(p: Journaled, s: MakeStep) -> None:
    finish(p, s, "p", "a")
    finish(p, s, "q", "b")
    first = p.lease_batch()
    p.lease_batch(lease_s=5)
    p.renew(first.lease_id, 7)


def _returned(p: Journaled, s: MakeStep) -> None:
    finish(p, s, "q", "b")
    finish(p, s, "r", "c")
    p.nack(p.lease_batch(batch_size=2).lease_id, "no reason")


def _expired(p: Journaled, s: MakeStep) -> None:
    finish(p, s, "p", "a")
    p.lease_batch(lease_s=5)
    p.advance(6)


def _acked(p: Journaled, s: MakeStep) -> None:
    finish(p, s, "p", "a", "b")
    p.submit_step(s("c"))
    p.advance(60)
    p.ack(p.lease_batch().lease_id)


def _dropped(p: Journaled, s: MakeStep) -> None:
    finish(p, s, "p", "a")
    p.drop_group("p", "test")


def _late(p: Journaled, s: MakeStep) -> None:
    finish(p, s, "p", "a")
    p.lease_batch()
    p.submit_step(s("z"))


HISTORIES = {
    "OpenGroup": _opened,
    "OpenTrajectory": _trajectory,
    "PromptStored": _steps,
    "StepsStored": _completed_by_its_last_step,
    "CompleteTrajectory": _completed,
    "AbortTrajectory": _aborted,
    "AbortTrajectory again": _given_up,
    "GroupDecided due": _due,
    "GroupDecided after a wait": _awaited,
    "GroupDecided after a wait for all": _all_awaited,
    "SetReward": _rewarded,
    "Mark": _marked,
    "GroupLeased": _leased,
    "LeaseRecord renewed": _renewed,
    "GroupReturned": _returned,
    "LeaseEnded": _expired,
    "GroupClosed": _acked,
    "GroupClosed dropped": _dropped,
    "GroupClosed late": _late,
}


@pytest.mark.parametrize("kind", HISTORIES)
def test_a_restart_after_any_kind_of_row_changes_nothing(
    kind: str, pool: Journaled, make_pool: Callable[..., Journaled], make_step: MakeStep
) -> None:
    HISTORIES[kind](pool, make_step)
    assert kind.split()[0] in pool.kinds()
    before = pool.snapshot()
    pool.restart()
    assert pool.snapshot() == before
    pool.restart()
    assert pool.snapshot() == before, "nor does another one"
    never_restarted = make_pool()
    HISTORIES[kind](never_restarted, make_step)
    # Whatever comes next has the same answer: late, duplicate or new.
    answers = [
        [
            named(p, "submit_step", make_step(uid, "p", i))
            for uid in ("a", "b", "c", "z", "new")
            for i in (0, 1)
        ]
        + [
            named(p, "complete_trajectory", "a", 1.0),
            named(p, "abort_trajectory", "b", "crash"),
            named(p, "ack", "lease-1"),
            named(p, "lease_packed", request_id="r"),
            named(p, "lease_batch"),
            named(p, "lease_batch"),
        ]
        for p in (pool, never_restarted)
    ]
    assert answers[0] == answers[1]
    assert pool.snapshot()["channels"] == never_restarted.snapshot()["channels"]


def named(pool: Journaled, name: str, *args: Any, **kwargs: Any) -> Any:
    try:
        answer = getattr(pool, name)(*args, **kwargs)
    except DataPoolError as e:
        return type(e).__name__
    return answer.unpack() if isinstance(answer, PackedLease) else answer


def test_what_no_row_tells_survives_too(
    make_pool: Callable[..., Journaled], make_step: MakeStep
) -> None:
    pool = make_pool(max_ahead_versions=0, groups_per_version=1)
    pool.advance_version(5)
    pool.open_group("p", 1)
    pool.submit_step(make_step("a"))
    pool.submit_step(make_step("a"))
    pool.restart()
    steps = pool.get_statistics("train")["steps"]
    assert (steps["submitted"], steps["duplicate"]) == (2, 1)
    with pytest.raises(PoolFullError, match="policy version 5 allows"):
        pool.open_group("q", 1)
    pool.advance_version(6)
    assert pool.open_group("q", 1) == "accepted"


def test_a_shutdown_outlives_a_restart_for_channels_to_come_too(pool: Journaled) -> None:
    pool.shutdown()
    pool.restart()
    for channel in ("train", "another"):
        with pytest.raises(ChannelShutDownError):
            pool.open_group("p", 1, channel=channel)


def test_a_shut_down_channel_leaves_the_others_open(pool: Journaled) -> None:
    pool.shutdown("train")
    pool.shutdown("val")
    pool.restart()
    assert pool.is_shut_down("train")
    assert pool.open_group("p", 1, channel="another") == "accepted"


@pytest.mark.parametrize(
    "call",
    [
        lambda pool: pool.drop_group("a", "half a character: \ud800"),
        lambda pool: pool.open_group("b", 1, channel="\ud800"),
        lambda pool: pool.submit_step(step_of("\ud800", "b")),
        lambda pool: pool.append_step(step_of("t", "\ud800")),
        lambda pool: pool.open_trajectory("t", "a", attempt=2**70),
        lambda pool: pool.advance_version(2**70),
    ],
)
async def test_what_cannot_be_written_down_is_refused_and_keeps_nothing_else_from_it(
    call: Callable[[DataPoolClient], Any], tmp_path: Path
) -> None:
    """In a pool of the caller's process too, to which nothing travels."""
    async with DataPoolClient.local(folder=tmp_path) as pool:
        await pool.open_group("a", 2)
        with pytest.raises(InvalidRequestError):
            await call(pool)
        await pool.submit_step(step_of("t", "a"))
    async with DataPoolClient.local(folder=tmp_path) as pool:
        assert await pool.trajectory_index() == {"t": [0]}


async def test_a_new_run_over_an_old_journal_is_not_shut_down(
    tmp_path: Path, make_step: MakeStep
) -> None:
    first = pool_here(None, tmp_path)
    await first.submit_step(make_step("t"))
    await first.shutdown()
    service_of(first).close()
    second = pool_here(None, tmp_path)
    assert await second.open_group("q", 1) == "accepted"
    assert await second.submit_step(make_step("t")) == "duplicate"
    service_of(second).close()


# -- what is reclaimed ---------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["ack", "drop"])
def test_no_row_of_a_group_is_left_when_it_is_gone(
    end: str, pool: Journaled, make_step: MakeStep
) -> None:
    pool.open_group("p", 2, metadata={"k": 1})
    finish(pool, make_step, "p", "a", "b")
    pool.submit_step(make_step("c"))
    pool.abort_trajectory("c", "crash")
    pool.set_reward("a", 1.0)
    pool.mark("p", quality=1.0)
    lease = pool.lease_batch()
    if end == "ack":
        pool.ack(lease.lease_id)
    else:
        pool.nack(lease.lease_id)
        pool.drop_group("p", "test")
    assert sorted(pool.kinds()) == ["GroupClosed", "LeaseEnded"]
    pool.restart()
    finish(pool, make_step, "q", "d", "e")
    pool.restart()
    pool.ack(pool.lease_batch().lease_id)
    assert sorted(pool.kinds()) == ["GroupClosed"] * 2 + ["LeaseEnded"] * 2


def test_what_is_remembered_of_the_gone_is_bounded(tmp_path: Path, make_step: MakeStep) -> None:
    pool = Journaled(tmp_path, PoolConfig(remembered_uids=3))
    for i in range(10):
        finish(pool, make_step, f"p{i}", f"t{i}")
        pool.ack(pool.lease_batch().lease_id)
        if i % 4 == 3:
            pool.restart()
    assert sorted(pool.kinds()) == ["GroupClosed"] * 3 + ["LeaseEnded"] * 3
    assert pool.submit_step(make_step("t9", "p9")) == "late"
    assert pool.submit_step(make_step("t0", "p0")) == "accepted"
    pool.restart()
    assert pool.submit_step(make_step("t9", "p9")) == "late"
    assert pool.submit_step(make_step("t0", "p0")) == "duplicate"
    pool.journal.close()


def test_what_comes_late_displaces_no_group_from_what_is_remembered(
    tmp_path: Path, make_step: MakeStep
) -> None:
    pool = Journaled(tmp_path, PoolConfig(remembered_uids=3))
    finish(pool, make_step, "p", "t")
    pool.ack(pool.lease_batch().lease_id)
    for life in range(3):
        for i in range(4):
            assert pool.submit_step(make_step(f"late {life}-{i}", "p")) == "late"
        pool.restart()
    assert sorted(pool.kinds()) == ["GroupClosed"] * 4 + ["LeaseEnded"]
    assert pool.complete_trajectory("late 2-3") == "late"
    pool.journal.close()


# -- payloads on disk ----------------------------------------------------------------------------


def rollout(make_step: MakeStep, uid: str, prompt_uid: str, n_steps: int = 3) -> list[Step]:
    """A chain with something in every column."""
    steps: list[Step] = []
    tokens = list(range(20))
    for i in range(n_steps):
        steps.append(
            make_step(
                uid,
                prompt_uid,
                i,
                prompt_ids=tokens,
                response_ids=[7] * 10,
                rollout_log_probs=[-0.125 * i] * 10,
                metadata={"i": i, "text": "x" * 50},
                parent_index=i - 1 if i else None,
            )
        )
        tokens = [*tokens, *[7] * 10, i]
    return steps


def relative(steps: list[Step]) -> list[Any]:
    whole = [pack(s).header.crc for s in steps]
    tokens = [Base.of(s, whole[i]) for i, s in enumerate(steps)]
    return [
        (s.trajectory_uid, s.prompt_uid, pack(s, tokens[i - 1]) if i else pack(s))
        for i, s in enumerate(steps)
    ]


LIMITS: dict[str, dict[str, Any]] = {
    "memory_limit_bytes": {"memory": 1},
    "spill": {"overflow": "spill", "max_bytes": 1},
}


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("restarted", [False, True])
def test_payloads_on_disk_are_served_and_recognised_as_if_in_memory(
    limit: str, restarted: bool, make_pool: Callable[..., Journaled], make_step: MakeStep
) -> None:
    pool = make_pool(n_rollouts=2, **LIMITS[limit])
    rollouts = {uid: rollout(make_step, uid, "p") for uid in "ab"}
    pool.apply_steps(rollouts["a"])
    pool.apply_steps(relative(rollouts["b"]))
    prompt_bytes = rollouts["a"][0].prompt_ids.nbytes
    assert pool.get_statistics("train")["memory_bytes"] == prompt_bytes
    if restarted:
        pool.restart()
    for steps in rollouts.values():
        assert pool.apply_steps(steps) == ["duplicate"] * 3
        assert pool.apply_steps(relative(steps)) == ["duplicate"] * 3
        with pytest.raises(StepConflictError):
            pool.submit_step(make_step(steps[2].trajectory_uid, "p", 2))
    assert pool.get_statistics("train")["memory_bytes"] == prompt_bytes, "what was read is let go"
    for uid in rollouts:
        pool.complete_trajectory(uid, 1.0)
    lease = decoder(PackedLease).decode(encoder.encode(pool.lease_packed())).unpack()
    for trajectory in lease.groups[0].trajectories:
        *rest, last = trajectory.steps
        sent = rollouts[trajectory.trajectory_uid]
        assert rest == sent[:2]
        assert (last.reward, last.is_last, last.metadata) == (1.0, True, sent[2].metadata)
        assert last.prompt_ids.tolist() == sent[2].prompt_ids.tolist()
    pool.ack(lease.lease_id)
    assert pool.get_statistics("train")["memory_bytes"] == 0


def test_only_what_is_over_the_limit_goes_to_disk(
    make_pool: Callable[..., Journaled], make_step: MakeStep
) -> None:
    steps = [s for uid in "abcdef" for s in rollout(make_step, uid, "p")]
    sizes = [len(pack(s).payload) for s in steps]
    limit = sum(sizes) // 2
    pool = make_pool(overflow="spill", max_bytes=limit)
    for step in steps:
        pool.submit_step(step)
    in_memory = [
        not s.is_spilled
        for t in pool.pool.channels["train"].records.trajectories.values()
        for s in t.steps
    ]
    assert limit - 200 <= pool.get_statistics("train")["memory_bytes"] <= limit
    assert in_memory[0]
    assert not in_memory[-1]
    assert pool.get_statistics("train")["groups"]["dropped"] == 0


def test_steps_of_a_call_that_share_a_row_come_back_each_its_own(
    make_pool: Callable[..., Journaled], make_step: MakeStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_log, "ROW_BYTES", 400)
    pool = make_pool(n_rollouts=4, memory=1)
    # Two groups in turn, then more of one of them than a row takes.
    rollouts = {uid: rollout(make_step, uid, "p" if uid < "e" else "q") for uid in "aebfcgdh"}
    sent = [steps[0] for steps in rollouts.values()]
    sent += [step for uid in sorted(rollouts) for step in rollouts[uid][1:]]
    assert pool.apply_steps(sent) == ["accepted"] * 24
    n_rows = pool.kinds().count("StepsStored")
    assert 8 + 2 < n_rows < 24
    pool.restart()
    for uid in rollouts:
        pool.complete_trajectory(uid)
    for group in pool.lease_batch(batch_size=2).groups:
        for trajectory in group.trajectories:
            steps = rollouts.pop(trajectory.trajectory_uid)
            assert list(trajectory.steps) == [*steps[:2], replace(steps[2], is_last=True)]
    assert not rollouts


def test_steps_released_before_they_are_written_are_not_released_again(
    make_pool: Callable[..., Journaled], make_step: MakeStep
) -> None:
    pool = make_pool(memory=1)
    inner, now = pool.pool, pool.now
    # One trip: the journal is flushed once, after all of it.
    inner.apply_steps(rollout(make_step, "a", "p"), now=now)
    inner.abort_trajectory("a", "crash", now=now)
    pool.submit_step(make_step("b", "q"))
    assert pool.get_statistics("train")["memory_bytes"] == 20 * 4 + 3 * 4


def test_a_payload_that_cannot_be_read_back_fails_the_lease_and_loses_no_group(
    make_pool: Callable[..., Journaled], make_step: MakeStep
) -> None:
    pool = make_pool(memory=1)
    for uid in ("good", "bad"):
        pool.submit_steps(rollout(make_step, uid, f"p-{uid}"))
        pool.complete_trajectory(uid)
    stored = pool.pool.channels["train"].records.trajectories["bad"].steps[1]
    row, *_ = stored.place
    number, offset, size = pool.journal.index.find(row)
    with segment_path(pool.journal.folder, number).open("r+b") as file:
        file.seek(offset + size - 1)
        file.write(b"\xff")
    with pytest.raises(JournalCorruptError, match=f"row {row} is not what was written"):
        pool.lease_batch(batch_size=2)
    groups = pool.get_statistics("train")["groups"]
    assert (groups["ready"], groups["leased"]) == (2, 0)
    assert pool.lease_batch().groups[0].prompt_uid == "p-good"
    pool.drop_group("p-bad", "unreadable")
    assert pool.get_statistics("train")["groups"]["drop_reasons"] == {"unreadable": 1}


# -- another configuration -----------------------------------------------------------------------


def changed(pool: Journaled, **limits: Any) -> PoolConfig:
    return PoolConfig(default=pool.pool.config.default.model_copy(update=limits))


def test_a_smaller_queue_drops_the_oldest_groups_when_the_pool_starts(
    pool: Journaled, make_step: MakeStep
) -> None:
    for i in range(5):
        finish(pool, make_step, f"p{i}", f"t{i}")
    pool.restart(changed(pool, max_queue_size=2))
    groups = pool.get_statistics("train")["groups"]
    assert (groups["ready"], groups["drop_reasons"]) == (2, {"max_queue_size": 3})
    assert pool.submit_step(make_step("t0", "p0")) == "late"
    pool.restart(changed(pool, max_queue_size=None))
    assert [g.prompt_uid for g in pool.lease_batch(batch_size=2).groups] == ["p3", "p4"]
    assert pool.get_statistics("train")["groups"]["dropped"] == 3


def test_a_smaller_memory_drops_the_oldest_or_spills(pool: Journaled, make_step: MakeStep) -> None:
    for uid in "abc":
        pool.submit_steps(rollout(make_step, uid, f"p{uid}"))
        pool.complete_trajectory(uid)
    n_bytes = pool.get_statistics("train")["memory_bytes"]
    pool.restart(changed(pool, overflow="spill", max_bytes=n_bytes // 3))
    assert pool.get_statistics("train")["memory_bytes"] <= n_bytes // 3
    pool.restart(changed(pool, overflow="drop_oldest", max_bytes=n_bytes // 2))
    assert pool.get_statistics("train")["groups"]["drop_reasons"] == {"max_bytes": 2}
    assert pool.lease_batch().groups[0].trajectories[0].steps[:2] == tuple(
        rollout(make_step, "c", "pc")[:2]
    )


def test_what_a_smaller_memory_drops_when_the_pool_starts_is_not_decided_on_any_more(
    pool: Journaled, make_step: MakeStep
) -> None:
    for uid in "abc":  # one complete and one open trajectory each: it waits for its sibling
        pool.submit_step(make_step(f"{uid}-open", f"p{uid}"))
        finish(pool, make_step, f"p{uid}", uid)
    pool.now += 20
    pool.open_trajectory("d", "pd")
    pool.restart(changed(pool, siblings_wait_s=10, max_bytes=1))
    assert pool.get_statistics("train")["groups"]["drop_reasons"] == {"max_bytes": 3}
    pool.restart()
    assert pool.get_statistics("train")["groups"]["dropped"] == 3


def test_new_filters_judge_what_is_there(pool: Journaled, make_step: MakeStep) -> None:
    for p, rewards in {"flat": (1.0, 1.0), "spread": (0.0, 1.0)}.items():
        pool.open_group(p, 2)
        for k, reward in enumerate(rewards):
            pool.submit_step(make_step(f"{p}{k}", p))
            pool.complete_trajectory(f"{p}{k}", reward)
    pool.restart(changed(pool, selection=SelectionConfig(filters=("zero_variance",))))
    groups = pool.get_statistics("train")["groups"]
    assert (groups["ready"], groups["drop_reasons"]) == (1, {"zero_variance": 1})
    assert pool.lease_batch().groups[0].prompt_uid == "spread"


def test_another_number_of_rollouts_decides_what_is_ready(
    pool: Journaled, make_step: MakeStep
) -> None:
    finish(pool, make_step, "one", "a")
    finish(pool, make_step, "two", "b", "c")
    pool.restart(changed(pool, n_rollouts=2))
    groups = pool.get_statistics("train")["groups"]
    assert (groups["open"], groups["ready"]) == (1, 1)
    assert pool.lease_batch().groups[0].prompt_uid == "two"


# -- journals that cannot be used ----------------------------------------------------------------


@pytest.mark.parametrize("own_deadline_s", [None, 100.0])
def test_a_group_that_was_declared_when_idle_stays_open_whatever_the_deadline_is_now(
    own_deadline_s: float | None, make_pool: Callable[..., Journaled], make_step: MakeStep
) -> None:
    pool = make_pool(group_idle_s=20)
    finish(pool, make_step, "p", "a")
    pool.submit_step(make_step("b"))
    pool.advance(20)
    pool.open_group("p", 3, own_deadline_s)
    before = pool.snapshot()
    assert before["channels"]["train"]["order"] == [("open", None)]
    pool.restart()
    assert pool.snapshot() == before
    pool.restart(changed(pool, group_idle_s=20, group_deadline_s=10))
    assert pool.snapshot()["channels"]["train"]["order"] == [("open", None)]


def test_rows_that_contradict_each_other_are_named(tmp_path: Path, make_step: MakeStep) -> None:
    pool = Journaled(tmp_path, PoolConfig())
    finish(pool, make_step, "p", "a")
    (row,) = [r.row for r in pool.journal.rows() if r.kind == "StepsStored"]
    pool.journal.delete([row])
    pool.journal.flush()
    with pytest.raises(ReplayError, match=r"\(Complete\w+ in channel 'train'\) does not follow"):
        pool.restart()


@pytest.mark.parametrize("key", ["channel/train", "leases", "pool"])
def test_a_state_that_another_release_wrote_is_named(key: str, tmp_path: Path) -> None:
    pool = Journaled(tmp_path, PoolConfig())
    pool.journal.put_state(key, b"\x80\x05]")
    with pytest.raises(ReplayError, match=f"journal state '{key}' is not what this release"):
        pool.restart()


@pytest.fixture
def start(cluster: str, tmp_path: Path) -> Iterator[Callable[[], Any]]:
    """Starts a pool over the journal in `tmp_path`."""
    handles: list[Any] = []

    def start() -> Any:
        handles.append(start_data_pool(PoolConfig(journal_dir=tmp_path), name=uuid.uuid4().hex))
        return handles[-1]

    yield start
    for handle in handles:
        ray.kill(handle)


def damage(folder: Path) -> None:
    newest_segment(folder).write_bytes(os.urandom(4096))


def test_a_damaged_journal_is_one_clear_line_from_the_start(
    start: Callable[[], Any], tmp_path: Path
) -> None:
    pool = Journaled(tmp_path, PoolConfig())
    pool.open_group("p", 1)
    pool.journal.close()
    damage(tmp_path)
    with pytest.raises(PoolUnavailableError) as error:
        start()
    message = str(error.value)
    assert "\n" not in message
    assert str(tmp_path) in message
    assert message.startswith("the DataPool did not start: ")
    assert "move it aside to start empty" in message


def test_a_folder_that_another_pool_uses_is_one_clear_line_from_the_start(
    start: Callable[[], Any], tmp_path: Path
) -> None:
    holder = Journaled(tmp_path, PoolConfig())
    with pytest.raises(PoolUnavailableError, match=f"in use by process {os.getpid()}"):
        start()
    holder.journal.close()


async def test_a_journal_damaged_under_a_killed_pool_ends_the_wait_of_its_clients(
    start: Callable[[], Any], tmp_path: Path, make_step: MakeStep
) -> None:
    client = client_of([start()])
    await client.submit_step(make_step("t"))
    process = psutil.Process((await client.describe())["pid"])
    process.suspend()  # so that the damage is there before Ray's next life is
    damage(tmp_path)
    process.kill()
    with pytest.raises(PoolUnavailableError, match=f"{tmp_path}: .* are lost"):
        await client.get_statistics()


async def test_a_cursor_of_events_from_before_the_kill_is_answered_with_lost(
    start: Callable[[], Any], make_step: MakeStep
) -> None:
    client = client_of([start()])
    await client.submit_step(make_step("t", is_last=True))
    before = await client.get_events()
    assert [e.kind for e in before.events] == ["ready"]
    psutil.Process((await client.describe())["pid"]).kill()
    waiting = asyncio.create_task(client.get_events(before.cursor, timeout_s=60))
    await client.submit_step(make_step("u", "q", is_last=True))
    page = await waiting
    assert page.lost
    assert [e.prompt_uid for e in page.events] == ["q"]


# -- a full disk ---------------------------------------------------------------------------------


async def test_a_full_disk_refuses_changes_loses_nothing_and_is_over_when_it_is_over(
    tmp_path: Path, make_step: MakeStep
) -> None:
    actor = pool_here(None, tmp_path / "a")
    await actor.submit_step(make_step("a", "p", is_last=True))
    await actor.submit_step(make_step("b", "q", is_last=True))
    lease = await actor.lease_batch()
    assert lease is not None
    with full_disk():
        with pytest.raises(JournalFullError, match="the disk takes no more"):
            await actor.submit_step(make_step("c", "r", is_last=True))  # applied, not durable
        changes: list[Callable[[], Any]] = [
            partial(actor.submit_step, make_step("d", "s")),
            partial(actor.open_group, "g", 2),
            partial(actor.complete_trajectory, "d"),
            partial(actor.set_reward, "b", 1.0),
            partial(actor.lease_batch),
            partial(actor.ack, lease.lease_id),
            partial(actor.open_trajectory, "e", "s"),
        ]
        for change in changes:
            with pytest.raises(JournalFullError, match=f"free space under {tmp_path}"):
                await change()
        stats = await actor.get_statistics("train")
        assert [stats["groups"][k] for k in ("ready", "leased", "acked")] == [2, 1, 0]
        described = await actor.describe()
        assert "the disk takes no more" in described["journal"]["last_error"]
    # Killed now, it would have what it acknowledged, and nothing else.
    killed = Journaled(shutil.copytree(tmp_path / "a", tmp_path / "killed"), PoolConfig())
    groups = killed.get_statistics("train")["groups"]
    assert [groups[k] for k in ("submitted", "ready", "leased")] == [2, 1, 1]
    killed.journal.close()
    # There is space again.
    assert await actor.submit_step(make_step("c", "r", is_last=True)) == "duplicate"
    await actor.ack(lease.lease_id)
    assert await actor.submit_step(make_step("d", "s", is_last=True)) == "accepted"
    rest = await actor.fetch_batch(batch_size=3)
    assert rest is not None
    assert [s.trajectory_uid for s in rest] == ["b", "c", "d"]
    service_of(actor).close()


async def test_what_comes_due_on_a_full_disk_is_done_when_there_is_space(
    tmp_path: Path, make_step: MakeStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "TIMER_RETRY_S", 0.02)
    actor = pool_here(None, tmp_path)
    await actor.submit_step(make_step("t", is_last=True))
    await actor.lease_batch(lease_s=0.1)
    waiting = asyncio.create_task(actor.call(LeaseBatch(), None))
    await asyncio.sleep(0)
    with full_disk():
        with pytest.raises(JournalFullError):
            await actor.submit_step(make_step("u", "q"))
        await asyncio.sleep(0.2)
        assert not waiting.done()
    lease = await waiting
    assert isinstance(lease, PackedLease)
    assert lease.groups[0].delivery == 2
    service_of(actor).close()


async def test_rollouts_of_one_call_are_one_row_though_each_changes_what_the_group_is_ready_for(
    tmp_path: Path, make_step: MakeStep
) -> None:
    """A decision that follows from the trajectories of an undeclared group is not written down."""
    pool = pool_here(None, tmp_path)
    await pool.submit_steps([make_step(f"t{i}", "p", is_last=True) for i in range(16)])
    assert (await pool.describe())["journal"]["rows_stored"] == 2, "their prompt, and all of them"
    service_of(pool).close()
    again = pool_here(None, tmp_path, restarted=True)
    fetched = await again.fetch_batch(n_rollouts=16)
    assert fetched is not None
    assert len(fetched) == 16
    service_of(again).close()


def test_every_field_of_a_record_is_compared() -> None:
    """The snapshot above reads fields; a record without them would be compared by identity."""
    from stepwell.datapool.core.records import GroupRecord, TrajectoryRecord

    for record in (GroupRecord, TrajectoryRecord):
        assert record.__struct_fields__
