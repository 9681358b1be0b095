"""A channel's admission, the groups that it serves and in what order, and its events."""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from stepwell.datapool import (
    ChannelConfig,
    DataPoolClient,
    PoolConfig,
    Step,
    client_of,
    start_data_pool,
)
from stepwell.datapool.config import SelectionConfig
from stepwell.datapool.errors import InvalidRequestError, PoolFullError
from stepwell.datapool.inspect import events as events_module
from stepwell.datapool.ops import OpenTrajectory
from tests.builders import until
from tests.datapool.pools import pool_here

MakeStep = Callable[..., Step]
Pool = Any
"""A `ClockedPool` of conftest."""


def now_of(pool: Pool) -> dict[str, float]:
    """`now`, for the operations that the clocked pool passes through as they are."""
    return {"now": pool.now}


def lease(pool: Pool, size: int = 1, n: int | None = None) -> list[str] | None:
    got = pool.lease_batch(n, batch_size=size)
    return None if got is None else [g.prompt_uid for g in got.groups]


def complete_group(
    pool: Pool, make_step: MakeStep, uid: str, *rewards: float | None, version: int = 0
) -> None:
    """A declared group with one complete trajectory per reward."""
    pool.open_group(uid, len(rewards), metadata={"prompt": uid})
    for k, reward in enumerate(rewards):
        pool.submit_step(make_step(f"{uid}{k}", uid, policy_version=version))
        pool.complete_trajectory(f"{uid}{k}", reward)


def selecting(make_pool: Callable[..., Pool], **selection: Any) -> Pool:
    return make_pool(selection=SelectionConfig(**selection))


def reasons(pool: Pool) -> dict[str, int]:
    counts: dict[str, int] = pool.stats()["groups"]["drop_reasons"]
    return counts


# -- capacity ------------------------------------------------------------------------------------


def test_beyond_its_bytes_a_channel_drops_the_oldest_ready_groups(
    make_pool: Callable[..., Pool], make_step: MakeStep
) -> None:
    unlimited = make_pool()
    complete_group(unlimited, make_step, "a", 1.0)
    pool = make_pool(max_bytes=3 * unlimited.stats()["memory_bytes"])
    pool.submit_step(make_step("x", "open"))
    for uid in "abcd":
        complete_group(pool, make_step, uid, 1.0)
    assert reasons(pool) == {"max_bytes": 2}
    assert pool.stats()["memory_bytes"] <= pool.pool.config.default.max_bytes
    assert lease(pool, 2) == ["c", "d"]
    assert pool.stats()["groups"]["open"] == 1, "what is not ready is never dropped for its bytes"


def test_beyond_its_bytes_a_channel_drops_the_oldest_open_group_though_it_opened_again(
    make_pool: Callable[..., Pool], make_step: MakeStep
) -> None:
    pool = make_pool(max_bytes=350)
    pool.finish("old", "a")
    pool.submit_step(make_step("b", "young"))
    pool.open_group("old", 2)
    pool.submit_step(make_step("c", "huge", prompt_ids=[1] * 40))
    assert reasons(pool) == {"max_bytes": 1}
    assert [row.prompt_uid for row in pool.list_groups(now=pool.now).items] == ["young", "huge"]


@pytest.mark.parametrize("is_last", [False, True])
def test_a_step_may_cost_its_own_group_its_place(
    is_last: bool, make_pool: Callable[..., Pool], make_step: MakeStep
) -> None:
    pool = make_pool(max_bytes=300)
    pool.finish("p", "a")
    step = make_step("b", "p", prompt_ids=[1] * 200, is_last=is_last)
    assert pool.submit_step(step) == "accepted"
    assert reasons(pool) == {"max_bytes": 1}
    assert pool.stats()["memory_bytes"] == 0
    if not is_last:
        assert pool.complete_trajectory("b") == "late"
    assert pool.stats()["steps"]["dropped"] == 2


