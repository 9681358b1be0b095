"""`python -m benchmarks size`: how large the source is, by room and in the wheel.

    files, lines     of Python, blank lines and comments included; the wheel holds no test
    public names     classes, functions and constants of a module whose names have no underscore
                     in front, nor those of the modules around them
    other bytes      presets, templates and the quickstart's model

Configuration keys are leaves of `RunConfig`: what a user can set with `key=value`. The sections of
a choice by `kind` all count. None has a bound: issues that bound one say which.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.checks import BenchResult

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("stepwell", "datapool", "gateway", "backends", "trainer", "configs", "examples/quickstart")
"""Folders of the wheel."""
BESIDE = ("benchmarks", "tests", "examples")


async def run() -> BenchResult:
    from stepwell.config_keys import all_keys

    rooms = [_row(room) for room in ROOMS]
    columns = [column for column in rooms[0] if column != "room"]
    total = {column: sum(row[column] for row in rooms) for column in columns}
    return BenchResult(
        {},
        {
            "the wheel": [*rooms, {"room": "all", **total}],
            "outside the wheel": [_row(folder) for folder in BESIDE],
            "configuration keys": len(all_keys()),
        },
    )


def _row(folder: str) -> dict[str, Any]:
    files = list(files_of(ROOT / folder))
    modules = [path for path in files if path.suffix == ".py"]
    return {
        "room": folder,
        "files": len(modules),
        "lines": sum(len(path.read_bytes().splitlines()) for path in modules),
        "public names": sum(len(list(public_names(path))) for path in modules),
        "other bytes": sum(path.stat().st_size for path in files if path.suffix != ".py"),
    }


def files_of(folder: Path) -> Iterator[Path]:
    """Files of the source, links left out."""
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".pyc")


def public_names(path: Path) -> Iterator[str]:
    """Public names that a module defines; none if the module itself is private."""
    inside = path.relative_to(ROOT).with_suffix("").parts
    if any(part.startswith("_") and part != "__init__" for part in inside):
        return
    for node in ast.parse(path.read_bytes()).body:
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                names = [node.name]
            case ast.Assign():
                names = [n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)]
            case ast.AnnAssign(target=ast.Name(id=name)):
                names = [name]
            case _:
                continue
        yield from (name for name in names if not name.startswith("_"))
