"""The lease keeper over a real pool: whatever becomes of its leases, each group is delivered once
and leaves the pool when its use is durable."""

from __future__ import annotations

import asyncio
import random
from itertools import count
from typing import Any, TypeVar

import pytest

import stepwell.datapool.remote.lease_keeper
from stepwell.datapool import DataPoolClient, Lease, PoolConfig
from stepwell.datapool.errors import PoolUnavailableError
from stepwell.datapool.remote.lease_keeper import USED, LeaseKeeper, by_lease
from stepwell.datapool.remote.service import PoolService
from stepwell.datapool.remote.shard import LocalShard
from stepwell.datapool.remote.shards import shard_of
from stepwell.datapool.types import Group
from tests.builders import step_of, until

S = TypeVar("S", bound=LocalShard)


class Pool(DataPoolClient):
    """A pool of this process."""

    def __init__(self) -> None:
        super().__init__([LocalShard(PoolService())])

    async def put(self, *uids: str) -> None:
        for uid in uids:
            await self.open_group(uid, 1)
            await self.submit_step(step_of(uid, uid))
            await self.complete_trajectory(uid, 1.0)

    async def run_out(self) -> None:
        """Release the groups of all leases, as if every lease had run out."""
        await self.release_leases("train", "ran out")

    async def counts(self) -> dict[str, int]:
        groups = (await self.get_statistics("train"))["groups"]
        return {k: groups[k] for k in ("ready", "leased", "acked", "dropped") if groups[k]}

    async def drop_reasons(self) -> dict[str, int]:
        reasons: dict[str, int] = (await self.get_statistics("train"))["groups"]["drop_reasons"]
        return reasons


def uids(groups: tuple[Group, ...] | None) -> str:
    assert groups is not None
    return "".join(group.prompt_uid for group in groups)


def keeper_of(pool: Pool, lease_s: float = 600.0) -> LeaseKeeper:
    return LeaseKeeper(pool, "train", lease_s)


async def test_a_group_whose_lease_ran_out_is_recognised_and_acked_with_its_new_lease() -> None:
    pool = Pool()
    keeper = keeper_of(pool)
    await pool.put("a", "b", "c", "d")
    assert uids(await keeper.lease(2)) == "ab"
    await pool.run_out()
    assert uids(await keeper.lease(2)) == "cd"
    assert keeper.redelivered == 2
    assert await keeper.settle("ab") == []
    assert await pool.counts() == {"leased": 2, "acked": 2}


async def test_a_lease_of_old_and_new_groups_is_acked_when_all_of_them_are_settled() -> None:
    pool = Pool()
    keeper = keeper_of(pool)
    await pool.put("a", "b")
    assert uids(await keeper.lease(2)) == "ab"
    await pool.put("c")
    await pool.run_out()
    waiting = asyncio.create_task(keeper.lease(2, timeout_s=60))
    await asyncio.sleep(0.05)
    await pool.put("d")
    assert uids(await waiting) == "cd"
    assert await keeper.settle("ab") == []
    assert await keeper.settle("d") == []
    assert await keeper.settle("c") == []
    assert await pool.counts() == {"acked": 4}


async def test_a_settled_group_that_shares_a_lease_waits_for_the_rest() -> None:
    pool = Pool()
    keeper = keeper_of(pool)
    await pool.put("a", "b")
    assert uids(await keeper.lease(2)) == "ab"
    await keeper.settle("a")
    assert await pool.counts() == {"leased": 2}
    assert keeper.settled == {"a"}
    await keeper.settle("b")
    assert await pool.counts() == {"acked": 2}
    assert not keeper.settled


async def test_a_settled_group_that_no_lease_holds_is_dropped_with_a_reason() -> None:
    pool = Pool()
    keeper = keeper_of(pool)
    await pool.put("a", "b")
    await keeper.lease()
    await pool.run_out()
    assert await keeper.settle("a") == []
    assert await pool.drop_reasons() == {USED: 1}
    assert await pool.counts() == {"ready": 1, "dropped": 1}


