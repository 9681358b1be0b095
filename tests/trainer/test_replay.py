"""Recordings of batches: what is written is what is read, in the order of training.

That a replay has the recorded run's losses to the bit is tested with real runs, in
tests/e2e/test_command.py.
"""

from __future__ import annotations

import asyncio
import io
from importlib import import_module
from pathlib import Path

import pytest
import torch

from stepwell.datapool.errors import DamagedFileError
from stepwell.datapool.sealed import sealed
from stepwell.datapool.types import Group
from stepwell.trainer.config import AlgorithmConfig, AsyncTrainingConfig
from stepwell.trainer.errors import CheckpointError
from stepwell.trainer.progress import Progress
from stepwell.trainer.recording import (
    load_recording,
    record_batch,
    recording_path,
    recordings,
    replay,
)
from stepwell.trainer.updater import Updater
from tests.builders import group
from tests.trainer.small_run import RecordingBackend, small_config, small_run


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
