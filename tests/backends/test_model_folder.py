"""Recognition of the files of a model's folder that are its weights."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from stepwell.backends.errors import BackendConfigError
from stepwell.backends.model_folder import check_weights, count_parameters, weight_bytes

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def write_weights(file: Path, n: int) -> None:
    """A safetensors file of `n` parameters."""
    tensor = {"dtype": "F32", "shape": [n], "data_offsets": [0, 4 * n]}
    header = json.dumps({file.name: tensor}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4 * n))


def write_index(file: Path, *shards: str) -> None:
    file.write_text(json.dumps({"weight_map": dict(enumerate(shards))}))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for name in SHARDS:
        write_weights(tmp_path / name, 100)
    write_index(tmp_path / "model.safetensors.index.json", *SHARDS)
    return tmp_path


def test_weights_that_lie_there_a_second_time_are_counted_once(sharded: Path) -> None:
    """Mistral's folders have a second copy of the weights, `consolidated.safetensors`."""
    before = weight_bytes(sharded)
    write_weights(sharded / "consolidated.safetensors", 200)
    assert count_parameters(sharded) == 200
    assert weight_bytes(sharded) == before


def test_the_index_of_a_format_that_is_not_loaded_may_lack_its_files(sharded: Path) -> None:
    """A download from the hub brings every *.json, and no *.bin."""
    write_index(sharded / "pytorch_model.bin.index.json", "pytorch_model-00001-of-00001.bin")
    check_weights(sharded)
    (sharded / SHARDS[1]).unlink()
    with pytest.raises(BackendConfigError, match=f"lacks 1 of 2 files of weights .{SHARDS[1]}"):
        check_weights(sharded)


def test_shards_of_pytorch_are_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "pytorch_model-00001-of-00001.bin").write_bytes(bytes(200))
    write_index(tmp_path / "pytorch_model.bin.index.json", "pytorch_model-00001-of-00001.bin")
    check_weights(tmp_path)
    assert count_parameters(tmp_path) == 100