def test_a_blocking_channel_refuses_new_groups_only(
    make_pool: Callable[..., Pool], make_step: MakeStep
) -> None:
    pool = make_pool(overflow="block", max_queue_size=1)
    pool.submit_step(make_step("o", "open"))
    pool.finish("p", "a")
    for name, arguments in {
        "submit_step": (make_step("b", "q"),),
        "open_trajectory": ("b", "q"),
        "open_group": ("q", 1),
    }.items():
        with pytest.raises(PoolFullError, match="max_queue_size=1 ready groups and blocks"):
            getattr(pool, name)(*arguments)
    assert pool.submit_step(make_step("o", "open", 1)) == "accepted"
    pool.complete_trajectory("o")
    assert pool.stats()["groups"]["ready"] == 2, "what was begun is finished"
    assert pool.stats()["groups"]["dropped"] == 0
    pool.lease_batch(batch_size=2)
    assert pool.submit_step(make_step("b", "q")) == "accepted"


def test_a_group_that_is_ready_keeps_its_place_when_its_deadline_comes(
    make_pool: Callable[..., Pool],
) -> None:
    pool = make_pool(group_deadline_s=10)
    pool.finish("a", "a0")
    pool.now += 5
    pool.finish("b", "b0")
    pool.advance(6)
    assert lease(pool, 2) == ["a", "b"]
    kinds = [(e.kind, e.prompt_uid) for e in pool.pool.events.after(None, kinds=["ready"]).events]
    assert kinds == [("ready", "a"), ("ready", "b")]


# -- freshness -----------------------------------------------------------------------------------


