"""This module knows what other frameworks call our keys, so that an unknown key is answered with
ours.

The tables of `docs/migration.md` are the one place with the names; the document travels in the
package. A key is looked up as it stands, then by its last part: `trainer.num_generations` is TRL's
`num_generations`.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

_DOCUMENT = Path(__file__).resolve().parent / "migration.md"


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


@functools.cache
def rows() -> tuple[Row, ...]:
    """All rows of all tables."""
    found, source = [], ""
    for line in _DOCUMENT.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            source = line.removeprefix("## ")
        if line.startswith("| `"):
            name, ours, note = (cell.strip() for cell in line.strip("|").split("|"))
            found.append(Row(source, name.strip("`"), tuple(re.findall("`([^`]+)`", ours)), note))
    return tuple(found)


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
