"""A batch with pictures from the pool to the optimizer: leased steps name them, the trainer reads
them, and what it trains on has the log-probs of a plain forward."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stepwell.backends.config import TorchBackendConfig
from stepwell.backends.errors import BatchError
from stepwell.backends.torch.backend import TorchBackend
from stepwell.datapool.pictures import Picture
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.remote.lease_keeper import LeaseKeeper
from stepwell.datapool.types import TRAIN, Step
from stepwell.trainer import batches as batches_module
from stepwell.trainer.batches import Batches
from stepwell.trainer.config import AlgorithmConfig, AsyncTrainingConfig
from stepwell.trainer.updater import Updater
from tests.backends.test_vision_training import Album, expected
from tests.vision_model import make_vision_model


@pytest.fixture
async def pool() -> AsyncIterator[DataPoolClient]:
    async with DataPoolClient.local() as client:
        yield client


async def leased(pool: DataPoolClient, album: Album, steps: list[Step]) -> tuple[LeaseKeeper, Any]:
    """The group of `steps`, stored with their pictures and leased; rewards 0, 1, 0, …"""
    by_uid: dict[str, list[Step]] = {}
    for step in steps:
        by_uid.setdefault(step.trajectory_uid, []).append(step)
    await pool.open_group("p", len(by_uid))
    for reward, (uid, own) in enumerate(by_uid.items()):
        last = len(own) - 1
        scored = [
            replace(s, reward=float(reward % 2), is_last=True) if i == last else s
            for i, s in enumerate(own)
        ]
        shown = {p.digest: album.pngs[p.digest] for s in own for p in s.pictures}
        if shown:
            await pool.put_pictures(uid, shown, prompt_uid="p")
        await pool.submit_steps(scored)
    keeper = LeaseKeeper(pool, TRAIN, 60.0)
    groups = await keeper.lease(1, timeout_s=10.0)
    assert groups is not None
    return keeper, groups[0]


def batches(keeper: LeaseKeeper) -> Batches:
    made = Batches.__new__(Batches)
    made.channels = (SimpleNamespace(name=TRAIN, keeper=keeper),)  # type: ignore[assignment]
    return made


async def test_a_leased_batch_is_trained_with_its_pictures(
    pool: DataPoolClient, tmp_path: Path
) -> None:
    folder = make_vision_model(tmp_path)
    album = Album(folder)
    steps = album.conversations()
    keeper, group = await leased(pool, album, steps)
    backend = TorchBackend(
        TorchBackendConfig.model_validate({"rows": "tree", "dtype": "float32"}), folder
    )
    updater = Updater(AlgorithmConfig(), AsyncTrainingConfig(), backend)
    pictures = await batches(keeper).pictures([group])
    assert pictures == album.pngs
    prepared = updater.prepare([group], pictures)
    served = [step for trajectory in group.trajectories for step in trajectory.steps]
    found = backend.compute_log_probs(prepared.batch)  # type: ignore[arg-type]  # its own
    assert (found - expected(folder, served, album.pngs)).abs().max() < 5e-6
    before = [p.detach().clone() for p in backend._model.parameters()]
    for mini in prepared.mini_batches:
        updater.step(prepared, mini.steps)
    changed = zip(before, backend._model.parameters(), strict=True)
    assert any(not torch.equal(old, new) for old, new in changed)
    await keeper.close()


async def test_more_pictures_than_fit_into_memory_are_an_error_with_a_remedy(
    pool: DataPoolClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    album = Album(make_vision_model(tmp_path))
    keeper, group = await leased(pool, album, album.conversations())
    monkeypatch.setattr(batches_module, "MAX_PICTURE_BYTES", 500)
    with pytest.raises(BatchError, match="more than 500 bytes; train on fewer prompts"):
        await batches(keeper).pictures([group])
    await keeper.close()


def test_a_picture_is_the_same_wherever_it_stands() -> None:
    """Rows compare pictures by digest and size, not by place."""
    one = Picture("a" * 64, 56, 56, 3, 4)
    assert one.shadow == one._replace(at=90).shadow
    assert one.shadow != one._replace(width=112, height=28).shadow
