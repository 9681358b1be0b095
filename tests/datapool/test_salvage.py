"""A damaged journal is made usable again, and what is lost is said."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepwell.datapool.config import ChannelConfig, PoolConfig
from stepwell.datapool.errors import (
    InvalidRequestError,
    JournalCorruptError,
    JournalError,
    JournalLockedError,
    UnknownLeaseError,
)
from stepwell.datapool.files.deletion import delete_from_journals
from stepwell.datapool.ops import Delete
from stepwell.datapool.store import journal as journal_module
from stepwell.datapool.store.folder import ACKED_NAME
from stepwell.datapool.store.journal import Journal
from stepwell.datapool.store.replay import restore
from stepwell.datapool.store.salvage import salvage, settle_doubtful
from stepwell.datapool.store.segments import segment_path, segments_in
from stepwell.datapool.types import Step
from tests.builders import step
from tests.datapool.conftest import SyncPool, newest_segment

N_GROUPS = 12


class Pool:
    """A pool over a journal, as the actor has it."""

    def __init__(self, folder: Path) -> None:
        self.journal = Journal(folder, "process", lock_timeout_s=0)
        try:
            self.pool = SyncPool(PoolConfig(default=ChannelConfig(n_rollouts=1)))
            journal = self.journal
            restore(self.pool, journal)
        except BaseException:
            self.journal.close()
            raise

    def flush(self) -> None:
        self.pool.write_counts()
        self.journal.flush()

    def statistics(self) -> dict[str, Any]:
        counts: dict[str, Any] = self.pool.get_statistics("train", now=time.time())["groups"]
        return counts


def fill(folder: Path, closed: bool) -> dict[str, str]:
    """N_GROUPS groups, each in transactions of its own, of which two are acked."""
    pool = Pool(folder)
    for k in range(N_GROUPS):
        now = time.time()
        pool.pool.open_group(f"p{k}", 1, now=now)
        pool.pool.submit_steps([numbered(k)], now=now)
        pool.flush()
        pool.pool.complete_trajectory(f"t{k}", reward=float(k), now=now)
        pool.flush()
    lease = pool.pool.lease_batch(batch_size=2, now=time.time())
    assert lease is not None
    pool.pool.ack(lease.lease_id, now=time.time())
    pool.flush()
    if closed:
        pool.journal.close()
    else:
        leave_open(pool, folder)
    return {f"p{k}": f"t{k}" for k in range(2, N_GROUPS)}


def leave_open(pool: Pool, folder: Path) -> None:
    """The files as a killed process leaves them."""
    copy = folder.with_name("killed")
    shutil.copytree(folder, copy)
    pool.journal.close()
    shutil.rmtree(folder)
    copy.rename(folder)


def numbered(k: int) -> Step:
    return step(range(50), [1000 + k] * 200, f"t{k}", prompt_uid=f"p{k}")


def held(folder: Path) -> set[str]:
    """The live groups of a pool started over the folder; its counts must add up."""
    pool = Pool(folder)
    try:
        counts = pool.statistics()
        states = ("open", "ready", "leased", "acked", "dropped")
        assert counts["submitted"] == sum(counts[state] for state in states)
        return set(pool.pool.channel("train").records.groups)
    finally:
        pool.journal.close()


def test_tools_that_do_not_know_the_configuration_decide_nothing_by_time(tmp_path: Path) -> None:
    patient = PoolConfig(default=ChannelConfig(siblings_wait_s=1000))
    journal = Journal(tmp_path, "process")
    pool = SyncPool(patient)
    restore(pool, journal)
    pool.submit_steps([step(uid="t0", prompt_uid="p0"), step(uid="t1", prompt_uid="p0")], now=0.0)
    pool.complete_trajectory("t0", now=0.0)
    pool.submit_steps([step(uid="t2", prompt_uid="p2")], now=500.0)
    pool.write_counts()
    journal.close()
    assert "nothing is damaged" in salvage(tmp_path)[0].text()
    delete_from_journals(tmp_path, Delete("t2"))
    journal = Journal(tmp_path, "process")
    pool = SyncPool(patient)
    restore(pool, journal)
    assert pool.get_statistics("train", now=500.0)["groups"]["ready"] == 0
    assert pool.next_deadline() == 1000.0
    journal.close()


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def refused(folder: Path) -> bool:
    try:
        held(folder)
    except JournalCorruptError:
        return True
    return False


@pytest.mark.parametrize("closed", [False, True])
def test_a_flipped_bit_in_the_log_costs_what_is_said_and_no_more(
    tmp_path: Path, closed: bool
) -> None:
    fill(tmp_path / "whole", closed)
    groups = {f"p{k}" for k in range(2, N_GROUPS)}
    size = newest_segment(tmp_path / "whole").stat().st_size
    n_whole = 0
    for k in range(40):
        folder = Path(shutil.copytree(tmp_path / "whole", tmp_path / f"pool-{k}"))
        flip(newest_segment(folder), size * k // 40)
        assert refused(folder)
        [report] = salvage(folder)
        assert "transactions " in report.damage
        found = held(folder)
        named = {uid for uids in report.dropped.values() for uid in uids}
        assert groups - found <= named or any("transaction" in line for line in report.lost)
        assert len(found) >= 4, "half of them, at worst"
        assert not found & named
        n_whole += not named
        assert report.aside is not None
        assert {p.name for p in report.aside.iterdir()} >= {"pool-000000000001.log", ACKED_NAME}
    assert 0 < n_whole < 40


def test_a_lease_whose_transaction_is_damaged_is_counted_and_its_id_is_not_given_again(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "pool"
    fill(folder, closed=True)
    pool = Pool(folder)
    before = newest_segment(folder).stat().st_size
    first = pool.pool.lease_batch(now=time.time(), lease_s=1e6)
    assert first is not None
    pool.flush()
    pool.pool.open_group("later", 1, now=time.time())
    pool.flush()
    pool.journal.close()
    flip(newest_segment(folder), before + 60)  # in the block, before its rows
    assert refused(folder)
    [report] = salvage(folder)
    assert not report.dropped
    pool = Pool(folder)
    leases = pool.pool.get_statistics("train", now=time.time())["leases"]
    assert (leases["active"], leases["acked"]) == (1, 1)
    second = pool.pool.lease_batch(now=time.time(), lease_s=1e6)
    assert second is not None
    assert second.lease_id != first.lease_id
    for lease in (first, second):
        pool.pool.ack(lease.lease_id, now=time.time())
    leases = pool.pool.get_statistics("train", now=time.time())["leases"]
    assert (leases["active"], leases["acked"]) == (0, 3)
    assert pool.statistics()["leased"] == 0
    pool.journal.close()


def test_a_cut_log_is_the_pool_at_an_earlier_moment_and_says_which_rows_are_gone(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "pool"
    fill(folder, closed=True)
    before = newest_segment(folder).stat().st_size
    pool = Pool(folder)
    pool.pool.open_group("late", 1, now=time.time())
    pool.flush()
    leave_open(pool, folder)
    os.truncate(newest_segment(folder), before)
    assert refused(folder)
    [report] = salvage(folder)
    assert "lost: Acknowledged transactions " in report.text()
    assert held(folder) == {f"p{k}" for k in range(2, N_GROUPS)}


def test_the_id_of_a_lease_that_was_lost_names_no_other_one(tmp_path: Path) -> None:
    folder = tmp_path / "pool"
    fill(folder, closed=True)
    before = newest_segment(folder).stat().st_size
    pool = Pool(folder)
    lost = pool.pool.lease_batch(now=time.time())
    assert lost is not None
    pool.flush()
    leave_open(pool, folder)
    os.truncate(newest_segment(folder), before)
    assert refused(folder)
    salvage(folder)
    settle_doubtful(folder, [], release=True)
    pool = Pool(folder)
    other = pool.pool.lease_batch(now=time.time())
    assert other is not None
    with pytest.raises(UnknownLeaseError):  # whoever has it goes on without
        pool.pool.ack(lost.lease_id, now=time.time())
    pool.journal.close()


def test_a_segment_that_is_gone_costs_the_groups_that_are_older_and_acked_ones_stay_acked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 2000)
    fill(tmp_path / "whole", closed=True)
    numbers = segments_in(tmp_path / "whole")
    assert len(numbers) > 5
    for number in numbers[:-1]:
        folder = Path(shutil.copytree(tmp_path / "whole", tmp_path / f"pool-{number}"))
        segment_path(folder, number).unlink()
        assert refused(folder)
        [report] = salvage(folder)
        found = held(folder)
        named = {uid for uids in report.dropped.values() for uid in uids}
        assert not found & named
        assert report.lost
        if not any("Acknowledged" in line for line in report.lost):
            assert found <= {f"p{k}" for k in range(2, N_GROUPS)}, "what was acked does not return"


def test_a_damaged_payload_costs_its_own_group_which_is_named_and_stays_closed(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "pool"
    groups = fill(folder, closed=True)
    needle = np.full(200, 1007, dtype=np.int32).tobytes()
    log = newest_segment(folder)
    flip(log, log.read_bytes().index(needle) + 400)
    assert refused(folder)
    [report] = salvage(folder)
    assert report.dropped == {"train": ["p7"]}
    assert "1 groups: p7" in report.text()
    assert held(folder) == groups.keys() - {"p7"}
    pool = Pool(folder)
    assert pool.pool.submit_steps([numbered(7)], now=time.time()) == ["late"]
    assert pool.statistics()["drop_reasons"] == {"damaged": 1}
    pool.journal.close()


def test_groups_that_shared_a_lease_with_a_dropped_one_are_served_again(tmp_path: Path) -> None:
    folder = tmp_path / "pool"
    fill(folder, closed=True)
    pool = Pool(folder)
    lease = pool.pool.lease_batch(batch_size=3, now=time.time())
    assert lease is not None
    taken = [group.prompt_uid for group in lease.groups]
    assert taken == ["p2", "p3", "p4"]
    pool.flush()
    pool.journal.close()
    needle = np.full(200, 1003, dtype=np.int32).tobytes()
    flip(newest_segment(folder), newest_segment(folder).read_bytes().index(needle))
    [report] = salvage(folder)
    assert report.dropped == {"train": ["p3"]}
    pool = Pool(folder)
    counts = pool.statistics()
    assert (counts["leased"], counts["ready"]) == (0, N_GROUPS - 3)
    again = pool.pool.lease_batch(batch_size=2, now=time.time())
    assert again is not None
    assert [(group.prompt_uid, group.delivery) for group in again.groups] == [("p2", 2), ("p4", 2)]
    pool.journal.close()


def test_a_lost_record_is_written_anew_and_the_doubt_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "pool"
    groups = fill(folder, closed=False)
    (folder / ACKED_NAME).unlink()
    assert refused(folder)
    [report] = salvage(folder)
    assert "cannot be told" in report.text()
    assert held(folder) == groups.keys()


def test_a_log_that_is_gone_says_that_nothing_can_be_saved(tmp_path: Path) -> None:
    folder = tmp_path / "pool"
    fill(folder, closed=True)
    newest_segment(folder).unlink()
    with pytest.raises(JournalError, match="nothing can be saved"):
        salvage(folder)
    assert [path.name for path in folder.iterdir()] == [ACKED_NAME]


@pytest.mark.parametrize("seen_by", ["a start", "a second salvage"])
def test_a_salvage_that_is_killed_between_two_renames_is_finished_by_whoever_comes_next(
    tmp_path: Path, seen_by: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "pool"
    groups = fill(folder, closed=True)
    flip(segment_path(folder, 1), segment_path(folder, 1).stat().st_size - 100)
    if not (child := os.fork()):
        rename = Path.rename

        def killed(self: Path, target: Path) -> Path:
            if target == folder:
                os._exit(7)
            return rename(self, target)

        Path.rename = killed  # type: ignore[assignment,method-assign]
        salvage(folder)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert not folder.exists()
    if seen_by == "a second salvage":
        assert not salvage(tmp_path)[0].damage
    assert held(folder) <= groups.keys()
    assert len(held(folder)) >= len(groups) - 1
    assert "was killed before its journal was in place" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pool", "pool.damaged"]


@pytest.mark.parametrize("target", ["salvaged", "pool.damaged"])
def test_the_copy_of_a_salvage_that_was_killed_goes_with_the_next(
    tmp_path: Path, target: str
) -> None:
    folder = tmp_path / "pool"
    groups = fill(folder, closed=True)
    flip(segment_path(folder, 1), segment_path(folder, 1).stat().st_size - 100)
    (tmp_path / ".pool-of-mine").mkdir()
    if not (child := os.fork()):
        rename = Path.rename

        def killed(self: Path, to: Path) -> Path:
            if to.name == target:
                os._exit(7)
            return rename(self, to)

        Path.rename = killed  # type: ignore[assignment,method-assign]
        salvage(folder)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert len(list(tmp_path.iterdir())) == 3
    assert salvage(folder)[0].damage
    assert held(folder) <= groups.keys()
    assert {path.name for path in tmp_path.iterdir()} == {"pool", "pool.damaged", ".pool-of-mine"}


def test_a_sound_journal_is_left_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "pool"
    groups = fill(folder, closed=True)
    [report] = salvage(tmp_path)  # a run's folder
    assert report.text() == f"{folder}: nothing is damaged; it was left as it is"
    assert os.listdir(tmp_path) == ["pool"]
    assert held(folder) == groups.keys()


def test_a_journal_in_use_is_not_touched(tmp_path: Path) -> None:
    pool = Pool(tmp_path / "pool")
    with pytest.raises(JournalLockedError):
        salvage(tmp_path / "pool")
    pool.journal.close()


def test_a_folder_without_a_journal_says_what_to_name(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="runs/NAME/pool"):
        salvage(tmp_path)


def test_only_the_damaged_shard_is_written_anew(tmp_path: Path) -> None:
    fill(tmp_path / "shard-0", closed=True)
    fill(tmp_path / "shard-1", closed=True)
    (tmp_path / "shard-1" / ACKED_NAME).unlink()
    first, second = salvage(tmp_path)
    assert not first.damage
    assert second.damage
    salvage(tmp_path)  # what was put aside is no shard
    assert held(tmp_path / "shard-1") == {f"p{k}" for k in range(2, N_GROUPS)}


def test_ids_and_identity_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "pool"
    fill(folder, closed=True)
    journal = Journal(folder, "process")
    identity, before = journal.identity, journal.append("train", "step", b"")
    journal.flush()
    journal.delete([before])
    journal.close()
    (folder / ACKED_NAME).unlink()
    salvage(folder)
    journal = Journal(folder, "process")
    assert journal.identity == identity
    assert journal.append("train", "step", b"") > before
    journal.close()


def cut_before_the_ack(folder: Path) -> None:
    """All groups are acked, and the transaction that says so is cut off."""
    fill(folder, closed=True)
    before = newest_segment(folder).stat().st_size
    pool = Pool(folder)
    lease = pool.pool.lease_batch(batch_size=N_GROUPS - 2, now=time.time())
    assert lease is not None
    pool.pool.ack(lease.lease_id, now=time.time())
    pool.flush()
    pool.journal.close()
    os.truncate(newest_segment(folder), before)


def test_groups_whose_ack_may_be_lost_are_held_and_named_until_somebody_decides(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "pool"
    cut_before_the_ack(folder)
    [report] = salvage(folder)
    doubtful = [f"p{k}" for k in range(2, N_GROUPS)]
    assert report.doubtful == {"train": doubtful}
    assert not report.dropped
    pool = Pool(folder)
    assert pool.pool.lease_batch(now=time.time()) is None
    pool.journal.close()
    with pytest.raises(InvalidRequestError, match="no doubtful group is called nobody"):
        settle_doubtful(folder, ["nobody"], release=True)
    assert settle_doubtful(folder, ["p3"], release=True) == {"train": ["p3"]}
    assert settle_doubtful(folder, ["p4"], release=False) == {"train": ["p4"]}
    assert held(folder) == {*doubtful} - {"p4"}
    pool = Pool(folder)
    lease = pool.pool.lease_batch(now=time.time())
    assert lease is not None
    assert [group.prompt_uid for group in lease.groups] == ["p3"]
    assert pool.pool.lease_batch(now=time.time()) is None
    pool.journal.close()


def test_what_was_deleted_of_a_group_does_not_come_back_with_a_damaged_journal(
    tmp_path: Path,
) -> None:
    """Wherever its transaction is damaged: the group is named, or nothing of it is left."""
    pool, now = Pool(tmp_path / "whole"), time.time()
    pool.pool.open_group("p", 3, now=now)
    turns = [
        replace(numbered(k), trajectory_uid=uid, prompt_uid="p")
        for k, uid in ((1, "mine"), (2, "mate"))
    ]
    pool.pool.submit_steps(turns, now=now)
    pool.pool.mark(trajectory_uid="mine", note="a note of mine", now=now)
    pool.pool.complete_trajectory("mine", 1.0, {"said": "words of mine"}, now=now)
    pool.flush()
    begin = newest_segment(tmp_path / "whole").stat().st_size
    pool.pool.delete_trajectory("mine", now=now)
    pool.flush()
    end = newest_segment(tmp_path / "whole").stat().st_size
    pool.pool.open_group("later", 1, now=now)
    pool.flush()
    leave_open(pool, tmp_path / "whole")
    n_gone = 0
    for at in range(begin, end, 25):
        folder = Path(shutil.copytree(tmp_path / "whole", tmp_path / f"pool-{at}"))
        flip(newest_segment(folder), at)
        assert refused(folder)
        [report] = salvage(folder)
        named = [*report.dropped.get("train", ()), *report.doubtful.get("train", ())]
        pool = Pool(folder)
        rows = pool.pool.list_trajectories(now=now).items
        pool.journal.close()
        states = {row.trajectory_uid: row.state for row in rows}
        if states.get("mine") == "complete":
            assert named == ["p"]
            continue
        data = b"".join(path.read_bytes() for path in folder.iterdir())
        assert b"of mine" not in data
        assert token(1) not in data
        assert (token(2) in data) is ("p" in held(folder))
        n_gone += 1
    assert n_gone > 10


def token(k: int) -> bytes:
    """The response of a step."""
    return np.full(200, 1000 + k, dtype=np.int32).tobytes()
