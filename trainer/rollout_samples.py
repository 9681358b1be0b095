"""This module writes some of what each batch trains, as text, to `rollouts.jsonl` in the run's
folder, so that people read what the policy did and what it was told about it.

    {"step": 12, "version": 2, "prompt": "…", "response": "…", "reward": 1.0, "advantage": 0.9,
     "reward_extra_info": {"acc": true}, …}

One line per trajectory, `trainer.rollout_samples` of them a batch, spread over its groups; `step`
is the first optimizer step that is taken on it, and `reward_extra_info` what the reward function
said beside the score. Bounded: a text is cut in its middle at `MAX_CHARS`, and a file that has
grown over `MAX_BYTES` becomes `rollouts.old.jsonl`, in the place of the last one. With `null` every
trajectory is written whole and none is ever removed (verl's `rollout_data_dir`). A step that a
resumed run does again stands twice; the later lines count.

Does not own the sample tables of validation (`validation.py`) or recordings (`recording.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from stepwell.datapool.types import Group, Trajectory
from stepwell.trainer.trajectory_metrics import task_of
from stepwell.trainer.validation import as_lines, extra_info, versions_of

log = logging.getLogger(__name__)

ROLLOUTS = "rollouts.jsonl"
OLD = "rollouts.old.jsonl"
MAX_CHARS = 20_000
MAX_BYTES = 64 << 20
TABLE = "train/samples"
"""Key of the table that trackers are given."""
COLUMNS = ("step", "version", "instance_id", "prompt", "response", "answer", "reward", "advantage")
TABLE_ROWS = 8
TABLE_CHARS = 2_000


class RolloutSamples:
    """The file of one run; see the module's docstring.

    Args:
        folder: of the run.
        tokenizer_path: turns tokens into their text.
        per_batch: trajectories of a batch; None: all, without bounds.
    """

    def __init__(self, folder: Path, tokenizer_path: Path, per_batch: int | None) -> None:
        self._folder = folder
        self._tokenizer_path = tokenizer_path
        self._per_batch = per_batch
        self._newest: list[dict[str, Any]] = []

    def take(self) -> list[dict[str, Any]]:
        """Return the samples of the newest batch, once: a table for trackers, of `COLUMNS`, with
        at most `TABLE_ROWS` rows and `TABLE_CHARS` characters in a cell."""
        rows, self._newest = self._newest[:TABLE_ROWS], []
        return [{column: _shown(row[column]) for column in COLUMNS} for row in rows]

    def write(self, step: int, groups: Sequence[Group], advantages: Tensor | None = None) -> None:
        """Append samples of the batch `groups`. A disk that takes nothing, or an answer that JSON
        cannot hold, end no run: this is for people.

        Args:
            advantages: [T], of the response tokens of its steps, in order; None: not trained.
        """
        all_of = [(g, t) for g in groups for t in g.trajectories]
        means: list[float | None] = [None] * len(all_of)
        if advantages is not None:
            tokens = [sum(len(s.response_ids) for s in t.steps) for _, t in all_of]
            means = [float(own.mean()) for own in torch.split(advantages, tokens)]
        n = len(all_of) if self._per_batch is None else min(self._per_batch, len(all_of))
        chosen = sorted({i * len(all_of) // n for i in range(n)})
        rows = [{"step": step, "advantage": means[i], **self._row(*all_of[i])} for i in chosen]
        self._newest = rows
        if not rows:
            return
        try:
            self._append(as_lines(rows))
        except (OSError, TypeError) as e:
            log.warning("the rollouts of optimizer step %d are not written: %s", step, e)

    def _append(self, lines: bytes) -> None:
        path = self._folder / ROLLOUTS
        bounded = self._per_batch is not None
        if bounded and path.is_file() and path.stat().st_size > MAX_BYTES:
            path.replace(self._folder / OLD)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(lines)

    def _row(self, group: Group, trajectory: Trajectory) -> dict[str, Any]:
        task = task_of(group)
        prompt = trajectory.steps[0].prompt_ids
        last = trajectory.steps[-1]
        most = None if self._per_batch is None else MAX_CHARS
        whole = last.token_ids
        if np.array_equal(whole[: len(prompt)], prompt):  # with what tools wrote in between
            response = self._text(whole[len(prompt) :])
        else:  # the history was rewritten on the way
            response = "\n\n".join(self._text(s.response_ids) for s in trajectory.steps)
        return {
            "version": min(versions_of(trajectory)),
            "data_source": task.get("data_source"),
            "instance_id": task.get("instance_id"),
            "prompt_uid": group.prompt_uid,
            "trajectory_uid": trajectory.trajectory_uid,
            "prompt": _cut(self._text(prompt), most),
            "response": _cut(response, most),
            "answer": _short(task.get("answer"), most),
            "reward": trajectory.reward,
            "reward_extra_info": {k: _short(v, most) for k, v in extra_info(trajectory).items()},
            "finish_reason": last.finish_reason,
            "n_steps": len(trajectory.steps),
        }

    def _text(self, ids: Any) -> str:
        return str(self._tokenizer.decode(ids))

    @cached_property
    def _tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self._tokenizer_path)


def _short(value: Any, most: int | None) -> Any:
    """`value`; one that is too long, as a program's tests may be, as its text without the
    middle."""
    text = value if isinstance(value, str) else str(value)
    return value if most is None or len(text) <= most else _cut(text, most)


def _shown(value: Any) -> Any:
    """A cell of the table."""
    return value if isinstance(value, int | float | None) else _cut(str(value), TABLE_CHARS)


def _cut(text: str, most: int | None) -> str:
    """`text`, without its middle if it is longer than `most` characters (None: never)."""
    if most is None or len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters …\n{text[-half:]}"
