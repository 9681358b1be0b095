"""This module knows what other frameworks call our keys, so that an unknown key is answered with
ours.

The tables of `docs/migration.md` whose third column is `note` are the one place with the names; the
document travels in the package. Its other tables say what stands here for what other frameworks'
documents describe, and tests alone read them. A key is looked up as it stands, then by its last
part: `trainer.num_generations` is TRL's `num_generations`.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stepwell.trainer.errors import ConfigError

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
        keys, note = " and ".join(self.ours), self.note.replace("`", "")
        if not keys:
            return f"{self.source}'s {self.name} has no counterpart: {note}"
        note = f" ({note})" if note else ""
        if self.ours == (self.name,):
            return f"it has the same name here{note}"
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
    """Return the tables' text about `key`, a name that is none of ours; None if they have none."""
    key = key.replace("-", "_")
    last = key.rpartition(".")[2]
    exact = [row for row in rows() if row.name == key]
    # a word such as `name` or `type` says nothing without the section around it
    like = (
        row
        for row in rows()
        if key not in row.ours
        and (last == row.name or ("_" in last and row.name.endswith(f".{last}")))
    )
    return next((row.text for row in (*exact, *like)), None)


def table_of(framework: str) -> dict[str, Row]:
    """Return a framework's names.

    Args:
        framework: heading of its table, in upper or lower case.

    Raises:
        ConfigError: there is no such table.
    """
    table = {row.name: row for row in rows() if row.source.lower() == framework.lower()}
    if not table:
        known = ", ".join(dict.fromkeys(row.source.lower() for row in rows()))
        raise ConfigError(f"--from is {framework!r}; give one of {known}")
    return table


def find(framework: str, key: str) -> list[Row]:
    """Return what a framework's table says of `key`: the row of that name, else the rows whose
    dotted names end in it.

    Args:
        key: as a key, a flag or an override: `data.seed`, `--rollout-seed`, `+data.seed=1`.

    Raises:
        ConfigError: there is no such table, or it has no such name; the closest ones are named.
    """
    table = table_of(framework)
    name = key.lstrip("+-").partition("=")[0].replace("-", "_")
    if name in table:
        return [table[name]]
    if found := [row for row in table.values() if row.name.endswith(f".{name}")]:
        return found
    # the last part alone is compared too: a guess often has another section
    last = {each.rpartition(".")[2]: each for each in table}
    near = difflib.get_close_matches(name, table)
    near += [last[n] for n in difflib.get_close_matches(name.rpartition(".")[2], last)]
    close = ", ".join(list(dict.fromkeys(near))[:3])
    hint = f"close to it: {close}" if close else f"stepwell config --from {framework} lists all"
    raise ConfigError(f"{key} is none of {framework}'s names that are known here; {hint}")
