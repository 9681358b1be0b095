"""The prompt source: which task is rolled out next.

A task's way::

    data set ──order of the epoch──► next() ──► rolled out, trained
                                       ▲  │
              put_back() ── buffer ────┘  └──► given up (aborted, evicted): put_back

What was put back comes first, in the order it came; then the rest of the epoch. The order of epoch
e depends on `shuffle_seed` and e alone, so a source resumed from its `state_dict` goes on exactly
where it stood: with 5 tasks, 3 handed out and 1 put back, the next two are that one and the fourth.

Does not own: how many rollouts a task gets (`rollout.n`), what is in flight (`Producer`), scoring
(`rewards/`). Loads no torch.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import fields
from typing import Any, Protocol, TypeAlias

from trainer.data_config import JsonlSource, ReasoningGymSource, SourceConfig
from trainer.errors import TrainerError

Task: TypeAlias = dict[str, Any]
"""JSON-like: `instance_id`, `data_source`, `question` (a string) or `messages` (a list), `answer`
(None without a label), `metadata`. What the agent gets, and the reward as its `extra_info`."""


class DataError(TrainerError, ValueError):
    """A data set cannot be read, or a saved state does not belong to it."""


class DataExhaustedError(TrainerError, LookupError):
    """All `epochs` of the source have been handed out."""


class PromptSource:
    """Hands out tasks epoch by epoch.

    Args:
        config: where the tasks come from.
        exclude: prompts (see `prompts`) never to hand out, e.g. those of the evaluation set:
        disjoint seeds can still draw the same problem.

    Raises:
        DataError: the data cannot be read, or nothing is left after `exclude`.
    """

    def __init__(self, config: SourceConfig, exclude: Collection[str] = ()) -> None:
        self._config = config
        self._tasks = _open(config)
        self._excluded = frozenset(exclude)
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)
        self._buffer: deque[Task] = deque()
        if not any(self._wanted(task) for task in self._tasks):
            raise DataError(
                f"{_describe(config)} has no tasks left: all {len(self._tasks)} are excluded; "
                "use other data for evaluation"
            )

    def __len__(self) -> int:
        """Tasks in an epoch, excluded ones counted."""
        return len(self._tasks)

    @property
    def epoch(self) -> int:
        """Passes completed so far."""
        return self._epoch

    def all(self) -> list[Task]:
        """Every task once, in the source's own order; moves nothing."""
        return [task for task in self._tasks if self._wanted(task)]

    def prompts(self) -> frozenset[str]:
        """What the tasks ask, as one comparable string each; for another source's `exclude`."""
        return frozenset(_prompt(task) for task in self._tasks)

    def next(self) -> Task:
        """The next task: one that was put back, or else the next of the epoch.

        Raises:
            DataExhaustedError: all `epochs` are done.
        """
        if self._buffer:
            return self._buffer.popleft()
        while True:
            if self._position == len(self._order):
                self._epoch += 1
                self._position = 0
                self._order = self._order_of(self._epoch)
            if self._config.epochs is not None and self._epoch >= self._config.epochs:
                raise DataExhaustedError(
                    f"{_describe(self._config)}: all {self._config.epochs} epochs of "
                    f"{len(self)} tasks are done; raise epochs, or set it to null"
                )
            task = self._tasks[self._order[self._position]]
            self._position += 1
            if self._wanted(task):
                return task

    def put_back(self, tasks: Iterable[Task]) -> None:
        """These were handed out but not trained: hand them out again, before anything new."""
        self._buffer.extend(tasks)

    def state_dict(self) -> dict[str, Any]:
        """JSON-like; goes into the checkpoint."""
        return {
            "source": _identity(self._config),
            "epoch": self._epoch,
            "position": self._position,
            "buffer": list(self._buffer),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises:
            DataError: it was taken from another source.
        """
        mine, theirs = _identity(self._config), state["source"]
        if changed := sorted(k for k in mine.keys() | theirs if mine.get(k) != theirs.get(k)):
            was = ", ".join(f"{k} {theirs.get(k)!r} (now {mine.get(k)!r})" for k in changed)
            raise DataError(
                f"the saved state belongs to other data: {was}; restore the data section, or start "
                "a new run"
            )
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._order_of(self._epoch)
        self._buffer = deque(state["buffer"])

    def _wanted(self, task: Task) -> bool:
        return not self._excluded or _prompt(task) not in self._excluded

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self._tasks)))
        if self._config.shuffle:
            random.Random(f"{self._config.shuffle_seed}/{epoch}").shuffle(order)
        return order


def _prompt(task: Task) -> str:
    return task["question"] if "question" in task else json.dumps(task["messages"], sort_keys=True)


def _describe(config: SourceConfig) -> str:
    return str(config.path) if isinstance(config, JsonlSource) else f"data set {config.dataset!r}"


def _identity(config: SourceConfig) -> dict[str, Any]:
    """What must not change between saving and loading; more epochs may be asked for."""
    return config.model_dump(mode="json", exclude={"epochs"})


# ── kinds ────────────────────────────────────────────────────────────────────────────────────────


class _Tasks(Protocol):
    """A data set by index; `__iter__` gives every task in order."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Task: ...
    def __iter__(self) -> Iterator[Task]: ...


def _open(config: SourceConfig) -> _Tasks:
    if isinstance(config, ReasoningGymSource):
        return _ReasoningGym(config)
    return _read_jsonl(config)


class _ReasoningGym:
    """Problems are generated when asked for: a million of them cost nothing up front."""

    def __init__(self, config: ReasoningGymSource) -> None:
        import reasoning_gym  # 1.3 s to import: only for those who use it
        from reasoning_gym.factory import DATASETS

        if config.dataset not in DATASETS:
            raise DataError(
                f"dataset is {config.dataset!r}, which reasoning_gym {reasoning_gym.__version__} "
                f"does not have; one of its {len(DATASETS)} is {sorted(DATASETS)[0]!r}"
            )
        known = {f.name for f in fields(DATASETS[config.dataset][1])} - {"seed", "size"}
        if unknown := sorted(config.params.keys() - known):
            raise DataError(
                f"params holds {', '.join(unknown)}, which {config.dataset} does not know; "
                f"known: {', '.join(sorted(known))}"
            )
        try:
            self._problems = reasoning_gym.create_dataset(
                config.dataset, seed=config.seed, size=config.size, **config.params
            )
        except (AssertionError, TypeError, ValueError) as e:  # how reasoning_gym refuses a value
            raise DataError(
                f"params is {config.params}, which {config.dataset} refuses: {e}"
            ) from e
        self._config = config

    def __len__(self) -> int:
        return self._config.size

    def __getitem__(self, index: int) -> Task:
        problem = self._problems[index]
        return {
            "instance_id": f"{self._config.dataset}-{self._config.seed + index}",
            "data_source": self._config.dataset,
            "question": problem["question"],
            "answer": problem["answer"],
            # Some metadata holds tuples, dates or fractions; a task is JSON.
            "metadata": json.loads(json.dumps(problem["metadata"], default=str)),
        }

    def __iter__(self) -> Iterator[Task]:
        return (self[i] for i in range(len(self)))


def _read_jsonl(config: JsonlSource) -> list[Task]:
    tasks: list[Task] = []
    try:
        with config.path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    tasks.append(_jsonl_task(config, line, number))
    except (OSError, UnicodeDecodeError) as e:
        raise DataError(
            f"path is {str(config.path)!r}, which cannot be read ({e}); name a UTF-8 JSONL file"
        ) from e
    if not tasks:
        raise DataError(f"{config.path} has no tasks; write one JSON object per line")
    counts: dict[str, int] = {}
    for task in tasks:
        counts[task["instance_id"]] = counts.get(task["instance_id"], 0) + 1
    if doubled := [i for i, n in counts.items() if n > 1]:
        raise DataError(
            f"{config.path}: instance_id {doubled[0]!r} occurs {counts[doubled[0]]} times; "
            "make it unique, or leave it out to have one assigned"
        )
    return tasks


def _jsonl_task(config: JsonlSource, line: str, number: int) -> Task:
    where = f"{config.path}:{number}"
    try:
        row = json.loads(line)
    except json.JSONDecodeError as e:
        raise DataError(f"{where} is no JSON ({e}); write one object per line") from e
    if not isinstance(row, dict):
        raise DataError(f"{where} holds a {type(row).__name__}; write one object per line")
    prompt = row.get(config.prompt_key)
    if not isinstance(prompt, str | list) or not prompt:
        raise DataError(
            f"{where}: {config.prompt_key} is {prompt!r:.80}; it is the question (a string) or a "
            f"list of messages (prompt_key names it; the line has {', '.join(row)})"
        )
    if config.label_key is not None and config.label_key not in row:
        raise DataError(
            f"{where} has no {config.label_key}; name the answer's key in label_key, or set it to "
            f"null if there is none (the line has {', '.join(row)})"
        )
    metadata = row.get(config.metadata_key, {}) if config.metadata_key is not None else {}
    if not isinstance(metadata, dict):
        raise DataError(f"{where}: {config.metadata_key} is {metadata!r:.80}; it is an object")
    instance_id = row.get("instance_id", metadata.get("instance_id"))
    return {
        "instance_id": str(instance_id)
        if instance_id is not None
        else f"{config.path.stem}-{number}",
        "data_source": config.data_source or row.get("data_source") or config.path.stem,
        ("question" if isinstance(prompt, str) else "messages"): prompt,
        "answer": row[config.label_key] if config.label_key is not None else None,
        "metadata": metadata,
    }
