"""This module has tasks that are all known when a data set is opened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


class ListedTasks:
    """Tasks in their own order; each is given as a copy. The place of a task is added to its
    instance_id (`name-3`) if others have it, too: their package or folders name them."""

    def __init__(self, tasks: Sequence[Mapping[str, Any]]) -> None:
        given = Counter(task["instance_id"] for task in tasks)
        self._tasks: list[dict[str, Any]] = []
        for place, task in enumerate(tasks):
            name = task["instance_id"]
            if given[name] > 1:
                while name in given:
                    name = f"{name}-{place}"
            self._tasks.append({**task, "instance_id": name})

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(self._tasks[index])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(dict, self._tasks)
