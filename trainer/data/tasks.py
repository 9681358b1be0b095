"""Data sets by index: rows of files and tables, and generated problems, as tasks.

    jsonl, parquet, huggingface    a row of a table (`tables.py`), read when its task is asked for
    reasoning_gym                  a problem, generated when its task is asked for
    harbor                         a task folder (`harbor.py`)

Opening a table reads every row once and keeps none: bad rows, ids that occur twice and over-long
prompts are found before training starts, and memory grows by some bytes a row only.

Owns: what a task is, and how rows become tasks. Does not own: where rows lie (`tables.py`), order,
epochs and what comes back (`source.py`), measuring and cutting prompts (`prompt_length.py`). Loads
no torch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from stepwell.trainer.config import (
    HarborSource,
    ReasoningGymSource,
    SourceConfig,
    TableConfig,
    VerifiersSource,
)
from stepwell.trainer.data.columns import lookup, refuse_media, refuse_placeholders
from stepwell.trainer.data.harbor import HarborTasks
from stepwell.trainer.data.images import with_pictures
from stepwell.trainer.data.prompt_length import PromptMeter
from stepwell.trainer.data.tables import Table, describe, open_table
from stepwell.trainer.data.verifiers import VerifiersTasks
from stepwell.trainer.errors import DataError
from stepwell.trainer.plain import plain_text
from stepwell.trainer.rewards.reasoning_gym import PARAMS

log = logging.getLogger(__name__)

Task: TypeAlias = dict[str, Any]
"""JSON-like: `instance_id`, `data_source`, `question` (a string) or `messages` (a list), `answer`
(None without a label), `metadata`; `tools` where the row has some, `truncated_tokens` where its
prompt was cut, `PARAMS` where its data set has some. What the agent gets, and the reward as its
`extra_info`."""


PICTURE = "(a picture)"


class TaskSet(Protocol):
    """A data set by index; `__iter__` gives every task in order."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Task: ...
    def __iter__(self) -> Iterator[Task]: ...


def without_pictures(task: Mapping[str, Any]) -> dict[str, Any]:
    """The task as the pool has it: with `PICTURE` in place of each picture."""
    messages = task.get("messages")
    if not messages:
        return dict(task)

    def named(part: Any) -> Any:
        is_picture = isinstance(part, dict) and part.get("type") == "image_url"
        return {**part, "image_url": {"url": PICTURE}} if is_picture else part

    return {
        **task,
        "messages": [
            {**m, "content": [named(p) for p in m["content"]]}
            if isinstance(m.get("content"), list)
            else m
            for m in messages
        ],
    }


def open_tasks(config: SourceConfig, tokenizer_path: Path | None = None) -> TaskSet:
    """The data set that `config` names.

    Args:
        tokenizer_path: the model's folder; prompts are measured with its chat template.

    Raises:
        DataError: it cannot be read, or a row is none; the message names the row.
    """
    if isinstance(config, ReasoningGymSource):
        return _ReasoningGym(config)
    if isinstance(config, HarborSource):
        return HarborTasks(config)
    if isinstance(config, VerifiersSource):
        return VerifiersTasks(config)
    meter = None
    if config.max_prompt_tokens is not None:
        if tokenizer_path is None:
            raise DataError(
                f"max_prompt_tokens is {config.max_prompt_tokens}, but there is no tokenizer to "
                "measure prompts with; give the model's folder as tokenizer_path"
            )
        meter = PromptMeter(tokenizer_path, config.apply_chat_template_kwargs)
    return _RowTasks(config, open_table(config, tokenizer_path), meter)


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
            next(iter(self._problems))  # some values are first looked at there
        # How reasoning_gym refuses a value, and how its code fails at one of another form.
        except (AssertionError, AttributeError, TypeError, ValueError) as e:
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
            **({PARAMS: self._config.params} if self._config.params else {}),
        }

    def __iter__(self) -> Iterator[Task]:
        return (self[i] for i in range(len(self)))


# ── rows to tasks ────────────────────────────────────────────────────────────────────────────────

SCAN_ROWS = 1000
"""Rows are checked, and their prompts measured, so many at a time."""


