"""The prompt source: which task is rolled out next.

A task's way::

    data set ──order of the epoch──► next() ──► rolled out, trained
                                       ▲  │
              put_back() ── buffer ────┘  └──► given up (aborted, evicted): put_back

What was put back comes first, in the order it came back; then the rest of the epoch. The
order of epoch e depends on `shuffle_seed` and e alone, so a source resumed from its `state_dict`
goes on exactly where it stood: with 5 tasks, 3 handed out and 1 put back, the next two are that one
and the fourth.

Does not own: what the data is (`tasks.py`), how many rollouts a task gets (`rollout.n`), what is
in flight (`Producer`), scoring (`rewards/`). Loads no torch.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import random
from array import array
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from stepwell.trainer.config import SourceConfig
from stepwell.trainer.data.tables import describe
from stepwell.trainer.data.tasks import Task, open_tasks
from stepwell.trainer.errors import DataError, DataExhaustedError

FREE = ("epochs", "skip_instance_ids", "shuffle_seed")
"""Keys of a source that may change while a run is stopped."""

HELD_OUT = 128
"""Tasks held out for validation where `data.val` names none."""


class PromptSource:
    """Hands out tasks epoch by epoch.

    Args:
        config: where the tasks come from.
        exclude: prompts (see `prompts`) never to hand out, e.g. those of the evaluation set:
        disjoint seeds can still draw the same problem.
        tokenizer_path: the model's folder; needed where `max_prompt_tokens` is set.

    Raises:
        DataError: the data cannot be read, or nothing is left after `exclude` and
        `skip_instance_ids`.
    """

    def __init__(
        self,
        config: SourceConfig,
        exclude: Collection[str] = (),
        tokenizer_path: Path | None = None,
    ) -> None:
        self._config = config
        self._skipped = _skipped(config)
        self._tasks = open_tasks(config, tokenizer_path)
        self._excluded = frozenset(exclude)
        self._epoch = 0
        self._position = 0
        self._shuffle_seed = config.shuffle_seed
        self._order = self._order_of(0)
        self._buffer: deque[Task] = deque()
        """Tasks that came back, oldest first."""
        if not any(self._wanted(task) for task in self._tasks):
            if not exclude:
                raise DataError(
                    f"{describe(config)} has no tasks left: all {len(self._tasks)} are in "
                    "skip_instance_ids; skip fewer"
                )
            raise DataError(
                f"data.train ({describe(config)}) has no tasks left: all {len(self._tasks)} are "
                "also in data.val (or in skip_instance_ids), and prompts of data.val are never "
                "trained; name other data in data.train or data.val"
            )

    def __len__(self) -> int:
        """Tasks in an epoch, excluded ones counted."""
        return len(self._tasks)

    @property
    def epoch(self) -> int:
        """Passes completed so far."""
        return self._epoch

    @property
    def waiting(self) -> int:
        """Tasks that came back and were not handed out again yet."""
        return len(self._buffer)

    def __iter__(self) -> Iterator[Task]:
        """Every task once, in the source's own order; moves nothing."""
        return filter(self._wanted, self._tasks)

    def all(self) -> list[Task]:
        """The same as a list."""
        return list(self)

    def prompts(self) -> frozenset[str]:
        """Return the tasks' prompts, as one comparable string each; for another source's
        `exclude`."""
        return frozenset(_prompt(task) for task in self._tasks)

    def hold_out(self) -> list[Task]:
        """Take a tenth of the tasks, at least one and at most `HELD_OUT`, out of what is handed
        out. Which ones depends on what they ask alone, not on their order or any seed.

        Raises:
            DataError: no task would be left to train on.
        """
        first: dict[bytes, int] = {}
        for index, task in enumerate(self._tasks):
            if self._wanted(task):
                first.setdefault(hashlib.sha256(_prompt(task).encode()).digest(), index)
        if len(first) < 2:
            raise DataError(
                f"data.train ({describe(self._config)}) has 1 prompt, and without data.val some "
                "are held out of it; add tasks with other prompts, or name some in data.val"
            )
        smallest = heapq.nsmallest(min(HELD_OUT, max(1, len(first) // 10)), first)
        held_out = [self._tasks[first[digest]] for digest in smallest]
        self._excluded |= {_prompt(task) for task in held_out}
        return held_out

    def next(self) -> Task:
        """The next task: one that was put back, or else the next of the epoch.

        Raises:
            DataExhaustedError: all `epochs` are done.
        """
        while self._buffer:
            if self._wanted(task := self._buffer.popleft()):
                return task
        while True:
            if self._position == len(self._order):
                self._epoch += 1
                self._position = 0
                self._order = self._order_of(self._epoch)
            if self._config.epochs is not None and self._epoch >= self._config.epochs:
                raise DataExhaustedError(
                    f"{describe(self._config)}: all {self._config.epochs} epochs of "
                    f"{len(self)} tasks are done; raise epochs, or set it to null"
                )
            task = self._tasks[self._order[self._position]]
            self._position += 1
            if self._wanted(task):
                return task

    def put_back(self, tasks: Iterable[Task]) -> None:
        """These were handed out but not trained: hand them out again, before anything new."""
        self._buffer += tasks

    def state_dict(self) -> dict[str, Any]:
        """JSON-like; goes into the checkpoint."""
        return {
            "source": self._identity(),
            "shuffle_seed": self._shuffle_seed,
            "epoch": self._epoch,
            "position": self._position,
            "buffer": list(self._buffer),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises:
            DataError: it was taken from another source, or the data has changed since.
        """
        mine, theirs = self._identity(), state["source"]
        if changed := sorted(k for k in mine.keys() | theirs if mine.get(k) != theirs.get(k)):
            was = ", ".join(f"{k} {theirs.get(k)!r} (now {mine.get(k)!r})" for k in changed)
            raise DataError(
                f"the saved state belongs to other data: {was}; restore the data section, or start "
                "a new run"
            )
        self._shuffle_seed = state["shuffle_seed"]  # its order goes on, whatever the seed is now
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._order_of(self._epoch)
        self._buffer = deque(state["buffer"])

    def _wanted(self, task: Task) -> bool:
        if task["instance_id"] in self._skipped:
            return False
        return not self._excluded or _prompt(task) not in self._excluded

    def _order_of(self, epoch: int) -> array[int]:
        order = array("Q", range(len(self._tasks)))
        if self._config.shuffle:
            random.Random(f"{self._shuffle_seed}/{epoch}").shuffle(order)
        return order

    def _identity(self) -> dict[str, Any]:
        """Settings that must not change between saving and loading; more epochs may be asked for
        and other tasks skipped."""
        return self._config.model_dump(mode="json", exclude=set(FREE)) | {"tasks": len(self._tasks)}


def _prompt(task: Task) -> str:
    """Prompt of a task for comparisons. One may be given in many environments, so there it goes
    with the environment: Harbor's folder, OpenEnv's `reset`, the place in a taskset of verifiers'.
    """
    asked = task["question"] if "question" in task else json.dumps(task["messages"], sort_keys=True)
    metadata = task["metadata"]
    if "harbor" in task:
        return f"{asked}\n{Path(task['harbor']['folder']).name}"
    if "reset" in metadata:
        return f"{asked}\n{json.dumps(metadata['reset'], sort_keys=True)}"
    if metadata.keys() >= {"taskset", "index"}:
        return f"{asked}\n{metadata['taskset']} {metadata['index']}"
    return asked


def _skipped(config: SourceConfig) -> frozenset[str]:
    ids = config.skip_instance_ids
    if not isinstance(ids, Path):
        return frozenset(ids)
    try:
        lines = ids.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise DataError(
            f"skip_instance_ids is {str(ids)!r}, which cannot be read ({e}); name a text file with "
            "one id a line, or list the ids"
        ) from e
    return frozenset(line.strip() for line in lines if line.strip())