async def leased_over_two(kind: type[S]) -> tuple[list[S], DataPoolClient, LeaseKeeper, list[str]]:
    """Two shards, and a keeper that holds a lease of one group of each."""
    config = PoolConfig(shards=2, durability="none")
    shards = [kind(PoolService(config, shard=k)) for k in range(2)]
    pool = DataPoolClient(shards)
    both = [next(uid for uid in map(str, count()) if shard_of(uid, 2) == k) for k in range(2)]
    keeper = LeaseKeeper(pool, "train", 600.0)
    for uid in both:
        await pool.submit_step(step_of(uid, uid, is_last=True))
    assert await keeper.lease(2) is not None
    return shards, pool, keeper, both


async def test_of_a_lease_over_shards_the_groups_whose_part_is_held_are_acked() -> None:
    shards, pool, keeper, both = await leased_over_two(LocalShard)
    await DataPoolClient(shards[1:]).release_leases("train", "ran out")
    assert await keeper.settle(both) == [], "nobody else had any"
    groups = (await pool.get_statistics("train"))["groups"]
    assert (groups["acked"], groups["drop_reasons"]) == (1, {USED: 1})
    assert not keeper.held
    assert not keeper.settled


async def test_of_a_lease_over_shards_the_part_of_one_that_was_away_is_acked_later() -> None:
    class Away(LocalShard):
        is_away = False

        def call(self, op: Any, timeout_s: float | None = 0.0) -> Any:
            if self.is_away:
                raise PoolUnavailableError("it is starting")
            return super().call(op, timeout_s)

    shards, pool, keeper, both = await leased_over_two(Away)
    shards[1].is_away = True
    with pytest.raises(PoolUnavailableError):
        await keeper.settle(both)
    shards[1].is_away = False
    assert await keeper.settle(both) == []
    assert (await pool.get_statistics("train"))["groups"]["acked"] == 2
    assert not keeper.held
    assert not keeper.settled


async def test_a_settled_group_that_was_on_its_way_here_is_acked_when_it_arrives() -> None:
    pool = Pool()
    keeper = keeper_of(pool)
    await pool.put("a", "b")
    await keeper.lease()
    await pool.run_out()
    other = await pool.lease_batch()
    assert other is not None
    assert await keeper.settle("a") == ["a"]  # somebody has it: it may be trained there, too
    assert keeper.settled == {"a"}
    await pool.nack(other.lease_id)
    assert uids(await keeper.lease()) == "b"
    assert await pool.counts() == {"leased": 1, "acked": 1}


async def test_a_settled_group_whose_new_lease_arrives_before_its_drop_is_refused_is_acked() -> (
    None
):
    class Busy(Pool):
        async def drop_group(self, uid: str, *args: Any) -> None:  # type: ignore[override]
            await self.put("c")  # a lease of this consumer waits for it
            await until(lambda: uid in keeper.held)
            await super().drop_group(uid, *args)

    pool = Busy()
    keeper = keeper_of(pool)
    await pool.put("a")
    assert uids(await keeper.lease()) == "a"
    await pool.run_out()
    leasing = asyncio.create_task(keeper.lease(2, timeout_s=60))
    await asyncio.sleep(0)
    assert await keeper.settle("a") == []
    await pool.put("d")
    assert uids(await leasing) == "cd"
    assert await keeper.settle("cd") == []
    assert await pool.counts() == {"acked": 3}


async def test_what_was_nacked_is_delivered_again() -> None:
    pool = Pool()
    keeper = keeper_of(pool)
    await pool.put("a", "b")
    await keeper.lease(2)
    await keeper.nack("ab", "failed")
    assert uids(await keeper.lease(2)) == "ab"
    assert keeper.redelivered == 0


