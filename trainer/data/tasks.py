"""Data sets by index: rows of files and tables, and generated problems, as tasks.

    jsonl, parquet, huggingface    a row of a table (`tables.py`), read when its task is asked for
    reasoning_gym                  a problem, generated when its task is asked for

Opening a table reads every row once and keeps none: bad rows, ids that occur twice and over-long
prompts are found before training starts, and memory grows by some bytes a row only.

Owns: what a task is, and how rows become tasks. Does not own: where rows lie (`tables.py`), order,
epochs and what comes back (`source.py`), measuring and cutting prompts (`prompt_length.py`).
Loads no torch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from stepwell.trainer.config import (
    JsonlSource,
    ParquetSource,
    ReasoningGymSource,
    SourceConfig,
    TableConfig,
)
from stepwell.trainer.data.prompt_length import PromptMeter
from stepwell.trainer.data.tables import (
    SCAN_ROWS,
    UNREAD,
    JsonlTable,
    Table,
    data_url,
    describe,
    lookup,
    open_hugging_face,
    open_parquet,
    root_of,
)
from stepwell.trainer.errors import DataError

log = logging.getLogger(__name__)

Task: TypeAlias = dict[str, Any]
"""JSON-like: `instance_id`, `data_source`, `question` (a string) or `messages` (a list), `answer`
(None without a label), `metadata`; `tools` where the row has some, `truncated_tokens` where its
prompt was cut. What the agent gets, and the reward as its `extra_info`."""


class TaskSet(Protocol):
    """A data set by index; `__iter__` gives every task in order."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Task: ...
    def __iter__(self) -> Iterator[Task]: ...


def open_tasks(config: SourceConfig, tokenizer_path: Path | None = None) -> TaskSet:
    """The data set that `config` names.

    Args:
        tokenizer_path: the model's folder; prompts are measured with its chat template.

    Raises:
        DataError: it cannot be read, or a row is none; the message names the row.
    """
    if isinstance(config, ReasoningGymSource):
        return _ReasoningGym(config)
    meter = None
    if config.max_prompt_tokens is not None:
        if tokenizer_path is None:
            raise DataError(
                f"max_prompt_tokens is {config.max_prompt_tokens}, but there is no tokenizer to "
                "measure prompts with; give the model's folder as tokenizer_path"
            )
        meter = PromptMeter(tokenizer_path, config.apply_chat_template_kwargs)
    table: Table
    if isinstance(config, JsonlSource):
        table = JsonlTable(config)
    elif isinstance(config, ParquetSource):
        table = open_parquet(config)
    else:
        table = open_hugging_face(config)
    return _RowTasks(config, table, meter)


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


# ── rows to tasks ────────────────────────────────────────────────────────────────────────────────