def test_credit_is_counted_in_groups_per_version(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool(max_ahead_versions=1, groups_per_version=2)
    for uid in "abcd":
        pool.open_group(uid, 1)
    with pytest.raises(PoolFullError, match=r"policy version 0 allows \(max_ahead_versions=1"):
        pool.open_group("e", 1)
    pool.drop_group("a", "test")
    assert pool.open_group("e", 1) == "accepted", "a dropped group gives its credit back"
    pool.pool.advance_version(1, **now_of(pool))
    for uid in "fg":
        assert pool.open_group(uid, 1) == "accepted"
    with pytest.raises(PoolFullError, match="policy version 1"):
        pool.open_group("h", 1)


def test_a_pool_that_starts_late_owes_nothing_for_earlier_versions(
    make_pool: Callable[..., Pool],
) -> None:
    pool = make_pool(max_ahead_versions=0, groups_per_version=1)
    pool.pool.advance_version(40, **now_of(pool))
    assert pool.open_group("a", 1) == "accepted"
    with pytest.raises(PoolFullError):
        pool.open_group("b", 1)


@pytest.mark.parametrize("on_stale", ["drop", "return"])
def test_stale_groups_are_dropped_at_the_lease_and_their_source_is_told(
    on_stale: str, make_pool: Callable[..., Pool], make_step: MakeStep
) -> None:
    pool = make_pool(max_staleness=1, on_stale=on_stale)
    for uid, version in {"old": 0, "mixed": 1, "new": 3}.items():
        complete_group(pool, make_step, uid, 1.0, 0.0, version=version)
    pool.submit_step(make_step("late", "mixed", policy_version=9))
    pool.pool.advance_version(3, **now_of(pool))
    assert pool.stats()["groups"]["ready"] == 3, "nothing happens before somebody wants them"
    assert lease(pool) == ["new"]
    assert reasons(pool) == {"stale": 2}
    assert pool.stats()["groups"]["returned"] == (2 if on_stale == "return" else 0)
    dropped = pool.pool.events.after(None, kinds=["dropped"]).events
    assert [e.prompt_uid for e in dropped] == ["old", "mixed"]
    for event in dropped:
        assert event.data == {
            "reason": "stale",
            "returned": on_stale == "return",
            "complete": 2,
            "metadata": {"prompt": event.prompt_uid} if on_stale == "return" else {},
        }


def test_a_consumer_of_fewer_rollouts_gets_nothing_stale_either(
    make_pool: Callable[..., Pool], make_step: MakeStep
) -> None:
    pool = make_pool(n_rollouts=2, max_staleness=0)
    for uid, version in {"old": 0, "new": 1}.items():
        pool.submit_step(make_step(uid, f"p-{uid}", policy_version=version, is_last=True))
    pool.pool.advance_version(1, **now_of(pool))
    assert lease(pool, n=1) == ["p-new"]
    assert reasons(pool) == {"stale": 1}


def test_a_group_that_comes_back_is_as_old_as_what_was_served_of_it(
    make_pool: Callable[..., Pool], make_step: MakeStep
) -> None:
    pool = make_pool(n_rollouts=2, max_staleness=1)
    for uid, version in {"old": 1, "new": 2}.items():
        pool.submit_step(make_step(uid, "p", policy_version=version, is_last=True))
    pool.pool.mark(trajectory_uid="old", **now_of(pool), trainable=False)
    pool.pool.advance_version(2, **now_of(pool))
    held = pool.lease_batch()
    assert [t.trajectory_uid for t in held.groups[0].trajectories] == ["new"]
    pool.pool.advance_version(3, **now_of(pool))
    pool.nack(held.lease_id)
    assert pool.stats()["oldest_policy_version_ready"] == 2
    assert lease(pool) == ["p"]


# -- orders --------------------------------------------------------------------------------------


def test_the_freshest_group_is_served_first(
    make_pool: Callable[..., Pool], make_step: MakeStep
) -> None:
    pool = selecting(make_pool, order="freshest")
    for uid, version in {"a": 1, "b": 3, "c": 1, "d": 2}.items():
        complete_group(pool, make_step, uid, 1.0, version=version)
    assert lease(pool, 4) == ["b", "d", "a", "c"]


def test_an_order_named_by_a_path_decides_and_a_failing_one_holds(
    make_pool: Callable[..., Pool], make_step: MakeStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = SimpleNamespace(shortest=lambda info: {"a": 3, "b": 1, "c": 2}[info.prompt_uid])
    monkeypatch.setitem(sys.modules, "my_orders", module)
    pool = selecting(make_pool, order="my_orders:shortest")
    for uid in "abcd":
        complete_group(pool, make_step, uid, 1.0)
    assert lease(pool, 3) == ["b", "c", "a"]
    assert pool.stats()["groups"]["held"] == 1
    described = pool.pool.channels["train"]
    state, why = described.state(described.records.groups["d"])
    assert state == "held"
    assert "selection.order 'my_orders:shortest' failed on group 'd': KeyError" in why


def test_an_order_holds_for_consumers_of_fewer_rollouts_too(
    make_pool: Callable[..., Pool], make_step: MakeStep
) -> None:
    pool = make_pool(n_rollouts=2, selection=SelectionConfig(order="freshest"))
    for uid, version in {"a": 1, "b": 3, "c": 2}.items():
        pool.submit_step(make_step(uid, f"p{uid}", policy_version=version, is_last=True))
    pool.submit_step(make_step("a2", "pa", policy_version=1, is_last=True))
    assert lease(pool, 3, n=1) == ["pb", "pc", "pa"]


@pytest.mark.parametrize("filters", [(), ("zero_variance",)])
def test_first_come_is_by_readiness_with_and_without_filters(
    filters: tuple[str, ...], make_pool: Callable[..., Pool]
) -> None:
    pool = selecting(make_pool, filters=filters)
    pool.finish("a", "a0")
    pool.finish("b", "b0")
    pool.finish("a", "a1")  # one more than asked for; its place is the one it had
    decisions = pool.pool.dry_run(**now_of(pool), batch_size=2).decisions
    assert [d.prompt_uid for d in decisions] == ["a", "b"]
    assert lease(pool, 2) == ["a", "b"]


# -- filters -------------------------------------------------------------------------------------


def test_a_group_without_variance_is_dropped_and_its_credit_is_free(
    make_pool: Callable[..., Pool], make_step: MakeStep
) -> None:
    pool = make_pool(
        max_outstanding_groups=1,
        max_ahead_versions=0,
        groups_per_version=1,
        selection=SelectionConfig(filters=("zero_variance",)),
    )
    for attempt in range(3):
        complete_group(
            pool, make_step, f"easy{attempt}", 1.0, 1.0
        )  # each needs the credit of the last
    complete_group(pool, make_step, "good", 1.0, 0.0)
    with pytest.raises(PoolFullError):
        pool.open_group("next", 2)
    assert reasons(pool) == {"zero_variance": 3}
    assert lease(pool) == ["good"]


def test_what_is_not_scored_waits_for_its_rewards(
    make_pool: Callable[..., Pool], make_step: MakeStep
) -> None:
    pool = selecting(make_pool, filters=("scored", "all_wrong"))
    complete_group(pool, make_step, "a", None, 1.0)
    complete_group(pool, make_step, "b", None, 0.0)
    assert lease(pool) is None
    assert pool.stats()["ready"] == 0
    pool.pool.set_reward("b0", 0.0, **now_of(pool))
    assert reasons(pool) == {"all_wrong": 1}
    pool.pool.set_reward("a0", 0.0, **now_of(pool))
    assert lease(pool) == ["a"]


# -- marks ---------------------------------------------------------------------------------------


def test_marks_of_people_gate_what_is_served(
    make_pool: Callable[..., Pool], make_step: MakeStep
) -> None:
    pool = make_pool(max_outstanding_groups=2)
    mark = pool.pool.mark
    complete_group(pool, make_step, "a", 1.0, 0.0)
    complete_group(pool, make_step, "b", 1.0, 0.0)
    mark("a", **now_of(pool), trainable=False, note="the tool was down")
    mark(trajectory_uid="b1", **now_of(pool), trainable=False)
    assert (pool.stats()["ready"], pool.stats()["groups"]["held"]) == (1, 1)
    complete_group(pool, make_step, "c", 1.0, 0.0)  # a held group keeps no credit
    mark("c", **now_of(pool), trainable=False)
    got = pool.lease_batch()
    assert [t.trajectory_uid for t in got.groups[0].trajectories] == ["b0"]
    assert pool.stats()["trajectories"]["abort_reasons"] == {"not_trainable": 1}
    assert lease(pool) is None
    mark("a", **now_of(pool), trainable=None)
    mark("c", **now_of(pool), trainable=None)
    assert lease(pool, 2) == ["a", "c"]


def test_a_mark_holds_for_consumers_of_fewer_rollouts_until_it_is_taken_back(
    make_pool: Callable[..., Pool],
) -> None:
    pool = make_pool(n_rollouts=2)
    pool.finish("p", "a")
    pool.pool.mark("p", **now_of(pool), trainable=False)
    assert lease(pool, n=1) is None
    assert (pool.stats()["ready"], pool.stats()["groups"]["held"]) == (0, 0)
    pool.pool.mark("p", **now_of(pool), trainable=True)
    assert lease(pool, n=1) == ["p"]


def test_a_mark_holds_for_consumers_of_fewer_rollouts_though_the_order_changes_with_time(
    make_pool: Callable[..., Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = count()
    module = SimpleNamespace(aging=lambda info: next(keys))
    monkeypatch.setitem(sys.modules, "my_orders", module)
    pool = make_pool(n_rollouts=2, selection=SelectionConfig(order="my_orders:aging"))
    pool.finish("p", "a")
    pool.finish("q", "b")
    pool.pool.mark("q", **now_of(pool), trainable=False)
    assert lease(pool, n=1) == ["p"]


def test_a_mark_on_a_leased_group_counts_when_it_comes_back(
    make_pool: Callable[..., Pool],
) -> None:
    pool = make_pool()
    pool.finish("p", "a")
    held = pool.lease_batch()
    pool.pool.mark("p", **now_of(pool), trainable=False)
    pool.nack(held.lease_id)
    assert lease(pool) is None
    pool.pool.mark("p", **now_of(pool), trainable=True)
    assert lease(pool) == ["p"]


# -- dry runs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_staleness": 1},
        {"selection": SelectionConfig(order="freshest")},
        {"selection": SelectionConfig(order="freshest", filters=("zero_variance",))},
        {"selection": SelectionConfig(filters=("scored", "all_correct(3.0)"))},
    ],
)
def test_a_dry_run_says_what_the_lease_then_does(
    limits: dict[str, Any], make_pool: Callable[..., Pool], make_step: MakeStep
) -> None:
    pool = make_pool(**limits)
    for i in range(9):
        reward = None if i == 4 else float(i % 4)
        complete_group(pool, make_step, f"p{i}", reward, float(i % 3), version=i % 4)
    pool.nack(pool.lease_batch().lease_id)
    pool.pool.advance_version(3, **now_of(pool))
    for uid in ("p5", "p7"):
        if uid in pool.pool.channels["train"].records.groups:
            pool.pool.mark(uid, **now_of(pool), trainable=False)
    foretold = pool.pool.dry_run(**now_of(pool), batch_size=3)
    before = pool.stats()
    assert pool.stats() == before, "and changes nothing itself"
    served = [d.prompt_uid for d in foretold.decisions if d.decision == "serve"]
    dropped = {d.prompt_uid: d.reason for d in foretold.decisions if d.decision == "drop"}
    cursor = pool.pool.events.after(None).cursor
    assert lease(pool, 3) == served
    assert len(served) == 3
    events = pool.pool.events.after(cursor, kinds=["dropped"]).events
    assert {e.prompt_uid: e.data["reason"] for e in events} == dropped


def test_a_dry_run_and_the_lease_serve_what_was_handed_back_before_all_else(
    make_pool: Callable[..., Pool], make_step: MakeStep
) -> None:
    pool = selecting(make_pool, order="freshest")
    complete_group(pool, make_step, "old", 1.0, version=0)
    pool.nack(pool.lease_batch().lease_id)
    complete_group(pool, make_step, "new", 1.0, version=9)
    foretold = pool.pool.dry_run(**now_of(pool), batch_size=2)
    assert [(d.prompt_uid, d.rank) for d in foretold.decisions] == [("old", 1), ("new", 2)]
    assert lease(pool, 2) == ["old", "new"]


def test_a_dry_run_holds_what_a_failing_function_would_hold(
    make_pool: Callable[..., Pool], make_step: MakeStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "my_orders", SimpleNamespace(fails=lambda info: 1 / 0))
    pool = make_pool()
    complete_group(pool, make_step, "a", 1.0)
    (decision,) = pool.pool.dry_run(
        SelectionConfig(order="my_orders:fails"), **now_of(pool)
    ).decisions
    assert decision.decision == "hold"
    assert "selection.order 'my_orders:fails' failed on group 'a': Zero" in decision.reason
    assert lease(pool) == ["a"], "with the channel's own order it is served"


# -- events --------------------------------------------------------------------------------------


async def test_events_are_read_page_by_page_without_gap_or_repetition(make_step: MakeStep) -> None:
    actor = pool_here(PoolConfig(durability="none"))
    for i in range(5):
        await actor.submit_step(make_step(f"t{i}", f"p{i}", is_last=True))
        await actor.ack((await actor.lease_batch()).lease_id)
    read: list[Any] = []
    cursor = None
    while (page := await actor.get_events(cursor, limit=4)).events:
        assert not page.lost
        read += page.events
        cursor = page.cursor
    expected = [(kind, f"p{i}") for i in range(5) for kind in ("ready", "leased", "acked")]
    assert [(e.kind, e.prompt_uid) for e in read] == expected
    only = await actor.get_events(kinds=["acked"], channel="train", limit=2)
    assert [e.prompt_uid for e in only.events] == ["p0", "p1"]
    rest = await actor.get_events(only.cursor, kinds=["acked"])
    assert [e.prompt_uid for e in rest.events] == ["p2", "p3", "p4"]
    assert not (await actor.get_events(channel="val")).events


async def test_a_reader_that_is_too_slow_is_told(
    make_step: MakeStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "REMEMBERED", 3)
    actor = pool_here(PoolConfig(durability="none"))
    start = (await actor.get_events()).cursor
    for i in range(5):
        await actor.submit_step(make_step(f"t{i}", f"p{i}", is_last=True))
    page = await actor.get_events(start)
    assert page.lost
    assert [e.prompt_uid for e in page.events] == ["p2", "p3", "p4"]
    assert not (await actor.get_events(page.cursor)).lost
    assert not (await actor.get_events()).lost, "who asks for all there is, missed nothing"


async def test_a_long_poll_from_a_former_life_is_told_so_when_it_ends(make_step: MakeStep) -> None:
    actor = pool_here(PoolConfig(durability="none"))
    polling = asyncio.create_task(actor.get_events("another:17", timeout_s=30))
    await asyncio.sleep(0)
    await actor.submit_step(make_step("t", is_last=True))
    page = await polling
    assert page.lost
    assert [e.kind for e in page.events] == ["ready"]


async def test_what_is_no_cursor_or_no_kind_is_refused() -> None:
    actor = pool_here(PoolConfig(durability="none"))
    with pytest.raises(InvalidRequestError, match="cursor is 'yesterday'"):
        await actor.get_events("yesterday")
    with pytest.raises(InvalidRequestError, match=r"kinds holds \['born'\]; there are ready"):
        await actor.get_events(kinds=["born"])


# -- waiting, without Ray ------------------------------------------------------------------------


async def waiting_producers(actor: Any) -> int:
    n: int = (await actor.get_statistics("train"))["waiting"]["producers"]
    return n


async def test_a_filter_that_drops_a_group_lets_the_next_open_group_in(
    make_step: MakeStep,
) -> None:
    limits = ChannelConfig(
        max_outstanding_groups=1, selection=SelectionConfig(filters=("zero_variance",))
    )
    actor = pool_here(PoolConfig(default=limits, durability="none"))
    await actor.open_group("p", 2)
    opening = asyncio.create_task(actor.open_group("q", 2))
    for uid in "ab":
        await actor.submit_step(make_step(uid, "p"))
        assert not opening.done()
        await actor.complete_trajectory(uid, 1.0)
    assert await opening == "accepted"


async def test_steps_that_wait_for_room_do_not_wait_behind_a_group_without_credit(
    make_step: MakeStep,
) -> None:
    limits = ChannelConfig(
        overflow="block", max_queue_size=1, max_ahead_versions=0, groups_per_version=1
    )
    actor = pool_here(PoolConfig(default=limits, durability="none"))
    await actor.submit_step(make_step("a", "p", is_last=True))
    opening = asyncio.create_task(actor.open_group("q", 1))
    room = asyncio.create_task(actor.call(OpenTrajectory("b", "r"), None))
    await asyncio.sleep(0)
    assert await waiting_producers(actor) == 2
    assert await actor.fetch_batch() is not None
    assert await room == "accepted"
    assert not opening.done()
    await actor.advance_version(2)  # "r" is the one of version 1
    assert await opening == "accepted"


# -- waiting, through Ray ------------------------------------------------------------------------

CHANNELS = {
    "queue": ChannelConfig(overflow="block", max_queue_size=1),
    "bytes": ChannelConfig(overflow="block", max_bytes=1),
    "fresh": ChannelConfig(max_ahead_versions=0, groups_per_version=1),
}


@pytest.fixture(scope="module")
def shared(cluster: str) -> Any:
    return start_data_pool(PoolConfig(channels=CHANNELS), name=uuid.uuid4().hex)


@pytest.fixture
def client(shared: Any) -> DataPoolClient:
    return client_of([shared])


async def until_waiting(client: DataPoolClient, channel: str, n: int = 1) -> None:
    """Return once `n` producers wait in the pool."""

    async def they_wait() -> bool:
        return bool((await client.get_statistics(channel))["waiting"]["producers"] == n)

    await until(they_wait)


async def test_a_producer_waits_in_its_client_until_something_is_leased(
    client: DataPoolClient, make_step: MakeStep
) -> None:
    where: dict[str, Any] = {"channel": "queue"}
    await client.submit_step(make_step("o", "open"), **where)
    await client.submit_step(make_step("a", "p", is_last=True), **where)
    steps = [make_step("b", "q"), make_step("o", "open", 1), make_step("b", "q", 1, is_last=True)]
    submitting = asyncio.create_task(client.submit_steps(steps, **where))
    opening = asyncio.create_task(client.open_trajectory("c", "r", **where))
    await until_waiting(client, "queue", 2)
    assert (await client.get_statistics("queue"))["steps"]["stored"] == 3, "the open group's is in"
    assert await client.fetch_batch(**where) is not None
    assert await submitting == ["accepted"] * 3
    steps_served = await client.fetch_batch(**where)
    assert steps_served is not None
    assert [s.step_index for s in steps_served] == [0, 1]
    assert await opening == "accepted"


async def test_a_producer_that_waits_no_longer_hears_that_the_channel_is_full(
    client: DataPoolClient, make_step: MakeStep
) -> None:
    where: dict[str, Any] = {"channel": "queue"}
    await client.submit_step(make_step("x", "full", is_last=True), **where)
    for ask in (
        lambda: client.open_trajectory("y", "new", **where, timeout_s=0),
        lambda: client.resume_trajectory("y", "new", **where, timeout_s=0.05),
        lambda: client.submit_step(make_step("y", "new"), **where, timeout_s=0),
    ):
        with pytest.raises(PoolFullError, match="max_queue_size=1 ready groups"):
            await ask()
    assert await client.fetch_batch(**where) is not None
    assert await client.open_trajectory("y", "new", **where, timeout_s=0) == "accepted"
    await client.abort_trajectory("y", "done", **where)


async def test_a_channel_that_is_full_of_bytes_has_room_when_they_are_acked(
    client: DataPoolClient, make_step: MakeStep
) -> None:
    where: dict[str, Any] = {"channel": "bytes"}
    await client.submit_step(make_step("a", "p", is_last=True), **where)
    submitting = asyncio.create_task(client.submit_step(make_step("b", "q"), **where))
    await until_waiting(client, "bytes")
    lease = await client.lease_batch(**where)
    assert lease is not None
    assert not submitting.done(), "a consumer that fails gives them back"
    await client.ack(lease.lease_id)
    assert await submitting == "accepted"


async def test_open_group_waits_for_the_version_that_allows_it(client: DataPoolClient) -> None:
    where: dict[str, Any] = {"channel": "fresh"}
    await client.open_group("a", 1, **where)
    opening = [asyncio.create_task(client.open_group(uid, 1, **where)) for uid in "bc"]
    await until_waiting(client, "fresh", 2)
    await client.advance_version(1, **where)
    assert await opening[0] == "accepted"
    assert not opening[1].done()
    await client.advance_version(2, **where)
    assert await opening[1] == "accepted"
    with pytest.raises(PoolFullError, match="policy version 2 allows"):
        await client.open_group("d", 1, timeout_s=0, **where)


async def test_a_watcher_is_woken_by_the_event_that_it_waits_for(
    client: DataPoolClient, make_step: MakeStep
) -> None:
    where: dict[str, Any] = {"channel": "val"}
    cursor = (await client.get_events(**where)).cursor
    watching = asyncio.create_task(
        client.get_events(cursor, **where, kinds=["dropped"], timeout_s=60)
    )
    await client.submit_step(make_step("t", is_last=True), **where)
    await client.drop_group("p", "test", **where)
    page = await watching
    assert [(e.prompt_uid, e.data["reason"]) for e in page.events] == [("p", "test")]
    assert not (await client.get_events(page.cursor, **where)).events


def test_a_reward_is_told_with_the_versions_that_earned_it_and_again_when_it_changes(
    make_pool: Callable[..., Pool], make_step: MakeStep
) -> None:
    pool = make_pool()
    pool.open_group("p", 3)
    for uid, versions in {"a": (4, 5), "b": (5,), "c": (5,)}.items():
        for index, version in enumerate(versions):
            pool.submit_step(make_step(uid, "p", index, policy_version=version))
    pool.complete_trajectory("a", 1.0)
    pool.complete_trajectory("b")
    pool.abort_trajectory("c", "test")
    pool.set_reward("b", 0.5, **now_of(pool))
    pool.set_reward("b", 0.25, **now_of(pool))
    scored = pool.pool.events.after(None, kinds=["scored"]).events
    assert [(e.prompt_uid, e.trajectory_uid, e.data) for e in scored] == [
        ("p", "a", {"reward": 1.0, "oldest": 4, "newest": 5}),
        ("p", "b", {"reward": 0.5, "oldest": 5, "newest": 5}),
        ("p", "b", {"reward": 0.25, "oldest": 5, "newest": 5}),
    ]
