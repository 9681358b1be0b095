"""What README and docs point to is there: pages, sections, and what checks each claim."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    {ROOT / "README.md", ROOT / "CONTRIBUTING.md"}
    | {p for folder in ("docs", "examples", "benchmarks") for p in (ROOT / folder).rglob("*.md")}
)


def links(document: Path) -> Iterator[tuple[Path, str]]:
    """File and section of each link within the repository."""
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if "://" not in target:
            file, _, section = target.partition("#")
            yield (document.parent / file if file else document), section


def sections(document: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_link_leads_to_a_page_and_a_section(document: Path) -> None:
    for file, section in links(document):
        assert file.exists(), f"{document.name} links to {file}"
        if section:
            assert section in sections(file), f"{document.name} links to {file}#{section}"


def checks() -> list[str]:
    """What the table of claims names as checking them."""
    text = (ROOT / "README.md").read_text()
    table = re.search(r"^\| claim \| checked by \|\n(.*?)^$", text, re.M | re.S)
    assert table is not None
    return re.findall(r"`([^`]+)`", "\n".join(row.split("|")[2] for row in table[1].splitlines()))


def test_what_checks_each_claim_of_readme_exists() -> None:
    benches = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--help"], capture_output=True, text=True, check=True
    ).stdout
    makefile = (ROOT / "Makefile").read_text()
    for check in checks():
        match check.split():
            case ["make", target]:
                assert re.search(rf"^{target}:", makefile, re.M), check
            case ["python", "-m", "benchmarks", name, *_]:
                assert re.search(rf"\b{name}\b", benches), check
            case ["python", "-m", module, *_]:
                assert list(ROOT.glob(f"{module.replace('.', '/')}*")), check
            case [path]:
                assert (ROOT / path).exists(), check


def test_every_page_is_in_the_list_of_pages() -> None:
    listed = {file.resolve() for file, _ in links(ROOT / "docs" / "README.md")}
    pages = set((ROOT / "docs").rglob("*.md")) - {ROOT / "docs" / "README.md"}
    assert pages <= listed
