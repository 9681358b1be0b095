"""Stepwell is on no index: what a text tells to install can be installed today."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("datapool", "gateway", "backends", "trainer", "stepwell", "configs", "docs", "examples")
TEXTS = sorted(
    {ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")}
    | {
        path
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".md", ".yaml") and not path.is_symlink()
    }
)
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_no_text_installs_stepwell_or_an_extra_of_it_by_name() -> None:
    by_name = re.compile(r"pip install(?: -\S+| \S+\.txt)* ['\"]?stepwell\b\S*")
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in TEXTS
        for match in by_name.finditer(re.sub(r'"?\n\s*#?"?', "", path.read_text()))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("file", "extra"),
    [
        ("backends/torch/lora.py", "lora"),
        ("backends/torch/optimizers.py", "8bit"),
        ("backends/verl/backend.py", "verl"),
        ("backends/engines/sglang.py", "sglang"),
    ],
)
def test_what_an_extra_needs_is_told_as_the_extra_has_it(file: str, extra: str) -> None:
    text = (ROOT / file).read_text()
    told = [f"'{requirement}'" in text for requirement in EXTRAS[extra]]
    assert all(told)
