"""A restarted trainer takes up what its pool holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
import ray

from stepwell.datapool import DataPoolClient, Step
from stepwell.trainer.config import RolloutConfig
from stepwell.trainer.data import PromptSource
from stepwell.trainer.errors import CheckpointError, DataExhaustedError
from stepwell.trainer.ledger import Ledger
from stepwell.trainer.live import Traffic
from stepwell.trainer.reclaim import ISSUED, reclaim, settle_former
from stepwell.trainer.rollout.producer import Producer
from stepwell.trainer.rollout.worker import WorkerHandle
from tests.builders import step_of


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[DataPoolClient]:
    async with DataPoolClient.local(folder=tmp_path / "pool") as client:
        yield client


def task(uid: str) -> dict[str, str]:
    return {"instance_id": uid}


async def submitted(
    pool: DataPoolClient,
    uid: str,
    *,
    version: int = 0,
    done: bool = True,
    ours: bool = True,
    channel: str = "train",
) -> None:
    metadata = {"task": task(uid), ISSUED: True} if ours else {"task": "an agent's word for it"}
    await pool.open_group(uid, 1, metadata=metadata, channel=channel)
    only = step_of(f"t-{uid}", uid, policy_version=version, is_last=done)
    await pool.submit_step(only, channel)


async def live(pool: DataPoolClient, channel: str = "train") -> set[str]:
    return {row.prompt_uid for row in (await pool.list_groups(channel)).items}


async def test_ready_groups_of_the_checkpoint_are_kept_and_all_others_issued_again(
    pool: DataPoolClient,
) -> None:
    await submitted(pool, "ready")
    await submitted(pool, "open", done=False)
    await submitted(pool, "fresh", version=7)
    await submitted(pool, "later")
    await submitted(pool, "agent", ours=False)
    pending = {uid: task(uid) for uid in ("ready", "open", "fresh", "gone")}

    result = await reclaim(pool, trained={}, pending=pending, version=3)

    assert result.kept == {"ready": task("ready")}
    assert result.again == {uid: task(uid) for uid in ("open", "fresh", "gone")}
    assert await live(pool) == {"ready", "agent"}
    assert result.dropped == {
        "producer_restarted": 1,
        "lost_policy_version": 1,
        "after_checkpoint": 1,
    }


async def test_what_the_checkpoint_contains_is_never_served_again(pool: DataPoolClient) -> None:
    for uid in "abc":
        await submitted(pool, uid)
    trained = await pool.lease_batch()
    untrained = await pool.lease_batch()
    assert trained is not None
    assert untrained is not None
    leases = {trained.lease_id: [g.prompt_uid for g in trained.groups]}

    await reclaim(pool, trained=leases, pending={u: task(u) for u in "bc"}, version=0)

    assert await live(pool) == {"b", "c"}
    served = await pool.fetch_batch(batch_size=2)
    assert served is not None
    assert {step.prompt_uid for step in served} == {"b", "c"}


async def test_a_trained_group_whose_lease_ran_out_is_dropped(pool: DataPoolClient) -> None:
    await submitted(pool, "a")
    lease = await pool.lease_batch(lease_s=0.01)
    assert lease is not None
    assert await pool.lease_batch(timeout_s=5) is not None  # given to another consumer

    await reclaim(pool, trained={lease.lease_id: ["a"]}, pending={}, version=0)
    assert await live(pool) == set()


async def test_a_lease_that_another_runs_checkpoint_contains_is_none_of_this_pools(
    pool: DataPoolClient,
) -> None:
    """Their numbers begin anew in each journal."""
    await submitted(pool, "a", ours=False)
    lease = await pool.lease_batch()
    assert lease is not None
    await settle_former(pool, {lease.lease_id: ["of-the-other-run"]}, "train")
    served = await pool.fetch_batch()
    assert served is not None
    assert [step.prompt_uid for step in served] == ["a"]


async def test_nothing_is_left_of_an_evaluation(pool: DataPoolClient) -> None:
    await submitted(pool, "v", channel="val")
    await reclaim(pool, trained={}, pending={}, version=0)
    assert await live(pool, "val") == set()


async def test_groups_that_share_a_lease_with_untrained_ones_are_dropped_alone(
    pool: DataPoolClient,
) -> None:
    for uid in "ab":
        await submitted(pool, uid)
    await pool.lease_batch(batch_size=2)
    await reclaim(pool, trained={"": ["a"]}, pending={"b": task("b")}, version=0)
    assert await live(pool) == {"b"}


async def test_a_group_that_training_took_is_not_issued_again_whatever_its_lease_does(
    pool: DataPoolClient,
) -> None:
    """Its lease runs out, and the pool drops it for its age and returns its prompt."""
    ledger, source = Ledger(), Source()
    config = RolloutConfig(agent="nobody:agent", min_n=1)
    producer = Producer(config, cast(PromptSource, source), pool, [], ledger)
    for uid in ("taken", "waiting"):
        ledger.issued(uid, uid)
        producer.in_flight[uid] = task(uid)
    producer.leased(["taken"])
    for uid in ("taken", "waiting"):
        producer._dropped(uid, "stale", returned=True)
    assert source.returned == [task("waiting")]
    assert set(ledger.open) == {"taken"}
    await producer._find_dropped()
    assert source.returned == [task("waiting")]


async def test_a_group_whose_worker_died_after_it_was_leased_is_not_issued_again(
    pool: DataPoolClient,
) -> None:
    class DiesAfterwards:
        async def run_group(self, task: Any, uid: str, n: int, *_: Any) -> dict[str, int]:
            step = Step(
                prompt_ids=[1], response_ids=[2], trajectory_uid="t", prompt_uid=uid, is_last=True
            )
            await pool.submit_step(step)
            assert await pool.lease_batch() is not None
            raise ray.exceptions.RayActorError

        async def ready(self) -> None: ...

    source = Source(task("p"))
    config = RolloutConfig(agent="nobody:agent", n=1, min_n=1)
    worker = cast(WorkerHandle, DiesAfterwards())
    producer = Producer(config, cast(PromptSource, source), pool, [worker], Ledger())
    async with producer.running():
        await producer.wait_ended()
    assert source.returned == []
    assert len(producer.in_flight) == 1


async def test_what_the_pool_dropped_before_it_forgot_its_events_is_issued_again(
    pool: DataPoolClient,
) -> None:
    """A kill of the pool between a drop and the producer's next look."""
    ledger = Ledger()
    source = Source()
    config = RolloutConfig(agent="nobody:agent", min_n=1)
    producer = Producer(config, cast(PromptSource, source), pool, [], ledger)
    for uid in ("dropped", "there", "trained"):
        ledger.issued(uid, uid)
        producer.in_flight[uid] = task(uid)
    await submitted(pool, "there")
    await submitted(pool, "dropped")
    await pool.drop_group("dropped", "evicted")
    ledger.trained(1, ["trained"])  # acked, and not settled yet

    await producer._find_dropped()

    assert source.returned == [task("dropped")]
    assert set(producer.in_flight) == {"there", "trained"}
    assert set(ledger.open) == {"there"}