@pytest.mark.slow
async def test_leases_are_renewed_while_their_consumer_does_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stepwell.datapool.remote.lease_keeper, "RENEWALS", 40)
    pool = Pool()
    await pool.put("a")
    async with keeper_of(pool, lease_s=2.0) as keeper:
        await keeper.lease()
        await asyncio.sleep(3.0)
        assert await pool.counts() == {"leased": 1}
        assert keeper.lost == 0


class LateAnswers(Pool):
    """Whoever leases stands still, the first time, until the lease has run out."""

    late = True

    async def lease_batch(self, *args: Any, **kwargs: Any) -> Lease | None:
        answer = await super().lease_batch(*args, **kwargs)
        if self.late:
            self.late = False
            await asyncio.sleep(0.3)
            await self.run_out()
        return answer


async def test_groups_whose_lease_ran_out_before_it_arrived_are_not_delivered_with_it() -> None:
    """Or they could be dropped, issued again and trained, while they are trained here."""
    pool = LateAnswers()
    keeper = keeper_of(pool, lease_s=0.6)
    await pool.put("a")
    groups = await keeper.lease()
    assert groups is not None
    assert [(g.prompt_uid, g.delivery) for g in groups] == [("a", 2)]
    assert keeper.redelivered == 0
    await keeper.settle("a")
    assert await pool.counts() == {"acked": 1}


async def test_a_keeper_survives_a_pool_that_answers_with_errors() -> None:
    class Broken(Pool):
        fails = 2

        async def renew(self, *args: Any, **kwargs: Any) -> float:
            self.fails -= 1
            if self.fails >= 0:
                raise RuntimeError("no answer that anybody expects")
            done.set()
            return await super().renew(*args, **kwargs)

    done = asyncio.Event()
    pool = Broken()
    await pool.put("a")
    async with keeper_of(pool, lease_s=1.0) as keeper:
        await keeper.lease()
        await asyncio.wait_for(done.wait(), 60)


def test_a_checkpoint_names_the_leases_that_it_contains_whole() -> None:
    held = {"a": "1", "b": "1", "c": "2", "d": "2", "e": "3"}
    assert by_lease(held, ["a", "b", "c", "x"]) == {"1": ["a", "b"], "": ["c", "x"]}


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_happens_to_its_leases_each_group_is_delivered_once_and_leaves_the_pool(
    seed: int,
) -> None:
    rng = random.Random(seed)
    pool = Pool()
    keeper = keeper_of(pool)
    n = 0
    at_work: set[str] = set()
    delivered: list[str] = []
    others: list[Lease] = []
    for _ in range(150):
        match rng.choice(
            ["put", "lease", "lease", "settle", "nack", "run out", "run out", "other"]
        ):
            case "put":
                await pool.put(*(f"p{n + i}" for i in range(3)))
                n += 3
            case "lease":
                for group in await keeper.lease(rng.randint(1, 4)) or ():
                    assert group.prompt_uid not in at_work
                    at_work.add(group.prompt_uid)
                    delivered.append(group.prompt_uid)
            case "settle" if at_work:
                done = set(rng.sample(sorted(at_work), rng.randint(1, len(at_work))))
                await keeper.settle(done)
                at_work -= done
            case "nack" if at_work:
                uid = rng.choice(sorted(at_work))
                await keeper.nack([uid], "failed")
                at_work.discard(uid)
                delivered.remove(uid)
            case "run out":
                await pool.run_out()
                others.clear()
            case "other" if not others and (lease := await pool.lease_batch()) is not None:
                # A request of this consumer whose answer is lost: its lease will run out.
                others.append(lease)
    await pool.run_out()
    await keeper.settle(at_work)
    while groups := await keeper.lease():
        delivered += [group.prompt_uid for group in groups]
        await keeper.settle(group.prompt_uid for group in groups)
    assert sorted(delivered) == sorted(f"p{i}" for i in range(n))
    counts = await pool.counts()
    assert counts.get("acked", 0) + counts.get("dropped", 0) == n
    assert set(await pool.drop_reasons()) <= {USED}
    assert not keeper.held
    assert not keeper.settled
