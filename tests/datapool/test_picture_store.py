"""The pool's pictures: stored once for a channel and owner, for as long as a row refers to them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepwell.datapool import ChannelConfig, DataPoolClient, PoolConfig, Step
from stepwell.datapool.core.log_rows import StepsStored, read
from stepwell.datapool.core.pictures import GRACE_S, SWEPT_AT_ONCE, keys_of
from stepwell.datapool.errors import (
    DamagedFileError,
    DataPoolError,
    InvalidRequestError,
    JournalError,
    NotOwnerError,
    TrajectoryClosedError,
    UnknownPictureError,
    UnknownTrajectoryError,
)
from stepwell.datapool.files.deletion import delete_from_journals
from stepwell.datapool.ops import Delete, OpenTrajectory, PutPictures
from stepwell.datapool.pictures import Picture
from stepwell.datapool.remote.client import LocalShard
from stepwell.datapool.remote.picture_cache import PictureCache
from stepwell.datapool.remote.service import PoolService
from stepwell.datapool.remote.stopped import stopped_pool
from stepwell.datapool.store.salvage import salvage
from stepwell.datapool.types import OWNER
from tests.builders import step_of, until
from tests.datapool.conftest import JournaledPool, SyncPool, newest_segment

PAD, N = 99, 4
PNG = b"\x89PNG "


def png(digest: str) -> bytes:
    return PNG + digest.encode() * 100


def name(i: int) -> str:
    return f"{i:064x}"


def conversation(uid: str, *digests: str, prompt_uid: str = "p") -> list[Step]:
    """A linear conversation with these pictures, one a turn."""
    steps: list[Step] = []
    prompt: list[int] = []
    pictures: list[Picture] = []
    for i, digest in enumerate(digests):
        pictures.append(Picture(digest, 28, 28 * N, len(prompt) + 1, N))
        prompt = [*prompt, i, *[PAD] * N]
        steps.append(
            step_of(
                uid,
                prompt_uid,
                i,
                prompt_ids=prompt,
                response_ids=[i],
                parent_index=i - 1 if i else None,
                pictures=tuple(pictures),
            )
        )
        prompt = [*prompt, i]
    return steps


def source(*digests: str) -> dict[str, bytes]:
    return {digest: png(digest) for digest in digests}


def stored(folder: Path) -> dict[str, bytes]:
    """The pictures in the files of a pool: those without their names are theirs."""
    files = (folder / "pictures").glob("*") if (folder / "pictures").is_dir() else ()
    found = {path.name: path.read_bytes() for path in files if path.name != "secret"}
    return {key: data[:-16] for key, data in found.items()}


A, B, C = (name(i) for i in (10, 11, 12))


class Pool(JournaledPool):
    """A pool in which trajectories are conversations with pictures."""

    def talk(self, uid: str, *digests: str, prompt_uid: str = "p", owner: str = "") -> None:
        if owner:
            self("open_trajectory", uid, prompt_uid, 0, {OWNER: owner})
        steps = conversation(uid, *digests, prompt_uid=prompt_uid)
        self("put_pictures", uid, source(*digests), prompt_uid=prompt_uid)
        assert self("apply_steps", steps) == ["accepted"] * len(steps)

    def end(self, *uids: str) -> None:
        for uid in uids:
            self("complete_trajectory", uid)

    def pictures(self) -> list[bytes]:
        return sorted(stored(self.folder).values())

    def counts(self) -> dict[str, int]:
        return self("get_statistics", "train")["pictures"]


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    pool = Pool(tmp_path / "pool", default=ChannelConfig(n_rollouts=1))
    yield pool
    pool.journal.close()


# -- once ------------------------------------------------------------------------------------------


def test_a_screenshot_that_stands_in_fifty_turns_is_stored_once(pool: Pool) -> None:
    digests = [name(i) for i in range(50)]
    pool.talk("t", *digests)
    assert pool.pictures() == sorted(map(png, digests))
    assert pool.counts() == {"stored": 50, "bytes": 50 * len(png(A))}
    assert sum(path.stat().st_size for path in pool.folder.glob("*.log")) < 25_000
    pool.end("t")
    served = pool("fetch_batch")
    assert served is not None
    assert [len(step.pictures) for step in served] == list(range(1, 51))


def test_rollouts_and_trajectories_of_one_owner_share_a_picture(pool: Pool) -> None:
    pool.talk("t0", A)
    pool.talk("t1", A)
    pool.talk("t2", A, prompt_uid="q")
    assert pool.pictures() == [png(A)]


@pytest.mark.parametrize("declared", [None, 0])
def test_a_step_with_pictures_is_a_root_unless_it_declares_its_parent(
    pool: Pool, declared: int | None
) -> None:
    first, second = conversation("t", A, B)
    pool("put_pictures", "t", source(A, B), prompt_uid="p")
    pool("apply_steps", [first, replace(second, parent_index=declared)])
    pool.end("t")
    served = pool("fetch_batch")
    assert [step.parent_index for step in served] == [None, declared]
    assert [len(step.pictures) for step in served] == [1, 2]


def test_each_owner_and_channel_has_its_own_and_nobody_can_tell_of_anothers(pool: Pool) -> None:
    pool.talk("t0", A, prompt_uid="p0", owner="ann")
    pool("open_trajectory", "t1", "p1", 0, {OWNER: "bob"})
    step = conversation("t1", A, prompt_uid="p1")[0]
    # The pool has the picture, and says of it what it says of one that it has not.
    (refused,) = pool("apply_steps", [step])
    assert isinstance(refused, UnknownPictureError)
    assert refused.digests == (A,)
    pool("put_pictures", "t1", source(A))
    assert pool("apply_steps", [step]) == ["accepted"]
    keys = list(stored(pool.folder))
    assert len(keys) == 2
    assert not any(A in key for key in keys)
    assert pool.pictures() == [png(A)] * 2


# -- a step waits for its pictures -----------------------------------------------------------------


def test_a_step_whose_picture_is_missing_changes_nothing(pool: Pool) -> None:
    (refused,) = pool("apply_steps", conversation("t", A))
    assert isinstance(refused, UnknownPictureError)
    counts = pool("get_statistics", "train")
    assert counts["steps"]["submitted"] == counts["groups"]["submitted"] == 0


async def test_a_client_sends_pictures_when_the_pool_lacks_them() -> None:
    asked: list[tuple[str, ...]] = []

    async def give(digests: Any) -> dict[str, bytes]:
        asked.append(tuple(sorted(digests)))
        return source(*digests)

    async with DataPoolClient.local(PoolConfig(default=ChannelConfig(n_rollouts=1))) as client:
        steps = conversation("t", A, B, C)
        with pytest.raises(UnknownPictureError, match=A):
            await client.submit_steps(steps)
        assert await client.submit_steps(steps, pictures=give) == ["accepted"] * 3
        assert await client.submit_steps(steps, pictures=give) == ["duplicate"] * 3
        assert asked == [(A, B, C)]
        again = conversation("u", A, B, prompt_uid="q")
        base = await client.append_step(again[0], pictures={})
        assert not isinstance(base, str)
        await client.append_step(again[1], base, pictures=give)  # the pool has them
        assert len(asked) == 1
        with pytest.raises(UnknownPictureError):
            await client.append_step(conversation("v", name(7))[0], pictures={A: png(A)})
        await client.append_step(conversation("v", name(7))[0], pictures=give)
        assert asked[1:] == [(name(7),)]
        assert await client.read_pictures("t", [C, A]) == source(C, A)
        statistics = await client.get_statistics("train")
        assert statistics["pictures"]["stored"] == 4


async def test_shards_have_the_pictures_of_their_groups(tmp_path: Path) -> None:
    services = [PoolService(PoolConfig(shards=2), tmp_path / f"shard-{i}", i) for i in range(2)]
    client = DataPoolClient([LocalShard(service) for service in services])
    steps = [s for i in range(8) for s in conversation(f"t{i}", A, prompt_uid=f"p{i}")]
    assert await client.submit_steps(steps, pictures=source(A)) == ["accepted"] * 8
    await client.put_pictures("t0", source(B))
    for i in range(8):
        assert await client.read_pictures(f"t{i}", [A]) == source(A)
    assert (await client.get_statistics("train"))["pictures"]["stored"] == 2
    await client.close()
    for service in services:
        service.close()
    left = stopped_pool(tmp_path)
    assert await left.read_pictures("t5", [A]) == source(A)


def test_malformed_pictures_are_refused_by_name(pool: Pool) -> None:
    with pytest.raises(InvalidRequestError, match="64 hex digits"):
        pool("put_pictures", "t", {"../../x": b"png"}, prompt_uid="p")
    with pytest.raises(InvalidRequestError, match="0 bytes"):
        pool("put_pictures", "t", {A: b""}, prompt_uid="p")
    with pytest.raises(UnknownTrajectoryError):
        pool("put_pictures", "t", source(A))


def test_a_store_that_cannot_be_written_is_an_error_of_the_pool(pool: Pool) -> None:
    (pool.folder / "pictures").write_bytes(b"in the way")
    with pytest.raises(JournalError, match="cannot be stored"):
        pool("put_pictures", "t", source(A), prompt_uid="p")


# -- reading ---------------------------------------------------------------------------------------


def test_a_picture_is_read_only_through_a_trajectory_that_refers_to_it(pool: Pool) -> None:
    pool.talk("t0", A, owner="ann")
    pool.talk("t1", B, owner="ann")
    assert pool("read_pictures", "t0", (A,)) == source(A)
    assert pool("read_pictures", "t0", (A,), owner="ann") == source(A)
    with pytest.raises(NotOwnerError):
        pool("read_pictures", "t0", (A,), owner="bob")
    with pytest.raises(NotOwnerError):
        pool("put_pictures", "t0", source(C), owner="bob")
    said = set()
    for digest in (B, C):  # one is stored for the same owner, the other is not
        with pytest.raises(UnknownPictureError) as error:
            pool("read_pictures", "t0", (digest,))
        said.add(str(error.value).replace(digest, "…"))
    assert len(said) == 1
    with pytest.raises(UnknownTrajectoryError):
        pool("read_pictures", "x", (A,))


def test_an_answer_has_a_bound_and_one_picture_at_least(pool: Pool) -> None:
    pool.talk("t", A, B, C)
    assert pool("read_pictures", "t", (A, B, C), max_bytes=1) == source(A)
    assert pool("read_pictures", "t", (A, B, C), max_bytes=2 * len(png(A))) == source(A, B)


def test_a_damaged_picture_is_one_error_and_a_lost_one_is_asked_for_again(pool: Pool) -> None:
    pool.talk("t", A)
    (path,) = (p for p in (pool.folder / "pictures").iterdir() if p.name != "secret")
    path.write_bytes(path.read_bytes().replace(b"PNG", b"PnG"))
    with pytest.raises(DamagedFileError, match="salvage"):
        pool("read_pictures", "t", (A,))
    path.unlink()
    again = pool.restart(default=ChannelConfig(n_rollouts=1))
    assert again.pool.pictures.lost() == [path.name]
    (refused,) = again("apply_steps", conversation("u", A))
    assert isinstance(refused, UnknownPictureError)
    again("put_pictures", "t", source(A))
    assert again("read_pictures", "t", (A,)) == source(A)
    assert again("get_statistics", "train")["pictures"] == {"stored": 1, "bytes": len(png(A))}
    again.journal.close()


def test_a_picture_that_was_found_damaged_is_there_again_once_it_is_sent(pool: Pool) -> None:
    pool.talk("t", A)
    (path,) = (p for p in (pool.folder / "pictures").iterdir() if p.name != "secret")
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DamagedFileError, match="salvage"):
        pool("read_pictures", "t", (A,))
    (refused,) = pool("apply_steps", conversation("u", A))
    assert isinstance(refused, UnknownPictureError)
    pool("put_pictures", "t", source(A))
    assert pool("read_pictures", "t", (A,)) == source(A)
    assert pool.counts() == {"stored": 1, "bytes": len(png(A))}


async def test_a_cache_holds_as_much_as_it_may_and_asks_again(tmp_path: Path) -> None:
    async with DataPoolClient.local(folder=tmp_path / "pool") as client:
        steps = conversation("t", A, B, C)
        await client.submit_steps(steps, pictures=source(A, B, C))
        cache = PictureCache(client, max_bytes=2 * len(png(A)))
        assert await cache.of(steps[2]) == source(A, B, C)
        assert cache.n_bytes == 2 * len(png(A))
        asked: list[Any] = []
        ask = client.call

        async def counted(op: Any, timeout_s: float | None = 0.0) -> Any:
            asked.append(op)
            return await ask(op, timeout_s)

        client.call = counted  # type: ignore[method-assign]
        assert await cache.of(steps[0]) == source(A)
        assert await cache.of(steps[0]) == source(A)
        assert [op.digests for op in asked] == [(A,)]


# -- as long as a row ------------------------------------------------------------------------------


def test_a_picture_goes_when_its_last_group_is_trained(pool: Pool) -> None:
    pool.talk("t0", A, B, prompt_uid="p0")
    pool.talk("t1", B, prompt_uid="p1")
    pool.end("t0", "t1")
    assert pool("fetch_batch") is not None
    assert pool.pictures() == [png(B)]
    assert pool("fetch_batch") is not None
    assert pool.pictures() == []
    with pytest.raises(TrajectoryClosedError):
        pool("read_pictures", "t0", (A,))


def test_a_group_that_comes_back_has_its_pictures(pool: Pool) -> None:
    pool.talk("t", A)
    pool.end("t")
    for _ in range(2):
        lease = pool("lease_batch")
        assert pool("read_pictures", "t", (A,)) == source(A)
        pool("nack", lease.lease_id)
    assert pool.pictures() == [png(A)]


def test_an_aborted_trajectory_keeps_the_pictures_of_its_rows(pool: Pool) -> None:
    pool("open_group", "p", 2)
    pool.talk("t0", A)
    pool.talk("t1", B)
    pool("abort_trajectory", "t0", "broken")
    assert pool("read_pictures", "t0", (A,)) == source(A)
    again = pool.restart(default=ChannelConfig(n_rollouts=1))
    assert again("read_pictures", "t0", (A,)) == source(A)
    again("complete_trajectory", "t1")
    assert again("fetch_batch") is not None
    assert stored(pool.folder) == {}
    again.journal.close()


def test_a_picture_without_a_step_goes_after_its_time_also_over_a_restart(pool: Pool) -> None:
    pool("put_pictures", "t", source(A), prompt_uid="p")
    pool.talk("u", B)
    pool.now += GRACE_S - 1
    pool.later(0)
    assert pool.pictures() == sorted([png(A), png(B)])
    again = pool.restart(default=ChannelConfig(n_rollouts=1))
    again.now += GRACE_S - 1
    again.later(0)
    assert len(stored(pool.folder)) == 2
    again.now += 1
    again.later(0)
    assert list(stored(pool.folder).values()) == [png(B)]
    again.journal.close()


def test_counts_are_those_of_the_rows_after_a_restart(pool: Pool) -> None:
    pool.talk("t0", A, B, prompt_uid="p0")
    pool.talk("t1", B, prompt_uid="p1")
    pool.end("t0", "t1")
    counts = pool.counts()
    again = pool.restart(default=ChannelConfig(n_rollouts=1))
    assert again("get_statistics", "train")["pictures"] == counts
    assert again("fetch_batch") is not None
    assert list(stored(pool.folder).values()) == [png(B)]
    assert again("fetch_batch") is not None
    assert stored(pool.folder) == {}
    again.journal.close()


def test_a_picture_is_removed_only_after_its_rows(tmp_path: Path) -> None:
    pool = Pool(tmp_path / "pool", default=ChannelConfig(n_rollouts=1))
    pool.talk("t", A)
    pool.end("t")
    lease = pool("lease_batch")
    # Killed between the ack and the transaction: the next process finds group and picture.
    pool.pool.ack(lease.lease_id, now=pool.now)
    assert pool.pictures() == [png(A)]
    pool.journal._rows.clear()
    pool.journal._deletes.clear()
    pool.journal._states.clear()
    again = pool.restart(default=ChannelConfig(n_rollouts=1))
    assert again("read_pictures", "t", (A,)) == source(A)
    again.journal.close()


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_the_store_has_what_rows_refer_to(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    config: dict[str, Any] = {"default": ChannelConfig(n_rollouts=1)}
    pool = Pool(tmp_path / "pool", **config)
    leases: list[str] = []
    uids: list[str] = []

    def act() -> None:
        nonlocal pool
        uid = rng.choice(uids) if uids else ""
        match rng.randrange(9):
            case 0 | 1 | 2:
                prompt_uid, uid = f"p{rng.randrange(6)}", f"t{len(uids)}"
                digests = [rng.choice((A, B, C, name(rng.randrange(4)))) for _ in range(3)]
                pool("put_pictures", uid, source(*digests), prompt_uid=prompt_uid)
                pool("apply_steps", conversation(uid, *digests, prompt_uid=prompt_uid))
                uids.append(uid)
            case 3:
                pool("complete_trajectory", uid)
            case 4:
                pool("abort_trajectory", uid, "broken")
            case 5:
                pool("delete_trajectory", uid)
            case 6:
                if (lease := pool("lease_batch")) is not None:
                    leases.append(lease.lease_id)
            case 7:
                if leases:
                    pool(rng.choice(("ack", "nack")), leases.pop())
            case 8:
                pool = _restarted(pool, config)

    for _ in range(60):
        with contextlib.suppress(DataPoolError, ValueError):
            act()
        referred = {
            key
            for row in pool.journal.rows()
            if row.kind == StepsStored.__name__
            for own in read(row.kind, row.head)[2].pictures.values()
            for key in keys_of(own).values()
        }
        assert referred <= stored(pool.folder).keys()
        pool.now += GRACE_S  # what no row refers to has waited for long enough
        pool.later(0)
        assert stored(pool.folder).keys() == referred
        counts = sum(len(data) for data in stored(pool.folder).values())
        assert pool.counts() == {"stored": len(referred), "bytes": counts}
    pool.journal.close()


def _restarted(pool: Pool, config: dict[str, Any]) -> Pool:
    pool.journal.close()
    return Pool(pool.folder, pool.now, **config)


# -- deletion --------------------------------------------------------------------------------------


def test_deleting_one_users_trajectory_takes_its_pictures_and_nobody_elses(pool: Pool) -> None:
    pool("open_group", "p", 3)
    pool.talk("t0", A, B, owner="ann")
    pool.talk("t1", A, owner="bob")
    pool.talk("t2", B, owner="ann")
    assert len(pool.pictures()) == 3
    pool("delete_trajectory", "t0")
    assert pool.pictures() == sorted([png(A), png(B)])
    assert pool("read_pictures", "t1", (A,)) == source(A)
    assert pool("read_pictures", "t2", (B,)) == source(B)
    with pytest.raises(UnknownPictureError):
        pool("read_pictures", "t0", (A,))
    again = pool.restart(default=ChannelConfig(n_rollouts=1))
    assert again("read_pictures", "t1", (A,)) == source(A)
    again("delete_trajectory", "t1")
    again("delete_trajectory", "t2")
    assert stored(pool.folder) == {}
    again.journal.close()


def test_a_picture_that_was_put_for_a_deleted_trajectory_does_not_wait(pool: Pool) -> None:
    pool.talk("t", A)
    pool("put_pictures", "t", source(B))
    pool("delete", "t")
    assert pool.pictures() == []


def test_a_stopped_pool_deletes_pictures_and_orphans(pool: Pool) -> None:
    pool.talk("t0", A, prompt_uid="p0")
    pool.talk("t1", B, prompt_uid="p1")
    pool("put_pictures", "t0", source(C))
    pool.journal.close()
    delete_from_journals(pool.folder, Delete("t0"))
    assert pool.pictures() == [png(B)]


def test_what_a_crash_left_of_a_picture_goes_like_one_without_a_step(pool: Pool) -> None:
    pool.talk("t0", A, prompt_uid="p0")
    pool.talk("t1", B, prompt_uid="p1")
    folder = pool.folder / "pictures"
    draft = folder / f"{'0' * 32}.tmp"
    draft.write_bytes(png(A))
    again = pool.restart(default=ChannelConfig(n_rollouts=1))
    again("put_pictures", "t0", source(C))
    again.now += GRACE_S
    again.later(0)
    assert not draft.exists()
    again.journal.close()
    draft.write_bytes(png(A))
    delete_from_journals(pool.folder, Delete("t0"))
    assert pool.pictures() == [png(B)]


# -- bounds ----------------------------------------------------------------------------------------


def test_a_byte_limit_counts_each_picture_once() -> None:
    limit = 3 * len(png(A))
    pool = SyncPool(PoolConfig(default=ChannelConfig(n_rollouts=1, max_bytes=limit)))

    def talk(uid: str, digest: str) -> None:
        pool.apply(OpenTrajectory(uid, uid), 0.0)
        pool.apply(PutPictures(uid, source(digest)), 0.0)
        pool.submit_steps(conversation(uid, digest, prompt_uid=uid), now=0.0)
        pool.complete_trajectory(uid, now=0.0)

    for i in range(4):
        talk(f"a{i}", A)
    assert pool.get_statistics("train", now=0.0)["groups"]["dropped"] == 0
    for i, digest in enumerate((B, C)):
        talk(f"b{i}", digest)
    statistics = pool.get_statistics("train", now=0.0)
    assert statistics["groups"]["dropped"] == 4
    assert statistics["pictures"] == {"stored": 2, "bytes": 2 * len(png(A))}
    assert statistics["memory_bytes"] >= 2 * len(png(A))


async def test_a_pool_without_a_journal_lets_go_of_pictures() -> None:
    async with DataPoolClient.local(PoolConfig(default=ChannelConfig(n_rollouts=1))) as client:
        for uid in ("t", "u"):
            await client.submit_steps(conversation(uid, A, prompt_uid=uid), pictures=source(A))
        await client.delete_trajectory("t")
        assert await client.read_pictures("u", [A]) == source(A)
        await client.complete_trajectory("u")
        lease = await client.lease_batch()
        assert lease is not None
        await client.ack(lease.lease_id)
        counts = (await client.get_statistics("train"))["pictures"]
        assert counts == {"stored": 0, "bytes": 0}
        await asyncio.sleep(0)


# -- salvage ---------------------------------------------------------------------------------------


def test_a_salvaged_journal_has_its_pictures_and_drops_groups_that_lack_one(pool: Pool) -> None:
    for i, digest in enumerate((A, B, C)):
        pool.talk(f"t{i}", digest, prompt_uid=f"p{i}")
    pool.journal.close()
    assert "nothing is damaged" in salvage(pool.folder)[0].text()
    paths = {data: pool.folder / "pictures" / key for key, data in stored(pool.folder).items()}
    paths[png(A)].unlink()
    paths[png(B)].write_bytes(b"x" + paths[png(B)].read_bytes()[1:])
    (report,) = salvage(pool.folder)
    assert report.dropped == {"train": ["p0", "p1"]}
    assert "2 pictures cannot be read" in report.text()
    assert pool.pictures() == [png(C)]
    assert "nothing is damaged" in salvage(pool.folder)[0].text()
    again = Pool(pool.folder, default=ChannelConfig(n_rollouts=1))
    assert again("read_pictures", "t2", (C,)) == source(C)
    again.talk("u", A, B, prompt_uid="q")
    assert len(stored(pool.folder)) == 3
    again.journal.close()


def test_the_pictures_of_a_damaged_journal_go_with_what_is_saved_of_it(pool: Pool) -> None:
    pool.talk("t0", A, prompt_uid="p0")
    pool.talk("t1", B, prompt_uid="p1")
    pool.journal.close()
    segment = newest_segment(pool.folder)
    segment.write_bytes(segment.read_bytes()[:-200])
    (report,) = salvage(pool.folder)
    assert report.damage
    again = Pool(pool.folder, default=ChannelConfig(n_rollouts=1))
    live = again.pool.list_trajectories(now=again.now).items
    for row in live:
        digest = A if row.trajectory_uid == "t0" else B
        assert again("read_pictures", row.trajectory_uid, (digest,)) == source(digest)
    assert live
    again.journal.close()


# -- the service -----------------------------------------------------------------------------------


async def test_a_service_removes_in_slices_what_nothing_refers_to(tmp_path: Path) -> None:
    digests = [name(i) for i in range(2 * SWEPT_AT_ONCE + 10)]
    config = PoolConfig(default=ChannelConfig(n_rollouts=1), durability="power")
    async with DataPoolClient.local(config, tmp_path / "pool") as client:
        for uid, own in (("t", digests[:-1]), ("u", digests[-1:])):
            prompt = [PAD] * len(own)
            pictures = tuple(Picture(digest, 28, 28, i, 1) for i, digest in enumerate(own))
            step = step_of(uid, uid, prompt_ids=prompt, pictures=pictures)
            await client.submit_step(step, pictures=source(*own))
        assert len(stored(tmp_path / "pool")) == len(digests)
        await client.delete_trajectory("t")
        left = stored(tmp_path / "pool")
        assert len(left) == len(digests) - SWEPT_AT_ONCE, "others do not wait for all of them"
        await until(lambda: len(stored(tmp_path / "pool")) == 1)
    async with DataPoolClient.local(config, tmp_path / "pool") as client:
        assert await client.read_pictures("u", digests[-1:]) == source(digests[-1])


async def test_a_picture_that_cannot_be_removed_holds_up_no_other_and_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    retry_s = 0.2
    monkeypatch.setattr("stepwell.datapool.remote.service.SWEEP_RETRY_S", retry_s)
    pictures = tmp_path / "pool" / "pictures"

    def left() -> list[Path]:
        return [path for path in pictures.iterdir() if path.name != "secret"]

    config = PoolConfig(default=ChannelConfig(n_rollouts=1))
    async with DataPoolClient.local(config, tmp_path / "pool") as client:
        await client.submit_steps(conversation("t", A, B, C), pictures=source(A, B, C))
        broken = left()[0]
        broken.unlink()
        broken.mkdir()  # a folder cannot be unlinked
        began = time.monotonic()
        await client.delete_trajectory("t")
        for i in range(50):
            await client.open_group(f"q{i}", 1)
        tries = 1 + (time.monotonic() - began) / retry_s  # not one with each commit
        assert 1 <= caplog.text.count("stays on disk") <= tries
        await until(lambda: left() == [broken])
        broken.rmdir()
        broken.write_bytes(b"")
        await until(lambda: not left())
