"""Stepwell is on no index: what a text tells to install can be installed today."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from stepwell.backends.engines.routes import TESTED

ROOT = Path(__file__).parents[2]
ANSWERS = ROOT / "tests/backends/engines/doctor_sglang.json"
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
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


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
        ("backends/torch/optimizer.py", "8bit"),
        ("backends/verl/backend.py", "verl"),
        ("backends/engines/sglang.py", "sglang"),
    ],
)
def test_what_an_extra_needs_is_told_as_the_extra_has_it(file: str, extra: str) -> None:
    text = (ROOT / file).read_text()
    told = [f"'{requirement}'" in text for requirement in EXTRAS[extra]]
    assert all(told)


def test_the_extra_of_sglang_is_the_version_that_is_tested_and_installed_for_the_demo() -> None:
    assert EXTRAS["sglang"] == [f"sglang>={TESTED}"]
    assert f"\nsglang=={TESTED}\n" in (ROOT / "constraints-sglang.txt").read_text()
    assert json.loads(ANSWERS.read_text())["engine"] == f"sglang {TESTED}"


def test_no_text_installs_the_extra_of_sglang_under_the_tested_set_whose_pins_it_contradicts() -> (
    None
):
    found = [
        path for path in TEXTS if re.search(r"-c constraints\.txt '\.\[sglang", path.read_text())
    ]
    assert found == []


def test_the_quickstarts_client_over_aiohttp_comes_with_what_is_installed() -> None:
    assert any(each.startswith("openai[aiohttp]") for each in PROJECT["dependencies"])
