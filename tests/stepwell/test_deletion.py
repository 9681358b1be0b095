"""`stepwell data delete` on a stopped run, and on files that were exported of it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from stepwell.cli.main import main
from stepwell.config.load import load_config
from stepwell.datapool import DataPoolClient, Step, Trajectory
from stepwell.datapool.files.export import read, read_rows, write
from stepwell.datapool.inspect.pages import ExportedTrajectory
from stepwell.datapool.ops import Mark, OpenGroup
from stepwell.run.folder import begin
from tests.datapool.conftest import JournaledPool
from tests.datapool.test_archive import SECRET, Archived


def say(uid: str, prompt_uid: str) -> Step:
    return Step(
        prompt_ids=list(f"said by {uid}".encode()),
        response_ids=[1],
        reward=1.0,
        trajectory_uid=uid,
        prompt_uid=prompt_uid,
        metadata={"text": f"said by {uid}"},
        is_last=True,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A journal of three groups; `mine` and `tagged` leased together with `mate`."""

    async def fill() -> None:
        async with DataPoolClient.local(folder=tmp_path / "pool") as pool:
            await pool.submit_steps([say(u, f"p-{u}") for u in ("mine", "tagged", "mate")])
            await pool.mark(trajectory_uid="tagged", tags=["ann"])
            await pool.lease_batch(batch_size=3, lease_s=1e6)
            await pool.submit_steps([say(u, f"p-{u}") for u in ("ready", "running")])

    asyncio.run(fill())
    return tmp_path / "pool"


def bytes_of(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.iterdir()))


@pytest.mark.parametrize(
    ("meant", "gone"), [("--trajectory=mine", "mine"), ("--tag=ann", "tagged")]
)
def test_a_stopped_run_has_no_byte_of_it_and_goes_on_without(
    folder: Path, meant: str, gone: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "delete", str(folder), meant]) == 0
    assert f"deleted 1 trajectories: {gone}" in capsys.readouterr().out
    assert f"said by {gone}".encode() not in bytes_of(folder)
    assert b"said by mate" in bytes_of(folder)

    async def look() -> None:
        async with DataPoolClient.local(folder=folder) as pool:
            groups = (await pool.get_statistics("train"))["groups"]
            assert (groups["leased"], groups["ready"]) == (0, 4), "nobody had the lease any more"
            assert groups["drop_reasons"] == {"deleted": 1}
            assert await pool.submit_step(say(gone, f"p-{gone}")) == "late"

    asyncio.run(look())
    assert main(["data", "delete", str(folder), meant]) == 0
    assert "deleted 0 trajectories" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("meant", "gone"),
    [("--trajectory=s", "s"), ("--tag=private", "s"), ("--user=eve", "s")],
)
def test_a_stopped_run_has_no_byte_of_it_in_any_file(
    tmp_path: Path, meant: str, gone: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the journal, in the archive, in what came late and waits, in the trainer's copies."""
    begin(load_config("quickstart", [f"run.dir={tmp_path}"]))
    run = Archived(tmp_path)
    run.pool("apply", OpenGroup("g", 2, metadata={"user": "eve"}))
    run.turn("s", f"Keep {SECRET}", "I do.", "g")
    run.pool("apply", Mark(trajectory_uid="s", marks={"tags": ["private"]}))
    run.pool("complete_trajectory", "s", 1.0)
    run.turn("sibling", f"And {SECRET}", "I do.", "g")
    run.pool("complete_trajectory", "sibling", 1.0)
    run.pool("ack", run.pool("lease_batch", 1).lease_id)
    run.train("kept", "common words")
    run.archive()
    run.turn("s", f"Late {SECRET}", "I do.", "g")
    run.pool.journal.close()
    for uid in ("s", "sibling", "kept"):
        line = {"trajectory_uid": uid, "prompt_uid": "p" if uid == "kept" else "g", "user": None}
        said = {"prompt": "common words" if uid == "kept" else f"Keep {SECRET}"}
        with (tmp_path / "rollouts.jsonl").open("a") as file:
            file.write(json.dumps(line | said) + "\n")
    assert main(["data", "delete", str(tmp_path), meant]) == 0
    told = capsys.readouterr().out
    assert f"copies of the trainer: deleted 2 trajectories: {gone}" in told
    assert "tables sent to trackers, and weights" in told
    everything = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert [p for p, data in everything.items() if SECRET.encode() in data] == []
    assert b"common words" in everything[tmp_path / "rollouts.jsonl"]
    assert run.reader.find("kept")


def test_what_left_pool_and_archive_is_deleted_from_the_trainers_copies_by_its_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(load_config("quickstart", [f"run.dir={tmp_path}", "pool.archive.enabled=false"]))
    JournaledPool(tmp_path / "pool").journal.close()
    lines = [
        {"trajectory_uid": uid, "prompt_uid": uid, "user": user, "prompt": f"said by {uid}"}
        for uid, user in (("a", "eve"), ("b", "bob"))
    ]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(e) + "\n" for e in lines))
    (tmp_path / "tensorboard").mkdir()
    assert main(["data", "delete", str(tmp_path), "--user", "eve"]) == 0
    assert (tmp_path / "rollouts.jsonl").read_text() == json.dumps(lines[1]) + "\n"
    assert f"tables of trackers ({tmp_path / 'tensorboard'})" in capsys.readouterr().out


