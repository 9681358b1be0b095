"""Figures reach wandb and TensorBoard, secrets do not."""

from __future__ import annotations

import math
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stepwell.presets import load_config
from stepwell.trackers import build_trackers
from stepwell.trainer.metrics import MetricsWriter


def writer(folder: Path, *overrides: str) -> MetricsWriter:
    chosen = [f"run.dir={folder}", "logging.wandb=disabled", *overrides]
    return MetricsWriter(folder, build_trackers(folder, load_config("quickstart", chosen)))


def events(folder: Path) -> dict[tuple[str, int], Any]:
    """(tag, step) -> scalar or text of the event files, read record by record."""
    from tensorboardX.proto.event_pb2 import Event

    found: dict[tuple[str, int], Any] = {}
    for file in folder.glob("events.*"):
        data, at = file.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack("<Q", data[at : at + 8])
            event = Event()
            event.ParseFromString(data[at + 12 : at + 12 + length])
            at += length + 16
            for value in event.summary.value:
                text = value.tensor.string_val
                found[value.tag, event.step] = text[0].decode() if text else value.simple_value
    return found


def test_tensorboard_gets_every_number_and_the_tables(tmp_path: Path) -> None:
    with writer(tmp_path, "logging.tensorboard=true") as metrics:
        metrics.write({"step": 7, "loss": 0.5, "reward/mean": math.inf, "name": "x"})
        metrics.table("val/samples", ["prompt", "score"], [{"prompt": "1|2\n3", "score": 1.0}])
    found = events(tmp_path / "tensorboard")
    assert found["loss", 7] == 0.5
    assert "reward/mean" not in {tag for tag, _ in found}
    table = next(text for (tag, step), text in found.items() if tag.startswith("val/samples"))
    assert table.splitlines() == ["| prompt | score |", "| --- | --- |", "| 1\\|2 3 | 1.0 |"]


def test_wandb_is_offline_without_a_key_and_the_same_run_in_every_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    for step in (1, 2):
        with writer(tmp_path, "logging.wandb=auto") as metrics:
            metrics.write({"step": step, "loss": 0.5})
            metrics.table("val/samples", ["prompt"], [{"prompt": "1 + 1"}])
    runs = [p.name for p in (tmp_path / "wandb").glob("offline-run-*")]
    assert len({name.rpartition("-")[2] for name in runs}) == 1
    assert all((tmp_path / "wandb" / name).glob("*.wandb") for name in runs)


def test_wandb_is_told_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}
    run = SimpleNamespace(finish=lambda **_: None)
    fake = SimpleNamespace(init=lambda **given: told.update(given) or run, Settings=dict)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    reward = (
        "{function: remote, kwargs: {url: 'http://r', headers: {Authorization: Bearer s3cret}}}"
    )
    overrides = ("logging.wandb=offline", f"rollout.reward={reward}", "engine.env.HF_TOKEN=s3cret")
    with writer(tmp_path, *overrides):
        assert "s3cret" not in str(told)
    assert told["config"]["rollout"]["reward"]["kwargs"]["url"] == "http://r"
    assert told["config"]["data"]["train"]["kind"] == "reasoning_gym"
