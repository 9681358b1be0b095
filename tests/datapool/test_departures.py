"""Groups that leave a pool wait in the journal until they are archived."""

from __future__ import annotations

import sys

import pytest

from stepwell.datapool.config import ArchiveConfig
from stepwell.datapool.core import group_log
from stepwell.datapool.errors import JournalCorruptError, TrajectoryClosedError
from stepwell.datapool.ops import (
    Delete,
    DeleteTrajectory,
    Mark,
    OpenGroup,
    OpenTrajectory,
    ReleaseDeparted,
)
from stepwell.datapool.questions import ListDeparted, ReadDeparted
from stepwell.datapool.store.reading import rows_at_places
from tests.datapool.conftest import JournaledPool


def archived(folder, **config):
    return {"archive": ArchiveConfig(dir=folder / "archive"), **config}


@pytest.fixture
def pool(tmp_path):
    pool = JournaledPool(tmp_path / "pool", **archived(tmp_path))
    yield pool
    pool.journal.close()


def waiting(pool):
    return pool.pool.apply(ListDeparted(), pool.now).items


def kinds(pool, departed):
    return [row.kind for row in rows_at_places(pool.folder, departed.places)]


def train(pool, uid="t", prompt_uid="p", text="said"):
    pool.say(uid, prompt_uid, text)
    pool("complete_trajectory", uid, 1.0)
    pool("ack", pool("lease_batch").lease_id)


def test_a_trained_group_waits_with_its_rows_and_goes_once_it_is_archived(pool):
    train(pool, text="a secret of somebody")
    (departed,) = waiting(pool)
    expected = ["PromptStored", "StepsStored", "CompleteTrajectory"]
    assert kinds(pool, departed) == [*expected, "GroupLeased", "GroupLeft"]
    pool.erase()
    assert pool.holds("a secret of somebody")
    pool("apply", ReleaseDeparted(departed.row))
    pool.erase()
    assert waiting(pool) == []
    assert not pool.holds("a secret of somebody")


def test_a_group_that_waits_is_gone_for_everybody_else_and_stays_so_after_a_restart(pool):
    train(pool)
    pool.say("u", "q", "another one")
    before = waiting(pool)
    pool = pool.restart(**archived(pool.folder.parent))
    assert [d.row for d in waiting(pool)] == [d.row for d in before]
    assert pool.groups()["acked"] == 1
    assert pool.groups()["open"] == 1
    with pytest.raises(TrajectoryClosedError):
        pool("complete_trajectory", "t", 0.0)
    left, _late_reward = pool.pool.apply(ReadDeparted("t"), pool.now)
    assert any(b"said" in payload for _, _, _, payload in left.rows)


def test_a_deletion_takes_what_waits_of_the_trajectory_out_of_the_journal(pool):
    train(pool, text="a secret of somebody")
    assert pool("delete", "t").trajectories == ("t",)
    pool.later(0)
    assert waiting(pool) == []
    assert not pool.holds("a secret of somebody")


def test_a_deletion_by_tag_takes_what_waits_too(pool):
    pool.say("t", "p", "a secret of somebody")
    pool("apply", Mark(trajectory_uid="t", marks={"tags": ["private"]}))
    pool("complete_trajectory", "t", 1.0)
    pool("ack", pool("lease_batch", 1).lease_id)
    train(pool, "u", "q", text="something else")
    pool = pool.restart(**archived(pool.folder.parent))  # which knows the tags again
    assert pool("apply", Delete(tag="private")).trajectories == ("t",)
    pool.later(0)
    assert len(waiting(pool)) == 1
    assert not pool.holds("a secret of somebody")


def test_a_deletion_by_user_takes_what_is_live_and_what_waits(pool):
    """The user is in a group's declaration or a trajectory's metadata; each goes with its group."""
    pool("apply", OpenGroup("p", 2, metadata={"user": "eve"}))
    for uid, user in (("t", {}), ("mate", {"user": "bob"})):
        pool("apply", OpenTrajectory(uid, "p", 0, user))
        pool.say(uid, "p", f"a secret of somebody, {uid}")
        pool("complete_trajectory", uid, 1.0)
    pool("ack", pool("lease_batch", 1).lease_id)
    pool("apply", OpenTrajectory("live", "q", 0, {"user_id": "eve"}))
    pool.say("live", "q", "a secret of somebody, live")
    train(pool, "u", "r", text="something else")
    pool = pool.restart(**archived(pool.folder.parent))  # which knows the users again
    assert sorted(pool("apply", Delete(user="eve")).trajectories) == ["live", "mate", "t"]
    pool.later(0)
    assert len(waiting(pool)) == 1
    assert not pool.holds("a secret of somebody")
    assert pool.holds("something else")


