"""The queries of docs/archive.md run on an archive as they are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.datapool.test_archive import Archived

PAGE = Path("docs/archive.md")
QUERIES = re.findall(r"```(sql|python)\n(.*?)```", PAGE.read_text(), re.DOTALL)
RESULTS = ["hardest", "dropped", "turns", "by_version", "longest"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    folder = tmp_path / "runs" / "me"
    folder.mkdir(parents=True)
    run = Archived(folder)
    run.train("U", "easy", "yes", 1.0, version=3)
    run.train("V", "hard", "no", 0.0, version=4)
    run.turn("W", "never served", "maybe")
    run.pool("drop_group", "p-W", "stale")
    run.archive()
    monkeypatch.chdir(tmp_path)
    yield run
    run.pool.journal.close()


def test_the_page_has_five_queries():
    assert len(QUERIES) == len(RESULTS)


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("name", RESULTS)
def test_a_query_of_the_page_runs(name):
    language, query = QUERIES[RESULTS.index(name)]
    if language == "sql":
        duckdb = pytest.importorskip("duckdb")  # of the dev extra; an older environment lacks it
        table = duckdb.sql(query).df()
    else:
        found: dict[str, Any] = {}
        exec(query, found)
        table = found[name]
    expected = {
        "hardest": lambda: list(table["first_user"]) == ["hard", "easy"],
        "dropped": lambda: list(table["drop_reason"]) == ["stale"],
        "turns": lambda: "yes" in table["messages"][0],
        "by_version": lambda: list(table["reward"]["mean"]) == [1.0, 0.0],
        "longest": lambda: len(table) == 3 and abs(table["log_prob"].max() + 0.2) < 1e-6,
    }
    assert expected[name]()


@pytest.mark.usefixtures("run")
def test_datasets_reads_the_files_as_the_page_says(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import datasets

    files = str(tmp_path / "runs" / "me" / "archive" / "trajectories" / "*.parquet")
    options = {"split": "train", "cache_dir": str(tmp_path / "cache")}
    rows = datasets.load_dataset("parquet", data_files=files, **options)
    assert sorted(rows["trajectory_uid"]) == ["U", "V", "W"]
    assert all(row["steps"][0]["messages"] for row in rows)
