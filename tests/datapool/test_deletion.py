"""Deleting where no pool runs; through the command line: `tests/stepwell/test_deletion.py`."""

from __future__ import annotations

import pytest

from stepwell.datapool import DataPoolClient, Trajectory
from stepwell.datapool.errors import JournalLockedError
from stepwell.datapool.files.deletion import delete_from_export, delete_from_journals
from stepwell.datapool.files.export import read, write
from stepwell.datapool.inspect.pages import ExportedTrajectory
from stepwell.datapool.ops import Delete


@pytest.mark.slow
async def test_a_stopped_pool_forgets_a_trajectory_and_what_has_a_tag(tmp_path, make_step):
    async with DataPoolClient.local(folder=tmp_path) as pool:
        for uid in ("a", "b", "c"):
            await pool.submit_step(make_step(uid, f"p-{uid}", is_last=True))
        await pool.mark(trajectory_uid="b", tags=["ann"])
        await pool.lease_batch(batch_size=3, lease_s=1e6)
        with pytest.raises(JournalLockedError):
            delete_from_journals(tmp_path, Delete("a"))
    assert delete_from_journals(tmp_path, Delete(tag="ann")).trajectories == ("b",)
    assert delete_from_journals(tmp_path, Delete("a")).trajectories == ("a",)
    assert delete_from_journals(tmp_path, Delete("a")).trajectories == ()
    async with DataPoolClient.local(folder=tmp_path) as pool:
        assert [s.trajectory_uid for s in await pool.fetch_batch() or ()] == ["c"]
        assert await pool.submit_step(make_step("a", "p-a", is_last=True)) == "late"


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_a_file_is_written_anew_without_a_trajectory_or_what_has_a_tag(tmp_path, suffix, make_step):
    def one(uid, **marks):
        return ExportedTrajectory(trajectory=Trajectory(uid, "p", (make_step(uid, "p"),)), **marks)

    path = tmp_path / f"x.{suffix}"
    kept = one("kept", marks={"tags": ["bob"]})
    write(
        path, [one("own", marks={"tags": ["ann"]}), kept, one("all", group_marks={"tags": ["ann"]})]
    )
    assert delete_from_export(path, Delete(tag="ann")) == ["own", "all"]
    assert list(read(path)) == [kept]
    before = path.stat().st_mtime_ns
    assert delete_from_export(path, Delete("own")) == []
    assert path.stat().st_mtime_ns == before
    assert delete_from_export(path, Delete("kept")) == ["kept"]
    assert list(read(path)) == []