@pytest.mark.parametrize("end", ["ack", "too few are left"])
def test_siblings_of_one_deleted_while_leased_are_left_to_the_archive(pool, end):
    pool("apply", OpenGroup("p", 2, 1 if end == "ack" else 2))
    for uid in ("gone", "stays"):
        pool("apply", OpenTrajectory(uid, "p", 0, {"user": f"user of {uid}"}))
        pool.say(uid, "p", f"text of {uid}")
        pool("complete_trajectory", uid, 1.0)
    lease = pool("lease_batch", 2)
    assert pool("delete_trajectory", "gone").leased == ("gone",)
    pool("ack" if end == "ack" else "nack", lease.lease_id)
    for _ in range(2):
        pool.later(0)
        assert not pool.holds("of gone")
        assert pool("delete_trajectory", "gone").trajectories == (), "again, by who got no answer"
        assert pool("delete", user="user of gone").trajectories == ()
        assert pool.say("gone", "p", "a late one", 1) == "late"
        (departed,) = waiting(pool)
        kept = rows_at_places(pool.folder, departed.places)
        assert any(b"text of stays" in row.payload for row in kept)
        assert not any(b"of gone" in row.payload + row.head for row in kept)
        pool = pool.restart(**archived(pool.folder.parent))
    assert pool("delete_trajectory", "stays").trajectories == ("stays",)
    assert waiting(pool) == []


def test_a_group_whose_deleted_trajectory_cannot_be_read_is_not_archived(pool, monkeypatch):
    pool("apply", OpenGroup("p", 2))
    for uid in ("gone", "stays"):
        pool.say(uid, "p", f"text of {uid}")
        pool("complete_trajectory", uid, 1.0)
    lease = pool("lease_batch", 2)
    pool("delete_trajectory", "gone")

    def broken(rows):
        raise JournalCorruptError("a payload is damaged")

    with monkeypatch.context() as patched:
        patched.setattr(pool.journal, "read", broken)
        pool("ack", lease.lease_id)
    pool.later(0)
    assert pool.groups()["acked"] == 1
    assert waiting(pool) == []
    assert not pool.holds("text of gone")


def test_what_is_too_old_or_deleted_is_not_left_to_the_archive(pool):
    pool.say("t", "p", "a secret of somebody")
    pool("delete", "t")
    pool.later(0)
    assert waiting(pool) == []
    assert not pool.holds("a secret of somebody")


def test_a_deletion_costs_the_same_whatever_waits(tmp_path):
    calls = []
    for n in (5, 50):
        pool = JournaledPool(tmp_path / f"{n}", **archived(tmp_path))
        for i in range(n):
            train(pool, f"t{i}", f"p{i}")
        calls.append(0)

        def count(frame, event, argument):
            calls[-1] += 1

        for uid in ("t3", "unknown"):
            sys.setprofile(count)
            pool.pool.apply(DeleteTrajectory(uid), pool.now)
            sys.setprofile(None)
        assert len(waiting(pool)) == n - 1
        pool.journal.close()
    few, many = calls
    assert few == many


def test_what_comes_late_waits_too(pool):
    train(pool)
    pool.say("t", "p", "too late", index=1)
    assert pool("set_reward", "t", 0.5) == "late"
    with pytest.raises(TrajectoryClosedError):
        pool("complete_trajectory", "t", 0.25)
    late = [kinds(pool, d) for d in waiting(pool)[1:]]
    assert late == [["StepCameLate"], ["RewardCameLate"], ["RewardCameLate"]]
    pool = pool.restart(**archived(pool.folder.parent))
    assert [kinds(pool, d) for d in waiting(pool)[1:]] == late


def test_beyond_the_bound_groups_leave_unarchived_and_are_counted(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("stepwell.datapool.config.BACKLOG_BYTES", 5000)
    pool = JournaledPool(tmp_path / "pool", **archived(tmp_path))
    for i in range(20):
        train(pool, f"t{i}", f"p{i}", "x" * 50)
    assert 0 < len(waiting(pool)) < 20
    backlog = pool.pool.backlog
    assert backlog["waiting"] + backlog["unarchived"] == 20
    assert backlog["waiting_bytes"] <= 5000
    assert sum("not archived" in record.message for record in caplog.records) == 1
    pool.journal.close()


def test_what_waits_goes_when_the_archive_is_turned_off(pool):
    train(pool, text="a secret of somebody")
    pool = pool.restart(archive=ArchiveConfig(enabled=False))
    assert waiting(pool) == []
    pool.erase()
    assert not pool.holds("a secret of somebody")
    pool.journal.close()


def test_without_an_archive_nothing_waits(tmp_path):
    pool = JournaledPool(tmp_path / "pool")
    train(pool)
    pool.say("t", "p", "too late", index=1)
    assert waiting(pool) == []
    assert pool.journal.statistics()["rows_stored"] == 2  # tombstones of group and lease
    pool.journal.close()


def test_an_empty_backlog_releases_nothing():
    assert group_log.Departures(100, 0).release(5) == []
