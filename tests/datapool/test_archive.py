"""The archive: what left a pool, in files and in a catalogue."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest

from stepwell.datapool import ChannelConfig
from stepwell.datapool.config import ArchiveConfig, PoolConfig
from stepwell.datapool.errors import DamagedFileError, DataPoolError, InvalidRequestError
from stepwell.datapool.files.archive import archiver, catalogue, parquet
from stepwell.datapool.files.archive import reader as reader_module
from stepwell.datapool.files.archive.archiver import Archive, archive_stopped, archive_waiting
from stepwell.datapool.files.archive.catalogue import Catalogue, match_of
from stepwell.datapool.files.archive.folder import ArchiveFolder
from stepwell.datapool.files.archive.launch import Settings
from stepwell.datapool.files.archive.lookup import locate, why_closed
from stepwell.datapool.files.archive.reader import (
    ArchiveReader,
    fate,
    parse,
    prompt_cursor,
    waiting,
)
from stepwell.datapool.files.archive.unarchived import begun
from stepwell.datapool.files.deletion import delete_from_journals
from stepwell.datapool.files.export import write
from stepwell.datapool.files.transfer import import_channel
from stepwell.datapool.ops import Delete, Mark, OpenGroup, OpenTrajectory, ReleaseDeparted
from stepwell.datapool.questions import ListDeparted, ReadDeparted
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.remote.stopped import stopped_pool
from stepwell.datapool.store.salvage import salvage
from stepwell.datapool.types import Step
from tests.builders import step_of
from tests.datapool.conftest import JournaledPool, newest_segment


class Caller:
    """A pool of this process, as the archiver calls it."""

    def __init__(self, pool: JournaledPool) -> None:
        self.pool = pool
        self.lost = False

    async def call(self, op, timeout_s=0.0):
        if self.lost and isinstance(op, ReleaseDeparted):
            raise ConnectionError("killed before the pool heard of it")
        return self.pool("apply", op)


class Archived:
    """A pool with an archive, archived when a test says so."""

    def __init__(self, path: Path, **config) -> None:
        self.path = path
        config.setdefault("archive", ArchiveConfig(dir=path / "archive"))
        self.pool = JournaledPool(path / "pool", default=ChannelConfig(n_rollouts=1), **config)
        self.caller = Caller(self.pool)
        self.reader = ArchiveReader(path / "archive")
        self.settings = Settings.of(
            self.pool.pool.config, path / "pool", self.pool.journal.identity, 0
        )
        self._index: dict[str, int] = {}

    def archive(self) -> int:
        archive = Archive(self.settings)
        try:
            return asyncio.run(archive_waiting(archive, self.caller))
        finally:
            archive.close()

    def with_archive(self, do):
        archive = Archive(self.settings)
        try:
            return do(archive)
        finally:
            archive.close()

    def turn(self, uid, asked, reply, prompt_uid=None, version=3, **fields):
        index = self._index.get(uid, 0)
        self._index[uid] = index + 1
        messages = [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": reply},
        ]
        step = Step(
            prompt_ids=[*range(10 + 5 * index)],
            response_ids=[7, 8, 9],
            rollout_log_probs=[-0.1, -0.2, -0.3],
            trajectory_uid=uid,
            prompt_uid=prompt_uid or f"p-{uid}",
            step_index=index,
            policy_version=version,
            finish_reason="stop",
            metadata={"messages": messages, "timing": {"ttft_s": 0.1}},
            **fields,
        )
        self.pool("submit_step", step)
        return step

    def train(self, uid, asked="What is 2+2?", reply="It is 4.", reward=1.0, **fields):
        step = self.turn(uid, asked, reply, **fields)
        self.pool("complete_trajectory", uid, reward)
        self.pool("ack", self.pool("lease_batch", 1).lease_id)
        return step

    def files(self):
        return sorted((self.path / "archive" / "trajectories").iterdir())

    def bytes_of_everything(self):
        self.pool.erase()
        folders = (self.path / "archive", self.path / "pool")
        return b"".join(
            p.read_bytes() for folder in folders for p in folder.rglob("*") if p.is_file()
        )


@pytest.fixture
def run(tmp_path):
    run = Archived(tmp_path)
    yield run
    run.pool.journal.close()


# -- what is archived ------------------------------------------------------------------------------


def test_a_trained_trajectory_comes_back_exactly(run):
    run.pool("apply", OpenGroup("p", 1, metadata={"data_source": "gsm8k", "instance_id": "7"}))
    run.pool("apply", OpenTrajectory("t", "p", 2, {"user": "ada"}))
    steps = [run.turn("t", "Hello?", "Hi.", "p", reward=0.25), run.turn("t", "2+2?", "4", "p")]
    run.pool("apply", Mark(trajectory_uid="t", marks={"tags": ["good"], "note": "well done"}))
    run.pool("complete_trajectory", "t", 1.0)
    run.pool("ack", run.pool("lease_batch", 1).lease_id)
    assert run.archive() == 1
    found = run.reader.read("t")
    assert [s.step_index for s in found.trajectory.steps] == [0, 1]
    for step, archived in zip(steps, found.trajectory.steps, strict=True):
        assert np.array_equal(step.prompt_ids, archived.prompt_ids)
        assert np.array_equal(step.response_ids, archived.response_ids)
        assert np.array_equal(step.rollout_log_probs, archived.rollout_log_probs)
        assert step.metadata == archived.metadata
        assert step.policy_version == archived.policy_version
    assert (found.state, found.trajectory.attempt) == ("complete", 2)
    assert [s.reward for s in found.trajectory.steps] == [0.25, 1.0], "as a consumer got them"
    assert (found.outcome, found.trajectory.steps[-1].is_last) == (None, True)
    assert found.trajectory.metadata == {"user": "ada"}
    assert found.marks["note"] == "well done"
    (row,) = run.reader.find("t")
    assert (row["left"], row["reward"], row["turns"], row["data_source"]) == (
        "acked",
        1.25,
        2,
        "gsm8k",
    )
    assert (row["first"], row["last"]) == ("Hello?", "4")


@pytest.mark.parametrize("reward", [None, 0.25])
def test_a_complete_trajectory_without_an_outcome_ends_with_its_last_step(run, reward):
    run.turn("t", "Hello?", "Hi.", reward=reward)
    run.train("t", "2+2?", "4", reward=None)
    run.archive()
    steps = run.reader.read("t").trajectory.steps
    assert [(s.reward, s.is_last) for s in steps] == [(reward, False), (None, True)]


def test_a_dropped_group_is_found_with_its_reason_and_its_text(run):
    run.turn("t", "Why?", "Because.")
    run.pool("drop_group", "p-t", "zero_variance")
    run.archive()
    (row,) = run.reader.find("t")
    assert (row["left"], row["drop_reason"], row["state"]) == (
        "dropped",
        "zero_variance",
        "aborted",
    )
    assert run.reader.read("t").trajectory.steps[0].metadata["messages"][1]["content"] == "Because."


def test_an_aborted_attempt_is_archived_with_the_steps_that_nobody_is_served(run):
    run.turn("a", "first try", "failed", "p")
    run.pool("abort_trajectory", "a", "timeout", True)
    run.train("b", "second try", "worked", prompt_uid="p")
    run.archive()
    (row,) = run.reader.find("a")
    assert (row["state"], row["reason"], row["left"]) == ("aborted", "timeout", "acked")
    assert row["last"] == "failed"
    assert len(run.reader.find("p")) == 2, "the group's uid opens the group"


def test_what_came_late_is_found_with_its_trajectory(run):
    run.train("t")
    run.turn("t", "And 3+3?", "It is 6.")
    assert run.pool("set_reward", "t", 0.5) == "late"
    run.archive()
    assert [row["state"] for row in run.reader.find("t")] == ["complete", "late"]
    steps = run.reader.read("t").trajectory.steps
    assert [s.metadata["messages"][1]["content"] for s in steps] == ["It is 4.", "It is 6."]
    (late,) = run.reader.feedback("t")
    assert (late["reward"], late["why"]) == (0.5, "its group was trained")


def test_each_late_step_of_one_index_is_read_and_one_that_was_sent_again_once(run):
    first = run.train("t")
    for index, asked in ((1, "one"), (1, "two"), (2, "three"), (1, "two")):
        run._index["t"] = index
        run.turn("t", asked, "ok")
    run.pool("submit_step", first)
    run.archive()
    steps = run.reader.read("t").trajectory.steps
    said = [(s.step_index, s.metadata["messages"][0]["content"]) for s in steps]
    assert said == [(0, "What is 2+2?"), (1, "one"), (2, "three"), (3, "two")]
    assert [s.reward for s in steps] == [1.0, None, None, None]


async def test_what_is_written_of_the_archive_is_imported_with_its_rewards(tmp_path):
    run = Archived(tmp_path)
    run.train("t", reward=0.25)
    run.turn("u", "2+2?", "4", reward=0.5)
    run.train("u", "And 3+3?", "It is 6.", reward=1.0)
    run.train("late")
    run.turn("late", "And 4+4?", "It is 8.")
    await asyncio.to_thread(run.archive)
    write(tmp_path / "x.parquet", run.reader.read_all())
    async with DataPoolClient.local() as pool:
        done = await import_channel(pool, tmp_path / "x.parquet", "again")
        rows = (await pool.list_trajectories("again")).items
    assert (done.n_trajectories, done.n_steps) == (3, 5)
    assert {row.trajectory_uid: row.reward for row in rows} == {"t": 0.25, "u": 1.5, "late": 1.0}
    run.pool.journal.close()


@pytest.mark.parametrize("order", ["reward", "uid"])
async def test_what_is_written_in_any_order_is_imported_and_served_in_whole_groups(tmp_path, order):
    run = Archived(tmp_path)
    for k in range(3):
        uids = [f"{j}-{k}" for j in range(3)]
        run.pool("apply", OpenGroup(f"g{k}", 3))
        for uid in uids:
            run.turn(uid, "ask", "ok", f"g{k}")
        for uid in uids:
            run.pool("complete_trajectory", uid, float(uid[0]))
        run.pool("ack", run.pool("lease_batch", 1).lease_id)
    await asyncio.to_thread(run.archive)
    every = [*run.reader.read_all(order=order)]
    path = tmp_path / "x.parquet"
    write(path, [*every, every[0]])  # as of two files in one
    narrow = PoolConfig(default=ChannelConfig(max_outstanding_groups=1))
    async with DataPoolClient.local(narrow) as pool:
        importing = asyncio.create_task(import_channel(pool, path, "again"))
        served = {}
        while len(served) < 3:
            lease = await pool.lease_batch(channel="again", timeout_s=10)
            (group,) = lease.groups
            served[group.prompt_uid] = {t.trajectory_uid for t in group.trajectories}
            await pool.ack(lease.lease_id)
        assert (await importing).n_groups == 3
    assert served == {f"g{k}": {f"{j}-{k}" for j in range(3)} for k in range(3)}
    run.pool.journal.close()


def test_the_beginning_of_a_uid_finds_it(run):
    run.train("conversation-1234")
    run.archive()
    assert [row["uid"] for row in run.reader.find("conversation-12")] == ["conversation-1234"]
    assert run.reader.find("unknown") == []


def test_the_beginning_of_a_deleted_uid_says_so_and_the_whole_one_first(run):
    for uid in ("conversation-12", "conversation-1"):
        run.train(uid)
    run.archive()
    run.reader.delete("trajectory", "conversation-1")
    run.reader.delete("trajectory", "conversation-12")
    assert run.reader.was_deleted("conv").value == "conversation-12"
    assert run.reader.was_deleted("conversation-1").value == "conversation-1"
    assert run.reader.was_deleted("talk") is None


async def test_what_is_live_or_waits_is_listed_by_the_beginning_of_its_uid(tmp_path):
    config = PoolConfig(archive=ArchiveConfig(dir=tmp_path / "archive"))
    async with DataPoolClient.local(config, tmp_path / "pool") as pool:
        said = {"messages": [{"role": "user", "content": "hi"}]}
        for uid in ("live-1", "gone-1", "gone-2"):
            step = step_of(uid, f"group-of-{uid[:4]}", prompt_ids=[1], metadata=said)
            await pool.submit_step(step)
        await pool.drop_group("group-of-gone", "too long")
        (row,) = await begun(pool, "li")
        assert (row["uid"], row["left"], row["first"], row["turns"]) == ("live-1", "live", "hi", 1)
        left = await begun(pool, "gone")
        assert [row["uid"] for row in left] == ["gone-1", "gone-2"]
        assert {row["drop_reason"] for row in left} == {"too long"}
        assert [row["uid"] for row in await begun(pool, "gone-2")] == ["gone-2"]
        assert [row["uid"] for row in await begun(pool, "group-of-g")] == ["gone-1", "gone-2"]
        assert await begun(pool, "nobody") == []
        assert await begun(pool, "") == []


async def test_a_uid_is_found_live_then_archived_then_waiting_then_aborted(tmp_path):
    config = PoolConfig(archive=ArchiveConfig(dir=tmp_path / "archive"))
    async with DataPoolClient.local(config, tmp_path / "pool") as pool:
        for uid, group in (("live", "p"), ("aborted", "p"), ("waits", "q")):
            await pool.submit_step(step_of(uid, group, prompt_ids=[1]))
        await pool.abort_trajectory("aborted", "timeout")
        await pool.drop_group("q", "too long")

        async def found(uid, archive=tmp_path / "archive"):
            return await locate(uid, pool, ["train", "val"], archive)

        live = await found("live")
        assert (live.channel, live.is_live, live.row) == ("train", True, None)
        assert (await found("live", None)).is_live
        waits = await found("waits")
        assert (waits.channel, waits.is_live, waits.row["drop_reason"]) == (None, False, "too long")
        assert waits.row["feedback"] == []
        aborted = await found("aborted")  # with its steps, which are in the journal alone
        assert (aborted.exported.reason, len(aborted.exported.trajectory.steps)) == ("timeout", 1)
        assert await found("nobody") is None
        assert await why_closed("nobody", pool, ["train", "val"]) is None
        assert "dropped" in await why_closed("waits", pool, ["val", "train"])

    async with DataPoolClient.local(PoolConfig(durability="none")) as pool:
        await pool.submit_step(step_of("aborted", "p", prompt_ids=[1]))
        await pool.submit_step(step_of("live", "p", prompt_ids=[1]))
        await pool.abort_trajectory("aborted", "timeout")
        bare = await locate("aborted", pool, ["train"], None)
        assert (bare.channel, bare.is_live, bare.row) == ("train", False, None)
        assert list(bare.exported.trajectory.steps) == []


def test_what_is_archived_is_found_there_with_feedback_that_came_late(run):
    run.train("t")
    assert run.pool("set_reward", "t", 0.5) == "late"
    run.archive()

    async def found_by_another_pool():  # which knows nothing of it
        async with DataPoolClient.local(PoolConfig(durability="none")) as other:
            return await locate("t", other, ["train"], run.path / "archive")

    found = asyncio.run(found_by_another_pool())
    assert (found.row["left"], found.channel, found.is_live) == ("acked", None, False)
    assert [late["reward"] for late in found.row["feedback"]] == [0.5]
    assert found.exported.trajectory.steps[0].response_ids.tolist() == [7, 8, 9]


# -- a crash ---------------------------------------------------------------------------------------


class Killed(BaseException):
    """The end of a process, at any point."""


def killed_at_trajectories(monkeypatch, do) -> None:
    """Do what writes feedback, then trajectories, and is killed in between."""
    write = ArchiveFolder.write

    def dies(folder, kind, *what):
        if kind == "trajectories":
            raise Killed
        write(folder, kind, *what)

    with monkeypatch.context() as patch:
        patch.setattr(ArchiveFolder, "write", dies)
        with pytest.raises(Killed):
            do()


def test_an_archiver_that_dies_before_the_pool_knows_writes_the_same_again(run):
    run.train("t")
    run.caller.lost = True
    with pytest.raises(ConnectionError):
        run.archive()
    names = [path.name for path in run.files()]
    run.train("u")
    run.caller.lost = False
    assert run.archive() == 2
    assert run.archive() == 0
    assert [p.name for p in run.files()][:1] == names
    assert {row["uid"] for row in run.reader.rows().items} == {"t", "u"}
    assert run.reader.counts()["trajectories"] == 2


def test_an_archiver_that_dies_between_two_files_writes_both_again(run, monkeypatch):
    run.train("t", reward=1.0)
    run.pool("set_reward", "t", 0.5)
    killed_at_trajectories(monkeypatch, run.archive)
    run.archive()
    assert run.reader.find("t")[0]["last"] == "It is 4."
    assert [row["reward"] for row in run.reader.feedback("t")] == [0.5]


def test_half_of_what_an_archiver_wrote_goes_when_the_pool_deletes_a_part_of_it(run, monkeypatch):
    run.pool("apply", OpenTrajectory("s", "p-s", 0, {"user": "eve"}))
    for uid in ("s", "t"):
        run.train(uid)
        run.pool("set_reward", uid, 0.5)
    killed_at_trajectories(monkeypatch, run.archive)
    run.pool("apply", Delete(user="eve"))
    run.reader.delete("user", "eve", at=run.pool.now)
    run.archive()
    for _ in range(2):
        assert run.reader.feedback("s") == []
        assert [row["reward"] for row in run.reader.feedback("t")] == [0.5]
        archiver.open_sound(run.settings).close()


def test_what_an_archiver_wrote_before_the_disk_was_full_is_not_taken_for_the_rest(
    run, monkeypatch
):
    """It goes on, and the next file may be a shorter one."""
    for uid in ("t", "u"):
        run.train(uid)
        run.pool("set_reward", uid, 0.5)
    killed_at_trajectories(monkeypatch, run.archive)
    monkeypatch.setattr(archiver, "TURN_BYTES", 1)
    run.with_archive(lambda a: asyncio.run(archive_waiting(a, run.caller, max_bytes=1)))
    while run.archive():
        pass
    archiver.open_sound(run.settings).close()
    assert [len(run.reader.feedback(uid)) for uid in ("t", "u")] == [1, 1]


def test_a_group_that_nobody_can_read_holds_nothing_up(run, monkeypatch, caplog):
    run.train("t")
    run.train("bad")
    run.train("u")
    read = archiver.conversations

    def damaged(channel, rows):
        if any(b"bad" in row.head for row in rows):
            raise LookupError("no such prompt")
        return read(channel, rows)

    monkeypatch.setattr(archiver, "conversations", damaged)
    while run.archive():
        pass
    assert {row["uid"] for row in run.reader.rows().items} == {"t", "u"}
    assert run.pool.pool.backlog["waiting"] == 0
    assert run.pool.pool.backlog["unarchived"] == 1
    assert "no such prompt" in caplog.text


def test_a_group_that_no_file_can_hold_holds_nothing_up(run, caplog):
    run.train("t")
    run.pool("apply", OpenTrajectory("bad", "p-bad", 2**31))
    run.train("bad")
    run.train("u")
    run.pool("set_reward", "u", 0.5)
    run.pool("set_reward", "u", 0.25, 2**31)
    while run.archive():
        pass
    assert {row["uid"] for row in run.reader.rows().items} == {"t", "u"}
    assert [row["reward"] for row in run.reader.feedback("u")] == [0.5]
    assert run.pool.pool.backlog["waiting"] == 0
    assert run.pool.pool.backlog["unarchived"] == 2
    assert "no file can hold it" in caplog.text


def test_rewards_that_no_file_can_hold_hold_nothing_up_after_a_restart_either(run):
    run.train("t")
    run.archive()
    run.pool("set_reward", "t", 0.5, 2**31)
    run.pool("set_reward", "t", 0.25)
    config = run.pool.pool.config
    run.caller.pool = run.pool = run.pool.restart(default=config.default, archive=config.archive)
    while run.archive():
        pass
    assert [row["reward"] for row in run.reader.feedback("t")] == [0.25]
    assert run.pool.pool.backlog["waiting"] == run.pool.pool.backlog["waiting_bytes"] == 0


def test_a_run_that_starts_over_lists_what_its_own_trajectory_was(tmp_path):
    """An agent that names its trajectories gives the same names again."""
    for k, asked in enumerate(("first", "second")):
        run = Archived(tmp_path / f"{k}", archive=ArchiveConfig(dir=tmp_path / "archive"))
        run.pool.now = 1000.0 * (1 + k)
        run.train("t", asked, reward=float(k))
        run.train(f"only {asked}", "other")
        run.archive()
        run.pool.journal.close()
    reader = ArchiveReader(tmp_path / "archive")
    for _ in range(2):
        (row,) = reader.find("t")
        assert (row["first"], row["reward"], row["time"]) == ("second", 1.0, 2000.0)
        assert reader.read("t").trajectory.reward == 1.0
        assert reader.rows(search="first").items == []
        assert len(reader.rows(search="second").items) == 1
        assert {each["tries"] for each in reader.prompts()} == {1, 2}
        reader.folder.remove_catalogue(0)  # it is made of the same files, in any order
        assert reader.check() == []


@pytest.mark.parametrize("files", [1, 2], ids=["at once", "merged"])
def test_of_a_uid_that_a_pool_has_forgotten_and_served_again_the_last_is_listed(
    tmp_path, monkeypatch, files
):
    monkeypatch.setattr(archiver, "MERGED", 2)
    run = Archived(tmp_path, remembered_uids=1)
    for asked in ("first", "second"):
        run.train("t", asked)
        run.train(f"only {asked}")
        run.train(f"and {asked}")
        run._index.clear()
        run.pool.now += 10
        if asked == "second" or files == 2:
            run.archive()
    run.with_archive(lambda archive: archive.merge())
    assert len(run.files()) == 1
    for _ in range(2):
        (row,) = run.reader.find("t")
        assert row["first"] == "second"
        assert run.reader.read("t").trajectory.steps[0].metadata["messages"][0]["content"] == (
            "second"
        )
        assert run.reader.rows(search="first").items == []
        run.reader.folder.remove_catalogue(0)
        assert run.reader.check() == []
    run.pool.journal.close()


@pytest.mark.parametrize("late", [False, True])
def test_trajectories_of_one_uid_in_two_channels_are_two(run, late):
    told = {"train": 1.0, "val": 0.0}
    for channel, reward in told.items():
        run.pool.now += 100.0
        for index, reply in enumerate(("first", "second")[: 1 + (channel == "train")]):
            metadata = {"messages": [{"role": "assistant", "content": f"{reply} of {channel}"}]}
            step = step_of("t", "p", index, metadata=metadata)
            run.pool("submit_step", step, channel)
        run.pool("complete_trajectory", "t", reward, channel=channel)
        run.pool("ack", run.pool("lease_batch", 1, channel).lease_id)
    if late:
        metadata = {"messages": [{"role": "assistant", "content": "late of val"}]}
        run.pool("submit_step", step_of("t", "p", 1, metadata=metadata), "val")
    run.archive()

    def said(exported):
        steps = exported.trajectory.steps
        return [step.metadata["messages"][-1]["content"] for step in steps]

    found = run.reader.read("t")
    assert (found.channel, found.trajectory.reward) == ("val", 0.0), "the one that left last"
    assert said(found) == ["first of val", *["late of val"] * late]
    every = {each.channel: each for each in run.reader.read_all()}
    assert said(every["train"]) == ["first of train", "second of train"]
    assert said(every["val"]) == said(found)
    assert {name: each.trajectory.reward for name, each in every.items()} == told


@pytest.mark.parametrize("late", [False, True])
def test_tries_of_one_uid_are_not_mixed(tmp_path, late):
    """An agent that names its trajectories gives the same names again in a run that starts over."""
    for k in range(2):
        run = Archived(tmp_path / f"{k}", archive=ArchiveConfig(dir=tmp_path / "archive"))
        run.pool.now = 1000.0 * (1 + k)
        run.pool("apply", OpenTrajectory("t", "p-t", 1 - k))
        for _ in range(2 - k):
            run.turn("t", "Hello?", f"in run {k}")
        run.train("t", "Bye?", f"in run {k}", reward=float(k))
        if late:
            run.turn("t", "Late?", f"late in run {k}")
        run.archive()
        run.pool.journal.close()
    reader = ArchiveReader(tmp_path / "archive")
    for each in reader.read_all():
        (k,) = {1 - each.trajectory.attempt}
        replies = [s.metadata["messages"][-1]["content"] for s in each.trajectory.steps]
        assert replies[: 3 - k] == [f"in run {k}"] * (3 - k)
    assert [e.trajectory.attempt for e in reader.read_all()] == [0, 1]
    assert reader.read("t").trajectory.attempt == 1


ODD = {
    "__stepwell__": "bytes",
    "value": "no base64",
    "more": [{"__stepwell__": "ndarray"}, {0: "zero", 1: {2: "two"}}],
}


def test_metadata_of_any_keys_comes_back_exactly(run):
    run.pool("apply", OpenGroup("p-t", 1, metadata=ODD))
    run.pool("apply", OpenTrajectory("t", "p-t", 0, ODD | {"user": "ada"}))
    said = [{"role": "user", "content": "Hello?", **ODD}]
    step = step_of("t", "p-t", metadata={"messages": said, **ODD})
    run.pool("submit_step", step)
    run.pool("complete_trajectory", "t", 1.0)
    run.pool("ack", run.pool("lease_batch", 1).lease_id)
    run.archive()
    found = run.reader.read("t")
    assert found.trajectory.metadata == ODD | {"user": "ada"}
    assert found.group_metadata == ODD
    assert found.trajectory.steps[0].metadata == step.metadata
    assert [row["uid"] for row in run.reader.rows(search="Hello").items] == ["t"]


@pytest.mark.parametrize("said", [None, [], "no list", {"of": None}])
def test_messages_that_are_none_come_back_as_they_were(run, said):
    step = step_of("t", "p-t", metadata={"messages": said, "other": None})
    run.pool("submit_step", step)
    run.pool("complete_trajectory", "t", 1.0)
    run.pool("ack", run.pool("lease_batch", 1).lease_id)
    run.archive()
    assert run.reader.read("t").trajectory.steps[0].metadata == step.metadata


def test_the_pool_is_asked_for_a_little_at_a_time(run, monkeypatch):
    """A long call to the pool is one in which nobody else is answered."""
    monkeypatch.setattr(archiver, "TURN_BYTES", 1000)
    for i in range(12):
        run.train(f"t{i}", asked="word " * 100)
    asked, waiting = [], [len(run.pool.pool.departures)]
    call = run.caller.call

    async def counting(op, timeout_s=0.0):
        answer = await call(op)
        if isinstance(op, ListDeparted):
            asked.append(len(answer.items))
        waiting.append(len(run.pool.pool.departures))
        return answer

    run.caller.call = counting
    assert run.archive() == 12
    assert max(asked) <= 3
    assert max(before - after for before, after in pairwise(waiting)) <= 3
    assert len(run.files()) == 1
    assert len(run.reader.rows().items) == 12


def test_deletion_from_a_stopped_pool_leaves_what_else_waits_for_the_archive(run):
    run.train("t", "kept")
    run.train("s", SECRET)
    run.pool.journal.close()
    assert delete_from_journals(run.path / "pool", Delete("s")).trajectories == ("s",)
    stopped = stopped_pool(run.path / "pool", run.pool.pool.config)
    asyncio.run(archive_stopped(stopped, run.pool.pool.config))
    assert [row["uid"] for row in run.reader.rows().items] == ["t"]


def test_a_file_that_the_catalogue_does_not_know_is_added_to_it(run, monkeypatch):
    run.train("t")
    monkeypatch.setattr(Archive, "_add", lambda *_: (_ for _ in ()).throw(OSError("killed")))
    with pytest.raises(OSError, match="killed"):
        run.archive()
    monkeypatch.undo()
    assert run.reader.find("t") == []
    assert run.with_archive(lambda archive: archive.reconcile()) == []
    assert run.reader.find("t")[0]["reward"] == 1.0


def test_the_catalogue_is_made_again_of_the_files(run):
    for i in range(3):
        run.train(f"t{i}")
        run.archive()
    before = run.reader.rows().items
    (run.path / "archive" / "catalogue-0.sqlite").write_bytes(b"damaged" * 1000)
    (told,) = run.reader.check()
    assert "made anew" in told
    assert [r["uid"] for r in run.reader.rows().items] == [r["uid"] for r in before]
    assert run.reader.check() == []


def test_an_archiver_makes_a_damaged_catalogue_anew(run):
    run.train("t")
    run.archive()
    run.reader.folder.catalogue(0).write_bytes(b"no database, " * 1000)
    with pytest.raises(DamagedFileError, match="stepwell archive check"):
        run.reader.rows()
    archiver.open_sound(run.settings).close()
    assert [row["uid"] for row in run.reader.rows().items] == ["t"]


def test_a_damaged_file_is_named_by_check(run):
    run.train("t")
    run.archive()
    (path,) = run.files()
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    (told,) = run.reader.check()
    assert str(path) in told
    with pytest.raises(DamagedFileError):
        run.reader.read("t")


def test_small_files_are_merged_and_nothing_is_lost(run, monkeypatch):
    monkeypatch.setattr(archiver, "MERGED", 4)
    for i in range(6):
        run.train(f"t{i}", reward=i / 10)
        run.pool("set_reward", f"t{i}", 0.0)
        run.archive()
    run.with_archive(lambda archive: archive.merge())
    assert len(run.files()) == 1
    assert [row["uid"] for row in run.reader.rows().items] == [f"t{i}" for i in range(5, -1, -1)]
    rewards = [run.reader.read(f"t{i}").trajectory.reward for i in range(6)]
    assert rewards == [i / 10 for i in range(6)]
    assert run.reader.check() == []
    run.train("last")
    assert run.archive() == 1


# -- bounds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("killed_in", ["add", "replace_file"])
@pytest.mark.parametrize("starts_again", [True, False])
def test_a_merge_that_was_killed_leaves_no_row_twice(run, monkeypatch, killed_in, starts_again):
    monkeypatch.setattr(archiver, "MERGED", 3)
    for i in range(6):
        run.train(f"t{i}")
        run.pool("set_reward", f"t{i}", 0.5)
        run.archive()
    with monkeypatch.context() as patch:
        patch.setattr(Catalogue, killed_in, lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run.with_archive(lambda archive: archive.merge())
    if starts_again:  # else it goes on after an error of the disk
        run.with_archive(lambda archive: archive.reconcile())
    run.with_archive(lambda archive: archive.merge())
    archived = [uid for path in run.files() for uid in rows_in(path)]
    assert sorted(archived) == [f"t{i}" for i in range(6)]
    feedback = (run.path / "archive" / "feedback").iterdir()
    assert sorted(uid for path in feedback for uid in rows_in(path)) == sorted(archived)
    assert run.reader.read("t0").trajectory.reward == 1.0
    assert len(run.reader.feedback("t0")) == 1
    assert run.reader.check() == []


@pytest.mark.parametrize("cut", ["killed", "no space"])
def test_feedback_survives_a_merge_that_was_cut_short(run, monkeypatch, cut):
    monkeypatch.setattr(archiver, "MERGED", 3)
    for i in range(3):
        run.train(f"t{i}")
        run.pool("set_reward", f"t{i}", 0.5)
        run.archive()

    def merge():
        run.with_archive(lambda archive: archive.merge())

    if cut == "killed":
        killed_at_trajectories(monkeypatch, merge)
    else:
        with monkeypatch.context() as patch:
            free = run.files()[0].stat().st_size  # enough for the feedback alone
            patch.setattr(ArchiveFolder, "has_space", lambda _, n_bytes: n_bytes < free)
            merge()
    archiver.open_sound(run.settings).close()
    run.train("t3")
    run.pool("set_reward", "t3", 0.5)
    run.archive()
    merge()
    archiver.open_sound(run.settings).close()
    assert len(run.files()) == 1
    assert [len(run.reader.feedback(f"t{i}")) for i in range(4)] == [1] * 4
    assert run.reader.check() == []


def test_rewards_that_come_late_alone_outlive_a_merge_that_was_cut_short(run, monkeypatch):
    monkeypatch.setattr(archiver, "MERGED", 3)
    run.pool.now = time.time()
    run.train("t")
    run.archive()
    for _ in range(3):
        run.pool("set_reward", "t", 0.5)
        run.archive()
    killed_at_trajectories(monkeypatch, lambda: run.with_archive(lambda a: a.merge()))
    run.with_archive(lambda archive: archive.trim(run.pool.now))
    archiver.open_sound(run.settings).close()
    assert len(run.reader.feedback("t")) == 3


def rows_in(path: Path) -> list[str]:
    """Trajectories of the rows of a file."""
    return parquet.read_table(path, ["trajectory_uid"])[0].to_pylist()


def test_what_is_too_old_goes_with_its_file(tmp_path):
    run = Archived(tmp_path, archive=ArchiveConfig(dir=tmp_path / "archive", keep_days=2))
    run.train("old")
    run.archive()
    run.pool.now += 3 * 86_400
    run.train("new")
    run.archive()
    run.with_archive(lambda archive: archive.trim(run.pool.now))
    assert [row["uid"] for row in run.reader.rows().items] == ["new"]
    assert len(run.files()) == 1
    run.pool.journal.close()


def test_rewards_that_come_late_alone_stay_as_long_as_others_and_are_merged(run, monkeypatch):
    monkeypatch.setattr(archiver, "MERGED", 4)
    run.pool.now = time.time()
    run.train("t")
    run.archive()
    for i in range(8):
        run.pool.now += 10
        run.pool("set_reward", "t", i / 10)
        run.archive()
        assert run.with_archive(lambda archive: archive.trim(run.pool.now)) == []
        run.with_archive(lambda archive: archive.merge())
    assert len(list((run.path / "archive" / "feedback").iterdir())) < 4
    assert [late["reward"] for late in run.reader.feedback("t")] == [i / 10 for i in range(8)]
    run.pool.now += 31 * 86_400
    run.train("new")
    run.archive()
    run.with_archive(lambda archive: archive.trim(run.pool.now))
    assert run.reader.feedback("t") == run.reader.find("t") == []
    assert len(run.files()) == 1


def test_the_oldest_go_beyond_the_bytes(tmp_path):
    run = Archived(tmp_path, archive=ArchiveConfig(dir=tmp_path / "archive", max_gb=1e-6))
    for i in range(3):
        run.train(f"t{i}")
        run.archive()
    run.with_archive(lambda archive: archive.trim(run.pool.now))
    assert [row["uid"] for row in run.reader.rows().items] == ["t2"]
    run.pool.journal.close()


def test_retention_bounds_the_archive_too(tmp_path):
    archive = ArchiveConfig(dir=tmp_path / "archive", keep_days=30)
    run = Archived(tmp_path, archive=archive, retention_days=7)
    assert run.settings.keep_s == 7 * 86_400
    run.pool.journal.close()


def test_on_a_full_disk_the_archive_stops_and_the_pool_goes_on(run, monkeypatch, caplog):
    monkeypatch.setattr(archiver.ArchiveFolder, "has_space", lambda *_: False)
    run.train("t")
    assert run.archive() == 1
    assert run.pool.pool.backlog == {"waiting": 0, "waiting_bytes": 0, "unarchived": 1}
    assert "nearly full" in caplog.text
    run.train("u")
    assert run.pool.groups()["acked"] == 2


# -- deletion --------------------------------------------------------------------------------------


SECRET = "a secret of somebody"


@pytest.mark.parametrize("how", ["trajectory", "user", "tag"])
def test_what_is_deleted_is_in_no_file_and_on_no_page(run, how):
    for i in range(20):
        run.train(f"t{i}", f"common text {i}")
    run.pool("apply", OpenTrajectory("s", "p-s", 0, {"user": "eve"}))
    run.turn("s", f"Keep {SECRET}", "I do.")
    run.pool("apply", Mark(trajectory_uid="s", marks={"tags": ["private"]}))
    run.pool("complete_trajectory", "s", 1.0)
    run.pool("ack", run.pool("lease_batch", 1).lease_id)
    run.archive()
    run.train("t20", "common text 20")
    run.archive()
    assert run.reader.rows(search="secret somebody").items
    value = {"trajectory": "s", "user": "eve", "tag": "private"}[how]
    run.pool.now = 4e9  # the wall clock's: what was opened before a deletion is meant
    assert run.reader.delete(how, value) == ["s"]
    everything = run.bytes_of_everything()
    assert b"secret" not in everything
    assert run.reader.rows(search="secret").items == []
    assert run.reader.find("s") == []
    assert run.reader.was_deleted("s")
    assert run.reader.find("t7")[0]["first"] == "common text 7"
    assert run.reader.check() == []


def private(run, uid="s", user="eve", **fields):
    run.pool("apply", OpenTrajectory(uid, fields.get("prompt_uid", f"p-{uid}"), 0, {"user": user}))
    run.turn(uid, f"Keep {SECRET}", "I do.", **fields)
    run.pool("complete_trajectory", uid, 1.0)


@pytest.mark.parametrize("how", ["trajectory", "user", "tag"])
def test_what_is_deleted_is_shown_to_nobody_while_files_are_written_anew(run, how, monkeypatch):
    run.train("t", "common")
    private(run)
    run.pool("apply", Mark(trajectory_uid="s", marks={"tags": ["private"]}))
    run.pool("ack", run.pool("lease_batch", 1).lease_id)
    run.archive()
    run.pool.now = 4e9
    value = {"trajectory": "s", "user": "eve", "tag": "private"}[how]
    locked, looked = ArchiveFolder.locked, []

    def look(folder, shard):
        assert run.reader.find("s") == run.reader.find("p-s") == []
        assert run.reader.read("s") is None
        assert run.reader.rows(search="secret").items == []
        assert [row["uid"] for row in run.reader.rows().items] == ["t"]
        assert run.reader.first_messages(["p-s", "p-t"]) == {"p-t": "common"}
        looked.append("rows")
        return locked(folder, shard)

    def read(*_):
        assert [row["first"] for row in run.reader.prompts()] == ["common"]
        looked.append("prompts")
        raise KeyboardInterrupt  # before it is in no file

    with monkeypatch.context() as patch:
        patch.setattr(ArchiveFolder, "locked", look)
        patch.setattr(archiver.parquet, "read_table", read)
        with pytest.raises(KeyboardInterrupt):
            run.reader.delete(how, value)
    assert looked == ["rows", "prompts"]
    assert run.reader.rows(search="secret").items == []
    assert run.reader.delete(how, value) == ["s"]
    assert b"secret" not in run.bytes_of_everything()


@pytest.mark.parametrize("how", ["user", "tag"])
@pytest.mark.parametrize("when", ["while its group is live", "once its group is archived"])
def test_a_late_step_goes_with_its_user_and_its_tags(run, how, when):
    """It came for a trajectory that takes none any more, and says itself whose it is."""
    run.pool("apply", OpenGroup("g", 2, metadata={"data_source": "chat"}))
    run.pool("apply", OpenTrajectory("s", "g", 0, {"user": "eve"}))
    run.pool("apply", OpenTrajectory("t", "g", 0, {"user": "bob"}))
    run.turn("s", "Hello.", "Hi.", "g")
    run.pool("apply", Mark(trajectory_uid="s", marks={"tags": ["private"]}))
    run.pool("abort_trajectory", "s", "timeout")
    if when == "once its group is archived":
        run.pool("drop_group", "g", "test")
        run.archive()
    run.turn("s", f"Keep {SECRET}", "I do.", "g")
    run.archive()
    late = [row for row in run.reader.find("s") if row["part"]]
    assert [row["state"] for row in late] == ["late"]
    assert [row["user"] for row in late] == ["eve"]
    assert run.reader.rows(parse("tag == 'private'"), "secret").items
    run.pool.now = 4e9
    run.reader.delete(how, {"user": "eve", "tag": "private"}[how])
    archive = [p.read_bytes() for p in (run.path / "archive").rglob("*") if p.is_file()]
    assert b"secret" not in b"".join(archive)
    assert run.reader.find("s") == []


def test_what_is_known_of_a_late_step_is_no_condition_of_its_deletion(run):
    private(run)
    run.pool("ack", run.pool("lease_batch", 1).lease_id)
    run.archive()
    run.turn("s", f"Again {SECRET}", "I do.")
    with_archive = run.with_archive
    with_archive(lambda archive: archive.catalogue.forget(["s"]))  # as of a file that was too old
    run.archive()
    run.pool.now = 4e9
    run.reader.delete("user", "eve")
    assert b"secret" not in run.bytes_of_everything()


@pytest.mark.parametrize("how", ["user", "tag"])
def test_a_deletion_reaches_what_a_pool_archived_whose_clock_is_ahead(run, how):
    """It does not follow a wall clock that was set back since it was started."""
    run.pool.now = time.time() + 3600.0
    private(run)
    run.pool("apply", Mark(trajectory_uid="s", marks={"tags": ["private"]}))
    run.pool("ack", run.pool("lease_batch", 1).lease_id)
    run.archive()
    assert run.reader.delete(how, {"user": "eve", "tag": "private"}[how]) == ["s"]
    assert run.reader.find("s") == []
    assert b"secret" not in run.bytes_of_everything()


@pytest.mark.parametrize("where", ["live", "waiting", "archived"])
@pytest.mark.parametrize("named", [{"user_id": 42}, {"user": 42}, {"user": "", "user_id": "42"}])
def test_a_user_whose_name_is_a_number_is_deleted_by_it(run, where, named):
    run.pool("apply", OpenTrajectory("s", "p-s", 0, named))
    run.turn("s", f"Keep {SECRET}", "I do.")
    run.pool("complete_trajectory", "s", 1.0)
    if where != "live":
        run.pool("ack", run.pool("lease_batch", 1).lease_id)
    if where == "archived":
        run.archive()
        assert run.reader.find("s")[0]["user"] == "42"
        assert run.reader.delete("user", "42") == ["s"]
    else:
        assert run.pool("apply", Delete(user="42")).trajectories == ("s",)
    assert b"secret" not in run.bytes_of_everything()


@pytest.mark.parametrize("group", ["is live", "waits", "was erased"])
@pytest.mark.parametrize("how", ["trajectory_uid", "user", "tag"])
def test_a_deletion_takes_a_late_step_that_waits(tmp_path, how, group):
    """Also one that came after its group had left, and does not say whose it is."""
    run = Archived(tmp_path, retention_days=1)
    run.pool("apply", OpenGroup("g", 2))
    run.pool("apply", OpenTrajectory("s", "g", 0, {"user": "eve"}))
    run.turn("s", "Hello.", "Hi.", "g")
    run.pool("apply", Mark(trajectory_uid="s", marks={"tags": ["private"]}))
    run.pool("abort_trajectory", "s", "timeout")
    if group == "waits":
        run.pool("drop_group", "g", "test")
    run.turn("s", f"Keep {SECRET}", "I do.", "g")
    if group == "was erased":
        run.pool.later(2)
    run.turn("t", "Hello.", "Hi.", "h")
    run.pool("drop_group", "h", "test")
    named = {"trajectory_uid": "s", "user": "eve", "tag": "private"}[how]
    assert run.pool("apply", Delete(**{how: named})).trajectories == ("s",)
    run.pool.erase()
    assert not run.pool.holds("secret")
    run.archive()
    assert b"secret" not in run.bytes_of_everything()
    assert run.reader.find("t"), "what nobody named is archived"
    run.pool.journal.close()


def test_a_deletion_of_one_trajectory_names_it_once(run):
    run.turn("s", "Hello.", "Hi.", "g")
    run.turn("t", "Hello.", "Hi.", "g")
    run.pool("abort_trajectory", "s", "timeout")
    run.turn("s", f"Keep {SECRET}", "I do.", "g")
    assert run.pool("delete_trajectory", "s").trajectories == ("s",)
    assert b"secret" not in run.bytes_of_everything()


def test_an_aborted_trajectory_keeps_the_prompt_that_it_shares_with_a_deleted_one(run):
    """Nobody is served its steps, and the archive has them; so has it those behind them."""
    run.pool("apply", OpenGroup("g", 3))
    aborted = run.turn("a", "Hello.", "Hi.", "g")
    run.pool("abort_trajectory", "a", "timeout")
    run.turn("s", "Hello.", "Hi.", "g")
    assert run.pool("delete_trajectory", "s").trajectories == ("s",)
    run.pool("drop_group", "g", "test")
    other = run.train("t", "Why?", "Because.")
    assert run.archive() == 2
    for step in (aborted, other):
        (archived,) = run.reader.read(step.trajectory_uid).trajectory.steps
        assert np.array_equal(step.prompt_ids, archived.prompt_ids)
        assert np.array_equal(step.response_ids, archived.response_ids)


def test_a_deletion_that_was_killed_is_done_by_the_next(run, monkeypatch):
    for i in range(5):
        run.train(f"t{i}", f"common text {i}")
    private(run)
    run.pool("ack", run.pool("lease_batch", 1).lease_id)
    run.archive()
    run.pool.now = 4e9

    def dies(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Catalogue, "add", dies)  # the file is written anew, the catalogue is not
    with pytest.raises(KeyboardInterrupt):
        run.reader.delete("user", "eve")
    monkeypatch.undo()
    run.reader.delete("user", "eve")
    assert b"secret" not in run.bytes_of_everything()
    assert run.reader.was_deleted("s")
    for i in range(5):
        assert run.reader.read(f"t{i}").trajectory.trajectory_uid == f"t{i}"


def test_a_deletion_says_that_somebody_reads_what_is_deleted(run, monkeypatch):
    monkeypatch.setattr(catalogue, "CHECKPOINTS", 1)
    run.train("s", SECRET)
    run.archive()
    with closing(sqlite3.connect(run.path / "archive" / "catalogue-0.sqlite")) as reading:
        reading.execute("BEGIN")
        reading.execute("SELECT count(*) FROM trajectories").fetchall()
        with pytest.raises(DataPoolError, match="delete again"):
            run.reader.delete("trajectory", "s")
        reading.execute("COMMIT")
    run.reader.delete("trajectory", "s")
    assert b"secret" not in run.bytes_of_everything()


def test_half_a_file_of_a_killed_archiver_goes_with_a_deletion(run):
    run.train("s", SECRET)
    run.archive()
    (file,) = run.files()
    draft = file.with_name(f"{file.name}.1-1.tmp")
    draft.write_bytes(SECRET.encode())
    run.reader.delete("trajectory", "s")
    assert not draft.exists()


def test_half_a_tombstone_of_a_full_disk_spoils_no_other(run):
    run.train("s", SECRET)
    run.train("t", "common")
    run.archive()
    run.reader.delete("trajectory", "s")
    path = run.path / "archive" / "deleted.jsonl"
    path.write_bytes(path.read_bytes() + b'{"kind":"traj')
    run.reader.delete("trajectory", "t")
    assert run.reader.was_deleted("s")
    assert run.reader.was_deleted("t")


def test_siblings_go_with_a_group(run):
    run.pool("apply", OpenGroup("g", 2))
    private(run, "a", "eve", prompt_uid="g")
    private(run, "b", "bob", prompt_uid="g")
    run.pool("ack", run.pool("lease_batch", 1).lease_id)
    run.train("t", "common")
    run.archive()
    assert sorted(run.reader.delete("trajectory", "a", with_group=True)) == ["a", "b"]
    assert b"secret" not in run.bytes_of_everything()
    assert run.reader.was_deleted("b")
    assert run.reader.was_deleted("g").kind == "group"
    assert [row["uid"] for row in run.reader.rows().items] == ["t"]


def test_a_group_is_deleted_when_the_last_of_it_goes(run):
    run.pool("apply", OpenGroup("g", 2))
    private(run, "a", "eve", prompt_uid="g")
    private(run, "b", "bob", prompt_uid="g")
    run.pool("ack", run.pool("lease_batch", 1).lease_id)
    run.archive()
    run.reader.delete("trajectory", "a")
    assert run.reader.was_deleted("g") is None
    run.reader.delete("user", "bob")
    assert run.reader.was_deleted("g").kind == "group"


def test_what_was_deleted_while_it_waited_never_reaches_a_file(run):
    run.train("s", SECRET)
    run.archive()
    run.train("t", "common")
    run.reader.delete("trajectory", "t")
    run.archive()
    assert run.reader.find("t") == []
    assert b"common" not in b"".join(path.read_bytes() for path in run.files())


# -- lists and searches ----------------------------------------------------------------------------


@pytest.fixture
def many(run):
    for i in range(30):
        run.train(f"t{i:02d}", f"question {i} 東京タワーは高い", f"answer {i}", i / 30, version=i)
    run.archive()
    return run.reader


def test_lists_go_page_by_page_in_any_order(many):
    for order in ("time", "uid", "reward", "version"):
        assert all_pages(many, order=order) == [f"t{i:02d}" for i in range(29, -1, -1)], order
    assert many.rows(order="reward", descending=False, limit=1).items[0]["uid"] == "t00"


def all_pages(reader, **how):
    """Uids of a list, page by page."""
    seen, cursor = [], None
    while True:
        page = reader.rows(**how, limit=7, cursor=cursor)
        seen += [row["uid"] for row in page.items]
        if (cursor := page.cursor) is None:
            return seen


def ended(row):
    how = row["left"] if row["state"] == "complete" else row["state"]
    return f"{how} {row['drop_reason'] or row['reason'] or ''}"


SHOWN = {
    "time": lambda row: row["time"],
    "uid": lambda row: row["uid"],
    "reward": lambda row: row["reward"],
    "turns": lambda row: row["turns"],
    "tokens": lambda row: row["tokens"],
    "version": lambda row: row["version"],
    "state": ended,
    "first": lambda row: None if row["first"] is None else row["first"].lower(),
    "last": lambda row: None if row["last"] is None else row["last"].lower(),
}


@pytest.fixture
def mixed(run):
    """Trajectories of every end, some without a reward or a text; many are the same in each."""
    for i in range(24):
        asked, reply = ("Zebra", "apple", "Ähre")[i % 3], f"{'aB'[i % 2]}nswer {i // 4}"
        for turn in range(1 + i % 2):
            run.turn(f"t{i:02d}", asked, f"{reply} {turn}", version=i % 5)
        if i % 6 == 0:
            run.pool("drop_group", f"p-t{i:02d}", "stale" if i % 4 else "too easy")
            continue
        run.pool("complete_trajectory", f"t{i:02d}", (None, 0.0, 1.0)[i % 3])
        run.pool("ack", run.pool("lease_batch", 1).lease_id)
    run.pool("submit_step", step_of("mute", "p-mute", metadata={"timing": {}}))
    run.pool("complete_trajectory", "mute", 1.0)
    run.pool("ack", run.pool("lease_batch", 1).lease_id)
    run.archive()
    return run.reader


@pytest.mark.parametrize("descending", [True, False])
@pytest.mark.parametrize("order", SHOWN)
@pytest.mark.parametrize("how", [{}, {"search": "answer"}, {"where": parse("turns == 1")}])
def test_each_column_sorts_all_rows_and_those_without_a_value_come_last(
    mixed, order, descending, how
):
    rows = {row["uid"]: row for row in mixed.rows(**how, limit=100).items}
    seen = all_pages(mixed, order=order, descending=descending, **how)
    assert sorted(seen) == sorted(rows), "none is lost, none is twice"
    values = [SHOWN[order](rows[uid]) for uid in seen]
    known = [value for value in values if value is not None]
    assert known == sorted(known, reverse=descending)
    assert values == known + [None] * (len(values) - len(known))
    ids = [rows[uid]["id"] for uid in seen]
    ties = [i for i in range(1, len(ids)) if values[i - 1] == values[i]]
    assert all((ids[i - 1] > ids[i]) == descending for i in ties), "ties by time"


@pytest.mark.parametrize("descending", [True, False])
def test_a_cursor_of_another_order_is_refused(mixed, descending):
    cursor = mixed.rows(order="reward", descending=descending, limit=2).cursor
    assert mixed.rows(order="reward", descending=descending, limit=2, cursor=cursor).items
    for other in ({"order": "first"}, {"order": "reward", "descending": not descending}):
        with pytest.raises(InvalidRequestError, match="cursor"):
            mixed.rows(**{"descending": descending} | other, cursor=cursor)


def test_tries_of_one_prompt_stand_together_however_alike_prompts_begin(run):
    for i in range(12):
        run.train(f"t{i:02d}", f"{'State the final answer. ' * 3} What is {i % 3} + 1?")
    run.archive()
    prompts = [int(uid[1:]) % 3 for uid in all_pages(run.reader, order="first")]
    assert sorted(prompts[::4]) == [0, 1, 2]
    assert prompts == [prompt for prompt in prompts[::4] for _ in range(4)]


def test_a_catalogue_of_an_older_release_is_made_anew_of_the_files(run):
    run.train("t", "question", "answer")
    run.archive()
    path = run.reader.folder.catalogue(0)
    with closing(sqlite3.connect(path)) as db:
        db.executescript("DROP INDEX by_last; DELETE FROM trajectories; PRAGMA user_version = 1")
    with closing(archiver.open_sound(run.settings)):  # as the process beside a pool begins
        pass
    run.train("u", "question", "another answer")
    run.archive()
    assert all_pages(run.reader, order="last", descending=False) == ["u", "t"]
    assert run.reader.rows(search="question").items
    (prompt,) = run.reader.prompts()
    assert prompt["tries"] == 2


def test_a_query_filters(many):
    found = many.rows(parse("reward < 0.2 and version >= 4 and 'answer' in text")).items
    assert [row["uid"] for row in found] == ["t05", "t04"]
    assert many.rows(parse("reward > 5")).items == []
    assert many.rows(parse("left == 'acked' and not (turns > 1) and reason is None"), limit=2).items


@pytest.mark.parametrize(
    "text", ["reward", "nothing == 3", "reward < x", "__import__('os')", "reward <", "1 < 2"]
)
def test_what_is_no_query_is_refused_with_what_there_is(text):
    with pytest.raises(InvalidRequestError, match="compare attempt"):
        parse(text)


@pytest.mark.parametrize("few", [0, 1, 3, 5000])
def test_how_few_pass_changes_no_answer(many, few, monkeypatch):
    """Few are looked up one by one, of the index of one condition or of all; many in order."""
    monkeypatch.setattr(reader_module, "FEW", few)
    every = many.rows(limit=1000).items
    queries = {
        "reward > 0.5": lambda r: r["reward"] > 0.5,
        "reward > 1000": lambda r: False,
        "version >= 2 and reward < 0.3": lambda r: r["version"] >= 2 and r["reward"] < 0.3,
        "tokens > 0 and state == 'none'": lambda r: False,
        "0.1 < reward <= 0.4 and turns == 1": lambda r: 0.1 < r["reward"] <= 0.4,
        "not (reward > 0.2)": lambda r: not r["reward"] > 0.2,
        "drop_reason != 'stale' and not (reward > 0.2)": lambda r: not r["reward"] > 0.2,
        "user == 'nobody' or reward == 0.1": lambda r: r["reward"] == 0.1,
    }
    for query, passes in queries.items():
        found = [row["uid"] for row in many.rows(parse(query), limit=1000).items]
        assert found == [row["uid"] for row in every if passes(row)], query


def test_what_is_not_the_same_is_the_rest(run, many):
    run.turn("s", "one with a tag", "yes")
    run.pool("apply", Mark(trajectory_uid="s", marks={"tags": ["x"]}))
    run.pool("complete_trajectory", "s", 1.0)
    run.pool("ack", run.pool("lease_batch", 1).lease_id)
    run.archive()
    assert [row["uid"] for row in many.rows(parse("tag == 'x'")).items] == ["s"]
    assert len(many.rows(parse("tag != 'x'")).items) == 30


@pytest.mark.parametrize(
    ("query", "passes"),
    [
        ("user != 'ann'", ["bob's", "nobody's"]),
        ("'ann' != user", ["bob's", "nobody's"]),
        ("user == 'ann'", ["ann's"]),
        ("drop_reason != 'stale'", ["ann's", "bob's", "nobody's"]),
        ("'an' not in user", ["bob's", "nobody's"]),
        ("not (reward > 0.5)", ["bob's", "nobody's"]),
        ("not (user == 'ann' or reward > 0.5)", ["bob's", "nobody's"]),
        ("not (not (user == 'ann') and not (reward < 0.5))", ["ann's", "bob's"]),
        ("user is not None", ["ann's", "bob's"]),
        ("reward < 5", ["ann's", "bob's"]),
    ],
)
def test_what_has_no_value_is_not_the_same_and_neither_more_nor_less(run, query, passes):
    for uid, user, reward in (("ann's", "ann", 1.0), ("bob's", "bob", 0.0)):
        run.pool("apply", OpenTrajectory(uid, f"p-{uid}", 0, {"user": user}))
        run.train(uid, reward=reward)
    run.train("nobody's", reward=None)
    run.archive()
    found = run.reader.rows(parse(query), order="uid", descending=False).items
    assert [row["uid"] for row in found] == passes


@pytest.mark.parametrize(
    "text",
    [
        "reward < None",
        "reward is 5",
        "tag < 'x'",
        "reward < 99999999999999999999",
        "uid == '\\ud800'",
        "uid == {[]: 1}",
        "uid == '\0'",
        "not " * 200 + "turns > 1",
        "turns > 1 and " * 1000 + "turns > 1",
        "'!?' in text",
    ],
)
def test_a_query_that_sqlite_cannot_answer_is_refused(many, text):
    with pytest.raises(InvalidRequestError):
        many.rows(parse(text))


def test_a_time_that_no_clock_has_is_refused(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "EST5")
        time.tzset()
        with pytest.raises(InvalidRequestError, match="no time such as"):
            parse("time < '9999-12-31 23:59'")
    time.tzset()


def test_the_longest_query_is_answered(many):
    assert many.rows(parse("turns<9>" * 240 + "turns")).items
    assert many.rows(parse("uid>'' or " * 190 + "uid>''")).items


@pytest.mark.parametrize("search", ["!?", "\0", "\ud800", '"'])
@pytest.mark.parametrize("order", ["time", "relevance"])
def test_a_search_without_a_word_is_refused(many, search, order):
    with pytest.raises(InvalidRequestError, match="has no word"):
        many.rows(search=search, order=order)


@pytest.mark.parametrize("places", [{"0": [[], 1]}, {"0": [0, 1 << 70]}, {"0": [1]}, [1], {"0": 1}])
def test_a_cursor_that_nobody_was_given_is_refused(many, places):
    with pytest.raises(InvalidRequestError, match="cursor"):
        many.rows(cursor=json.dumps(places).encode().hex())


def test_text_is_searched_in_any_language(many):
    assert len(many.rows(search="東京").items) == 30
    assert many.rows(search="京東").items == []
    assert [row["uid"] for row in many.rows(search='"question 7"').items] == ["t07"]
    assert len(many.rows(search="quest*").items) == 30
    assert many.rows(search="question", order="relevance", limit=5).items
    assert many.rows(search="高い").items[0]["first"].endswith("東京タワーは高い")


def test_what_somebody_types_is_no_query_language():
    assert match_of('AND "x y" foo* (') == '"AND" "x y" "foo"*'


def test_prompts_that_never_get_a_reward_are_listed(run):
    for i, rewards in enumerate([(0.0, 0.0), (0.0, 1.0), (1.0, 1.0), (None,)]):
        for k, reward in enumerate(rewards):
            run.train(f"t{i}{k}", f"question {i}", reward=reward)
    run.archive()
    kinds = {row["first"]: row["kind"] for row in run.reader.prompts()}
    assert kinds == {
        "question 0": "never",
        "question 1": "mixed",
        "question 2": "always",
        "question 3": "unscored",
    }
    (never,) = run.reader.prompts(never_rewarded=True)
    assert (never["first"], never["tries"], never["best"], never["mean"]) == (
        "question 0",
        2,
        0.0,
        0.0,
    )
    run.train("t02", "question 0", reward=1.0)
    run.archive()
    assert run.reader.prompts(never_rewarded=True) == []
    run.reader.delete("trajectory", "t02")
    assert len(run.reader.prompts(never_rewarded=True)) == 1


PROMPTS = {
    "time": lambda row: row["newest"],
    "tries": lambda row: row["tries"],
    "rewarded": lambda row: row["rewarded"] / row["scored"] if row["scored"] else None,
    "mean": lambda row: row["mean"],
    "best": lambda row: row["best"],
    "solved": lambda row: row["solved_version"],
    "source": lambda row: row["data_source"],
    "first": lambda row: row["first"],
}


@pytest.mark.parametrize("shards", [1, 2])
def test_each_column_sorts_all_prompts(tmp_path, shards):
    archive = ArchiveConfig(dir=tmp_path / "archive")
    for k in range(shards):
        run = Archived(tmp_path / str(k), archive=archive)
        run.settings = msgspec.structs.replace(run.settings, shard=k)
        for i in range(8):
            for n in range(1 + (i + k) % 4):
                run.pool.now = 1000.0 + 100 * i + 10 * n + k
                task = {} if i % 3 else {"data_source": f"source {i}", "instance_id": f"{i}"}
                uid, reward = f"t{k}{i}{n}", (None, 0.0, 0.5, 1.0)[(i * n + k) % 4]
                run.pool("apply", OpenGroup(f"p-{uid}", 1, metadata=task))
                run.train(uid, f"question {i % 5}", reward=reward, version=i)
        run.archive()
        run.pool.journal.close()
    reader = ArchiveReader(tmp_path / "archive")
    every = {row["prompt"]: row for row in reader.prompts()}
    assert len(every) == 7
    for order, of in PROMPTS.items():
        for descending in (True, False):
            how = {"order": order, "descending": descending}
            rows = reader.prompts(**how)
            assert {row["prompt"]: row for row in rows} == every, order
            values = [of(row) for row in rows]
            known = [value for value in values if value is not None]
            assert known == sorted(known, reverse=descending), order
            assert values == known + [None] * (len(values) - len(known)), order
            assert reader.prompts(**how, limit=3) == rows[:3], order
            paged, cursor = [], None
            while page := reader.prompts(**how, cursor=cursor, limit=3):
                paged += page
                cursor = prompt_cursor(page[-1], **how)
            assert paged == rows, order
    with pytest.raises(InvalidRequestError, match="order is 'size'; there are time, tries"):
        reader.prompts(order="size")


def test_the_archives_of_all_shards_answer_as_one(tmp_path):
    runs = []
    for k in range(2):
        run = Archived(tmp_path / str(k), archive=ArchiveConfig(dir=tmp_path / "archive"))
        run.settings = msgspec.structs.replace(run.settings, shard=k)
        runs.append(run)
    rewards = {"solved once": (0.0, 1.0), "never": (0.0, 0.0), "always": (1.0, 1.0)}
    for i, (asked, each) in enumerate(rewards.items()):
        for k, (run, reward) in enumerate(zip(runs, each, strict=True)):
            run.pool.now = 1000.0 + 10 * i + k
            run.train(f"t{i}{k}", asked, reward=reward)
    for run in runs:
        run.archive()
        run.pool.journal.close()
    reader = ArchiveReader(tmp_path / "archive")
    newest = ["t21", "t20", "t11", "t10", "t01", "t00"]
    rewarded = ["t21", "t20", "t01", "t11", "t10", "t00"]
    asked = ["t01", "t00", "t11", "t10", "t21", "t20"]
    orders = {"time": newest, "uid": newest, "reward": rewarded, "first": asked, "state": newest}
    for order, uids in orders.items():
        seen, cursor = [], None
        while True:
            page = reader.rows(order=order, limit=2, cursor=cursor)
            seen += [row["uid"] for row in page.items]
            if (cursor := page.cursor) is None:
                break
        assert seen == uids, order
    assert reader.read("t10").trajectory.reward == reader.read("t11").trajectory.reward == 0.0
    assert [row["first"] for row in reader.prompts(never_rewarded=True)] == ["never"]
    assert [row["first"] for row in reader.prompts(always=True)] == ["always"]
    mixed = next(row for row in reader.prompts() if row["first"] == "solved once")
    assert (mixed["tries"], mixed["mean"], mixed["kind"]) == (2, 0.5, "mixed")


def test_what_no_message_was_kept_of_has_no_text(run):
    step = step_of("t", "p", metadata={"timing": {}})
    run.pool("submit_step", step)
    run.pool("complete_trajectory", "t", 1.0)
    run.pool("ack", run.pool("lease_batch", 1).lease_id)
    run.archive()
    (row,) = run.reader.find("t")
    assert (row["first"], row["last"]) == (None, None)
    with closing(Catalogue(run.reader.folder.catalogue(0))) as found:
        assert found.query("SELECT count(*) AS n FROM texts") == [{"n": 0}]
    assert run.reader.read("t").trajectory.steps[0].response_ids.tolist() == list(step.response_ids)


def test_the_text_of_an_aborted_trajectory_is_there_while_its_group_is_live(run):
    run.turn("a", "first try", "failed", "p")
    run.pool("abort_trajectory", "a", "timeout", True)
    found = waiting(run.pool.pool.apply(ReadDeparted("a"), run.pool.now))
    ((one, about),) = [each for each in found if each[0].trajectory.trajectory_uid == "a"]
    assert (one.state, one.reason) == ("aborted", "timeout")
    assert fate(about) == "aborted (timeout); its group is in the pool"
    assert one.trajectory.steps[0].metadata["messages"][1]["content"] == "failed"


def test_what_waits_can_be_read(run):
    run.train("t", "question", "answer")
    ((one, about),) = waiting(run.pool.pool.apply(ReadDeparted("p-t"), run.pool.now))
    assert (fate(about), about["reward"]) == ("its group was taken by a trainer", 1.0)
    assert one.trajectory.steps[0].metadata["messages"][0]["content"] == "question"
    assert one.trajectory.reward == 1.0


# -- a damaged journal -----------------------------------------------------------------------------


def test_what_waits_is_archived_after_a_salvage_or_named_in_its_report(tmp_path):
    run = Archived(tmp_path)
    try:
        run.train("before")
        run.archive()
        for uid in ("waits", "damaged"):
            run.train(uid, reply=f"I am {uid}.")
        run.train("dropped", reply="I am live.")
        run.turn("live", "2+2?", "I am hit.")
        run.pool("complete_trajectory", "live", 1.0)
        run.pool.journal.flush()
    finally:
        run.pool.journal.close()
    segment = newest_segment(tmp_path / "pool")
    data = bytearray(segment.read_bytes())
    for words in (b"I am damaged.", b"I am hit."):
        data[data.index(words)] ^= 1
    segment.write_bytes(data)
    [report] = salvage(tmp_path / "pool")
    assert "1 groups that had left the pool and waited to be archived" in report.text()
    assert "p-damaged" in report.text()
    assert report.dropped == {"train": ["p-live"]}
    config = PoolConfig(archive=ArchiveConfig(dir=tmp_path / "archive"))
    asyncio.run(archive_stopped(stopped_pool(tmp_path / "pool", config), config))
    for uid in ("before", "waits", "dropped"):
        assert run.reader.read(uid) is not None, uid
    assert run.reader.read("damaged") is None
    pool = JournaledPool(
        tmp_path / "pool", default=ChannelConfig(n_rollouts=1), archive=config.archive
    )
    assert not pool.pool.channel("train").records.groups
    counts = pool("get_statistics", "train")["groups"]
    assert (counts["acked"], counts["dropped"], counts["submitted"]) == (4, 1, 5)
    pool.journal.close()


def test_a_late_step_whose_payload_is_damaged_holds_nothing_up_after_a_salvage(tmp_path):
    run = Archived(tmp_path)
    run.train("t")
    run.turn("t", "And 3+3?", "It is 6.")
    run.turn("t", "And 4+4?", "It is 8.")
    run.pool.journal.close()
    log = newest_segment(tmp_path / "pool")
    data = bytearray(log.read_bytes())
    data[data.index(b"And 3+3?")] ^= 1
    log.write_bytes(data)
    [report] = salvage(tmp_path / "pool")
    assert any("payload of row" in line for line in report.lost)
    config = run.pool.pool.config
    pool = JournaledPool(tmp_path / "pool", default=config.default, archive=config.archive)
    run.caller.pool = pool
    while run.archive():
        pass
    assert pool.pool.backlog["waiting"] == 0
    steps = run.reader.read("t").trajectory.steps
    assert [s.metadata["messages"][1]["content"] for s in steps] == ["It is 4.", "It is 8."]
    pool.journal.close()