class _RowTasks:
    """The tasks of a table, the over-long ones cut or left out."""

    def __init__(self, config: TableConfig, table: Table, meter: PromptMeter | None) -> None:
        self._config = config
        self._table = table
        self._meter = meter
        self._kept: npt.NDArray[np.int64] | None = None
        """Rows that are tasks; None: all of them."""
        self._lengths: npt.NDArray[np.int32] | None = None
        """Tokens of each row's prompt."""
        cached = self._cached_lengths()
        self._lengths = self._check_rows(count=meter is not None and cached is None)
        if cached is not None:
            self._lengths = cached
        limit = config.max_prompt_tokens
        if self._lengths is not None and limit is not None:
            self._apply_limit(self._lengths, limit)

    def __len__(self) -> int:
        return len(self._table) if self._kept is None else len(self._kept)

    def __getitem__(self, index: int) -> Task:
        row = index if self._kept is None else int(self._kept[index])
        task = self._task(row, self._table[row])
        limit = self._config.max_prompt_tokens
        if self._lengths is not None and limit is not None and self._lengths[row] > limit:
            return self._truncated(task, row, limit)
        return task

    def __iter__(self) -> Iterator[Task]:
        return (self[i] for i in range(len(self)))

    def _check_rows(self, *, count: bool) -> npt.NDArray[np.int32] | None:
        """Every row makes a task, and no two have one id; with `count`, the prompts' lengths."""
        ids = array("Q")
        lengths = array("i")
        batch: list[Task] = []
        for index, row in enumerate(self._table.scan()):
            task = self._task(index, row)
            ids.append(_hash(task["instance_id"]))
            if count:
                batch.append(task)
                if len(batch) == SCAN_ROWS:
                    lengths.extend(self._count(batch, index + 1))
                    batch.clear()
        if batch:
            lengths.extend(self._count(batch, len(ids)))
        sorted_ids = np.sort(np.frombuffer(ids, np.uint64)) if ids else np.empty(0, np.uint64)
        if twice := set(sorted_ids[1:][sorted_ids[1:] == sorted_ids[:-1]].tolist()):
            self._refuse_doubled(twice)
        if not count:
            return None
        counted = np.frombuffer(lengths, np.int32)
        self._cache_lengths(counted)
        return counted

    def _count(self, batch: Sequence[Task], end: int) -> list[int]:
        meter = self._measuring()
        try:
            return meter.count(batch)
        except DataError:
            for index, task in enumerate(batch, end - len(batch)):
                try:
                    meter.count([task])
                except DataError as e:
                    raise DataError(f"{self._table.where(index)}: {e}") from e
            raise

    def _measuring(self) -> PromptMeter:
        if self._meter is None:
            raise DataError(
                f"{describe(self._config)}: prompts are measured with max_prompt_tokens only"
            )
        return self._meter

    def _refuse_doubled(self, hashes: set[int]) -> None:
        counts: dict[str, int] = {}
        for index, row in enumerate(self._table.scan()):
            instance_id = self._task(index, row)["instance_id"]
            if _hash(instance_id) in hashes:
                counts[instance_id] = counts.get(instance_id, 0) + 1
        for instance_id, n in counts.items():
            if n > 1:
                raise DataError(
                    f"{describe(self._config)}: instance_id {instance_id!r} "
                    f"occurs {n} times; make it unique, or leave it out to have one assigned"
                )

    def _apply_limit(self, lengths: npt.NDArray[np.int32], limit: int) -> None:
        long = np.flatnonzero(lengths > limit)
        if not len(long):
            return
        where = describe(self._config)
        if self._config.filter_overlong_prompts:
            if len(long) == len(lengths):
                raise DataError(
                    f"{where}: all {len(lengths)} prompts are longer than max_prompt_tokens = "
                    f"{limit} (the shortest has {lengths.min()}); raise it"
                )
            log.info(
                "%s: %d of %d prompts are left out, longer than max_prompt_tokens = %d (the longest"
                " has %d)",
                *(where, len(long), len(lengths), limit, lengths.max()),
            )
            self._kept = np.flatnonzero(lengths <= limit)
        elif self._config.truncation == "error":
            raise DataError(
                f"{self._table.where(int(long[0]))}: the prompt has {lengths[long[0]]} tokens, and "
                f"max_prompt_tokens is {limit} ({len(long)} of {len(lengths)} are longer); raise "
                "it, set filter_overlong_prompts, or set truncation to left, right or middle"
            )

        else:
            for row in map(int, long):  # what cannot be cut shows now, not in the middle of a run
                self._truncated(self._task(row, self._table[row]), row, limit)

    def _truncated(self, task: Task, row: int, limit: int) -> Task:
        try:
            return self._measuring().truncate(task, limit, self._config.truncation)
        except DataError as e:
            raise DataError(f"{self._table.where(row)}: {e}") from e

    def _cached_lengths(self) -> npt.NDArray[np.int32] | None:
        if (path := self._cache_path()) is None:
            return None
        try:
            lengths = np.load(path, allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return None
        return lengths if lengths.shape == (len(self._table),) else None

    def _cache_lengths(self, lengths: npt.NDArray[np.int32]) -> None:
        if (path := self._cache_path()) is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_suffix(f".{id(lengths)}.tmp")
            with draft.open("wb") as file:
                np.save(file, lengths, allow_pickle=False)
            draft.replace(path)
        except OSError as e:
            log.warning("prompt lengths cannot be kept in %s (%s): measured again", path, e)

    def _cache_path(self) -> Path | None:
        if self._meter is None or self._meter.fingerprint is None or self._table.files is None:
            return None
        config = self._config
        stats = [(str(f.resolve()), f.stat()) for f in self._table.files]
        key = json.dumps(
            [
                [(name, s.st_size, s.st_mtime_ns) for name, s in stats],
                getattr(config, "split", None),
                [config.prompt_key, config.tool_key, config.multimodal_keys],
                self._meter.fingerprint,
            ]
        )
        folder = config.cache_dir or Path.home() / ".cache" / "stepwell"
        return folder / "prompt_lengths" / f"{hashlib.sha256(key.encode()).hexdigest()}.npy"

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
        label = self._table.label(index)
        if instance_id is None:
            instance_id = f"{slug(label)}-{self._table.number(index)}"
        if config.multimodal_keys:
            prompt = _with_media(prompt, row, config.multimodal_keys, where)
        task = {
            "instance_id": str(instance_id),
            "data_source": config.data_source or row.get("data_source") or label,
            ("question" if isinstance(prompt, str) else "messages"): prompt,
            "answer": lookup(row, config.label_key) if config.label_key is not None else None,
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
        except json.JSONDecodeError:
            return value
    return value


def _with_media(
    prompt: str | list[Any], row: Mapping[str, Any], keys: Mapping[Any, str], where: str
) -> str | list[Any]:
    """Placeholders in the text become content parts with the row's media, in order."""
    media: dict[str, list[Any] | None] = {}
    for kind, key in keys.items():
        value = None if row.get(root_of(key)) is UNREAD else lookup(row, key, [])
        media[kind] = value if value is None or isinstance(value, list) else [value]
    places = re.compile("|".join(f"<{kind}>" for kind in keys))
    found: dict[str, int] = dict.fromkeys(keys, 0)

    def parts_of(text: str) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        end = 0
        for match in places.finditer(text):
            kind = match[0][1:-1]
            if text[end : match.start()]:
                parts.append({"type": "text", "text": text[end : match.start()]})
            given = media[kind]
            url = _url(given[found[kind]]) if given and found[kind] < len(given) else None
            parts.append({"type": f"{kind}_url", f"{kind}_url": {"url": url}})
            found[kind] += 1
            end = match.end()
        if text[end:]:
            parts.append({"type": "text", "text": text[end:]})
        return parts

    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}] if places.search(prompt) else prompt
    if isinstance(prompt, list):
        prompt = [
            {**m, "content": parts_of(m["content"])}
            if isinstance(m.get("content"), str) and places.search(m["content"])
            else m
            for m in prompt
        ]
    for kind, n in found.items():
        items = media[kind]
        if items is not None and n != len(items):
            raise DataError(
                f"{where}: the text has {n} × <{kind}> and {keys[kind]} holds {len(items)}; "
                "write one placeholder for each"
            )
    return prompt


def _url(item: Any) -> Any:
    """A medium as the URL of a content part: bytes (or their `data:` URL), a path, a URL."""
    if isinstance(item, Mapping):
        item = item.get("bytes") or item.get("path") or item.get("url") or item.get("image")
    return data_url(item) if isinstance(item, bytes) else item
