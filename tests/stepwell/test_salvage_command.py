"""`stepwell data salvage`: what an operator does about groups whose ack may be lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepwell.cli.main import main
from tests.datapool.test_salvage import cut_before_the_ack, held


def told(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = main(["data", "salvage", *argv])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_doubtful_groups_are_named_and_released_or_dropped_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path)
    cut_before_the_ack(tmp_path)
    code, said = told(capsys, folder)
    assert code == 0
    assert "p2, p3, p4" in said
    code, said = told(capsys, folder, "--release", "nobody")
    assert code != 0
    assert "no doubtful group is called nobody" in said
    assert told(capsys, folder, "--release", "p3") == (0, "released in channel 'train': p3\n")
    assert told(capsys, folder, "--drop", "p4") == (0, "dropped in channel 'train': p4\n")
    assert held(tmp_path) == {f"p{k}" for k in (2, 3, *range(5, 12))}
    code, said = told(capsys, folder, "--drop", "--json")
    assert code == 0
    assert set(json.loads(said)["dropped"]["train"]) == {f"p{k}" for k in (2, *range(5, 12))}
    assert held(tmp_path) == {"p3"}
    assert told(capsys, folder, "--release") == (0, "no group is doubtful\n")
