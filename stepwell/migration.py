"""This module knows what other frameworks call our keys, so that an unknown key is answered with
ours.

The tables of `docs/migration.md` whose third column is `note` are the one place with the names; the
document travels in the package. Its other tables say what stands here for what other frameworks'
documents describe, and tests alone read them. A key is looked up as it stands, then by its last
part: `trainer.num_generations` is TRL's `num_generations`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_DOCUMENT = Path(__file__).resolve().parent / "migration.md"
_BAR = re.compile(r"(?<!\\)\|")


@dataclass(frozen=True)
class Row:
    """One name of a table."""

    source: str
    """The heading of its table, e.g. `verl`."""
    name: str
    ours: tuple[str, ...]
    """The keys that take its place; empty if there is none."""
    note: str

    @property
    def text(self) -> str:
        keys = " and ".join(self.ours)
        note = f" ({self.note.replace('`', '')})" if self.note else ""
        if not keys:
            return f"{self.source}'s {self.name} has no counterpart{note}"
        return f"it is {self.source}'s name for {keys}{note}"


def tables(text: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield each row of a page's tables: the heading above it, the cells of the table's head and
    its own cells. A bar within a cell is written as `\\|`."""
    source, head = "", list[str]()
    for line in text.splitlines():
        if line.startswith("## "):
            source = line.removeprefix("## ")
        if not line.startswith("|"):
            head = []
            continue
        cells = [cell.strip() for cell in _BAR.split(line.strip().strip("|"))]
        if not head:
            head = cells
        elif set(line) - set("|- :"):
            yield source, head, cells


@functools.cache
def rows() -> tuple[Row, ...]:
    """All rows of the tables of names."""
    return tuple(
        Row(source, name.strip("`"), tuple(re.findall("`([^`]+)`", ours)), note)
        for source, head, (name, ours, note) in tables(_DOCUMENT.read_text(encoding="utf-8"))
        if head[-1] == "note"
    )


def known_as(key: str) -> str | None:
    """What is known about `key`, a name that is none of ours; None if nothing is."""
    key = key.replace("-", "_")
    last = key.rpartition(".")[2]
    exact = [row for row in rows() if row.name == key]
    # a word such as `name` or `type` says nothing without the section around it
    like = (
        row for row in rows() if last == row.name or ("_" in last and row.name.endswith(f".{last}"))
    )
    return next((row.text for row in (*exact, *like)), None)