class Source:
    def __init__(self, *tasks: dict[str, str]) -> None:
        self.tasks = list(tasks)
        self.returned: list[dict[str, str]] = []

    def next(self) -> dict[str, str]:
        if not self.tasks:
            raise DataExhaustedError("no more")
        return self.tasks.pop(0)

    def put_back(self, tasks: list[dict[str, str]]) -> None:
        self.returned += tasks


async def test_traffic_that_the_surviving_ledger_trained_is_not_leased_again(
    pool: DataPoolClient, tmp_path: Path
) -> None:
    """A salvaged pool has groups again whose acks were lost."""
    for uid in ("trained", "void", "new"):
        await submitted(pool, uid, ours=False)
    former = Ledger(tmp_path / "ledger.jsonl")
    former.issued("trained", "trained")
    former.trained(1, ["trained"])
    offset = former.offset
    former.issued("void", "void")
    former.trained(2, ["void"])
    former.close()
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.resume(1, offset)
    await Traffic(pool, ledger, min_n=1).resume({"trained": {}}, version=1)
    assert await live(pool) == {"void", "new"}
    ledger.close()


async def test_generation_fails_if_it_can_not_follow_what_the_pool_drops(
    pool: DataPoolClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what was dropped would keep its place for ever, and its prompt never come back."""

    async def fails(*args: object, **options: object) -> None:
        raise CheckpointError("the ledger cannot be written")

    monkeypatch.setattr(pool, "get_events", fails)
    config = RolloutConfig(agent="nobody:agent", min_n=1)
    producer = Producer(config, cast(PromptSource, Source()), pool, [], Ledger())
    async with producer.running() as generation:
        with pytest.raises(CheckpointError, match="cannot be written"):
            await asyncio.wait_for(generation, 10)
