"""This module has tasks that are all known when a data set is opened."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


class ListedTasks:
    """Tasks in their own order; each is given as a copy."""

    def __init__(self, tasks: Sequence[Mapping[str, Any]]) -> None:
        self._tasks = tasks

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(self._tasks[index])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(dict, self._tasks)
