"""Pictures of what left the pool: archived with their trajectories, and bounded and deleted with
them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepwell.datapool import ChannelConfig
from stepwell.datapool.config import ArchiveConfig
from stepwell.datapool.errors import DamagedFileError
from stepwell.datapool.files.archive.archiver import MERGED
from stepwell.datapool.ops import OpenTrajectory, PutPictures
from tests.datapool.test_archive import Archived
from tests.datapool.test_picture_store import A, B, C, conversation, png, source, stored


class Run(Archived):
    def talk(self, uid: str, *digests: str, user: str = "ann") -> None:
        self.pool("apply", OpenTrajectory(uid, uid, 0, {"user": user}))
        self.pool("apply", PutPictures(uid, source(*digests)))
        steps = conversation(uid, *digests, prompt_uid=uid)
        assert self.pool("apply_steps", steps) == ["accepted"] * len(steps)

    def trained(self, uid: str, *digests: str) -> None:
        self.talk(uid, *digests)
        self.pool("complete_trajectory", uid, 1.0)
        self.pool("ack", self.pool("lease_batch", 1).lease_id)

    def pictures(self) -> list[str]:
        """Pictures beside the archive's files, of all of them."""
        found = (self.path / "archive" / "pictures").rglob("*")
        contents = sorted(path.read_bytes()[:-16] for path in found if path.is_file())
        return [name for name in (A, B, C) for content in contents if content == png(name)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.pool.journal.close()


def test_what_left_has_its_pictures_in_the_archive_and_no_longer_in_the_pool(run: Run) -> None:
    run.trained("t", A, B)
    assert sorted(stored(run.pool.folder).values()) == sorted([png(A), png(B)])  # it waits
    run.archive()
    run.pool.later(0)
    assert stored(run.pool.folder) == {}
    found = run.reader.read("t")
    assert found is not None
    assert dict(found.pictures) == source(A, B)
    assert [s.pictures for s in found.trajectory.steps] == [
        s.pictures for s in conversation("t", A, B)
    ]


def test_an_aborted_trajectory_and_one_that_came_late_are_archived_with_theirs(run: Run) -> None:
    run.talk("t", A)
    run.pool("abort_trajectory", "t", "broken")
    run.talk("u", B)
    run.pool("drop_group", "t", "because")
    run.pool("drop_group", "u", "because")
    late = conversation("u", B, C, prompt_uid="u")[1]
    assert run.pool("apply_steps", [late]) == ["late"]
    run.archive()
    for uid, digests in (("t", [A]), ("u", [B])):
        found = run.reader.read(uid)
        assert found is not None
        assert dict(found.pictures) == source(*digests)
    assert found.trajectory.steps[-1].pictures == late.pictures


def test_pictures_of_a_deleted_trajectory_are_erased_and_nobody_elses(run: Run) -> None:
    for uid, digests in (("t", (A, B)), ("u", (B, C))):
        run.trained(uid, *digests)
    run.archive()
    assert run.pictures() == [A, B, C]
    assert run.reader.delete("trajectory", "t") == ["t"]
    assert run.pictures() == [B, C]
    run.pool("delete", "t")
    assert png(A) not in run.bytes_of_everything()
    found = run.reader.read("u")
    assert found is not None
    assert dict(found.pictures) == source(B, C)


def test_the_bound_of_the_archive_counts_pictures(tmp_path: Path) -> None:
    small = len(png(A)) // 2
    config = ArchiveConfig(dir=tmp_path / "archive", max_gb=small / 1e9 + 4e-4)
    run = Run(tmp_path, archive=config)
    for i, digest in enumerate((A, B)):
        run.trained(f"t{i}", digest)
        run.archive()
    assert run.reader.counts()["all_bytes"] > 2 * len(png(A))
    gone = run.with_archive(lambda archive: archive.trim(time.time() + 1e9))
    assert len(gone) == 1
    assert run.pictures() == [B]
    run.pool.journal.close()


def test_pictures_that_wait_for_the_archiver_have_the_bound_of_the_archive(tmp_path: Path) -> None:
    config = ArchiveConfig(dir=tmp_path / "archive", max_gb=1.5 * len(png(A)) / 1e9)
    run = Run(tmp_path, archive=config)
    for uid, digest in (("t", A), ("u", B), ("v", A)):
        run.trained(uid, digest)
    assert run.pool.pool.backlog["unarchived"] == 1
    assert sorted(stored(run.pool.folder).values()) == [png(A)]
    run.archive()
    assert [run.reader.read(uid) is not None for uid in "tuv"] == [True, False, True]
    run.trained("w", B)
    assert run.pool.pool.backlog["unarchived"] == 1
    run.pool.journal.close()


def test_pictures_that_wait_for_the_archiver_cost_no_other_group_its_place(tmp_path: Path) -> None:
    limit = 2 * len(png(A)) + 2000
    run = Run(tmp_path, channels={"train": ChannelConfig(max_bytes=limit)})
    for uid, digest in (("t", A), ("u", B), ("v", C)):
        run.talk(uid, digest)
        run.pool("complete_trajectory", uid, 1.0)
    groups = run.pool.groups()
    assert (groups["ready"], groups["drop_reasons"]) == (2, {"max_bytes": 1})
    assert len(stored(run.pool.folder)) == 3, "one waits"
    run.archive()
    assert run.pool("lease_batch", 1, "train", 2) is not None
    run.pool.journal.close()


def test_merged_files_keep_their_pictures(run: Run) -> None:
    for i in range(MERGED):
        run.trained(f"t{i}", A, B)
        run.archive()
    assert len(run.pictures()) == 2 * MERGED
    run.with_archive(lambda archive: archive.merge())
    assert run.pictures() == [A, B]
    found = run.reader.read("t3")
    assert found is not None
    assert dict(found.pictures) == source(A, B)


def test_a_damaged_picture_is_one_error_and_pictures_of_no_file_are_removed(run: Run) -> None:
    run.trained("t", A)
    run.archive()
    (path,) = (p for p in (run.path / "archive" / "pictures").rglob("*") if p.is_file())
    path.write_bytes(b"x" + path.read_bytes()[1:])
    found = run.reader.read("t")
    assert found is not None
    with pytest.raises(DamagedFileError):
        found.pictures[A]
    (told,) = run.reader.check()
    assert path.name in told
    stray = path.parent.with_name(path.parent.name.replace("0-", "0-", 1)[:-1] + "9")
    stray.mkdir()
    (stray / path.name).write_bytes(b"of a file that was never written")
    run.with_archive(lambda archive: archive.reconcile())
    assert not stray.exists()
    assert path.exists()
