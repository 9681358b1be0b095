"""The names of docs/metrics.md, to be held against what runs write."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"


def documented(*, always: bool) -> set[str]:
    """Names that every run has, or those that a run has by its settings (a last column that says
    which); `{…}` stands for one name or more."""
    rows = [line for line in _PAGE.read_text().splitlines() if line.startswith("| `")]
    found = [(line.split(" | ")[0], line.rstrip("|").split(" | ")[-1].strip()) for line in rows]
    return {
        name
        for names, condition in found
        for name in re.findall("`([^`]+)`", names)
        if always == (not condition)
    }


def undocumented(keys: Iterable[str]) -> set[str]:
    """Return the `keys` that no name of the page stands for."""
    patterns = [_pattern(n) for n in documented(always=True) | documented(always=False)]
    return {key for key in keys if not any(p.fullmatch(key) for p in patterns)}


def unseen(names: Iterable[str], keys: Iterable[str]) -> set[str]:
    """Return the `names` that stand for no key."""
    keys = set(keys)
    return {name for name in names if not any(map(_pattern(name).fullmatch, keys))}


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(".+".join(map(re.escape, re.split(r"\{[^}]+\}", name))))
