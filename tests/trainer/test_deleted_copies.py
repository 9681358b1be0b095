"""Deletion of trajectories while a trainer has them, and from its recordings and evaluations."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepwell.datapool.errors import DamagedFileError
from stepwell.datapool.files.copies import DELETED, ROLLOUTS, TrainerCopies
from stepwell.datapool.files.trained import read_trained, trained_steps
from stepwell.trainer.progress import Progress
from stepwell.trainer.recording import Recorder, load_recording, recordings
from stepwell.trainer.samples import read_samples, samples_path, write_evaluation
from tests.backends.test_vision_training import Album
from tests.trainer.small_run import RecordingBackend, small_config, small_run
from tests.trainer.test_replay import asked, shown
from tests.vision_model import make_vision_model


class Deleting(RecordingBackend):
    """Has somebody delete a trajectory of each batch while it is trained on."""

    def __init__(self, run: Path) -> None:
        super().__init__()
        self.run, self.deleted = run, list[str]()

    def train_step(self, batch: Any, *args: Any, **kwargs: Any) -> dict[str, float]:
        self.deleted.append(batch.steps[0].trajectory_uid)
        TrainerCopies(self.run).delete("trajectory", self.deleted[-1])
        return super().train_step(batch, *args, **kwargs)


async def test_a_trajectory_that_is_deleted_while_it_is_trained_on_is_written_nowhere(
    tmp_path: Path,
) -> None:
    keys = ("trainer.sample_groups=2", "trainer.rollout_samples=4", "trainer.total_steps=3")
    backend = Deleting(tmp_path)
    async with small_run(small_config(tmp_path, *keys), backend=backend) as run:
        await run.train()
        table = run.trainer.trained.take()
    assert len(backend.deleted) == 3
    lines = [json.loads(line) for line in (tmp_path / ROLLOUTS).read_text().splitlines()]
    kept = [
        t.trajectory.trajectory_uid
        for n in trained_steps(tmp_path)
        for t in read_trained(tmp_path, n)
    ]
    assert len(lines) == len(kept) == 3 * (4 - 1)
    assert len(table) == 4 - 1
    beside = {p for p in files_in(tmp_path) if p.name != DELETED}
    has_some = {p for p in beside if any(uid.encode() in p.read_bytes() for uid in backend.deleted)}
    assert has_some == set()


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


async def test_the_table_for_trackers_lacks_what_was_deleted_since(tmp_path: Path) -> None:
    keys = ("trainer.rollout_samples=4", "trainer.total_steps=1")
    async with small_run(small_config(tmp_path, *keys)) as run:
        await run.train()
        line = json.loads((tmp_path / ROLLOUTS).read_text().splitlines()[0])
        TrainerCopies(tmp_path).delete("trajectory", line["trajectory_uid"])
        assert len(run.trainer.trained.take()) == 3


async def test_tombstones_that_are_damaged_end_no_run_and_nothing_is_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / DELETED).write_text('{"kind":"trajectory","value":"mine"}\n')
    keys = ("trainer.rollout_samples=4", "trainer.total_steps=1")
    async with small_run(small_config(tmp_path, *keys)) as run:
        await run.train()
        assert run.trainer.trained.take() == []
    assert "the table of rollouts is left out" in caplog.text
    assert f"{tmp_path / DELETED} is damaged" in caplog.text
    assert not (tmp_path / ROLLOUTS).exists()


async def test_a_line_after_half_a_line_of_a_killed_trainer_is_whole(tmp_path: Path) -> None:
    (tmp_path / ROLLOUTS).write_bytes(b'{"step": 1}\n{"half a li')
    keys = ("trainer.rollout_samples=1", "trainer.total_steps=1")
    async with small_run(small_config(tmp_path, *keys)) as run:
        await run.train()
    first, second = (tmp_path / ROLLOUTS).read_text().splitlines()
    assert first == '{"step": 1}'
    assert json.loads(second)["step"] == 1


@pytest.mark.parametrize("name", ["recorded", "{rollout_id}.slime.pt"])
def test_recordings_of_what_is_deleted_go_whole_and_no_later_one_is_made(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    copies = TrainerCopies(tmp_path / "run")
    where = str(tmp_path / "elsewhere" / name)
    model = make_vision_model(tmp_path / "model")
    recorder = Recorder(where, model, 1, copies)
    for updates, uid in enumerate(("a", "mine", "b")):
        recorder.write([asked(uid), asked(f"with-{uid}")], Progress(updates=updates))
    mine = asked("mine").trajectories[0].trajectory_uid
    # Other uids, of which one ends it and one begins with it.
    copies.delete("trajectory", mine[1:], f"{mine}0")
    assert [n for n, _ in recordings(where)] == [0, 1, 2]
    Recorder(where, model, 1, copies)  # the next life notes the place once
    copies.delete("trajectory", mine)
    assert [n for n, _ in recordings(where)] == [0, 2]
    recorder.write([asked("mine"), asked("c")], Progress(updates=3))
    assert [n for n, _ in recordings(where)] == [0, 2]
    assert "the batch of optimizer step 4 is not recorded" in caplog.text
    recorder.write([asked("d")], Progress(updates=4))
    assert [n for n, _ in recordings(where)] == [0, 2, 4]


@pytest.mark.parametrize("name", ["recorded", "{rollout_id}.slime.pt"])
def test_a_damaged_recording_that_may_have_it_is_an_error(tmp_path: Path, name: str) -> None:
    copies = TrainerCopies(tmp_path / "run")
    where = str(tmp_path / "elsewhere" / name)
    recorder = Recorder(where, make_vision_model(tmp_path / "model"), 1, copies)
    recorder.write([asked("mine")], Progress())
    ((_, path),) = recordings(where)
    uid = asked("mine").trajectories[0].trajectory_uid
    data = path.read_bytes()
    path.write_bytes(data.replace(uid.encode(), b"x" * len(uid)))
    with pytest.raises(DamagedFileError, match=rf"{path.name} is damaged .* remove it"):
        copies.delete("trajectory", uid)
    path.unlink()
    assert copies.delete("trajectory", uid) == []


def test_pictures_of_recordings_go_once_no_other_recording_names_them(tmp_path: Path) -> None:
    album = Album(make_vision_model(tmp_path / "model"))
    copies = TrainerCopies(tmp_path / "run")
    recorder = Recorder(str(tmp_path / "recorded"), tmp_path / "model", 1, copies)
    one, two = shown(album)
    one = replace(one, trajectories=(replace(one.trajectories[0], trajectory_uid="first"),))
    named = [{p.digest for s in g.steps for p in s.pictures} for g in (one, two)]
    for updates, own in enumerate((one, two)):
        pngs = {digest: album.pngs[digest] for digest in named[updates]}
        recorder.write([own], Progress(updates=updates), pngs)
    copies.delete("trajectory", "first")
    assert not (tmp_path / "recorded" / "0.pt").exists()
    files = {path.stem for path in (tmp_path / "recorded" / "pictures").iterdir()}
    assert files == named[1]
    assert set(load_recording(tmp_path / "recorded" / "1.pt").pictures) == named[1]


def test_an_evaluation_is_written_without_what_was_deleted(tmp_path: Path) -> None:
    rows = [{"trajectory_uid": uid, "prompt_uid": "p", "reply": f"said by {uid}"} for uid in "ab"]
    TrainerCopies(tmp_path).delete("trajectory", "a")
    write_evaluation(tmp_path, 3, rows)
    assert read_samples(samples_path(tmp_path, 3)) == rows[1:]
