"""Recordings of batches: what is written is what is read, in the order of training.

That a replay has the recorded run's losses to the bit is tested with real runs, in
tests/e2e/test_command.py.
"""

from __future__ import annotations

import asyncio
import io
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from stepwell.backends.config import TorchBackendConfig
from stepwell.backends.errors import BatchError
from stepwell.backends.pictures import digest_of
from stepwell.backends.torch.backend import TorchBackend
from stepwell.datapool.errors import DamagedFileError
from stepwell.datapool.files.copies import TrainerCopies
from stepwell.datapool.sealed import sealed
from stepwell.datapool.types import Group, Trajectory
from stepwell.trainer.config import AlgorithmConfig, AsyncTrainingConfig
from stepwell.trainer.errors import CheckpointError
from stepwell.trainer.progress import Progress
from stepwell.trainer.recording import (
    Recorder,
    load_recording,
    record_batch,
    recording_path,
    recordings,
    replay,
)
from stepwell.trainer.updater import Updater
from tests.backends.test_vision_training import Album
from tests.builders import group
from tests.trainer.small_run import RecordingBackend, small_config, small_run
from tests.vision_model import make_vision_model


def asked(uid: str) -> Group:
    metadata = {"task": {"question": "1 + 1"}}
    return group(0.1 + 0.2, uid=uid, n_rollouts=1, metadata=metadata, is_last=True)


@pytest.mark.parametrize("where", ["batches", "batches/rollout_{rollout_id}.pt"])
def test_batches_are_read_as_they_were_written_in_the_order_of_training(
    tmp_path: Path, where: str
) -> None:
    where = str(tmp_path / where)
    for updates in (0, 2, 10):
        groups = [asked(f"b{updates}"), asked(f"a{updates}")]
        record_batch(where, groups, Progress(updates=updates, version=1, published={0: 0, 1: 1}))
    found = recordings(where)
    assert found == [(n, recording_path(where, n)) for n in (0, 2, 10)]
    recording = load_recording(found[1][1])
    assert [g.prompt_uid for g in recording.groups] == ["b2", "a2"]
    assert recording.groups == (asked("b2"), asked("a2"))
    assert recording.progress == Progress(updates=2, version=1, published={0: 0, 1: 1})


def test_a_batch_that_a_resumed_run_does_again_replaces_the_lost_one(tmp_path: Path) -> None:
    for uid in ("lost", "again"):
        record_batch(str(tmp_path), [asked(uid)], Progress(updates=4))
    ((_, path),) = recordings(str(tmp_path))
    assert load_recording(path).groups[0].prompt_uid == "again"


def test_nothing_is_recorded_without_a_place(tmp_path: Path) -> None:
    async def train() -> None:
        async with small_run(small_config(tmp_path, "trainer.total_steps=1")) as run:
            await run.train()

    asyncio.run(train())
    assert [f for f in tmp_path.rglob("*.pt") if "checkpoints" not in f.parts] == []


def save(content: object, path: Path) -> None:
    file = io.BytesIO()
    torch.save(content, file)
    path.write_bytes(sealed(file.getvalue()))


def test_a_recording_that_is_not_there_or_damaged_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"load_debug_rollout_data is .* no batch"):
        recordings(str(tmp_path))
    (tmp_path / "0.pt").write_bytes(b"damaged")
    with pytest.raises(DamagedFileError, match=r"0\.pt is damaged .* record the run again"):
        load_recording(tmp_path / "0.pt")


@pytest.mark.parametrize("other", [None, 99])
def test_a_recording_of_another_format_is_refused_by_name(
    tmp_path: Path, other: int | None
) -> None:
    record_batch(str(tmp_path), [], Progress())
    path = tmp_path / "0.pt"
    content = torch.load(path, weights_only=False)
    content = {**content, "format": other} if other else {k: content[k] for k in ("groups",)}
    save(content, path)
    with pytest.raises(CheckpointError, match=rf"0\.pt has format {other or 1}, .* record"):
        load_recording(path)


def test_a_recording_of_classes_that_are_gone_is_refused_by_name(tmp_path: Path) -> None:
    class Gone:
        def __reduce__(self) -> tuple[object, ...]:
            return import_module, ("no_such_package.types",)

    path = tmp_path / "0.pt"
    save({"groups": Gone()}, path)
    with pytest.raises(CheckpointError, match=r"0\.pt cannot be read .*no_such_package"):
        load_recording(path)


def test_a_gap_in_the_recording_names_the_checkpoint_to_begin_from(tmp_path: Path) -> None:
    record_batch(str(tmp_path), [asked("a")], Progress(updates=6))
    updater = Updater(AlgorithmConfig(), AsyncTrainingConfig(), RecordingBackend())
    with pytest.raises(CheckpointError, match=r"set run\.resume to the checkpoint step_6"):
        next(replay(updater, recordings(str(tmp_path)), 1))


