"""Checkpoints are whole or absent, and old ones make room."""

from pathlib import Path

import pytest
import torch

from trainer.checkpoint import CheckpointStore
from trainer.errors import CheckpointError


def test_what_was_saved_is_what_is_loaded(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.save(10, {"weights": torch.arange(3), "pending": [{"question": "1 + 1"}]})
    state = store.load_latest()
    assert state is not None
    assert state["weights"].tolist() == [0, 1, 2]
    assert state["pending"] == [{"question": "1 + 1"}]


def test_the_newest_is_loaded_by_number_and_not_by_name(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for step in (9, 10, 100):
        store.save(step, {"step": step})
    assert store.load_latest() == {"step": 100}


def test_only_the_last_few_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3):
        store.save(step, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_2", "step_3"]


def test_an_interrupted_save_is_not_a_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.save(1, {"step": 1})
    (tmp_path / "step_2.tmp").mkdir()
    (tmp_path / "step_2.tmp" / "state.pt").write_bytes(b"half")
    assert store.load_latest() == {"step": 1}
    store.save(2, {"step": 2})
    assert store.load_latest() == {"step": 2}


def test_a_folder_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "not there", keep=1).load_latest() is None


def test_a_damaged_checkpoint_is_an_error_that_names_it_and_the_remedy(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    path = store.save(3, {})
    (path / "state.pt").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"step_3 cannot be read .* delete that folder"):
        store.load_latest()


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        CheckpointStore(tmp_path / "file", keep=1).save(1, {})
