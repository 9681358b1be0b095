"""Samples of trajectories for people: what each optimizer step was trained on, and what the
rollouts of an evaluation were.

    optimizer step 12 ──► one sample ──► RUN/trained/000000000012.jsonl   tokens with their columns
                                    └──► RUN/rollouts.jsonl               as text, a line each
                                             └──► trackers' table `train/samples`: its newest rows
    evaluation of step 20 ─────────────► RUN/validation/step_20.jsonl     as text, a line each
                                             └──► trackers' table of it

    {"step": 12, "version": 2, "prompt": "…", "response": "…", "reward": 1.0, "advantage": 0.9,
     "reward_extra_info": {"acc": true}, …}

The sample of an optimizer step has `trainer.sample_groups` whole groups, and
`trainer.rollout_samples` trajectories that are spread over all groups; the latter are the lines of
`rollouts.jsonl`. A step that a resumed run does again stands there twice; the later lines count.

Each view has its bound: `trained/` `SAMPLE_TOKENS` a step and `trainer.sample_mb` in all;
`rollouts.jsonl` `MAX_CHARS` a text and `MAX_BYTES` before it becomes `rollouts.old.jsonl`; the
table `TABLE_ROWS` rows; an evaluation has as many rows as `data.val` times `validation.n`. With
`rollout_samples: null` every trajectory is a line, whole, and none is ever removed (verl's
`rollout_data_dir`).

Does not own the file of tokens (`datapool/files/trained.py`), or recordings, which are of batches
before they are trained (`recording.py`).
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from stepwell.backends.base import TokenBatch
from stepwell.datapool.errors import DamagedFileError
from stepwell.datapool.files.copies import OLD, ROLLOUTS, VALIDATION, TrainerCopies
from stepwell.datapool.files.trained import (
    TrainedTrajectory,
    trained_path,
    trained_steps,
    write_trained,
)
from stepwell.datapool.sealed import damaged, end_of_lines, read_lines, sealed, write_durably
from stepwell.datapool.types import (
    Group,
    Step,
    Trajectory,
    last_seen,
    mapping_in,
    user_of,
)
from stepwell.trainer.errors import shown
from stepwell.trainer.plain import plain
from stepwell.trainer.scoring import EXTRA
from stepwell.trainer.tokenizers import tokenizer_at
from stepwell.trainer.trajectory_metrics import task_of, versions_of

log = logging.getLogger(__name__)

SAMPLE_TOKENS = 65_536
"""Response tokens of one optimizer step in `trained/`, unless its first trajectory has more."""
TRAINED_COLUMNS = ("advantages", "weights", "prox_log_probs", "ref_log_probs", "values")
MAX_CHARS = 20_000
MAX_BYTES = 64 << 20
TRAIN_TABLE = "train/samples"
"""Key of the table of optimizer steps that trackers are given."""
TRAIN_TABLE_COLUMNS = (
    "step",
    "version",
    "instance_id",
    "prompt",
    "response",
    "answer",
    "reward",
    "advantage",
)
TABLE_ROWS = 8
TABLE_CHARS = 2_000
VALIDATION_TABLE_COLUMNS = (
    "step",
    "version",
    "data_source",
    "instance_id",
    "question",
    "answer",
    "reply",
    "reward",
    "n_steps",
    "trajectory_uid",
)
"""Columns of the table of an evaluation that trackers are given, in order."""
VALIDATION_TABLE_ROWS = 64
"""Its rows; the file has all of them."""


class Trained:
    """Writes what one run trains on; see the module's docstring.

    Args:
        folder: of the run.
        tokenizer_path: turns tokens into their text.
        sample_groups: whole groups of each optimizer step in `trained/`; 0: no such folder.
        sample_mb: MiB of `trained/`, beyond which the oldest files go.
        rollout_samples: trajectories of each optimizer step in `rollouts.jsonl`; None: all, without
            bounds.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer_path: Path,
        *,
        sample_groups: int,
        sample_mb: int,
        rollout_samples: int | None,
    ) -> None:
        self._folder = folder
        self._copies = TrainerCopies(folder)
        self._tokenizer_path = tokenizer_path
        self._groups = sample_groups
        self._most = sample_mb << 20
        self._lines = rollout_samples
        self._newest: list[dict[str, Any]] = []

    def write(
        self,
        step: int,
        groups: Sequence[Group],
        batch: Any = None,
        *,
        version: int = 0,
        again: bool = False,
    ) -> None:
        """Write the sample of optimizer step `step`, which was on `groups`, without what somebody
        has deleted. A disk that takes nothing, or metadata that JSON cannot hold, end no run: this
        is for people.

        Args:
            batch: `groups` with their columns; None, or a trainer's own: they have no columns.
            version: the policy version that engines serve.
            again: a later epoch of the same groups, which has no new lines in `rollouts.jsonl`.
        """
        all_of = [(g, t) for g in groups for t in g.trajectories]
        n = len(all_of) if self._lines is None else min(self._lines, len(all_of))
        spread = sorted({i * len(all_of) // n for i in range(n)})
        table = batch if isinstance(batch, TokenBatch) else None
        where: dict[tuple[str, int], int] = {}
        if table is not None:
            where = {(s.trajectory_uid, s.step_index): i for i, s in enumerate(table.steps)}

        def trained(i: int) -> TrainedTrajectory:
            group, trajectory = all_of[i]
            columns = tuple(_columns(table, where, s) for s in trajectory.steps)
            user = user_of(trajectory.metadata, group.metadata)
            return TrainedTrajectory(trajectory, columns, user)

        if not again:
            rows = [{"step": step, **self._row(*all_of[i], trained(i))} for i in spread]
            self._append(step, rows)
        if table is None or not self._groups:
            return
        drawn = random.Random(step).sample(range(len(groups)), min(self._groups, len(groups)))
        whole = {groups[i].prompt_uid for i in drawn}
        chosen = [i for i, (g, _) in enumerate(all_of) if g.prompt_uid in whole]
        others = [] if self._lines is None else [i for i in spread if i not in set(chosen)]
        rewards = {
            g.prompt_uid: [t.reward for t in g.trajectories if t.reward is not None] for g in groups
        }
        about = {"policy_version": version, "groups": len(groups), "rewards": rewards}
        within = list(_bounded(map(trained, [*chosen, *others])))
        try:
            with self._copies.writing() as deleted:
                kept = [t for t in within if t.trajectory.trajectory_uid not in deleted]
                write_trained(self._folder, step, about, kept, self._most)
        except (OSError, TypeError, DamagedFileError) as e:
            log.warning("the sample of optimizer step %d is not written: %s", step, e)

    def resume(self, durable: int) -> None:
        """Remove the files of optimizer steps after `durable`, the newest checkpoint's: the groups
        of these were not acked, and are trained again by other steps."""
        try:
            with self._copies.writing():
                for step in trained_steps(self._folder):
                    if step > durable:
                        trained_path(self._folder, step).unlink(missing_ok=True)
        except (OSError, DamagedFileError) as e:  # as in `write`: this ends no run
            log.warning("samples of steps that are trained again are not removed: %s", e)

    def take(self) -> list[dict[str, Any]]:
        """Return the lines of the newest optimizer step, once: a table for trackers, of
        `TRAIN_TABLE_COLUMNS`, with at most `TABLE_ROWS` rows and `TABLE_CHARS` characters in a
        cell. Without what was deleted since; none where that cannot be read."""
        rows, self._newest = self._newest, []
        try:
            deleted = self._copies.deleted() if rows else frozenset()
        except (OSError, DamagedFileError) as e:  # as in `write`: this ends no run
            log.warning("the table of rollouts is left out: %s", e)
            return []
        rows = [row for row in rows if row["trajectory_uid"] not in deleted][:TABLE_ROWS]
        return [{column: _shown(row[column]) for column in TRAIN_TABLE_COLUMNS} for row in rows]

    def _append(self, step: int, rows: list[dict[str, Any]]) -> None:
        self._newest = rows
        if not rows:
            return
        path = self._folder / ROLLOUTS
        try:
            with self._copies.writing() as deleted:
                bounded = self._lines is not None
                if bounded and path.is_file() and path.stat().st_size > MAX_BYTES:
                    path.replace(self._folder / OLD)
                with path.open("a+b") as file:
                    file.truncate(end_of_lines(file))  # half a line of a trainer that was killed
                    file.write(as_lines(r for r in rows if r["trajectory_uid"] not in deleted))
        except (OSError, TypeError, DamagedFileError) as e:
            log.warning("the rollouts of optimizer step %d are not written: %s", step, e)

    def _row(
        self, group: Group, trajectory: Trajectory, trained: TrainedTrajectory
    ) -> dict[str, Any]:
        prompt = trajectory.steps[0].prompt_ids
        last = trajectory.steps[last_seen(trajectory.steps)]
        most = None if self._lines is None else MAX_CHARS
        whole = last.token_ids
        if np.array_equal(whole[: len(prompt)], prompt):  # with what tools wrote in between
            response = self._text(whole[len(prompt) :])
        else:  # the history was rewritten on the way
            response = "\n\n".join(self._text(s.response_ids) for s in trajectory.steps)
        return {
            **_about(group, trajectory, most),
            "version": min(versions_of(trajectory)),
            "prompt": _cut(self._text(prompt), most),
            "response": _cut(response, most),
            "advantage": trained.mean("advantages"),
            "finish_reason": last.finish_reason,
        }

    def _text(self, ids: Any) -> str:
        return str(tokenizer_at(self._tokenizer_path).decode(ids))


def _about(group: Group, trajectory: Trajectory, most: int | None = None) -> dict[str, Any]:
    """Keys that the line of any trajectory has; texts of at most `most` characters."""
    task = task_of(group)
    extra = mapping_in(trajectory.metadata, EXTRA)
    return {
        "data_source": task.get("data_source"),
        "instance_id": task.get("instance_id"),
        "trajectory_uid": trajectory.trajectory_uid,
        "prompt_uid": group.prompt_uid,
        "user": user_of(trajectory.metadata, group.metadata),
        "answer": _short(task.get("answer"), most),
        "reward": trajectory.reward,
        "reward_extra_info": {key: _short(value, most) for key, value in extra.items()},
        "n_steps": len(trajectory.steps),
    }


def _bounded(trained: Iterator[TrainedTrajectory]) -> Iterator[TrainedTrajectory]:
    n_tokens = 0
    for each in trained:
        n_tokens += sum(len(step.response_ids) for step in each.trajectory.steps)
        yield each
        if n_tokens >= SAMPLE_TOKENS:
            return


def _columns(
    batch: TokenBatch | None, where: Mapping[tuple[str, int], int], step: Step
) -> dict[str, Any]:
    i = where.get((step.trajectory_uid, step.step_index))
    if batch is None or i is None:  # left out of the batch: it was not trained
        return {}
    start, end = batch.offsets[i : i + 2].tolist()
    columns = {
        n: batch.columns[n][start:end].numpy() for n in TRAINED_COLUMNS if n in batch.columns
    }
    coefs = [batch.columns[n][start:end] for n in ("coef", "sft_coef") if n in batch.columns]
    if coefs:
        columns["mask"] = np.any([c.numpy() != 0 for c in coefs], axis=0).astype(np.float32)
    return columns


def _short(value: Any, most: int | None) -> Any:
    """`value`; one that is too long, as a program's tests may be, as its text without the
    middle."""
    text = value if isinstance(value, str) else shown(value)
    return value if most is None or len(text) <= most else _cut(text, most)


def _shown(value: Any) -> Any:
    """A cell of the table."""
    return value if isinstance(value, int | float | None) else _cut(shown(value), TABLE_CHARS)


def _cut(text: str, most: int | None) -> str:
    """`text`, without its middle if it is longer than `most` characters (None: never)."""
    if most is None or len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters …\n{text[-half:]}"


# ── samples of an evaluation ──────────────────────────────────────────────────────────────────────


def validation_samples(
    groups: Iterable[Group],
    decode: Callable[..., Any],
    *,
    step: int,
    version: int,
    answer: Callable[[Trajectory], int] = lambda trajectory: last_seen(trajectory.steps),
) -> list[dict[str, Any]]:
    """One line per rollout, with `VALIDATION_TABLE_COLUMNS` and `reward_extra_info` as keys.
    `reply` is the text that was scored.

    Args:
        decode: of the model's tokenizer.
        step: optimizer steps when the evaluation was begun.
        version: policy version that is evaluated.
        answer: place of the step with that text.
    """
    return [
        {
            **_about(group, trajectory),
            "step": step,
            "version": version,
            "question": question(task_of(group)),
            "reply": str(decode(scored.response_ids, skip_special_tokens=True)),
        }
        for group in groups
        for trajectory in group.trajectories
        for scored in [trajectory.steps[answer(trajectory)]]
    ]


def question(task: Mapping[str, Any]) -> str:
    """Return the question of a task: its `question`, or the text of the last user message."""
    if "question" in task:
        return str(task["question"])
    messages = task.get("messages")
    for message in reversed(messages if isinstance(messages, list) else []):
        if isinstance(message, Mapping) and message.get("role") == "user":
            content = message.get("content")
            if isinstance(content, str):
                return content
            parts = content if isinstance(content, list) else []
            texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
            return "\n".join(text for text in texts if isinstance(text, str))
    return ""


def samples_path(run_dir: Path, step: int) -> Path:
    return run_dir / VALIDATION / f"step_{step}.jsonl"


def as_lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """One JSON object per line: keys of any type, what JSON cannot hold as its text."""
    return b"".join(map(_line, rows))


def _line(row: Any) -> bytes:
    options = orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE
    try:
        return orjson.dumps(row, default=shown, option=options)
    except TypeError:  # an integer beyond 64 bits, or half a character
        return orjson.dumps(plain(row), default=shown, option=options)


def write_evaluation(
    run_dir: Path, step: int, rows: Sequence[Mapping[str, Any]], *, add: bool = False
) -> None:
    """Write the table of an evaluation, without what somebody has deleted. A disk that takes
    nothing, or a file that is damaged, ends no run: this is for people.

    Args:
        add: to the table that is there, of whose lines those of the same trajectories go.
    """
    path, uids = samples_path(run_dir, step), {row["trajectory_uid"] for row in rows}
    try:
        before = read_samples(path) if add and path.is_file() else []
        earlier = [row for row in before if row["trajectory_uid"] not in uids]
        with TrainerCopies(run_dir).writing() as deleted:
            every = (*rows, *earlier)
            write_samples(path, (row for row in every if row["trajectory_uid"] not in deleted))
    except (OSError, DamagedFileError) as e:
        log.warning("the samples of the evaluation at step %d are not written: %s", step, e)


def evaluation_table(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """The table of an evaluation for trackers; none where it cannot be read."""
    try:
        return read_samples(samples_path(run_dir, step), VALIDATION_TABLE_ROWS)
    except (OSError, DamagedFileError) as e:  # as in `write_evaluation`: this ends no run
        log.warning("the table of the evaluation at step %d is left out: %s", step, e)
        return []


def write_samples(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """One JSON object per line; the file appears under its name when complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, b"".join(map(sealed, as_lines(rows).splitlines(keepends=True))))


def read_samples(path: Path, limit: int | None = None) -> list[dict[str, Any]]:
    """The first `limit` rows of a sample table (None: all)."""
    rows = []
    for at, line in islice(read_lines(path), limit):
        if line is None:
            why = f"the line at byte {at} is not what was written"
            raise damaged(path, why, "delete it: it is for people alone")
        rows.append(orjson.loads(line))
    return rows