def test_a_replay_has_the_counters_and_versions_of_the_recorded_run(tmp_path: Path) -> None:
    for updates in (2, 3):
        published = {0: 0, **{v: v for v in range(1, updates + 1)}}
        progress = Progress(updates=updates, version=updates, published=published)
        record_batch(str(tmp_path), [asked(f"g{updates}")], progress)
    backend = RecordingBackend()
    updater = Updater(
        AlgorithmConfig(), AsyncTrainingConfig(trigger_parameter_sync_step=1), backend
    )
    updater.progress.become(Progress(updates=2, version=2, published={2: 2}))
    records = list(replay(updater, recordings(str(tmp_path)), 1))
    assert [(r["step"], r["policy_version"]) for r in records] == [(3, 3), (4, 4)]
    assert [s[0].prompt_uid for s in backend.steps] == ["g2", "g3"]
    assert records[0]["reward/mean"] == 0.1 + 0.2
    assert records[1]["staleness/mean"] == 3.0, "its step is of version 0"


# -- pictures ----------------------------------------------------------------------------------


def shown(album: Album) -> list[Group]:
    """Groups of scored conversations with pictures, two batches' worth."""
    groups = []
    for seed in (0, 1):
        own = [
            replace(
                step,
                prompt_uid=f"g{seed}",
                reward=0.0,
                rollout_log_probs=np.full(len(step.response_ids), -5.0, np.float32),
            )
            for step in album.conversations(seed)
        ]
        trajectories = []
        for i, uid in enumerate("abcd"):
            *earlier, last = (s for s in own if s.trajectory_uid == uid)
            last = replace(last, reward=float(i % 2), is_last=True)
            trajectories.append(Trajectory(uid, f"g{seed}", (*earlier, last)))
        groups.append(Group(f"g{seed}", tuple(trajectories), 4, {}))
    return groups


def vision_updater(folder: Path) -> Updater:
    config = TorchBackendConfig.model_validate(
        {"rows": "merged", "dtype": "float32", "lr": 1e-2, "micro_batch_tokens": 300}
    )
    torch.manual_seed(0)
    backend = TorchBackend(config, folder)
    return Updater(AlgorithmConfig(), AsyncTrainingConfig(), backend)


def test_a_replay_of_pictures_has_the_losses_of_the_run_to_the_bit(tmp_path: Path) -> None:
    folder = make_vision_model(tmp_path / "model")
    album = Album(folder)
    groups = shown(album)
    updater = vision_updater(folder)
    where = str(tmp_path / "recorded")
    metrics = []
    for own in groups:
        record_batch(where, [own], updater.progress, album.pngs)
        prepared = updater.prepare([own], album.pngs)
        metrics += [
            prepared.metrics | updater.step(prepared, mini.steps) for mini in prepared.mini_batches
        ]
        updater.progress.version += 1
        updater.progress.published[updater.progress.version] = updater.progress.updates
    files = sorted((tmp_path / "recorded" / "pictures").iterdir())
    assert [f.stem for f in files] == sorted(album.pngs), "each is there once"
    for file in files:
        assert digest_of(Image.open(file)) == file.stem
    again = list(replay(vision_updater(folder), recordings(where), 1))
    assert len(again) == len(metrics) == 2
    for record, wanted in zip(again, metrics, strict=True):
        exact = wanted.keys() - {"seconds"}
        assert {k: record[k] for k in exact} == {k: wanted[k] for k in exact}
    assert all(m["grad_norm"] > 0 for m in metrics)


def test_a_picture_of_a_recording_that_is_lost_or_damaged_is_an_error_with_its_name(
    tmp_path: Path,
) -> None:
    album = Album(make_vision_model(tmp_path / "model"))
    (group, _) = shown(album)
    record_batch(str(tmp_path), [group], Progress(), album.pngs)
    named = {p.digest for s in group.steps for p in s.pictures}
    assert set(load_recording(tmp_path / "0.pt").pictures) == named
    file = tmp_path / "pictures" / f"{min(named)}.png"
    content = bytearray(file.read_bytes())
    content[-40] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamagedFileError, match=rf"{file.name} is damaged .* record the run again"):
        load_recording(tmp_path / "0.pt")
    file.unlink()
    with pytest.raises(CheckpointError, match=r"0\.pt has a picture that is not in .* copy the"):
        load_recording(tmp_path / "0.pt")


def test_slimes_form_refuses_pictures_by_name(tmp_path: Path) -> None:
    folder = make_vision_model(tmp_path / "model")
    album = Album(folder)
    recorder = Recorder(str(tmp_path / "{rollout_id}.slime.pt"), folder, 1, TrainerCopies(tmp_path))
    with pytest.raises(BatchError, match=r"has pictures, .* name a folder in trainer"):
        recorder.write(shown(album), Progress(), album.pngs)