class _RowTasks:
    """The tasks of a table, the over-long ones left out or cut."""

    def __init__(self, config: TableConfig, table: Table, meter: PromptMeter | None) -> None:
        self._config = config
        self._table = table
        self._meter = meter
        self._kept: npt.NDArray[np.int64] | None = None
        """Rows that are tasks; None: all of them."""
        self._long: frozenset[int] = frozenset()
        """Rows whose prompts are cut."""
        ids = np.empty(len(table), np.uint64)
        lengths = np.zeros(len(table), np.int64)
        lacking: list[int] = []
        for begin, tasks in self._scan():
            ids[begin : begin + len(tasks)] = [_hash(task["instance_id"]) for task in tasks]
            lacking += (begin + i for i, task in enumerate(tasks) if _lacks_tools_kwargs(task))
            if meter is not None:
                lengths[begin : begin + len(tasks)] = self._count(meter, begin, tasks)
        self._check_ids(ids)
        if lacking:
            log.warning(
                "%d of %d rows say need_tools_kwargs and have no tools_kwargs; the first is %s",
                len(lacking),
                len(table),
                table.where(lacking[0]),
            )
        if config.max_prompt_tokens is not None:
            self._apply_limit(lengths, config.max_prompt_tokens)

    def __len__(self) -> int:
        return len(self._table) if self._kept is None else len(self._kept)

    def __getitem__(self, index: int) -> Task:
        row = index if self._kept is None else int(self._kept[index])
        task = self._task(row, self._table[row])
        return self._truncated(row, task) if row in self._long else task

    def __iter__(self) -> Iterator[Task]:
        return (self[i] for i in range(len(self)))

    def _scan(self) -> Iterator[tuple[int, list[Task]]]:
        """The tasks of all rows, `SCAN_ROWS` at a time, with the number of the first."""
        tasks = (self._task(i, row) for i, row in enumerate(self._table))
        for begin in range(0, len(self._table), SCAN_ROWS):
            yield begin, list(islice(tasks, SCAN_ROWS))

    def _count(self, meter: PromptMeter, begin: int, tasks: Sequence[Task]) -> list[int]:
        try:
            return meter.count(tasks)
        except DataError:
            for index, task in enumerate(tasks, begin):
                try:
                    meter.count([task])
                except DataError as e:
                    raise DataError(f"{self._table.where(index)}: {e}") from e
            raise

    def _check_ids(self, ids: npt.NDArray[np.uint64]) -> None:
        """No two tasks have one id."""
        order = ids.argsort(kind="stable")
        twice = np.flatnonzero(ids[order][1:] == ids[order][:-1])
        if len(twice):
            first, again = int(order[twice[0]]), int(order[twice[0] + 1])
            raise DataError(
                f"{self._table.where(again)}: instance_id {self[again]['instance_id']!r} is that "
                f"of {self._table.where(first)}; make it unique, or leave it out to have one "
                "assigned"
            )

    def _apply_limit(self, lengths: npt.NDArray[np.int64], limit: int) -> None:
        """Leave longer prompts out, cut them, or refuse the data."""
        long = np.flatnonzero(lengths > limit)
        if not len(long):
            return
        n, first, where = len(lengths), int(long[0]), describe(self._config)
        if self._config.filter_overlong_prompts:
            if len(long) == n:
                raise DataError(
                    f"{where}: all {n} prompts are longer than max_prompt_tokens = {limit} (the "
                    f"shortest has {lengths.min()}); raise it"
                )
            message = "%s: %d of %d prompts are left out, longer than max_prompt_tokens = %d (the"
            log.info(f"{message} longest has %d)", where, len(long), n, limit, lengths.max())
            self._kept = np.flatnonzero(lengths <= limit)
        elif self._config.truncation == "error":
            raise DataError(
                f"{self._table.where(first)}: the prompt has {lengths[first]} tokens, and "
                f"max_prompt_tokens is {limit} ({len(long)} of {n} are longer); raise it, set "
                "filter_overlong_prompts, or set truncation to left, right or middle"
            )
        else:
            self._long = frozenset(long.tolist())
            cut = 0
            for row in long.tolist():  # what cannot be cut shows now, not in the middle of a run
                cut += self._truncated(row, self._task(row, self._table[row]))["truncated_tokens"]
            message = "%s: %d of %d prompts are cut to max_prompt_tokens = %d (truncation: %s), %d"
            side = self._config.truncation
            log.warning(f"{message} tokens in all", where, len(long), n, limit, side, cut)

    def _truncated(self, row: int, task: Task) -> Task:
        """`task` of `row`, cut to the limit.

        Raises:
            DataError: it cannot be.
        """
        meter, limit = self._meter, self._config.max_prompt_tokens
        if meter is None or limit is None:
            return task
        try:
            return meter.truncate(task, limit, self._config.truncation)
        except DataError as e:
            raise DataError(f"{self._table.where(row)}: {e}") from e

    def _task(self, index: int, row: Mapping[str, Any]) -> Task:
        """Raises DataError: the row is no task."""
        config, where = self._config, self._table.where(index)
        prompt = lookup(row, config.prompt_key, _MISSING)
        if prompt is _MISSING:
            raise DataError(
                f"{where} has no {config.prompt_key!r}; set prompt_key to the key that holds the "
                f"question (it has {', '.join(row)})"
            )
        messages = isinstance(prompt, list) and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) for m in prompt
        )
        if not prompt or not (isinstance(prompt, str) or messages):
            raise DataError(
                f"{where}: {config.prompt_key} is {prompt!r:.80}; it is the question (a string) or "
                f"a list of messages (prompt_key names it; it has {', '.join(row)})"
            )
        try:
            (prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)).encode()
        except UnicodeEncodeError as e:
            raise DataError(
                f"{where}: {config.prompt_key} holds a lone surrogate ({e}), half a character, "
                "which no tokenizer takes; mend it, or leave the row out"
            ) from e
        refuse_media(row, where, config.image_key)
        if config.image_key is not None:
            folder = self._table.folder(index)
            prompt = with_pictures(prompt, lookup(row, config.image_key), folder, where)
        else:
            refuse_placeholders(prompt, config.prompt_key, where)
        if config.label_key is not None and lookup(row, config.label_key, _MISSING) is _MISSING:
            raise DataError(
                f"{where} has no {config.label_key}; name the answer's key in label_key, or set it "
                f"to null if there is none (it has {', '.join(row)})"
            )
        metadata = lookup(row, config.metadata_key) if config.metadata_key is not None else None
        metadata = _parsed(metadata) or {}
        if not isinstance(metadata, dict):
            raise DataError(f"{where}: {config.metadata_key} is {metadata!r:.80}; it is an object")
        instance_id = row.get("instance_id", metadata.get("instance_id"))
        label, number = self._table.name(index)
        if instance_id is None:
            instance_id = f"{slug(label)}-{number}"
        task = {
            "instance_id": plain_text(str(instance_id)),
            "data_source": config.data_source or row.get("data_source") or label,
            ("question" if isinstance(prompt, str) else "messages"): prompt,
            "answer": None if config.label_key is None else _known(lookup(row, config.label_key)),
            "metadata": metadata,
        }
        if config.tool_key is not None:
            tools = _parsed(lookup(row, config.tool_key)) or []
            if not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools):
                raise DataError(
                    f"{where}: {config.tool_key} is {tools!r:.80}; it is a list of tools, each an "
                    'object like {"type": "function", "function": {…}}, or its JSON text'
                )
            if tools:
                task["tools"] = tools
        return task


def _lacks_tools_kwargs(task: Task) -> bool:
    """Return true if it says, as verl's rows do, that its tools need arguments, and has none."""
    metadata = task["metadata"]
    return bool(metadata.get("need_tools_kwargs")) and not metadata.get("tools_kwargs")


def _known(label: Any) -> Any:
    """The label; None for NaN, as data frames write what is missing: no answer would match it."""
    return None if isinstance(label, float) and label != label else label


_MISSING = object()
_UNSAFE = re.compile(r"[^A-Za-z0-9._~-]+")


def slug(text: str) -> str:
    """`text` as it may stand in a URL and a file name; different texts may become one."""
    return _UNSAFE.sub("-", text).strip("-")


def _hash(instance_id: str) -> int:
    return int.from_bytes(
        hashlib.blake2b(instance_id.encode(errors="surrogatepass"), digest_size=8).digest(), "big"
    )


def _parsed(value: Any) -> Any:
    """Objects and lists may be given as their JSON text, as tables often do."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value
