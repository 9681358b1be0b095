"""`python -m tests.luck`: a turn that did not come to a file has not passed it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.luck import FAILED, one_turn

PASSES = "def test_nothing() -> None:\n    pass\n"


@pytest.mark.slow
def test_files_that_a_dead_lane_did_not_come_to_have_failed(tmp_path: Path) -> None:
    dies, after = tmp_path / "test_dies.py", tmp_path / "test_after.py"
    dies.write_text("import os\n\nos._exit(3)\n")
    after.write_text(PASSES)
    lines = one_turn([dies, after], 1)
    assert [line for line in lines if line.startswith(FAILED)] == [
        f"{FAILED}{dies}\n",
        f"{FAILED}{after}\n",
    ]
    assert any("a lane ended with 3" in line for line in lines)


@pytest.mark.slow
def test_a_lane_without_a_file_runs_none(tmp_path: Path) -> None:
    only = tmp_path / "test_only.py"
    only.write_text(PASSES)
    (line,) = one_turn([only], 2)
    assert line.endswith(f" s CPU {only}\n")