def test_copies_of_damaged_journals_are_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.with_name("pool.damaged").mkdir()
    assert main(["data", "delete", str(folder), "--trajectory", "mine"]) == 0
    assert "pool.damaged: a copy of a damaged journal" in capsys.readouterr().out


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
@pytest.mark.parametrize("meant", ["--trajectory=mine", "--tag=ann"])
def test_exported_files_are_written_anew_without_the_rows(
    folder: Path, suffix: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path, other = folder.with_name(f"a{suffix}"), folder.with_name(f"b{suffix}")
    ours = [
        ExportedTrajectory(
            trajectory=Trajectory(uid, "p", (say(uid, "p"),)),
            marks={"tags": ["ann"]} if uid == "mine" else None,
        )
        for uid in ("before", "mine", "after")
    ]
    write(path, ours, source="the run")
    write(other, [ours[0]])
    untouched = other.read_bytes()
    assert main(["data", "delete", str(folder), meant, "--exports", str(path), str(other)]) == 0
    left = list(read(path))
    assert left == [ours[0], ours[2]]
    assert {row["provenance"]["source"] for _, row in read_rows(path)} == {"the run"}
    assert other.read_bytes() == untouched
    assert f"{path}: deleted 1 trajectories: mine" in capsys.readouterr().out
    if suffix == ".jsonl":
        assert b"said by mine" not in path.read_bytes()


def test_without_a_trajectory_or_a_tag_nothing_is_deleted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["data", "delete", str(folder)])
    assert "--trajectory --tag --user is required" in capsys.readouterr().err


def test_a_folder_without_a_journal_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "delete", str(tmp_path), "--tag", "ann"]) == 2
    assert "holds no journal" in capsys.readouterr().err


def test_a_stopped_run_that_kept_no_journal_loses_the_trainers_copies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(load_config("quickstart", [f"run.dir={tmp_path}", "pool.durability=none"]))
    line = {"trajectory_uid": "a", "prompt_uid": "a", "user": "eve", "prompt": f"Keep {SECRET}"}
    copies = tmp_path / "rollouts.jsonl"
    copies.write_text(json.dumps(line) + "\n")
    assert main(["data", "delete", str(tmp_path), "--user=eve"]) == 0
    assert "copies of the trainer: deleted 1 trajectories: a" in capsys.readouterr().out
    assert SECRET not in copies.read_text()


def test_a_stopped_run_whose_journal_has_gone_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(load_config("quickstart", [f"run.dir={tmp_path}"]))
    assert main(["data", "delete", str(tmp_path), "--user=eve"]) == 2
    assert "holds no journal" in capsys.readouterr().err
