"""Data and models at addresses: brought here once for each content, or refused in one line."""

from __future__ import annotations

import json
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from stepwell.config.load import load_config
from stepwell.trainer.config import HuggingFaceSource, JsonlSource, ParquetSource
from stepwell.trainer.data import PromptSource
from stepwell.trainer.errors import ConfigError, DataError

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "stepwell" / "files"


@pytest.fixture
def bucket(tmp_path: Path) -> Any:
    """An object store in this process, and a folder of it."""
    store = fsspec.filesystem("memory")
    yield store
    store.rm("/bucket", recursive=True)


def put(store: Any, path: str, *questions: str) -> None:
    rows = [{"question": q, "answer": "1"} for q in questions]
    store.pipe(f"/bucket/{path}", "".join(json.dumps(r) + "\n" for r in rows).encode())


def asked(path: str | list[str]) -> list[str]:
    source = JsonlSource.model_validate({"kind": "jsonl", "path": path, "shuffle": False})
    return [task["question"] for task in PromptSource(source).all()]


def test_files_folders_and_patterns_are_read(bucket: Any) -> None:
    put(bucket, "a/one.jsonl", "1")
    put(bucket, "a/two.jsonl", "2")
    put(bucket, "b/one.jsonl", "3")
    assert asked("memory://bucket/a/one.jsonl") == ["1"]
    assert asked("memory://bucket/a") == ["1", "2"]
    assert asked("memory://bucket/*/one.jsonl") == ["1", "3"]
    assert asked(["memory://bucket/b", "memory://bucket/a/two.jsonl"]) == ["3", "2"]


def test_a_copy_is_used_until_the_file_changes(bucket: Any, cache: Path) -> None:
    put(bucket, "t.jsonl", "old")
    assert asked("memory://bucket/t.jsonl") == asked("memory://bucket/t.jsonl") == ["old"]
    (copy,) = cache.glob("*/t.jsonl")
    copy.write_text(copy.read_text().replace("old", "kept"))
    assert asked("memory://bucket/t.jsonl") == ["kept"]
    put(bucket, "t.jsonl", "new")
    assert asked("memory://bucket/t.jsonl") == ["new"]


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_file_of_a_web_server_is_copied_again_when_it_changes(
    bucket: Any, cache: Path, tmp_path: Path
) -> None:
    put(bucket, "old", "old")
    put(bucket, "new", "another")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path)))
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        address = f"http://127.0.0.1:{server.server_port}/t.jsonl"
        bucket.get_file("/bucket/old", str(tmp_path / "t.jsonl"))
        assert asked(address) == asked(address) == ["old"]
        assert len([*cache.glob("*/t.jsonl")]) == 1
        bucket.get_file("/bucket/new", str(tmp_path / "t.jsonl"))
        assert asked(address) == ["another"]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_ids_and_messages_name_the_address_not_the_copy(bucket: Any) -> None:
    put(bucket, "a/t.jsonl", "1")
    put(bucket, "b/t.jsonl", "2")
    paths = ["memory://bucket/a/t.jsonl", "memory://bucket/b/t.jsonl"]
    source = JsonlSource.model_validate({"kind": "jsonl", "path": paths})
    ids = [task["instance_id"] for task in PromptSource(source).all()]
    assert ids == ["a-t-1", "b-t-1"]
    put(bucket, "bad.jsonl", "")
    with pytest.raises(DataError, match=r"^memory:/+bucket/bad\.jsonl:1: question is ''"):
        asked("memory://bucket/bad.jsonl")


def test_parquet_is_read(bucket: Any, tmp_path: Path) -> None:
    pq.write_table(pa.table({"question": ["1", "2"], "answer": ["1", "2"]}), tmp_path / "x.parquet")
    bucket.put_file(str(tmp_path / "x.parquet"), "/bucket/x.parquet")
    given = {"kind": "parquet", "path": "memory://bucket/x.parquet"}
    assert len(PromptSource(ParquetSource.model_validate(given))) == 2


def test_a_data_set_that_was_saved_there_is_read(bucket: Any) -> None:
    Dataset.from_dict({"question": ["1", "2"], "answer": ["1", "2"]}).save_to_disk(
        "memory://bucket/saved"
    )
    given = {"kind": "huggingface", "path": "memory://bucket/saved"}
    assert len(PromptSource(HuggingFaceSource.model_validate(given))) == 2


def test_a_model_is_brought_here_before_a_run(bucket: Any, cache: Path) -> None:
    bucket.put(f"{MODEL}/", "/bucket/model", recursive=True)
    config = load_config("quickstart", ["model.path=memory://bucket/model"])
    assert config.model.path.is_relative_to(cache)
    assert (config.model.path / "config.json").read_bytes() == (MODEL / "config.json").read_bytes()
    with pytest.raises(ConfigError, match=r"model\.path is 'memory://nowhere/m', where nothing is"):
        load_config("quickstart", ["model.path=memory://nowhere/m"])


def test_a_protocol_without_its_package_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(DataError, match=r"path is 's3://b/t\.jsonl', and s3:// needs .*s3fs"):
        asked("s3://b/t.jsonl")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("s4://b/t.jsonl", "s4:// is no protocol that fsspec knows; use one of s3"),
        ("memory://bucket/none.jsonl", "'memory://bucket/none.jsonl', where nothing is found"),
        ("memory://bucket/*.jsonl", "where nothing is found"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(path: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as refused:
        asked(path)
    assert len(str(refused.value).splitlines()) == 1
