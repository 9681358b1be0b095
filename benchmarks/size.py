"""`python -m benchmarks size`: how large the source is, by room and in the wheel.

    files, lines     of Python, blank lines and comments included; the wheel holds no test
    longest          lines of the longest file
    other bytes      presets, templates and the quickstart's model

Configuration keys are leaves of `RunConfig`: what a user can set with `key=value`. The sections of
a choice by `kind` all count. None has a bound: issues that bound one say which.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.checks import BenchResult

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("stepwell", "datapool", "gateway", "backends", "trainer", "configs", "examples/quickstart")
"""Folders of the wheel."""
BESIDE = ("benchmarks", "tests", "examples")


async def run() -> BenchResult:
    from stepwell.config.keys import all_keys

    rooms = [_row(room) for room in ROOMS]
    total = {name: sum(row[name] for row in rooms) for name in ("files", "lines", "other bytes")}
    return BenchResult(
        {},
        {
            "the wheel": [*rooms, {"room": "all", **total}],
            "outside the wheel": [_row(folder) for folder in BESIDE],
            "configuration keys": len(all_keys()),
        },
    )


def _row(folder: str) -> dict[str, Any]:
    """Files of the source, links left out."""
    files = [f for f in (ROOT / folder).rglob("*") if f.is_file() and f.suffix != ".pyc"]
    lines = [len(file.read_bytes().splitlines()) for file in files if file.suffix == ".py"]
    return {
        "room": folder,
        "files": len(lines),
        "lines": sum(lines),
        "longest": max(lines, default=0),
        "other bytes": sum(file.stat().st_size for file in files if file.suffix != ".py"),
    }
